"""A policy in force: the rule that decides about a connection, found without reading all of them.

Role, PROGRAM, user and group of a rule make its *class*. The classes of a program are found once and remembered. Within
a class there is one table for each prefix length that occurs. It leads from the masked address to the ports, which are
cut into pieces so that each piece has one rule: the first. So a decision costs a bisection and a look into the
dictionary for each prefix length of each class of the program. The least line wins.

After a change here, run `tests/policy/test_policy.py`, which compares this with an evaluator that reads all rules.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any, Final, NamedTuple

from sidestep import limits
from sidestep.policy.model import BOTH, Identity, Pair, Rings, Role, Rule, Side, Statement, Subject, is_glob
from sidestep.routing import Address, plain_address

_WILDCARD: Final = re.compile(r"[*?\[]")
_NONE: Final = limits.POLICY_RULES_MAX + 1  # an index behind that of every rule
_IPV6_BITS: Final = 128
# Programs known to have files alone in their rings; a statement of the policy about one of them comes before.
_FILE_RINGS: Final = tuple(
    Rings(files=True, program=name)
    for name in (
        "ceph-osd", "clickhouse*", "mariabackup", "mariadb-backup", "mariadbd", "mysqld", "postgres", "smbd",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decision:
    """The policy's decision about a connection."""

    target: str  # `both`, `tcp`, or the name of an offload protocol
    rule: Rule | None  # the rule that decides; None: no rule matched

    @property
    def over(self) -> str:
        """The transport that the rule names; empty: any."""
        return self.rule.over if self.rule is not None else ""

    def as_json(self) -> dict[str, Any]:
        return {"target": self.target, "over": self.over or None, "rule": rule_as_json(self.rule)}


def rule_as_json(rule: Rule | Pair | None) -> dict[str, Any] | None:
    if rule is None:
        return None
    return {"file": rule.origin.file, "line": rule.origin.line, "text": rule.origin.text or str(rule)}


class _Owner(NamedTuple):
    """Owner of the programs that a rule is about."""

    uid: int | None  # user; None: everybody's
    gid: int | None


@dataclass(slots=True)
class _Ports:
    """Table from a port to the first rule for it: the pieces begin at `starts`."""

    starts: list[int]
    indices: list[int]

    @classmethod
    def of(cls, ranges: Sequence[tuple[int, int, int]]) -> _Ports:
        """Makes the table of (first port, last port, index of the rule); the least index wins where ranges overlap."""
        waiting = sorted(ranges)
        edges = sorted({edge for first, last, _ in ranges for edge in (first, last + 1)} | {0})
        ports = cls([], [])
        live: list[tuple[int, int]] = []  # (index, last port), as a heap
        position = 0
        for edge in edges:
            while position < len(waiting) and waiting[position][0] <= edge:
                _, last, index = waiting[position]
                heappush(live, (index, last))
                position += 1
            while live and live[0][1] < edge:
                heappop(live)
            index = live[0][0] if live else _NONE
            if not ports.indices or ports.indices[-1] != index:
                ports.starts.append(edge)
                ports.indices.append(index)
        return ports

    def first(self, port: int) -> int:
        """The index of the first rule for this port, or `_NONE`."""
        return self.indices[bisect_right(self.starts, port) - 1]


