"""Runs a row: kernel TCP unpinned, kernel TCP on one CPU, sidestep, and the peer, in turns, for several rounds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from harness.model import OURS, PEER, SPREAD, Outcome, Row, Settings
from harness.sockmap import sockmap_world
from harness.world import CountedWorld, sidestep_world
from sidestep.demo.world import UNSEEN, Evidence, Sample
from sidestep.errors import SidestepError, Unavailable

Tell = Callable[[str], None]
CROWDED_S = 1.0
FAULTS = (SidestepError, OSError, subprocess.SubprocessError)


def _worlds(
    row: Row, promote_after: str | None, with_sidestep: bool, with_peer: bool
) -> dict[str, Callable[[], AbstractContextManager[CountedWorld]]]:
    worlds: dict[str, Callable[[], AbstractContextManager[CountedWorld]]] = {
        SPREAD: partial(CountedWorld, SPREAD, cpus=row.cpus, load=row.load),
        "one-cpu": partial(CountedWorld, "one-cpu", one_cpu=True, cpus=row.cpus, load=row.load),
    }
    if row.absolute or row.as_placed:
        del worlds["one-cpu"]
    if with_sidestep:
        worlds[OURS] = partial(sidestep_world, promote_after, cpus=row.cpus, load=row.load)
    if with_peer and row.peer:
        worlds[PEER] = partial(sockmap_world, cpus=row.cpus, load=row.load)
    return worlds


def judge(row: Row, sample: Sample, what: str = "promoted") -> str | None:
    """Why a run under sidestep, or of the peer, does not count; None when it does. Nothing is assumed."""
    if not row.promotes:
        return None
    evidence = sample.evidence or Evidence(0, 1, why_not=(UNSEEN,))
    if evidence.ok:
        return None
    why = "; ".join(evidence.why_not) or "fewer connections than expected"
    return f"{evidence.ends_promoted} of {evidence.ends_wanted} ends {what}: {why}"


def run_row(
    row: Row, *, rounds: int, settings: Settings, promote_after: str | None, with_sidestep: bool, invalid: str | None,
    tell: Tell, with_peer: bool = False,
) -> Outcome:  # fmt: skip
    """Runs all rounds of `row`; faults are kept in the outcome, with their reason.

    `invalid` says why nothing can run under sidestep; without `with_sidestep` nothing is meant to. A fault of the peer
    costs its figure alone.
    """
    worlds = _worlds(row, promote_after, with_sidestep, with_peer)
    if row.load:  # a program may wait for its first turn for long
        settings = replace(settings, seconds=max(settings.seconds, CROWDED_S))
    outcome = Outcome(row, {name: [] for name in worlds}, invalid=invalid)
    names = list(worlds)
    for number in range(min(rounds * row.rounds_factor, row.rounds_max or sys.maxsize)):
        first = number % len(names)  # each placement is first, middle and last in turn
        for name in names[first:] + names[:first]:
            if (name == OURS and outcome.invalid) or (name == PEER and outcome.peer_failed):
                continue
            try:
                with worlds[name]() as world:
                    sample = measured(row, world, settings)
            except FAULTS as error:
                tell(f"{row.name}: {name}: {error}")
                if name == PEER:
                    outcome.peer_failed = str(error)
                    continue
                if name != OURS:
                    outcome.failed = f"{name}: {error}"
                    return outcome
                outcome.invalid = str(error)
                continue
            outcome.samples[name].append(sample)
            tell(f"{row.name}: round {number + 1}, {name}: {sample.value:,.2f} {row.unit}")
            if name == OURS:
                outcome.invalid = judge(row, sample)
            if name == PEER:
                outcome.peer_failed = judge(row, sample, "redirected")
    return outcome


def measured(row: Row, world: CountedWorld, settings: Settings) -> Sample:
    """One run, with the CPUs that were used meanwhile, and the CPU time of a message where messages are counted."""
    sample = row.measure(world, settings)
    if not sample.equal:
        raise Unavailable("the bytes received were not those sent")
    beside = dict(world.spent)
    if "cpus" in beside and sample.beside.get("rate"):
        beside["cpu_us"] = 1e6 * beside["cpus"] / sample.beside["rate"]
    return replace(sample, beside=sample.beside | beside)
