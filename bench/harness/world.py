"""Where a benchmark runs: over kernel TCP, spread or on one CPU, or under sidestep.

A world starts programs and ends them all when it is left. The programs are the same in every world; under sidestep only
their environment differs.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from harness import machine
from harness.machine import maps_library
from harness.model import BenchError, Evidence

if TYPE_CHECKING:
    from sidestep.testing import Sidestep

END_S = 10.0  # a program that has been told to end and runs on is killed
LIBRARY = "libsidestep.so"
WINDOW_LEAST_S = 0.02  # shorter than a turn of a busy program, CPU time says nothing
BUSY = ["sh", "-c", "while :; do :; done"]  # uses a CPU, at nice 0


class Program:
    """A started program, its words on standard output, and its complaints."""

    def __init__(self, process: subprocess.Popen[str], name: str, errors: IO[str], stop: signal.Signals) -> None:
        self.process, self.name, self._errors, self._stop = process, name, errors, stop

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def complaint(self) -> str:
        """The last lines of its standard error."""
        self._errors.seek(0)
        return " | ".join(self._errors.read().strip().splitlines()[-3:]) or "no complaint"

    def ending(self) -> str:
        """How it ended, in words."""
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"closed its output and runs on: {self.complaint()}"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how}: {self.complaint()}"

    def running(self) -> bool:
        """True until it has ended."""
        return self.process.poll() is None

    def line(self, timeout_s: float) -> str:
        """Its next line of output."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            raise BenchError(f"{self.name} {self.ending() if ready else f'is silent after {timeout_s:g} s'}")
        return line.strip()

    def expect(self, word: str, timeout_s: float) -> str:
        """What follows `word` on its next line."""
        line = self.line(timeout_s)
        if line.split(" ")[0] != word:
            raise BenchError(f"{self.name} said {line!r} where {word!r} was due")
        return line.removeprefix(word).strip()

    def finish(self, timeout_s: float) -> str:
        """Ends its input, waits for it and returns the rest of its output."""
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"{self.name} did not end within {timeout_s:g} s: {self.complaint()}") from error
        if self.process.returncode:
            raise BenchError(f"{self.name} {self.ending()}")
        return output

    def stop(self) -> None:
        """Ends it, by force where asking does not help."""
        if self.running():
            self.process.send_signal(self._stop)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self._errors.close()


@dataclass(frozen=True)
class _Mark:
    """CPU time up to a moment, in seconds: of each process of the row, and of all busy programs beside it."""

    at: float
    row: dict[int, float]
    busy: float

    @classmethod
    def now(cls, row: Iterable[int], busy: Iterable[int]) -> Self:
        at = time.monotonic()
        return cls(at, {pid: machine.process_cpu_s(pid) for pid in row}, sum(map(machine.process_cpu_s, busy)))


class World:
    """Kernel TCP. With `one_cpu` the programs of a lane share one CPU; with `cpus` none leaves the first few.

    `load` endless shell loops run beside it.
    """

    def __init__(self, name: str, *, one_cpu: bool = False, cpus: int | None = None, load: int = 0) -> None:
        self.name, self.load = name, load
        self._one_cpu = one_cpu
        self._cpus = sorted(os.sched_getaffinity(0))[:cpus]
        self._limited = cpus is not None
        self._stack = ExitStack()
        self._busy: list[Program] = []
        self._begun: _Mark | None = None
        self.spent: dict[str, float] = {}  # between begin() and end(): CPUs used by the row's processes and beside them

    address = "127.0.0.1"  # of what serves

    def __enter__(self) -> Self:
        for number in range(self.load):
            self._busy.append(self.start(BUSY, lane=number, stranger=True))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def environment(self) -> dict[str, str]:
        """The environment of the programs: this one's, without any trace of sidestep."""
        return {k: v for k, v in os.environ.items() if k != "LD_PRELOAD" and not k.startswith("SIDESTEP_")}

    def argv(self, argv: list[str]) -> list[str]:
        """What is executed in it."""
        return argv

    def start(
        self, argv: list[str], *, lane: int = 0, cwd: Path | None = None, stop: signal.Signals = signal.SIGTERM,
        stranger: bool = False,
    ) -> Program:  # fmt: skip
        """Starts a program; it is ended when the world is left.

        `lane` spreads pairs over pinned CPUs; a `stranger` is not under sidestep in any world.
        """
        name = Path(argv[0]).name
        argv = argv if stranger else self.argv(argv)
        if self._one_cpu:
            argv = ["taskset", "-c", str(self._cpus[lane % len(self._cpus)]), *argv]
        elif self._limited:
            argv = ["taskset", "-c", ",".join(map(str, self._cpus)), *argv]
        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed with the program
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=cwd,
                env=World.environment(self) if stranger else self.environment(),
            )  # fmt: skip
        except OSError:
            errors.close()
            raise
        program = Program(process, name, errors, stop)
        self._stack.callback(program.stop)
        return program

    def serve(self, argv: list[str], *, stop: signal.Signals = signal.SIGTERM) -> Program:
        """Starts a program where servers are."""
        return self.start(argv, stop=stop)

    def begin(self, *programs: Program, after_s: float = 0.0) -> None:
        """Begins to count the CPU time of these programs, with what they have started, in so many seconds."""
        at = time.monotonic() + after_s
        pids = machine.family(program.pid for program in programs)
        provider = self.provider_pid()
        if provider is not None:
            pids |= machine.family([provider])
        time.sleep(max(at - time.monotonic(), 0))
        self._begun = _Mark.now(pids, [program.pid for program in self._busy])

    def end(self) -> None:
        """Ends it and keeps the count in `spent`."""
        if (begun := self._begun) is None:
            return
        now = _Mark.now(begun.row, [program.pid for program in self._busy])
        took = now.at - begun.at
        self._begun, self.spent = None, {}
        if took < WINDOW_LEAST_S:
            return
        if self._busy:
            self.spent["busy_cpus"] = (now.busy - begun.busy) / took
        used = [now.row[pid] - before for pid, before in begun.row.items()]
        if min(used, default=0) >= 0:  # what has ended since has no clock any more
            self.spent["cpus"] = sum(used) / took

    def beside(self) -> AbstractContextManager[object]:
        """Sockets that are made in it reach what serves."""
        return nullcontext()

    def evidence(self, port: int, ends: int, programs: list[Program]) -> Evidence | None:
        """What is known of the connections of the server at `port`; None over kernel TCP."""
        del port, ends
        for program in programs:
            if maps_library(program.pid, LIBRARY):
                raise BenchError(f"{program.name} has {LIBRARY} loaded in a run over kernel TCP")
        return None

    def provider_pid(self) -> int | None:
        """The provider's process; None over kernel TCP."""
        return None


