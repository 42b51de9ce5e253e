"""Runs a row: kernel TCP unpinned, kernel TCP on one CPU, and sidestep, alternating, for several rounds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from harness.model import BenchError, Evidence, Outcome, Row, Sample, Settings
from harness.world import SidestepWorld, World

Tell = Callable[[str], None]
FAULTS = (BenchError, OSError, subprocess.SubprocessError)


def _worlds(row: Row, promote_after: str | None, with_sidestep: bool) -> dict[str, Callable[[], World]]:
    worlds: dict[str, Callable[[], World]] = {
        "unpinned": lambda: World("unpinned", cpus=row.cpus, load=row.load),
        "one-cpu": lambda: World("one-cpu", one_cpu=True, cpus=row.cpus, load=row.load),
    }
    if row.absolute or row.as_placed:
        del worlds["one-cpu"]
    if with_sidestep:
        worlds["sidestep"] = lambda: SidestepWorld(promote_after=promote_after, cpus=row.cpus, load=row.load)
    return worlds


def judge(row: Row, sample: Sample) -> str | None:
    """Why a run under sidestep does not count; None when it does. Promotion is asserted, never assumed."""
    if not row.promotes:
        return None
    evidence = sample.evidence or Evidence(0, 1, 0.0, ("the run ended before it could be looked at",))
    if evidence.ok:
        return None
    why = "; ".join(evidence.why_not) or "fewer connections than expected"
    return f"{evidence.ends_promoted} of {evidence.ends_wanted} ends promoted: {why}"


def run_row(
    row: Row, *, rounds: int, settings: Settings, promote_after: str | None, with_sidestep: bool, invalid: str | None,
    tell: Tell,
) -> Outcome:  # fmt: skip
    """Runs all rounds of `row`; faults are kept in the outcome, with their reason.

    `invalid` says why nothing can run under sidestep; without `with_sidestep` nothing is meant to.
    """
    worlds = _worlds(row, promote_after, with_sidestep)
    outcome = Outcome(row, {name: [] for name in worlds}, invalid=invalid)
    names = list(worlds)
    for number in range(min(rounds * row.rounds_factor, row.rounds_max or sys.maxsize)):
        first = number % len(names)  # each placement is first, middle and last in turn
        for name in names[first:] + names[:first]:
            if name == "sidestep" and outcome.invalid:
                continue
            try:
                with worlds[name]() as world:
                    sample = row.measure(world, settings)
            except Exception as error:
                if not isinstance(error, FAULTS) and not _is_sidestep_error(error):
                    raise
                tell(f"{row.name}: {name}: {error}")
                if name != "sidestep":
                    outcome.failed = f"{name}: {error}"
                    return outcome
                outcome.invalid = str(error)
                continue
            outcome.samples[name].append(sample)
            tell(f"{row.name}: round {number + 1}, {name}: {sample.value:,.2f} {row.unit}")
            if name == "sidestep":
                outcome.invalid = judge(row, sample)
    return outcome


def _is_sidestep_error(error: Exception) -> bool:
    try:
        from sidestep.errors import SidestepError
    except ImportError:
        return False
    return isinstance(error, SidestepError)
