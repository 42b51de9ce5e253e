"""The compiled policy against one that looks at every rule."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Network, IPv6Network, ip_address

import policy_reference as reference
import policy_strategies as some
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidestep.policy import BOTH, Decision, Pair, Policy, Role, Rule, Subject
from sidestep.policy.grammar import parse
from sidestep.policy.model import Origin, Rings
from sidestep.policy.review import _Ranges, review
from sidestep.routing import Address, Network

WHO = Subject(("redis-cli",), 1000, frozenset({1000}))
EVERYWHERE: list[Network] = [IPv4Network("0.0.0.0/0"), IPv6Network("::/0")]
numbered_rules = some.rules(some.ids)


@st.composite
def near(draw: st.DrawFn, rules: list[Rule]) -> tuple[Address, int]:
    """An address and a port at, or next to, the edge of what some rule says; or any."""
    address, port = draw(some.addresses), draw(some.ports)
    rule = draw(st.sampled_from(rules)) if rules else None
    if rule is not None and rule.network is not None and draw(st.booleans()):
        edge = draw(st.sampled_from([rule.network.network_address, rule.network.broadcast_address]))
        number = int(edge) + draw(st.sampled_from([-1, 0, 0, 1]))
        address = type(edge)(number % (1 << edge.max_prefixlen))
        if address.version == 4 and draw(st.booleans()):
            address = ip_address(f"::ffff:{address}")
    if rule is not None and draw(st.booleans()):
        port = max(0, min(65535, draw(st.sampled_from(rule.ports)) + draw(st.sampled_from([-1, 0, 0, 1]))))
    return address, port


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    data=st.data(),
    rules=st.lists(numbered_rules | some.broad_rules(), max_size=25),
    role=some.roles,
    subject=some.subjects,
)
def test_the_compiled_policy_decides_as_the_reference_does(
    data: st.DataObject, rules: list[Rule], role: Role, subject: Subject
) -> None:
    policy = Policy(rules)
    for _ in range(5):
        address, port = data.draw(near(rules))
        expected = reference.first_rule(rules, role, subject, address, port)
        found = policy.decide(role, subject, address, port)
        assert found.rule is expected
        assert found.target == (expected.target if expected else BOTH)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    pairs=st.lists(some.pairs(some.ids), max_size=8),
    uids=st.tuples(some.ids, some.ids), gids_a=some.gid_sets, gids_b=some.gid_sets,
)  # fmt: skip
def test_pairs_are_found_as_the_reference_finds_them(
    pairs: list[Pair], uids: tuple[int, int], gids_a: frozenset[int], gids_b: frozenset[int]
) -> None:
    policy = Policy(pairs)
    found = policy.may_pair(uids[0], gids_a, uids[1], gids_b)
    assert found is reference.first_pair(pairs, uids[0], gids_a, uids[1], gids_b)
    assert found is policy.may_pair(uids[1], gids_b, uids[0], gids_a)  # whoever comes first


@given(rings=st.lists(some.rings(), max_size=6), subject=some.subjects)
def test_rings_are_judged_as_the_reference_judges_them(rings: list[Rings], subject: Subject) -> None:
    assert Policy(rings).file_rings(subject) is reference.rings_have_files(rings, subject)


@pytest.mark.parametrize(
    ("text", "program", "files"),
    [
        ("", "mariadbd", True),
        ("", "qemu-system-x86_64", False),  # which waits for sockets by its ring, too
        ("rings sockets mariadbd", "mariadbd", False),
        ("rings files qemu-*\nrings sockets *", "qemu-system-x86_64", True),
        ("use tcp listen mariadbd *:*", "mariadbd", True),
    ],
)
def test_what_the_policy_says_of_rings_precedes_what_is_known(text: str, program: str, files: bool) -> None:
    assert Policy(parse(text.encode()).statements).file_rings(Subject((program,), 0, frozenset())) is files


@given(pattern=some.programs, name=some.names)
@example(pattern="[^a]b", name="^b")
@example(pattern="[^a]b", name="cb")
@example(pattern="[]-a]", name="^")
def test_programs_match_as_in_the_c_library(pattern: str, name: str) -> None:
    policy = Policy([Rule("tcp", Role.CONNECT, pattern)])
    found = policy.decide(Role.CONNECT, Subject((name,), 0, frozenset()), ip_address("::1"), 1)
    assert (found.rule is not None) == reference.program_matches(pattern, name)


def policy_of(text: str, **names: dict[str, int]) -> Policy:
    document = parse(text.encode())
    assert document.problems == ()
    return Policy(document.statements, **names)


def target(policy: Policy, address: str = "10.0.0.1", port: int = 80, who: Subject = WHO) -> str:
    return policy.decide(Role.CONNECT, who, ip_address(address), port).target


def test_nothing_said_is_both() -> None:
    assert Policy().decide(Role.CONNECT, WHO, ip_address("10.0.0.1"), 80) == Decision(BOTH, None)
    assert Policy().may_pair(1, (), 1, ()) is None


def test_the_first_rule_wins_whatever_is_narrower() -> None:
    policy = policy_of("use sdp connect * 10.0.0.0/8:*\nuse tcp connect redis-cli 10.0.0.1:80")
    assert target(policy) == "sdp"
    assert policy.decide(Role.CONNECT, WHO, ip_address("10.0.0.1"), 80).rule == Rule(
        "sdp", Role.CONNECT, network=IPv4Network("10.0.0.0/8")
    )


def test_rules_of_several_kinds_of_programs_stay_in_order() -> None:
    policy = policy_of(
        "use tcp connect redis-cli 10.0.0.0/8:*\nuse sdp connect * *:80\nuse local connect redis-* *:*\n"
        "use tcp connect redis-cli *:*"
    )
    assert target(policy) == "tcp"
    assert target(policy, "11.0.0.1") == "sdp"
    assert target(policy, "11.0.0.1", 81) == "local"


def test_any_name_of_a_program_may_match() -> None:
    policy = policy_of("use tcp connect java* *:*")
    assert target(policy, who=Subject(("run", "java-17"), 1, frozenset())) == "tcp"
    assert target(policy, who=Subject(("run", "perl"), 1, frozenset())) == "both"
    assert target(policy, who=Subject((), 1, frozenset())) == "both"


def test_a_mapped_address_is_its_ipv4_address() -> None:
    policy = policy_of("use tcp connect * 10.0.0.0/8:*\nuse sdp connect * [::ffff:11.0.0.0]/104:*")
    assert target(policy, "::ffff:10.1.2.3") == "tcp"
    assert target(policy, "11.1.2.3") == "sdp"
    assert target(policy_of("use tcp connect * [::]/0:*"), "::ffff:10.1.2.3") == "both"
    assert target(policy_of("use tcp connect * [::]/0:*"), "2001:db8::1") == "tcp"


def test_users_and_groups_are_matched_by_number() -> None:
    policy = policy_of("use tcp connect * *:* user alice group dba", uids={"alice": 1000}, gids={"dba": 7})
    assert target(policy, who=Subject(("x",), 1000, frozenset({1, 7}))) == "tcp"
    assert target(policy, who=Subject(("x",), 1000, frozenset({1}))) == "both"
    assert target(policy, who=Subject(("x",), 1001, frozenset({7}))) == "both"


def test_a_rule_about_somebody_unknown_matches_nobody() -> None:
    policy = policy_of("use tcp connect * *:* user nobody-here\npair nobody-here *")
    assert target(policy) == "both"
    assert policy.may_pair(1, (), 2, ()) is None


def test_a_decision_tells_its_line() -> None:
    (statement,) = parse(b"\n  use  tcp client  ssh *:22  # by hand", "/etc/p.conf").statements
    found = Policy([statement]).decide(Role.CONNECT, Subject(("ssh",), 0, frozenset()), ip_address("::1"), 22)
    assert found.as_json() == {
        "target": "tcp", "over": None, "rule": {"file": "/etc/p.conf", "line": 2, "text": "use  tcp client  ssh *:22"},
    }  # fmt: skip


def test_ports_that_overlap_go_to_the_first_rule() -> None:
    rules = [
        Rule("tcp", Role.LISTEN, ports=(first, last)) for first, last in [(5, 9), (1, 6), (8, 20), (5, 9), (0, 65535)]
    ]
    policy = Policy(rules)
    found = [policy.decide(Role.LISTEN, WHO, ip_address("::1"), port).rule for port in (0, 1, 5, 9, 10, 20, 21, 65535)]
    assert [rules.index(rule) if rule else None for rule in found] == [4, 1, 0, 0, 2, 2, 4, 4]


def test_a_thousand_subjects_more_than_are_remembered() -> None:
    policy = policy_of("use tcp connect p*7 *:*\nuse sdp connect p5* *:*")
    for number in [*range(3000), *range(100)]:
        name = f"p{number}"
        expected = "tcp" if name.endswith("7") else "sdp" if name.startswith("p5") else "both"
        assert target(policy, who=Subject((name,), 0, frozenset())) == expected


@pytest.mark.slow
def test_ten_thousand_rules_are_not_read_one_by_one() -> None:
    rules = [
        Rule("tcp", Role.CONNECT, network=IPv6Network(((0x20010DB8 << 96) + (n << 16), 112))) for n in range(10_000)
    ]
    policy = Policy(rules)
    assert policy.decide(Role.CONNECT, WHO, ip_address("2001:db8::270f:1"), 1).rule is rules[-1]
    (table,) = policy._classes[Role.CONNECT].tables(WHO)
    assert [len(networks) for _, networks in table.lengths[6]] == [10_000]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data(), rules=st.lists(numbered_rules | some.broad_rules(), max_size=15))
def test_a_rule_that_is_said_never_to_decide_never_does(data: st.DataObject, rules: list[Rule]) -> None:
    placed = [replace(rule, origin=Origin("p", line)) for line, rule in enumerate(rules, start=1)]
    never = {problem.line for problem in review(placed, ["sdp", "local", "x-2"])}
    policy = Policy(placed)
    assert never <= set(range(1, len(placed) + 1))
    for rule in placed:
        if rule.origin.line in never:
            # its own corners, asked for by somebody it is about
            network = rule.network or data.draw(st.sampled_from(EVERYWHERE))
            edge = data.draw(st.sampled_from([network.network_address, network.broadcast_address]))
            who = Subject((rule.program.replace("*", "a"),), int(rule.user or 0), frozenset({int(rule.group or 0)}))
            found = policy.decide(rule.role, who, edge, data.draw(st.sampled_from(rule.ports)))
            assert found.rule is not rule


@pytest.mark.slow
def test_reviewing_ten_thousand_rules_does_not_compare_each_with_each() -> None:
    lines = [f"use tcp connect p{n % 100} 10.{n % 250}.0.0/{16 + n % 8}:{n}-{n + 3}" for n in range(10_000)]
    document = parse("\n".join(lines).encode())
    compared = 0

    class Counted(_Ranges):
        def covering(self, first: int, last: int) -> int | None:
            nonlocal compared
            compared += 1
            return super().covering(first, last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sidestep.policy.review._Ranges", Counted)
        assert list(review(document.statements, [])) == []
    assert 0 < compared < 200_000
