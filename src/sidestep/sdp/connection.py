"""One SDP connection: what comes in, what goes out, and the order in which one follows from the other.

    conn = Connection(settings)
    conn.connect(addresses, now)                # or conn.accept(addresses, hello, now)
    while work := conn.poll_work(): ...         # post it to the queue pair, or do what it orders
    while event := conn.poll_event(): ...       # tell the user
    timer.arm(conn.next_deadline())             # then conn.handle_timeout(now)

The connection does no I/O, has no clock and starts nothing by itself: `handle_*` takes things in, `poll_*` gives things
out. All times are monotonic seconds. Work is polled before events: when an event tells that memory is the user's
again, the order that makes it unreachable for the other end has been given before. A driver for which a call is much
(`endpoint.Stream.run`) looks at `work`, `dirty`, `events` and `timers` itself.

What the transport must do: deliver messages in order, each into the receive posted first; complete the send queue in
order; flush what is outstanding when the queue pair ends, and only then call `handle_disconnected`. It must have
delivered all messages that came before that end.

What it does is done by its parts, each with state of its own; a part uses those above it:

    flow        credits, sequence numbers, work for the transport
    resize      private buffers, and their size
    halves      both directions of the stream (`source`, `sink`), and the user's requests
    handshake   Hello, HelloAck, refusals
    teardown    the end, well or badly
    suspend     the stream goes on over another transport connection
    incoming    every message, by the tables of `states`
    outgoing    what may be sent now, in what order; messages that only tell of credit; whether the other end lives

The connection itself keeps what they share - state, error, events, timers - and goes the short way for payload on a
connection where nothing unusual goes on.

Not supported: sending a Send with Invalidate (nobody has to), and the literal form of the iWARP draft in which Hello
is the beginning of the TCP stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from sidestep import limits
from sidestep.errors import InternalError, LimitReached, Misuse, PeerViolation, SidestepError, Unavailable
from sidestep.rdma.work import Receive, RKey, Status
from sidestep.sdp.flow import Flow
from sidestep.sdp.halves import Halves
from sidestep.sdp.handshake import Handshake
from sidestep.sdp.hello import Version
from sidestep.sdp.incoming import Incoming
from sidestep.sdp.outgoing import Keepalive, Outgoing, Updates
from sidestep.sdp.requests import (
    Region,
    ReturnBuffer,
    SdpCause,
    SdpEvent,
    SdpEventKind,
    StreamEvent,
    StreamReceive,
    StreamSend,
    Suspended,
    Work,
)
from sidestep.sdp.resize import Resize
from sidestep.sdp.settings import Addresses, SdpSettings
from sidestep.sdp.sink import Sink
from sidestep.sdp.source import Source
from sidestep.sdp.states import OPEN, OPENING, TRANSITIONS, SdpState, Stimulus
from sidestep.sdp.suspend import Suspend
from sidestep.sdp.teardown import Teardown
from sidestep.sdp.wire import BSDH, OOB_PEND, OOB_PRES, Mid, Mode

_unpack: Final = BSDH.unpack_from
_DATA: Final = int(Mid.DATA)
_DONE: Final = Status.SUCCESS
_PIPELINED: Final = Mode.PIPELINED


def _mechanism(read: bool, write: bool) -> str:
    """What carries the next large piece: what is advertised decides."""
    return "read zcopy" if read else "write zcopy" if write else "bcopy"


class SdpConnection:
    """One end. Not thread-safe: whoever drives it calls one method at a time."""

    __slots__ = (
        "_control", "_fast", "_flow", "_halves", "_handshake", "_incoming", "_keepalive", "_outgoing", "_resize",
        "_settings", "_sink", "_source", "_suspend", "_teardown", "_updates", "_waiting", "accepting", "addresses",
        "cause", "dirty", "error", "events", "now", "readable_reported", "state", "suspended", "timers", "work",
    )  # fmt: skip

    def __init__(self, settings: SdpSettings) -> None:
        self.state = SdpState.CLOSED
        self.accepting = False
        self.addresses: Addresses | None = None
        self.now = 0.0
        self.error: SidestepError | None = None
        self.cause: SdpCause | None = None
        self.suspended: Suspended | None = None
        self.readable_reported = False
        self._settings = settings
        self._fast = False  # Data is taken without a look at the tables
        self.dirty = False  # something has happened since the last pump
        self._waiting = False  # something waits for credit, room or an answer: whatever comes in may set it going
        self._control: deque[object] = deque()  # messages without payload, or what sends them, in order
        self.events: deque[StreamEvent] = deque()  # what `poll_event` gives before anything else
        self.timers: dict[str, float] = {}  # when which is due
        self._flow: Flow = Flow(settings.receive_count, settings.send_queue)
        self.work = self._flow.work  # what `poll_work` gives
        # Each finds what it needs of those before it.
        self._resize: Resize = Resize(self)
        self._halves: Halves = Halves(self)
        self._source: Source = self._halves.source
        self._sink: Sink = self._halves.sink
        self._handshake: Handshake = Handshake(self)
        self._teardown: Teardown = Teardown(self)
        self._suspend: Suspend = Suspend(self)
        self._updates: Updates = Updates(self)
        self._keepalive: Keepalive = Keepalive(self)
        self._incoming: Incoming = Incoming(self)
        self._outgoing: Outgoing = Outgoing(self)

    # --- setting up (§7) ---

    def connect(self, addresses: Addresses, now: float) -> None:
        """Begins a connection; what comes of it is told by ESTABLISHED, or BROKEN."""
        self.now = now
        self._handshake.connect(addresses)

    def accept(self, private_data: bytes | memoryview, addresses: Addresses | None, now: float) -> bool:
        """Answers a connection request with this Hello; False, and a Reject in the work, if it must be refused.

        `addresses` are those of the transport, which iWARP's Hello does not have; InfiniBand's own win.
        """
        self.now = now
        return self._handshake.accept(private_data, addresses)

    def handle_buffers(self, buffers: list[Receive], now: float) -> None:
        """Receives that NeedBuffers asked for, all or some of them."""
        self.now = now
        self.dirty = True
        flow = self._flow
        if flow.down:
            flow.work.extend(ReturnBuffer(buffer) for buffer in buffers)
            return
        for buffer in buffers:
            flow.post(buffer)
        if self._handshake.waits:
            self._handshake.supplied(len(buffers))
        else:
            self._resize.supplied(buffers)

    def handle_buffers_failed(self, error: SidestepError, now: float) -> None:
        """There are none: no connection, or no larger buffers."""
        self.now = now
        self.dirty = True
        if self._flow.down:
            return
        if self._handshake.waits:
            self._handshake.failed(error)
        else:
            self._resize.failed()

    def judge_reply(self, private_data: bytes | memoryview) -> bool:
        """Whether this HelloAck can be taken; what is wrong with it is kept for `handle_refused`."""
        return self._handshake.judge_reply(private_data)

    def handle_accepted(self, private_data: bytes | memoryview, now: float) -> None:
        """The other end has accepted, with this HelloAck; both ends may send."""
        self.now = now
        if self.state is not SdpState.REQ_SENT:
            return
        self._handshake.accepted(private_data)
        early, self._handshake.early = self._handshake.early, []
        for buffer, length in early:
            self.handle_message(buffer, length, now)

    def handle_refused(self, reason: int, now: float) -> None:
        """The connection manager says no, or that nobody answered."""
        self.now = now
        if self.state in OPENING:
            self._handshake.rejected(reason)

    def handle_unreachable(self, now: float) -> None:
        """The connection manager got no answer."""
        self.now = now
        if self.state in OPENING:
            self._handshake.refuse(Unavailable("the other end does not answer"), SdpCause.TIMEOUT)

    def handle_established(self, now: float) -> None:
        """Ready to use has come (accepting end)."""
        self.now = now
        self._handshake.ready()

    @property
    def version(self) -> Version:
        """That both ends speak, once they are connected."""
        return self._handshake.version

    def details(self) -> dict[str, object]:
        """How it is now, for people: `sidestep ss`, `explain`, `rdma`."""
        source, sink, flow = self._source, self._sink, self._flow
        return {
            "state": self.state.name.lower(),
            "send_mechanism": _mechanism(bool(source.adverts), bool(source.sinks)),
            "receive_mechanism": _mechanism(bool(sink.adverts), bool(sink.shown)),
            "send_mode": source.mode.name.lower(),
            "receive_mode": sink.mode.name.lower(),
            "credit": flow.credit,
            "remote_credit": flow.remote_credit(),
            "receives_posted": flow.posted,
            "adverts": len(source.adverts) + len(sink.shown),
            "remote_adverts": self._halves.adverts_of_peer(),
            "read_zcopy_sent": source.read,
            "write_zcopy_sent": source.written,
            "read_zcopy_received": sink.read,
            "write_zcopy_received": sink.written,
        }

    # --- the user ---

    def send(self, view: memoryview, now: float, *, urgent: bool = False, bcopy_only: bool = False) -> StreamSend:
        """Queues bytes for the other end; `urgent`: the last one is out of band. Comes back from `poll_event`.

        Raises:
            Misuse: nothing to send, or this direction was closed.
            LimitReached: too many sends are queued.
            SidestepError: what ended the connection.
        """
        if self.error is not None:
            raise self.error
        source = self._source
        if source.ending:
            raise Misuse("sending after the stream was ended")
        if len(source.queue) >= limits.SDP_SENDS_QUEUED_MAX:
            raise LimitReached(f"{limits.SDP_SENDS_QUEUED_MAX} sends are queued", remedy="wait until some have ended")
        send = StreamSend(view, urgent=urgent, bcopy_only=bcopy_only)
        if not send.length:
            raise Misuse("a send of no bytes")
        self.now = now
        if urgent:
            source.enqueue(send)
        else:
            source.queue.append(send)
        self.dirty = True
        return send

    def receive(self, view: memoryview, now: float, *, waitall: bool = False) -> StreamReceive:
        """Offers room for bytes of the other end. Comes back from `poll_event` when there are some, or the end.

        Raises:
            Misuse: no room, or this direction was closed.
            LimitReached: too many receives are queued.
        """
        if self._teardown.reader_closed:
            raise Misuse("receiving after close")
        if self.suspended is not None:
            raise Misuse("the stream goes on elsewhere")
        sink = self._sink
        if len(sink.receives) >= limits.SDP_RECEIVES_QUEUED_MAX:
            raise LimitReached(f"{limits.SDP_RECEIVES_QUEUED_MAX} receives are queued", remedy="wait for some to end")
        receive = StreamReceive(view, waitall=waitall)
        if not receive.length:
            raise Misuse("a receive of no bytes")
        self.now = now
        sink.receives.append(receive)
        if sink.ready or sink.adverts or sink.ended:
            sink.serve()
        if self._flow.gone and not receive.done:
            self._halves.give_up_receives()
        self.readable_reported = False
        if self._waiting or sink.mode is _PIPELINED or self._flow.credit_low():
            self.dirty = True
        return receive

    def cancel_send(self, send: StreamSend, now: float) -> None:
        """Takes back what is possible; it ends with `passed` bytes on their way."""
        self.now = now
        if not send.done:
            self._source.cancel_send(send)
            self.dirty = True

    def cancel_receive(self, receive: StreamReceive, now: float) -> None:
        """Takes the room back; it ends with what it holds, once no device uses it."""
        self.now = now
        if not receive.done:
            self._sink.cancel_receive(receive)
            self.dirty = True

    def peek(self, now: float) -> memoryview:
        """Bytes that could be received now, in one piece; they stay. Advertised ones are asked for by Bcopy (§20)."""
        self.now = now
        if self._sink.ready_bytes:
            return self._sink.peek()
        if self._sink.adverts and not self._sink.receives:
            self._sink.refuse()
            self.dirty = True
        return memoryview(b"")

    def peek_into(self, room: memoryview, now: float) -> int:
        """Copies what could be received now, up to the urgent byte, and returns how much; the bytes stay."""
        count = self._sink.peek_into(room)
        if not count:
            self.peek(now)  # asks for what is only advertised
        return count

    def put_back(self, data: bytes, now: float) -> None:
        """Gives bytes that were received last back to the stream: they are received again, before all others."""
        self.now = now
        self._sink.put_back(data)
        self.readable_reported = False
        self.dirty = True

    @property
    def available(self) -> int:
        """Bytes that a receive would get from buffers; advertised ones are not counted."""
        return self._sink.ready_bytes

    @property
    def readable(self) -> bool:
        """Whether a receive would get bytes, or the end, at once or by an RDMA Read."""
        return self._sink.readable or self.error is not None

    @property
    def writable(self) -> bool:
        """Whether a send would leave at once."""
        return self.state in OPEN and not self._source.queue and self._flow.may_send_payload()

    @property
    def room(self) -> int:
        """Bytes that a send could have to leave at once, by Bcopy."""
        flow = self._flow
        messages = min(flow.credit - flow.payload_credit + 1, flow.room())
        return messages * self._source.payload_max if self.writable else 0

    @property
    def ended(self) -> bool:
        """Whether all bytes of the other end were received, and there will be no more."""
        return self._sink.ended and not self._sink.ready

    @property
    def at_mark(self) -> bool:
        """Whether the next byte to read is the urgent one."""
        return self._sink.at_mark

    @property
    def urgent(self) -> bool:
        """Whether an urgent byte is ahead, or can be had."""
        return self._sink.urgent_pending > 0 or self._sink.urgent_byte is not None

    @property
    def urgent_inline(self) -> bool:
        """Whether urgent bytes stay in the stream: SO_OOBINLINE."""
        return self._settings.urgent_inline

    def take_urgent(self) -> int | None:
        """The urgent byte, once; None if none has come (see `urgent_pending`), or it was taken."""
        return self._sink.take_urgent()

    @property
    def urgent_pending(self) -> bool:
        """Whether an urgent byte was announced that has not come."""
        return self._sink.urgent_pending > 0

    @property
    def send_mode(self) -> Mode:
        return self._source.mode

    @property
    def receive_mode(self) -> Mode:
        return self._sink.mode

    def want_send_mode(self, mode: Mode, now: float) -> None:
        """Asks for a mode of the send half; it changes when the rules allow."""
        self.now = now
        self._source.want_mode(mode)
        self.dirty = True

    def want_combined(self, now: float) -> None:
        """Ends Buffered mode of the receive half, of which this end is then the master."""
        self.now = now
        if self.sendable:
            self._sink.ask_combined()
            self.dirty = True

    def resize_remote(self, size: int, now: float) -> None:
        """Asks the other end for private buffers of that many bytes; RESIZED tells of the answer."""
        self.now = now
        if not self.sendable:
            raise Misuse("not connected")
        self._resize.ask(size)
        self.dirty = True

    @property
    def remote_size(self) -> int:
        """Bytes of the other end's private buffers, headers included."""
        return self._flow.remote_size

    @property
    def local_size(self) -> int:
        """Bytes of our private buffers, headers included."""
        return self._resize.local

    @property
    def messages_sent(self) -> int:
        """SDP messages sent since the beginning, over all transport connections."""
        return self._flow.sent_count

    @property
    def credit(self) -> int:
        """Messages that the other end has room for."""
        return self._flow.credit

    # --- closing (§16) ---

    def shutdown_write(self, now: float) -> None:
        """No more sends; DisConn goes when everything queued has been delivered."""
        self.now = now
        self._source.ending = True
        self.dirty = True

    def shutdown_read(self, now: float) -> None:
        """Receives end; bytes that come from now on are a violation, and reset the connection (§16.1)."""
        self.now = now
        self._teardown.shutdown_read()
        self.dirty = True

    def close(self, now: float, linger_s: float | None = None) -> None:
        """Ends both directions. Unread bytes make it a reset, as in TCP, and so does a linger of 0."""
        self.now = now
        self._teardown.close(linger_s)
        self.dirty = True

    def abort(self, now: float) -> None:
        self.now = now
        self._teardown.abort()

    def handle_failure(self, error: SidestepError, cause: SdpCause, now: float) -> None:
        """The transport connection has failed and no completion tells of it, or what it needs is not to be had."""
        self.now = now
        self._teardown.failed(error, cause)

    def handle_disconnected(self, now: float) -> None:
        """The transport connection is gone: all messages were delivered, all work requests are flushed."""
        self.now = now
        self._suspend.left()
        self._teardown.disconnected()

    # --- moving to another process (§15) ---

    def suspend(self, port: int, now: float) -> None:
        """Asks the other end to connect anew to this port; SUSPENDED tells when another process may go on."""
        self.now = now
        self._suspend.begin(port)
        self.dirty = True

    def resume(self, now: float) -> None:
        """There is a new queue pair (at the end that did not move): connect it to where the other end's socket is."""
        self.now = now
        self._suspend.resume()

    def take_over(self, suspended: Suspended) -> None:
        """Goes on with what another process has handed over; to be called before `accept`."""
        self._suspend.take_over(suspended)

    # --- what the transport says ---

    def handle_message(self, buffer: Receive, length: int, now: float) -> None:
        """A message has come into this receive."""
        self.now = now
        room = buffer.scatter[0]
        flow = self._flow
        try:
            if self._fast and length >= 16 and room[0] == _DATA and not self._resize.busy:
                _, flags, bufs, size, mseq, ack = _unpack(room)
                if size != length:
                    raise PeerViolation(f"Len {size} in a message of {length} bytes", rule="length")
                flow.take_header(bufs, mseq, ack)
                if self._source.change_mseq is not None:
                    self._source.acknowledged(ack)
                if flags & OOB_PEND:
                    self._incoming.announced()
                if length == 16:
                    flow.posted += 1  # not by post(): a mere update is nothing to answer
                    flow.work.append(buffer)
                    if self._waiting or flow.credit_low():
                        self.dirty = True
                    return
                if self._teardown.reader_closed:
                    raise PeerViolation(f"{length - 16} bytes after close", rule="payload_closed")
                self._sink.deliver(room[16:length], buffer, flags & OOB_PRES != 0)
                if self._waiting or flow.credit_low():
                    self.dirty = True
                return
            self.dirty = True
            self._incoming.take(buffer, room[:length])
            if self._suspend.answered or self._suspend.confirmed:
                self._fast = False  # what comes now is looked at
        except PeerViolation as violation:
            self._teardown.break_off(violation, SdpCause.VIOLATION)
            self._incoming.give_back(buffer)

    def handle_invalidated(self, rkey: RKey, now: float) -> None:
        """The message that is handed over next has voided this key (Send with Invalidate, docs/wire/sdp.md §23.1)."""
        self.now = now
        if self._flow.open and not self._halves.is_advertised(rkey):
            error = PeerViolation(f"key {rkey:#x} was voided, and is not of what is advertised", rule="invalidated")
            self._teardown.break_off(error, SdpCause.VIOLATION)

    def handle_receive_failed(self, buffer: Receive, status: Status, now: float) -> None:
        """No message came into this receive, and the queue pair is in error: one that does not fit, or worse."""
        self.now = now
        self._flow.work.append(ReturnBuffer(buffer))
        error: SidestepError = Unavailable(f"the transport connection failed: {status.name}")
        cause = SdpCause.TRANSPORT
        if status is Status.LOCAL_LENGTH_ERROR:
            error, cause = PeerViolation("a message that does not fit", rule="message_size"), SdpCause.VIOLATION
        if status is not Status.FLUSHED:
            self._teardown.break_off(error, cause, transport_ended=True)
        self._hang_up()

    def _hang_up(self) -> None:
        self._suspend.cut_off()
        self._teardown.hang_up()

    def handle_completion(self, wr_id: int, status: Status, now: float) -> None:
        """A send-queue request has completed, and with it all that were posted before it."""
        self.now = now
        if status is not _DONE:
            if status is Status.FLUSHED or not self._flow.open:
                self._hang_up()
            elif self._suspend.confirmed:  # the other end has left; it says so later, or that was lost
                self._suspend.left()
            else:
                self._teardown.break_off(
                    Unavailable(f"the transport connection failed: {status.name}"),
                    SdpCause.TRANSPORT,
                    transport_ended=True,
                )
            return  # what was outstanding ends with handle_disconnected
        in_flight = self._flow.in_flight
        while in_flight and in_flight[0][0] <= wr_id:
            _, send, then = in_flight.popleft()
            if send is not None:
                send.pending -= 1
                if not send.pending and not send.done:
                    if send.offset == send.length and send.region is None:
                        send.done = True
                        self.events.append(send)
                    else:
                        self._halves.end_send(send)
            if then is not None:
                then()
                self.dirty = True
        if self._waiting:
            self.dirty = True

    def handle_registered(self, request: StreamSend | StreamReceive, region: Region, now: float) -> None:
        """The region that Register asked for."""
        self.now = now
        self._halves.registered(request, region)
        self.dirty = True

    def handle_registration_failed(self, request: StreamSend | StreamReceive, now: float) -> None:
        """There is none: the bytes go by Bcopy."""
        self.now = now
        self._halves.registration_failed(request)
        self.dirty = True

    def senders(self, wr_id: int) -> list[StreamSend]:
        """Whose bytes a request of the send queue carries; see `Flow.senders`."""
        return self._flow.senders(wr_id)

    def when_sent(self, wr_id: int, then: Callable[[], None]) -> None:
        """Calls when this request of the send queue has completed; not at all if the connection ends before."""
        self._flow.when_sent(wr_id, then)

    # --- time ---

    def next_deadline(self) -> float | None:
        """When `handle_timeout` is to be called, or None."""
        return min(self.timers.values()) if self.timers else None

    def handle_timeout(self, now: float) -> None:
        self.now = now
        for name in [name for name, at in self.timers.items() if at <= now]:
            if self.timers.pop(name, None) is not None:  # the one before may have ended all of them
                self._TIMEOUTS[name](self)
        self.dirty = True

    def _cancel_timeout(self) -> None:
        error = Unavailable("the other end does not give advertised memory back")
        self._teardown.break_off(error, SdpCause.TIMEOUT)

    _TIMEOUTS: Final[dict[str, Callable[[SdpConnection], None]]] = {
        "answer": lambda connection: connection._source.cancel(),
        "cancel": _cancel_timeout,
        "close": lambda connection: connection._teardown.close_timeout(),
        "last_ack": lambda connection: connection._teardown.last_ack_timeout(),
        "abort": lambda connection: connection._teardown.abort_timeout(),
        "probe": lambda connection: connection._updates.probe_timeout(),
        "refresh": lambda connection: connection._updates.refresh_timeout(),
        "keepalive": lambda connection: connection._keepalive.timeout(),
        "suspend": lambda connection: connection._suspend.timeout(),
    }

    # --- what goes out ---

    def poll_work(self) -> Work | None:
        """The next thing to do, in order; None when there is none."""
        if not self.work and self.dirty:
            self.pump()
        return self.work.popleft() if self.work else None

    def pump(self) -> None:
        """Adds to `work` what may be sent now; to be called when it is empty and the connection is `dirty`."""
        self.dirty = False
        self._waiting = self._outgoing.pump()

    def quiet(self) -> bool:
        """Whether nothing was caused that would have to be polled: worth a look before polling."""
        return not (self.dirty or self.events or self.work)

    def poll_event(self) -> StreamEvent | None:
        """The next thing to tell; None when there is none. Work is to be polled first."""
        if self.events:
            return self.events.popleft()
        if not self.readable_reported:
            sink = self._sink
            if not sink.receives and (sink.ready_bytes or sink.adverts or sink.ended):
                self.readable_reported = True
                return SdpEvent(SdpEventKind.READABLE)
        return None

    # --- what the parts share ---

    @property
    def sendable(self) -> bool:
        flow = self._flow
        return flow.open and not flow.down and not self._suspend.sent

    def move(self, stimulus: Stimulus) -> None:
        state = TRANSITIONS.get((self.state, stimulus))
        if state is None:
            raise InternalError(f"{stimulus.value} in state {self.state.value}")
        self.state = state
        self._flow.open = state in OPEN
        self._fast = state is SdpState.ESTABLISHED or state is SdpState.FIN_WAIT

    def establish(self, stimulus: Stimulus) -> None:
        self.move(stimulus)
        self._keepalive.start()
        self._suspend.established()
        self.dirty = True
        self.tell(SdpEventKind.ESTABLISHED)

    def forget(self) -> None:
        self.timers.clear()
        self._control.clear()

    def tell(self, kind: SdpEventKind, error: SidestepError | None = None) -> None:
        self.events.append(SdpEvent(kind, error))

    def control(self, action: object) -> None:
        """Queues a message without payload: a header, or a callable that sends it."""
        self._control.append(action)
        self.dirty = True

    def withdraw_control(self, action: object) -> bool:
        try:
            self._control.remove(action)
        except ValueError:
            return False
        return True


__all__ = ["SdpCause", "SdpConnection"]
