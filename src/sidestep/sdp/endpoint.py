"""SDP over a device: what joins the sans-IO connection to queue pairs, memory and the connection manager.

A `Stack` is one device as SDP uses it: a protection domain, a completion queue for sending and one for receiving that
all connections share, listeners. A `Stream` is one connection: it posts what the connection orders and tells it what
came of it. Both are driven from outside, in one thread: by the device's callbacks, by the user's calls and by
`Stack.handle_timeouts`. The faces for programs are in `blocking` and `aio`.

Payload is never copied on its way out: the gather list names the user's own memory. Where a device wants all memory it
touches to be registered (`DeviceAttributes.checks_local_memory`), a send that no region of the domain holds is
registered for as long as it lasts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from ipaddress import IPv4Address
from typing import Any, Final, TypeAlias

from sidestep import limits
from sidestep.errors import LimitReached, Misuse, SidestepError, Unavailable
from sidestep.rdma import cm
from sidestep.rdma.cm import ConnectionRequest, Disconnected, Established, Rejected, Unreachable
from sidestep.rdma.verbs import Device, MemoryRegion, QpCapabilities, QueuePair
from sidestep.rdma.work import (
    Access,
    Completion,
    RdmaRead,
    RdmaWrite,
    Receive,
    Send,
    Status,
)
from sidestep.sdp.connection import Connection
from sidestep.sdp.requests import (
    Accept,
    Connect,
    Disconnect,
    Event,
    EventKind,
    NeedBuffers,
    Region,
    Register,
    Reject,
    Release,
    ReturnBuffer,
    StreamReceive,
    StreamSend,
    Told,
)
from sidestep.sdp.settings import Addresses, Settings
from sidestep.sdp.states import State
from sidestep.sdp.wire import service_id

Teller: TypeAlias = "Callable[[Stream, Told], None]"
Acceptor: TypeAlias = "Callable[[Stream], None]"

_DONE: Final = Status.SUCCESS
_CQ_SIZE: Final = 65536  # completions; queues with a handler are emptied as they fill


class Stack:
    """One device, as SDP uses it; `clock` gives monotonic seconds."""

    def __init__(self, device: Device, clock: Callable[[], float], settings: Settings | None = None) -> None:
        self.device = device
        self.clock = clock
        self.settings = settings or Settings()
        self.domain = device.alloc_pd()
        depth = min(_CQ_SIZE, device.attributes.completions_max)
        self.send_cq = device.create_cq(depth, self._sent)
        self.recv_cq = device.create_cq(depth, self._received)
        self.streams: dict[int, Stream] = {}  # by number of the queue pair
        self._deadlines: list[tuple[float, int, Stream]] = []
        self._deadline_count = 0

    def connect(self, address: str, addresses: Addresses, tell: Teller, settings: Settings | None = None) -> Stream:
        """Begins a connection to the device at `address`; what comes of it is told."""
        stream = Stream(self, settings or self.settings, tell)
        stream.address = address
        stream.connection.connect(addresses, self.clock())
        stream.run()
        return stream

    def listen(
        self,
        port: int,
        accepted: Acceptor,
        *,
        match: cm.PrivateDataMatch | None = None,
        backlog: int = limits.RDMA_BACKLOG_DEFAULT,
        settings: Settings | None = None,
    ) -> cm.Listener:
        """Takes connections to a port; `accepted` is called with each, and sets its `tell` before it returns."""
        chosen = settings or self.settings

        def requested(request: ConnectionRequest) -> None:
            stream = Stream(self, chosen, _nobody)
            stream.request = request
            if stream.connection.accept(request.private_data, _addresses_of(port), self.clock()):
                accepted(stream)
            else:
                stream.tell = _refused
            stream.run()

        return self.device.cm.listen(service_id(port), requested, match=match, backlog=backlog)

    def _received(self, completions: list[Completion]) -> None:
        now = self.clock()
        streams = self.streams
        touched: Stream | None = None
        for completion in completions:
            stream = streams.get(completion.qp_number)
            if stream is None:
                continue
            if stream is not touched:
                if touched is not None:
                    touched.run()
                touched = stream
            buffer = stream.posted.popleft()
            if completion.status is _DONE:
                stream.connection.handle_message(buffer, completion.byte_len, now)
            else:
                stream.connection.handle_receive_failed(buffer, completion.status, now)
        if touched is not None:
            touched.run()

    def _sent(self, completions: list[Completion]) -> None:
        now = self.clock()
        streams = self.streams
        touched: Stream | None = None
        for completion in completions:
            stream = streams.get(completion.qp_number)
            if stream is None:
                continue
            if stream is not touched:
                if touched is not None:
                    touched.run()
                touched = stream
            stream.connection.handle_completion(completion.wr_id, completion.status, now)
        if touched is not None and not touched.connection.quiet():
            touched.run()

    def next_deadline(self) -> float | None:
        """When `handle_timeouts` is to be called, or None; it may be a little early."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].deadline != deadlines[0][0]:
            heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def handle_timeouts(self) -> None:
        """Does what is due by the clock."""
        now = self.clock()
        while (at := self.next_deadline()) is not None and at <= now:
            _, _, stream = heappop(self._deadlines)
            stream.deadline = None
            stream.connection.handle_timeout(now)
            stream.run()

    def arm(self, stream: Stream, at: float) -> None:
        """Remembers the deadline of a stream."""
        self._deadline_count += 1
        heappush(self._deadlines, (at, self._deadline_count, stream))