@dataclass(slots=True)
class _Table:
    """The rules of one class and one role."""

    least: int  # index of its first rule
    anywhere: _Ports | None = None  # rules for every address
    lengths: dict[int, list[tuple[int, dict[int, _Ports]]]] = field(default_factory=dict)  # version -> shift, networks

    @classmethod
    def of(cls, rules: Sequence[tuple[int, Rule]]) -> _Table:
        places: dict[tuple[int, int, int] | None, list[tuple[int, int, int]]] = {}
        for index, rule in rules:
            place: tuple[int, int, int] | None = None
            if (network := rule.network) is not None:
                shift = network.max_prefixlen - network.prefixlen
                place = network.version, shift, int(network.network_address) >> shift
            places.setdefault(place, []).append((*rule.ports, index))
        table = cls(rules[0][0])
        by_length: dict[tuple[int, int], dict[int, _Ports]] = {}
        for place, ranges in places.items():
            ports = _Ports.of(ranges)
            if place is None:
                table.anywhere = ports
            else:
                version, shift, masked = place
                by_length.setdefault((version, shift), {})[masked] = ports
        for (version, shift), networks in by_length.items():
            table.lengths.setdefault(version, []).append((shift, networks))
        return table

    def first(self, version: int, number: int, port: int) -> int:
        """The index of the first rule for this address and port, or `_NONE`."""
        found = self.anywhere.first(port) if self.anywhere is not None else _NONE
        for shift, networks in self.lengths.get(version, ()):
            ports = networks.get(number >> shift)
            if ports is not None:
                found = min(found, ports.first(port))
        return found


class _Glob:
    """A PROGRAM that matches many names."""

    __slots__ = ("_match", "pattern", "tables")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.tables: dict[_Owner, _Table] = {}
        self._match: Callable[[str], object] | None = None  # made when it is first wanted

    def matches(self, name: str) -> bool:
        """True if a name matches; `[^a]` is `[!a]`, as for the C library."""
        if self._match is None:
            self._match = re.compile(translate(self.pattern.replace("[^", "[!"))).match
        return self._match(name) is not None

    @property
    def start(self) -> str:
        """Prefix of every name that matches."""
        found = _WILDCARD.search(self.pattern)
        return self.pattern[: found.start()] if found else self.pattern


class _Classes:
    """The classes of one role, and which of them a program belongs to."""

    def __init__(self, rules: Iterable[tuple[int, Rule, _Owner]]) -> None:
        parted: dict[tuple[str, _Owner], list[tuple[int, Rule]]] = {}
        for index, rule, owner in rules:
            parted.setdefault((rule.program, owner), []).append((index, rule))
        self._named: dict[str, dict[_Owner, _Table]] = {}
        globs: dict[str, _Glob] = {}
        for (program, owner), theirs in parted.items():
            if is_glob(program):
                tables = globs.setdefault(program, _Glob(program)).tables
            else:
                tables = self._named.setdefault(program, {})
            tables[owner] = _Table.of(theirs)
        self._globs: dict[str, list[_Glob]] = {}  # programs by what they begin with
        for glob in globs.values():
            self._globs.setdefault(glob.start, []).append(glob)
        self._start_len_max = max(map(len, self._globs), default=0)
        self.tables = lru_cache(limits.POLICY_SUBJECTS_CACHED)(self._tables)

    def _tables(self, subject: Subject) -> list[_Table]:
        """Tables that the subject belongs to; the one with the first rule comes first."""
        owners = [_Owner(uid, gid) for uid in (None, subject.uid) for gid in (None, *subject.gids)]
        found = [
            table
            for by_owner in self._by_owner({*subject.programs})
            for owner in owners
            if (table := by_owner.get(owner)) is not None
        ]
        return sorted(found, key=lambda table: table.least)

    def _by_owner(self, names: Set[str]) -> Iterator[dict[_Owner, _Table]]:
        """The tables of every PROGRAM that matches one of the names, once."""
        for name in names:
            if (tables := self._named.get(name)) is not None:
                yield tables
        starts = {name[:end] for name in names for end in range(min(len(name), self._start_len_max) + 1)}
        for start in starts & self._globs.keys():
            for glob in self._globs[start]:
                if any(map(glob.matches, names)):
                    yield glob.tables


