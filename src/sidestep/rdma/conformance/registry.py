"""The list of checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sidestep.rdma.conformance.harness import Bench


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, and the code that looks whether a device keeps it."""

    name: str
    group: str
    rule: str
    clause: str  # where the rule comes from
    body: Callable[[Bench], None]

    def __str__(self) -> str:
        return self.name


CHECKS: Final[list[Check]] = []


def check(clause: str) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Adds a function to the list; the first line of its docstring is the rule."""

    def add(body: Callable[[Bench], None]) -> Callable[[Bench], None]:
        rule = (body.__doc__ or "").strip().splitlines()[0]
        CHECKS.append(Check(body.__name__, body.__module__.rpartition(".")[2], rule, clause, body))
        return body

    return add
