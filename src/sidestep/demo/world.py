"""Worlds of programs, for the demo and for bench/: over kernel TCP or under sidestep, on one host or on two.

A world starts programs and ends them all when it is left. Programs are the same in every world; under sidestep only
their environment differs.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from sidestep.errors import Unavailable
from sidestep.testing import Connection, Sidestep, argv_under_shim

if TYPE_CHECKING:
    from sidestep.observe.namespaces import Namespace

START_S: Final = 20.0  # patience for a program to come up, generous for a loaded machine
END_S: Final = 20.0  # patience for a program to end once its work is done
LOAD_S: Final = 40.0  # patience for a load generator
UNSEEN: Final = "the run ended before it could be looked at"

_OPENED: Final = "reach_opened"  # counters
_REFUSED: Final = "reach_refused"

_SEARCH_PATH: Final = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # nginx is there, for users as well
_PACKAGES: Final = {
    "redis-benchmark": "redis-tools", "nginx": "nginx-light", "cc": "gcc", "go": "golang-go",
    "rstream": "rdmacm-utils", "ib_send_lat": "perftest", "ib_send_bw": "perftest",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Evidence:
    """The connections of a server while they were open under sidestep."""

    ends_promoted: int
    ends_wanted: int
    why_not: tuple[str, ...] = ()  # states and reasons of the ends that were not promoted

    @property
    def ok(self) -> bool:
        """True when both ends of every connection were promoted."""
        return self.ends_promoted >= self.ends_wanted


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a work in a world; `evidence` is None over kernel TCP."""

    value: float  # value in the work's unit
    beside: dict[str, float] = field(default_factory=dict)  # other figures
    evidence: Evidence | None = None
    equal: bool = True  # true if programs received the bytes that were sent


class Program(subprocess.Popen[str]):
    """A program under way: its output by line, its complaints kept for the error that names it."""

    def __init__(self, argv: list[str], name: str, errors: IO[str], stop: signal.Signals, **options: Any) -> None:
        self.name, self._errors, self._stop = name, errors, stop
        pipe = subprocess.PIPE
        super().__init__(argv, stdin=pipe, stdout=pipe, stderr=errors, text=True, **options)

    def fault(self, what: str) -> Unavailable:
        """An error that says what this program did and what it complained of."""
        self._errors.seek(0)
        complaint = " | ".join(self._errors.read().strip().splitlines()[-3:])
        return Unavailable(f"{self.name} {what}" + (f": {complaint}" if complaint else ""))

    def early_end(self) -> Unavailable:
        """The error for a program that has ended, or is about to, when it should not have."""
        try:
            code = self.wait(END_S)
        except subprocess.TimeoutExpired:
            return self.fault("closed its output and runs on")
        return self.fault(f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}")

    def expect(self, word: str, timeout_s: float) -> str:
        """Text behind `word` on the next line of the program; Unavailable when that does not come."""
        assert self.stdout is not None, "it was started with a pipe"
        if not select.select([self.stdout], [], [], timeout_s)[0]:
            raise self.fault(f"wrote nothing for {timeout_s:g} s")
        if not (line := self.stdout.readline()):
            raise self.early_end()
        if line.split()[:1] != [word]:
            raise self.fault(f"wrote {line!r} in place of {word!r}")
        return line.removeprefix(word).strip()

    def finish(self, timeout_s: float = END_S) -> str:
        """Closes its input, waits for its end and returns its remaining output; Unavailable when it fails."""
        try:
            output, _ = self.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise self.fault(f"did not end within {timeout_s:g} s") from error
        if self.returncode:
            raise self.early_end()
        return output

    def result(self, timeout_s: float = END_S) -> dict[str, Any]:
        """The JSON object on its last line of output, at its end."""
        output = self.finish(timeout_s)
        try:
            result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
        except (IndexError, ValueError) as error:
            raise self.fault(f"gave no figures: {output!r}") from error
        return result

    def stop(self) -> None:
        """Ends it, by force where asking does not help."""
        with self:  # closes its streams
            self.send_signal(self._stop)
            try:
                self.wait(END_S)
            except subprocess.TimeoutExpired:
                self.kill()


@dataclass(frozen=True, slots=True)
class Site:
    """Place of one end of a connection."""

    address: str = "127.0.0.1"
    sidestep: Sidestep | None = None  # provider; None: over kernel TCP
    first: bool = False  # true if its connections begin with SDP, as its policy says
    namespace: Namespace | None = None  # namespace; None: on this very host

    def inside(self) -> AbstractContextManager[None]:
        """Context in which started programs run at this place."""
        return self.namespace.inside() if self.namespace else nullcontext()

    def argv(self, argv: list[str]) -> list[str]:
        """The command that starts a program here."""
        return argv_under_shim(argv) if self.sidestep else argv


PLAIN: Final = Site()


