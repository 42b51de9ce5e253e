"""A stage for real programs: a server side and a client side, each with or without the shim, and a look at the path.

A scenario runs in four modes. `native` runs neither side under sidestep and shows that the scenario itself is sound;
`both` must end up promoted; `server-only` and `client-only` must give the same results with nothing promoted. Programs
never get a fixed port, and every wait is for a condition, up to a deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from sidestep.observe.connections import ended
from sidestep.testing import Connection, Sidestep, argv_under_shim, free_port

DEADLINE_S: Final = 100.0  # for one condition; only a broken run waits that long
NUDGE_FIRST_S: Final = 0.05  # before the first nudge of a connection that is not yet where it should be
NUDGE_GROWTH: Final = 1.2  # each pause is that much longer: some 33 nudges at most before the deadline
HOST: Final = "127.0.0.1"
MOVED: Final = frozenset({"attached", "promoted"})
PROGRAMS: Final = Path(__file__).resolve().parent / "programs"
SEARCH_PATH: Final = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

Answer = TypeVar("Answer")


class Mode(StrEnum):
    """Which sides run under sidestep."""

    NATIVE = "native"
    BOTH = "both"
    SERVER_ONLY = "server-only"
    CLIENT_ONLY = "client-only"


def wait_until(condition: Callable[[], Answer], what: str, deadline_s: float = DEADLINE_S) -> Answer:
    """Ask `condition` until its answer is true, and return that answer."""
    end = time.monotonic() + deadline_s
    while not (answer := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s:g} s in vain for {what}")
        time.sleep(0.005)
    return answer


def is_listening(port: int) -> bool:
    """Whether some socket listens on `port`. Asks the kernel: a probing connection could use up a one-shot server."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(table, encoding="ascii") as rows:
            for row in rows:
                words = row.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    return True
    return False


def payload(size: int, seed: int = 1) -> bytes:
    """Reproducible bytes without a pattern that a lost or doubled block could hide in."""
    return random.Random(seed).randbytes(size)


def sha256(data: bytes | bytearray) -> str:
    """Checksum of `data`."""
    return hashlib.sha256(data).hexdigest()


LOG: Final = -100  # as `stdout`: into the program's log, beside its standard error


def all_of(*calls: Callable[[], object]) -> Callable[[], None]:
    """One function that calls them all."""

    def call() -> None:
        for one in calls:
            one()

    return call


