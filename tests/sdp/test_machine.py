"""Two real ends over a faulty loopback, against a plain byte queue for each direction.

Hypothesis chooses what the users do and when time goes on: it sends, receives, peeks, takes back, asks for modes and
sizes, and lets the fabric take one event or all of them. After each step the books of both ends must agree with each
other and with the queues. In the end everything is read and both directions are closed.

A bounded run with fixed examples by default; SIDESTEP_SDP_MACHINE=N plays N new programs of each machine.
"""

from __future__ import annotations

import os
import re
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from ipaddress import IPv4Address
from random import Random
from typing import Final, TypeAlias, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sidestep import limits
from sidestep.errors import Misuse, SidestepError
from sidestep.rdma.loopback import Fabric, Faults, Kind, LoopbackDevice, QpMessage, Recorder, Timing
from sidestep.rdma.loopback.qp import LoopbackQueuePair
from sidestep.rdma.soft.memory import Domain
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.rdma.work import Receive, Status
from sidestep.sdp.connection import SdpCause, SdpConnection
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.flow import Flow
from sidestep.sdp.halves import Halves
from sidestep.sdp.header import MASK
from sidestep.sdp.requests import ReturnBuffer, SdpEventKind, StreamEvent, StreamReceive, StreamSend
from sidestep.sdp.resize import Resize
from sidestep.sdp.settings import Addresses, Carrier, SdpSettings
from sidestep.sdp.sink import Sink
from sidestep.sdp.source import Source
from sidestep.sdp.stack import Stack
from sidestep.sdp.states import OPEN, SdpState
from sidestep.sdp.strategy import Strategy
from sidestep.sdp.teardown import Teardown
from sidestep.sdp.wire import Mid, Mode, ModeChange, SinkAvail, SrcAvail, decode

pytestmark = pytest.mark.slow

EXAMPLES: Final = int(os.environ.get("SIDESTEP_SDP_MACHINE", "0"))
PORT: Final = 5001
NEVER: Final = 1 << 40
SCRIBBLE: Final = 0xEE
LIMIT_S: Final = 600.0  # virtual, for everything that is left to come
ROOM: Final = 1 << 15  # of the receives that read the rest
ADDRESSES: Final = Addresses(IPv4Address("10.0.0.1"), 40000, IPv4Address("10.0.0.2"), PORT)
INFINIBAND: Final = DeviceAttributes(checks_local_memory=False)
IWARP: Final = DeviceAttributes(
    request_private_data_max=512,
    reply_private_data_max=512,
    reject_private_data_max=512,
    private_data_padded=False,
    read_scatter_max=1,
    acknowledged=False,
    checks_local_memory=False,
    read_sink_remote_write=True,
)

T = TypeVar("T", StreamSend, StreamReceive)
Made: TypeAlias = MultipleResults[tuple[int, T]]  # requests, each with the number of its end

seen: Counter[str] = Counter()  # mechanisms, of all examples of the test that runs


class Wire(Recorder):
    """Counts which mechanisms were used; keeps nothing."""

    def qp_message(self, message: QpMessage) -> None:
        if message.kind is Kind.SEND and message.length:
            bsdh, header, payload = decode(memoryview(b"".join(message.payload)))
            seen[Mid(bsdh.mid).name] += 1
            if isinstance(header, SinkAvail) and payload:
                seen["TRANSACTION"] += 1
            elif isinstance(header, SrcAvail):
                seen["SRC_AVAIL with payload" if payload else "SRC_AVAIL without"] += 1
            elif isinstance(header, ModeChange):
                seen[f"to {header.mode.name}"] += 1
        elif message.kind in (Kind.WRITE, Kind.READ_REQUEST) and message.length:
            seen[message.kind.name] += 1


class TimedStack(Stack):
    """A stack whose deadlines are timers of the fabric."""

    def __init__(self, device: LoopbackDevice, settings: SdpSettings) -> None:
        super().__init__(device, lambda: device.fabric.now, settings)
        self.fabric = device.fabric

    def arm(self, stream: SdpStream, at: float) -> None:
        super().arm(stream, at)
        self.fabric.call_at(at, self.handle_timeouts)


# --- what is drawn ---

SIZES: Final = st.one_of(
    st.sampled_from((37, 38, 64, 100, 256, 600)), st.integers(37, 700), st.sampled_from((4096, 32784))
)
LENGTHS: Final = st.one_of(st.integers(1, 40), st.integers(1, 400), st.integers(401, 3000))
LONG: Final = st.integers(200, 2000)
ENDS: Final = st.sampled_from((0, 1))
SELDOM: Final = st.sampled_from((False, False, False, True))  # what ends, or keeps from happening, what others could do
MODES: Final = st.sampled_from(list(Mode))


def chosen_strategy(fields: dict[str, int | bool | None]) -> partial[Strategy]:
    return partial(Strategy, **fields)  # type: ignore[arg-type]


