"""The main job, shown: real programs over kernel TCP and under sidestep, alternating, on this machine.

Each work runs in three places. Two are over kernel TCP: as the kernel places its programs, and with all of them on one
CPU. The last is under sidestep, with a provider of its own. Rounds alternate. The ratio is that of the medians, against
the better TCP placement. It counts only if two things hold. `promoted`: both ends of every connection were seen in
shared memory while it was open. `equal`: the programs received the bytes that were sent. These are short runs to see
for oneself; `make bench` measures. The load by other programs is kept beside the figures: on a busy machine they say
little.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from sidestep.demo.machine import CpuTime, Machine, Others, others_now
from sidestep.demo.picture import slower
from sidestep.demo.works import WORKS, Work
from sidestep.demo.world import Sample, Site, World, program_missing
from sidestep.installation import native_library
from sidestep.observe.namespaces import Namespace, NetworkBridge
from sidestep.settings import RemoteSettings
from sidestep.testing import Sidestep

ROUNDS: Final = 3
SECONDS: Final = 0.25  # measured a run; with starting and stopping all works end within half a minute
SPREAD_MAX: Final = 0.5  # spread of the rounds of one place, as a part of their median; beyond it a ratio is chance
TWO_HOSTS_PREFIX: Final = "198.18.0."  # RFC 2544: for tests between hosts

Tell = Callable[[str], None]
Worlds = Mapping[str, Callable[[str], World]]


@dataclass
class ResultLine:
    """A work's runs by place, and what they come to."""

    work: Work
    runs: dict[str, list[Sample]] = field(default_factory=dict)

    def median(self, place: str) -> float:
        return statistics.median(run.value for run in self.runs[place])

    @property
    def best_tcp(self) -> str:
        pick = min if self.work.lower_is_better else max
        return pick((place for place in self.runs if place.startswith("tcp")), key=self.median)

    def ratio_of(self, place: str) -> float:
        """Speed there over the speed of kernel TCP in its better placement."""
        tcp, ours = self.median(self.best_tcp), self.median(place)
        return tcp / ours if self.work.lower_is_better else ours / tcp

    @property
    def ways(self) -> list[str]:
        """The places under sidestep."""
        return [place for place in self.runs if not place.startswith("tcp")]

    @property
    def spread(self) -> float:
        """Largest distance between rounds of one place, as a part of their median."""
        rounds = {place: [run.value for run in self.runs[place]] for place in (self.best_tcp, *self.ways)}
        return max((max(values) - min(values)) / self.median(place) for place, values in rounds.items())

    @property
    def good(self) -> bool:
        """True when its ratios count: else they are of TCP with TCP, or of wrong bytes."""
        return self.promoted and self.equal

    @property
    def slower(self) -> bool:
        """True when it counts, and was slower than kernel TCP."""
        return self.good and any(slower(self.ratio_of(way)) for way in self.ways)

    @property
    def promoted(self) -> bool:
        """True when every run under sidestep had all its connections offloaded."""
        return all(run.evidence is not None and run.evidence.ok for run in self._ours)

    @property
    def _ours(self) -> list[Sample]:
        return [run for way in self.ways for run in self.runs[way]]

    @property
    def equal(self) -> bool:
        """True when in every run, in every place, the bytes received were those sent."""
        return all(run.equal for runs in self.runs.values() for run in runs)

    @property
    def why_not_promoted(self) -> list[str]:
        """States, in words, of the connections that were not promoted."""
        found = [run.evidence for run in self._ours if run.evidence and not run.evidence.ok]
        return sorted({why for evidence in found for why in evidence.why_not})

    def as_json(self) -> dict[str, Any]:
        places = {
            name: {"median": self.median(name), "values": [run.value for run in runs]}
            for name, runs in self.runs.items()
        }
        return {
            "work": self.work.name,
            "title": self.work.title,
            "unit": self.work.unit,
            "lower_is_better": self.work.lower_is_better,
            "places": places,
            "best_tcp": self.best_tcp,
            "ratio": self.ratio_of("sidestep"),
            "spread": self.spread,
            "promoted": self.promoted,
            "why_not_promoted": self.why_not_promoted,
            "equal": self.equal,
        }


