"""Lookups say what the kernel says; `ip route get` is the oracle."""

from __future__ import annotations

import errno
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import pytest
from netns import Follower, batch, index_of, ip, ip_json, veth

from sidestep import limits
from sidestep.errors import Misuse
from sidestep.provider.network.routes import Network
from sidestep.routing import Address, NoRoute, Obstacle, Route

Follow = Callable[..., Follower]
_ERRORS = {os.strerror(number): number for number in errno.errorcode}
_KINDS = ["blackhole", "unreachable", "prohibit", "throw"]


@dataclass(frozen=True)
class Question:
    """A lookup, for both sides."""

    destination: Address
    source: Address | None = None
    uid: int | None = None
    mark: int = 0
    interface: str | None = None

    def ask(self, network: Network) -> tuple[object, ...]:
        try:
            found = network.route(
                self.destination, source=self.source, uid=self.uid, mark=self.mark, interface=self.interface
            )
        except NoRoute as none:
            return ("no", none.errno)
        assert found.interface_index == index_of(found.interface)
        return _told(found)

    def ask_oracle(self) -> tuple[object, ...]:
        words = ["route", "get", str(self.destination), "ipproto", "tcp"]
        if self.source:
            words += ["from", str(self.source)]
        if self.interface:
            words += ["oif", self.interface]
        if self.uid is not None:
            words += ["uid", str(self.uid)]
        if self.mark:
            words += ["mark", str(self.mark)]
        try:
            (found,) = ip_json(" ".join(words))
        except subprocess.CalledProcessError as error:
            return ("no", _errno_of(error.stderr.decode()))
        if found.get("type") in ("broadcast", "multicast"):
            return ("no", errno.ENETUNREACH)  # what connect() makes of it
        hop = found.get("gateway") or (found["via"]["host"] if "via" in found else None)
        source = found.get("prefsrc") or (str(self.source) if self.source else None)
        return (found["dev"], hop, source, found.get("type") == "local")


def _told(route: Route) -> tuple[object, ...]:
    return (
        route.interface,
        str(route.first_hop) if route.first_hop else None,
        str(route.source) if route.source else None,
        route.local,
    )


def _errno_of(text: str) -> int:
    (words,) = re.findall(r"RTNETLINK answers: (.*)", text)
    return _ERRORS[words]


@pytest.fixture
def network(follow: Follow) -> Network:
    """In a namespace with two interfaces that have addresses."""
    follower = follow()
    for number, name in ((1, "left"), (2, "north")):
        veth(name, f"{name}-end")
        batch([f"address add 10.{number}.0.1/24 dev {name}", f"address add 2001:db8:{number}::1/64 dev {name} nodad"])
    return follower.network


@pytest.mark.parametrize(
    "question",
    [
        Question(ip_address("127.0.0.1")),
        Question(ip_address("::1")),
        Question(ip_address("10.1.0.1")),  # our own
        Question(ip_address("2001:db8:1::1")),
        Question(ip_address("10.1.0.7")),  # on the link
        Question(ip_address("2001:db8:1::7")),
        Question(ip_address("10.1.0.255")),  # broadcast
        Question(ip_address("224.0.0.1")),
        Question(ip_address("10.99.0.1")),  # no route
        Question(ip_address("2001:db8:99::1")),
        Question(ip_address("10.1.0.7"), source=ip_address("10.2.0.1")),
        Question(ip_address("10.1.0.7"), source=ip_address("10.77.0.1")),  # not ours
        Question(ip_address("2001:db8:1::7"), source=ip_address("2001:db8:2::1")),
        Question(ip_address("10.99.0.1"), interface="left"),
        Question(ip_address("0.0.0.0")),
    ],
    ids=str,
)
def test_a_lookup_without_any_routes(network: Network, question: Question) -> None:
    assert question.ask(network) == question.ask_oracle()


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("to", ["10.9.0.0/16", "2001:db8:9::/48"])
def test_a_route_that_leads_nowhere(network: Network, kind: str, to: str) -> None:
    ip(f"route add {kind} {to}")
    question = Question(ip_address(to.partition("/")[0]))
    expected = {
        "blackhole": Obstacle.BLACKHOLE, "unreachable": Obstacle.UNREACHABLE,
        "prohibit": Obstacle.PROHIBITED, "throw": Obstacle.UNREACHABLE,
    }  # fmt: skip
    with pytest.raises(NoRoute) as caught:
        network.route(question.destination)
    assert caught.value.obstacle is expected[kind]
    assert question.ask(network) == question.ask_oracle()


def test_the_first_hop_and_the_interface_are_named(network: Network) -> None:
    batch(["route add 10.9.0.0/16 via 10.1.0.2", "route add 10.8.0.0/16 via inet6 2001:db8:2::5 dev north",
           "route add 2001:db8:9::/48 via 2001:db8:1::2"])  # fmt: skip
    left, north = index_of("left"), index_of("north")
    for to, interface, index, source, hop in (
        ("10.9.1.1", "left", left, "10.1.0.1", "10.1.0.2"),
        ("10.8.1.1", "north", north, "10.2.0.1", "2001:db8:2::5"),
        ("2001:db8:9::9", "left", left, "2001:db8:1::1", "2001:db8:1::2"),
        ("10.1.0.9", "left", left, "10.1.0.1", None),
    ):
        destination = ip_address(to)
        expected = Route(
            destination, interface, index, ip_address(source), ip_address(hop) if hop else None, local=False
        )  # fmt: skip
        assert network.route(destination) == expected
        assert network.route(destination) == expected  # from memory


