"""Starts the two programs of load.c and reads their ledger."""

from __future__ import annotations

import errno
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common import PATIENCE_S
from hosts import Host

from sidestep.testing import Connection, Sidestep

ENDED: Final = 1
THREADS: Final = 8
EACH: Final = 1000  # connections a thread has room for in the ledger; no test gets that far
_SIDE: Final = struct.Struct("=QQQIIIIQ")
FAULTS: Final = {errno.ECONNRESET, errno.EPIPE}  # what TCP tells of a peer that is gone


def reached(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether the condition comes to hold in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.02)  # between two looks at a file that other programs write: nothing announces a change of it
    return True


@dataclass(frozen=True, slots=True)
class Side:
    """What one end of a connection has written down (struct side in load.c)."""

    submitted: int  # bytes handed to send()
    taken: int  # bytes that send() took
    received: int
    wrong: int
    read_end: int  # ENDED, an errno, or 0 while it reads
    write_end: int
    done: int
    goal: int

    @property
    def begun(self) -> bool:
        """Whether it has come so far as to write anything down."""
        return any((self.submitted, self.received, self.read_end, self.write_end, self.done, self.goal))


@dataclass(frozen=True, slots=True)
class Entry:
    """Both ends of one connection."""

    id: int
    driver: Side
    server: Side


def carried(found: list[Connection]) -> bool:
    """Whether a ring has carried bytes of a connection both ways."""
    return any(c.tx.ring_bytes and c.rx.ring_bytes for c in found)


