"""Queue pairs that are joined before a connection wants them; over loopback, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from random import Random

import pytest
from control_pair import ControlPair

from sidestep import limits
from sidestep.errors import Misuse
from sidestep.rdma.cm import CmState, ConnectionRequest
from sidestep.rdma.loopback import Fabric
from sidestep.rdma.loopback.qp import LoopbackQueuePair
from sidestep.rdma.verbs import AsyncEvent, EventKind, QpEndpoint, QpState, QueuePair
from sidestep.rdma.work import Send
from sidestep.remote.control_link import PRIVATE_DATA_MAX, Kind, Rej, Rep, Req
from sidestep.remote.control_manager import ControlConnection, ControlManager
from sidestep.remote.control_pool import POOL_SERVICE, QueuePairPool
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent, StreamReceive
from sidestep.sdp.settings import Addresses, SdpSettings
from sidestep.sdp.stack import Stack, stack_on
from sidestep.sdp.wire import service_id

PORT = 7000
ADDRESSES = Addresses(ip_address("10.0.0.1"), 2, ip_address("10.0.0.2"), PORT)
SOON_S = 5 * limits.CONTROL_POOL_DELAY_S
WIRE = "tested"
GIVEN_UP = [SdpEventKind.BROKEN, SdpEventKind.CLOSED]


class Connections:
    """Two hosts, each with a pool, and what their streams were told."""

    def __init__(self, *, answers: bool = True) -> None:
        self.fabric = Fabric(Random(1))
        devices = self.fabric.device("one"), self.fabric.device("other")
        self.pair = ControlPair(*devices, self.fabric, self.fabric)
        self.counts: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        self.stacks = [self._stack(at) for at in (0, 1)]
        for at in (0, 1) if answers else (0,):
            self.managers[at].keep_joined(self.stacks[at].make_usual_qp, partial(self._count, at))
        self.taken: list[SdpStream] = []
        self.told: dict[SdpStream, list[SdpEventKind]] = {}
        self.admits = True
        self.stacks[1].listen(PORT, self._accepted, admit=lambda _request: self.admits)

    def _stack(self, at: int) -> Stack:
        manager = self.managers[at]
        device = manager.device
        return stack_on(self.fabric, device, manager=manager, private_data_max=PRIVATE_DATA_MAX)

    def _count(self, at: int, what: str) -> None:
        self.counts[at][what] += 1

    def _accepted(self, stream: SdpStream) -> None:
        self.taken.append(stream)
        stream.tell = self.tell

    @property
    def managers(self) -> tuple[ControlManager, ControlManager]:
        return self.pair.active, self.pair.passive

    @property
    def pools(self) -> list[QueuePairPool]:
        return [each.pool for each in self.managers if each.pool is not None]

    @property
    def sizes(self) -> list[int]:
        return [each.size for each in self.pools]

    @property
    def queue_pairs(self) -> list[int]:
        """Those that there are, of each device."""
        return [sum(qp.device is each.device for qp in self.fabric.queue_pairs.values()) for each in self.managers]

    def tell(self, stream: SdpStream, event: StreamEvent) -> None:
        if isinstance(event, SdpEvent):
            self.told.setdefault(stream, []).append(event.kind)

    def ask(self, settings: SdpSettings | None = None) -> SdpStream:
        return self.stacks[0].connect("other", ADDRESSES, self.tell, settings)

    def connect(self) -> tuple[SdpStream, SdpStream]:
        """One that is made at both ends; time is left for the pool, too."""
        before = len(self.taken)
        stream = self.ask()
        self.fabric.run_until(lambda: len(self.taken) > before and len(self.told.get(self.taken[-1], ())) > 0)
        assert self.told[stream] == self.told[self.taken[-1]] == [SdpEventKind.ESTABLISHED]
        self.wait(SOON_S)
        return stream, self.taken[-1]

    def wait(self, seconds: float) -> None:
        over: list[None] = []
        self.fabric.call_at(self.fabric.now + seconds, lambda: over.append(None))
        self.fabric.run_until(lambda: bool(over))

    def rest(self) -> None:
        """So long that nothing is kept."""
        self.wait(2.5 * limits.CONTROL_POOL_KEPT_S)

    def say(self, kind: Kind, number: int, body: bytes = b"") -> None:
        """The end that asks says what it likes."""
        self.pair.links["other"].send(kind, number, body)
        self.wait(0.001)

    def answer(self, kind: Kind, number: int, body: bytes = b"") -> None:
        """The end that answers does."""
        self.pair.answering["other"].send(kind, number, body)
        self.wait(0.001)

    @property
    def ready(self) -> tuple[ControlConnection, int]:
        """The one pair that is ready where this asks, and its number on the link."""
        (made,) = [each for each in self.managers[0].connections.values() if each.state is CmState.JOINED]
        return made, made._number

    def close(self) -> None:
        for manager in self.managers:
            manager.close()
        for stack in self.stacks:
            stack.close()
        self.pair.close()


@pytest.fixture
def hosts() -> Iterator[Connections]:
    made = Connections()
    yield made
    made.close()


def strange(hosts: Connections, at: int = 0) -> QueuePair:
    """One that nobody there knows."""
    device = hosts.managers[at].device
    queue = device.create_cq(64)
    return device.alloc_pd().create_qp(queue, queue)


def req(service_id: int, endpoint: QpEndpoint, wire: str = WIRE, private_data: bytes = b"") -> bytes:
    return Req(wire, service_id, 4, 4, endpoint, private_data).encode()


# ---- connections ----


def test_the_second_connection_finds_its_queue_pairs_joined(hosts: Connections) -> None:
    hosts.connect()
    assert (hosts.sizes, hosts.queue_pairs) == ([1, 1], [2, 2])
    joined, _ = hosts.ready
    before = set(hosts.fabric.queue_pairs)
    stream = hosts.ask()
    assert stream.qp is joined.qp
    hosts.fabric.run_until(lambda: len(hosts.taken) == 2 and hosts.told.get(hosts.taken[1]) is not None)
    assert set(hosts.fabric.queue_pairs) == before, "nothing was made on the way"
    assert hosts.counts[0] == {"joined": 1, "taken": 1}
    for sender, receiver in ((stream, hosts.taken[1]), (hosts.taken[1], stream)):
        room = memoryview(bytearray(5))
        heard: list[StreamEvent] = []
        receiver.tell = lambda _stream, event: heard.append(event)  # noqa: B023
        receiver.receive(room, waitall=True)
        sender.send(memoryview(b"bytes"))
        hosts.fabric.run_until(lambda: any(type(each) is StreamReceive for each in heard))  # noqa: B023
        assert bytes(room) == b"bytes"


def test_no_queue_pair_serves_twice(hosts: Connections) -> None:
    seen: list[int] = []
    for _ in range(6):
        ends = hosts.connect()
        for stream in ends:
            assert stream.qp is not None
            seen.append(stream.qp.number)
        ends[0].abort()
        hosts.wait(SOON_S)
    assert hosts.counts[0]["taken"] == 5
    assert len(set(seen)) == len(seen)
    assert hosts.queue_pairs == hosts.sizes, "those of the connections are no more"


def test_as_many_are_kept_as_connections_were_made_up_to_a_bound(hosts: Connections) -> None:
    for count in range(1, limits.CONTROL_POOL_MAX + 4):
        hosts.connect()
        assert hosts.sizes == [min(count, limits.CONTROL_POOL_MAX)] * 2


def test_what_nobody_wants_is_given_back(hosts: Connections) -> None:
    for _ in range(3):
        hosts.connect()
    hosts.rest()
    assert (hosts.sizes, hosts.queue_pairs) == ([0, 0], [3, 3])
    assert hosts.counts[0]["unused"] == 3
    hosts.connect()
    assert hosts.sizes == [1, 1]


def test_pairs_go_with_their_link(hosts: Connections) -> None:
    for _ in range(3):
        hosts.connect()
    hosts.pair.links["other"].close()
    hosts.wait(2 * limits.CONTROL_TIMEWAIT_S)
    assert (hosts.sizes, hosts.queue_pairs) == ([0, 0], [0, 0])
    stream = hosts.ask()
    hosts.wait(SOON_S)
    assert hosts.told[stream] == GIVEN_UP, "there is no link"


def test_a_link_that_is_lost_while_a_pair_is_taken(hosts: Connections) -> None:
    hosts.connect()
    stream = hosts.ask()
    hosts.pair.links["other"].close()
    hosts.wait(2 * limits.CONTROL_TIMEWAIT_S)
    assert hosts.told[stream] == GIVEN_UP
    assert (hosts.sizes, hosts.queue_pairs) == ([0, 0], [0, 0])


def test_a_request_that_is_refused_takes_its_pair_along(hosts: Connections) -> None:
    hosts.connect()
    hosts.admits = False
    stream = hosts.ask()
    hosts.wait(SOON_S)
    assert hosts.told[stream] == GIVEN_UP
    assert (hosts.sizes, hosts.queue_pairs) == ([0, 0], [1, 1])
    hosts.admits = True
    hosts.connect()
    assert hosts.sizes == [2, 2]


@pytest.mark.parametrize("after_s", [0.0, 1e-5, 3e-5, 1e-4])
def test_an_attempt_that_is_given_up_leaves_nothing(hosts: Connections, after_s: float) -> None:
    hosts.connect()
    stream = hosts.ask()
    if after_s:
        hosts.wait(after_s)
    stream.abort()
    hosts.rest()
    assert (hosts.sizes, hosts.queue_pairs) == ([0, 0], [1, 1])


def test_an_attempt_that_waits_for_buffers_is_given_up(hosts: Connections) -> None:
    """It has its pair, and has not asked for a connection yet."""
    hosts.connect()
    stack = hosts.stacks[0]
    stack.buffers._bytes_max = stack.buffers.bytes
    stream = hosts.ask()
    hosts.wait(SOON_S)
    assert (hosts.sizes, len(hosts.taken)) == ([0, 1], 1)
    stream.abort()
    hosts.wait(2 * limits.CONTROL_TIMEWAIT_S)
    assert (hosts.sizes, hosts.queue_pairs) == ([0, 0], [1, 1])


def test_other_settings_take_none(hosts: Connections) -> None:
    hosts.connect()
    settings = hosts.stacks[0].settings
    stream = hosts.ask(replace(settings, receive_count=settings.receive_count + 1))
    hosts.wait(SOON_S)
    assert hosts.told[stream] == [SdpEventKind.ESTABLISHED]
    assert hosts.counts[0]["missed"] == 1


def test_an_answering_end_with_other_settings_refuses(hosts: Connections) -> None:
    hosts.connect()
    hosts.stacks[1].settings = replace(hosts.stacks[1].settings, receive_count=99)
    stream = hosts.ask()
    hosts.wait(SOON_S)
    assert hosts.told[stream] == GIVEN_UP
    assert (hosts.sizes, hosts.queue_pairs) == ([0, 0], [1, 1])


def test_a_connection_that_breaks_takes_the_others_pairs_along(hosts: Connections) -> None:
    """The way may be another one by now, and theirs is of then."""
    for _ in range(3):
        stream, _ = hosts.connect()
    assert isinstance(stream.qp, LoopbackQueuePair)
    hosts.fabric.cut(stream.qp)
    stream.send(memoryview(b"to nobody"))
    hosts.fabric.run_until(lambda: len(hosts.told[stream]) > 1)
    hosts.wait(1.0)
    assert (hosts.sizes, hosts.queue_pairs[0]) == ([0, 0], 2)
    hosts.connect()
    assert hosts.sizes == [1, 1]


def test_a_connection_that_is_closed_leaves_the_pairs(hosts: Connections) -> None:
    for close in (SdpStream.close, SdpStream.abort):
        for end in (0, 1):
            close(hosts.connect()[end])
            hosts.wait(1.0)
    assert hosts.sizes == [4, 4]


@pytest.mark.parametrize("at", [0, 1])
def test_a_queue_pair_that_breaks_is_no_pair_any_more(hosts: Connections, at: int) -> None:
    hosts.connect()
    (qp,) = (each.qp for each in hosts.managers[at].connections.values() if each.state is CmState.JOINED)
    assert qp.on_event is not None
    qp.on_event(AsyncEvent(EventKind.COMMUNICATION_ESTABLISHED, qp))
    hosts.wait(0.001)
    assert hosts.sizes == [1, 1]
    qp.modify_to_error()
    qp.on_event(AsyncEvent(EventKind.QP_FATAL, qp))
    hosts.wait(0.001)
    assert (hosts.sizes, hosts.queue_pairs) == ([0, 0], [1, 1])


@pytest.mark.parametrize("at", [0, 1])
def test_a_device_that_is_given_up_has_none_any_more(hosts: Connections, at: int) -> None:
    hosts.connect()
    hosts.managers[at].join_no_more()
    hosts.wait(SOON_S)
    assert (hosts.sizes, hosts.queue_pairs) == ([0, 0], [1, 1])
    hosts.connect()
    assert hosts.sizes == [0, 0]
    assert not hosts.pair.logged


def test_a_host_that_knows_no_pool_is_asked_once() -> None:
    hosts = Connections(answers=False)
    for _ in range(3):
        hosts.connect()
    assert (hosts.sizes, hosts.queue_pairs) == ([0], [3, 3])
    assert hosts.counts[0] == {"missed": 2}
    hosts.close()


# ---- another host that keeps no rules ----


def test_another_host_gets_no_more_than_its_share(hosts: Connections) -> None:
    sizes = []
    for number in range(1, limits.CONTROL_POOL_MAX + 6):
        hosts.say(Kind.REQ, number, req(POOL_SERVICE, strange(hosts).endpoint("other")))
        sizes.append(hosts.pools[1].size)
    assert sizes[-6:] == [limits.CONTROL_POOL_MAX] * 6
    assert hosts.queue_pairs[1] == limits.CONTROL_POOL_MAX
    assert not hosts.pair.logged


def test_all_hosts_together_get_no_more_than_a_bound(hosts: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONTROL_POOL_ALL_MAX", 3)
    for _ in range(6):
        hosts.connect()
    assert hosts.sizes == [3, 3]
    hosts.say(Kind.REQ, 1000, req(POOL_SERVICE, strange(hosts).endpoint("other")))
    assert hosts.sizes == [3, 3]


def test_requests_that_wait_for_their_answer_count(hosts: Connections) -> None:
    """Or another host would have as many queue pairs made as it may have requests waiting."""
    hosts.stacks[1].take_requests(PORT + 1, lambda _request: None)
    for number in range(1, 2 * limits.CONTROL_POOL_MAX):
        endpoint = strange(hosts).endpoint("other")
        hosts.say(Kind.REQ, number, req(POOL_SERVICE, endpoint))
        if hosts.queue_pairs[1] == number:
            hosts.say(Kind.REQ, number, req(service_id(PORT + 1), endpoint))
    assert not hosts.pair.logged
    assert hosts.queue_pairs[1] == limits.CONTROL_POOL_MAX
    hosts.pair.links["other"].close()
    hosts.managers[1].close()
    assert (hosts.pools[1].size, hosts.queue_pairs[1]) == (0, 0)


def test_a_request_by_a_pair_is_accepted_with_that(hosts: Connections) -> None:
    asked: list[ConnectionRequest] = []
    hosts.stacks[1].take_requests(PORT + 1, asked.append)
    hosts.connect()
    joined, number = hosts.ready
    hosts.say(Kind.REQ, number, req(service_id(PORT + 1), joined.qp.endpoint("other")))
    with pytest.raises(Misuse):
        asked[0].accept(strange(hosts, 1), b"", lambda *_: None)


BREACHES: dict[str, Callable[[QpEndpoint], list[tuple[Kind, bytes]]]] = {
    "by another wire": lambda endpoint: [(Kind.REQ, req(service_id(PORT), endpoint, wire="another"))],
    "by another queue pair": lambda endpoint: [
        (Kind.REQ, req(service_id(PORT), replace(endpoint, number=endpoint.number ^ 1)))
    ],
    "by another address": lambda endpoint: [
        (Kind.REQ, req(service_id(PORT), replace(endpoint, gid=b"another address.")))
    ],
    "from another packet on": lambda endpoint: [(Kind.REQ, req(service_id(PORT), replace(endpoint, psn=5)))],
    "for another pair": lambda endpoint: [(Kind.REQ, req(POOL_SERVICE, endpoint))],
    "twice": lambda endpoint: [(Kind.REQ, req(service_id(PORT + 1), endpoint))] * 2,
    "with an answer": lambda endpoint: [(Kind.REP, Rep(4, 4, endpoint, b"").encode())],
    "with no request": lambda _endpoint: [(Kind.REQ, b"")],
}


@pytest.mark.parametrize("how", BREACHES)
def test_who_asks_by_a_pair_against_the_rules_loses_its_link(hosts: Connections, how: str) -> None:
    hosts.stacks[1].take_requests(PORT + 1, lambda _request: None)
    hosts.connect()
    joined, number = hosts.ready
    for kind, body in BREACHES[how](joined.qp.endpoint("other")):
        assert not hosts.pair.logged
        hosts.say(kind, number, body)
    hosts.wait(2 * limits.CONTROL_TIMEWAIT_S)
    assert len(hosts.pair.logged) == 1
    assert not hosts.pair.links
    hosts.managers[1].close()
    hosts.wait(SOON_S)
    assert hosts.sizes == [0, 0]


def test_a_pair_that_is_taken_is_not_asked_for(hosts: Connections) -> None:
    hosts.connect()
    joined, number = hosts.ready
    endpoint = joined.qp.endpoint("other")
    streams = hosts.connect()
    hosts.say(Kind.REQ, number, req(service_id(PORT), endpoint))
    hosts.wait(2 * limits.CONTROL_TIMEWAIT_S)
    assert len(hosts.pair.logged) == 1
    assert [hosts.told[each][1] for each in streams] == [SdpEventKind.BROKEN] * 2


@pytest.mark.parametrize("kind", [Kind.DREQ, Kind.REJ])
@pytest.mark.parametrize("side", ["say", "answer"])
def test_either_end_gives_a_pair_up(hosts: Connections, kind: Kind, side: str) -> None:
    hosts.connect()
    _, number = hosts.ready
    getattr(hosts, side)(kind, number, Rej(4).encode() if kind is Kind.REJ else b"")
    assert hosts.sizes[side == "say"] == 0
    assert kind is Kind.DREQ or not hosts.pair.logged  # the end that has not said DREQ itself wants no DREP


def test_ready_to_use_is_nothing_where_no_connection_is(hosts: Connections) -> None:
    hosts.connect()
    _, number = hosts.ready
    hosts.say(Kind.RTU, number)
    assert (hosts.sizes, len(hosts.taken)) == ([1, 1], 1)
    hosts.connect()
    assert hosts.counts[0]["taken"] == 1


def test_a_message_before_there_is_a_connection_comes_to_nothing(hosts: Connections) -> None:
    hosts.connect()
    joined, _ = hosts.ready
    (there,) = [each for each in hosts.managers[1].connections.values() if each.state is CmState.JOINED]
    joined.qp.post_send(Send(1, (b"too early",)))
    hosts.wait(1.0)
    assert joined.qp.state is QpState.ERROR, "no receive was there"
    assert there.state is CmState.JOINED
    assert (len(hosts.taken), hosts.told[hosts.taken[0]]) == (1, [SdpEventKind.ESTABLISHED])


def test_a_pair_that_is_no_more_there_crosses_who_takes_it(hosts: Connections) -> None:
    hosts.connect()
    _, number = hosts.ready
    hosts.pair.answering["other"].send(Kind.DREQ, number)
    stream = hosts.ask()
    hosts.wait(SOON_S)
    assert hosts.told[stream] == GIVEN_UP
    assert not hosts.pair.logged
    hosts.rest()
    assert (hosts.sizes, hosts.queue_pairs) == ([0, 0], [1, 1])


@pytest.mark.parametrize("taken", [False, True])
def test_an_answer_that_names_another_queue_pair_costs_the_link(hosts: Connections, *, taken: bool) -> None:
    """Once they are joined no answer changes with whom."""
    hosts.connect()
    _, number = hosts.ready
    hosts.pair.answering["other"].send(Kind.REP, number, Rep(4, 4, QpEndpoint(bytes(16), 5, 0, 4096), b"").encode())
    stream = hosts.ask() if taken else None
    hosts.wait(2 * limits.CONTROL_TIMEWAIT_S)
    assert len(hosts.pair.logged) == 1
    assert hosts.sizes == [0, 0]
    assert hosts.queue_pairs == [0, 0], "what was connected by the link goes with it"
    if stream is not None:
        assert hosts.told[stream] == GIVEN_UP


def test_both_ends_take_at_once(hosts: Connections) -> None:
    """Each has asked for its own, by a link of its own."""
    hosts.pair.connect_back()
    back: list[SdpStream] = []

    def accepted(stream: SdpStream) -> None:
        stream.tell = hosts.tell
        back.append(stream)

    hosts.stacks[0].listen(PORT, accepted)
    for _ in range(3):
        asked = [hosts.ask(), hosts.stacks[1].connect("one", ADDRESSES, hosts.tell)]
        hosts.wait(SOON_S)
        for stream in (*asked, hosts.taken[-1], back[-1]):
            assert hosts.told[stream] == [SdpEventKind.ESTABLISHED]
    numbers = [stream.qp.number for stream in hosts.told if stream.qp is not None]
    assert len(set(numbers)) == 12
    assert [each["taken"] for each in hosts.counts] == [2, 2]
    assert hosts.sizes == [6, 6], "three of its own, and three of the other end's"
    hosts.rest()
    assert (hosts.sizes, hosts.queue_pairs) == ([0, 0], [6, 6])