def test_rules_by_user_and_by_mark(network: Network) -> None:
    batch(["route add 10.9.0.0/16 via 10.1.0.2", "route add 10.9.0.0/16 via 10.2.0.2 table 100",
           "route add prohibit 10.9.0.0/16 table 101",
           "rule add uidrange 1000-1999 lookup 100", "rule add fwmark 7 lookup 101"])  # fmt: skip
    to = ip_address("10.9.0.1")
    for question in (
        Question(to), Question(to, uid=999), Question(to, uid=1000), Question(to, uid=1999), Question(to, uid=2000),
        Question(to, mark=7), Question(to, uid=0, mark=6),
    ):  # fmt: skip
        for _ in range(2):
            assert question.ask(network) == question.ask_oracle()
    assert network.route(to, uid=1500).first_hop == ip_address("10.2.0.2")
    ip("rule del uidrange 1000-1999 lookup 100")
    assert network.route(to, uid=1500).first_hop == ip_address("10.1.0.2")


@pytest.mark.parametrize(("family", "to"), [("-4", "10.9.0.0/16"), ("-6", "2001:db8:9::/48")])
def test_rules_by_protocol_are_those_for_tcp(network: Network, family: str, to: str) -> None:
    near = "10.{}.0.{}" if family == "-4" else "2001:db8:{}::{}"
    hops = [near.format(*numbers) for numbers in ((1, 2), (2, 2), (2, 3))]
    for hop, table in zip(hops, ("main", "100", "101"), strict=True):
        ip(f"{family} route add {to} via {hop} table {table}")
    ip(f"{family} rule add ipproto udp lookup 101")
    destination = ip_address(to.partition("/")[0]) + 1
    assert network.route(destination).first_hop == ip_address(hops[0])
    ip(f"{family} rule add ipproto tcp lookup 100")
    assert network.route(destination).first_hop == ip_address(hops[1])
    assert Question(destination).ask(network) == Question(destination).ask_oracle()


@pytest.mark.parametrize("taken_in", [True, False])
def test_a_change_counts_from_the_next_lookup_on(network: Network, taken_in: bool) -> None:
    """What was remembered is not told, even if nobody has taken the announcement in yet."""
    to, to_6 = ip_address("10.9.0.1"), ip_address("2001:db8:9::9")
    for hop in ("2", "3") * 10:
        ip(f"route replace 10.9.0.0/16 via 10.1.0.{hop}")
        ip(f"-6 route replace 2001:db8:9::/48 via 2001:db8:1::{hop}")
        if taken_in:
            network.handle_readable()
            network._quiet_from = 0  # remembers at once
        for _ in range(2):
            assert network.route(to).first_hop == ip_address(f"10.1.0.{hop}")
            assert network.route(to_6).first_hop == ip_address(f"2001:db8:1::{hop}")
    ip("link set left name middle")
    assert network.route(to).interface == "middle"
    ip("link set middle down")
    with pytest.raises(NoRoute):
        network.route(to)


class CountingNetwork(Network):
    """Counts the questions that reach the kernel, under a clock that the test moves."""

    def __init__(self) -> None:
        self.asked, self.now = 0, 100.0
        super().__init__(lambda event: None, clock=lambda: self.now)

    def _ask(self, question: Any) -> Any:
        self.asked += 1
        return super()._ask(question)


@pytest.fixture
def counting(netns: None) -> Iterator[CountingNetwork]:
    network = CountingNetwork()
    yield network
    network.close()


def test_answers_are_remembered_for_a_bounded_time(counting: CountingNetwork) -> None:
    host, nowhere = ip_address("127.0.0.1"), ip_address("10.0.0.1")
    for _ in range(3):
        assert counting.route(host).local
        with pytest.raises(NoRoute):
            counting.route(nowhere)
    assert counting.asked == 2
    counting.now += limits.ROUTE_CACHE_AGE_S
    counting.route(host)
    assert counting.asked == 3


def test_answers_are_remembered_in_a_bounded_table(counting: CountingNetwork) -> None:
    hosts = [IPv4Address(0x7F000001 + number) for number in range(limits.ROUTES_CACHED_MAX + 1)]
    for host in hosts:
        counting.route(host)
    asked = counting.asked
    counting.route(hosts[-1])
    counting.route(hosts[1])
    assert counting.asked == asked
    counting.route(hosts[0])  # the oldest was forgotten
    assert counting.asked == asked + 1


def test_nothing_is_remembered_while_a_change_may_be_under_way(counting: CountingNetwork) -> None:
    host = ip_address("127.0.0.1")
    ip("address add 10.3.0.1/32 dev lo")
    counting.handle_readable()
    for asked in (1, 2):
        counting.route(host)
        assert counting.asked == asked
    counting.now += limits.ROUTE_SETTLE_S
    for _ in range(2):
        counting.route(host)
    assert counting.asked == 3


