"""The port mapper between two hosts: who answers what, and who is believed."""

from __future__ import annotations

import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from common import PATIENCE_S
from hosts import need_namespaces

from sidestep import limits
from sidestep.loop import Loop
from sidestep.observe.namespaces import Namespace, ip
from sidestep.remote.peers import Peers
from sidestep.routing import Address
from sidestep.sdp.portmapper import UDP_PORT, PortMap, PortMapKind
from sidestep.switch.protocol import Endpoint, NotYet

HERE, THERE = "198.18.9.1", "198.18.9.2"
OTHERS = ("198.18.9.3", "198.18.9.4")
HERE6, THERE6 = "2001:db8:9::1", "2001:db8:9::2"
RDMA_PORT = 4711
WAIT_S = PATIENCE_S


class Clock(Loop):
    """A loop whose clock can be put forward."""

    ahead_s = 0.0

    @property
    def now(self) -> float:
        """Monotonic seconds, and some."""
        return super().now + self.ahead_s


@dataclass
class Cable:
    """Two hosts, a loop for both, and what was said."""

    stack: ExitStack
    loop: Clock
    here: Namespace
    there: Namespace
    logged: list[str] = field(default_factory=list)
    answers: list[int | None] = field(default_factory=list)

    def peers(self, host: Namespace, port: int | None = RDMA_PORT) -> Peers:
        """A provider's port mapper on a host, which serves everybody, or nobody."""
        with host.inside():
            served = None if port is None else (port, limits.PEER_KNOWN_MAX_S)
            made = Peers(self.loop, lambda _local, _host, _port: served, self.logged.append)
        self.stack.callback(made.close)
        return made

    def sock(self, host: Namespace, address: str = THERE, port: int = UDP_PORT) -> socket.socket:
        """Somebody's own socket."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with host.inside():
            made = self.stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        made.bind((address, port))
        made.setblocking(False)
        return made

    def ask(self, peers: Peers, host: str = THERE, port: int = 80) -> None:
        """Asks for a host's provider."""
        local = HERE6 if ":" in host else HERE
        peers.ask(Endpoint(ip_address(local), 40000), Endpoint(ip_address(host), port), self.answers.append)

    def answered(self, peers: Peers, host: str = THERE) -> int | None:
        """Asks, and waits."""
        before = len(self.answers)
        self.ask(peers, host)
        assert self.loop.run_until(lambda: len(self.answers) > before, WAIT_S)
        return self.answers[-1]

    def heard(self, sock: socket.socket) -> tuple[PortMap, tuple[str, int]]:
        """The next datagram that comes there."""
        while True:
            try:
                data, source = sock.recvfrom(256)
            except BlockingIOError:
                self.loop.turn(0.01)
                continue
            return PortMap.decode(memoryview(data)), source[:2]

    def rest(self) -> None:
        """Everything that has been sent is heard: what is sent to oneself has arrived when it is sent."""
        for _ in range(5):
            self.loop.turn(0.02)


def _is_ready() -> bool:
    """Whether the link is up and the kernel, which comes to it later, answers for the address of IPv6."""
    if b"state UP" not in subprocess.check_output(["ip", "link", "show", "eth0"]):
        return False
    return not subprocess.check_output(["ip", "-6", "addr", "show", "dev", "eth0", "scope", "global", "tentative"])


@pytest.fixture
def cable() -> Iterator[Cable]:
    need_namespaces()
    with ExitStack() as stack:
        here, there = Namespace(), Namespace()
        for host in (here, there):
            stack.callback(host.close)
        with here.inside():
            ip(f"link add eth0 type veth peer name eth0 netns {there.path}")
        for host in (here, there):
            with host.inside():
                ip("link set eth0 up")
        for host, addresses in ((here, (HERE,)), (there, (THERE, *OTHERS))):
            with host.inside():
                for address in addresses:
                    ip(f"addr add {address}/24 dev eth0")
                ip(f"addr add {HERE6 if host is here else THERE6}/64 dev eth0 nodad")
        for host in (here, there):  # else the first question for a neighbour is lost, and the next comes after a second
            with host.inside():
                while not _is_ready():
                    time.sleep(0.01)
        loop = Clock()
        stack.callback(loop.close)
        yield Cable(stack, loop, here, there)


