"""The policy as its documentation tells it: every rule is looked at, one after the other."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ipaddress import IPv6Address

from sidestep.policy.model import Pair, Rings, Role, Rule, Side, Statement, Subject
from sidestep.routing import Address

_fnmatch = ctypes.CDLL(None).fnmatch  # the C library's own, as libsdp used it
_fnmatch.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int]


def program_matches(pattern: str, name: str) -> bool:
    """Whether a shell glob matches; a backslash stands for itself."""
    return int(_fnmatch(pattern.encode(), name.encode(), 1 << 1)) == 0  # FNM_NOESCAPE


def rule_matches(rule: Rule, role: Role, subject: Subject, address: Address, port: int) -> bool:
    """Whether a rule is about this connection."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return (
        rule.role is role
        and any(program_matches(rule.program, name) for name in subject.programs)
        and (rule.network is None or address in rule.network)
        and rule.ports[0] <= port <= rule.ports[1]
        and rule.user in (None, subject.uid)
        and (rule.group is None or rule.group in subject.gids)
    )


def first_rule(
    statements: Iterable[Statement], role: Role, subject: Subject, address: Address, port: int
) -> Rule | None:
    """The rule that decides."""
    for statement in statements:
        if isinstance(statement, Rule) and rule_matches(statement, role, subject, address, port):
            return statement
    return None


def rings_have_files(statements: Iterable[Statement], subject: Subject) -> bool:
    """Whether the first statement about the program's rings says that they have files alone."""
    for one in statements:
        if isinstance(one, Rings) and any(program_matches(one.program, name) for name in subject.programs):
            return one.files
    return False


def side_matches(side: Side, uid: int, gids: frozenset[int]) -> bool:
    """Whether a side of a `pair` is about this process."""
    return side.identity is None or (side.identity in gids if side.is_group else side.identity == uid)


def first_pair(
    statements: Iterable[Statement], uid_a: int, gids_a: frozenset[int], uid_b: int, gids_b: frozenset[int]
) -> Pair | None:
    """The `pair` that lets them meet."""
    for statement in statements:
        if isinstance(statement, Pair):
            one, other = statement.sides
            if (side_matches(one, uid_a, gids_a) and side_matches(other, uid_b, gids_b)) or (
                side_matches(other, uid_a, gids_a) and side_matches(one, uid_b, gids_b)
            ):
                return statement
    return None