class _Slab:
    """Private buffers that were registered together; their wr_ids follow each other."""

    __slots__ = ("count", "first", "region", "returned")

    def __init__(self, region: MemoryRegion, first: int, count: int) -> None:
        self.region = region
        self.first = first
        self.count = count
        self.returned = 0


class Stream:
    """One connection on a stack."""

    __slots__ = (
        "_cm", "_disconnected", "_regions", "_running", "_slabs", "_wr_id", "address", "connection", "deadline",
        "posted", "qp", "request", "stack", "tell",
    )  # fmt: skip

    def __init__(self, stack: Stack, settings: Settings, tell: Teller) -> None:
        self.stack = stack
        self.tell = tell
        self.connection = Connection(settings)
        self.address = ""
        self.request: ConnectionRequest | None = None
        self.qp: QueuePair | None = None
        self.posted: deque[Receive] = deque()  # in the order of posting, which is that of completion
        self.deadline: float | None = None
        self._cm: cm.Connection | None = None
        self._disconnected = False
        self._running = False
        self._wr_id = 0
        self._slabs: list[_Slab] = []
        self._make_qp(settings)

    def _make_qp(self, settings: Settings) -> None:
        stack = self.stack
        capabilities = QpCapabilities(
            max_send_wr=settings.send_queue + 8,
            max_recv_wr=2 * settings.receive_count + 8,
            initiator_depth=settings.reads_max,
            responder_resources=settings.reads_max,
        )
        self.qp = stack.domain.create_qp(stack.send_cq, stack.recv_cq, capabilities)
        stack.streams[self.qp.number] = self

    # --- the user ---

    def send(self, data: memoryview, *, urgent: bool = False, bcopy_only: bool = False) -> StreamSend:
        """Queues bytes; see `Connection.send`."""
        send = self.connection.send(data, self.stack.clock(), urgent=urgent, bcopy_only=bcopy_only)
        self.run()
        return send

    def receive(self, room: memoryview, *, waitall: bool = False) -> StreamReceive:
        """Offers room; see `Connection.receive`."""
        receive = self.connection.receive(room, self.stack.clock(), waitall=waitall)
        self.run()
        return receive

    def shutdown_write(self) -> None:
        """No more sends."""
        self.connection.shutdown_write(self.stack.clock())
        self.run()

    def close(self, linger_s: float | None = None) -> None:
        """Ends both directions; see `Connection.close`."""
        self.connection.close(self.stack.clock(), linger_s)
        self.run()

    def abort(self) -> None:
        """Resets the connection."""
        self.connection.abort(self.stack.clock())
        self.run()

    # --- driving ---

    def run(self) -> None:
        """Posts what is to be posted and tells what is to be told, until there is nothing left."""
        if self._running:  # called from `tell`: the loop below goes on
            return
        self._running = True
        connection = self.connection
        poll_work, poll_event = connection.poll_work, connection.poll_event
        try:
            while True:
                while (work := poll_work()) is not None:
                    kind = type(work)
                    if kind is Receive:
                        self.posted.append(work)  # type: ignore[arg-type]
                        self.qp.post_recv(work)  # type: ignore[arg-type, union-attr]
                    elif kind is Send or kind is RdmaWrite or kind is RdmaRead:
                        self.qp.post_send(work)  # type: ignore[arg-type, union-attr]
                    else:
                        self._ORDERS[kind](self, work)
                event = poll_event()
                if event is None:
                    break
                self.tell(self, event)
        finally:
            self._running = False
        deadline = connection.next_deadline()
        if deadline != self.deadline:
            self.deadline = deadline
            if deadline is not None:
                self.stack.arm(self, deadline)

    def _on_need_buffers(self, order: NeedBuffers) -> None:
        """One slab for all of them."""
        slab = memoryview(bytearray(order.count * order.size))
        try:
            region = self.stack.domain.register(slab, Access.LOCAL_WRITE)
        except (LimitReached, Unavailable) as error:
            self.connection.handle_buffers_failed(error, self.stack.clock())
            return
        first = self._wr_id + 1
        self._slabs.append(_Slab(region, first, order.count))
        buffers = []
        for index in range(order.count):
            self._wr_id += 1
            buffers.append(Receive(self._wr_id, (slab[index * order.size : (index + 1) * order.size],)))
        self.connection.handle_buffers(buffers, self.stack.clock())

    def _on_return_buffer(self, order: ReturnBuffer) -> None:
        """The last one of a slab takes it along."""
        wr_id = order.receive.wr_id
        for slab in self._slabs:
            if slab.first <= wr_id < slab.first + slab.count:
                slab.returned += 1
                if slab.returned == slab.count:
                    slab.region.deregister()
                    self._slabs.remove(slab)
                return

    def _on_register(self, order: Register) -> None:
        request, connection, clock = order.request, self.connection, self.stack.clock

        def registered(found: MemoryRegion | SidestepError) -> None:
            if isinstance(found, SidestepError):
                connection.handle_registration_failed(request, clock())
            else:
                connection.handle_registered(request, Region(found, found.rkey, found.va), clock())
            self.run()

        self.stack.domain.register_later(request.view, order.access, registered)

    def _on_release(self, order: Release) -> None:
        assert isinstance(order.region.handle, MemoryRegion)
        order.region.handle.deregister()

    def _on_connect(self, order: Connect) -> None:
        assert self.qp is not None
        self._cm = self.stack.device.cm.connect(
            self.address,
            order.service_id,
            self.qp,
            order.private_data,
            self._told_by_cm,
            check_reply=self.connection.judge_reply,
        )

    def _on_accept(self, order: Accept) -> None:
        assert self.request is not None
        assert self.qp is not None
        self._cm = self.request.accept(self.qp, order.private_data, self._told_by_cm)

    def _on_reject(self, order: Reject) -> None:
        assert self.request is not None
        self.request.reject(order.reason)
        self._gone()

    def _on_disconnect(self, order: Disconnect) -> None:
        if self._cm is not None:
            self._cm.disconnect()
        if not self._disconnected and self.connection.state in (State.CLOSED,):
            self._gone()

    def _told_by_cm(self, _: cm.Connection, event: cm.ConnectionEvent) -> None:
        connection, now = self.connection, self.stack.clock()
        if isinstance(event, Established):
            if connection.accepting:
                connection.handle_established(now)
            else:
                connection.handle_accepted(event.private_data, now)
        elif isinstance(event, Rejected):
            connection.handle_refused(event.reason, now)
            self._gone()
        elif isinstance(event, Unreachable):
            connection.handle_unreachable(now)
            self._gone()
        elif isinstance(event, Disconnected):
            self._disconnected = True
            connection.handle_disconnected(now)
            self._gone()
        self.run()

    def _gone(self) -> None:
        """The queue pair is done with."""
        if self.qp is not None:
            self.stack.streams.pop(self.qp.number, None)
            self.qp.destroy()
            self.qp = None
        for slab in self._slabs:
            slab.region.deregister()
        self._slabs.clear()

    _ORDERS: Final[dict[type, Callable[[Stream, Any], None]]] = {
        NeedBuffers: _on_need_buffers,
        ReturnBuffer: _on_return_buffer,
        Register: _on_register,
        Release: _on_release,
        Connect: _on_connect,
        Accept: _on_accept,
        Reject: _on_reject,
        Disconnect: _on_disconnect,
    }


def _nobody(stream: Stream, event: Told) -> None:
    raise Misuse("an accepted stream has nobody to tell", remedy="set stream.tell when it is accepted")


def _refused(stream: Stream, event: Told) -> None:
    """Nobody has seen this stream, and nobody will."""


def _addresses_of(port: int) -> Addresses:
    unknown = IPv4Address(0)
    return Addresses(unknown, port, unknown, 0)


__all__ = ["Acceptor", "Event", "EventKind", "Stack", "Stream", "Teller"]