STRATEGIES: Final = st.fixed_dictionaries(
    {
        "bcopy_max": st.sampled_from((0, 0, 16, 100, 500, NEVER)),
        "read_min": st.sampled_from((1, 1, 16, 300)),
        "sink_min": st.sampled_from((1, 1, 1, 100, 601, None)),
        "advert_max": st.sampled_from((50, 300, 1 << 20)),
        "adverts_in_flight": st.sampled_from((1, 2, 8)),
        "payload": st.sampled_from((1, 20, 64)),
        "transactions": st.sampled_from((True, True, True, False)),
        "pipelined": st.booleans(),
        "refusals": st.sampled_from((1, 4, 1000)),
        "rest": st.sampled_from((1, 8)),
    }
).map(chosen_strategy)


def some_settings(
    *, carrier: Carrier, keepalive_s: st.SearchStrategy[float] | None = None
) -> st.SearchStrategy[SdpSettings]:
    return st.builds(
        SdpSettings,
        receive_size=SIZES,
        receive_count=st.sampled_from((limits.SDP_BUFFERS_MIN, limits.SDP_BUFFERS_MIN, 6, 8, 16, 64)),
        remote_size=SIZES,
        max_adverts=st.one_of(st.sampled_from((1, 2, 3, 255)), st.integers(1, 255)),
        send_queue=st.sampled_from((limits.SDP_SEND_QUEUE_MIN, limits.SDP_SEND_QUEUE_MIN + 1, 16, 128)),
        reads_max=st.sampled_from((1, 2, 16)),
        carrier=st.just(carrier),
        strategy=STRATEGIES,
        advert_answer_s=st.sampled_from((1e-4, 1e-2, 1.0)),
        cancel_answer_s=st.just(10.0),
        last_ack_s=st.sampled_from((1e-3, 1.0)),
        probe_s=st.sampled_from((1e-4, 0.05)),
        keepalive_s=st.none() if keepalive_s is None else keepalive_s,
        urgent_inline=st.booleans(),
    )


class Theme(Enum):
    """What an example is mostly about, so that every mechanism has its share."""

    ANYTHING = "anything"
    PIPELINED = "both directions are in Pipelined mode"
    TALK = "so are they, and one end sends by Bcopy and has few credits: Transactions"


def suited(settings: SdpSettings, theme: Theme, *, asks: bool) -> SdpSettings:
    """Settings under which what the theme is about happens."""
    if theme is Theme.ANYTHING:
        return settings
    drawn: Callable[..., Strategy] = settings.strategy
    strategy: Callable[..., Strategy] = partial(drawn, sink_min=1, transactions=True)
    size = min(settings.receive_size, 100)  # only receives that are longer are advertised
    if theme is Theme.TALK and asks:
        strategy = partial(strategy, bcopy_max=NEVER)
    elif theme is Theme.PIPELINED:
        strategy = partial(strategy, bcopy_max=100)
    else:
        size, settings = 128 + size, replace(settings, receive_count=limits.SDP_BUFFERS_MIN)
    return replace(settings, receive_size=size, strategy=strategy)


TIMINGS: Final = st.builds(
    Timing,
    wire_s=st.sampled_from(((1e-6, 5e-6), (1e-6, 1e-4), (0.0, 0.0))),
    read_s=st.sampled_from(((0.0, 2e-5), (0.0, 1e-3), (0.0, 0.0))),
    registration_s=st.sampled_from(((5e-6, 5e-5), (5e-6, 2e-3), (0.0, 0.0))),
    bandwidth=st.sampled_from((None, 1e8)),
)


# --- the plain byte queue ---


@dataclass
class Sent:
    """One send: the bytes of the stream, and the memory that the connection may read until it has ended."""

    request: StreamSend
    content: bytes
    memory: bytearray
    inline: bool

    @property
    def stream(self) -> bytes:
        """What the other end may read of it: without the urgent byte if that is out of band there."""
        return self.content[:-1] if self.request.urgent and not self.inline else self.content

    def bounds(self) -> tuple[int, int]:
        """Bytes of `stream` that arrive, or have arrived, at least and at most."""
        request, whole = self.request, len(self.stream)
        if not request.cancelled and (not request.done or request.error is not None):
            return whole, whole
        passed = min(request.passed, whole)
        return passed, passed if request.done and request.error is None else whole


class ByteQueue:
    """One direction: what was sent, less what was taken back, is what arrives."""

    def __init__(self) -> None:
        self.sends: deque[Sent] = deque()  # not all of whose bytes have arrived
        self.arrived = bytearray()  # of these

    def settle(self) -> None:
        """Compares what can be compared for good, and forgets it."""
        while self.sends:
            least, most = self.sends[0].bounds()
            if least != most or len(self.arrived) < least:
                break
            sent = self.sends.popleft()
            assert self.arrived[:least] == sent.stream[:least], "other bytes than were sent"
            del self.arrived[:least]
        assert self.explains(b""), f"{len(self.arrived)} bytes have arrived that were not sent so"

    def explains(self, more: bytes) -> bool:
        """Whether what has arrived, and then `more`, is a beginning of what is in the queue."""
        got = bytes(self.arrived) + more
        ends = {0}  # up to where it is explained by the sends looked at: several, where one is being taken back
        for sent in self.sends:
            least, most = sent.bounds()
            content = sent.stream
            nexts: set[int] = set()
            for at in ends:
                if content[:most].startswith(got[at : at + most + 1]):
                    return True
                taken = least
                if got[at : at + taken] != content[:taken]:
                    continue
                nexts.add(at + taken)
                while taken < most and at + taken < len(got) and got[at + taken] == content[taken]:
                    taken += 1
                    nexts.add(at + taken)
            ends = nexts
        return len(got) in ends