@pytest.mark.parametrize("host", [THERE, THERE6])
def test_two_providers_find_each_other(cable: Cable, host: str) -> None:
    asks, _ = cable.peers(cable.here), cable.peers(cable.there)
    assert cable.answered(asks, host) == RDMA_PORT
    cable.ask(asks, host)  # it is known by now
    assert cable.answers == [RDMA_PORT, RDMA_PORT]
    assert not cable.logged


def test_an_answer_holds_as_long_as_it_says(cable: Cable) -> None:
    asks, serves = cable.peers(cable.here), cable.peers(cable.there)
    assert cable.answered(asks) == RDMA_PORT
    serves.close()
    cable.loop.ahead_s += limits.PEER_KNOWN_MAX_S - 100
    assert cable.answered(asks) == RDMA_PORT
    cable.loop.ahead_s += 100
    assert cable.answered(asks) is None


def test_what_is_forgotten_is_asked_anew(cable: Cable) -> None:
    asks, serves = cable.peers(cable.here), cable.peers(cable.there)
    assert cable.answered(asks) == RDMA_PORT
    serves.close()
    cable.peers(cable.there, 5000)  # its provider has started anew
    asks.doubt(Endpoint(ip_address(THERE), 80), 5000)  # another than was said
    cable.ask(asks)
    assert cable.answers[-1] == RDMA_PORT
    asks.doubt(Endpoint(ip_address(THERE), 80), RDMA_PORT)
    assert cable.answered(asks) == 5000


def test_who_says_no_is_not_asked_again_for_a_while(cable: Cable) -> None:
    asks, denies = cable.peers(cable.here), cable.peers(cable.there, None)
    assert cable.answered(asks) is None
    denies.close()
    cable.peers(cable.there)
    cable.ask(asks)
    assert cable.answers == [None, None]
    cable.loop.ahead_s += limits.PEER_ABSENT_S
    assert cable.answered(asks) == RDMA_PORT


def test_silence_is_an_answer(cable: Cable) -> None:
    asks, silent = cable.peers(cable.here), cable.sock(cable.there)
    assert cable.answered(asks) is None
    requests = [cable.heard(silent) for _ in range(limits.PEER_TRIES)]
    with pytest.raises(BlockingIOError):
        silent.recv(1)
    assert {(one.kind, one.ap_port, one.cp_port, str(one.ap_ip), str(one.cp_ip)) for one, _ in requests} == {
        (PortMapKind.REQUEST, 80, 40000, THERE, HERE)
    }
    assert {source for _, source in requests} == {(HERE, UDP_PORT)}


@pytest.mark.parametrize("host", [THERE, "198.18.9.99", "198.18.200.1"], ids=["no port", "no host", "no route"])
def test_what_the_network_reports_is_silence(cable: Cable, host: str) -> None:
    assert cable.answered(cable.peers(cable.here), host) is None


def reply_to(request: PortMap, **changes: object) -> bytes:
    """An answer that would be believed, but for what is changed."""
    values: dict[str, object] = {
        "kind": PortMapKind.ACCEPT, "ap_port": RDMA_PORT, "cp_port": request.cp_port, "pm_time": 200,
        "assoc_handle": request.assoc_handle, "cp_ip": request.cp_ip, "ap_ip": request.ap_ip,
    }  # fmt: skip
    return PortMap(**{**values, **changes}).encode()  # type: ignore[arg-type]


