"""Runs a row: kernel TCP unpinned, kernel TCP on one CPU, sidestep, and the peer, in turns, for several rounds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

from harness.model import OURS, PEER, SPREAD, BenchError, Evidence, Outcome, Row, Sample, Settings
from harness.sockmap import SockmapWorld
from harness.world import SidestepWorld, World

Tell = Callable[[str], None]
CROWDED_S = 1.0
FAULTS = (BenchError, OSError, subprocess.SubprocessError)


def _worlds(
    row: Row, promote_after: str | None, with_sidestep: bool, with_peer: bool
) -> dict[str, Callable[[], World]]:
    worlds: dict[str, Callable[[], World]] = {
        SPREAD: lambda: World(SPREAD, cpus=row.cpus, load=row.load),
        "one-cpu": lambda: World("one-cpu", one_cpu=True, cpus=row.cpus, load=row.load),
    }
    if row.absolute or row.as_placed:
        del worlds["one-cpu"]
    if with_sidestep:
        worlds[OURS] = lambda: SidestepWorld(promote_after=promote_after, cpus=row.cpus, load=row.load)
    if with_peer and row.peer:
        worlds[PEER] = lambda: SockmapWorld(cpus=row.cpus, load=row.load)
    return worlds


def judge(row: Row, sample: Sample, what: str = "promoted") -> str | None:
    """Why a run under sidestep, or of the peer, does not count; None when it does. Nothing is assumed."""
    if not row.promotes:
        return None
    evidence = sample.evidence or Evidence(0, 1, 0.0, ("the run ended before it could be looked at",))
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
                    sample = _with_cost(row.measure(world, settings), world.spent)
            except Exception as error:
                if not isinstance(error, FAULTS) and not _is_sidestep_error(error):
                    raise
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


def _with_cost(sample: Sample, spent: dict[str, float]) -> Sample:
    """The sample with the CPUs that were used meanwhile, and the CPU time of a message where messages are counted."""
    beside = dict(spent)
    if "cpus" in spent and sample.beside.get("rate"):
        beside["cpu_us"] = 1e6 * spent["cpus"] / sample.beside["rate"]
    return replace(sample, beside=sample.beside | beside)


def _is_sidestep_error(error: Exception) -> bool:
    try:
        from sidestep.errors import SidestepError
    except ImportError:
        return False
    return isinstance(error, SidestepError)