class Policy:
    """The rules of the policy files, ready for use; it never changes.

    `uids` and `gids` have the numbers of the users and groups that the rules name. A rule about any other name matches
    nobody.
    """

    def __init__(
        self,
        statements: Iterable[Statement] = (),
        *,
        uids: Mapping[str, int] | None = None,
        gids: Mapping[str, int] | None = None,
    ) -> None:
        self.statements = tuple(statements)
        self.rules = tuple(statement for statement in self.statements if isinstance(statement, Rule))
        self._uids, self._gids = dict(uids or {}), dict(gids or {})
        known = [
            (index, rule, owner)
            for index, rule in enumerate(self.rules)
            if (owner := self._owner(rule)) is not None
        ]  # fmt: skip
        self._classes = {
            role: _Classes(entry for entry in known if entry[1].role is role) for role in Role
        }  # fmt: skip
        self._pairs: dict[tuple[_Party, _Party], tuple[int, Pair]] = {}
        self._parties: set[_Party] = set()
        for index, statement in enumerate(self.statements):
            if isinstance(statement, Pair):
                self._add_pair(index, statement)
        stated = [statement for statement in self.statements if isinstance(statement, Rings)]
        self._rings = [(_Glob(one.program), one.files) for one in (*stated, *_FILE_RINGS)]

    # ---- which way ----

    def decide(self, role: Role, subject: Subject, address: Address, port: int) -> Decision:
        """The first rule that matches says what to use; without one it is `both`.

        For CONNECT `address` and `port` are the destination, for LISTEN the local end.
        """
        address = plain_address(address)
        found = _NONE
        for table in self._classes[role].tables(subject):
            if table.least >= found:
                break
            found = min(found, table.first(address.version, int(address), port))
        if found == _NONE:
            return Decision(BOTH, None)
        rule = self.rules[found]
        return Decision(rule.target, rule)

    # ---- rings ----

    def file_rings(self, subject: Subject) -> bool:
        """True if the program's io_urings have no sockets, by the first statement about it."""
        return next((files for glob, files in self._rings if any(map(glob.matches, subject.programs))), False)

    # ---- pairs of users ----

    def may_pair(self, uid_a: int, gids_a: Iterable[int], uid_b: int, gids_b: Iterable[int]) -> Pair | None:
        """The first `pair` that lets processes of these users meet, in either order; None: nothing does."""
        parties_a, parties_b = self._parties_of(uid_a, gids_a), self._parties_of(uid_b, gids_b)
        found = [
            entry
            for one in parties_a
            for other in parties_b
            if (entry := self._pairs.get((one, other))) is not None
        ]  # fmt: skip
        return min(found, key=lambda entry: entry[0])[1] if found else None

    def _parties_of(self, uid: int, gids: Iterable[int]) -> set[_Party]:
        return {_Party(None, False), _Party(uid, False), *(_Party(gid, True) for gid in gids)} & self._parties

    def _add_pair(self, index: int, pair: Pair) -> None:
        one, other = (self._party(side) for side in pair.sides)
        if one is None or other is None:
            return
        self._parties |= {one, other}
        for key in ((one, other), (other, one)):
            self._pairs.setdefault(key, (index, pair))

    # ---- names ----

    def _party(self, side: Side) -> _Party | None:
        if side.identity is None:
            return _Party(None, False)
        number = _number(side.identity, self._gids if side.is_group else self._uids)
        return None if number is None else _Party(number, side.is_group)

    def _owner(self, rule: Rule) -> _Owner | None:
        """Owner of the programs that the rule is about; None: its user or group does not exist."""
        uid = None if rule.user is None else _number(rule.user, self._uids)
        gid = None if rule.group is None else _number(rule.group, self._gids)
        if (rule.user is not None and uid is None) or (rule.group is not None and gid is None):
            return None
        return _Owner(uid, gid)


class _Party(NamedTuple):
    """A side of a `pair`, by number."""

    number: int | None  # number; None: everybody
    is_group: bool


def _number(identity: Identity, numbers: Mapping[str, int]) -> int | None:
    return identity if isinstance(identity, int) else numbers.get(identity)