@dataclass
class Room:
    """One receive, and what its memory held when it ended."""

    memory: bytearray
    content: bytes = b""


class End:
    """One end and its user."""

    def __init__(self, name: str, stack: TimedStack, incoming: ByteQueue, outgoing: ByteQueue, rng: Random) -> None:
        self.name, self.stack = name, stack
        self.incoming, self.outgoing = incoming, outgoing
        self.made: SdpStream | None = None
        self.sends: dict[int, Sent] = {}  # not ended
        self.receives: dict[int, Room] = {}  # not ended
        self.ended: list[Room] = []
        self.events: Counter[SdpEventKind] = Counter()
        self.error: SidestepError | None = None
        self.writing = True
        self.read_over = False  # the end of the stream was received, or an error
        self.gave_up = False
        self.reads_on = False  # a receive that ends is followed by another one
        self.other: End
        self.inline = False  # as the settings say
        self.urgent_taken: list[int] = []
        self._rng = rng

    @property
    def stream(self) -> SdpStream:
        assert self.made is not None
        return self.made

    @property
    def connection(self) -> SdpConnection:
        return self.stream.connection

    @property
    def closed(self) -> bool:
        return self.events[SdpEventKind.CLOSED] > 0

    @property
    def now(self) -> float:
        return self.stack.clock()

    def tell(self, stream: SdpStream, told: StreamEvent) -> None:
        if isinstance(told, StreamSend):
            self._sent(told)
        elif isinstance(told, StreamReceive):
            self._received(told)
        else:
            assert not self.closed or told.kind is SdpEventKind.READABLE, f"{told} after CLOSED"
            self.events[told.kind] += 1
            self.error = self.error or told.error
            if told.kind is SdpEventKind.CLOSED:
                assert not self.sends, "sends that never ended"

    def _sent(self, request: StreamSend) -> None:
        sent = self.sends.pop(id(request))  # KeyError: it was told twice
        assert request.done
        assert not request.pending or self.connection._flow.gone
        assert 0 <= request.passed <= request.length
        if request.error is None and not request.cancelled:
            assert request.passed == request.length, "a send has ended, and not all of it has gone"
        if request.error is None and all(sent is not waiting for waiting in self.outgoing.sends):
            assert min(request.passed, len(sent.stream)) == len(sent.stream), "more has arrived than is said to have"
        sent.memory[:] = bytes((SCRIBBLE,)) * request.length  # whoever reads it still will be seen
        self.outgoing.settle()

    def _received(self, request: StreamReceive) -> None:
        room = self.receives.pop(id(request))
        assert request.done
        assert not request.reads
        assert not request.advert
        assert 0 <= request.filled <= request.length
        room.content = bytes(room.memory)
        self.ended.append(room)
        assert self.gave_up or not (request.filled and self.read_over), "bytes after the end"
        self.incoming.arrived += room.memory[: request.filled]
        self.incoming.settle()
        if request.error is not None:
            self.read_over = True
        elif not request.filled and not request.cancelled:
            assert self.connection.ended, "the end of a stream that has not ended"
            assert not self.other.writing, "the end of a stream that nobody has ended"
            self.read_over = True
        if self.connection.at_mark and not self.connection.events:
            byte = self.connection.take_urgent()
            if byte is not None:
                self.urgent_taken.append(byte)
        if self.reads_on:
            self.read_on()

    # --- what the user does ---

    def send(self, size: int, *, urgent: bool, bcopy_only: bool) -> StreamSend:
        """Queues it, no more."""
        content = self._rng.randbytes(size)
        memory = bytearray(content)
        request = self.connection.send(memoryview(memory), self.now, urgent=urgent, bcopy_only=bcopy_only)
        sent = Sent(request, content, memory, self.other.inline)
        self.sends[id(request)] = sent
        self.outgoing.sends.append(sent)
        return request

    def receive(self, size: int, *, waitall: bool) -> StreamReceive:
        memory = bytearray(size)
        request = self.connection.receive(memoryview(memory), self.now, waitall=waitall)
        self.receives[id(request)] = Room(memory)
        return request

    def read_on(self) -> None:
        """Reads up to the end, from now on."""
        self.reads_on = True
        if not self.receives and not self.read_over:
            self.receive(ROOM, waitall=False)
            self.stream.run()

    def abort(self) -> None:
        self.writing = False
        self.read_over = self.gave_up = True
        self.stream.abort()

    def shutdown_write(self) -> None:
        if self.writing:
            self.writing = False
            self.stream.shutdown_write()

    # --- what must hold ---

    @property
    def qp(self) -> LoopbackQueuePair | None:
        qp = self.stream.qp
        assert qp is None or isinstance(qp, LoopbackQueuePair)
        return qp

    @property
    def broken(self) -> bool:
        """The transport connection is over, or about to be."""
        connection, qp = self.connection, self.qp
        if connection.state not in OPEN or connection.error is not None or connection._flow.down:
            return True
        return qp is None or qp.state.name != "RTS" or qp.link.cut

    def held(self) -> int:
        """Private buffers with bytes that nobody has read."""
        return len({id(buffer) for _, buffer, _ in self.connection._sink.ready if buffer is not None})

    def check_buffers(self) -> None:
        """All private buffers are somewhere, and the device has those that we count on."""
        flow = self.connection._flow
        assert self.qp is not None
        under_way = len(self.stack.recv_cq.entries)  # type: ignore[attr-defined]  # messages not looked at
        device = self.qp.receives_posted + under_way
        posted = len(self.stream.posted)
        assert flow.posted == posted == device, (
            f"{self.name}: {flow.posted} private buffers counted, {posted} posted, {device} in the device"
        )
        expected = flow.receive_count + self.connection._resize.surplus
        assert flow.posted + self.held() == expected, (
            f"{self.name}: {flow.posted} private buffers posted, {self.held()} held, {expected} in all"
        )
        requests = {wr_id for wr_id, _, _ in flow.in_flight}  # one of them may be of several sends
        assert len(requests) <= flow.send_queue

    def check_credit(self) -> None:
        """What it may send, and what is on its way, finds a receive at the other end (SDP (A4) credits)."""
        here, there = self.connection._flow, self.other.connection._flow
        under_way = (here.tx_mseq - there.rx_mseq) & MASK
        assert here.credit + under_way <= there.posted, f"{self.name}: {here.credit} + {under_way} > {there.posted}"

    def check_adverts(self) -> None:
        """No more than the other end takes are outstanding, of both kinds together."""
        out = len(self.connection._source.adverts) + len(self.connection._sink.shown)
        assert out <= self.connection._halves.peer_max_adverts

    def has_everything(self) -> bool:
        """The user's memory holds all that the other end has sent."""
        sink, source = self.connection._sink, self.other.connection._source
        caught_up = self.closed or self.connection._flow.rx_mseq == self.other.connection._flow.tx_mseq
        return source.idle and caught_up and not (sink.ready_bytes or sink.adverts or sink.due)

    def check_settled(self) -> None:
        """Nothing is on its way, and everything was read: both ends know the same of this direction."""
        source, sink = self.connection._source, self.other.connection._sink
        flow, there = self.connection._flow, self.other.connection._flow
        assert flow.tx_mseq == there.rx_mseq
        assert source.mode is sink.mode
        assert source.pnd == sink.nd, f"{self.name}: PND {source.pnd}, ND {sink.nd}"
        assert len(source.sinks) == len(sink.shown)
        assert not source.adverts
        assert not sink.adverts
        assert not sink.due
        assert not source.forced
        assert not source.queue
        assert not sink.ready_bytes  # an urgent mark stays until bytes follow
        assert not flow.in_flight or not any(send for _, send, _ in flow.in_flight)

    def describe(self) -> str:
        """For a failure."""
        connection = self.connection
        flow, source, sink = connection._flow, connection._source, connection._sink
        return (
            f"{self.name}: {connection.state.value}, {len(self.sends)} sends, {len(self.receives)} receives, "
            f"{dict(self.events)}, error {self.error!r}, timers {connection.timers}\n"
            f"  sends {source.mode.name}, queue {len(source.queue)}, adverts {len(source.adverts)}, "
            f"forced {len(source.forced)}, sinks {len(source.sinks)}, pnd {source.pnd}, cancel {source.cancel_mseq}\n"
            f"  receives {sink.mode.name}, {len(sink.receives)} of them, shown {len(sink.shown)}, "
            f"ready {len(sink.ready)}, adverts {len(sink.adverts)}, due {sink.due}, nd {sink.nd}, ended {sink.ended}\n"
            f"  credit {flow.credit}, posted {flow.posted}, in flight {len(flow.in_flight)}, "
            f"tx {flow.tx_mseq}, rx {flow.rx_mseq}, control {len(connection._control)}"
        )

    def check_closed(self) -> None:
        """Nothing is left."""
        connection = self.connection
        assert connection.state is SdpState.CLOSED
        assert connection.next_deadline() is None
        assert connection.poll_work() is None
        assert not connection._flow.in_flight
        assert not self.receives, f"{self.name}: {len(self.receives)} receives that never ended"
        assert self.events[SdpEventKind.CLOSED] == 1
        for room in self.ended:
            assert bytes(room.memory) == room.content, "a receive changed after it had ended"
        domain = self.stack.domain
        assert isinstance(domain, Domain)
        assert not self.stack.buffers.lent, f"{self.name}: {self.stack.buffers.lent} private buffers are still lent"
        assert not self.stack.streams
        self.stack.close()
        assert not domain.regions


