"""Changes of real interfaces, addresses and routes reach who follows them, exactly."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address, ip_network

import pytest
from netns import Follower, batch, index_of, ip, ip_json, veth

from sidestep.provider.network.routes import Network
from sidestep.routing import AddressEvent, Change, LinkEvent, NetworkEvent, RouteEvent, RouteKind

Follow = Callable[..., Follower]
ADDED, REMOVED = Change.ADDED, Change.REMOVED


def address(change: Change, index: int, text: str) -> AddressEvent:
    host, _, length = text.partition("/")
    return AddressEvent(change, index, ip_address(host), int(length))


def route(
    change: Change, index: int | None, to: str, via: str | None = None, *,
    kind: RouteKind = RouteKind.UNICAST, metric: int | None = None, table: int = 254,
) -> RouteEvent:  # fmt: skip
    destination = ip_network(to)
    if metric is None:
        metric = 0 if destination.version == 4 else 1024  # what the kernel gives those that name none
    return RouteEvent(change, destination, ip_address(via) if via else None, index, kind, table, metric)


@pytest.fixture
def scene(follow: Follow) -> tuple[Follower, int]:
    """Two interfaces that are up, the first with addresses; a follower, and the first one's number."""
    follower = follow()
    veth("left", "right")
    left, right = index_of("left"), index_of("right")
    follower.wait_for(LinkEvent(ADDED, "left", left, True), LinkEvent(ADDED, "right", right, True))
    check(
        follower, "address add 10.1.0.1/24 dev left",
        address(ADDED, left, "10.1.0.1/24"), route(ADDED, left, "10.1.0.0/24"),
    )  # fmt: skip
    check(
        follower, "address add 2001:db8::1/64 dev left nodad",
        address(ADDED, left, "2001:db8::1/64"), route(ADDED, left, "2001:db8::/64", metric=256),
    )  # fmt: skip
    return follower, left


def check(follower: Follower, command: str, *expected: NetworkEvent) -> None:
    """Of one command just this is told, each once; in which order is the kernel's choice."""
    ip(command)
    assert sorted(map(str, follower.wait_for(*expected))) == sorted(map(str, expected))


def told_of(follower: Follower, command: str) -> list[NetworkEvent]:
    """What is told at once of one command."""
    ip(command)
    return follower.settle()


def test_an_interface_comes_changes_its_state_and_its_name_and_goes(follow: Follow) -> None:
    follower = follow()
    ip("link add left type veth peer name right")
    left, right = index_of("left"), index_of("right")
    assert set(follower.settle()) == {LinkEvent(ADDED, "left", left, False), LinkEvent(ADDED, "right", right, False)}
    ip("link set left up")
    assert follower.settle() == []  # without its other end it has no carrier
    ip("link set right up")
    follower.wait_for(LinkEvent(ADDED, "left", left, True), LinkEvent(ADDED, "right", right, True))
    ip("link set left name middle")
    assert follower.settle() == [LinkEvent(ADDED, "middle", left, True)]
    assert {link.interface for link in follower.interfaces()} == {"lo", "middle", "right"}
    ip("link delete middle")
    told = follower.settle()
    assert {LinkEvent(REMOVED, "middle", left, False), LinkEvent(REMOVED, "right", right, False)} <= set(told)
    assert [link.interface for link in follower.interfaces()] == ["lo"]
    follower.agrees()


def test_joining_and_leaving_a_bridge_is_not_the_end_of_an_interface(scene: tuple[Follower, int]) -> None:
    follower, left = scene
    ip("link add bridge type bridge")
    follower.settle()
    ip("link set left master bridge")
    ip("link set left nomaster")
    told = follower.settle()
    assert not [event for event in told if isinstance(event, LinkEvent) and event.interface_index == left]
    assert "left" in {link.interface for link in follower.interfaces()}
    follower.agrees()


@pytest.mark.parametrize(
    ("text", "network", "metric"), [("10.2.0.1/24", "10.2.0.0/24", 0), ("2001:db8:2::1/64", "2001:db8:2::/64", 256)]
)
def test_an_address_comes_and_goes_with_its_route(
    scene: tuple[Follower, int], text: str, network: str, metric: int
) -> None:
    follower, left = scene
    nodad = " nodad" if ":" in text else ""
    for command, change in ((f"add {text} dev left{nodad}", ADDED), (f"del {text} dev left", REMOVED)):
        expected = address(change, left, text), route(change, left, network, metric=metric)
        check(follower, f"address {command}", *expected)