def test_addresses_are_those_on_the_wire(network: Network) -> None:
    assert network.route(ip_address("::ffff:10.1.0.7")) == network.route(ip_address("10.1.0.7"))
    assert network.route(ip_address("::")).destination == IPv6Address("::1")
    assert network.route(ip_address("10.1.0.7"), source=ip_address("::ffff:10.2.0.1")).source == ip_address("10.2.0.1")
    assert network.route(ip_address("10.1.0.7"), source=ip_address("0.0.0.0")).source == ip_address("10.1.0.1")
    assert network.route(ip_address("::ffff:10.1.0.7"), source=ip_address("::")).source == ip_address("10.1.0.1")


def test_a_link_local_address_goes_by_its_scope(network: Network) -> None:
    batch(["address add fe80::1/64 dev left nodad", "address add fe80::2/64 dev north nodad"])
    for name in ("left", "north"):
        assert network.route(IPv6Address(f"fe80::9%{name}")).interface == name
        assert network.route(IPv6Address("fe80::9"), interface=name).interface == name


def test_an_interface_that_is_not_there(network: Network) -> None:
    with pytest.raises(NoRoute, match="no such interface") as caught:
        network.route(ip_address("10.1.0.7"), interface="nowhere")
    assert caught.value.errno == errno.ENODEV


def test_there_is_no_way_from_one_family_to_the_other(network: Network) -> None:
    with pytest.raises(NoRoute) as caught:
        network.route(ip_address("10.1.0.7"), source=ip_address("2001:db8:1::1"))
    assert caught.value.errno == errno.EAFNOSUPPORT


@pytest.mark.parametrize("wrong", [{"mark": -1}, {"mark": 2**32}, {"uid": -1}, {"uid": 2**32}])
def test_a_user_or_mark_that_cannot_be_is_misuse(network: Network, wrong: dict[str, int]) -> None:
    with pytest.raises(Misuse):
        network.route(ip_address("10.1.0.7"), uid=wrong.get("uid"), mark=wrong.get("mark", 0))


def _random_routes(rng: random.Random, word: str, count: int) -> list[str]:
    """Commands that add or change routes: some of them cannot be."""
    commands = []
    for _ in range(count):
        number = rng.randrange(8)
        if six := rng.random() < 0.5:
            to = f"2001:db8:9{number}00::/{rng.choice([40, 44, 48])}"
        else:
            to = f"10.{96 + number}.0.0/{rng.choice([12, 14, 16, 24])}"
        links = [rng.randrange(1, 3) for _ in range(3)]
        near = "via 2001:db8:{}::{}" if six else "via 10.{}.0.{}"
        hops = [near.format(link, rng.randrange(2, 9)) for link in links]
        table = rng.choice(["", "", " table 100"])
        metric = rng.choice(["", f" metric {rng.randrange(1, 4)}"])
        way = rng.choice([hops[0], f"dev {rng.choice(['left', 'north'])}", " ".join(f"nexthop {hop}" for hop in hops)])
        kind = rng.choice(_KINDS) + " " if rng.random() < 0.25 else ""
        commands.append(f"route {word} {kind}{to}{table}{metric}{'' if kind else ' ' + way}")
    return commands


def _random_question(rng: random.Random) -> Question:
    if rng.random() < 0.5:
        destination: Address = IPv4Address(f"10.{rng.randrange(94, 106)}.{rng.randrange(3)}.{rng.randrange(1, 255)}")
        sources = [None, ip_address("10.1.0.1"), ip_address("10.2.0.1")]
    else:
        destination = IPv6Address(
            f"2001:db8:9{rng.randrange(9)}{rng.randrange(2)}{rng.randrange(2)}::{rng.randrange(1, 9)}"
        )
        sources = [None, ip_address("2001:db8:1::1"), ip_address("2001:db8:2::1")]
    return Question(
        destination, rng.choice(sources), rng.choice([None, 0, 1500]), rng.choice([0, 0, 7]),
        rng.choice([None, None, "left", "north"]),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_routes_are_those_of_the_kernel(follow: Follow, network: Network, seed: int) -> None:
    rng = random.Random(seed)
    follower = follow()
    batch(["rule add uidrange 1000-1999 lookup 100", "rule add fwmark 7 lookup 100"])
    ip("-6 rule add uidrange 1000-1999 lookup 100")
    follower.settle()
    answers = set()
    for turn in range(4):
        batch(_random_routes(rng, "add", 25) + _random_routes(rng, "replace", 10), force=True)
        batch(_random_routes(rng, "append", 5) + _random_routes(rng, "del", 20), force=True)
        if turn == 2:
            batch(["link set north down"])
        for question in [_random_question(rng) for _ in range(20)]:
            expected = question.ask_oracle()
            answers.add(expected[0])
            for _ in range(2):
                assert question.ask(follower.network) == expected, f"seed {seed}: {question}"
        follower.agrees()
    assert len(answers) > 1  # not only refusals
