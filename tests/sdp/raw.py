"""One real connection, and by hand all that is around it: the device, the connection manager and the other end.

`End` is the surroundings of a `SdpConnection`: it has its private buffers, regions, clock and queue pair, does what it
orders, and looks at each step whether that was allowed. `RawPeer` is an `End` whose other end is written by hand:
messages go in as bytes, and what the connection has sent comes out decoded. Nothing here decides anything about SDP,
but what makes a message well-formed: sequence numbers and lengths, each of which a test can set as it likes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import TypeVar

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.rdma.work import Access, RdmaRead, RdmaWrite, Receive, RKey, Send, Status
from sidestep.sdp.connection import SdpCause, SdpConnection
from sidestep.sdp.header import MASK
from sidestep.sdp.requests import (
    Accept,
    Connect,
    Disconnect,
    NeedBuffers,
    Region,
    Register,
    Reject,
    Release,
    ReturnBuffer,
    SdpEvent,
    SdpEventKind,
    StreamEvent,
    StreamReceive,
    StreamSend,
    Work,
)
from sidestep.sdp.settings import Addresses, Carrier, SdpSettings
from sidestep.sdp.states import OPEN, SdpState
from sidestep.sdp.strategy import Strategy
from sidestep.sdp.wire import (
    BSDH,
    BSDH_LEN,
    Data,
    Decoded,
    Header,
    Hello,
    HelloAck,
    Mid,
    Mode,
    ModeChange,
    SinkAvail,
    SrcAvail,
    decode,
)

HERE, THERE = IPv4Address("10.0.0.1"), IPv4Address("10.0.0.2")
PORT, CLIENT_PORT = 5001, 40000
CREDIT = 64  # receives that the other end says it has posted, unless a test says otherwise

T = TypeVar("T")


@dataclass
class Memory:
    """A region of the connection's user, as its device knows it."""

    view: memoryview
    va: int
    access: Access
    live: bool = True


@dataclass
class Posted:
    """A work request that has not completed."""

    work: Send | RdmaWrite | RdmaRead
    memory: tuple[object, ...]  # what its entries are views of


class Surprise(AssertionError):
    """The connection did what it must never do."""


def roots(views: tuple[memoryview | bytes, ...]) -> tuple[object, ...]:
    """The objects whose memory the views show."""
    return tuple(view.obj if isinstance(view, memoryview) else view for view in views)


class Remote:
    """The other end's memory, as far as it has advertised it; anything else must not be touched."""

    def __init__(self) -> None:
        self.regions: dict[int, tuple[int, bytearray, Access]] = {}
        self.touched: list[tuple[str, int, int, int]] = []  # (what, key, address, bytes)

    def offer(self, rkey: int, va: int, memory: bytearray, access: Access) -> None:
        """Makes it reachable."""
        self.regions[rkey] = (va, memory, access)

    def _find(self, rkey: int, va: int, length: int, access: Access) -> tuple[bytearray, int] | None:
        if rkey not in self.regions:
            return None
        start, memory, allowed = self.regions[rkey]
        if not allowed & access or va < start or va + length > start + len(memory):
            return None
        return memory, va - start

    def read(self, rkey: int, va: int, length: int) -> bytes | None:
        """For an RDMA Read; None if that memory was not offered."""
        self.touched.append(("read", rkey, va, length))
        found = self._find(rkey, va, length, Access.REMOTE_READ)
        return None if found is None else bytes(found[0][found[1] : found[1] + length])

    def write(self, rkey: int, va: int, data: bytes) -> bool:
        """For an RDMA Write; whether that memory was offered."""
        self.touched.append(("write", rkey, va, len(data)))
        found = self._find(rkey, va, len(data), Access.REMOTE_WRITE)
        if found is None:
            return False
        memory, at = found
        memory[at : at + len(data)] = data
        return True


