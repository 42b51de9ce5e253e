"""Offload protocols as modules: loaded on demand, refused alone, added and removed."""

from __future__ import annotations

import socket
from ipaddress import ip_network
from typing import Any, ClassVar

import pytest
from modules_world import Point, Told, World, no_services

from sidestep.loop import Loop
from sidestep.rdma.verbs import Device
from sidestep.routing import Address, Change, NetworkEvent, RouteEvent
from sidestep.switch.local import Local
from sidestep.switch.modules import Modules
from sidestep.switch.protocol import (
    BrokenModule,
    Capabilities,
    OffloadProtocol,
    OffloadTransport,
    Services,
)


class Failing(Told):
    name: ClassVar[str] = "failing"

    def start(self, services: Services) -> None:
        raise OSError("no device")

    def stop(self) -> None:
        raise RuntimeError("it was never started")


class Fragile(Told):
    name: ClassVar[str] = "fragile"

    def handle_network(self, event: NetworkEvent) -> None:
        raise ValueError("what is a route?")

    def stop(self) -> None:
        raise RuntimeError("cannot stop either")


class NoWord(Told):
    name: ClassVar[str] = "No Word"


class Bare(Told):
    name: ClassVar[str] = "bare"
    capabilities: ClassVar[Any] = None


class Abstract(OffloadProtocol):
    name: ClassVar[str] = "abstract"
    capabilities: ClassVar[Capabilities] = Capabilities()


class Careless(Told):
    """Leaves everything behind, and what it left fails."""

    name: ClassVar[str] = "careless"

    def start(self, services: Services) -> None:
        super().start(services)
        self.mine, self.theirs = socket.socketpair()
        services.loop.on_readable(self.mine.fileno(), self.fail)
        services.loop.call_later(0, self.fail)
        self.theirs.send(b"x")

    def stop(self) -> None:
        super().stop()
        self.mine.close()
        self.theirs.close()

    def fail(self) -> None:
        self.heard.append("called")
        raise LookupError("lost the thread")


class Wire(OffloadTransport):
    """A transport."""

    name: ClassVar[str] = "wire"
    wire: ClassVar[str] = "copper"
    capabilities: ClassVar[Capabilities] = Capabilities(rdma=True, remote=True)

    def open(self, local: Address, loop: Loop) -> Device:
        raise LookupError("no device")


def world(*classes: type[OffloadProtocol]) -> World:
    return World({found.name: Point(found.name, found) for found in classes})


EVENT = RouteEvent(Change.ADDED, ip_network("10.0.0.0/8"), None, 1)


def test_a_module_is_loaded_when_it_is_wanted_and_once() -> None:
    here = world(Told, Local)
    modules = here.modules()
    assert [point.loads for point in here.points.values()] == [0, 0]
    first = modules.get("told")
    assert first is not None
    assert modules.get("told") is first
    assert here.points["told"].loads == 1
    assert here.points["local"].loads == 0


def test_local_is_asked_first_and_the_others_are_not_loaded_for_it() -> None:
    here = World({name: Point(name, found) for name, found in (("aaa", Told), ("local", Local))})
    modules = here.modules()
    assert modules.names() == ["local", "aaa"]
    assert next(modules.each()).name == "local"
    assert here.points["aaa"].loads == 0


@pytest.mark.parametrize(
    ("name", "found", "why"),
    [
        ("gone", ImportError("no module named gone"), "ImportError: no module named gone"),
        ("leaves", SystemExit("usage: leaves"), "SystemExit: usage: leaves"),
        ("failing", Failing, "OSError: no device"),
        ("No Word", NoWord, "reserved"),
        ("both", Told, "reserved"),
        ("other", Told, "calls itself 'told'"),
        ("bare", Bare, "no capabilities"),
        ("thing", 42, "not a class derived from OffloadProtocol"),
        ("text", str, "not a class derived from OffloadProtocol"),
        ("abstract", Abstract, "abstract"),
    ],
)
def test_a_broken_module_is_refused_with_its_reason_and_the_others_go_on(name: str, found: object, why: str) -> None:
    here = World({name: Point(name, found), "told": Point("told", Told)})
    modules = here.modules()
    assert modules.get(name) is None
    assert modules.get(name) is None
    assert here.points[name].loads == 1, "it is not tried again"
    assert [broken for broken, _ in here.broken] == [name]
    (status,) = (one for one in modules.status() if one.name == name)
    assert status.state == "broken"
    assert why in status.why
    assert [one.name for one in modules.each()] == ["told"]
    with pytest.raises(BrokenModule, match=name):
        modules.add(name)


