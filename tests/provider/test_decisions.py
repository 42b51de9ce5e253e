"""What the switch decides of a connection: policy, protocol and route put together, dry and real."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar

import pytest
from modules_world import Point, Told, World, no_services

from sidestep import limits
from sidestep.errors import Unavailable
from sidestep.native.layout import Refusal
from sidestep.policy import BOTH, TCP, Decision, Policy, Role, Subject
from sidestep.provider.control import ControlConnection
from sidestep.provider.decisions import Decisions, subject_of
from sidestep.routing import Address, Route
from sidestep.switch.local import Local
from sidestep.switch.modules import Modules
from sidestep.switch.protocol import Capabilities, Endpoint, OffloadProtocol, Request
from sidestep.testing import Sidestep

WHO = Subject(("redis-cli",), 1000, frozenset({1000}))
THERE = Endpoint(ip_address("10.0.0.2"), 6379)
ROUTE = Route(THERE.address, "veth0", 3, ip_address("10.0.0.1"), ip_address("10.0.0.254"), False)


class Ruled(Policy):
    """A policy with one answer."""

    def __init__(self, target: str) -> None:
        self.target = target

    def decide(self, role: Role, subject: Subject, address: Address, port: int) -> Decision:
        return Decision(self.target, None)


class Routed(Told):
    """Needs a route."""

    name: ClassVar[str] = "routed"
    capabilities: ClassVar[Capabilities] = Capabilities(remote=True, accept=False, families=frozenset({4}))
    asked: ClassVar[list[Request]] = []

    def refusal(self, request: Request) -> str | None:
        self.asked.append(request)
        return "port 1 is taken" if request.remote.port == 1 else None


class SelfRouted(Routed):
    name: ClassVar[str] = "selfrouted"
    capabilities: ClassVar[Capabilities] = Capabilities(self_routing=True)


class Raising(Told):
    name: ClassVar[str] = "raising"

    def refusal(self, request: Request) -> str | None:
        raise RuntimeError("cannot say")


def one_route(destination: Address, *, source: Address | None = None, uid: int | None = None) -> Route:
    if destination == ip_address("192.0.2.1"):
        raise Unavailable("no route to 192.0.2.1")
    assert uid == WHO.uid
    return ROUTE


def decisions(target: str, *classes: type[OffloadProtocol], route: Callable[..., Route] | None = None) -> Decisions:
    here = World({found.name: Point(found.name, found) for found in classes})
    kind: Any = OffloadProtocol
    modules = Modules(kind, here.find, no_services(), lambda name, error: None)
    Routed.asked.clear()
    return Decisions(modules, lambda: Ruled(target), route or one_route, lambda: 0.0)


def test_both_means_the_first_that_can() -> None:
    verdict = decisions(BOTH, Local, Routed).connect(WHO, Request(None, THERE, None))
    assert verdict.protocol is not None
    assert verdict.protocol.name == "local"
    assert (verdict.route, verdict.refusal) == (None, None)
    assert Routed.asked == []


def test_tcp_means_no_protocol_and_says_why() -> None:
    verdict = decisions(TCP, Local).connect(WHO, Request(None, THERE, None))
    assert (verdict.protocol, verdict.refusal) == (None, Refusal.POLICY)
    assert verdict.why == "it stays on TCP: the policy says tcp"


def test_a_name_means_that_protocol_alone() -> None:
    verdict = decisions("routed", Local, Routed).connect(WHO, Request(None, THERE, None))
    assert verdict.protocol is not None
    assert verdict.protocol.name == "routed"
    verdict = decisions("sdp", Local).connect(WHO, Request(None, THERE, None))
    assert verdict.refusal is Refusal.NO_PROTOCOL
    assert "sdp is not installed" in verdict.why


def test_no_route_is_taken_for_that_of_another_network_namespace() -> None:
    request = Request(Endpoint(ip_address("10.0.0.1"), 5000), THERE, None)
    verdict = decisions("routed", Routed).connect(WHO, request, elsewhere=True)
    assert (verdict.protocol, verdict.route, verdict.refusal) == (None, None, Refusal.NO_PROTOCOL)
    assert "those of another network namespace are not known" in verdict.why
    assert Routed.asked == []
    verdict = decisions("selfrouted", SelfRouted).connect(WHO, request, elsewhere=True)
    assert verdict.protocol is not None


def test_a_protocol_that_is_not_self_routing_gets_the_kernels_route_and_the_other_the_bare_request() -> None:
    request = Request(Endpoint(ip_address("10.0.0.1"), 5000), THERE, None)
    verdict = decisions("routed", Routed).connect(WHO, request)
    assert verdict.route == ROUTE
    assert Routed.asked == [Request(request.local, THERE, ROUTE)]
    assert verdict.as_json()["route"] == {
        "interface": "veth0", "first_hop": "10.0.0.254", "source": "10.0.0.1", "local": False,
    }  # fmt: skip
    verdict = decisions("selfrouted", SelfRouted).connect(WHO, request)
    assert verdict.route is None
    assert Routed.asked == [request]
    assert Routed.asked[0] is request


@pytest.mark.parametrize(
    ("remote", "why"),
    [
        (Endpoint(ip_address("192.0.2.1"), 80), "routed: no route to 192.0.2.1"),
        (Endpoint(THERE.address, 1), "routed: port 1 is taken"),
        (Endpoint(ip_address("::1"), 80), "routed: it does not carry IPv6"),
    ],
)
def test_a_protocol_that_cannot_is_passed_over_with_its_reason(remote: Endpoint, why: str) -> None:
    verdict = decisions(BOTH, Routed).connect(WHO, Request(None, remote, None))
    assert verdict.refusal is Refusal.NO_PROTOCOL
    assert why in verdict.why
    verdict = decisions(BOTH, Routed, SelfRouted).connect(WHO, Request(None, remote, None))
    assert (verdict.protocol is not None) == (remote.port != 1)


def test_a_protocol_that_fails_is_passed_over_and_not_asked_again() -> None:
    here = decisions(BOTH, Raising, Told)
    for _ in range(2):
        verdict = here.connect(WHO, Request(None, THERE, None))
        assert verdict.protocol is not None
        assert verdict.protocol.name == "told"


def test_the_end_that_accepted_is_asked_as_well() -> None:
    local = Local()
    assert decisions(BOTH, Local).listen(WHO, THERE, local).refusal is None
    assert decisions("local", Local).listen(WHO, THERE, local).refusal is None
    assert decisions(TCP, Local).listen(WHO, THERE, local).refusal is Refusal.POLICY
    assert decisions("sdp", Local).listen(WHO, THERE, local).refusal is Refusal.POLICY
    assert decisions(BOTH, Routed).listen(WHO, THERE, Routed()).refusal is Refusal.NO_PROTOCOL


def test_decisions_are_remembered_and_dry_runs_are_not() -> None:
    here = decisions(BOTH, Local)
    for port in range(1, limits.TRACE_DECISIONS_PER_REPLY + 3):
        here.connect(WHO, Request(None, Endpoint(THERE.address, port), None))
    here.connect(WHO, Request(None, THERE, None), dry=True)
    first = here.trace(0)
    assert len(first["decisions"]) == limits.TRACE_DECISIONS_PER_REPLY
    rest = here.trace(first["next"])
    assert [one["endpoint"] for one in rest["decisions"]] == ["10.0.0.2:33", "10.0.0.2:34"]
    assert {key: rest["decisions"][0][key] for key in ("program", "uid", "role", "protocol", "target")} == {
        "program": "redis-cli", "uid": 1000, "role": "connect", "protocol": "local", "target": "both",
    }  # fmt: skip
    assert here.trace(rest["next"]) == {"decisions": [], "next": rest["next"]}


def test_long_reasons_fit_a_reply() -> None:
    class Wordy(Told):
        name: ClassVar[str] = "wordy"

        def refusal(self, request: Request) -> str | None:
            return "\N{GREEK SMALL LETTER ALPHA}" * 5000

    here = decisions(BOTH, Wordy)
    for port in range(1, 31):
        here.connect(WHO, Request(None, Endpoint(THERE.address, port), None))
    found: list[str] = []
    while (reply := here.trace(len(found)))["decisions"]:
        assert len(json.dumps(reply)) < limits.CONTROL_PIECE_MAX
        found += [one["endpoint"] for one in reply["decisions"]]
    assert found == [f"10.0.0.2:{port}" for port in range(1, 31)]


def test_who_asks_is_known_by_the_names_of_its_process() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        subject = subject_of(ours, os.getpid(), os.getuid())
    comm = subprocess.run(["ps", "-o", "comm=", str(os.getpid())], capture_output=True, text=True, check=True).stdout
    assert comm.strip() in subject.programs
    assert Path(sys.executable).resolve().name in subject.programs
    assert subject.gids >= {os.getgid(), *os.getgroups()}


def test_a_process_that_has_gone_has_no_name() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert subject_of(ours, child.pid, 0).programs == ()


def test_a_real_provider_gives_the_same_answers(sidestep: Sidestep) -> None:
    with ControlConnection(sidestep.socket) as connection:
        answer = connection.document("decide", role="connect", program="x", address="127.0.0.1", port=80)
        assert (answer["protocol"], answer["target"]) == ("local", "both")
        connection.document("module_remove", name="local")
        answer = connection.document("decide", role="listen", program="x", address="::1", port=80)
        assert answer["protocol"] is None
        assert "none is installed" in answer["why"]
        with pytest.raises(Unavailable, match="not a connection"):
            connection.document("decide", role="connect", program="x", address="nowhere", port=80)
        with pytest.raises(Unavailable, match="nonsense is not installed"):
            connection.document("module_add", name="nonsense")