class End:
    """The surroundings of one connection. What goes out waits in `outbox`; `run` does all else that it asks for."""

    def __init__(self, settings: SdpSettings | None = None) -> None:
        self.settings = settings or SdpSettings()
        self.connection = SdpConnection(self.settings)
        self.remote: Remote | Across | None = Remote()
        self.now = 100.0
        self.posted: deque[Receive] = deque()
        self.buffers = 0  # made, and not given back
        self.outbox: deque[bytes] = deque()
        self.outstanding: deque[Posted] = deque()
        self.regions: dict[int, Memory] = {}
        self.registrations: deque[Register] = deque()
        self.orders: list[Work] = []  # all that were given
        self.events: list[StreamEvent] = []  # told and not looked at
        self.told: list[StreamEvent] = []  # all
        self.requests: list[StreamSend | StreamReceive] = []  # of the user, not ended
        self.hold_completions = False
        self.hold_registrations = False
        self.hold_disconnect = False
        self.disconnecting = False
        self.gone = False  # the queue pair
        self.keys: deque[tuple[int, int]] = deque()  # (key, address) of the next regions, where a test wants them so
        self._next_key = 0x1000
        self._next_id = 0

    def renew(self) -> None:
        """There is a new queue pair, for a connection that goes on over another transport connection."""
        self.gone = self.disconnecting = False

    # --- the user ---

    def send(self, data: bytes | bytearray, *, urgent: bool = False, bcopy_only: bool = False) -> StreamSend:
        request = self.connection.send(memoryview(data), self.now, urgent=urgent, bcopy_only=bcopy_only)
        self.requests.append(request)
        self.run()
        return request

    def receive(self, room: int, *, waitall: bool = False) -> StreamReceive:
        request = self.connection.receive(memoryview(bytearray(room)), self.now, waitall=waitall)
        self.requests.append(request)
        self.run()
        return request

    def read(self, room: int = 1 << 20) -> bytes:
        """What a receive gets at once; b"" if it would have to wait (it is taken back), or at the end."""
        request = self.receive(room)
        if not request.done:
            self.connection.cancel_receive(request, self.now)
            self.run()
        return bytes(request.view[: request.filled])

    def wait(self, seconds: float) -> None:
        """Time passes, and each timer fires when it is due."""
        until = self.now + seconds
        for _ in range(10_000):
            deadline = self.connection.next_deadline()
            if deadline is None or deadline > until:
                self.now = until
                return
            self.now = max(self.now, deadline)
            self.connection.handle_timeout(self.now)
            self.run()
        raise Surprise(f"timers fire for ever: {self.connection.timers}")

    # --- what it orders ---

    def run(self) -> None:
        """Does all that is ordered, until there is nothing left."""
        connection = self.connection
        for _ in range(100_000):
            work = connection.poll_work()
            if work is not None:
                self._do(work)
                continue
            event = connection.poll_event()
            if event is not None:
                self._tell(event)
                continue
            if self.outstanding and not self.hold_completions and not self.gone:
                self.complete(run=False)
                continue
            if self.registrations and not self.hold_registrations:
                self.register(run=False)
                continue
            if self.disconnecting and not self.hold_disconnect and not self.gone:
                self.disconnected(run=False)
                continue
            self.check()
            return
        raise Surprise("work without end")

    def _do(self, work: Work) -> None:
        if isinstance(work, Receive):
            if any(work is posted for posted in self.posted):
                raise Surprise("a receive was posted twice")
            self.posted.append(work)
        elif isinstance(work, Send):
            self._queue(work, work.gather)
            message = b"".join(bytes(part) for part in work.gather)
            self.outbox.append(message)
            self.sent(message)
        elif isinstance(work, RdmaWrite):
            self._queue(work, work.gather)
            data = b"".join(bytes(part) for part in work.gather)
            if data and self.remote is not None and not self.remote.write(work.rkey, work.remote_va, data):
                raise Surprise(f"RDMA Write of {len(data)} bytes outside all that was advertised")
        elif isinstance(work, RdmaRead):
            self._queue(work, work.scatter)
        else:
            self.orders.append(work)
            self._order(work)

    def _queue(self, work: Send | RdmaWrite | RdmaRead, views: tuple[memoryview | bytes, ...]) -> None:
        if self.disconnecting or self.gone:
            raise Surprise("a work request after the order to disconnect")
        self.outstanding.append(Posted(work, roots(views)))
        if len(self.outstanding) > self.settings.send_queue + 8:
            raise Surprise("more work requests than the send queue takes")

    def _order(self, work: Work) -> None:
        match work:
            case NeedBuffers(count, size):
                self.buffers += count
                made = [Receive(self._id(), (memoryview(bytearray(size)),)) for _ in range(count)]
                self.connection.handle_buffers(made, self.now)
            case ReturnBuffer(receive):
                if any(receive is posted for posted in self.posted) and not self.gone:
                    raise Surprise("a receive that is posted was given back")
                self.buffers -= 1
            case Register():
                self.registrations.append(work)
            case Release(region):
                memory = self.regions[region.rkey]
                if not memory.live:
                    raise Surprise("a region was released twice")
                memory.live = False
            case Disconnect():
                self.disconnecting = True
            case Connect() | Accept() | Reject():
                pass

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _tell(self, event: StreamEvent) -> None:
        self.events.append(event)
        self.told.append(event)
        if isinstance(event, SdpEvent):
            return
        if not event.done:
            raise Surprise("a request was told that has not ended")
        if not any(event is request for request in self.requests):
            raise Surprise("a request was told twice, or was never made")
        self.requests = [request for request in self.requests if request is not event]
        if any(event.view.obj is root for posted in self.outstanding for root in posted.memory) and not self.gone:
            raise Surprise(f"memory was given back while a work request uses it: {event}")
        for memory in self.regions.values():
            if memory.live and memory.view.obj is event.view.obj:
                raise Surprise("memory was given back that the other end can reach")

    # --- what the device says ---

    def complete(self, count: int = 1 << 30, status: Status = Status.SUCCESS, *, run: bool = True) -> None:
        """The oldest work requests complete; an RDMA Read has its bytes then."""
        while self.outstanding and count > 0:
            count -= 1
            work = self.outstanding.popleft().work
            outcome = status
            if isinstance(work, RdmaRead) and status is Status.SUCCESS and self.remote is not None:
                length = sum(map(len, work.scatter))
                data = self.remote.read(work.rkey, work.remote_va, length)
                if data is None:
                    raise Surprise(f"RDMA Read of {length} bytes outside all that was advertised")
                for view in work.scatter:
                    view[:], data = data[: len(view)], data[len(view) :]
            if work.signaled or outcome is not Status.SUCCESS:
                self.connection.handle_completion(work.wr_id, outcome, self.now)
                if not run:
                    return
        if run:
            self.run()

    def register(self, *, fail: bool = False, run: bool = True) -> None:
        """The oldest registration is answered."""
        order = self.registrations.popleft()
        if fail:
            self.connection.handle_registration_failed(order.request, self.now)
        else:
            self._next_key += 1
            key, va = self.keys.popleft() if self.keys else (self._next_key, self._next_key << 20)
            self.regions[key] = Memory(order.request.view, va, order.access)
            region = Region(key, RKey(key), va)
            self.connection.handle_registered(order.request, region, self.now)
        if run:
            self.run()

    def disconnected(self, *, run: bool = True) -> None:
        """The transport connection is gone: what was posted is flushed, and then the connection is told."""
        while self.outstanding:
            self.connection.handle_completion(self.outstanding.popleft().work.wr_id, Status.FLUSHED, self.now)
        self.buffers -= len(self.posted)
        self.posted.clear()
        self.gone = True
        self.connection.handle_disconnected(self.now)
        if run:
            self.run()

    def deliver(self, message: bytes) -> None:
        """A message arrives in the receive posted first."""
        if not self.posted:
            raise Surprise("no receive is posted")
        receive = self.posted.popleft()
        receive.scatter[0][: len(message)] = message
        self.connection.handle_message(receive, len(message), self.now)
        self.run()

    def sent(self, message: bytes) -> None:
        """The connection has sent this."""

    # --- looking ---

    def check(self) -> None:
        """What must hold whenever nothing moves."""
        connection = self.connection
        flow, sink, source = connection._flow, connection._sink, connection._source
        peer_adverts = len(source.sinks) + len(sink.adverts)
        bounds = {
            "control": (len(connection._control), 8 + 2 * self.settings.max_adverts),
            "advertisements of the other end": (peer_adverts, self.settings.max_adverts),
            "ready": (len(sink.ready), 3 * limits.SDP_BUFFERS_MAX),
            "events": (len(connection.events), 0),
            "work": (len(flow.work), 0),
            "in flight": (len(flow.in_flight), 4096 + self.settings.send_queue),
            "timers": (len(connection.timers), 8),
        }
        for name, (count, bound) in bounds.items():
            if count > bound:
                raise Surprise(f"{name}: {count}, more than {bound}")
        held = len({id(buffer) for _, buffer, _ in sink.ready if buffer is not None}) + len(connection._handshake.early)
        if len(self.posted) + held != self.buffers:
            raise Surprise(f"{self.buffers} buffers, {len(self.posted)} posted, {held} held")
        if not (self.gone or self.disconnecting) and connection.state in OPEN and flow.posted != len(self.posted):
            raise Surprise(f"{flow.posted} receives counted, {len(self.posted)} posted")

    def is_in(self, state: SdpState) -> None:
        """Asserts the state of the connection."""
        assert self.connection.state is state

    def kinds(self) -> list[SdpEventKind]:
        """Events since the last look that are not requests."""
        found = [event.kind for event in self.events if isinstance(event, SdpEvent)]
        self.events.clear()
        return found

    def ordered(self, kind: type[T]) -> list[T]:
        """All orders of one kind that were given."""
        return [order for order in self.orders if isinstance(order, kind)]


