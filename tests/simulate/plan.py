"""Decisions of one seed that only the tests play: moves of sockets, and conversations beside the first."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from random import Random
from typing import Final

from sidestep.sdp.simulate.plan import Plan, PlanKind, Trouble, draw_by

_MOVES: Final[tuple[tuple[tuple[int, ...], ...], ...]] = (
    ((0,),), ((1,),), ((0,), (1,)), ((1,), (0,)), ((0,), (0,)), ((1,), (1,), (0,)),
    ((0, 1),), ((1, 0),), ((0, 1), (1,)),
)  # fmt: skip


@dataclass(frozen=True)
class CheckedPlan(Plan):
    """One conversation, and those beside it."""

    moves: tuple[tuple[int, ...], ...]  # ends whose sockets move to another process, those of a step at the same time
    moves_after: int  # events of users before
    turned: bool  # beside another one: connects the other way round
    others: tuple[CheckedPlan, ...] = ()  # conversations beside this one


def draw(seed: int, *, kind: PlanKind | None = None, beside: CheckedPlan | None = None) -> CheckedPlan:
    """The plan of a seed; `kind` overrides its own. It suits the fabric of the one that it is `beside`."""
    rng = Random(seed)
    common = draw_by(rng, seed, kind, beside)
    plan = CheckedPlan(
        **{each.name: getattr(common, each.name) for each in fields(common)},
        moves=rng.choice(_MOVES) if common.moving else (),
        moves_after=int(rng.expovariate(1 / 10)),
        turned=rng.random() < 0.5,
    )
    if beside is None and plan.kind is not PlanKind.REFUSED and rng.random() < 0.15:
        plan = replace(plan, others=tuple(_companion(rng, plan) for _ in range(rng.choice((1, 1, 2)))))
        if any(other.moves for other in plan.others):
            plan = replace(plan, fail_registration=0.0)
    return plan


def _companion(rng: Random, plan: CheckedPlan) -> CheckedPlan:
    """A conversation beside the one that is planned, which must not see its trouble."""
    everywhere = plan.trouble in (Trouble.DEVICE, Trouble.LOSSY, Trouble.ERRORS)
    return draw(rng.getrandbits(32), kind=PlanKind.FAULTY if everywhere else PlanKind.CLEAN, beside=plan)