def test_an_address_is_there_once_no_duplicate_was_found(scene: tuple[Follower, int]) -> None:
    follower, left = scene
    there = address(ADDED, left, "2001:db8:5::1/64")
    ip("address add 2001:db8:5::1/64 dev left")
    assert there not in follower.settle()
    follower.wait_for(there)
    assert ip_address("2001:db8:5::1") in {known.address for known in follower.addresses()}


def test_a_point_to_point_address_is_the_near_one(scene: tuple[Follower, int]) -> None:
    follower, left = scene
    check(
        follower, "address add 10.7.0.1 peer 10.7.0.2/32 dev left",
        address(ADDED, left, "10.7.0.1/32"), route(ADDED, left, "10.7.0.2/32"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "to", "via"),
    [
        ("10.9.0.0/16 via 10.1.0.2", "10.9.0.0/16", "10.1.0.2"),
        ("10.9.0.0/16 dev left", "10.9.0.0/16", None),
        ("10.9.0.0/16 via inet6 2001:db8::5 dev left", "10.9.0.0/16", "2001:db8::5"),
        ("default via 10.1.0.2", "0.0.0.0/0", "10.1.0.2"),
        ("2001:db8:9::/48 via 2001:db8::2", "2001:db8:9::/48", "2001:db8::2"),
        ("default via 2001:db8::2", "::/0", "2001:db8::2"),
    ],
)
def test_a_route_comes_and_goes(scene: tuple[Follower, int], arguments: str, to: str, via: str | None) -> None:
    follower, left = scene
    family = "-6" if ":" in to else "-4"
    for word, change in (("add", ADDED), ("del", REMOVED)):
        check(follower, f"{family} route {word} {arguments}", route(change, left, to, via))
        other = route(change, left, to, via, metric=7, table=1000)
        check(follower, f"{family} route {word} {arguments} metric 7 table 1000", other)


@pytest.mark.parametrize("kind", [RouteKind.BLACKHOLE, RouteKind.UNREACHABLE, RouteKind.PROHIBIT, RouteKind.THROW])
@pytest.mark.parametrize("to", ["10.9.0.0/16", "2001:db8:9::/48"])
def test_a_route_that_leads_nowhere(scene: tuple[Follower, int], kind: RouteKind, to: str) -> None:
    follower, _ = scene
    for word, change in (("add", ADDED), ("del", REMOVED)):
        check(follower, f"route {word} {kind.name.lower()} {to}", route(change, None, to, kind=kind))


@pytest.mark.parametrize(("to", "gateway"), [("10.9.0.0/16", "10.1.0.{}"), ("2001:db8:9::/48", "2001:db8::{}")])
def test_a_route_is_replaced(scene: tuple[Follower, int], to: str, gateway: str) -> None:
    follower, left = scene
    family = "-6" if ":" in to else "-4"
    one, two, three = (gateway.format(number) for number in (2, 3, 4))
    gone, come = partial(route, REMOVED, left, to), partial(route, ADDED, left, to)
    ip(f"{family} route add {to} via {one}")
    follower.settle()
    check(follower, f"{family} route replace {to} via {two}", gone(one), come(two))
    several = f"nexthop via {one} nexthop via {three}"
    check(follower, f"{family} route replace {to} {several}", gone(two), come(one), come(three))
    check(follower, f"{family} route replace {to} via {two}", gone(one), gone(three), come(two))
    follower.agrees()


def test_a_hop_of_several_goes(scene: tuple[Follower, int]) -> None:
    follower, left = scene
    ip("-6 route add 2001:db8:9::/48 nexthop via 2001:db8::2 nexthop via 2001:db8::3")
    follower.settle()
    gone = route(REMOVED, left, "2001:db8:9::/48", "2001:db8::2")
    check(follower, "-6 route del 2001:db8:9::/48 via 2001:db8::2", gone)