def test_a_mended_module_can_be_added() -> None:
    here = World({"told": Point("told", OSError("half written"))})
    modules = here.modules()
    assert modules.get("told") is None
    here.points = {"told": Point("told", Told)}
    assert modules.get("told") is None, "only somebody who asks for it makes it try again"
    assert modules.add("told") is modules.get("told")


def test_what_is_installed_later_can_be_added() -> None:
    here = world(Told)
    modules = here.modules()
    here.points = {**here.points, "local": Point("local", Local)}
    assert modules.get("local") is None
    assert modules.add("local").name == "local"
    with pytest.raises(BrokenModule, match="missing is not installed"):
        modules.add("missing")


def test_a_removed_module_is_stopped_and_not_asked_until_it_is_added() -> None:
    here = world(Told, Local)
    modules = here.modules()
    told = modules.get("told")
    assert isinstance(told, Told)
    modules.remove("told")
    assert told.heard == ["start", "stop"]
    assert modules.get("told") is None
    assert modules.names() == ["local"]
    assert modules.add("told") is not told
    with pytest.raises(BrokenModule, match="missing is not installed"):
        modules.remove("missing")


def test_the_networks_changes_reach_those_that_are_started() -> None:
    here = world(Told, Local)
    modules = here.modules()
    modules.handle_network(EVENT)
    assert here.points["told"].loads == 0, "a change is no reason to load one"
    told = modules.get("told")
    assert isinstance(told, Told)
    modules.handle_network(EVENT)
    assert told.heard == ["start", EVENT]


def test_a_module_that_fails_at_work_is_stopped_and_the_others_hear_the_event() -> None:
    here = World({"fragile": Point("fragile", Fragile), "told": Point("told", Told)})
    modules = here.modules()
    told = modules.get("told")
    assert isinstance(told, Told)
    assert modules.get("fragile") is not None
    modules.handle_network(EVENT)
    assert told.heard == ["start", EVENT]
    assert modules.get("fragile") is None
    assert [name for name, _ in here.broken] == ["fragile", "fragile"], "its work, and then its stop"


def test_all_are_stopped_at_the_end_whatever_one_of_them_does() -> None:
    here = World({"fragile": Point("fragile", Fragile), "told": Point("told", Told)})
    modules = here.modules()
    told = modules.get("told")
    assert isinstance(told, Told)
    assert modules.get("fragile") is not None
    modules.stop()
    assert told.heard == ["start", "stop"]


def test_what_a_module_has_the_loop_call_fails_as_the_module_does() -> None:
    here, services = world(Careless, Local), no_services()
    modules = here.modules(services)
    careless = modules.get("careless")
    assert isinstance(careless, Careless)
    services.loop.turn(0)
    assert [name for name, _ in here.broken] == ["careless"]
    assert careless.heard == ["start", "called", "stop"], "nothing of it is called after its stop, not even a timer"
    assert services.loop.idle, "a descriptor that is left would wake the loop for ever"
    assert modules.names() == ["local"]


def test_what_a_removed_module_leaves_behind_is_cleared_away() -> None:
    here, services = world(Careless), no_services()
    modules = here.modules(services)
    careless = modules.get("careless")
    assert isinstance(careless, Careless)
    modules.remove("careless")
    assert services.loop.idle
    services.loop.turn(0)
    assert (careless.heard, here.broken) == (["start", "stop"], [])


def test_a_transport_is_no_protocol_and_a_protocol_no_transport() -> None:
    wires: Modules[OffloadTransport] = Modules(
        OffloadTransport,  # type: ignore[type-abstract]  # what must be derived from it, not made
        lambda: {"wire": Point("wire", Wire), "local": Point("local", Local)},
                    no_services(), lambda name, error: None)  # fmt: skip
    wire = wires.get("wire")
    assert isinstance(wire, Wire)
    assert wires.get("local") is None
    assert [one.name for one in wires.each()] == ["wire"]
    protocols = world(Local)
    protocols.points["wire"] = Point("wire", Wire)
    assert protocols.modules().get("wire") is None
