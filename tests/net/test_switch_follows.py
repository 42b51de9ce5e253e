"""The kernel's routes, and their changes, reach the offload protocols of a provider that runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
from netns import index_of, ip, veth
from shim_client import Channel, ShimClient
from travellers import Listener, install

from sidestep.native.layout import Rpc
from sidestep.provider import control
from sidestep.routing import AddressEvent, Change, LinkEvent, Route, RouteEvent
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow


@pytest.fixture
def listener(netns: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """Hears the protocols; the namespace has an interface with addresses."""
    veth("left", "right")
    ip("address add 10.1.0.1/24 dev left")
    ip("address add 2001:db8::1/64 dev left nodad")
    heard = install(tmp_path, monkeypatch)
    yield heard
    heard.close()


@pytest.fixture
def provider(listener: Listener) -> Iterator[Sidestep]:
    """A provider in the namespace that carries nothing by `local`."""
    with Sidestep() as private:
        ask(private, "module_remove", name="local")
        yield private


def ask(provider: Sidestep, operation: str, **arguments: Any) -> dict[str, Any]:
    with control.ControlConnection(provider.socket) as connection:
        reply, descriptors = connection.request(operation, **arguments)
        descriptors.close()
        return reply


def decide(provider: Sidestep, address: str, **arguments: Any) -> dict[str, Any]:
    """A dry run of a connection to there."""
    return ask(provider, "decide", role="connect", program="prog", address=address, port=80, **arguments)


def test_a_protocol_learns_what_there_is_and_then_what_changes(provider: Sidestep, listener: Listener) -> None:
    ask(provider, "module_add", name="guided")
    left = index_of("left")
    present = [
        LinkEvent(Change.ADDED, "left", left, True),
        AddressEvent(Change.ADDED, left, ip_address("10.1.0.1"), 24),
    ]
    for event in present:
        listener.until(event=str(event))
    ip("route add 10.9.0.0/16 via 10.1.0.2")
    to, hop = ip_network("10.9.0.0/16"), ip_address("10.1.0.2")
    way = partial(RouteEvent, destination=to, first_hop=hop, interface_index=left)
    listener.until(event=str(way(Change.ADDED)))
    ask(provider, "module_add", name="pathfinder")  # whoever comes later learns the same
    told = listener.until(**{"from": "pathfinder", "event": str(way(Change.ADDED))})
    assert {str(event) for event in present} <= {one.get("event") for one in told}
    ip("link delete left")
    gone = LinkEvent(Change.REMOVED, "left", left, False), way(Change.REMOVED)
    missing = {(name, str(event)) for name in ("guided", "pathfinder") for event in gone}
    while missing:
        one = listener.next()
        missing.discard((one["from"], one.get("event", "")))


def test_a_request_names_first_hop_and_interface_for_who_needs_a_route(provider: Sidestep, listener: Listener) -> None:
    ip("route add 10.9.0.0/16 via 10.1.0.2")
    ip("-6 route add 2001:db8:9::/48 via 2001:db8::2")
    for address, hop, source in (("10.9.0.1", "10.1.0.2", "10.1.0.1"), ("2001:db8:9::9", "2001:db8::2", "2001:db8::1")):
        verdict = decide(provider, address)
        assert verdict["route"] == {"interface": "left", "first_hop": hop, "source": source, "local": False}
        assert verdict["protocol"] == "blind"  # the first by name
    ip("route replace 10.9.0.0/16 via 10.1.0.3")
    assert decide(provider, "10.9.0.1")["route"]["first_hop"] == "10.1.0.3"
    ask(provider, "module_remove", name="blind")
    ask(provider, "module_remove", name="guided")
    assert decide(provider, "10.9.0.1")["protocol"] == "pathfinder"
    assert decide(provider, "10.9.0.1")["route"] is None
    told = listener.until(**{"from": "pathfinder", "remote": "10.9.0.1:80"})
    assert told[-1]["route"] == "None"  # it reached it untouched


def test_without_a_route_it_stays_on_tcp_and_says_so(provider: Sidestep) -> None:
    ask(provider, "module_remove", name="pathfinder")
    ip("route add prohibit 10.9.0.0/16")
    for address, why in (("10.99.0.1", "no route leads there"), ("10.9.0.1", "prohibits it")):
        verdict = decide(provider, address)
        assert verdict["protocol"] is None
        assert why in verdict["why"]


def test_the_route_is_that_of_the_user(provider: Sidestep) -> None:
    ip("route add 10.9.0.0/16 via 10.1.0.2")
    ip("route add 10.9.0.0/16 via 10.1.0.3 table 100")
    ip("rule add uidrange 1000-1999 lookup 100")
    hops = [decide(provider, "10.9.0.1", uid=uid)["route"]["first_hop"] for uid in (0, 1000, 2000)]
    assert hops == ["10.1.0.2", "10.1.0.3", "10.1.0.2"]


def test_a_protocol_that_fails_at_a_change_fails_alone(provider: Sidestep, listener: Listener) -> None:
    for name in ("blind", "guided"):
        ask(provider, "module_add", name=name)
    ip("address add 10.66.0.1/24 dev left")
    listener.until(event=str(AddressEvent(Change.ADDED, index_of("left"), ip_address("10.66.0.1"), 24)))
    states = {module["name"]: module["state"] for module in ask(provider, "modules")["modules"]}
    assert (states["blind"], states["guided"]) == ("broken", "started")
    assert provider.status()["counters"]["module_failed{blind}"] == 1


def test_a_pair_is_carried_with_its_route(provider: Sidestep, listener: Listener) -> None:
    ask(provider, "module_remove", name="blind")
    with socket.create_server(("10.1.0.1", 0)) as server:
        active = socket.create_connection(server.getsockname())
        passive, _ = server.accept()
    bring, take = Channel.make(), Channel.make(None)
    with active, passive, ShimClient(provider.socket) as offerer, ShimClient(provider.socket) as claimer:
        offerer.hello()
        claimer.hello()
        offerer.offer(active, bring, 1)
        claimer.wait_offer(passive)
        claimer.claim(passive, take, 1)
        for client, wanted in ((claimer, Rpc.ATTACH), (offerer, Rpc.CLAIMED)):
            packet = client.receive()
            packet.descriptors.close()
            assert packet.message.type is wanted
    bring.close()
    take.close()
    expected = Route(ip_address("10.1.0.1"), "lo", 1, ip_address("10.1.0.1"), None, local=True)
    told = listener.until(joined=str(expected))
    assert told[-1]["from"] == "guided"
    assert [one["route"] for one in told if "route" in one] == [str(expected)]


def test_a_provider_follows_the_network_once_somebody_wants_to_know_it(provider: Sidestep) -> None:
    before = _netlink_sockets(provider)
    ask(provider, "module_add", name="local")
    assert decide(provider, "10.1.0.1")["protocol"] == "local"
    assert _netlink_sockets(provider) == before
    ask(provider, "module_remove", name="local")
    assert decide(provider, "10.1.0.1")["route"]["local"]
    assert _netlink_sockets(provider) == before + 2


def _netlink_sockets(provider: Sidestep) -> int:
    """How many netlink sockets a provider has."""
    process = Path(f"/proc/{provider.provider_pid}")
    lines = (process / "net/netlink").read_text(encoding="ascii").splitlines()[1:]
    netlink = {line.split()[-1] for line in lines}
    links = []
    for fd in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed since it was listed
            links.append(os.readlink(fd))  # noqa: PTH115 - these are no paths
    return len([link for link in links if link.startswith("socket:[") and link[8:-1] in netlink])
