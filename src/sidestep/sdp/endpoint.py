"""SDP over a device: what joins the sans-IO connection to queue pairs, memory and the connection manager.

A `Stack` is one device as SDP uses it: a protection domain, a completion queue for sending and one for receiving that
all connections share, private buffers, regions, listeners. A `Stream` is one connection: it posts what the connection
orders and tells it what came of it. Both are driven from outside, in one thread: by the device's callbacks, by the
user's calls and by `Stack.handle_timeouts`. The faces for programs are in `blocking` and `aio`.

Payload is never copied on its way out: the gather list names the user's own memory. Where a device wants all memory it
touches to be registered (`DeviceAttributes.checks_local_memory`), see `cover`.

Theory of operation of an end. A queue pair goes into error by a disconnect of either end, by a request that fails, or
by an event of the device; who sees an error disconnects. Then two last requests are posted: as all work completes in
order, the queues are empty when these are flushed, and no memory is in use any more. Only then is the connection told
that it is disconnected, and the user's requests end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from sidestep import limits
from sidestep.errors import Misuse, PeerViolation, SidestepError, Unavailable
from sidestep.rdma import cm
from sidestep.rdma.cm import (
    ConnectionRequest,
    Disconnected,
    Established,
    Rejected,
    Unreachable,
)
from sidestep.rdma.pools import MessagePool, RdmaElement, RdmaPool
from sidestep.rdma.verbs import AsyncEvent, Device, MemoryRegion, QpCapabilities, QueuePair
from sidestep.rdma.verbs import EventKind as DeviceEvent
from sidestep.rdma.work import (
    REJECT_CONSUMER,
    Access,
    Completion,
    RdmaRead,
    RdmaWrite,
    Receive,
    RKey,
    Send,
    SendRequest,
    Status,
)
from sidestep.sdp.buffers import Loan, PrivateBuffers, Want
from sidestep.sdp.connection import Cause, Connection
from sidestep.sdp.cover import Cover, Covering, LastingMemory
from sidestep.sdp.private_data import check_room, fitted, whole
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
    Suspended,
    Told,
)
from sidestep.sdp.settings import Addresses, Carrier, Settings
from sidestep.sdp.states import State
from sidestep.sdp.wire import BSDH_LEN, SinkAvail, service_id

if TYPE_CHECKING:
    from typing_extensions import Buffer

Teller: TypeAlias = "Callable[[Stream, Told], None]"
Acceptor: TypeAlias = "Callable[[Stream], None]"

_DONE: Final = Status.SUCCESS
_CQ_SIZE: Final = 65536  # completions; queues with a handler are emptied as they fill
_SPARE_REQUESTS: Final = 8  # in both queues, beyond what the connection uses: the last ones, and some
_HEADERS_MAX: Final = BSDH_LEN + SinkAvail.LENGTH  # bytes of the longest headers that payload follows
_REMOTE: Final = Access.REMOTE_READ | Access.REMOTE_WRITE
_LAST: Final = 0  # number of the two requests that show that a queue pair is flushed; the connection begins at 1
_OPENING: Final = frozenset({State.REQ_SENT, State.REP_SENT})
_LISTENERS_LOOKED_AT: Final = 32  # listeners until those that were closed are forgotten
_LAST_RECEIVE: Final = Receive(_LAST, ())


class Poster(Protocol):
    """Where work requests go: a queue pair, or what stands before it."""

    def post_send(self, request: SendRequest) -> None:
        """Hands over one request."""

    def post_recv(self, receive: Receive) -> None:
        """Hands over room for one message."""


class Stack:
    """One device, as SDP uses it.

    Args:
        device: Whose events come here from now on, and then go where they went before.
        clock: Gives monotonic seconds.
        settings: Of connections for which no others are given.
        wake_at: Called with the time at which `handle_timeouts` is to be called next, in place of the one before.
        private_bytes_max: Of private buffers; connections beyond it wait for some.
        private_bytes_kept: Of private buffers that nobody uses and that are kept for the next connection.
        keep_registered: Whether users' buffers stay registered after use, closed to the other end, for the next time.
            That saves time, but keeps them alive, and a `bytearray` cannot be resized meanwhile.

    Raises:
        Unavailable: The device does not carry SDP.
    """

    def __init__(
        self,
        device: Device,
        clock: Callable[[], float],
        settings: Settings | None = None,
        *,
        wake_at: Callable[[float], None] | None = None,
        private_bytes_max: int = limits.SDP_PRIVATE_BYTES_MAX,
        private_bytes_kept: int = 0,
        keep_registered: bool = False,
    ) -> None:
        _check(device)
        self.device = device
        self.clock = clock
        self.wake_at = wake_at
        self.settings = settings or Settings()
        self.keep_registered = keep_registered
        self.domain = device.alloc_pd()
        depth = min(_CQ_SIZE, device.attributes.completions_max)
        self.send_cq = device.create_cq(depth, self._sent)
        self.recv_cq = device.create_cq(depth, self._received)
        self.streams: dict[int, Stream] = {}  # by number of the queue pair
        self.buffers = PrivateBuffers(self.domain, bytes_max=private_bytes_max, kept=private_bytes_kept)
        self.regions = RdmaPool(self.domain)
        self.lasting = LastingMemory()
        self.spares: MessagePool | None = None  # registered buffers for payload that cannot be registered
        if device.attributes.checks_local_memory:
            self.spares = MessagePool(self.domain, size=limits.SDP_CHECKED_MESSAGE_MAX, count=limits.SDP_SPARE_BUFFERS)
        self._listeners: list[cm.Listener] = []
        self._listeners_most = _LISTENERS_LOOKED_AT
        self._deadlines: list[tuple[float, int, Stream]] = []
        self._deadline_count = 0
        self._woken_at: float | None = None  # what `wake_at` was told last
        self._events_before = device.on_event
        device.on_event = self._on_event

    # --- connections ---

    def connect(
        self,
        address: str,
        addresses: Addresses,
        tell: Teller,
        settings: Settings | None = None,
        *,
        beside_hello: Callable[[bytes], bytes] | None = None,
    ) -> Stream:
        """Begins a connection to the device at `address`; what comes of it is told.

        `beside_hello` gives, for the Hello, private data of the caller's own behind it, which only a listener of his
        own takes.

        Raises:
            LimitReached, Unavailable: No queue pair, or no private data long enough for a Hello.
        """
        chosen = settings or self.settings
        check_room(self.device.attributes, chosen.carrier)
        stream = Stream(self, chosen, tell)
        stream.address = address
        stream.beside_hello = beside_hello
        stream.make_qp()
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
        admit: Callable[[ConnectionRequest], bool] | None = None,
    ) -> cm.Listener:
        """Takes connections to a port; `accepted` is called with each, and sets its `tell` before it returns.

        `match` is what Hello must say (`private_data.match_address`), `admit` has the last word on each request.
        `backlog` bounds the requests that are not answered yet; see `listening` for one as sockets have it.
        """
        check_room(self.device.attributes, (settings or self.settings).carrier)

        def requested(request: ConnectionRequest) -> None:
            if admit is None or admit(request):
                self.serve(request, accepted, port, settings)
            else:
                request.reject(REJECT_CONSUMER)

        return self.take_requests(port, requested, match=match, backlog=backlog)

    def take_requests(
        self,
        port: int,
        handler: cm.RequestHandler,
        *,
        match: cm.PrivateDataMatch | None = None,
        backlog: int = limits.RDMA_BACKLOG_DEFAULT,
    ) -> cm.Listener:
        """Hands requests for a port to a handler, which answers each, now or later: by `serve`, or by rejecting it."""
        listener = self.device.cm.listen(service_id(port), handler, match=match, backlog=backlog)
        if len(self._listeners) >= self._listeners_most:
            self._listeners = [each for each in self._listeners if not each.closed]
            self._listeners_most = 2 * len(self._listeners) + _LISTENERS_LOOKED_AT
        self._listeners.append(listener)
        return listener

    def serve(
        self,
        request: ConnectionRequest,
        accepted: Acceptor,
        port: int,
        settings: Settings | None = None,
        suspended: Suspended | None = None,
        *,
        beside_hello: int = 0,
    ) -> None:
        """Answers a request: with the connection that `accepted` is told of, or by rejecting it.

        With `suspended` the connection goes on with what another process has handed over. The last `beside_hello` bytes
        of the private data are not the Hello's, and are the caller's business.
        """
        stream = Stream(self, settings or self.settings, _nobody)
        stream.request = request
        stream.address = request.remote_address  # to come after it when it moves
        if suspended is not None:
            stream.connection.take_over(suspended)
        stream.tell = _refused
        hello = request.private_data[: len(request.private_data) - beside_hello]
        if stream.connection.accept(whole(hello), _addresses_of(request, port), self.clock()):
            try:
                stream.make_qp()
            except SidestepError as why:
                stream.connection.handle_failure(why, Cause.RESOURCES, self.clock())
            else:
                stream.tell = _nobody
                accepted(stream)
        stream.run()

    def register(self, buffer: Buffer, access: Access = Access.LOCAL_WRITE) -> MemoryRegion:
        """Registers memory for good, for streams that send from it and receive into it; see `deregister`.

        Raises:
            Misuse, LimitReached, Unavailable: As `ProtectionDomain.register` does.
        """
        region = self.domain.register(buffer, access)
        self.lasting.add(region)
        return region

    def deregister(self, region: MemoryRegion) -> None:
        """Ends what `register` began; no request may use that memory any more."""
        self.lasting.remove(region)
        region.deregister()

    def close(self) -> None:
        """Resets all connections and gives everything back to the device at once."""
        for listener in self._listeners:
            listener.close()
        for stream in list(self.streams.values()):
            stream.abort()
            stream.lose_device()
        self.buffers.close()
        for region in self.lasting.take_all():
            region.deregister()
        if self.spares is not None:
            self.spares.close()
        if self.device.on_event == self._on_event:
            self.device.on_event = self._events_before
        self.send_cq.destroy()
        self.recv_cq.destroy()
        self.regions.close(self.domain.deallocate)  # a registration may be under way

    # --- what the device says ---

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
                if completion.invalidated is not None:
                    stream.connection.handle_invalidated(completion.invalidated, now)
                stream.connection.handle_message(buffer, completion.byte_len, now)
            else:
                stream.flushed(buffer, completion.status)
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
            if completion.status is _DONE:
                stream.connection.handle_completion(completion.wr_id, _DONE, now)
            else:
                stream.failed(completion.wr_id, completion.status)
        if touched is not None and not touched.connection.quiet():
            touched.run()

    def _on_event(self, event: AsyncEvent) -> None:
        if event.kind is DeviceEvent.DEVICE_FATAL:
            for stream in list(self.streams.values()):
                stream.fail(Unavailable(f"the device failed: {event.why or 'no more is known'}"), Cause.TRANSPORT)
                stream.lose_device()
        if self._events_before is not None:
            self._events_before(event)

    # --- memory ---

    def suited(self, settings: Settings) -> Settings:
        """The settings, as far as the device goes along with them."""
        attributes = self.device.attributes
        local_access: Access | None = None
        message_max = settings.message_max
        if attributes.checks_local_memory:
            message_max = min(message_max, limits.SDP_CHECKED_MESSAGE_MAX)
            local_access = Access.LOCAL_WRITE
            if attributes.read_sink_remote_write:
                local_access |= Access.REMOTE_WRITE
        return replace(
            settings,
            send_queue=min(settings.send_queue, attributes.work_requests_max - _SPARE_REQUESTS),
            receive_count=min(settings.receive_count, (attributes.work_requests_max - _SPARE_REQUESTS) // 2),
            reads_max=min(settings.reads_max, attributes.read_depth_max),
            message_max=message_max,
            local_access=local_access,
        )

    # --- time ---

    def next_deadline(self) -> float | None:
        """When `handle_timeouts` is to be called, or None."""
        deadlines = self._deadlines
        while deadlines:
            entry = deadlines[0]
            at, _, stream = entry
            if stream.timer is entry:
                if stream.deadline is not None and stream.deadline <= at:
                    return at
                stream.timer = None
            heappop(deadlines)
            if stream.timer is None and stream.deadline is not None:  # it was put off
                self._push(stream, stream.deadline)
        return None

    def handle_timeouts(self) -> None:
        """Does what is due by the clock."""
        now = self.clock()
        self._woken_at = None
        while (at := self.next_deadline()) is not None and at <= now:
            _, _, stream = heappop(self._deadlines)
            stream.timer = stream.deadline = None
            stream.connection.handle_timeout(now)
            stream.run()
        if at is not None:
            self._wake(at)

    def arm(self, stream: Stream, at: float) -> None:
        """Remembers the deadline of a stream. One that comes sooner serves as well: it is then put off."""
        if stream.timer is None or at < stream.timer[0]:
            self._push(stream, at)
            self._wake(at)

    def _push(self, stream: Stream, at: float) -> None:
        deadlines = self._deadlines
        if len(deadlines) > 2 * len(self.streams) + 64:  # most of them were overtaken by earlier ones
            kept: list[tuple[float, int, Stream]] = []
            for entry in deadlines:
                if entry[2].timer is entry:
                    if entry[2].deadline is not None:
                        kept.append(entry)
                    else:
                        entry[2].timer = None  # or a stream that is over would be kept until then
            heapify(kept)
            self._deadlines = deadlines = kept
        self._deadline_count += 1
        stream.timer = entry = (at, self._deadline_count, stream)
        heappush(deadlines, entry)

    def _wake(self, at: float) -> None:
        if self.wake_at is not None and (self._woken_at is None or at < self._woken_at):
            self._woken_at = at
            self.wake_at(at)


class Stream:
    """One connection on a stack."""

    __slots__ = (
        "_cm", "_collected", "_lasts_out", "_lent", "_poster", "_running", "_settings", "_want", "_wr_id",
        "address", "beside_hello", "connection", "deadline", "posted", "qp", "refused_with", "request", "stack",
        "tell", "timer",
    )  # fmt: skip

    def __init__(self, stack: Stack, settings: Settings, tell: Teller) -> None:
        self.stack = stack
        self.tell = tell
        self._settings = stack.suited(settings)
        self.connection = Connection(self._settings)
        self.address = ""
        self.beside_hello: Callable[[bytes], bytes] | None = None  # gives private data behind our Hello
        self.request: ConnectionRequest | None = None
        self.refused_with = b""  # private data of who refused it
        self.qp: QueuePair | None = None
        self.posted: deque[Receive] = deque()  # in the order of posting, which is that of completion
        self.deadline: float | None = None
        self.timer: tuple[float, int, Stream] | None = None  # the stack's, for that or a time before
        self._poster: Poster | None = None  # where work goes: the queue pair, or what stands before it
        self._cm: cm.Connection | None = None
        self._lasts_out = 0  # of the two requests that show that a queue pair is flushed
        self._running = False
        self._wr_id = 0
        self._lent: dict[int, Loan] = {}  # private buffers by number of the receive
        self._want: Want | None = None  # for more of them
        self._collected: list[Receive] = []  # what has been given of those

    def make_qp(self) -> None:
        """Gives the connection a queue pair.

        Raises:
            LimitReached: The device has no more.
        """
        stack, settings = self.stack, self._settings
        capabilities = QpCapabilities(
            max_send_wr=settings.send_queue + _SPARE_REQUESTS,
            max_recv_wr=2 * settings.receive_count + _SPARE_REQUESTS,
            initiator_depth=settings.reads_max,
            responder_resources=settings.reads_max,
        )
        qp = stack.domain.create_qp(stack.send_cq, stack.recv_cq, capabilities, on_event=self._on_event)
        self.qp = self._poster = qp
        self._cm = None
        stack.streams[qp.number] = self
        attributes = stack.device.attributes
        if attributes.checks_local_memory:
            assert stack.spares is not None
            self._poster = Covering(
                qp,
                attributes.inline_max,
                self.connection,
                stack.lasting,
                stack.regions,
                stack.spares,
                self.run,
                lambda why: self.fail(why, Cause.RESOURCES),
            )

    # --- the user ---

    def send(self, data: memoryview, *, urgent: bool = False, bcopy_only: bool = False) -> StreamSend:
        """Queues bytes; see `Connection.send`."""
        send = self.connection.send(data, self.stack.clock(), urgent=urgent, bcopy_only=bcopy_only)
        self.run()
        return send

    def send_together(self, parts: Iterable[memoryview]) -> list[StreamSend]:
        """Queues bytes from several places, which go in as few messages as they fit in; see `Connection.send`."""
        now = self.stack.clock()
        sends = [self.connection.send(part, now) for part in parts]
        self.run()
        return sends

    def resize_remote(self, size: int) -> None:
        """Asks the other end for larger private buffers; see `Connection.resize_remote`."""
        self.connection.resize_remote(size, self.stack.clock())
        self.run()

    def receive(self, room: memoryview, *, waitall: bool = False) -> StreamReceive:
        """Offers room; see `Connection.receive`."""
        receive = self.connection.receive(room, self.stack.clock(), waitall=waitall)
        self.run()
        return receive

    def cancel(self, request: StreamSend | StreamReceive) -> None:
        """Takes back what is possible of it; it ends once its memory is free."""
        if isinstance(request, StreamSend):
            self.connection.cancel_send(request, self.stack.clock())
        else:
            self.connection.cancel_receive(request, self.stack.clock())
        self.run()

    def peek_into(self, room: memoryview) -> int:
        """Copies what could be received now; see `Connection.peek_into`."""
        count = self.connection.peek_into(room, self.stack.clock())
        self.run()
        return count

    def put_back(self, data: bytes) -> None:
        """Gives bytes back that were received last; see `Connection.put_back`."""
        self.connection.put_back(data, self.stack.clock())
        self.run()

    def shutdown_write(self) -> None:
        """No more sends."""
        self.connection.shutdown_write(self.stack.clock())
        self.run()

    def shutdown_read(self) -> None:
        """No more receives."""
        self.connection.shutdown_read(self.stack.clock())
        self.run()

    def close(self, linger_s: float | None = None) -> None:
        """Ends both directions; see `Connection.close`."""
        self.connection.close(self.stack.clock(), linger_s)
        self.run()

    def abort(self) -> None:
        """Resets the connection."""
        self.connection.abort(self.stack.clock())
        self.run()

    def suspend(self, port: int) -> None:
        """Asks the other end to connect anew to that port, where `moving.expect` waits; see `Connection.suspend`."""
        self.connection.suspend(port, self.stack.clock())
        self.run()

    # --- driving ---

    def run(self) -> None:
        """Posts what is to be posted and tells what is to be told, until there is nothing left."""
        if self._running:  # called from `tell`: the loop below goes on
            return
        self._running = True
        connection = self.connection
        work, events = connection.work, connection.events  # as `poll_work` and `poll_event` give them
        try:
            while True:
                if work:
                    item = work.popleft()
                    kind = type(item)
                    if kind is Receive:
                        self.posted.append(item)  # type: ignore[arg-type]
                        self._poster.post_recv(item)  # type: ignore[arg-type, union-attr]
                    elif kind is Send or kind is RdmaWrite or kind is RdmaRead:
                        self._poster.post_send(item)  # type: ignore[arg-type, union-attr]
                    else:
                        self._ORDERS[kind](self, item)
                elif connection.dirty:
                    connection.pump()
                elif events:
                    self.tell(self, events.popleft())
                elif (event := connection.poll_event()) is not None:
                    self.tell(self, event)
                else:
                    break
        finally:
            self._running = False
        if connection.timers or self.deadline is not None:
            deadline = connection.next_deadline()
            if deadline != self.deadline:
                self.deadline = deadline
                if deadline is not None:
                    self.stack.arm(self, deadline)

    def flushed(self, buffer: Receive, status: Status) -> None:
        """A receive that no message came into."""
        if buffer.wr_id == _LAST:
            self._last_flushed()
        elif self.connection.state in _OPENING:  # the connection manager is about to say why, or never will
            self._give_back(buffer)
            self._flush()
        else:
            self.connection.handle_receive_failed(buffer, status, self.stack.clock())

    def failed(self, wr_id: int, status: Status) -> None:
        """A request of the send queue that was not carried out."""
        if wr_id == _LAST:
            self._last_flushed()
            return
        now = self.stack.clock()
        self.connection.handle_completion(wr_id, status, now)
        if status is not Status.FLUSHED:  # and the queue pair is in error, whatever the stream still waits for
            error = Unavailable(f"the transport connection failed: {status.name}")
            self.connection.handle_failure(error, Cause.TRANSPORT, now)

    def fail(self, error: SidestepError, cause: Cause) -> None:
        """Something that no completion tells has ended the connection."""
        self.connection.handle_failure(error, cause, self.stack.clock())
        self.run()

    def lose_device(self) -> None:
        """The device does nothing any more, or is not to: what is outstanding is not waited for."""
        self._end()
        self.run()

    def _on_event(self, event: AsyncEvent) -> None:
        if event.source is not self.qp:
            return
        if event.kind in (DeviceEvent.QP_ACCESS_ERROR, DeviceEvent.QP_REQUEST_ERROR):
            self.fail(PeerViolation(event.why or "RDMA that is not allowed", rule="rdma_access"), Cause.VIOLATION)
        elif event.kind in (DeviceEvent.QP_FATAL, DeviceEvent.CQ_ERROR):
            self.fail(Unavailable(event.why or "the transport connection broke"), Cause.TRANSPORT)

    # --- memory ---

    def _on_need_buffers(self, order: NeedBuffers) -> None:
        """They are handed over when all are there."""
        assert self._want is None, "one request at a time"
        later = False

        def given(found: list[Loan] | SidestepError) -> None:
            if isinstance(found, SidestepError):
                self._stop_wanting()
                self.connection.handle_buffers_failed(found, self.stack.clock())
            else:
                self._collect(found, order.count)
            if later:
                self.run()

        want = self.stack.buffers.ask(order.count, order.size, given)
        self._want = want if want.count else None
        later = True

    def _collect(self, loans: list[Loan], count: int) -> None:
        for loan in loans:
            self._wr_id += 1
            self._lent[self._wr_id] = loan
            self._collected.append(Receive(self._wr_id, (loan[1].view,)))
        if len(self._collected) == count:
            buffers, self._collected, self._want = self._collected, [], None
            self.connection.handle_buffers(buffers, self.stack.clock())

    def _stop_wanting(self) -> None:
        if self._want is not None:
            self._want.cancel()
            self._want = None
        collected, self._collected = self._collected, []
        for receive in collected:
            self._give_back(receive)

    def _give_back(self, receive: Receive) -> None:
        self.stack.buffers.put(self._lent.pop(receive.wr_id))

    def _on_return_buffer(self, order: ReturnBuffer) -> None:
        self._give_back(order.receive)

    def _on_register(self, order: Register) -> None:
        stack, request = self.stack, order.request
        later = False

        def registered(found: RdmaElement | SidestepError | None) -> None:
            now = stack.clock()
            if isinstance(found, SidestepError):
                self.connection.handle_registration_failed(request, now)
            else:
                under = None
                if request.region is not None and self.connection.suspended is None:  # else it is another stream's
                    under = request.region.handle
                handle = Cover(stack.regions, found, under)
                if found is None:
                    region = Region(handle, RKey(0), 0, remote=False)
                else:
                    region = Region(handle, found.rkey, found.va, remote=bool(order.access & _REMOTE))
                self.connection.handle_registered(request, region, now)
            if later:
                self.run()

        try:
            if not order.access & _REMOTE and stack.lasting.covers(request.view, order.access):
                registered(None)
            else:
                stack.regions.get(request.view, order.access, registered, shared=not order.access & _REMOTE)
        except SidestepError as why:
            registered(why)
        later = True

    def _on_release(self, order: Release) -> None:
        assert isinstance(order.region.handle, Cover)
        order.region.handle.release(keep=self.stack.keep_registered)

    # --- the connection manager ---

    def _on_connect(self, order: Connect) -> None:
        device = self.stack.device
        assert self.qp is not None
        beside = self.beside_hello(order.private_data) if self.beside_hello is not None else b""
        try:
            self._cm = device.cm.connect(
                self.address,
                order.service_id,
                self.qp,
                fitted(order.private_data + beside, device.attributes.request_private_data_max),
                self._told_by_cm,
                check_reply=lambda reply: self.connection.judge_reply(whole(reply)),
            )
        except SidestepError as why:
            self.connection.handle_failure(why, Cause.RESOURCES, self.stack.clock())

    def _on_accept(self, order: Accept) -> None:
        device = self.stack.device
        assert self.request is not None
        assert self.qp is not None
        try:
            private_data = fitted(order.private_data, device.attributes.reply_private_data_max)
            self._cm = self.request.accept(self.qp, private_data, self._told_by_cm)
        except SidestepError as why:
            self.connection.handle_failure(why, Cause.RESOURCES, self.stack.clock())

    def _on_reject(self, order: Reject) -> None:
        assert self.request is not None
        self.request.reject(order.reason)
        self._flush()

    def _on_disconnect(self, order: Disconnect) -> None:
        if self._cm is not None:
            self._cm.disconnect()
        self._flush()

    def _told_by_cm(self, told: cm.Connection, event: cm.ConnectionEvent) -> None:
        if told is not self._cm or self.qp is None:
            return  # of an attempt that was given up, or of what is over
        connection, now = self.connection, self.stack.clock()
        if isinstance(event, Established):
            if told.transport is not None and self._settings.carrier is Carrier.IWARP:  # its Hello has no addresses
                (local, local_port), (remote, remote_port) = told.transport
                connection.addresses = Addresses(_ip(local), local_port, _ip(remote), remote_port)
            if connection.accepting:
                connection.handle_established(now)
            else:
                connection.handle_accepted(whole(event.private_data), now)
        elif isinstance(event, Disconnected):
            self._flush()
        elif isinstance(event, Rejected):
            self.refused_with = bytes(event.private_data)
            connection.handle_refused(event.reason, now)
            self._flush()
        elif isinstance(event, Unreachable):
            connection.handle_unreachable(now)
            self._flush()
        self.run()

    # --- the end of a queue pair ---

    def _flush(self) -> None:
        """Ends the work of the queue pair; `_end` when nothing of it is outstanding."""
        qp = self.qp
        if qp is None:
            self._stop_wanting()
            self.connection.handle_disconnected(self.stack.clock())
        elif not self._lasts_out:
            self._lasts_out = 2
            qp.modify_to_error()
            self.posted.append(_LAST_RECEIVE)
            qp.post_recv(_LAST_RECEIVE)
            qp.post_send(Send(_LAST, ()))

    def _last_flushed(self) -> None:
        self._lasts_out -= 1
        if not self._lasts_out:
            self._end()

    def _end(self) -> None:
        """The queue pair reaches no memory any more."""
        qp, stack = self.qp, self.stack
        if qp is not None:
            del stack.streams[qp.number]
            if isinstance(self._poster, Covering):
                self._poster.close()
            self.qp = self._poster = None
            self._lasts_out = 0
            qp.destroy()  # its number is not used again before the connection manager allows it
        self._stop_wanting()
        for receive in self.posted:  # posted when it was in error already
            if receive.wr_id != _LAST:
                self._give_back(receive)
        self.posted.clear()
        self.connection.handle_disconnected(stack.clock())
        if self.connection.state is State.RESUMING:
            self._resume()

    def _resume(self) -> None:
        """The other end's socket has moved: after it."""
        now = self.stack.clock()
        try:
            self.make_qp()
        except SidestepError as why:
            self.connection.handle_failure(why, Cause.RESOURCES, now)
        else:
            self.connection.resume(now)

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


def _addresses_of(request: ConnectionRequest, port: int) -> Addresses:
    """What the transport says; a Hello of InfiniBand knows better."""
    if request.transport is not None and all(address for address, _ in request.transport):  # else it is gone again
        own, other = request.transport
        return Addresses(_ip(own[0]), port, _ip(other[0]), other[1])
    unknown = IPv4Address(0)
    try:
        remote = ip_address(request.remote_address)
    except ValueError:
        remote = unknown
    return Addresses(unknown, port, remote, 0)


def _ip(address: str) -> IPv4Address | IPv6Address:
    return ip_address(address.partition("%")[0])


def _check(device: Device) -> None:
    """Raises Unavailable if a device cannot carry SDP at all."""
    attributes = device.attributes
    if attributes.gather_max < limits.SDP_GATHER_MAX + 1:
        raise Unavailable(f"the device gathers {attributes.gather_max} pieces; SDP needs {limits.SDP_GATHER_MAX + 1}")
    if attributes.inline_max < _HEADERS_MAX:
        raise Unavailable(f"the device copies {attributes.inline_max} bytes inline; SDP needs {_HEADERS_MAX}")


__all__ = ["Acceptor", "Event", "EventKind", "Poster", "Stack", "Stream", "Teller"]