class RawPeer(End):
    """A connection whose other end is the test."""

    def __init__(self, settings: SdpSettings | None = None, *, credit: int = CREDIT) -> None:
        super().__init__(settings)
        self.heard: list[Decoded] = []  # messages of the connection that were not looked at
        self.tx_mseq = 0  # of the last message said
        self.rx_mseq = 0  # of the last one heard
        self.credit = credit  # receives that the peer says it has posted
        self.told_bufs = credit
        self.told_ack = 0
        self.lenient = False  # whether the connection's own conduct is left unlooked-at

    # --- setting up ---

    def hello(self, *, size: int = 32784, adverts: int = 16, **fields: int) -> bytes:
        header = Hello(adverts, 32784, size, CLIENT_PORT, THERE, HERE, **fields)  # type: ignore[arg-type]
        return self._message(header, bufs=self.credit, mseq=0, ack=0)

    def hello_ack(self, *, size: int = 32784, adverts: int = 16) -> bytes:
        return self._message(HelloAck(adverts, size), bufs=self.credit, mseq=0, ack=0)

    def accept(self, *, size: int = 32784, adverts: int = 16) -> RawPeer:
        """The connection takes our Hello: REP_SENT."""
        if not self.connection.accept(
            self.hello(size=size, adverts=adverts), Addresses(HERE, PORT, THERE, 0), self.now
        ):
            raise Surprise("a good Hello was refused")
        self.run()
        self._heard_introduction(self.ordered(Accept)[-1].private_data)
        return self

    def connect(self) -> RawPeer:
        """The connection asks us: REQ_SENT."""
        self.connection.connect(Addresses(HERE, CLIENT_PORT, THERE, PORT), self.now)
        self.run()
        self._heard_introduction(self.ordered(Connect)[-1].private_data)
        return self

    def establish(self, *, accepting: bool = True, size: int = 32784, adverts: int = 16) -> RawPeer:
        """ESTABLISHED, as either side."""
        if accepting:
            self.accept(size=size, adverts=adverts)
            self.connection.handle_established(self.now)
        else:
            self.connect()
            self.connection.handle_accepted(self.hello_ack(size=size, adverts=adverts), self.now)
        self.run()
        self.kinds()
        return self

    def resume(self) -> None:
        """The connection goes on where our socket has moved to: RESUMING, until it is established again."""
        self.renew()
        self.tx_mseq = self.rx_mseq = self.told_ack = 0
        self.told_bufs = self.credit
        self.connection.resume(self.now)
        self.run()
        self._heard_introduction(self.ordered(Connect)[-1].private_data)
        self.connection.handle_accepted(self.hello_ack(), self.now)
        self.run()

    def _heard_introduction(self, private_data: bytes) -> None:
        bsdh, _, _ = decode(memoryview(private_data))
        if bsdh.bufs != len(self.posted):
            raise Surprise("the introduction counts receives that are not posted")

    # --- saying ---

    def _message(
        self, header: Header, payload: bytes = b"", *, flags: int = 0, bufs: int, mseq: int, ack: int
    ) -> bytes:
        extended = header.encode()
        length = BSDH_LEN + len(extended) + len(payload)
        return BSDH.pack(header.MID, flags, bufs, length, mseq & MASK, ack & MASK) + extended + payload

    def message(
        self,
        header: Header,
        payload: bytes = b"",
        *,
        flags: int = 0,
        bufs: int | None = None,
        mseq: int | None = None,
        ack: int | None = None,
    ) -> bytes:
        """The next message, numbered as it should be unless something else is asked for."""
        self.tx_mseq = (self.tx_mseq + 1) & MASK
        self.told_bufs = self.credit if bufs is None else bufs
        self.told_ack = self.rx_mseq if ack is None else ack & MASK
        return self._message(
            header,
            payload,
            flags=flags,
            bufs=self.told_bufs,
            mseq=self.tx_mseq if mseq is None else mseq,
            ack=self.told_ack,
        )

    def say(
        self,
        header: Header,
        payload: bytes = b"",
        *,
        flags: int = 0,
        bufs: int | None = None,
        mseq: int | None = None,
        ack: int | None = None,
    ) -> list[Decoded]:
        """Sends a message; what the connection says to that, and what it has said before that was not looked at."""
        self.deliver(self.message(header, payload, flags=flags, bufs=bufs, mseq=mseq, ack=ack))
        return self.hear()

    def data(self, payload: bytes = b"", *, flags: int = 0, bufs: int | None = None) -> list[Decoded]:
        """Data, or an update."""
        return self.say(Data(), payload, flags=flags, bufs=bufs)

    def advertise(
        self, length: int, payload: int = 0, *, rkey: int = 0xA1, va: int = 0x7F0000, fill: int = 0
    ) -> tuple[SrcAvail, bytes]:
        """Memory for the connection to read, and the SrcAvail with its payload."""
        assert isinstance(self.remote, Remote)
        memory = bytearray((index + fill) % 251 for index in range(length))
        self.remote.offer(rkey, va, memory, Access.REMOTE_READ)
        return SrcAvail(length, rkey, va), bytes(memory[:payload])

    def show(self, length: int, *, rkey: int = 0xB1, va: int = 0x9F0000, nd: int = 0) -> SinkAvail:
        """Memory for the connection to write, and its SinkAvail."""
        assert isinstance(self.remote, Remote)
        self.remote.offer(rkey, va, bytearray(length), Access.REMOTE_WRITE)
        return SinkAvail(length, rkey, va, nd)

    def memory(self, rkey: int) -> bytearray:
        """What is in a region of the peer."""
        assert isinstance(self.remote, Remote)
        return self.remote.regions[rkey][1]

    # --- hearing ---

    def sent(self, message: bytes) -> None:
        decoded = decode(memoryview(message))
        bsdh, _, payload = decoded
        if not self.lenient:
            if bsdh.mseq != (self.rx_mseq + 1) & MASK:
                raise Surprise(f"MSeq {bsdh.mseq} after {self.rx_mseq}")
            credit = self.told_bufs - ((self.rx_mseq - self.told_ack) & MASK)
            if credit < (3 if payload else 1):
                raise Surprise(f"{Mid(bsdh.mid).name} of {len(payload)} bytes with a credit of {credit}")
            if (
                bsdh.bufs != min(len(self.posted), 0xFFFF) and bsdh.mid != Mid.ABORT_CONN
            ):  # the last word counts no more
                raise Surprise(f"Bufs {bsdh.bufs}, but {len(self.posted)} receives are posted")
            if len(message) > self.connection._flow.remote_size:
                raise Surprise("a message larger than the other end's private buffers")
        self.rx_mseq = bsdh.mseq
        self.heard.append(decoded)
        self.outbox.clear()

    def hear(self) -> list[Decoded]:
        """Messages of the connection since the last look."""
        heard, self.heard = self.heard, []
        return heard

    def mids(self) -> list[Mid]:
        """The same, by their kind only."""
        return [Mid(message.bsdh.mid) for message in self.hear()]

    # --- modes ---

    def receive_mode(self, mode: Mode) -> None:
        """Brings the half in which the connection receives from Combined to this mode."""
        if mode is not self.connection.receive_mode:
            self.say(ModeChange(False, mode))

    def send_mode(self, mode: Mode) -> None:
        """Brings the half in which the connection sends from Combined to this mode."""
        if mode is not self.connection.send_mode:
            self.connection.want_send_mode(mode, self.now)
            self.run()
            self.data()  # it is acknowledged
            self.hear()
            assert self.connection.send_mode is mode

    def broken_by(self, rule: str) -> None:
        """Asserts that the connection has ended as the standard wants it for a broken rule (SDP (A4), abortive close).

        Who has sent DisConn says AbortConn first; then, and for all others at once, the transport connection ends.
        """
        connection = self.connection
        error = connection.error
        assert isinstance(error, PeerViolation), f"{error!r} where {rule} was expected"
        assert error.rule == rule, error
        assert connection.cause is SdpCause.VIOLATION
        self.ended(error)

    def ended(self, error: Exception | None) -> None:
        """Asserts that nothing is left of the connection, and everybody was told, once."""
        connection = self.connection
        assert connection.state is SdpState.CLOSED, connection.state
        assert len(self.ordered(Disconnect)) == 1
        kinds = [event.kind for event in self.told if isinstance(event, SdpEvent)]
        assert kinds.count(SdpEventKind.CLOSED) == 1
        assert kinds.count(SdpEventKind.BROKEN) == (1 if error is not None else 0)
        assert isinstance(self.told[-1], SdpEvent)
        assert self.told[-1].kind is SdpEventKind.CLOSED
        broken = [event for event in self.told if isinstance(event, SdpEvent) and event.kind is SdpEventKind.BROKEN]
        assert [event.error for event in broken] == ([] if error is None else [error])
        assert not self.requests, "requests that never ended"
        assert not any(memory.live for memory in self.regions.values()), "regions that stay reachable"
        assert connection.next_deadline() is None
        assert not connection._control
        assert not connection._flow.in_flight


