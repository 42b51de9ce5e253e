"""Many connections leave descriptors, maps and memory of both programs and of the provider where they were."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from sidestep.testing import Sidestep

SHORT = 100_000
PROMOTED = 1_000
SETTLE_S = 8.0  # beyond limits.OFFER_EXPIRY_S
ROUNDS = 4  # of which one without growth shows that nothing leaks
MAPS_MAX = 4  # arenas of the allocator and stacks come and go
GROWTH_KIB_MAX = 1024  # what the C library's and Python's allocators may keep; a leak of 1 KiB a connection is more


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds."""

    descriptors: int
    maps: int
    resident_kib: int
    shared_kib: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """The footprint of a live process."""
        process = Path("/proc") / str(pid)
        status = (process / "status").read_text(encoding="ascii")

        def kib(name: str) -> int:
            found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
            assert found
            return int(found[1])

        return cls(
            len(list((process / "fd").iterdir())),
            len((process / "maps").read_text().splitlines()),
            kib("RssAnon"),
            kib("RssShmem"),
        )


class Calls:
    """An echo server and a client that is told how many connections to make, both under the shim."""

    def __init__(self, program: Path, sidestep: Sidestep) -> None:
        self.sidestep = sidestep
        self.server = sidestep.popen([program, "echo"], stdout=subprocess.PIPE, text=True)
        assert self.server.stdout is not None
        port = self.server.stdout.readline().strip()
        self.client = sidestep.popen(
            [program, "calls", port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def tell(self, line: str) -> None:
        """Has the client do something and waits until it is done."""
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        self.client.stdin.write(line + "\n")
        assert self.client.stdout.readline() == "done\n"

    def footprints(self) -> dict[str, Footprint]:
        """What both programs and the provider hold once no connection is left."""
        self.sidestep.wait_for(lambda found: not found)
        pids = {"server": self.server.pid, "client": self.client.pid, "provider": self.sidestep.provider_pid}
        return {name: Footprint.of(pid) for name, pid in pids.items()}

    def promoted(self) -> int:
        """Connections of the client that are promoted."""
        return sum(c.promoted and c.pid == self.client.pid for c in self.sidestep.connections())


@pytest.fixture
def calls(load_program: Path) -> Iterator[Callable[[str], Calls]]:
    """Makes a pair of programs with a promotion threshold."""
    stages: list[Sidestep] = []

    def made(promote_after: str) -> Calls:
        stages.append(Sidestep(promote_after=promote_after, ring_size=4096).__enter__())
        return Calls(load_program, stages[-1])

    yield made
    for stage in stages:
        stage.__exit__(None, None, None)


def _growth(before: dict[str, Footprint], pair: Calls) -> list[str]:
    """What has grown for good; an offer that nobody claims is kept until it expires."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        found = []
        for name, new in pair.footprints().items():
            old = before[name]
            memory_kib = max(new.resident_kib - old.resident_kib, new.shared_kib - old.shared_kib)
            if new.descriptors > old.descriptors or new.maps > old.maps + MAPS_MAX or memory_kib > GROWTH_KIB_MAX:
                found.append(f"{name}: {old} became {new}")
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(0.1)  # what is given back late (an expired offer, an allocator's pages) announces nothing


def _leaks(pair: Calls, work: Callable[[], None]) -> list[str]:
    """What grows with the work every time. A high-water mark rises until all tables have their size: on a fast machine,
    where more offers wait for their expiry, by more than `GROWTH_KIB_MAX` in each of the first two rounds."""
    found: list[str] = []
    for _ in range(ROUNDS):
        before = pair.footprints()
        work()
        if not (found := _growth(before, pair)):
            break
    return found


def _make_what_is_made_once(pair: Calls) -> None:
    """A process that has promoted a connection keeps its doorbell, its pages and its way to the provider."""
    pair.tell("open 4")
    while pair.promoted() != 4:
        pair.tell("call")
    pair.tell("close")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("promote_after", ["4", "0"])
def test_short_connections(calls: Callable[[str], Calls], promote_after: str) -> None:
    pair = calls(promote_after)
    _make_what_is_made_once(pair)
    pair.tell(f"short {SHORT // 10}")
    assert _leaks(pair, lambda: pair.tell(f"short {SHORT}")) == []


@pytest.mark.timeout(300)
def test_promoted_connections(calls: Callable[[str], Calls]) -> None:
    pair = calls("2")

    def promote_all() -> None:
        pair.tell(f"open {PROMOTED}")
        while pair.promoted() != PROMOTED:
            pair.tell("call")
        pair.tell("call")
        pair.tell("close")

    promote_all()
    assert _leaks(pair, promote_all) == []
