"""Nobody misses a change, whatever goes wrong between the kernel and who follows it."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from netns import Follower, batch, fresh_view, index_of, ip, veth

from sidestep import limits
from sidestep.provider.network import netlink
from sidestep.provider.network.netlink import Frame, Malformed
from sidestep.provider.network.routes import Network
from sidestep.routing import AddressEvent, Change, ChangesLost, RouteEvent

Follow = Callable[..., Follower]
_MANY = 1200  # addresses: their dump takes several pieces


@contextmanager
def nobody() -> Iterator[None]:
    """As a user without any privilege."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_no_privilege_is_needed(follow: Follow) -> None:
    with nobody():
        follower = follow()
    ip("address add 10.3.0.1/32 dev lo")
    with nobody():
        assert follower.settle() == [AddressEvent(Change.ADDED, 1, ip_address("10.3.0.1"), 32)]
        assert follower.network.route(ip_address("10.3.0.1"), uid=1000).local


def test_messages_that_are_not_the_kernels_are_nothing(follow: Follow) -> None:
    follower = follow()
    network = follower.network
    gone = struct.pack("=IHHIIBxHiII", 32 + 8, 17, 0, 1, 0, 0, 1, 1, 0, 0)  # RTM_DELLINK of interface 1
    gone += struct.pack("=HH4s", 7, 3, b"lo\0")
    assert netlink.record_of(Frame(17, 0, 1, gone)) is not None  # it would be believed
    network.route(ip_address("127.0.0.1"))  # a socket has an address once it has sent
    refused = struct.pack("=IHHIIi16x", 36, 2, 0, network._sequence + 1, 0, -errno.ENETUNREACH)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as stranger:
        stranger.sendto(gone, network._announcements.getsockname())
        stranger.sendto(refused, network._requests.getsockname())
    assert network.route(ip_address("127.0.0.2")).local
    ip("address add 10.3.0.1/32 dev lo")
    assert follower.settle() == [AddressEvent(Change.ADDED, 1, ip_address("10.3.0.1"), 32)]


def test_what_a_message_without_sense_may_have_said_is_told(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = follow()
    understood = netlink.record_of

    def not_understood(frame: Frame) -> Any:
        if frame.sequence != 0 and not frame.flags & 2:  # what `ip` caused, but not a dump
            raise Malformed("a test does not understand it")
        return understood(frame)

    monkeypatch.setattr(netlink, "record_of", not_understood)
    ip("route add blackhole 10.9.0.0/16")
    (told,) = follower.settle()
    assert isinstance(told, RouteEvent)
    assert told.destination == ip_network("10.9.0.0/16")
    assert follower.counters.as_json() == {
        "network_ignored{malformed}": 1, "network_resync{malformed}": 1, "network_resync{start}": 1
    }  # fmt: skip


def test_an_object_of_a_snapshot_without_sense_is_counted(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_understood(frame: Frame) -> Any:
        raise Malformed("a test does not understand it")

    monkeypatch.setattr(netlink, "record_of", not_understood)
    follower = follow()
    assert follower.believed == set()
    assert follower.counters.get("network_ignored", "malformed") > 0


@pytest.fixture
def many(follow: Follow) -> Follower:
    """Somebody who follows an interface with many addresses."""
    veth("left", "right")
    batch([f"address add 10.{64 + n // 250}.{n % 250}.1/32 dev left" for n in range(_MANY)])
    follower = follow()
    follower.agrees()
    follower.settle()
    return follower


@pytest.mark.slow
def test_a_snapshot_under_which_the_network_changes_is_taken_again(many: Follower) -> None:
    many.network._begin_snapshot("test", whole=True)
    for _ in range(3):  # all interfaces, and some of the addresses
        many.network.handle_readable()
    batch(["address del 10.64.0.1/32 dev left", "address add 10.99.0.1/32 dev left"])
    told = many.settle()
    left = index_of("left")
    assert sorted(told, key=str) == [
        AddressEvent(Change.ADDED, left, ip_address("10.99.0.1"), 32),
        AddressEvent(Change.REMOVED, left, ip_address("10.64.0.1"), 32),
    ]
    assert many.counters.get("network_resync", "test") == 2
    many.agrees()


@pytest.mark.slow
def test_a_network_that_never_rests_is_told_as_lost_and_found_again(many: Follower) -> None:
    many.network._begin_snapshot("test", whole=True)
    words = ["add", "del"]
    for turn in range(limits.NETWORK_SNAPSHOTS_MAX * 100):
        ip(f"address {words[turn % 2]} 10.99.0.1/32 dev left")
        many.network.handle_readable()
        if many.network._snapshot is None:
            break
    assert many.lost == 1
    assert many.counters.get("network_resync", "test") == limits.NETWORK_SNAPSHOTS_MAX
    ip("address add 10.98.0.1/32 dev left")
    many.agrees()
    many.settle()
    assert many.counters.get("network_resync", "test") > limits.NETWORK_SNAPSHOTS_MAX
    assert many.lost == 1


def test_more_routes_than_are_followed(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NETWORK_FOLLOWED_MAX", 20)
    veth("left", "right")
    ip("address add 10.1.0.1/24 dev left")
    follower = follow()
    follower.agrees()
    batch([f"route add 10.{n}.0.0/16 via 10.1.0.2" for n in range(2, 60)])
    assert len([event for event in follower.settle() if isinstance(event, RouteEvent)]) == 58
    assert not [event for event in follower.network.present() if isinstance(event, RouteEvent)]
    assert {link.interface for link in follower.interfaces()} == {"lo", "left", "right"}
    assert follower.network.route(ip_address("10.9.0.1")).first_hop == ip_address("10.1.0.2")
    ip("route del 10.9.0.0/16")
    told = follower.settle()
    assert [event.destination for event in told if isinstance(event, RouteEvent)] == [ip_network("10.9.0.0/16")]
    follower.lost = 0
    ip("link set left down")  # the routes go in silence
    told = follower.settle()
    assert set(told[told.index(ChangesLost()) + 1 :]) >= set(follower.network.present())
    follower.network._begin_snapshot("test", whole=True)  # there are few now
    follower.settle()
    ip("route add blackhole 10.9.0.0/16")
    follower.settle()
    assert set(follower.network.present()) == follower.believed == fresh_view()


def test_a_snapshot_that_finds_too_many_routes_stops_reading(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    batch([f"route add blackhole 10.{n}.{m}.0/24" for n in range(8) for m in range(256)])
    monkeypatch.setattr(limits, "NETWORK_FOLLOWED_MAX", 20)
    decoded = []
    understood = netlink.record_of

    def counting(frame: Frame) -> Any:
        decoded.append(frame)
        return understood(frame)

    monkeypatch.setattr(netlink, "record_of", counting)
    follower = follow()
    assert len(decoded) < 2048
    assert not [event for event in follower.network.present() if isinstance(event, RouteEvent)]


def test_the_descriptor_stays_the_same(follow: Follow) -> None:
    follower = follow(receive_buffer=1)
    number = follower.network.fileno()
    batch([f"route add blackhole 10.{n}.0.0/16" for n in range(250)])
    follower.settle()
    assert follower.counters.get("network_resync", "overflow") > 0
    assert follower.network.fileno() == number


def test_nothing_is_left_open(netns: None) -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208 - of our own process
    network = Network(lambda event: None)
    network._begin_snapshot("test", whole=True)
    network.close()
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
