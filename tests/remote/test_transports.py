"""Which transport carries a connection: by the user's order, by the policy, and by what a transport says to it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import ENGINE, NETWORK, Host, Make, command
from installed_examples import on_the_path
from talking import PORT, ends_well, on_tcp, promoted, serving, talking

from sidestep import gain
from sidestep.native.layout import Reason
from sidestep.observe.demotion import Result
from sidestep.provider.control import ControlConnection
from sidestep.settings import RemoteSettings

pytestmark = pytest.mark.slow


def remote(transports: str) -> RemoteSettings:
    return RemoteSettings.parse(NETWORK, engine=ENGINE, transports=transports)


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example of examples/sidestep-fabric is installed, and may use the hosts' interface."""
    monkeypatch.setenv("FABRIC_INTERFACES", "eth0")
    with on_the_path("sidestep-fabric"):
        yield


@pytest.mark.parametrize("how", ["order", "rule"])
def test_the_software_hca_carries_promoted_connections(make_hosts: Make, tmp_path: Path, how: str) -> None:
    rules = tmp_path / "rules"
    rules.write_text("use sdp over roce listen * *:7000\n" if how == "rule" else "")
    one, other = make_hosts(2, remote=remote("roce"), policy=rules)
    serving(other)
    for size in (1, 3000, 300_000):
        client = talking(one, other.address, size=size)
        promoted(one, other)
        assert (devices(one), devices(other)) == ([f"roce@{one.address}"], [f"roce@{other.address}"])
        ends_well(client)
        one.wait_for(lambda: not devices(one) + devices(other))
    assert not one.counter("relay_reset") + other.counter("relay_reset")
    assert one.counter("pooled_queue_pair") > other.counter("pooled_queue_pair"), "those of the end that asks"
    assert one.sidestep.status()["counters"]["pooled_queue_pair{taken}"] == 2


def test_the_software_hca_is_cut_off_and_tcp_goes_on(make_hosts: Make) -> None:
    one, other = make_hosts(2, remote=remote("roce"))
    serving(other)
    client = talking(one, other.address, size=50_000)
    promoted(one, other)
    with other.losing("udp dport 4791"):
        on_tcp(one, other)
    ends_well(client)
    assert not one.counter("relay_reset") + other.counter("relay_reset")


def test_the_control_link_is_cut_and_tcp_goes_on(make_hosts: Make) -> None:
    one, other = make_hosts(2, remote=remote("roce"))
    serving(other)
    clients = [talking(one, other.address, size=20_000) for _ in range(4)]
    promoted(one, other, ends=4)
    one.cut_rdma(spared_port=PORT)
    for client in clients:
        ends_well(client)
    assert not one.counter("relay_reset") + other.counter("relay_reset")
    again = talking(one, other.address)
    promoted(one, other)
    ends_well(again)


def test_the_software_hca_loses_packets_and_no_byte_is_missing(make_hosts: Make) -> None:
    one, other = make_hosts(2, remote=remote("roce"))
    serving(other)
    with one.losing("udp dport 4791 numgen random mod 50 0"), other.losing("udp dport 4791 numgen random mod 50 0"):
        client = talking(one, other.address, size=100_000)
        promoted(one, other)
        ends_well(client)
    assert not one.counter("relay_reset") + other.counter("relay_reset")


def test_a_host_without_the_device_takes_the_next(make_hosts: Make) -> None:
    one, other = make_hosts(2, remote=remote("roce,iwarp"))
    with other.namespace.inside():
        taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        taken.bind(("", 4791))
    with taken:
        serving(other)
        client = talking(one, other.address)
        promoted(one, other)
        assert (devices(one), devices(other)) == ([f"iwarp@{one.address}"], [f"iwarp@{other.address}"])
        ends_well(client)


def devices(host: Host) -> list[str]:
    with host.namespace.inside(), ControlConnection(host.sidestep.socket) as connection:
        return [str(link["device"]) for link in connection.links()]


@pytest.mark.usefixtures("fabric")
def test_an_installed_transport_carries_what_its_interface_leads_to(make_hosts: Make) -> None:
    one, other = make_hosts(2, remote=remote("fabric,iwarp"))
    serving(other)
    client = talking(one, other.address)
    promoted(one, other)
    assert (devices(one), devices(other)) == ([f"fabric@{one.address}"], [f"fabric@{other.address}"])
    ends_well(client)