def test_nobody_else_is_believed(cable: Cable) -> None:
    asks, asked = cable.peers(cable.here), cable.sock(cable.there)
    forger, other_port = cable.sock(cable.there, OTHERS[0]), cable.sock(cable.there, THERE, 5000)
    cable.ask(asks)
    request, back = cable.heard(asked)
    forged = reply_to(request, ap_port=666)
    forger.sendto(forged, back)
    other_port.sendto(forged, back)
    asked.sendto(reply_to(request, ap_port=666, assoc_handle=request.assoc_handle ^ 1), back)
    asked.sendto(reply_to(request, ap_port=0), back)
    asked.sendto(reply_to(request, kind=PortMapKind.ACK, ap_port=666), back)
    for length in (0, 1, 47, 49, 64, 200):
        asked.sendto(forged.ljust(length, b"\0")[:length], back)
    cable.rest()
    assert not cable.answers
    asked.sendto(reply_to(request), back)
    assert cable.loop.run_until(lambda: bool(cable.answers), WAIT_S)
    assert cable.answers == [RDMA_PORT]
    while (heard := cable.heard(asked)[0]).kind is not PortMapKind.ACK:
        assert heard.kind is PortMapKind.REQUEST  # it had asked again meanwhile
    assert (heard.ap_port, heard.assoc_handle) == (RDMA_PORT, request.assoc_handle)
    asked.sendto(reply_to(request, ap_port=666), back)  # too late
    cable.rest()
    cable.ask(asks)
    assert cable.answers == [RDMA_PORT, RDMA_PORT]


def test_an_answer_for_one_connection_is_not_kept(cable: Cable) -> None:
    asks, asked = cable.peers(cable.here), cable.sock(cable.there)
    for count in (1, 2):
        cable.ask(asks)
        while (heard := cable.heard(asked))[0].kind is not PortMapKind.REQUEST:
            pass
        asked.sendto(reply_to(heard[0], pm_time=0), heard[1])
        assert cable.loop.run_until(lambda count=count: len(cable.answers) == count, WAIT_S)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("ap_ip", "cp_ip"), [("198.18.9.77", HERE), (THERE, OTHERS[0]), (THERE, "0.0.0.0"), ("255.255.255.255", HERE)]
)
def test_a_request_that_concerns_others_is_not_answered(cable: Cable, ap_ip: str, cp_ip: str) -> None:
    cable.peers(cable.there)
    asks = cable.sock(cable.here, HERE)
    wrong = PortMap(PortMapKind.REQUEST, 80, 40000, 1, IPv4Address(cp_ip), IPv4Address(ap_ip))
    right = PortMap(PortMapKind.REQUEST, 80, 40000, 2, IPv4Address(HERE), IPv4Address(THERE))
    for request in (wrong, right):
        asks.sendto(request.encode(), (THERE, UDP_PORT))
    answer, source = cable.heard(asks)
    assert (answer.assoc_handle, answer.kind, source) == (2, PortMapKind.ACCEPT, (THERE, UDP_PORT))


def test_an_answer_goes_back_to_where_the_question_came_from(cable: Cable) -> None:
    cable.peers(cable.there)
    asks = cable.sock(cable.here, HERE, 5555)
    request = PortMap(PortMapKind.REQUEST, 80, 40000, 9, IPv4Address(HERE), IPv4Address(OTHERS[1]))
    asks.sendto(request.encode(), (OTHERS[1], UDP_PORT))
    answer, source = cable.heard(asks)
    assert (answer.kind, answer.ap_port, source) == (PortMapKind.ACCEPT, RDMA_PORT, (OTHERS[1], UDP_PORT))
    assert len(answer.encode()) <= len(request.encode())  # nobody is flooded by way of us