def test_ipv4_routes_that_go_in_silence_are_told(scene: tuple[Follower, int]) -> None:
    follower, left = scene
    batch(["route add 10.9.0.0/16 via 10.1.0.2", "address add 10.3.0.1/32 dev lo",
           "route add 10.8.0.0/16 dev left src 10.3.0.1"])  # fmt: skip
    follower.settle()
    assert route(REMOVED, left, "10.8.0.0/16") in told_of(follower, "address del 10.3.0.1/32 dev lo")
    assert route(REMOVED, left, "10.9.0.0/16", "10.1.0.2") in told_of(follower, "link set left down")
    assert follower.counters.get("network_resync", "silent") > 0
    follower.agrees()


def test_a_hop_of_several_comes_back_with_its_interface(scene: tuple[Follower, int]) -> None:
    follower, left = scene
    veth("north", "south")
    ip("address add 10.2.0.1/24 dev north")
    ip("route add 10.9.0.0/16 nexthop via 10.1.0.2 nexthop via 10.2.0.2")
    follower.settle()
    gone = route(REMOVED, left, "10.9.0.0/16", "10.1.0.2")
    assert gone in told_of(follower, "link set left down")
    assert route(ADDED, left, "10.9.0.0/16", "10.1.0.2") in told_of(follower, "link set left up")


def test_next_hop_objects(scene: tuple[Follower, int]) -> None:
    follower, left = scene
    try:
        ip("nexthop add id 5 via 10.1.0.2 dev left")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no next hop objects here: {error.stderr!r}")
    check(follower, "route add 10.9.0.0/16 nhid 5", route(ADDED, left, "10.9.0.0/16", "10.1.0.2"))
    told_of(follower, "nexthop replace id 5 via 10.1.0.3 dev left")
    follower.agrees()
    told_of(follower, "nexthop del id 5")
    follower.agrees()


def test_what_was_lost_in_an_overflow_is_told(scene: tuple[Follower, int], follow: Follow) -> None:
    _, left = scene
    follower = follow(receive_buffer=1)  # the kernel makes it a few kilobytes
    ip("route add 10.250.0.0/16 via 10.1.0.2")
    follower.settle()
    # The first few fit into the socket; what they say is old when the snapshot is taken, and must not be told after it.
    commands = ["route del 10.250.0.0/16", "route add 10.251.0.0/16 via 10.1.0.2", "route del 10.251.0.0/16"]
    commands += [f"route add 10.{n}.0.0/16 via 10.1.0.{n}" for n in range(2, 200)]
    commands += [f"address add 2001:db8:{n}::1/64 dev left nodad" for n in range(2, 100)]
    commands += ["link add late type veth peer name later", "address del 2001:db8::1/64 dev left"]
    batch(commands)
    told = follower.settle()
    assert follower.counters.get("network_resync", "overflow") > 0
    assert follower.lost == 0
    assert ip_network("10.251.0.0/16") not in {getattr(event, "destination", None) for event in told}
    follower.agrees()
    late = index_of("late")
    assert {
        route(REMOVED, left, "10.250.0.0/16", "10.1.0.2"), route(ADDED, left, "10.199.0.0/16", "10.1.0.199"),
        address(ADDED, left, "2001:db8:99::1/64"), address(REMOVED, left, "2001:db8::1/64"),
        LinkEvent(ADDED, "late", late, False),
    } <= set(told)  # fmt: skip
    assert told_of(follower, "link delete late") != []  # and it goes on


def test_the_interfaces_and_addresses_are_those_of_ip(scene: tuple[Follower, int]) -> None:
    follower, _ = scene
    known = {(link.interface, link.interface_index, link.up) for link in follower.interfaces()}
    listed = ip_json("address show")
    assert known == {
        (link["ifname"], link["ifindex"], {"UP", "LOWER_UP"} <= set(link["flags"])) for link in listed
    }  # fmt: skip
    assert {(one.interface_index, str(one.address), one.prefix_len) for one in follower.addresses()} == {
        (link["ifindex"], one["local"], one["prefixlen"]) for link in listed for one in link["addr_info"]
    }


def test_nothing_is_told_once_it_is_closed(scene: tuple[Follower, int]) -> None:
    told: list[NetworkEvent] = []

    def close_at_once(event: NetworkEvent) -> None:
        told.append(event)
        network.close()

    network = Network(close_at_once)
    batch(["route add 10.8.0.0/16 via 10.1.0.2", "route add 10.9.0.0/16 via 10.1.0.2"])
    network.handle_readable()
    assert len(told) == 1