class SidestepWorld(World):
    """Under sidestep, with a provider of its own."""

    def __init__(self, *, promote_after: str | None, cpus: int | None = None, load: int = 0) -> None:
        super().__init__("sidestep", cpus=cpus, load=load)
        self._promote_after = promote_after
        self._sidestep: Sidestep | None = None

    def __enter__(self) -> Self:
        from sidestep import testing

        self._sidestep = self._stack.enter_context(testing.Sidestep(promote_after=self._promote_after))
        return super().__enter__()

    @property
    def _running(self) -> Sidestep:
        assert self._sidestep is not None, "the world is not entered"
        return self._sidestep

    def environment(self) -> dict[str, str]:
        """The environment `sidestep run` would give."""
        return self._running.env()

    def argv(self, argv: list[str]) -> list[str]:
        """As `sidestep run` starts it."""
        from sidestep import testing

        return testing.argv_under_shim(argv)

    def provider_pid(self) -> int | None:
        """The provider's process."""
        return self._running.provider_pid

    def evidence(self, port: int, ends: int, programs: list[Program]) -> Evidence | None:
        """What `ss` says of both ends of the connections of the server at `port`, now.

        Where no end is to be promoted, the programs must at least have the library loaded.
        """
        for program in programs if not ends else ():
            if not maps_library(program.pid, LIBRARY):
                raise BenchError(f"{program.name} has not loaded {LIBRARY}")
        suffix = f":{port}"
        found = [c for c in self._running.connections() if c.local.endswith(suffix) or c.remote.endswith(suffix)]
        promoted = [c for c in found if c.state == "promoted"]
        ring = sum(c.tx.ring_bytes for c in promoted)
        total = ring + sum(c.tx.tcp_bytes for c in promoted)
        why_not = {f"{c.state}: {c.why or c.reason or 'no reason given'}" for c in found if c.state != "promoted"}
        if not found:
            why_not = {"ss shows no such connection"}
        counts = {
            "messages": sum(c.tx.ring_msgs + c.tx.tcp_msgs for c in found),
            "doorbells": sum(c.doorbells for c in found), "sleeps": sum(c.sleeps for c in found),
            "spins_won": sum(c.spins_won for c in found), "spins_lost": sum(c.spins_lost for c in found),
        }  # fmt: skip
        return Evidence(len(promoted), ends, ring / total if total else 0.0, tuple(sorted(why_not)), counts)


def sidestep_missing() -> str | None:
    """Why nothing can run under sidestep here; None when it can."""
    try:
        import sidestep
        from sidestep import testing  # noqa: F401  # asked for its presence
        from sidestep.errors import SidestepError
    except ImportError as error:
        return f"{error}; install sidestep with pip into {sys.prefix}"
    try:
        sidestep.native_library()
    except SidestepError as error:
        return str(error)
    return None


def program_missing(name: str) -> str | None:
    """Why a program cannot be used, with the remedy; None when it is installed."""
    if shutil.which(name):
        return None
    packages = {"redis-benchmark": "redis-tools", "taskset": "util-linux", "cc": "gcc", "go": "golang-go"}
    return f"{name} is not installed; apt-get install {packages.get(name, name)}"


def wait_for_port(world: World, program: Program, port: int, timeout_s: float = 20.0) -> None:
    """Returns once `port` accepts connections; raises BenchError when the program ends or the time is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not program.running():
            raise BenchError(f"{program.name} {program.ending()}")
        with world.beside(), socket.socket() as probe:
            if probe.connect_ex((world.address, port)) == 0:
                return
        time.sleep(0.02)
    raise BenchError(f"{program.name} does not listen on port {port} after {timeout_s:g} s: {program.complaint()}")