class Load:
    """A server and a driver with a common ledger; over kernel TCP without a `sidestep`.

    `places` are the hosts of the driver and of the server, if they have some of their own.
    """

    def __init__(
        self,
        program: Path,
        directory: Path,
        sidestep: Sidestep | None,
        env: Mapping[str, str] | None = None,
        places: tuple[Host, Host] | tuple[None, None] = (None, None),
    ) -> None:
        self._program, self._ledger = program, directory / "ledger"
        self._env = env if sidestep is None or env is not None else sidestep.env()
        self._driver_host: Host | None = places[0]
        server_host = places[1]
        self._address = () if server_host is None else (server_host.address,)
        self._ledger.unlink(missing_ok=True)
        self.server = self._start(
            server_host, "serve", self._ledger, *self._address, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.server.stdout is not None
        self.port = int(self.server.stdout.readline())
        self.driver: subprocess.Popen[bytes] | None = None

    def _start(self, host: Host | None, *words: object, **options: Any) -> subprocess.Popen[bytes]:
        argv = [str(self._program), *map(str, words)]
        if host is not None:
            return host.popen(argv, **options)
        return subprocess.Popen(argv, env=self._env, **options)

    def drive(self, seed: int, *, most: int = 3_000_000) -> subprocess.Popen[bytes]:
        """Starts the driver: eight threads make connections, one after the other, until `enough`."""
        words = ("drive", self._ledger, self.port, seed, THREADS, EACH, most, *self._address)
        self.driver = self._start(self._driver_host, *words, stdin=subprocess.PIPE)
        return self.driver

    def enough(self, timeout_s: float = PATIENCE_S) -> list[Entry]:
        """Lets both finish what was begun; returns the ledger."""
        assert self.driver is not None
        assert self.driver.stdin is not None
        deadline_s = time.monotonic() + timeout_s
        self.driver.stdin.close()
        code = self.driver.wait(timeout_s)
        assert code == 0, f"the driver ended with {code}"
        # the last bytes may still be on their way to the server
        finished = reached(
            lambda: all(e.server.done for e in self.entries() if e.server.begun), deadline_s - time.monotonic()
        )
        assert finished, "the server does not get to the end"
        return self.entries()

    def wait_for_traffic(self, sidestep: Sidestep | None) -> None:
        """Until connections are busy and, under the shim, one of them by ring."""
        assert reached(lambda: any(e.driver.received and e.server.received for e in self.entries()), PATIENCE_S), (
            "no traffic"
        )
        if sidestep is not None:
            sidestep.wait_for(carried)

    def entries(self) -> list[Entry]:
        """The connections of which anything was written down."""
        data = self._ledger.read_bytes()
        found = []
        for number, at in enumerate(range(0, len(data), 2 * _SIDE.size)):
            driver, server = (Side(*_SIDE.unpack_from(data, at + offset)) for offset in (0, _SIDE.size))
            if driver.begun or server.begun:
                found.append(Entry(number, driver, server))
        return found

    def close(self) -> None:
        """Ends both programs."""
        for program in (self.server, self.driver):
            if program is not None:
                program.kill()
                program.wait()
                for stream in (program.stdin, program.stdout):
                    if stream is not None:
                        stream.close()


@contextmanager
def loaded(
    program: Path,
    directory: Path,
    sidestep: Sidestep | None,
    env: Mapping[str, str] | None = None,
    places: tuple[Host, Host] | tuple[None, None] = (None, None),
) -> Iterator[Load]:
    """A running server, to be driven, in the shim's environment or `env`; both programs end with the block."""
    load = Load(program, directory, sidestep, env, places)
    try:
        yield load
    finally:
        load.close()


def faults_of_whole(entries: list[Entry]) -> list[str]:
    """What is wrong where nobody was killed: every byte sent must have been received, and both streams ended well."""
    found = []
    for entry in entries:
        for name, side, other in (("driver", entry.driver, entry.server), ("server", entry.server, entry.driver)):
            expected = (side.goal, 0, ENDED, ENDED, 1, other.goal)
            got = (side.taken, side.wrong, side.read_end, side.write_end, side.done, side.received)
            if expected != got:
                found.append(f"connection {entry.id}, {name}: {side}; the other end {other}")
    return found


def faults_of_survivor(entries: list[Entry], *, killed: str) -> list[str]:
    """What is wrong at the ends whose peer was killed: TCP shows an end of stream, ECONNRESET or EPIPE, never more."""
    found = []
    for entry in entries:
        survivor, dead = (entry.driver, entry.server) if killed == "server" else (entry.server, entry.driver)
        text = f"connection {entry.id}: survivor {survivor}; killed {dead}"
        if survivor.wrong or dead.wrong:
            found.append(f"wrong bytes: {text}")
        if not survivor.done:
            found.append(f"never ended: {text}")
        if survivor.read_end not in {ENDED, *FAULTS} or survivor.write_end not in {ENDED, *FAULTS}:
            found.append(f"ended as TCP does not: {text}")
        if survivor.received > dead.submitted or dead.received > survivor.submitted:
            found.append(f"more received than sent: {text}")
        # A reset is told once: where send() has met it, recv() says end of stream although bytes were lost.
        if survivor.read_end == ENDED and survivor.write_end not in FAULTS and survivor.received < dead.taken:
            found.append(f"an end of stream before all was delivered: {text}")
    return found


def faults_where_some_were_reset(
    entries: list[Entry], *, killed: str = "", faults: frozenset[int] = frozenset(FAULTS)
) -> list[str]:
    """What is wrong where connections may have been reset: each stream is whole, or its reader was told of that.

    `killed` is the program that was, if any; `faults` are the errors that TCP might have told.
    """
    found = []
    for entry in entries:
        for name, side, other in (("driver", entry.driver, entry.server), ("server", entry.server, entry.driver)):
            text = f"connection {entry.id}, {name}: {side}; the other end {other}"
            if side.wrong or side.received > other.submitted:
                found.append(f"wrong bytes, or more than were sent: {text}")
            if name == killed or not side.begun:  # reset before the server knew what for
                continue
            if not side.done:
                found.append(f"never ended: {text}")
            if side.read_end not in {ENDED, *faults} or side.write_end not in {ENDED, *faults}:
                found.append(f"ended as TCP does not: {text}")
            # A reset is told once: where send() has met it, recv() says end of stream although bytes were lost.
            if side.read_end == ENDED and side.write_end == ENDED:
                whole = other.taken if killed else other.goal
                if side.received < whole:
                    found.append(f"an end of stream before all was delivered: {text}")
    return found
