"""Random policies, and connections that come close to what they say."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from hypothesis import strategies as st

from sidestep.policy.model import (
    ALL_PORTS,
    BOTH,
    ID_MAX,
    PORT_MAX,
    TCP,
    Include,
    Log,
    Pair,
    Rings,
    Role,
    Rule,
    Side,
    Subject,
    plain_network,
)  # fmt: skip
from sidestep.routing import Address, Network

roles = st.sampled_from(Role)
targets = st.sampled_from(["both", "tcp", "sdp", "local", "x-2"])
# few letters, so that globs and names meet
names = st.text("ab1", min_size=1, max_size=4)
programs = st.one_of(
    st.just("*"),
    names,
    st.text("ab*?", min_size=1, max_size=5),
    st.sampled_from(["[ab]*", "[!a]*", "[^a]?", "[a-b]b", "[]a]*", "[", "[a", "a[b", "[!]", "a b", "*#*"]),
)
edge_ports = st.sampled_from([0, 1, 79, 80, 81, 1023, 1024, PORT_MAX - 1, PORT_MAX])
ports = st.one_of(edge_ports, st.integers(0, PORT_MAX))
port_ranges = st.one_of(st.just(ALL_PORTS), st.tuples(ports, ports).map(lambda pair: (min(pair), max(pair))))

_IPV4_CORNERS = [0, 1, 0x0A000000, 0x0A000001, 0x0AFFFFFF, 0x0B000000, 0x7F000001, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
ipv4 = st.one_of(st.sampled_from(_IPV4_CORNERS), st.integers(0, (1 << 32) - 1)).map(IPv4Address)
_MAPPED = 0xFFFF << 32
ipv6 = st.one_of(
    st.sampled_from([0, 1, 0x20010DB8 << 96, (0x20010DB8 << 96) + 1, (1 << 128) - 1, _MAPPED - 1, _MAPPED + (1 << 32)]),
    st.sampled_from(_IPV4_CORNERS).map(lambda low: _MAPPED + low),
    st.integers(0, (1 << 128) - 1),
).map(IPv6Address)
addresses: st.SearchStrategy[Address] = st.one_of(ipv4, ipv6)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    address = draw(addresses)
    edges = st.sampled_from([0, 1, 7, 8, 9, 31, 32, address.max_prefixlen - 1, address.max_prefixlen])
    length = min(draw(st.one_of(edges, st.integers(0, 128))), address.max_prefixlen)
    if isinstance(address, IPv4Address):
        return IPv4Network((address, length), strict=False)
    return plain_network(IPv6Network((address, length), strict=False))


small_ids = st.integers(0, 3)
ids = st.one_of(small_ids, st.sampled_from([ID_MAX]))
identities = st.one_of(ids, st.sampled_from(["alice", "bob", "two words", "us#er", "münchen"]))


def rules(identity: st.SearchStrategy[int | str] = identities) -> st.SearchStrategy[Rule]:
    somebody = st.one_of(st.none(), identity)
    made = st.builds(Rule, targets, roles, programs, st.one_of(st.none(), networks()), port_ranges, somebody, somebody)
    return st.tuples(made, st.sampled_from(["", "roce", "x-1"])).map(
        lambda drawn: replace(drawn[0], over="" if drawn[0].target in (BOTH, TCP) else drawn[1])
    )


def broad_rules() -> st.SearchStrategy[Rule]:
    """Rules that match often, so that which of them comes first matters."""
    somebody = st.sampled_from([None, None, 0, 1])
    wide = st.sampled_from([None, None, IPv4Network("0.0.0.0/0"), IPv4Network("10.0.0.0/8"), IPv6Network("::/0")])
    half = st.sampled_from([ALL_PORTS, ALL_PORTS, (0, 80), (80, PORT_MAX)])
    return st.builds(
        Rule, targets, roles, st.sampled_from(["*", "a*", "?", "a", "[!a]*"]), wide, half, somebody, somebody
    )


def pairs(identity: st.SearchStrategy[int | str] = identities) -> st.SearchStrategy[Pair]:
    side = st.one_of(st.just(Side()), st.builds(Side, identity, st.booleans()))
    return st.builds(Pair, st.tuples(side, side))


def rings() -> st.SearchStrategy[Rings]:
    return st.builds(Rings, st.booleans(), programs)


words = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters='"'), min_size=1, max_size=8)
logs = st.one_of(
    st.builds(Log, st.sampled_from([None, "stderr", "syslog"]), st.none(), st.sampled_from([None, 1, 9])),
    st.builds(Log, st.just("file"), words, st.sampled_from([None, 5])),
)
includes = words.map(Include)
gid_sets = st.frozensets(ids, max_size=3)
often = st.builds(Subject, st.sampled_from([("a",), ("a", "b"), ("b",)]), st.integers(0, 1), st.just(frozenset({0})))
subjects = often | st.builds(Subject, st.lists(names, max_size=3).map(tuple), ids, gid_sets)
