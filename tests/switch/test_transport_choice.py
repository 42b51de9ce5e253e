"""Which transport the switch chooses: by rule, by order, by capability and route, and without those that fail."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address
from typing import ClassVar

import pytest
from modules_world import Point, no_services

from sidestep.errors import Unavailable
from sidestep.loop import Loop
from sidestep.rdma.iwarp.device import IwarpDevice
from sidestep.rdma.verbs import Device
from sidestep.routing import Address, NoRoute, Obstacle, Route
from sidestep.switch.protocol import Capabilities, Endpoint, OffloadTransport, Request
from sidestep.switch.transports import Transports

LOCAL, REMOTE = Endpoint(ip_address("127.0.0.1"), 5000), Endpoint(ip_address("10.0.0.2"), 80)
REQUEST = Request(LOCAL, REMOTE, None)


class Glass(OffloadTransport):
    """Takes whatever comes."""

    name: ClassVar[str] = "glass"
    wire: ClassVar[str] = "iwarp"
    capabilities: ClassVar[Capabilities] = Capabilities(rdma=True, remote=True, self_routing=True)

    def open(self, local: Address, loop: Loop) -> Device:
        return IwarpDevice(str(local), loop, name=f"glass@{local}")


class Copper(Glass):
    """Wants to see the route."""

    name: ClassVar[str] = "copper"
    wire: ClassVar[str] = "rocev2"
    capabilities: ClassVar[Capabilities] = Capabilities(families=frozenset({4}), rdma=True, remote=True)

    def refusal(self, request: Request) -> str | None:
        assert request.route is not None
        return None if request.route.interface == "ib0" else f"{request.route.interface} is no fabric"


class Loose(Glass):
    """Fails whenever it is asked."""

    name: ClassVar[str] = "loose"

    def refusal(self, request: Request) -> str | None:
        raise LookupError("lost the thread")

    def open(self, local: Address, loop: Loop) -> Device:
        raise LookupError("lost the device")


def route_by(interface: str) -> Callable[..., Route]:
    def route(destination: Address, *, source: Address | None = None) -> Route:
        assert source == LOCAL.address
        if not interface:
            raise NoRoute(destination, Obstacle.UNREACHABLE, 101)
        return Route(destination, interface, 2, source, None, local=False)

    return route


def transports(*order: str, interface: str = "ib0", stopped: Callable[[str], None] = lambda _name: None) -> Transports:
    points = {found.name: Point(found.name, found) for found in (Glass, Copper, Loose)}
    return Transports(
        lambda: points, no_services(), lambda _name, _error: None, order=order, route=route_by(interface),
        on_stopped=stopped,
    )  # fmt: skip


def test_the_first_of_the_order_that_fits_is_chosen() -> None:
    assert transports("copper", "glass").choose(REQUEST).name == "copper"
    assert transports("glass", "copper").choose(REQUEST).name == "glass"
    assert transports("copper", "glass", interface="eth0").choose(REQUEST).name == "glass"
    assert transports("copper", "glass", interface="").choose(REQUEST).name == "glass"
    six = Request(LOCAL, Endpoint(ip_address("2001:db8::2"), 80), None)
    assert transports("copper", "glass").choose(six).name == "glass"


def test_only_what_is_wanted_is_loaded() -> None:
    here = transports("glass", "copper")
    here.choose(REQUEST)
    assert {one.name: one.state for one in here.status()}["copper"] == "installed"


def test_a_rule_names_one_and_no_other_is_tried() -> None:
    here = transports("glass", interface="eth0")
    with pytest.raises(Unavailable, match=r"^copper: eth0 is no fabric"):
        here.choose(Request(LOCAL, REMOTE, None, over="copper"))
    with pytest.raises(Unavailable, match=r"^smoke: it is not installed"):
        here.choose(Request(LOCAL, REMOTE, None, over="smoke"))


def test_each_that_was_asked_says_why_not() -> None:
    with pytest.raises(Unavailable, match=r"^copper: eth0 is no fabric; smoke: it is not installed"):
        transports("copper", "smoke", interface="eth0").choose(REQUEST)


def test_a_wire_can_be_asked_for_and_some_left_out() -> None:
    here = transports("glass", "copper")
    assert here.choose(REQUEST, wire="rocev2").name == "copper"
    assert here.choose(REQUEST, without=["glass"]).name == "copper"
    with pytest.raises(Unavailable, match="glass: it does not speak ether; copper: it does not speak ether"):
        here.choose(REQUEST, wire="ether")
    with pytest.raises(Unavailable, match="no transport is left"):
        here.choose(REQUEST, without=["glass", "copper"])


def test_one_that_fails_is_stopped_and_the_next_is_asked() -> None:
    stopped: list[str] = []
    here = transports("loose", "glass", stopped=stopped.append)
    assert here.choose(REQUEST).name == "glass"
    assert stopped == ["loose"]
    assert here.get("loose") is None
    here.add("loose")
    with pytest.raises(Unavailable, match="loose failed"):
        here.device("loose", LOCAL.address, Loop())
    here.remove("glass")
    assert stopped == ["loose", "loose", "glass"]


def test_a_device_is_opened_at_an_address() -> None:
    loop = Loop()
    device = transports("glass").device("glass", LOCAL.address, loop)
    assert (device.name, device.address) == ("glass@127.0.0.1", "127.0.0.1")
    device.close()
    loop.close()