# --- the machines ---


class TwoEnds(RuleBasedStateMachine):
    """Nothing fails but registrations: all bytes arrive, and both ends close."""

    sends: Bundle[tuple[int, StreamSend]] = Bundle("sends")
    receives: Bundle[tuple[int, StreamReceive]] = Bundle("receives")
    gentle = True

    @initialize(
        data=st.data(),
        seed=st.integers(0, 1 << 16),
        timing=TIMINGS,
        iwarp=st.sampled_from((False, False, True)),
        theme=st.sampled_from(Theme),
    )
    def begin(self, data: st.DataObject, seed: int, timing: Timing, iwarp: bool, theme: Theme) -> None:
        iwarp = iwarp and self.gentle  # an end that only waits cannot learn there that its link is cut
        keepalive_s = None if self.gentle else st.sampled_from((0.01, 1.0))
        carrier = Carrier.IWARP if iwarp else Carrier.INFINIBAND
        strategy = some_settings(carrier=carrier, keepalive_s=keepalive_s)
        self.faults = Faults()
        self.fabric = Fabric(Random(seed), timing=timing, faults=self.faults, observer=Wire())
        queues = ByteQueue(), ByteQueue()
        self.ends: list[End] = []
        for index, name in enumerate("ab"):
            chosen = suited(data.draw(strategy, label=f"settings of {name}"), theme, asks=index == 0)
            stack = TimedStack(self.fabric.device(name, IWARP if iwarp else INFINIBAND), chosen)
            end = End(name, stack, queues[1 - index], queues[index], Random(seed + index + 1))
            end.inline = chosen.urgent_inline
            self.ends.append(end)
        left, right = self.ends
        left.other, right.other = right, left

        def accepted(stream: SdpStream) -> None:
            stream.tell = right.tell
            right.made = stream

        right.stack.listen(PORT, accepted)
        left.made = left.stack.connect("b", ADDRESSES, left.tell)
        established = SdpEventKind.ESTABLISHED
        assert self.fabric.run_until(lambda: all(end.events[established] for end in self.ends))
        if theme is not Theme.ANYTHING:
            for at in (0, 1):
                self.want_send_mode(at, Mode.PIPELINED)
            self.fabric.run()
        if theme is Theme.TALK:
            left.receive(500, waitall=False)
            left.stream.run()  # its memory is being registered; by then a request waits for credit, and takes it along
            while not left.connection._source.queue:
                self._send(0, [20], urgent=False, bcopy_only=True)
            self.fabric.run_until(self.fabric.now + 0.01)
            for _ in range(2):
                right.receive(20, waitall=False)
            right.stream.run()
            self.fabric.run()
        elif theme is Theme.PIPELINED:
            left.receive(500, waitall=False)
            left.stream.run()
            self.fabric.run_until(self.fabric.now + 0.01)
            self._send(1, [400], urgent=False, bcopy_only=False)

    # --- users ---

    @rule(
        target=sends,
        at=ENDS,
        sizes=st.lists(LENGTHS, min_size=1, max_size=4),
        bcopy_only=st.sampled_from((False, False, False, True)),
    )
    def send(self, at: int, sizes: list[int], bcopy_only: bool) -> Made[StreamSend]:
        return self._send(at, sizes, urgent=False, bcopy_only=bcopy_only)

    @rule(target=sends, at=ENDS, size=st.one_of(st.just(1), LENGTHS))
    def send_urgent(self, at: int, size: int) -> Made[StreamSend]:
        return self._send(at, [size], urgent=True, bcopy_only=False)

    def _send(self, at: int, sizes: list[int], *, urgent: bool, bcopy_only: bool) -> Made[StreamSend]:
        end = self.ends[at]
        if not end.writing or end.connection.error is not None:
            return multiple()
        made = [(at, end.send(size, urgent=urgent, bcopy_only=bcopy_only)) for size in sizes]
        end.stream.run()
        return multiple(*made)

    @rule(target=receives, at=ENDS, sizes=st.lists(LENGTHS, min_size=1, max_size=4), waitall=SELDOM)
    def receive(self, at: int, sizes: list[int], waitall: bool) -> Made[StreamReceive]:
        end = self.ends[at]
        if end.gave_up:
            return multiple()
        made = [(at, end.receive(size, waitall=waitall)) for size in sizes]
        end.stream.run()
        return multiple(*made)

    @rule(which=sends)
    def cancel_send(self, which: tuple[int, StreamSend]) -> None:
        at, request = which
        self.ends[at].stream.cancel(request)

    @rule(which=receives)
    def cancel_receive(self, which: tuple[int, StreamReceive]) -> None:
        at, request = which
        self.ends[at].stream.cancel(request)

    @rule(at=ENDS, size=LONG, pause=st.integers(0, 30))
    def receive_for_a_while(self, at: int, size: int, pause: int) -> None:
        """Takes back what the other end has been shown, in Pipelined mode, or is just using."""
        end = self.ends[at]
        if end.gave_up:
            return
        request = end.receive(size, waitall=False)
        end.stream.run()
        self.step(pause)
        end.stream.cancel(request)

    @rule(at=ENDS, size=LONG)
    def refuse_what_is_withdrawn(self, at: int, size: int) -> None:
        """SendSm and SrcAvailCancel cross."""
        end = self.ends[at]
        if not end.writing or end.connection.error is not None:
            return
        request = end.send(size, urgent=False, bcopy_only=False)
        end.stream.run()
        if self._step_until(lambda: bool(end.other.connection._sink.adverts)):
            end.other.connection.peek(end.now)
            end.other.stream.run()
        end.stream.cancel(request)

    @rule(at=ENDS, size=st.integers(1, 40), rooms=st.lists(LONG, min_size=1, max_size=3))
    def leave_pipelined(self, at: int, size: int, rooms: list[int]) -> None:
        """SinkAvails cross a payload message and a change to Combined behind it."""
        end = self.ends[at]
        if not end.writing or end.connection.error is not None or end.other.gave_up:
            return
        for room in rooms:
            end.other.receive(room, waitall=False)
        end.other.stream.run()
        self._step_until(lambda: len(end.other.connection._sink.shown) == len(rooms))
        if end.connection.error is not None:
            return
        end.send(size, urgent=False, bcopy_only=True)
        end.stream.run()
        end.connection.want_send_mode(Mode.COMBINED, end.now)
        end.stream.run()

    @rule(at=ENDS, size=st.integers(1, 40), count=st.integers(1, 4), room=LONG)
    def ask(self, at: int, size: int, count: int, room: int) -> None:
        """Short requests, one more than there is credit for, and room for their answer: Transactions."""
        end = self.ends[at]
        if not end.writing or end.connection.error is not None:
            return
        for _ in range(count):
            end.send(size, urgent=False, bcopy_only=True)
            end.stream.run()
        end.receive(room, waitall=False)
        end.stream.run()

    @rule(at=ENDS)
    def peek(self, at: int) -> None:
        end = self.ends[at]
        if not end.receives:
            peeked = bytes(end.connection.peek(end.now))
            assert end.incoming.explains(peeked), "peeked what was not sent so"
        end.stream.run()

    @rule(at=ENDS, mode=MODES)
    def want_send_mode(self, at: int, mode: Mode) -> None:
        end = self.ends[at]
        end.connection.want_send_mode(mode, end.now)
        end.stream.run()

    @rule(at=ENDS)
    def want_combined(self, at: int) -> None:
        end = self.ends[at]
        end.connection.want_combined(end.now)
        end.stream.run()

    @rule(at=ENDS, size=SIZES)
    def resize_remote(self, at: int, size: int) -> None:
        end = self.ends[at]
        try:
            end.connection.resize_remote(size, end.now)
        except Misuse:
            return
        end.stream.run()

    @rule(at=ENDS, surely=SELDOM)
    def shutdown_write(self, at: int, surely: bool) -> None:
        if surely:
            self.ends[at].shutdown_write()

    @rule(chance=st.sampled_from((0.0, 0.1, 0.5, 1.0)))
    def fail_registrations(self, chance: float) -> None:
        self.faults.fail_registration = chance

    # --- time ---

    @rule(count=st.integers(1, 20))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.fabric.step()
            self.all_agrees()

    def _step_until(self, condition: Callable[[], bool]) -> bool:
        """A few steps, no more; whether it is so then."""
        for _ in range(60):
            if condition() or not self.fabric.step():
                break
        return condition()

    @rule()
    def rest(self) -> None:
        self.fabric.run()

    @rule()
    def wait(self) -> None:
        """Up to the next deadline of an end."""
        deadlines = [at for end in self.ends if (at := end.stack.next_deadline()) is not None]
        if deadlines:
            self.fabric.run_until(min(deadlines))

    # --- what must hold ---

    @invariant()
    def all_agrees(self) -> None:
        ends = self.ends
        if self.gentle:
            for end in ends:
                assert end.error is None, f"{end.name} is told of an error: {end.error!r}"
        if any(end.broken for end in ends):
            return
        for end in ends:
            end.check_buffers()
            end.check_credit()
            end.check_adverts()

    def teardown(self) -> None:
        if not hasattr(self, "ends") or not all(end.made for end in self.ends):
            return  # it has not begun
        for end in self.ends:
            end.read_on()
        self.finish()
        for end in self.ends:
            end.check_closed()
        assert not self.fabric.queue_pairs

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        if not self.fabric.run_until(condition, limit_s=LIMIT_S):
            raise AssertionError(f"never: {what}\n" + "\n".join(end.describe() for end in self.ends))

    def finish(self) -> None:
        ends = self.ends
        self._until(lambda: not any(end.sends for end in ends), "all sends end")
        self.fabric.run()
        self._until(lambda: all(end.has_everything() for end in ends), "all bytes arrive")
        self.fabric.run_until(self.fabric.now + 1.0)
        self.fabric.run()
        if not any(end.broken for end in ends) and all(end.writing for end in ends):
            self.all_agrees()
            for end in ends:
                end.check_settled()
        for end in ends:
            end.shutdown_write()
        self._until(lambda: all(end.read_over for end in ends), "the end of both streams")
        self._until(lambda: all(end.closed for end in ends), "the last word")
        self._until(lambda: not self.fabric.queue_pairs, "nothing is left")
        for end in ends:
            assert not end.incoming.arrived
            assert not end.incoming.sends
            assert end.error is None
            assert end.events[SdpEventKind.WRITE_CLOSED] == end.events[SdpEventKind.END_OF_STREAM] == 1