@dataclass
class Demo:
    """The whole demo: a line a work, what could not run, with the remedy, and what it was taken on."""

    machine: Machine
    rounds: int
    seconds: float
    others: Others = field(default_factory=Others)
    lines: list[ResultLine] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # reasons by the name of the work

    @property
    def good(self) -> bool:
        """True when everything that ran was promoted and received what was sent."""
        return bool(self.lines) and all(line.good for line in self.lines)

    def warnings(self) -> list[str]:
        """Reasons, in sentences, why the figures prove little; none where they do."""
        found = (
            [f"Too busy to judge: {self.others}. Run it again when the machine is idle."]
            if self.others.too_many
            else []
        )
        apart = [f"{line.work.title} ({line.spread:.0%})" for line in self.lines if line.spread > SPREAD_MAX]
        return found + ([f"Too far apart to judge are the rounds of {', '.join(apart)}."] if apart else [])

    def slower(self) -> dict[str, str]:
        """Reasons why works were slower than over kernel TCP, as far as is known, by name of the work."""
        return {line.work.name: self._why_slower(line) for line in self.lines if line.slower}

    def _why_slower(self, line: ResultLine) -> str:
        if "sdp" in line.runs:
            return "the device of SDP is software here, and itself rides on TCP"
        if self.machine.cpus == 1:
            return "both ends share the only CPU"
        if self.others.too_many:
            return "perhaps because other programs used the CPUs"
        if line.spread > SPREAD_MAX:
            return f"perhaps by chance: its rounds differ by {line.spread:.0%}"
        return "the reason is not known; `make bench` measures longer"

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine.as_json(),
            "rounds": self.rounds,
            "seconds": self.seconds,
            "others": {"before": self.others.before, "during": self.others.during},
            "warnings": self.warnings(),
            "works": [line.as_json() for line in self.lines],
            "slower": self.slower(),
            "skipped": self.skipped,
            "good": self.good,
        }


def run_demo(*, rounds: int = ROUNDS, seconds: float = SECONDS, tell: Tell) -> Demo:
    """Runs every work that can run, `rounds` times in each place; `tell` is called with the present step.

    Raises:
        Unavailable: sidestep's library is missing, or a program failed; the error names it.
    """
    native_library()
    with _watched(rounds, seconds) as demo, Sidestep(promote_after=None) as sidestep:
        ours = Site(sidestep=sidestep)
        worlds: Worlds = {
            "tcp": World,
            "tcp-one-cpu": lambda name: World(name, cpus=[{min(os.sched_getaffinity(0))}]),
            "sidestep": lambda name: World(name, ours),
        }
        _run(demo, worlds, tell)
    return demo


def run_two_hosts(*, rounds: int = ROUNDS, seconds: float = SECONDS, tell: Tell) -> Demo:
    """The same on two hosts, made of network namespaces: clients on the one, servers on the other.

    Raises:
        Unavailable: As `run_demo`, or this user may make no namespaces.
    """
    native_library()
    with _watched(rounds, seconds) as demo, ExitStack() as stack:
        policy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sidestep-demo-"))) / "libsdp.conf"
        policy.write_text(f"use sdp connect * {TWO_HOSTS_PREFIX}0/24:*\n")
        promoted, first = two_hosts(stack), two_hosts(stack, policy)
        sites = {"tcp": [replace(site, sidestep=None) for site in promoted], "sidestep": promoted, "sdp": first}
        _run(demo, dict.fromkeys(sites, lambda name: World(name, sites[name][1], sites[name][0])), tell)
    return demo


def two_hosts(stack: ExitStack, policy: Path | None = None, *, transports: str = "") -> list[Site]:
    """Two hosts, joined by a bridge, with a provider each; by `policy` their connections begin with SDP."""
    bridge, namespaces = NetworkBridge(), (Namespace(), Namespace())
    for made in (bridge, *namespaces):
        stack.callback(made.close)
    sites = []
    for number, namespace in enumerate(namespaces, 1):
        address = f"{TWO_HOSTS_PREFIX}{number}"
        bridge.join(number, namespace, f"{address}/24")
        with namespace.inside():
            remote = RemoteSettings.parse(f"{TWO_HOSTS_PREFIX}0/24", transports=transports)
            sidestep = stack.enter_context(Sidestep(promote_after=None, remote=remote, policy=policy))
        sites.append(Site(address, sidestep, first=policy is not None, namespace=namespace))
    return sites


@contextmanager
def _watched(rounds: int, seconds: float) -> Iterator[Demo]:
    """A demo, and what others do before and during it. Its providers end within: what has ended is not of others."""
    demo = Demo(Machine.now(), rounds, seconds)
    demo.others.before = others_now()
    start = CpuTime.now()
    yield demo
    demo.others.during = start.others()


def _run(demo: Demo, worlds: Worlds, tell: Tell) -> None:
    for work in WORKS:
        if why := "; ".join(filter(None, map(program_missing, work.needs))):
            demo.skipped[work.name] = why
            tell(f"{work.title}: skipped, {why}")
            continue
        line = ResultLine(work, {name: [] for name in worlds})
        tell(f"{work.title}: {demo.rounds} rounds")
        for _ in range(demo.rounds):
            for name, make in worlds.items():
                with make(name) as world:
                    line.runs[name].append(work.run(world, demo.seconds))
        demo.lines.append(line)