def pipelined(**fields: object) -> Strategy:
    """A strategy that advertises everything from one byte on, in both directions."""
    chosen: dict[str, object] = {"bcopy_max": 0, "read_min": 1, "sink_min": 1, "payload": 8} | fields
    return Strategy(**chosen)  # type: ignore[arg-type]


def small(**fields: object) -> SdpSettings:
    """Settings with which a few hundred bytes are much."""
    chosen: dict[str, object] = {
        "receive_size": 256,
        "receive_count": 8,
        "strategy": lambda: pipelined(),
        "carrier": Carrier.INFINIBAND,
    } | fields
    return SdpSettings(**chosen)  # type: ignore[arg-type]


class Across:
    """The memory of the other one of two real ends, as far as it is registered."""

    def __init__(self, end: End) -> None:
        self._end = end

    def _find(self, rkey: int, va: int, length: int, access: Access) -> memoryview | None:
        memory = self._end.regions.get(rkey)
        if memory is None or not memory.live or not memory.access & access:
            return None
        at = va - memory.va
        return memory.view[at : at + length] if at >= 0 and at + length <= len(memory.view) else None

    def read(self, rkey: int, va: int, length: int) -> bytes | None:
        """For an RDMA Read; None if that memory is not shown."""
        found = self._find(rkey, va, length, Access.REMOTE_READ)
        return None if found is None else bytes(found)

    def write(self, rkey: int, va: int, data: bytes) -> bool:
        """For an RDMA Write; whether that memory is shown."""
        found = self._find(rkey, va, len(data), Access.REMOTE_WRITE)
        if found is not None:
            found[:] = data
        return found is not None