# What a connection may be about when it breaks: whatever is lent or owed then has to be given back.
DEMANDED: Final = "bytes that SendSm demanded"
WITHDRAWN: Final = "a withdrawal"
RESIZED: Final = "another size"
AMID: Final[dict[str, Callable[[SdpConnection], bool]]] = {
    "an advertisement": lambda c: bool(c._source.adverts),
    DEMANDED: lambda c: bool(c._source.forced),
    WITHDRAWN: lambda c: c._source.cancel_mseq is not None,
    RESIZED: lambda c: c._resize.busy or c._resize.asked is not None,
    "SinkAvails of the other end": lambda c: bool(c._source.sinks),
    "receives that are shown": lambda c: bool(c._sink.shown),
    "an RDMA Read": lambda c: c._sink.reads > 0,
    "bytes that nobody has read": lambda c: bool(c._sink.ready),
    "an advertisement that is not read": lambda c: bool(c._sink.adverts),
}
SHOWN: Final = {"SinkAvails of the other end", "receives that are shown"}  # nothing is sent there
UNREAD: Final = {DEMANDED, "bytes that nobody has read", "an advertisement that is not read"}  # nobody receives
INCOMING: Final = {"receives that are shown", *list(AMID)[-3:]}  # it is the end that reads which breaks
SCARCE: Final = {DEMANDED, "an RDMA Read"}  # it depends on what Hypothesis draws whether it comes to that


