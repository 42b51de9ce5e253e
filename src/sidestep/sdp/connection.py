"""One SDP connection: what comes in, what goes out, and the order in which one follows from the other.

    conn = Connection(settings)
    conn.connect(addresses, now)                # or conn.accept(addresses, hello, now)
    while work := conn.poll_work(): ...         # post it to the queue pair, or do what it orders
    while event := conn.poll_event(): ...       # tell the user
    timer.arm(conn.next_deadline())             # then conn.handle_timeout(now)

The connection does no I/O, has no clock and starts nothing by itself: `handle_*` takes things in, `poll_*` gives things
out. All times are monotonic seconds. Work is polled before events: when an event tells that memory is the user's
again, the order that makes it unreachable for the other end has been given before.

What the transport must do: deliver messages in order, each into the receive posted first; complete the send queue in
order; flush what is outstanding when the queue pair ends, and only then call `handle_disconnected`. It must have
delivered all messages that came before that end.

Not supported: sending a Send with Invalidate (nobody has to), and the literal form of the iWARP draft in which Hello
is the beginning of the TCP stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final

from sidestep import limits
from sidestep.errors import InternalError, LimitReached, Misuse, PeerViolation, SidestepError, Unavailable
from sidestep.rdma.work import REJECT_CONSUMER, Receive, RKey, Status
from sidestep.sdp.flow import Flow
from sidestep.sdp.hello import AnyHello, AnyHelloAck, Version, agreed, hello_ack_refusal, hello_refusal
from sidestep.sdp.requests import (
    Accept,
    Connect,
    Disconnect,
    Event,
    EventKind,
    NeedBuffers,
    Region,
    Reject,
    Release,
    ReturnBuffer,
    StreamReceive,
    StreamSend,
    Suspended,
    Told,
    Work,
)
from sidestep.sdp.resize import Resize
from sidestep.sdp.serial import MASK, ge
from sidestep.sdp.settings import Addresses, Carrier, Settings
from sidestep.sdp.sink import Sink
from sidestep.sdp.source import Source
from sidestep.sdp.states import NO_PAYLOAD, OPEN, SENDABLE, TRANSITIONS, State, Stimulus, forbidden
from sidestep.sdp.wire import (
    BSDH,
    OOB_PEND,
    OOB_PRES,
    REQ_PIPE,
    AbortConn,
    Bsdh,
    ChRcvBuf,
    ChRcvBufAck,
    Decoded,
    DisConn,
    Header,
    Hello,
    HelloAck,
    IwarpHello,
    IwarpHelloAck,
    Mid,
    Mode,
    ModeChange,
    RdmaRdCompl,
    RdmaWrCompl,
    SinkAvail,
    SinkCancelAck,
    SrcAvail,
    SuspComm,
    SuspCommAck,
    decode,
    encode,
    port_of,
    service_id,
)

_unpack: Final = BSDH.unpack_from
_DATA: Final = int(Mid.DATA)
_DONE: Final = Status.SUCCESS
_PIPELINED: Final = Mode.PIPELINED


class Cause(Enum):
    """Why a connection ended before its time; the endpoint has the errno of each."""

    REFUSED = "refused"  # nobody listens, no room, or a Hello that the other end does not take
    VIOLATION = "violation"  # the other end broke a rule
    RESET = "reset"  # the other end gave the connection up
    TRANSPORT = "transport"  # a completion with an error, or an event of the device
    TIMEOUT = "timeout"  # the other end does not answer
    ABORTED = "aborted"  # this end gave it up
    RESOURCES = "resources"  # this end has no memory or queue pair for it


class Connection:
    """One end. Not thread-safe: whoever drives it calls one method at a time."""

    __slots__ = (
        "_asks", "_buffers_wanted", "_control", "_dirty", "_down", "_early", "_end_mseq", "_end_told", "_events",
        "_fast", "_flow", "_left", "_moved", "_open", "_probe_wait", "_readable_told", "_reader_closed",
        "_refresh_wait", "_release_wanted", "_reply_fault", "_resize", "_resizing", "_settings", "_sink", "_source",
        "_strategy", "_suspend_again", "_suspend_answered", "_suspend_confirmed", "_suspend_port", "_suspend_sent",
        "_timers", "_traffic", "_transport_done", "_waiting", "_write_told", "accepting", "addresses", "cause",
        "error", "now", "peer_max_adverts", "state", "suspended", "version",
    )  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._strategy = settings.strategy()
        self._flow = Flow(settings.receive_count, settings.send_queue)
        self._source = Source(self._flow, settings, self._strategy, self)
        self._sink = Sink(self._flow, settings, self._strategy, self)
        self._resize = Resize(self._flow, self, settings.receive_size, settings.receive_size_max)
        self._control: deque[object] = deque()  # messages without payload, or what sends them, in order
        self._events: deque[Told] = deque()
        self._timers: dict[str, float] = {}
        self._buffers_wanted = 0  # until Hello or HelloAck can say how many there are
        self._fast = False  # Data is taken without a look at the tables
        self._dirty = False  # something has happened since the last pump
        self._waiting = False  # something waits for credit, room or an answer: whatever comes in may set it going
        self._resizing = False  # private buffers of more than one size are about
        self._open = False  # the transport connection carries messages
        self._down = False  # the transport connection takes nothing more
        self._transport_done = False  # it is gone, and everything was flushed
        self._reader_closed = False
        self._readable_told = False
        self._end_told = False
        self._write_told = False
        self._end_mseq = 0  # of our DisConn
        self._release_wanted = False  # DisConn's completion is awaited, to disconnect
        self._probe_wait = settings.probe_s
        self._asks = False  # a keepalive is under way
        self._refresh_wait = settings.refresh_s
        self._traffic = 0  # sequence numbers when the keepalive timer last looked
        self._reply_fault: PeerViolation | None = None
        self._early: list[tuple[Receive, int]] = []  # messages that came before the HelloAck, with their lengths
        self._left = False  # the transport connection of a stream that goes on over another one is gone
        self._suspend_port: int | None = None  # where our socket moves to, or the other end's
        self._suspend_sent = False
        self._suspend_answered = False
        self._suspend_confirmed = False  # SuspCommAck has come
        self._suspend_again: int | None = None  # our own wish, for after a move of the other end
        self._moved = False  # this is not the first transport connection
        self.state = State.CLOSED
        self.accepting = False
        self.addresses: Addresses | None = None
        self.version = Version.of_byte(settings.wire_version)
        self.peer_max_adverts = 0
        self.now = 0.0
        self.error: SidestepError | None = None
        self.cause: Cause | None = None
        self.suspended: Suspended | None = None

    # --- setting up (§7) ---

    def connect(self, addresses: Addresses, now: float) -> None:
        """Begins a connection; what comes of it is told by ESTABLISHED, or BROKEN."""
        self.now = now
        self.addresses = addresses
        self._move(Stimulus.CONNECT)
        self._want_buffers()

    def accept(self, private_data: bytes | memoryview, addresses: Addresses | None, now: float) -> bool:
        """Answers a connection request with this Hello; False, and a Reject in the work, if it must be refused.

        `addresses` are those of the transport, which iWARP's Hello does not have; InfiniBand's own win.
        """
        self.now = now
        self.accepting = True
        try:
            bsdh, hello, _ = decode(memoryview(private_data))
            iwarp = self._settings.carrier is Carrier.IWARP
            majors = {1, 2} if self.version.major == 1 and not iwarp else {self.version.major}
            reason = hello_refusal(bsdh, hello, iwarp=iwarp, majors=majors)
            if reason is not None:
                raise PeerViolation(f"a Hello that is refused: {reason.value}", rule=f"hello_{reason.value}")
        except PeerViolation as violation:
            self._refuse(violation, Cause.VIOLATION)
            self._flow.work.append(Reject(REJECT_CONSUMER))
            return False
        assert isinstance(hello, Hello | IwarpHello)
        if isinstance(hello, Hello):
            local_port = addresses.local_port if addresses else 0
            self.addresses = Addresses(hello.dst_ip, local_port, hello.src_ip, hello.local_port)
        else:
            self.addresses = addresses
        self._adopt(bsdh, hello, hello.local_rcv_sz)
        self._move(Stimulus.REQUEST)
        self._want_buffers()
        return True

    def _want_buffers(self) -> None:
        self._buffers_wanted = self._settings.receive_count
        self._flow.work.append(NeedBuffers(self._buffers_wanted, self._resize.target))

    def handle_buffers(self, buffers: list[Receive], now: float) -> None:
        """Receives that NeedBuffers asked for, all or some of them."""
        self.now = now
        for buffer in buffers:
            if self._down:
                self._flow.work.append(ReturnBuffer(buffer))
            else:
                self._flow.post(buffer)
        self._dirty = True
        if self._down:
            return
        if not self._buffers_wanted:
            self._resize.supplied(buffers)
            return
        self._buffers_wanted = max(0, self._buffers_wanted - len(buffers))
        if not self._buffers_wanted:
            self._introduce()

    def handle_buffers_failed(self, error: SidestepError, now: float) -> None:
        """There are none: no connection, or no larger buffers."""
        self.now = now
        self._dirty = True
        if self._down:
            return
        if not self._buffers_wanted:
            self._resize.failed()
            return
        self._buffers_wanted = 0
        self._flow.work.append(Reject(REJECT_CONSUMER) if self.accepting else Disconnect())
        self._refuse(error, Cause.RESOURCES)

    def _introduce(self) -> None:
        """Hello or HelloAck: our receives are posted, so they can be counted on."""
        flow, settings = self._flow, self._settings
        flow.last_bufs_sent = bufs = min(flow.posted, 0xFFFF)
        depth = settings.reads_max
        size = self._resize.local
        header: Header
        if self.accepting:
            if settings.carrier is Carrier.IWARP:
                header = IwarpHelloAck(settings.max_adverts, size, depth, depth, self.version)
            else:
                header = HelloAck(settings.max_adverts, size, self.version)
            flow.work.append(Accept(encode(header, bufs=bufs, mseq=0, mseq_ack=0)))
            return
        assert self.addresses is not None
        if settings.carrier is Carrier.IWARP:
            header = IwarpHello(settings.max_adverts, settings.remote_size, size, depth, depth, self.version)
        else:
            header = Hello(
                settings.max_adverts,
                settings.remote_size,
                size,
                self.addresses.local_port,
                self.addresses.local,
                self.addresses.remote,
                self.version,
                self.addresses.local.version,
            )
        hello = encode(header, bufs=bufs, mseq=0, mseq_ack=0)
        flow.work.append(Connect(service_id(self.addresses.remote_port), hello))

    def judge_reply(self, private_data: bytes | memoryview) -> bool:
        """Whether this HelloAck can be taken; what is wrong with it is kept for `handle_refused`."""
        try:
            self._reply(private_data)
        except PeerViolation as violation:
            self._reply_fault = violation
            return False
        return True

    def _reply(self, private_data: bytes | memoryview) -> tuple[Bsdh, HelloAck | IwarpHelloAck]:
        bsdh, ack, _ = decode(memoryview(private_data))
        iwarp = self._settings.carrier is Carrier.IWARP
        reason = hello_ack_refusal(bsdh, ack, iwarp=iwarp, major=self.version.major)
        if reason is not None:
            raise PeerViolation(f"a HelloAck that is refused: {reason.value}", rule=f"hello_{reason.value}")
        assert isinstance(ack, HelloAck | IwarpHelloAck)
        return bsdh, ack

    def handle_accepted(self, private_data: bytes | memoryview, now: float) -> None:
        """The other end has accepted, with this HelloAck; both ends may send."""
        self.now = now
        if self.state is not State.REQ_SENT:
            return
        try:
            bsdh, ack = self._reply(private_data)
        except PeerViolation as violation:
            self._flow.work.append(Disconnect())
            self._refuse(violation, Cause.VIOLATION)
            return
        self._adopt(bsdh, ack, ack.act_rcv_sz)
        self._establish(Stimulus.REPLY)
        early, self._early = self._early, []
        for buffer, length in early:
            self.handle_message(buffer, length, now)

    def _adopt(self, bsdh: Bsdh, header: AnyHello | AnyHelloAck, size: int) -> None:
        flow = self._flow
        flow.credit = bsdh.bufs
        flow.payload_credit = 4 if bsdh.bufs >= limits.SDP_BUFFERS_MIN else 3
        flow.remote_size = min(size, limits.SDP_BUFFER_SIZE_MAX)
        self.peer_max_adverts = header.adverts_max
        self._source.one_advert = header.adverts_max == 1
        # An end that is set to 1.1 takes 2.2 as well, and then answers in kind: who asked accepts its own major only.
        if header.version.major == self.version.major:
            self.version = agreed(self.version, header.version)
        else:
            self.version = header.version
        self.size_changed(remote=True)

    def handle_refused(self, reason: int, now: float) -> None:
        """The connection manager says no, or that nobody answered."""
        self.now = now
        if self.state in (State.REQ_SENT, State.REP_SENT):
            if self._moved:  # to the program it is still the connection that it had
                self._refuse(Unavailable("the socket is not at its new place"), Cause.RESET)
                return
            remedy = "is a program listening there?" if not self.accepting else ""
            self._refuse(Unavailable(f"refused (reason {reason})", remedy=remedy), Cause.REFUSED)

    def handle_unreachable(self, now: float) -> None:
        """The connection manager got no answer."""
        self.now = now
        if self.state in (State.REQ_SENT, State.REP_SENT):
            self._refuse(Unavailable("the other end does not answer"), Cause.TIMEOUT)

    def handle_established(self, now: float) -> None:
        """Ready to use has come (accepting end)."""
        self.now = now
        if self.state is State.REP_SENT:
            self._establish(Stimulus.READY)

    def _establish(self, stimulus: Stimulus) -> None:
        self._move(stimulus)
        self._keep_alive()
        if self._suspend_again is not None:
            self._suspend_port, self._suspend_again = self._suspend_again, None
            self._arm("suspend", self._settings.suspend_s)
        self._dirty = True
        self._events.append(Event(EventKind.ESTABLISHED))

    def _refuse(self, error: SidestepError, cause: Cause) -> None:
        if self._reply_fault is not None:  # why it ends, whoever tells of the end first
            error, cause = self._reply_fault, Cause.VIOLATION
        self.error, self.cause = error, cause
        if self.state is not State.CLOSED:
            self._move(Stimulus.REFUSED)
        self._shut()
        self._events.append(Event(EventKind.BROKEN, error))
        self._finish()

    def _move(self, stimulus: Stimulus) -> None:
        state = TRANSITIONS.get((self.state, stimulus))
        if state is None:
            raise InternalError(f"{stimulus.value} in state {self.state.value}")
        self.state = state
        self._open = state in OPEN
        self._fast = state is State.ESTABLISHED or state is State.FIN_WAIT

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
        self._dirty = True
        return send

    def receive(self, view: memoryview, now: float, *, waitall: bool = False) -> StreamReceive:
        """Offers room for bytes of the other end. Comes back from `poll_event` when there are some, or the end.

        Raises:
            Misuse: no room, or this direction was closed.
            LimitReached: too many receives are queued.
        """
        if self._reader_closed:
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
        if self._transport_done and not receive.done:
            self._give_up_receives()
        self._readable_told = False
        if self._waiting or sink.mode is _PIPELINED or self._credit_low():
            self._dirty = True
        return receive

    def cancel_send(self, send: StreamSend, now: float) -> None:
        """Takes back what is possible; it ends with `passed` bytes on their way."""
        if send.done:
            return
        self.now = now
        send.cancelled = True
        self._dirty = True
        if any(advert.send is send for advert in self._source.adverts):
            self._source.cancel()
        else:
            self._source.drop_cancelled()

    def cancel_receive(self, receive: StreamReceive, now: float) -> None:
        """Takes the room back; it ends with what it holds, once no device uses it."""
        if receive.done:
            return
        self.now = now
        receive.cancelled = True
        self._dirty = True
        if receive.advert:
            self._sink.cancel()
        else:
            self._sink.drop_cancelled()

    def peek(self, now: float) -> memoryview:
        """Bytes that could be received now, in one piece; they stay. Advertised ones are asked for by Bcopy (§20)."""
        self.now = now
        if self._sink.ready_bytes:
            return self._sink.peek()
        if self._sink.adverts and not self._sink.receives:
            self._sink.refuse()
            self._dirty = True
        return memoryview(b"")

    def peek_into(self, room: memoryview, now: float) -> int:
        """Copies what could be received now, up to the urgent byte, and returns how much; the bytes stay."""
        count = 0
        for payload, _, byte in self._sink.ready:
            if byte is None:
                taken = min(len(payload), len(room) - count)
                room[count : count + taken] = payload[:taken]
                count += taken
            elif count:
                break  # as a receive does
            elif self._settings.urgent_inline:
                room[0] = byte
                count = 1
            if count == len(room):
                break
        if not count:
            self.peek(now)  # asks for what is only advertised
        return count

    def put_back(self, data: bytes, now: float) -> None:
        """Gives bytes that were received last back to the stream: they are received again, before all others."""
        self.now = now
        self._sink.ready.appendleft((memoryview(data), None, None))
        self._sink.ready_bytes += len(data)
        self._readable_told = False
        self._sink.serve()
        self._sink.keep_order()
        self._dirty = True

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
        """The flow-control mode of the send half."""
        return self._source.mode

    @property
    def receive_mode(self) -> Mode:
        """The flow-control mode of the receive half."""
        return self._sink.mode

    def want_send_mode(self, mode: Mode, now: float) -> None:
        """Asks for a mode of the send half; it changes when the rules allow."""
        self.now = now
        self._source.want_mode(mode)
        self._dirty = True

    def want_combined(self, now: float) -> None:
        """Ends Buffered mode of the receive half, of which this end is then the master."""
        self.now = now
        if self._sendable:
            self._sink.ask_combined()
            self._dirty = True

    def resize_remote(self, size: int, now: float) -> None:
        """Asks the other end for private buffers of that many bytes; RESIZED tells of the answer."""
        self.now = now
        if not self._sendable:
            raise Misuse("not connected")
        self._resize.ask(size)
        self._dirty = True

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
        self._dirty = True

    def shutdown_read(self, now: float) -> None:
        """Receives end; bytes that come from now on are a violation, and reset the connection (§16.1)."""
        self.now = now
        self._reader_closed = True
        for receive in list(self._sink.receives):
            self.cancel_receive(receive, now)
        self._sink.closed = True
        self._sink.serve()
        self._dirty = True

    def close(self, now: float, linger_s: float | None = None) -> None:
        """Ends both directions. Unread bytes make it a reset, as in TCP, and so does a linger of 0."""
        self.now = now
        if self.state is State.SUSPENDED:
            self._disconnect()
        if self.state is State.CLOSED or self._down:
            self._reader_closed = True
            self._drop_unread()
            return
        sink = self._sink
        if linger_s == 0 or sink.ready or sink.adverts or self.state in (State.REQ_SENT, State.REP_SENT):
            self.abort(now)
            return
        self._reader_closed = True
        self._source.ending = True
        for receive in list(sink.receives):
            self.cancel_receive(receive, now)
        self._arm("close", self._settings.close_s if linger_s is None else min(linger_s, self._settings.close_s))
        self._dirty = True

    def abort(self, now: float) -> None:
        """Resets the connection."""
        self.now = now
        self._reader_closed = True
        if self.state is State.SUSPENDED:  # the stream is elsewhere
            self._disconnect()
            return
        if self._transport_done:
            self._drop_unread()
            return
        if self.state in (State.REQ_SENT, State.REP_SENT):
            unanswered = self.accepting and self._buffers_wanted > 0
            self._flow.work.append(Reject(REJECT_CONSUMER) if unanswered else Disconnect())
            self._refuse(Unavailable("given up before it was established"), Cause.ABORTED)
            return
        self._break(Unavailable("reset by this end"), Cause.ABORTED)

    def _drop_unread(self) -> None:
        self._sink.drain()

    def _break(self, error: SidestepError, cause: Cause, *, transport_ended: bool = False) -> None:
        """Ends the connection at once (§16.2). The first error is kept."""
        if self.state in (State.CLOSED, State.ABORTING):
            return
        if self.error is None:
            self.error, self.cause = error, cause
            self._events.append(Event(EventKind.BROKEN, error))
        told = self.state in (State.FIN_WAIT, State.LAST_ACK) and not transport_ended
        resuming = self.state is State.RESUMING
        self._move(Stimulus.RESET)
        self._timers.clear()
        self._control.clear()
        if resuming:  # between two transport connections: the order to disconnect the first was given
            self._shut()
            if self._left:
                self._move(Stimulus.DISCONNECTED)
                self._finish()
            return
        if told and self._flow.may_send_bare():  # who has sent DisConn has to say that it is a reset
            self._flow.send_header(AbortConn(), then=self._disconnect)
            self._arm("abort", self._settings.last_ack_s)
        else:
            self._disconnect()

    def _shut(self) -> None:
        """The transport connection takes nothing more: no RDMA Read either, though an advertisement arrives still."""
        self._down = True
        self._flow.send_queue = 0

    def _disconnect(self) -> None:
        if not self._down:
            self._shut()
            self._flow.work.append(Disconnect())

    def handle_failure(self, error: SidestepError, cause: Cause, now: float) -> None:
        """The transport connection has failed and no completion tells of it, or what it needs is not to be had."""
        self.now = now
        if self.state in (State.REQ_SENT, State.REP_SENT):
            unanswered = self.accepting and self._buffers_wanted > 0
            self._flow.work.append(Reject(REJECT_CONSUMER) if unanswered else Disconnect())
            self._refuse(error, cause)
        elif self.state in (State.TIME_WAIT, State.ABORTING, State.SUSPENDED):
            self._disconnect()  # it is over, well or badly, whatever comes of the transport
        else:
            self._break(error, cause, transport_ended=True)

    def handle_disconnected(self, now: float) -> None:
        """The transport connection is gone: all messages were delivered, all work requests are flushed."""
        self.now = now
        if self._suspend_confirmed and self._open:
            self._settle_moved()
        state = self.state
        if state is State.CLOSED:
            self._finish()
            return
        if state is State.RESUMING:
            self._left = True
            return
        if state in (State.ESTABLISHED, State.FIN_WAIT, State.CLOSE_WAIT) and self.error is None:
            self.error, self.cause = Unavailable("reset by the other end"), Cause.RESET
            self._events.append(Event(EventKind.BROKEN, self.error))
        elif state in (State.REQ_SENT, State.REP_SENT) and self.error is None:
            self.error, self.cause = Unavailable("the transport connection was refused"), Cause.REFUSED
            self._events.append(Event(EventKind.BROKEN, self.error))
        elif state in (State.LAST_ACK, State.TIME_WAIT) and self.error is None:
            self._tell_write_closed()  # the other end disconnects because it has our DisConn: no need to see the answer
        if not self._down:
            self._shut()
            self._flow.work.append(Disconnect())  # our half of it
        self._move(Stimulus.DISCONNECTED)
        self._finish()

    def _finish(self) -> None:
        """Nothing is outstanding: whatever the user asked for ends."""
        if self._transport_done:
            return
        self._transport_done = True
        self._timers.clear()
        self._control.clear()
        early, self._early = self._early, []
        self._flow.work.extend(ReturnBuffer(buffer) for buffer, _ in early)
        source, sink = self._source, self._sink
        moved = self.suspended.unsent if self.suspended is not None else ()
        for _, send, _ in self._flow.in_flight:
            if send is not None and send not in moved:  # the rest of it goes elsewhere
                self._end_request(send)
        self._flow.in_flight.clear()
        for advert in source.adverts:
            self._end_request(advert.send)
        for send, _, _ in source.forced:
            self._end_request(send)
        for send in source.queue:
            self._end_request(send)
        source.adverts.clear()
        source.forced.clear()
        source.queue.clear()
        sink.shown.clear()
        sink.adverts.clear()
        sink.last_read = None
        for receive in sink.receives:
            receive.advert = False
            receive.reads = 0
        sink.last_read = None
        sink.serve()
        self._give_up_receives()
        if self._reader_closed:
            self._drop_unread()  # nobody will read it
        self._events.append(Event(EventKind.CLOSED))

    def _give_up_receives(self) -> None:
        receives = self._sink.receives
        while receives:
            receive = receives.popleft()
            if not self._sink.ended or self.error is not None:
                receive.error = self.error
            self.end_receive(receive)

    # --- what the transport says ---

    def handle_message(self, buffer: Receive, length: int, now: float) -> None:
        """A message has come into this receive."""
        self.now = now
        message = buffer.scatter[0][:length]
        flow = self._flow
        try:
            if self._fast and length >= 16 and message[0] == _DATA and not self._resizing:
                _, flags, bufs, size, mseq, ack = _unpack(message)
                if size != length:
                    raise PeerViolation(f"Len {size} in a message of {length} bytes", rule="length")
                flow.take_header(bufs, mseq, ack)
                if self._source.change_mseq is not None:
                    self._source.acknowledged(ack)
                if flags & OOB_PEND:
                    self._announced()
                if length == 16:
                    flow.posted += 1  # not by post(): a mere update is nothing to answer
                    flow.work.append(buffer)
                    if self._waiting or self._credit_low():
                        self._dirty = True
                    return
                if self._reader_closed:
                    raise PeerViolation(f"{length - 16} bytes after close", rule="payload_closed")
                self._sink.deliver(message[16:], buffer, flags & OOB_PRES != 0)
                if self._waiting or self._credit_low():
                    self._dirty = True
                return
            self._dirty = True
            self._take(buffer, message, now)
        except PeerViolation as violation:
            self._break(violation, Cause.VIOLATION)
            self._give_back(buffer)

    def handle_receive_failed(self, buffer: Receive, status: Status, now: float) -> None:
        """No message came into this receive, and the queue pair is in error: one that does not fit, or worse."""
        self.now = now
        self._flow.work.append(ReturnBuffer(buffer))
        error: SidestepError = Unavailable(f"the transport connection failed: {status.name}")
        cause = Cause.TRANSPORT
        if status is Status.LOCAL_LENGTH_ERROR:
            error, cause = PeerViolation("a message that does not fit", rule="message_size"), Cause.VIOLATION
        if status is not Status.FLUSHED:
            self._break(error, cause, transport_ended=True)
        self._hang_up()

    def _give_back(self, buffer: Receive) -> None:
        """The receive of a message that broke a rule, unless it was used by then."""
        wr_id = buffer.wr_id  # it may have been cut to another size meanwhile
        used = any(held is not None and held.wr_id == wr_id for _, held, _ in self._sink.ready)
        for work in self._flow.work:
            receive = work.receive if isinstance(work, ReturnBuffer) else work
            used |= isinstance(receive, Receive) and receive.wr_id == wr_id
        if not used:
            self._flow.work.append(ReturnBuffer(buffer))

    def _take(self, buffer: Receive, message: memoryview, now: float) -> None:
        """Any message, by the tables. The order of work is that of docs/wire/sdp.md §19.1."""
        if self.state is State.REP_SENT:
            self.handle_established(now)  # the first message says as much as ready to use
        if self.state is State.REQ_SENT:  # the queue pair is quicker than the connection manager
            self._early.append((buffer, len(message)))
            return
        if not self._open:
            self._flow.work.append(ReturnBuffer(buffer))  # it crossed our end of the connection
            return
        decoded = decode(message)
        bsdh, _, payload = decoded
        rule = forbidden(self.state, Mid(bsdh.mid), len(payload))
        if rule is not None:
            raise PeerViolation(f"{Mid(bsdh.mid).name} in state {self.state.value}", rule=rule)
        self._flow.take_header(bsdh.bufs, bsdh.mseq, bsdh.mseq_ack)
        if self._resizing:
            self._resize.received()
        if self._source.change_mseq is not None:
            self._source.acknowledged(bsdh.mseq_ack)
        if bsdh.flags & OOB_PEND:
            self._announced()
        if payload and self._reader_closed:
            raise PeerViolation(f"{len(payload)} bytes after close", rule="payload_closed")
        if self._suspend_confirmed or (self._suspend_answered and (payload or bsdh.mid != _DATA)):
            raise PeerViolation(f"{Mid(bsdh.mid).name} after SuspComm", rule="suspend_amid")
        if not payload:
            owed = self._flow.owes or bsdh.mid != _DATA
            self.repost(buffer)
            self._flow.owes = owed
        self._HANDLERS[bsdh.mid](self, decoded, buffer)

    def _announced(self) -> None:
        self._sink.urgent_pending += 1
        self._events.append(Event(EventKind.URGENT))

    def _on_data(self, message: Decoded, buffer: Receive) -> None:
        if message.payload:
            self._sink.deliver(message.payload, buffer, message.bsdh.flags & OOB_PRES != 0)

    def _on_src_avail(self, message: Decoded, buffer: Receive) -> None:
        assert isinstance(message.header, SrcAvail)
        if self._reader_closed:
            raise PeerViolation("SrcAvail after close", rule="payload_closed")
        self._sink.handle_src_avail(message.header, message.payload, buffer)

    def _on_sink_avail(self, message: Decoded, buffer: Receive) -> None:
        assert isinstance(message.header, SinkAvail)
        if self._cancel_ack_queued():
            raise PeerViolation("SinkAvail before SinkCancelAck", rule="sink_avail_cancelling")
        self._source.handle_sink_avail(message.header, self._flow.remote_size)
        if message.payload:
            self._sink.deliver(message.payload, buffer, False)

    def _on_read_completed(self, message: Decoded, buffer: Receive) -> None:
        assert isinstance(message.header, RdmaRdCompl)
        hint = message.bsdh.flags & REQ_PIPE != 0
        self._source.handle_read_completed(message.header.length, message.bsdh.mseq_ack, hint)

    def _on_write_completed(self, message: Decoded, buffer: Receive) -> None:
        assert isinstance(message.header, RdmaWrCompl)
        self._sink.handle_write_completed(message.header.length)

    def _on_send_sm(self, message: Decoded, buffer: Receive) -> None:
        self._source.handle_send_sm(message.bsdh.mseq_ack)

    def _on_mode_change(self, message: Decoded, buffer: Receive) -> None:
        assert isinstance(message.header, ModeChange)
        half = self._source if message.header.to_send_half else self._sink
        half.handle_mode_change(message.header.mode)

    def _on_src_avail_cancel(self, message: Decoded, buffer: Receive) -> None:
        self._sink.handle_src_avail_cancel(message.bsdh.mseq)

    def _on_sink_avail_cancel(self, message: Decoded, buffer: Receive) -> None:
        if self._source.sinks:
            self._source.sinks.clear()
            self.control(SinkCancelAck())

    def _cancel_ack_queued(self) -> bool:
        return any(isinstance(item, SinkCancelAck) for item in self._control)

    def _on_sink_cancel_ack(self, message: Decoded, buffer: Receive) -> None:
        self._sink.handle_sink_cancel_ack()

    def _on_resize(self, message: Decoded, buffer: Receive) -> None:
        assert isinstance(message.header, ChRcvBuf)
        self._resize.handle_request(message.header.size)

    def _on_resized(self, message: Decoded, buffer: Receive) -> None:
        assert isinstance(message.header, ChRcvBufAck)
        self._resize.handle_answer(message.header.size)

    def _on_disconn(self, message: Decoded, buffer: Receive) -> None:
        self._sink.end()
        if not self._end_told:
            self._end_told = True
            self._events.append(Event(EventKind.END_OF_STREAM))
        self._move(Stimulus.END_RECEIVED)
        if self.state is State.TIME_WAIT and not self._release_wanted:
            self._leave()

    def _on_abort(self, message: Decoded, buffer: Receive) -> None:
        if self.state not in NO_PAYLOAD:
            raise PeerViolation("AbortConn without DisConn", rule="abort_early")
        self._break(Unavailable("reset by the other end"), Cause.RESET, transport_ended=True)

    def _on_suspend(self, message: Decoded, buffer: Receive) -> None:
        assert isinstance(message.header, SuspComm)
        if self._suspend_port is not None:
            if self.accepting and self._suspend_sent:
                return  # both moved: the connecting end answers, and asks again in the new connection (§15)
            self._suspend_again = self._suspend_port
            self._suspend_sent = False
        self._suspend_port = port_of(message.header.service_id)
        self._suspend_answered = True
        self._fast = False  # what comes now is looked at

    def _on_suspended(self, message: Decoded, buffer: Receive) -> None:
        if not self._suspend_sent:
            raise PeerViolation("SuspCommAck without SuspComm", rule="suspend_unasked")
        self._fast = False
        self._suspend_confirmed = True  # `_pump` goes on when no memory is in use here any more

    _HANDLERS: Final = {
        int(Mid.DATA): _on_data,
        int(Mid.SRC_AVAIL): _on_src_avail,
        int(Mid.SINK_AVAIL): _on_sink_avail,
        int(Mid.RDMA_RD_COMPL): _on_read_completed,
        int(Mid.RDMA_WR_COMPL): _on_write_completed,
        int(Mid.SEND_SM): _on_send_sm,
        int(Mid.MODE_CHANGE): _on_mode_change,
        int(Mid.SRC_AVAIL_CANCEL): _on_src_avail_cancel,
        int(Mid.SINK_AVAIL_CANCEL): _on_sink_avail_cancel,
        int(Mid.SINK_CANCEL_ACK): _on_sink_cancel_ack,
        int(Mid.CH_RCV_BUF): _on_resize,
        int(Mid.CH_RCV_BUF_ACK): _on_resized,
        int(Mid.DIS_CONN): _on_disconn,
        int(Mid.ABORT_CONN): _on_abort,
        int(Mid.SUSP_COMM): _on_suspend,
        int(Mid.SUSP_COMM_ACK): _on_suspended,
    }

    def handle_completion(self, wr_id: int, status: Status, now: float) -> None:
        """A send-queue request has completed, and with it all that were posted before it."""
        self.now = now
        if status is not _DONE:
            if status is Status.FLUSHED or not self._open:
                self._hang_up()
            elif self._suspend_confirmed:  # the other end has left; it says so later, or that was lost
                self._settle_moved()
            else:
                self._break(
                    Unavailable(f"the transport connection failed: {status.name}"),
                    Cause.TRANSPORT,
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
                        self._events.append(send)
                    else:
                        self.end_send(send)
            if then is not None:
                then()
                self._dirty = True
        if self._waiting:
            self._dirty = True

    def _hang_up(self) -> None:
        """The queue pair is in error. If that is not the connection manager's doing, nobody but us will end it."""
        if self._down or self.state is State.RESUMING:
            return
        self._flow.work.append(Disconnect())
        if self.state in (State.REQ_SENT, State.REP_SENT):  # nothing is told of an attempt that is given up
            self._refuse(Unavailable("the queue pair is in error"), Cause.TRANSPORT)
        self._shut()

    def handle_registered(self, request: StreamSend | StreamReceive, region: Region, now: float) -> None:
        """The region that Register asked for."""
        self.now = now
        if self.suspended is not None:  # the request is another connection's now, which asks anew
            self._flow.work.append(Release(region))
            return
        request.registering = False
        if request.done:
            self._flow.work.append(Release(region))
        else:
            request.region = region
            if isinstance(request, StreamReceive):
                self._sink.serve()
        self._dirty = True

    def handle_registration_failed(self, request: StreamSend | StreamReceive, now: float) -> None:
        """There is none: the bytes go by Bcopy."""
        self.now = now
        if self.suspended is not None:
            return
        request.registering = False
        if isinstance(request, StreamSend):
            request.bcopy_only = True
        else:
            request.register_failed = True
            self._sink.serve()
        self._dirty = True

    def senders(self, wr_id: int) -> list[StreamSend]:
        """Whose bytes a request of the send queue carries, in the order of its gather list; the latest is found first.

        Of a SrcAvail too, if it has payload; these bytes are in the region that it shows.
        """
        found: list[StreamSend] = []
        for number, send, _ in reversed(self._flow.in_flight):
            if number < wr_id:
                break
            if number == wr_id and send is not None:
                found.append(send)
        found.reverse()
        return found

    def when_sent(self, wr_id: int, then: Callable[[], None]) -> None:
        """Calls when this request of the send queue has completed; not at all if the connection ends before."""
        in_flight = self._flow.in_flight
        for index in range(len(in_flight) - 1, -1, -1):
            number, send, _ = in_flight[index]
            if number == wr_id:
                in_flight[index] = (number, send, then)
                return
        raise InternalError(f"request {wr_id} is not in flight")

    # --- time ---

    def next_deadline(self) -> float | None:
        """When `handle_timeout` is to be called, or None."""
        return min(self._timers.values()) if self._timers else None

    def _arm(self, name: str, wait_s: float) -> None:
        self._timers[name] = self.now + wait_s

    def handle_timeout(self, now: float) -> None:
        """Does what is due."""
        self.now = now
        for name in [name for name, at in self._timers.items() if at <= now]:
            self._timers.pop(name, None)
            self._TIMEOUTS[name](self)
        self._dirty = True

    def _on_answer_timeout(self) -> None:
        self._source.cancel()

    def _on_cancel_timeout(self) -> None:
        self._break(Unavailable("the other end does not give advertised memory back"), Cause.TIMEOUT)

    def _on_close_timeout(self) -> None:
        if self.state in OPEN:
            self._break(Unavailable("the other end does not close"), Cause.TIMEOUT)

    def _on_last_ack_timeout(self) -> None:
        if self.state is State.LAST_ACK:
            self._move(Stimulus.TIMER)
            self._disconnect()
        elif self.state is State.TIME_WAIT:
            self._disconnect()

    def _on_abort_timeout(self) -> None:
        if self.state is State.RESUMING:
            self._flow.work.append(Disconnect())
        else:
            self._disconnect()

    def _on_probe_timeout(self) -> None:
        """Payload waits, a bare message could go: it takes a credit, until the other end has to tell of more."""
        flow = self._flow
        if 2 <= flow.credit < flow.payload_credit and self._source_waits() and self._sendable and flow.may_send_bare():
            self._send_update()
        self._probe_wait = min(2 * self._probe_wait, 1.0)

    def _on_refresh_timeout(self) -> None:
        if self._sendable and self._flow.brings_credit() and self._flow.may_send_bare():
            self._send_update()
        self._refresh_wait = min(2 * self._refresh_wait, 1.0)

    def _on_keepalive_timeout(self) -> None:
        flow = self._flow
        traffic = flow.tx_mseq + flow.rx_mseq
        if traffic == self._traffic and not self._asks and self._sendable and flow.room():
            self._asks = True
            flow.send_write((), 0, RKey(0), self._lives)  # §18: a dead peer shows as a transport error
        self._traffic = traffic
        self._keep_alive()

    def _lives(self) -> None:
        self._asks = False

    def _on_suspend_timeout(self) -> None:
        self._break(Unavailable("the socket did not get to its new place"), Cause.TIMEOUT)

    _TIMEOUTS: Final = {
        "answer": _on_answer_timeout,
        "cancel": _on_cancel_timeout,
        "close": _on_close_timeout,
        "last_ack": _on_last_ack_timeout,
        "abort": _on_abort_timeout,
        "probe": _on_probe_timeout,
        "refresh": _on_refresh_timeout,
        "keepalive": _on_keepalive_timeout,
        "suspend": _on_suspend_timeout,
    }

    def _keep_alive(self) -> None:
        if self._settings.keepalive_s is not None:
            self._arm("keepalive", self._settings.keepalive_s)

    # --- what goes out ---

    def poll_work(self) -> Work | None:
        """The next thing to do, in order; None when there is none."""
        work = self._flow.work
        if not work:
            if not self._dirty:
                return None
            self._dirty = False
            self._pump()
            if not work:
                return None
        return work.popleft()

    def quiet(self) -> bool:
        """Whether nothing was caused that would have to be polled: worth a look before polling."""
        return not (self._dirty or self._events or self._flow.work)

    def poll_event(self) -> Told | None:
        """The next thing to tell; None when there is none. Work is to be polled first."""
        if self._events:
            return self._events.popleft()
        if not self._readable_told:
            sink = self._sink
            if not sink.receives and (sink.ready_bytes or sink.adverts or sink.ended):
                self._readable_told = True
                return Event(EventKind.READABLE)
        return None

    @property
    def _sendable(self) -> bool:
        return self.state in OPEN and not self._suspend_sent and not self._down

    def _source_waits(self) -> bool:
        return bool(self._source.queue or self._source.forced)

    def _pump(self) -> None:
        """Sends whatever may be sent: answers first, then the stream, then advertisements, then mere credit."""
        if not self._open or self._suspend_sent or self._down:
            if self._down or not self._open:
                return
            if self._suspend_confirmed:
                if not self._flow.in_flight:
                    self._hand_over()
            elif not self._suspend_answered:
                self._refresh()  # or the answer could lack the credit to go (docs/sdp-model.md)
            return
        flow, control, source, sink = self._flow, self._control, self._source, self._sink
        if sink.adverts and sink.receives:
            sink.serve()  # there may be room for RDMA Reads now
        while control:
            if not flow.may_send_bare():
                break
            item = control.popleft()
            if isinstance(item, Header):
                assert item.MID in SENDABLE[self.state], (item, self.state)
                flow.send_header(item)
            else:
                item()  # type: ignore[operator]
        if not control and sink.pump():
            if self._suspend_port is not None:
                if self._suspend():
                    return
            elif not source.ended:
                if source.queue or source.forced or source.cancel_wanted or source.mode_wanted is not None:
                    source.pump()
                if source.ending and source.idle and flow.may_send_bare() and not source.ended:
                    self._send_disconn()
            if sink.receives and sink.mode is Mode.PIPELINED and not self._suspend_answered:
                sink.show()
            if source.urgent and flow.announce is not None and source.announce_alone() and flow.may_send_bare():
                self._send_update()
        update_waits = self._refresh()
        if 2 <= flow.credit < flow.payload_credit and self._source_waits():
            if "probe" not in self._timers:
                # not both ends at the same moment, time and again: each would use up what the other one brings
                self._arm("probe", self._probe_wait * (1.5 if self.accepting else 1.0))
        elif "probe" in self._timers:
            del self._timers["probe"]
            self._probe_wait = self._settings.probe_s
        self._waiting = bool(
            update_waits
            or source.queue
            or control
            or sink.mode is _PIPELINED
            or source.forced
            or source.ending
            or source.cancel_wanted
            or source.mode_wanted is not None
            or sink.cancel_wanted
            or sink.adverts
            or flow.announce is not None
            or self._suspend_port is not None
        )

    def _credit_low(self) -> bool:
        """Whether the other end may have to be told of more credit."""
        flow = self._flow
        remote_credit = flow.last_bufs_sent - ((flow.rx_mseq - flow.last_ack_sent) & MASK)
        return remote_credit < 4 or 2 * remote_credit <= flow.posted

    def _refresh(self) -> bool:
        """Tells of new credit, if the other end is short of it and nothing else has told; True if it has to wait."""
        flow, sink = self._flow, self._sink
        remote_credit = flow.remote_credit()
        if not self._credit_low() or not flow.credit or not flow.brings_credit():
            self._timers.pop("refresh", None)
        elif flow.owes or flow.unacknowledged() >= 2:
            self._refresh_wait = self._settings.refresh_s
            if remote_credit >= 2 and flow.credit == 2 and (sink.adverts or sink.reads) and not sink.due:
                return False  # the answer to an advertisement brings it, and must not lack the credit itself
            if not flow.may_send_bare():
                return True  # for room in the send queue
            self._timers.pop("refresh", None)
            self._send_update()
        elif remote_credit <= 1 and "refresh" not in self._timers:
            self._arm("refresh", self._refresh_wait)
        return False

    def _send_update(self) -> None:
        """Data without payload: it tells of credit, or carries a flag."""
        self._flow.send_data((), 0, None, 0, False)

    def _send_disconn(self) -> None:
        self._release_wanted = True
        self._source.end()
        self._end_mseq = self._flow.send_header(DisConn(), then=self._disconn_sent)
        self._move(Stimulus.END_SENT)

    def _disconn_sent(self) -> None:
        self._release_wanted = False
        self._tell_write_closed()
        if self.state is State.LAST_ACK:
            self._arm("last_ack", self._leave_s)
        elif self.state is State.TIME_WAIT:
            self._leave()

    @property
    def _leave_s(self) -> float:
        """How long the other end may take to disconnect: over iWARP our DisConn may still be on its way meanwhile."""
        settings = self._settings
        return settings.close_s if settings.carrier is Carrier.IWARP else settings.last_ack_s

    def _leave(self) -> None:
        """Both directions have ended and this end was the first: it takes the transport connection down.

        But not what is still on its way: over iWARP a completed Send has not arrived yet. If both DisConn have crossed
        there is nothing more that would acknowledge ours, and the other end waits as well.
        """
        if self._settings.carrier is Carrier.IWARP and not ge(self._flow.peer_ack, self._end_mseq):
            self._arm("last_ack", self._leave_s)
        else:
            self._disconnect()

    def _tell_write_closed(self) -> None:
        if not self._write_told:
            self._write_told = True
            self._events.append(Event(EventKind.WRITE_CLOSED))

    # --- moving to another process (§15) ---

    def suspend(self, port: int, now: float) -> None:
        """Asks the other end to connect anew to this port; SUSPENDED tells when another process may go on."""
        self.now = now
        if self.state is not State.ESTABLISHED:
            raise Misuse("only an established connection can move")
        if self._suspend_answered:  # the other end's socket moves first
            self._suspend_again = port
            return
        if self._suspend_port is not None:
            raise Misuse("the connection moves already")
        self._suspend_port = port
        self._arm("suspend", self._settings.suspend_s)
        self._dirty = True

    def _suspend(self) -> bool:
        """SuspComm, or its answer, when nothing is in process; True if it went, and nothing may follow."""
        flow, source, sink = self._flow, self._source, self._sink
        if sink.reads or sink.withdrawing or not flow.may_send_bare():
            return False
        if source.cancel_mseq is not None and not self._suspend_answered:  # who has sent SuspComm does not answer it
            return False
        if any(then is not None for _, _, then in flow.in_flight):
            return False
        assert self._suspend_port is not None
        self._suspend_sent = True
        self._waiting = True  # for the answer, and for what is in flight
        sink.frozen = True
        if self._suspend_answered:
            flow.send_header(SuspCommAck(), then=self._reconnect)
        else:
            flow.send_header(SuspComm(service_id(self._suspend_port)))
        return True

    def _settle_moved(self) -> None:
        """The other end has confirmed and left, before what was in flight completed: it has all of it."""
        in_flight = self._flow.in_flight
        while in_flight:
            _, send, _ = in_flight.popleft()
            if send is not None:
                send.pending -= 1
                self.end_send(send)
        self._hand_over()

    def _hand_over(self) -> None:
        """SuspCommAck has come: the stream goes on elsewhere."""
        assert self.addresses is not None
        flow, source, sink = self._flow, self._source, self._sink
        source.take_all_back()
        unsent = list(source.queue)
        source.queue.clear()
        source.ending = True  # nothing can be sent here any more
        for send in unsent:
            send.registering = False
            if send.region is not None:  # it is of this device
                flow.work.append(Release(send.region))
                send.region = None
        unread = sink.drain()
        self._events.append(Event(EventKind.SUSPENDED))
        sink.end_all()  # with what they hold: the stream goes on elsewhere
        self._readable_told = True  # nor is there anything to read here
        self.suspended = Suspended(
            remote_port=self.addresses.remote_port,
            receive_size=self._resize.local,
            unread=unread,
            urgent_byte=sink.take_urgent(),
            unsent=unsent,
        )
        self._move(Stimulus.MOVED)
        self._timers.clear()
        if self._settings.carrier is Carrier.IWARP:
            self._disconnect()
        else:
            self._arm("abort", self._settings.last_ack_s)  # for the other end's disconnect

    def _reconnect(self) -> None:
        """Our SuspCommAck has gone: leave this transport connection and ask for another."""
        if not self._open:
            return  # the connection has ended meanwhile
        self._move(Stimulus.MOVES)
        self._left = False
        self._events.append(Event(EventKind.RESUMING))
        self._arm("suspend", self._settings.suspend_s)
        if self._settings.carrier is Carrier.IWARP:  # a completed Send has not arrived: the other end disconnects
            self._arm("abort", self._settings.last_ack_s)
        else:
            self._flow.work.append(Disconnect())

    def resume(self, now: float) -> None:
        """There is a new queue pair (at the end that did not move): connect it to where the other end's socket is."""
        self.now = now
        if self.state is not State.RESUMING or self.addresses is None or self._suspend_port is None:
            raise Misuse("nothing to resume")
        old = self.addresses
        self.addresses = Addresses(old.local, old.local_port, old.remote, self._suspend_port)
        self._reset_transport()
        self._moved = True
        self._move(Stimulus.RECONNECT)
        self._want_buffers()

    def take_over(self, suspended: Suspended) -> None:
        """Goes on with what another process has handed over; to be called before `accept`."""
        for send in suspended.unsent:
            send.registering = False  # the answer would come to the connection that has asked
            self._source.enqueue(send)
        self._sink.take_over(suspended)
        self._resize.local = self._resize.target = suspended.receive_size
        self.size_changed(remote=False)

    def _reset_transport(self) -> None:
        self._sink.keep()
        self._source.take_all_back()
        self._source.ended = False  # a DisConn is sent again: the new connection knows nothing of it
        self._flow.reset()
        self._flow.posted = 0
        self._source.reset()
        self._sink.reset()
        self._resize.reset()
        self.size_changed(remote=False)
        self._control.clear()
        self._timers.clear()
        self._suspend_port = None
        self._suspend_sent = self._suspend_answered = self._suspend_confirmed = False
        self.accepting = False

    # --- what the halves ask for ---

    def tell_urgent(self) -> None:
        """Tells of an urgent byte that was not announced."""
        self._events.append(Event(EventKind.URGENT))

    def control(self, action: object) -> None:
        """Queues a message without payload: a header, or a callable that sends it."""
        self._control.append(action)
        self._dirty = True

    def withdraw_control(self, action: object) -> bool:
        """Takes a queued message back."""
        try:
            self._control.remove(action)
        except ValueError:
            return False
        return True

    def end_send(self, send: StreamSend) -> None:
        """Tells the user if nothing of it is outstanding."""
        if send.done or send.pending:
            return
        if send.offset < send.length and not (send.cancelled and send not in self._source.queue):
            return
        self._end_request(send)

    def end_receive(self, receive: StreamReceive) -> None:
        """Tells the user."""
        if receive.region is not None or receive.done:
            self._end_request(receive)
            return
        receive.done = True
        self._events.append(receive)

    def _end_request(self, request: StreamSend | StreamReceive) -> None:
        if request.done:
            return
        request.done = True
        if self._transport_done and isinstance(request, StreamSend):
            request.error = self.error
        if request.region is not None:
            self._flow.work.append(Release(request.region))
            request.region = None
        self._events.append(request)

    def repost(self, buffer: Receive) -> None:
        """A private buffer that is free again."""
        if self._down or not self._open:
            self._flow.work.append(ReturnBuffer(buffer))
        elif self._resizing or len(buffer.scatter[0]) != self._resize.target:
            self._resize.repost(buffer)
        else:
            self._flow.post(buffer)

    def adverts_left(self) -> int:
        """Advertisements that may still be sent."""
        bound = min(self.peer_max_adverts, self._strategy.adverts_in_flight)
        return max(0, bound - len(self._source.adverts) - len(self._sink.shown))

    def adverts_of_peer(self) -> int:
        """Advertisements of the other end that are outstanding."""
        return len(self._source.sinks) + len(self._sink.adverts) + self._sink.untold

    def holds_advert(self) -> bool:
        """Whether a SrcAvail of the other end waits to be read."""
        return bool(self._sink.adverts)

    def waits_for_reader(self) -> bool:
        """Whether a SrcAvail of ours waits to be read."""
        return bool(self._source.adverts)

    def transaction(self) -> tuple[SinkAvail, StreamReceive] | None:
        """A SinkAvail that may ride on the next payload."""
        sink = self._sink
        if sink.mode is not Mode.PIPELINED or not sink.receives or not self._strategy.transactions:
            return None
        receive = sink.next_shown()
        return None if receive is None else (sink.offer(receive), receive)

    def advertised(self, receive: StreamReceive) -> None:
        """It went out."""
        self._sink.advertised(receive)

    def advert_timer(self, what: str | None) -> None:
        """Sets the clock for an answer to our advertisements."""
        self._timers.pop("answer", None)
        self._timers.pop("cancel", None)
        if what == "answer":
            self._arm("answer", self._settings.advert_answer_s)
        elif what == "cancel":
            self._arm("cancel", self._settings.cancel_answer_s)

    def mode_changed(self) -> None:
        """Tells the user."""
        self._source.transact = self._sink.mode is _PIPELINED and self._strategy.transactions
        self._events.append(Event(EventKind.MODE_CHANGED))

    def size_changed(self, *, remote: bool) -> None:
        """Private buffers have another size."""
        if remote:
            self._source.payload_max = min(self._flow.remote_size, self._settings.message_max) - 16
        else:
            self._resizing = self._resize.busy

    def resized(self) -> None:
        """Tells the user."""
        self._events.append(Event(EventKind.RESIZED))