@pytest.mark.parametrize("seed", range(3))
def test_any_datagrams(cable: Cable, seed: int) -> None:
    dice = random.Random(seed)
    asks, serves = cable.peers(cable.here), cable.peers(cable.there)
    source = cable.sock(cable.there, THERE, 5000)
    for _ in range(500):
        data = bytearray(reply_to(PortMap(PortMapKind.REQUEST, 80, 1, 2, IPv4Address(HERE), IPv4Address(THERE))))
        for _ in range(dice.randrange(5)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        source.sendto(bytes(data)[: dice.choice((48, 48, 48, dice.randrange(49)))], (HERE, UDP_PORT))
        cable.loop.turn(0)
    assert cable.answered(asks) == RDMA_PORT
    assert serves.blind == ""


def test_everything_is_bounded(cable: Cable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PEERS_ASKING_MAX", 2)
    monkeypatch.setattr(limits, "PEERS_WAITING_MAX", 3)
    monkeypatch.setattr(limits, "PEERS_KNOWN_MAX", 2)
    asks = cable.peers(cable.here)
    cable.peers(cable.there)
    for _ in range(4):
        cable.ask(asks)
    assert cable.answers == [None]  # one too many waits for the same host
    cable.ask(asks, OTHERS[0])
    cable.ask(asks, OTHERS[1])
    assert cable.answers == [None, None]  # one host too many is asked
    assert cable.loop.run_until(lambda: len(cable.answers) == 6, WAIT_S)
    assert cable.answers[2:] == [RDMA_PORT] * 4
    assert cable.answered(asks, OTHERS[1]) == RDMA_PORT
    assert len(asks._known) == 2


def test_those_who_wait_hear_that_it_is_over(cable: Cable) -> None:
    asks = cable.peers(cable.here)
    cable.sock(cable.there)
    cable.ask(asks)
    cable.ask(asks)
    asks.close()
    assert cable.answers == [None, None]
    assert cable.loop.idle
    cable.ask(asks)
    assert cable.answers == [None, None, None]


def test_where_the_port_is_taken_one_can_still_ask(cable: Cable) -> None:
    cable.peers(cable.there)
    cable.sock(cable.here, "0.0.0.0")
    asks = cable.peers(cable.here)
    assert "another program has UDP port" in asks.blind
    assert cable.logged == [f"other hosts do not find this one: {asks.blind}"]
    assert cable.answered(asks) == RDMA_PORT


def test_whom_it_serves_depends_on_both_addresses(cable: Cable) -> None:
    seen: list[tuple[Address, Address]] = []

    def serve(local: Address, host: Address, _port: int) -> tuple[int, float] | None:
        seen.append((local, host))
        return None

    with cable.there.inside():
        made = Peers(cable.loop, serve, cable.logged.append)
    cable.stack.callback(made.close)
    asks = cable.peers(cable.here)
    assert cable.answered(asks, OTHERS[1]) is None
    assert cable.answered(asks, THERE6) is None
    assert seen == [(IPv4Address(OTHERS[1]), IPv4Address(HERE)), (IPv6Address(THERE6), IPv6Address(HERE6))]


def test_an_answer_for_one_connection_serves_only_one(cable: Cable) -> None:
    """PmTime 0 (docs/wire/sdp.md §23.4): who waits beside the first asks anew, and may get another port."""
    ports = iter(range(5000, 5010))
    with cable.there.inside():
        made = Peers(cable.loop, lambda _local, _host, _port: (next(ports), 0.0), cable.logged.append)
    cable.stack.callback(made.close)
    asks = cable.peers(cable.here)
    for _ in range(3):
        cable.ask(asks)
    assert cable.loop.run_until(lambda: len(cable.answers) == 3, WAIT_S)
    assert cable.answers == [5000, 5001, 5002]
    assert cable.answered(asks) == 5003
    assert not asks._known


def test_an_answer_that_is_not_known_yet_comes_when_it_is(cable: Cable) -> None:
    known: list[int] = []
    waiting: list[Callable[[], None]] = []

    def serve(_local: Address, _host: Address, _port: int) -> tuple[int, float] | None:
        if not known:
            raise NotYet("it is being asked for", waiting.append)
        return known[0], 60.0

    with cable.there.inside():
        made = Peers(cable.loop, serve, cable.logged.append)
    cable.stack.callback(made.close)
    cable.ask(cable.peers(cable.here))
    assert cable.loop.run_until(lambda: bool(waiting), WAIT_S)
    known.append(RDMA_PORT)
    waiting[0]()
    assert cable.loop.run_until(lambda: bool(cable.answers), WAIT_S)
    assert cable.answers == [RDMA_PORT]