class BreakingEnds(TwoEnds):
    """The transport fails at some time: a beginning of the bytes arrives, and both ends are told."""

    gentle = False
    amid: str | None = None  # then nothing breaks before it has come to that

    def _queue_pair(self, at: int) -> LoopbackQueuePair | None:
        return self.ends[at].qp

    @precondition(lambda self: hasattr(self, "ends"))
    @rule(at=ENDS, reset=st.booleans(), surely=SELDOM)
    def break_link(self, at: int, reset: bool, surely: bool) -> None:
        qp = self._queue_pair(at)
        if qp is not None and surely and self.amid is None:
            (self.fabric.reset if reset else self.fabric.cut)(qp)

    @initialize(at=ENDS, length=LONG, room=LONG, how=st.sampled_from(("cut", "reset", "abort")))
    def choose_the_end(self, at: int, length: int, room: int, how: str) -> None:
        """How it breaks after the last step, if it is to break amid something certain."""
        self.last = partial(self.break_amid, at, length, room, how)

    def break_amid(self, at: int, length: int, room: int, how: str) -> None:
        """As soon as it has come to that, if it does."""
        amid, end = self.amid, self.ends[at]
        if amid is None:
            return
        sender, reader = (end.other, end) if amid in INCOMING else (end, end.other)
        if end.broken or end.other.broken or not (end.writing and end.other.writing):
            return
        if amid in SHOWN:
            sender.connection.want_send_mode(Mode.PIPELINED, end.now)
            sender.stream.run()
        if amid not in UNREAD:
            reader.receive(room, waitall=False)
            reader.stream.run()
        else:
            for receive in list(reader.connection._sink.receives):
                reader.stream.cancel(receive)
        request = None
        if amid not in SHOWN:
            request = sender.send(length, urgent=False, bcopy_only=False)
            sender.stream.run()
        if amid == RESIZED:
            self.resize_remote(at, length + limits.SDP_BUFFER_SIZE_MIN)

        def reached() -> bool:
            if amid == DEMANDED:
                reader.connection.peek(end.now)
                reader.stream.run()
            elif amid == WITHDRAWN and sender.connection._source.adverts and request is not None:
                sender.stream.cancel(request)
            return end.broken or AMID[amid](end.connection)

        if not self._step_until(reached) or end.broken:
            return
        seen[f"broken amid {amid}"] += 1
        qp = self._queue_pair(at)
        assert qp is not None
        if how == "abort":
            end.abort()
        else:
            (self.fabric.reset if how == "reset" else self.fabric.cut)(qp)

    @rule(
        ahead=st.integers(0, 4),
        at=ENDS,
        status=st.sampled_from((Status.REMOTE_OPERATION_ERROR, Status.FATAL)),
        surely=SELDOM,
    )
    def fail_request(self, ahead: int, at: int, status: Status, surely: bool) -> None:
        if surely and self.amid is None:
            self.faults.error_by_wr_id[self.ends[at].connection._flow.next_wr_id + ahead] = status

    @rule(at=ENDS, surely=SELDOM)
    def abort(self, at: int, surely: bool) -> None:
        if surely and self.amid is None:
            self.ends[at].abort()

    def teardown(self) -> None:
        if hasattr(self, "ends") and hasattr(self, "last") and all(end.made for end in self.ends):
            self.last()
        super().teardown()

    def finish(self) -> None:
        ends = self.ends
        for end in ends:
            end.shutdown_write()
        self._until(lambda: all(end.closed for end in ends), "the last word")
        self._until(lambda: not self.fabric.queue_pairs, "nothing is left")
        for end in ends:
            if not end.gave_up:  # who did has nothing more to say
                end.stream.close()
            end.incoming.settle()
            told = end.events[SdpEventKind.BROKEN]
            assert told == (end.connection.error is not None), f"{end.name} is told {told} times that it is broken"
            ends_well = end.events[SdpEventKind.WRITE_CLOSED] == end.events[SdpEventKind.END_OF_STREAM] == 1
            assert told or ends_well, f"{end.name} is told neither of a failure nor of both ends"