class World(ExitStack):
    """Place for programs: of one site, or of a server's and a client's.

    Programs use the CPUs of one of the sets in `cpus`, or any.
    """

    def __init__(
        self, name: str, server: Site = PLAIN, client: Site | None = None, *, cpus: Sequence[Collection[int]] = ()
    ) -> None:
        super().__init__()
        self.name = name
        self.server, self.client = server, client or server
        self.address = server.address
        self.providers = list(dict.fromkeys(site.sidestep for site in (server, self.client) if site.sidestep))
        self._cpus = cpus
        self._before = self._counted_first()

    def start(
        self, argv: list[str], site: Site | None = None, *, lane: int = 0, stop: signal.Signals = signal.SIGTERM,
        **options: Any,
    ) -> Program:  # fmt: skip
        """Starts a program where clients are, or at `site`; it ends, at the latest, with this world's block.

        Programs of one `lane` use the same set of CPUs. `options` are as for subprocess.Popen.
        """
        site = site or self.client
        name = " ".join(Path(word).name for word in (argv[1:4] if argv[0] == sys.executable else argv[:1]))
        pin = partial(os.sched_setaffinity, 0, self._cpus[lane % len(self._cpus)]) if self._cpus else None
        env = site.sidestep.env() if site.sidestep else plain_environment()
        argv = site.argv([_found(argv[0]) or argv[0], *argv[1:]])
        errors = self.enter_context(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115 - as it says
        self._before = self._counted_first()
        with site.inside():  # safe: this program has no threads
            program = Program(argv, name, errors, stop, env=env, preexec_fn=pin, **options)
        self.callback(program.stop)
        return program

    def serve(self, argv: list[str], port: int, timeout_s: float = START_S, **options: Any) -> Program:
        """Starts a server and returns it once `port` accepts connections; Unavailable when it does not."""
        program = self.start(argv, self.server, **options)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if program.poll() is not None:
                raise program.early_end()
            with self.client.inside(), socket.socket() as probe:
                if probe.connect_ex((self.address, port)) == 0:
                    return program
            time.sleep(0.02)
        raise program.fault(f"does not listen on port {port} after {timeout_s:g} s")

    def counted(self, *_programs: Program) -> AbstractContextManager[None]:
        """Context for the work of these programs; benchmarks count their CPU time in it."""
        return nullcontext()

    def watched(
        self, server: Program, client: Program, port: int, connections: int, from_s: float, look_s: float = 0.1
    ) -> tuple[str, Evidence | None]:
        """Output of a client to its end, and the evidence, by looks from `from_s` on, until all is promoted."""
        evidence = Evidence(0, 2 * connections, (UNSEEN,)) if self.providers else None
        time.sleep(from_s)
        while client.poll() is None:
            evidence = self.evidence(port, 2 * connections, server, client)
            if evidence is None or evidence.ok:
                break
            time.sleep(look_s)
        with self.counted(server, client):  # looks have a cost of their own
            return client.finish(LOAD_S), evidence

    def evidence(self, port: int, ends: int, *_programs: Program) -> Evidence | None:
        """The connections of the server at `port`, now; None over kernel TCP."""
        if not self.providers:
            return None
        if self.client.first:
            counted = self._counted_first() - self._before
            opened = counted.pop(_OPENED, 0)
            why = tuple(
                f"{number} connections came to TCP: {name.partition('{')[2][:-1]}"
                for name, number in sorted(counted.items())
            )
            return Evidence(0 if why else min(2 * opened, ends), ends, why)
        listed = [c for sidestep in self.providers for c in sidestep.connections()]
        return self.judged([c for c in listed if f"{port}" in (_port(c.local), _port(c.remote))], ends)

    def judged(self, found: list[Connection], ends: int) -> Evidence:
        """Evidence of these connections, of which so many ends are to be promoted."""
        why_not = {f"{c.state}: {c.why}" if c.why else c.state for c in found if not c.promoted}
        if not found:
            why_not = {"sidestep sees no such connection"}
        return Evidence(sum(c.promoted for c in found), ends, tuple(sorted(why_not)))

    def _counted_first(self) -> Counter[str]:
        """Numbers of the client's connections that began with SDP, and, by errno, that were to and did not."""
        if not self.client.first or self.client.sidestep is None:
            return Counter()
        counters = self.client.sidestep.status()["counters"]
        return Counter({name: count for name, count in counters.items() if name.startswith((_OPENED, _REFUSED))})


def plain_environment() -> dict[str, str]:
    """This process's environment without sidestep."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SIDESTEP_")}
    preloaded = env.pop("LD_PRELOAD", "").replace(":", " ").split()
    others = [entry for entry in preloaded if Path(entry).name != "libsidestep.so"]
    return env | ({"LD_PRELOAD": " ".join(others)} if others else {})


def program_missing(name: str) -> str | None:
    """Reason why a program cannot be used, with the remedy; None when it is installed."""
    return None if _found(name) else f"{name} is not installed; apt-get install {_PACKAGES.get(name, name)}"


def _found(program: str) -> str | None:
    return shutil.which(program, path=_SEARCH_PATH)


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]
