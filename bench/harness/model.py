"""What a benchmark row is, what one run of it gives, and how runs are summed up. No I/O here."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from sidestep.demo.world import Sample

if TYPE_CHECKING:
    from harness.world import CountedWorld

SPREAD: Final = "unpinned"  # kernel TCP as the kernel places both ends
OURS: Final = "sidestep"
PEER: Final = "sockmap"  # what a kernel can do without a library, where root and kernel allow


@dataclass(frozen=True)
class Settings:
    """How long one run measures."""

    seconds: float
    warmup_s: float
    idle_s: float
    connections_max: int = 10_000  # idle ones, of which the memory is measured
    pauses: int = 5  # messages of a run that pauses for a second before each


Measure = Callable[["CountedWorld", Settings], Sample]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    A ratio row compares `value` with kernel TCP's and `must` and `aim` are factors. An `absolute` row has figures that
    sidestep's own value may not exceed; with `over_tcp`, by which it may exceed TCP's.
    """

    name: str
    title: str
    unit: str
    must: float
    aim: float
    measure: Measure
    lower_is_better: bool = False
    absolute: bool = False
    over_tcp: bool = False
    promotes: bool = True  # False: the connections are too short to be promoted, and that is what is measured
    needs: tuple[str, ...] = ()  # programs, by name
    user: str | None = None  # the user this must run as when started by root
    as_placed: bool = False  # compared with TCP as the kernel places it, alone: what a native call costs more
    cpus: int | None = None  # run on so many CPUs, in all placements
    load: int = 0  # endless shell loops beside it
    peer: bool = True  # False: BPF's sockmap has nothing to do with what is measured
    rounds_max: int | None = None  # for rows whose value hardly varies and whose run is long
    rounds_factor: int = 1  # for rows whose value varies more from process to process than by what it is to show


@dataclass(frozen=True)
class Summary:
    """Samples of one placement, in the row's unit."""

    median: float
    least: float
    most: float
    count: int
    beside: dict[str, float]  # medians

    @classmethod
    def of(cls, samples: list[Sample]) -> Self:
        """Sums up one or more samples."""
        values = [sample.value for sample in samples]
        names = {name for sample in samples for name in sample.beside}
        beside = {
            name: statistics.median(sample.beside[name] for sample in samples if name in sample.beside)
            for name in sorted(names)
        }
        return cls(statistics.median(values), min(values), max(values), len(values), beside)


@dataclass
class Outcome:
    """What the rounds of one row gave."""

    row: Row
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # by name of the world, in the order run
    invalid: str | None = None  # why the sidestep figure does not count
    failed: str | None = None  # why there is no figure at all
    peer_failed: str | None = None  # why the peer's figure does not count

    def summary(self, world: str) -> Summary | None:
        """The summary of one world's samples; None where there are none."""
        samples = self.samples.get(world)
        return Summary.of(samples) if samples else None

    def best_tcp(self) -> tuple[str, Summary] | None:
        """Kernel TCP's better placement, by median."""
        found = [(name, Summary.of(runs)) for name, runs in self.samples.items() if name not in (OURS, PEER) and runs]
        if not found:
            return None
        pick = min if self.row.lower_is_better else max
        return pick(found, key=lambda entry: entry[1].median)

    def ratios(self, world: str = OURS) -> tuple[float, float, float] | None:
        """Ratio of the medians, then the least and the most favourable ratio the spreads allow. Above 1 is faster."""
        best, ours = self.best_tcp(), self.summary(world)
        if self.row.absolute or best is None or ours is None:
            return None
        theirs = best[1]
        if self.row.lower_is_better:
            pairs = (theirs.median, ours.median), (theirs.least, ours.most), (theirs.most, ours.least)
        else:
            pairs = (ours.median, theirs.median), (ours.least, theirs.most), (ours.most, theirs.least)
        ratio, low, high = (a / b if b else float("inf") for a, b in pairs)
        return ratio, low, high

    def reached(self) -> str:
        """'aim', 'must', 'missed', 'INVALID', 'tcp only' or 'FAILED'."""
        ours, best = self.summary(OURS), self.best_tcp()
        if self.failed:
            return "FAILED"
        if self.invalid:
            return "INVALID"
        if ours is None:
            return "tcp only"
        if self.row.absolute:
            above = best[1].median if best and self.row.over_tcp else 0
            excess = ours.median - above
            return "aim" if excess <= self.row.aim else "must" if excess <= self.row.must else "missed"
        ratios = self.ratios()
        if ratios is None:
            return "INVALID"
        return "aim" if ratios[0] >= self.row.aim else "must" if ratios[0] >= self.row.must else "missed"

    def work_kept(self) -> float | None:
        """CPU time of the busy programs beside sidestep by theirs beside TCP, as placed; None without busy programs."""
        ours, theirs = (self.summary(world) for world in (OURS, SPREAD))
        kept, before = (found.beside.get("busy_cpus") if found else None for found in (ours, theirs))
        return None if kept is None or not before else kept / before

    def _peer_json(self) -> dict[str, Any] | None:
        ratios = self.ratios(PEER)
        if self.peer_failed:
            return {"name": PEER, "failed": self.peer_failed}
        if ratios is None:
            return None
        return {"name": PEER, "ratio": ratios[0], "ratio_min": ratios[1], "ratio_max": ratios[2]}

    def as_json(self) -> dict[str, Any]:
        """The outcome as a JSON document."""
        best, ratios = self.best_tcp(), self.ratios()
        worlds = {}
        for name, samples in self.samples.items():
            if not samples:
                continue
            summary = Summary.of(samples)
            worlds[name] = {
                "median": summary.median, "min": summary.least, "max": summary.most, "beside": summary.beside,
                "values": [sample.value for sample in samples],
            }  # fmt: skip
        evidence = [sample.evidence for sample in self.samples.get(OURS, []) if sample.evidence]
        return {
            "row": self.row.name, "title": self.row.title, "unit": self.row.unit, "absolute": self.row.absolute,
            "over_tcp": self.row.over_tcp, "lower_is_better": self.row.lower_is_better,
            "must": self.row.must, "aim": self.row.aim,
            "worlds": worlds, "best_tcp": best[0] if best else None,
            "ratio": ratios[0] if ratios else None, "ratio_min": ratios[1] if ratios else None,
            "ratio_max": ratios[2] if ratios else None, "reached": self.reached(),
            "peer": self._peer_json(), "work_kept": self.work_kept(),
            "invalid": self.invalid, "failed": self.failed,
            "promotion": [asdict(found) for found in evidence],
        }  # fmt: skip