PHASES: Final = (Phase.explicit, Phase.generate, Phase.shrink)


def run(machine: type[TwoEnds], examples: int, *, steps: int = 40, phases: tuple[Phase, ...] = PHASES) -> Counter[str]:
    """Plays the examples, and counts the mechanisms that were used in them."""
    seen.clear()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES or examples,
            stateful_step_count=steps,
            phases=phases,
            report_multiple_bugs=False,
            derandomize=not EXAMPLES,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Counter(seen)


@pytest.mark.timeout(0)
def test_all_bytes_arrive() -> None:
    used = run(TwoEnds, 150)
    wanted = {mid.name for mid in Mid} - {"HELLO", "HELLO_ACK", "ABORT_CONN", "SUSP_COMM", "SUSP_COMM_ACK"}
    wanted |= {"TRANSACTION", "WRITE", "READ_REQUEST", "SRC_AVAIL with payload", "SRC_AVAIL without"}
    wanted |= {f"to {mode.name}" for mode in Mode}
    assert wanted <= set(used), f"not used at all: {wanted - set(used)}"


@pytest.mark.timeout(0)
def test_what_breaks_ends() -> None:
    run(BreakingEnds, 100)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("amid", AMID)
def test_what_breaks_ends_whatever_it_was_about(amid: str) -> None:
    used = run(breaking(amid), 60, steps=6)
    assert used[f"broken amid {amid}"] or amid in SCARCE, "it never came to that"