@pytest.mark.usefixtures("fabric")
@pytest.mark.parametrize("transport", ["fabric", "iwarp"])
def test_a_conversation_leaves_tcp_over_what_gains_by_it(make_hosts: Make, transport: str) -> None:
    one, other = make_hosts(2, remote=RemoteSettings.parse(NETWORK, promote=gain.BY_GAIN, transports=transport))
    serving(other)
    client = talking(one, other.address, size=64, pause_s=0)
    if transport == "fabric":
        promoted(one, other)
        one.sidestep.wait_for(lambda found: found[0].tx.ring_msgs > 1000)
        assert [(each.promoted, each.promotions) for each in one.sidestep.connections()] == [(True, 1)]
    else:
        one.sidestep.wait_for(lambda found: found[0].tx.tcp_msgs > 1000)
        assert [each.reason for each in one.sidestep.connections()] == [Reason.LATENCY.name]
    ends_well(client)


@pytest.mark.usefixtures("fabric")
def test_one_that_says_no_leaves_it_to_the_next(make_hosts: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_INTERFACES", "ib0 ib1")
    one, other = make_hosts(2, remote=remote("fabric,iwarp"))
    serving(other)
    client = talking(one, other.address)
    promoted(one, other)
    assert devices(one) == [f"iwarp@{one.address}"]
    ends_well(client)


@pytest.mark.usefixtures("fabric")
def test_a_rule_names_a_transport_that_is_not_in_the_order(make_hosts: Make, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("use sdp over fabric connect * *:7000\n")
    one, other = make_hosts(2, remote=remote("iwarp"), policy=rules)
    serving(other)
    client = talking(one, other.address)
    wanted = [f"fabric@{one.address}"], [f"iwarp@{other.address}"]
    one.wait_for(lambda: (devices(one), devices(other)) == wanted)  # it begins with SDP, as the rule says
    ends_well(client)


def test_a_rule_that_names_none_that_is_there_says_why(make_hosts: Make, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("use sdp over fabric connect * *:7000\n")
    one, other = make_hosts(2, remote=remote("iwarp"), policy=rules)
    serving(other)
    client = talking(one, other.address, seconds=1)
    ends_well(client)
    assert not one.counter("relay_opened")
    with one.namespace.inside(), ControlConnection(one.sidestep.socket) as connection:
        found = connection.document("decide", role="connect", program="x", address=other.address, port=7000)
    assert "sdp: fabric: it is not installed" in found["why"]
    assert found["over"] == "fabric"


def test_a_listener_can_insist_on_a_transport(make_hosts: Make, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("use sdp over fabric listen * *:7000\n")
    one, other = make_hosts(2, remote=remote("iwarp"), policy=rules)
    serving(other)
    client = talking(one, other.address, seconds=1)
    ends_well(client)
    assert not one.counter("relay_opened") + other.counter("relay_opened")


def explained(host: Host) -> dict[str, Any]:
    """What `sidestep explain` says of the one connection of a host."""
    found = json.loads(command(host, "explain", f":{PORT}", "--json"))["explanations"]
    (one,) = (one for one in found if one["remote"] is not None)
    assert isinstance(one, dict)
    return one


@pytest.mark.parametrize("whose", ["connecting", "accepting"])
def test_what_a_transport_carries_goes_back_to_tcp_when_it_is_removed(two: tuple[Host, Host], whose: str) -> None:
    one, other = two
    server = serving(other)
    client = talking(one, other.address)
    promoted(one, other)
    host = one if whose == "connecting" else other
    with host.namespace.inside(), ControlConnection(host.sidestep.socket) as connection:
        connection.document("module_remove", name="iwarp", kind="transport")
    host.wait_for(lambda: not devices(host))
    on_tcp(one, other)
    far = other if host is one else one
    here, there = explained(host), explained(far)
    assert here["reason"] == there["reason"] == "PEER_LEFT"
    assert here["cause"].endswith("on this host the provider has lost the transport iwarp")
    stays = "this connection stays on TCP, a new one can be promoted"
    assert f"'sidestep provider add --transport iwarp'; {stays}" in here["hint"]
    assert there["cause"].endswith(f"its program or the provider on {host.address} sent it back to TCP")
    assert there["hint"].startswith(stays)
    assert there["hint"].endswith(f"on {host.address} says more")
    with host.namespace.inside(), ControlConnection(host.sidestep.socket) as connection:
        connection.document("module_add", name="iwarp", kind="transport")
    for end in (one, other):
        with end.namespace.inside():
            (outcome,) = end.sidestep.promote(lambda found: found.relay_over)
            assert outcome.result is Result.STAYS
    assert explained(host)["cause"] == here["cause"] + " meanwhile", "the loss is remembered"
    assert explained(host)["hint"].startswith(stays)
    assert (explained(far)["cause"], explained(far)["hint"]) == (there["cause"], there["hint"])
    with host.namespace.inside(), ControlConnection(host.sidestep.socket) as connection:
        connection.document("module_remove", name="iwarp", kind="transport")
    ends_well(client)
    assert not one.counter("relay_reset") + other.counter("relay_reset")
    assert server.poll() is None
    again = talking(one, other.address, seconds=1)
    ends_well(again)
    assert host.counter("relay_opened") == 1, "without a device what comes later stays on TCP"
