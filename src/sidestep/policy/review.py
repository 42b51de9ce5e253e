"""Warnings about statements that are allowed and probably not meant, for `sidestep policy check`. No I/O."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

from sidestep.policy.model import ANY, BOTH, TCP, Identity, Level, Log, Origin, Problem, Role, Rule, Statement
from sidestep.routing import Network


def review(statements: Iterable[Statement], installed: Collection[str]) -> Iterator[Problem]:
    """Warnings, in the order of the statements; `installed` are the offload protocols that there are."""
    before = _Before()
    for statement in statements:
        if isinstance(statement, Log):
            yield _warning(statement.origin, "log", "this has no effect", "see decisions with 'sidestep policy trace'")
        elif isinstance(statement, Rule):
            yield from _review_rule(statement, installed)
            if (earlier := before.covering(statement)) is not None:
                here = earlier.origin.file == statement.origin.file
                place = f"line {earlier.origin.line}" if here else str(earlier.origin)
                yield _warning(
                    statement.origin, "use", f"this rule never decides: {place} comes first, and matches all of it",
                    "put the narrower rule first, or take one of them out",
                )  # fmt: skip
            else:
                before.add(statement)


def _review_rule(rule: Rule, installed: Collection[str]) -> Iterator[Problem]:
    if rule.target not in (BOTH, TCP, *installed):
        known = ", ".join(sorted(installed)) or "none"
        yield _warning(
            rule.origin, rule.target, f"no protocol {rule.target!r} is installed, so this means tcp",
            f"installed: {known}; 'sidestep provider modules' shows their state",
        )  # fmt: skip
    if "/" in rule.program:
        yield _warning(
            rule.origin, rule.program, "programs are matched by their names alone, so this rule never decides",
            f"write {rule.program.rpartition('/')[2] or ANY}",
        )  # fmt: skip


def _warning(origin: Origin, word: str, message: str, remedy: str) -> Problem:
    column = origin.text.find(word) + 1
    return Problem(
        origin.file, origin.line, column, word if column else "", message, remedy, origin.text, Level.WARNING
    )


_Party = tuple[Role, str, Identity | None, Identity | None]


@dataclass(slots=True)
class _Ranges:
    """Ranges of ports of which none covers another, by first port; so their last ports rise as well."""

    ranges: list[tuple[int, int, int]] = field(default_factory=list)  # first, last, index of the rule

    def covering(self, first: int, last: int) -> int | None:
        position = bisect_right(self.ranges, first, key=lambda known: known[0]) - 1
        if position < 0 or self.ranges[position][1] < last:
            return None
        return self.ranges[position][2]

    def add(self, first: int, last: int, index: int) -> None:
        """Takes a range in that is not covered."""
        self.ranges = [known for known in self.ranges if not (first <= known[0] and known[1] <= last)]
        insort(self.ranges, (first, last, index))


class _Before:
    """The rules so far, to be asked for one that matches all that another does."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._ranges: dict[tuple[_Party, Network | None], _Ranges] = {}
        self._lengths: dict[int, set[int]] = {4: set(), 6: set()}  # prefix lengths that occur, by version

    def add(self, rule: Rule) -> None:
        key = (rule.role, rule.program, rule.user, rule.group), rule.network
        self._ranges.setdefault(key, _Ranges()).add(*rule.ports, len(self._rules))
        self._rules.append(rule)
        if rule.network is not None:
            self._lengths[rule.network.version].add(rule.network.prefixlen)

    def covering(self, rule: Rule) -> Rule | None:
        """The first rule by itself that leaves nothing to `rule`."""
        parties = product([rule.role], {rule.program, ANY}, {rule.user, None}, {rule.group, None})
        found = [
            index
            for key in product(parties, self._networks(rule.network))
            if (ranges := self._ranges.get(key)) is not None
            and (index := ranges.covering(*rule.ports)) is not None
        ]  # fmt: skip
        return self._rules[min(found)] if found else None

    def _networks(self, network: Network | None) -> list[Network | None]:
        """Networks that contain `network` and may occur."""
        if network is None:
            return [None]
        lengths = (length for length in self._lengths[network.version] if length <= network.prefixlen)
        return [None, *(network.supernet(new_prefix=length) for length in lengths)]