class Program:
    """A running program in its own session: lines can be awaited, and nothing of it outlives `close`."""

    def __init__(self, argv: Sequence[str], env: dict[str, str], workdir: Path, label: str, stdin: int | IO[bytes],
                 stdout: int | IO[bytes], log: Path) -> None:  # fmt: skip
        self.argv = list(argv)
        self.label = label
        self.log = log
        with log.open("wb") as errors:
            self.popen = subprocess.Popen(
                self.argv, env=env, cwd=workdir, stdin=stdin, stdout=errors if stdout == LOG else stdout,
                stderr=errors, start_new_session=True,
            )  # fmt: skip
        self._unread = b""

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its session and process group."""
        return self.popen.pid

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to its standard input."""
        assert self.popen.stdin is not None, f"{self.label} has no stdin pipe"
        return self.popen.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe from its standard output."""
        assert self.popen.stdout is not None, f"{self.label} has no stdout pipe"
        return self.popen.stdout

    def complaint(self, why: str) -> str:
        """A failure message with the end of the program's log."""
        tail = self.log.read_bytes()[-4000:].decode(errors="replace")
        return f"{self.label}: {why}\n$ {' '.join(self.argv)}\n{tail}"

    def read(self, size_max: int, deadline_s: float = DEADLINE_S) -> bytes:
        """Some bytes of standard output, b"" at its end; raises AssertionError when none come in time."""
        with selectors.DefaultSelector() as ready:
            ready.register(self.stdout, selectors.EVENT_READ)
            if not ready.select(deadline_s):
                raise AssertionError(self.complaint(f"wrote nothing for {deadline_s:g} s"))
        return os.read(self.stdout.fileno(), size_max)

    def listens(self, port: int) -> bool:
        """Wait until the program listens on `port`; False if it ends first."""
        wait_until(lambda: is_listening(port) or self.popen.poll() is not None, f"{self.label} to listen")
        return self.popen.poll() is None

    def line(self, deadline_s: float = DEADLINE_S) -> str:
        """The next line of standard output; raises AssertionError at its end."""
        while b"\n" not in self._unread:
            piece = self.read(65536, deadline_s)
            if not piece:
                raise AssertionError(self.complaint(f"ended; last words {self._unread!r}"))
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def take(self, size: int) -> bytes:
        """`size` bytes of standard output, less only at its end."""
        data = bytearray()
        while len(data) < size and (piece := self.read(size - len(data))):
            data += piece
        return bytes(data)

    def until(self, word: str, deadline_s: float = DEADLINE_S) -> str:
        """Read lines up to and including the first that holds `word`."""
        while word not in (line := self.line(deadline_s)):
            pass
        return line

    def tell(self, line: str) -> None:
        """Write a line to standard input."""
        self.stdin.write(line.encode() + b"\n")
        self.stdin.flush()

    def nudge(self) -> None:
        """Make a program that lingers (programs/gate.py) exchange a little on its connections."""
        self.tell("nudge")
        assert self.line() == "nudged", self.complaint("did not answer a nudge")

    def rest(self, deadline_s: float = DEADLINE_S) -> bytes:
        """Close standard input, read standard output to its end and wait for exit status 0."""
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        data = bytearray(self._unread)
        self._unread = b""
        if self.popen.stdout is not None:
            while piece := self.read(1 << 20, deadline_s):
                data += piece
        self.expect_exit(deadline_s=deadline_s)
        return bytes(data)

    def expect_exit(self, status: int = 0, deadline_s: float = DEADLINE_S) -> None:
        """Wait for the program to end with `status`."""
        try:
            self.popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.complaint(f"did not end in {deadline_s:g} s")) from None
        assert self.popen.returncode == status, self.complaint(f"exit status {self.popen.returncode}, not {status}")

    def stop(self, how: signal.Signals = signal.SIGTERM, deadline_s: float = 40.0) -> int:
        """Signal the program itself, wait for its end, return its status.

        The deadline is beyond the thirty seconds that gunicorn gives a worker whom SIGTERM met before it was ready.
        """
        if self.popen.poll() is None:
            self.popen.send_signal(how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(deadline_s)
        self.close()
        return self.popen.returncode

    def close(self) -> None:
        """Kill whatever is left of its process group and reap the leader."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # unsent input of a program that is gone
                    pipe.close()


class Watch:
    """Looks at the connections again and again while a program runs that gives the test no say in when it ends."""

    def __init__(self, look: Callable[[], list[Connection]]) -> None:
        self._look = look
        self._done = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seen: dict[tuple[int, int, str, str], Connection] = {}  # last look at each end
        self.promoted: dict[str, int] = {}  # segment -> ends seen promoted at one time

    def _run(self) -> None:
        try:
            while not self._done.wait(0.01):
                self._note(self._look())
        except Exception as error:  # handed to the test by `finish`
            self._error = error

    def _note(self, rows: list[Connection]) -> None:
        ends: dict[str, int] = {}
        for row in rows:
            key = (row.pid, row.fd, row.local, row.remote)
            if key not in self.seen or row.state in MOVED or self.seen[key].state not in MOVED:
                self.seen[key] = row
            if row.state == "promoted" and row.segment:
                ends[row.segment] = ends.get(row.segment, 0) + 1
        for segment, count in ends.items():
            self.promoted[segment] = max(count, self.promoted.get(segment, 0))

    def start(self) -> None:
        """Begin looking."""
        self._thread.start()

    def finish(self) -> None:
        """Stop looking; raises what the looking raised."""
        self._done.set()
        self._thread.join()
        if self._error:
            raise self._error


class Stage:
    """Runs the two sides of a scenario in one mode and says by which path their connections went."""

    def __init__(self, mode: Mode, workdir: Path, sidestep: Sidestep | None) -> None:
        self.mode = mode
        self.workdir = workdir
        self._sidestep = sidestep
        self._programs: list[Program] = []

    # --- programs ---------------------------------------------------------------------------------------------------

    def _shimmed(self, side: str) -> bool:
        return (
            side
            in {
                Mode.NATIVE: (),
                Mode.BOTH: ("server", "client"),
                Mode.SERVER_ONLY: ("server",),
                Mode.CLIENT_ONLY: ("client",),
            }[self.mode]
        )

    def argv(self, side: str, argv: Sequence[str]) -> list[str]:
        """What is executed for a program on `side` ("server" or "client")."""
        return argv_under_shim(argv) if self._shimmed(side) else [*argv]

    def env(self, side: str, **extra: str) -> dict[str, str]:
        """Its environment."""
        base = dict(os.environ)
        if self._shimmed(side):
            assert self._sidestep is not None
            base = dict(self._sidestep.env())
        base["PATH"] = SEARCH_PATH
        base["PYTHONUNBUFFERED"] = "1"
        return base | extra

    def start(self, side: str, argv: Sequence[str], *, stdin: int | IO[bytes] = subprocess.DEVNULL,
              stdout: int | IO[bytes] = LOG, **extra_env: str) -> Program:  # fmt: skip
        """Start a program on `side`; its standard error, and its output unless piped, go to a log in the workdir."""
        label = f"{side} {Path(argv[0]).name}"
        log = self.workdir / f"{len(self._programs):02}-{label.replace(' ', '-')}.log"
        program = Program(self.argv(side, argv), self.env(side, **extra_env), self.workdir, label, stdin, stdout, log)
        self._programs.append(program)
        return program

    def serve(
        self, argv_for: Callable[[int], Sequence[str]], *, side: str = "server", **kw: Any
    ) -> tuple[Program, int]:
        """Start a server on a free port and wait until it listens; tries another port where one was taken meanwhile."""
        for _ in range(5):
            port = free_port()
            server = self.start(side, argv_for(port), **kw)
            if server.listens(port):
                return server, port
        raise AssertionError(server.complaint("cannot be started"))

    def converse(self, side: str, argv: Sequence[str], **kw: Any) -> Program:
        """Start a program with pipes to its standard input and from its standard output."""
        return self.start(side, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **kw)

    def python(self, side: str, script: str, *args: object, **kw: Any) -> Program:
        """Start one of our own Python programs, with pipes."""
        return self.converse(side, [sys.executable, str(PROGRAMS / script), *map(str, args)], **kw)

    def run(self, side: str, argv: Sequence[str], deadline_s: float = DEADLINE_S, **kw: Any) -> bytes:
        """Run a program to its end; the result is its standard output, its exit status must be 0."""
        return self.start(side, argv, stdout=subprocess.PIPE, **kw).rest(deadline_s)

    def close(self) -> None:
        """End every program, clients first."""
        for program in reversed(self._programs):
            program.close()

    # --- the path ---------------------------------------------------------------------------------------------------

    def connections(self) -> list[Connection]:
        """The connections that the shim knows of."""
        return [] if self._sidestep is None else self._sidestep.connections()

    def _of(self, port: int) -> list[Connection]:
        return [c for c in self.connections() if port in (port_of(c.local), port_of(c.remote))]

    def check_ended(self, port: int) -> None:
        """Waits until no connection to `port` is shown as live."""
        wait_until(lambda: not self._of(port), f"connections to {port} to end")

    def check_path(
        self, port: int, count: int = 1, *, nudge: Callable[[], object] | None = None, ring_bytes_min: int = 1
    ) -> None:
        """Look at the live connections to `port`. In mode `both`, `count` of them get promoted and have carried at
        least `ring_bytes_min` bytes each; with one side only, the shim sees as many and none has left TCP.

        A connection on which nobody makes a call stays where it is; `nudge` makes both ends exchange a little.
        """
        if self.mode is Mode.NATIVE:
            return
        if self.mode is Mode.BOTH:
            self._wait_rows(port, lambda rows: len(whole_channels(rows, ring_bytes_min)) >= count,
                            f"{count} promoted connections", nudge)  # fmt: skip
            return
        self._wait_rows(port, lambda rows: len(rows) >= count, f"{count} connections under the shim", None)
        assert_on_tcp(self._of(port))

    def _wait_rows(
        self, port: int, enough: Callable[[list[Connection]], bool], what: str, nudge: Callable[[], object] | None
    ) -> None:
        end = time.monotonic() + DEADLINE_S
        pause_s = NUDGE_FIRST_S
        while True:
            patience = end if nudge is None else min(end, time.monotonic() + pause_s)
            pause_s *= NUDGE_GROWTH
            while not enough(rows := self._of(port)):
                if time.monotonic() > end:
                    raise AssertionError(f"waited {DEADLINE_S:g} s in vain for {what}\n{describe(rows)}")
                if time.monotonic() > patience and nudge is not None:
                    nudge()
                    break
                time.sleep(0.005)
            else:
                return

    def ring_share(self, port: int) -> float:
        """Of all bytes of the connections to `port`, over or not, as both ends count them: those that went by ring."""
        assert self._sidestep is not None
        rows = [*self._of(port), *(one.connection for one in ended(self._sidestep.socket))]
        ways = [way for row in rows if port in (port_of(row.local), port_of(row.remote)) for way in (row.tx, row.rx)]
        by_ring = sum(way.ring_bytes for way in ways)
        return by_ring / max(1, by_ring + sum(way.tcp_bytes for way in ways))

    @contextlib.contextmanager
    def watching(self, port: int, count: int = 1) -> Iterator[Watch]:
        """While the block runs, look at the connections to `port`; afterwards the same rules as in `check_path` hold
        over all that was seen."""
        watch = Watch(lambda: self._of(port))
        if self.mode is Mode.NATIVE:
            yield watch
            return
        watch.start()
        try:
            yield watch
        finally:
            watch.finish()
        seen = list(watch.seen.values())
        if self.mode is Mode.BOTH:
            whole = [segment for segment, ends in watch.promoted.items() if ends >= 2]
            assert len(whole) >= count, f"{len(whole)} of {count} connections seen promoted\n{describe(seen)}"
        else:
            assert len(seen) >= count, f"the shim saw {len(seen)} of {count} connections\n{describe(seen)}"
            assert_on_tcp(seen)


def port_of(address: str) -> int:
    """Port of "addr:port"."""
    return int(address.rpartition(":")[2] or 0)


def whole_channels(rows: Sequence[Connection], ring_bytes_min: int) -> set[str]:
    """Segments of which both ends are promoted and that carried at least `ring_bytes_min` bytes."""
    ends: dict[str, list[Connection]] = {}
    for row in rows:
        if row.state == "promoted" and row.segment:
            ends.setdefault(row.segment, []).append(row)
    return {
        segment
        for segment, pair in ends.items()
        if len(pair) >= 2 and sum(end.rx.ring_bytes for end in pair) >= ring_bytes_min
    }


def assert_on_tcp(rows: Sequence[Connection]) -> None:
    """Nothing of `rows` has touched a ring."""
    for row in rows:
        moved = row.state in MOVED or row.tx.ring_bytes or row.rx.ring_bytes
        assert not moved, f"left TCP though its peer is not under sidestep\n{describe([row])}"


def describe(rows: Sequence[Connection]) -> str:
    """The rows as text for a failure message."""
    lines = [
        f"  {c.program}[{c.pid}] fd {c.fd} {c.local} -> {c.remote} {c.state} {c.reason or ''} {c.segment or ''}"
        f" tx tcp {c.tx.tcp_bytes} ring {c.tx.ring_bytes}, rx tcp {c.rx.tcp_bytes} ring {c.rx.ring_bytes}"
        for c in rows
    ]
    return "\n".join(lines) or "  (the shim reports no connection)"


@contextlib.contextmanager
def staged(mode: Mode, workdir: Path) -> Iterator[Stage]:
    """A stage in `mode`; every program it started is gone afterwards, and so is its provider."""
    with contextlib.ExitStack() as stack:
        sidestep = None
        if mode is not Mode.NATIVE:
            sidestep = stack.enter_context(Sidestep(promote_after="0"))
        stage = Stage(mode, workdir, sidestep)
        stack.callback(stage.close)
        yield stage