def breaking(amid: str) -> type[TwoEnds]:
    """The machine that breaks amid that."""
    return type("BreakingAmid", (BreakingEnds,), {"amid": amid})


# --- the checks can fail ---


def uncounted(self: Source) -> None:
    """A payload message that uses up no SinkAvail is not counted."""
    if self.sinks:
        self.sinks.popleft()


def posted_twice(self: Flow, receive: Receive) -> None:
    """A private buffer that is posted counts twice."""
    self.posted += 2
    self.owes = True
    self.work.append(receive)


def never(*_: object) -> None:
    """Does not do what it should."""


def surplus_forgotten(self: Resize, buffer: Receive) -> None:
    """A buffer of the old size is given back, and still counts."""
    if self.surplus and buffer.wr_id not in self._current:
        self._flow.work.append(ReturnBuffer(buffer))
    else:
        self._flow.post(buffer)


def ends_well(self: Halves) -> None:
    """Who reads is told that the stream has ended, where it was reset."""
    self.sink.ended = True
    while self.sink.receives:
        self.end_receive(self.sink.receives.popleft())


_break_off = Teardown.break_off


def told_again(self: Teardown, error: SidestepError, cause: SdpCause, *, transport_ended: bool = False) -> None:
    """Whatever goes wrong after the first error is told as well."""
    _break_off(self, error, cause, transport_ended=transport_ended)
    self._host.tell(SdpEventKind.BROKEN, error)


def untold(self: Teardown, error: SidestepError, cause: SdpCause) -> None:
    """Nobody is told."""
    self._host.error, self._host.cause = error, cause


MUTANTS: Final[dict[str, tuple[type[TwoEnds], type, str, Callable[..., object], str]]] = {
    "PND": (TwoEnds, Source, "_count_payload", uncounted, r"PND \d+, ND \d+"),
    "buffers counted": (TwoEnds, Flow, "post", posted_twice, "private buffers counted"),
    "buffers in all": (TwoEnds, Resize, "repost", surplus_forgotten, "private buffers posted"),
    "receives": (BreakingEnds, Halves, "give_up_receives", never, "receives that never ended"),
    "end of the stream": (BreakingEnds, Halves, "give_up_receives", ends_well, "nobody has ended|never: the last word"),
    "told once": (BreakingEnds, Teardown, "break_off", told_again, "is told 2 times"),
    "told at all": (BreakingEnds, Teardown, "_tell_broken", untold, "is told 0 times"),
    "a reset": (BreakingEnds, Teardown, "_tell_broken", never, "a stream that has not ended|is told neither"),
    "unread": (breaking("bytes that nobody has read"), Sink, "drain", never, "private buffers are still lent"),
}


_MUTANT_RUNS: Final = 10


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_rule_is_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, owner, name, broken, seen_as = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, broken)
    others: list[str] = []  # what another check has seen first, as which one does depends on the examples
    for number in range(_MUTANT_RUNS):
        made = seed(number)(type("Mutant", (machine,), {}))
        with pytest.raises(AssertionError) as failed:
            run(made, 1000, phases=(Phase.generate,))  # as many as it takes: they end with the first that sees it
        if re.search(seen_as, str(failed.value)):
            return
        others.append(str(failed.value).partition("\n")[0])
    pytest.fail(f"seen only as {others}")
