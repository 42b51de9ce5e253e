"""SDP over a device: what joins the sans-IO connection to queue pairs, memory and the connection manager.

A `Stack` is one device as SDP uses it: a protection domain, a completion queue for sending and one for receiving that
all connections share, private buffers, regions, listeners. An `SdpStream` is one connection: it posts what the
`SdpConnection` orders and tells it what came of it. Both are driven from outside, in one thread: by the device's
callbacks, by the user's calls and by `Stack.handle_timeouts`. What programs call is in `api`.

Payload is never copied on its way out: the gather list names the user's own memory. Where a device wants all memory it
touches to be registered (`DeviceAttributes.checks_local_memory`), see `registration`.

Theory of operation of an end. A queue pair goes into error by a disconnect of either end, by a request that fails, or
by an event of the device; who sees an error disconnects. Then two last requests are posted: as all work completes in
order, the queues are empty when these are flushed, and no memory is in use any more. Only then is the connection told
that it is disconnected, and the user's requests end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sidestep.errors import PeerViolation, SidestepError, Unavailable
from sidestep.loop import nothing
from sidestep.rdma import cm
from sidestep.rdma.cm import ConnectionRequest, Disconnected, Established, Rejected, Unreachable
from sidestep.rdma.pools import RdmaElement
from sidestep.rdma.verbs import AsyncEvent, EventKind, Lent, QpCapabilities, QueuePair, SendRing
from sidestep.rdma.work import Access, RdmaRead, RdmaWrite, Receive, RKey, Send, Status
from sidestep.sdp.buffers import PoolBuffer, Want
from sidestep.sdp.connection import SdpCause, SdpConnection
from sidestep.sdp.private_data import fitted, whole
from sidestep.sdp.registration import RegisteringPoster, Registration
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
    StreamEvent,
    StreamReceive,
    StreamSend,
)
from sidestep.sdp.settings import Addresses, Carrier, SdpSettings
from sidestep.sdp.states import OPENING, SdpState

if TYPE_CHECKING:
    from sidestep.sdp.stack import Stack

StreamHandler: TypeAlias = "Callable[[SdpStream, StreamEvent], None]"
Acceptor: TypeAlias = "Callable[[SdpStream], None]"

SPARE_REQUESTS: Final = 8  # in both queues, beyond what the connection uses: the last ones, and some
_REMOTE: Final = Access.REMOTE_READ | Access.REMOTE_WRITE
_LAST: Final = 0  # number of the two requests that show that a queue pair is flushed; the connection begins at 1
_LAST_RECEIVE: Final = Receive(_LAST, ())


class SdpStream:
    """One connection on a stack."""

    __slots__ = (
        "_cm", "_collected", "_lasts_out", "_lent", "_poster", "_reclaim", "_running", "_settings", "_want", "_wr_id",
        "address", "beside_hello", "connection", "deadline", "posted", "qp", "refused_with", "reject_with", "request",
        "stack", "tell", "timer", "uid",
    )  # fmt: skip

    def __init__(self, stack: Stack, settings: SdpSettings, tell: StreamHandler, uid: int | None = None) -> None:
        self.stack = stack
        self.uid = uid  # whose it is; None: nobody's
        self.tell = tell
        self._settings = stack.suited(settings)
        self.connection = SdpConnection(self._settings)
        self.address = ""
        self.beside_hello: Callable[[bytes], bytes] | None = None  # gives private data behind our Hello
        self.request: ConnectionRequest | None = None
        self.refused_with = b""  # private data of who refused it
        self.reject_with = b""  # private data beside our own refusal
        self.qp: QueuePair | None = None
        self.posted: dict[int, Receive] = {}  # by number
        self.deadline: float | None = None
        self.timer: tuple[float, int, SdpStream] | None = None  # the stack's, for that or a time before
        self._poster: QueuePair | RegisteringPoster | None = None  # where work goes
        self._cm: cm.Connection | None = None
        self._lasts_out = 0  # of the two requests that show that a queue pair is flushed
        self._running = False
        self._wr_id = 0
        self._reclaim: Callable[[], object] = nothing  # brings it back from the engine
        self._lent: dict[int, PoolBuffer] = {}  # private buffers by number of the receive
        self._want: Want | None = None  # for more of them
        self._collected: list[Receive] = []  # what has been given of those

    @property
    def capabilities(self) -> QpCapabilities:
        """What its queue pair has to hold."""
        return capabilities_of(self._settings)

    def make_ready(self, joined: Callable[[QpCapabilities], cm.Connection | None]) -> None:
        """Gives the connection a queue pair, and where nobody waits for private buffers, those that it begins with.

        `joined` may have a queue pair that is joined already.

        Raises:
            LimitReached, Unavailable: The device has no more, or registers no more memory.
        """
        stack, settings = self.stack, self._settings
        short: SidestepError | None = None

        def given(found: list[PoolBuffer] | SidestepError) -> None:
            nonlocal short
            if isinstance(found, SidestepError):
                short = found
            else:
                self._collect(found)

        if not stack.buffers.waits:
            stack.buffers.ask(settings.receive_count, settings.receive_size, given, self.uid)
        try:
            if short is not None:
                raise short
            self.make_qp(joined(self.capabilities))
        except SidestepError:
            self._stop_wanting()
            raise

    def make_qp(self, joined: cm.Connection | None = None) -> None:
        """Gives the connection a queue pair: a new one, or that of two that are joined.

        Raises:
            LimitReached: The device has no more.
        """
        stack = self.stack
        if joined is None:
            qp = stack.make_qp(self.capabilities, self._on_event)
        else:
            qp = joined.qp
            qp.on_event = self._on_event
        self.qp = self._poster = qp
        self._cm = joined
        stack.streams[qp.number] = self
        attributes = stack.device.attributes
        if attributes.checks_local_memory:
            assert stack.spares is not None
            self._poster = RegisteringPoster(
                qp,
                attributes.inline_max,
                self.connection,
                stack.permanent,
                stack.regions,
                stack.spares,
                self.run,
                lambda why: self.fail(why, SdpCause.RESOURCES),
            )

    # --- the user ---

    def send(self, data: memoryview, *, urgent: bool = False, bcopy_only: bool = False) -> StreamSend:
        """Queues bytes; see `SdpConnection.send`."""
        send = self.connection.send(data, self.stack.clock(), urgent=urgent, bcopy_only=bcopy_only)
        self.run()
        return send

    def send_together(self, parts: Iterable[memoryview], *, bcopy_only: bool = False) -> list[StreamSend]:
        """Queues bytes from several places, which go in as few messages as they fit in; see `SdpConnection.send`."""
        now = self.stack.clock()
        sends = [self.connection.send(part, now, bcopy_only=bcopy_only) for part in parts]
        self.run()
        return sends

    def resize_remote(self, size: int) -> None:
        """Asks the other end for larger private buffers; see `SdpConnection.resize_remote`."""
        self.connection.resize_remote(size, self.stack.clock())
        self.run()

    def receive(self, room: memoryview, *, waitall: bool = False) -> StreamReceive:
        """Offers room; see `SdpConnection.receive`."""
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
        """Copies what could be received now; see `SdpConnection.peek_into`."""
        count = self.connection.peek_into(room, self.stack.clock())
        self.run()
        return count

    def put_back(self, data: bytes) -> None:
        """Gives bytes back that were received last; see `SdpConnection.put_back`."""
        self.connection.put_back(data, self.stack.clock())
        self.run()

    def shutdown_write(self) -> None:
        self._reclaim()
        self.connection.shutdown_write(self.stack.clock())
        self.run()

    def shutdown_read(self) -> None:
        self._reclaim()
        self.connection.shutdown_read(self.stack.clock())
        self.run()

    def close(self, linger_s: float | None = None) -> None:
        """Ends both directions; see `SdpConnection.close`."""
        self._reclaim()
        self.connection.close(self.stack.clock(), linger_s)
        self.run()

    def abort(self) -> None:
        self._reclaim()
        self.connection.abort(self.stack.clock())
        self.run()

    def details(self) -> dict[str, object]:
        """How it is now, for people."""
        found = {"device": self.stack.device.name, "peer": self.address, **self.connection.details()}
        return found if self.qp is None else found | {"queue_pair": self.qp.details()}

    def use_large_frames(self) -> None:
        """The other end is one of ours; see `QueuePair.use_large_frames`."""
        if self.qp is not None:
            self.qp.use_large_frames()

    def suspend(self, port: int) -> None:
        """Asks the other end to connect anew to that port; see `SdpConnection.suspend`."""
        self._reclaim()
        self.connection.suspend(port, self.stack.clock())
        self.run()

    # --- lending it to the engine ---

    @property
    def plain(self) -> bool:
        """Whether it could be lent as soon as nothing is under way."""
        connection = self.connection
        resize, suspend = connection._resize, connection._suspend
        return not (
            connection.state is not SdpState.ESTABLISHED or not connection._fast or resize.busy
            or resize.asked is not None or suspend.port is not None or suspend.sent
            or connection._teardown.reader_closed
        )  # fmt: skip

    @property
    def filled(self) -> int:
        """Bytes that have come for receives which are not done."""
        return self.connection._sink.filled

    def lend(self, record: dict[str, int], reclaim: Callable[[], object], ring: Callable[[], SendRing]) -> Lent | None:
        """Its wire, if nothing unusual goes on and no request but receives is under way, which are forgotten.

        Whoever made them has taken what has come for them, `filled`.
        """
        qp = self.qp
        if qp is None or self._running or self._lasts_out or self._want is not None:
            return None
        connection = self.connection
        if not self.plain or not connection.quiet() or connection.timers or connection._control:
            return None
        if not (connection._source.lend() and connection._sink.lend() and connection._flow.lend(record)):
            return None
        record["local_size"] = connection._resize.local
        if (lent := qp.lend(record, reclaim, ring)) is None:
            return None
        connection._sink.receives.clear()
        self._reclaim = reclaim
        return lent

    def take_back(self, record: dict[str, int], error: int) -> None:
        """The engine has given it back; `error`: the errno that broke the wire, or 0."""
        self._reclaim = nothing
        connection = self.connection
        connection.now = self.stack.clock()
        connection._flow.take_back(record)
        connection._source.take_back(record)
        connection._sink.take_back(record)
        connection.dirty = True  # messages that the engine has not taken come by `handle_message`
        if self.qp is not None:
            self.qp.take_back(record, error)

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
                        self.posted[item.wr_id] = item  # type: ignore[assignment, union-attr]
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
        elif self.connection.state in OPENING:  # the connection manager is about to say why, or never will
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
            self.connection.handle_failure(error, SdpCause.TRANSPORT, now)

    def fail(self, error: SidestepError, cause: SdpCause) -> None:
        """Something that no completion tells has ended the connection."""
        self._reclaim()
        self.connection.handle_failure(error, cause, self.stack.clock())
        self.run()

    def lose_device(self) -> None:
        """The device does nothing any more, or is not to: what is outstanding is not waited for."""
        self._reclaim()
        self._end()
        self.run()

    def _on_event(self, event: AsyncEvent) -> None:
        if event.source is not self.qp:
            return
        if event.kind in (EventKind.QP_ACCESS_ERROR, EventKind.QP_REQUEST_ERROR):
            self.fail(PeerViolation(event.why or "RDMA that is not allowed", rule="rdma_access"), SdpCause.VIOLATION)
        elif event.kind in (EventKind.QP_FATAL, EventKind.CQ_ERROR):
            self.fail(Unavailable(event.why or "the transport connection broke"), SdpCause.TRANSPORT)

    # --- memory ---

    def _on_need_buffers(self, order: NeedBuffers) -> None:
        """They are handed over when all are there."""
        assert self._want is None, "one request at a time"
        if len(self._collected) == order.count:  # by `make_ready`
            self._hand_over()
            return
        later = False

        def given(found: list[PoolBuffer] | SidestepError) -> None:
            if isinstance(found, SidestepError):
                self._stop_wanting()
                self.connection.handle_buffers_failed(found, self.stack.clock())
            else:
                self._collect(found)
                if len(self._collected) == order.count:
                    self._hand_over()
            if later:
                self.run()

        want = self.stack.buffers.ask(order.count, order.size, given, self.uid)
        self._want = want if want.count else None
        later = True

    def _collect(self, loans: list[PoolBuffer]) -> None:
        for loan in loans:
            self._wr_id += 1
            self._lent[self._wr_id] = loan
            self._collected.append(Receive(self._wr_id, (loan[1].view,)))

    def _hand_over(self) -> None:
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
                handle = Registration(stack.regions, found, under)
                if found is None:
                    region = Region(handle, RKey(0), 0, remote=False)
                else:
                    region = Region(handle, found.rkey, found.va, remote=bool(order.access & _REMOTE))
                self.connection.handle_registered(request, region, now)
            if later:
                self.run()

        try:
            if not order.access & _REMOTE and stack.permanent.covers(request.view, order.access):
                registered(None)
            else:
                stack.regions.get(request.view, order.access, registered, shared=not order.access & _REMOTE)
        except SidestepError as why:
            registered(why)
        later = True

    def _on_release(self, order: Release) -> None:
        assert isinstance(order.region.handle, Registration)
        order.region.handle.release(keep=self.stack.keep_registered)

    # --- the connection manager ---

    def _on_connect(self, order: Connect) -> None:
        assert self.qp is not None
        beside = self.beside_hello(order.private_data) if self.beside_hello is not None else b""
        try:
            self._cm = self.stack.manager.connect(
                self.address,
                order.service_id,
                self.qp,
                fitted(order.private_data + beside, self.stack.request_data_max),
                self._told_by_cm,
                check_reply=lambda reply: self.connection.judge_reply(whole(reply)),
            )
        except SidestepError as why:
            self.connection.handle_failure(why, SdpCause.RESOURCES, self.stack.clock())

    def _on_accept(self, order: Accept) -> None:
        assert self.request is not None
        assert self.qp is not None
        try:
            private_data = fitted(order.private_data, self.stack.reply_data_max)
            self._cm = self.request.accept(self.qp, private_data, self._told_by_cm)
        except SidestepError as why:
            self.connection.handle_failure(why, SdpCause.RESOURCES, self.stack.clock())

    def _on_reject(self, order: Reject) -> None:
        assert self.request is not None
        self.request.reject(order.reason, self.reject_with)
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
                connection.addresses = Addresses(ip_of(local), local_port, ip_of(remote), remote_port)
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
            self.posted[_LAST] = _LAST_RECEIVE
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
            if isinstance(self._poster, RegisteringPoster):
                self._poster.close()
            self.qp = self._poster = None
            self._lasts_out = 0
            qp.destroy()  # its number is not used again before the connection manager allows it
        self._stop_wanting()
        for receive in self.posted.values():  # posted when it was in error already
            if receive.wr_id != _LAST:
                self._give_back(receive)
        self.posted.clear()
        self.connection.handle_disconnected(stack.clock())
        if self.connection.state is SdpState.RESUMING:
            self._resume()

    def _resume(self) -> None:
        """The other end's socket has moved: after it."""
        now = self.stack.clock()
        try:
            self.make_qp()
        except SidestepError as why:
            self.connection.handle_failure(why, SdpCause.RESOURCES, now)
        else:
            self.connection.resume(now)

    _ORDERS: Final[dict[type, Callable[[SdpStream, Any], None]]] = {
        NeedBuffers: _on_need_buffers,
        ReturnBuffer: _on_return_buffer,
        Register: _on_register,
        Release: _on_release,
        Connect: _on_connect,
        Accept: _on_accept,
        Reject: _on_reject,
        Disconnect: _on_disconnect,
    }


def capabilities_of(settings: SdpSettings) -> QpCapabilities:
    """Of a queue pair for a connection with these settings."""
    return QpCapabilities(
        max_send_wr=settings.send_queue + SPARE_REQUESTS,
        max_recv_wr=2 * settings.receive_count + SPARE_REQUESTS,
        initiator_depth=settings.reads_max,
        responder_resources=settings.reads_max,
    )


def ignore_event(_stream: SdpStream, _event: StreamEvent) -> None:
    """The `tell` of a stream in whose end nobody is interested any more."""


def ip_of(address: str) -> IPv4Address | IPv6Address:
    """Without the zone that the device's addresses may have."""
    return ip_address(address.partition("%")[0])
