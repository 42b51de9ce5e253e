"""Where a benchmark runs: the demo's world, with endless shell loops beside the programs, whose CPU time is counted."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from harness.machine import connections_to, family, maps_library, process_cpu_s
from harness.model import OURS
from sidestep.demo.world import PLAIN, Evidence, Program, Site, World
from sidestep.testing import Connection, Sidestep

LIBRARY = "libsidestep.so"
WINDOW_LEAST_S = 0.02  # shorter than a turn of a busy program, CPU time says nothing
BUSY = ["sh", "-c", "while :; do :; done"]  # uses a CPU, at nice 0
COUNTS = ("doorbells", "sleeps", "spins_won", "spins_lost")  # of a connection


@dataclass(frozen=True, slots=True)
class CountedEvidence(Evidence):
    """What `ss` said of a row's connections while they were open, with their counts."""

    ring_share: float = 0.0  # part of the bytes that went through the rings, 0 to 1
    counts: dict[str, int] = field(default_factory=dict)  # messages, doorbells, sleeps and spins of all ends together


@dataclass(frozen=True)
class _Mark:
    """CPU time up to a moment, in seconds: of each process of the row, and of all busy programs beside it."""

    at: float
    row: dict[int, float]
    busy: float

    @classmethod
    def now(cls, row: Iterable[int], busy: Iterable[Program]) -> Self:
        at = time.monotonic()
        return cls(at, {pid: process_cpu_s(pid) for pid in row}, sum(process_cpu_s(program.pid) for program in busy))


class CountedWorld(World):
    """A world on the first `cpus` CPUs, with `load` endless shell loops.

    With `one_cpu` programs of a lane share one CPU. `spent` has the CPUs that were used in the last `counted`.
    """

    def __init__(self, name: str, *sites: Site, cpus: int | None = None, one_cpu: bool = False, load: int = 0) -> None:
        first = sorted(os.sched_getaffinity(0))[:cpus]
        shared = [first] if cpus is not None else []
        super().__init__(name, *sites, cpus=[[cpu] for cpu in first] if one_cpu else shared)
        self.load = load
        self._busy: list[Program] = []
        self.spent: dict[str, float] = {}

    def __enter__(self) -> Self:
        for number in range(self.load):
            self._busy.append(self.start(BUSY, PLAIN, lane=number))
        return super().__enter__()

    @contextmanager
    def counted(self, *programs: Program, after_s: float = 0.0) -> Iterator[None]:
        """Counts the CPU time of these programs, with what they have started, from in so many seconds on."""
        at = time.monotonic() + after_s
        pids = family([program.pid for program in programs] + [sidestep.provider_pid for sidestep in self.providers])
        time.sleep(max(at - time.monotonic(), 0))
        begun = _Mark.now(pids, self._busy)
        yield
        now = _Mark.now(pids, self._busy)
        took = now.at - begun.at
        self.spent = {}
        if took < WINDOW_LEAST_S:
            return
        if self._busy:
            self.spent["busy_cpus"] = (now.busy - begun.busy) / took
        used = [now.row[pid] - before for pid, before in begun.row.items()]
        if min(used, default=0) >= 0:  # what has ended since has no clock any more
            self.spent["cpus"] = sum(used) / took

    def watched(
        self, server: Program, client: Program, port: int, connections: int, from_s: float, look_s: float = 0.2
    ) -> tuple[str, Evidence | None]:
        """The same, from when the connections were open for `from_s`."""
        with suppress(FileNotFoundError):  # the client ended between the two looks
            while client.poll() is None and connections_to(client.pid, port) < connections:
                time.sleep(0.02)
        return super().watched(server, client, port, connections, from_s, look_s)

    def evidence(self, port: int, ends: int, *programs: Program) -> Evidence | None:
        """The same; programs have the library under sidestep, where no end is to be promoted, and not over TCP."""
        ours = bool(self.providers)
        for program in programs if not ours or not ends else ():
            with suppress(FileNotFoundError):  # it ended between the two looks
                if maps_library(program.pid, LIBRARY) != ours:
                    raise program.fault(f"has {'not ' if ours else ''}loaded {LIBRARY}")
        return super().evidence(port, ends, *programs)

    def judged(self, found: list[Connection], ends: int) -> Evidence:
        """The same, with counts."""
        seen = super().judged(found, ends)
        promoted = [c.tx for c in found if c.promoted]
        ring = sum(tx.ring_bytes for tx in promoted)
        total = ring + sum(tx.tcp_bytes for tx in promoted)
        counts = {"messages": sum(c.tx.ring_msgs + c.tx.tcp_msgs for c in found)}
        counts |= {name: sum(getattr(c, name) for c in found) for name in COUNTS}
        share = ring / total if total else 0.0
        return CountedEvidence(seen.ends_promoted, seen.ends_wanted, seen.why_not, share, counts)


@contextmanager
def sidestep_world(promote_after: str | None, **options: Any) -> Iterator[CountedWorld]:
    """Under sidestep, with a provider of its own."""
    with Sidestep(promote_after) as sidestep, CountedWorld(OURS, Site(sidestep=sidestep), **options) as world:
        yield world