class Pair:
    """Two real ends. `run` lets everything arrive; `step` one message, so that others can cross it."""

    def __init__(self, left: SdpSettings | None = None, right: SdpSettings | None = None) -> None:
        self.left, self.right = End(left), End(right)
        self.left.remote, self.right.remote = Across(self.right), Across(self.left)
        self.messages = 0  # that have arrived

    def other(self, end: End) -> End:
        """The end that is not this one."""
        return self.right if end is self.left else self.left

    def establish(self) -> Pair:
        """Left connects, right accepts."""
        left, right = self.left, self.right
        left.connection.connect(Addresses(HERE, CLIENT_PORT, THERE, PORT), left.now)
        left.run()
        self.introduce(left, right)
        return self

    def introduce(self, left: End, right: End) -> None:
        """Carries Hello and HelloAck."""
        hello = left.ordered(Connect)[-1].private_data
        if not right.connection.accept(hello, Addresses(THERE, PORT, HERE, 0), right.now):
            raise Surprise("a good Hello was refused")
        right.run()
        left.connection.handle_accepted(right.ordered(Accept)[-1].private_data, left.now)
        left.run()
        right.connection.handle_established(right.now)
        right.run()

    def step(self, end: End) -> bytes | None:
        """The oldest message of this end arrives."""
        if not end.outbox:
            return None
        message = end.outbox.popleft()
        self.messages += 1
        self.other(end).deliver(message)
        return message

    def run(self, limit: int = 20_000) -> None:
        """Everything arrives, and the end of the transport connection after all messages."""
        for _ in range(limit):
            if self.step(self.left) is not None or self.step(self.right) is not None:
                continue
            gone = [end for end in (self.left, self.right) if end.gone and not self.other(end).gone]
            if not gone:
                return
            self.other(gone[0]).disconnected()
        raise Surprise("the two ends talk without end")

    def wait(self, seconds: float) -> None:
        """Time passes at both ends."""
        until = self.left.now + seconds
        while True:
            self.run()
            deadlines = [at for end in (self.left, self.right) if (at := end.connection.next_deadline()) is not None]
            at = min([until, *deadlines])
            for end in (self.left, self.right):
                end.wait(max(0.0, at - end.now))
            if at >= until:
                self.run()
                return


def moved_to(pair: Pair, mover: End, settings: SdpSettings) -> Pair:
    """The new process takes over; the other end connects to it."""
    stayer, suspended = pair.other(mover), mover.connection.suspended
    assert stayer.connection.state is SdpState.RESUMING
    assert suspended is not None
    fresh = End(settings)
    fresh.requests = [request for request in mover.requests if request in suspended.unsent]
    fresh.connection.take_over(suspended)
    moved = Pair(settings, settings)
    moved.left, moved.right = stayer, fresh
    stayer.remote, fresh.remote = Across(fresh), Across(stayer)
    stayer.renew()
    stayer.outbox.clear()
    stayer.connection.resume(stayer.now)
    stayer.run()
    moved.introduce(stayer, fresh)
    return moved
