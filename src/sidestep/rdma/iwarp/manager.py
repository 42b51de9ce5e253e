"""The connection manager of the software RNIC: MPA's start-up on TCP connections, as rdma_cm does it for iWARP.

The low 16 bits of a service id are a TCP port, as they are in the service ids of rdma_cm's TCP port space and of SDP;
the others are not on the wire, so services of one port are told apart by matches only. Port 0 is any that is free.

    here                          on the wire                                 in `cm`
    begin_connect                 TCP handshake
    `_Asking`: Initiator          Request -->                                 handler(request)
                                  <-- Reply                                   request.accept
    Established                   RTR -->                                     Established

What MPA cannot say: a rejection has private data and no reason, so it is told as REJECT_CONSUMER. Who gives up before
the connection is made resets it, which the other end is told as REJECT_TIMEOUT; who does not like the Reply sends a
Terminate.

An end that did not ask for peer-to-peer sends no RTR; then the connection is established at once here, and what is
posted waits for the other end's first message (RFC 5044 7.1.2, rule 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from errno import ECONNREFUSED, errorcode
from functools import partial
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import Misuse, Unavailable
from sidestep.rdma.cm import (
    REJECT_TIMEOUT,
    CmState,
    Connection,
    ConnectionManager,
    ConnectionRequest,
    Disconnected,
    Established,
    PrivateDataMatch,
    Rejected,
    TimewaitExit,
    Unreachable,
)
from sidestep.rdma.iwarp.qp import IwarpQueuePair
from sidestep.rdma.iwarp.start_frame import Rtr
from sidestep.rdma.iwarp.start_terms import Agreed, Asked, Cause, Failed, ReadDepths, Refused
from sidestep.rdma.iwarp.startup import Initiator, Responder
from sidestep.rdma.iwarp.stream import Stream
from sidestep.rdma.iwarp.tcp import Tcp, TcpListener, begin_connect, check_address
from sidestep.rdma.soft.listeners import Listeners, SoftListener
from sidestep.rdma.verbs import QpState
from sidestep.rdma.work import REJECT_CONSUMER, REJECT_INVALID_SERVICE_ID

if TYPE_CHECKING:
    from sidestep.errors import InternalError
    from sidestep.rdma.cm import ConnectionEvent, ConnectionHandler, RequestHandler
    from sidestep.rdma.iwarp.device import IwarpDevice
    from sidestep.rdma.soft.loop import Timer
    from sidestep.rdma.verbs import QueuePair

_PORT: Final = 0xFFFF
_FRAMES_MAX: Final = 1024  # bytes of one look: a frame of the start-up has 532 at most
_TCP_BACKLOG: Final = 256  # connections that the kernel holds for us


class IwarpConnection(Connection):
    """One side of a connection."""

    __slots__ = ("_closed", "_handler", "_manager", "_pending", "_private_data", "qp", "remote_address", "state")

    qp: IwarpQueuePair

    def __init__(
        self, manager: IwarpManager, qp: IwarpQueuePair, remote_address: str, handler: ConnectionHandler, state: CmState
    ) -> None:
        self._manager = manager
        self.qp = qp
        self.remote_address = remote_address
        self._handler = handler
        self._pending: _Asking | None = None  # a start-up that goes on
        self._private_data = b""
        self.state = state
        qp.connection = self
        manager.connections.add(self)

    # --- the user's side ---

    def disconnect(self) -> None:
        """Ends the stream, or gives the attempt up."""
        if self.state in (CmState.REQUEST_SENT, CmState.REPLY_SENT):
            if self._pending is not None:
                self._pending.give_up()
            if self.qp.stream is not None:
                self.qp.stream.abort()
            self.end(None)
        elif self.state is CmState.ESTABLISHED:
            self.state = CmState.DISCONNECT_SENT
            self.qp.end()
            assert self.qp.stream is not None
            self.qp.stream.leave()

    # --- the manager's side ---

    def asks(self, pending: _Asking) -> None:
        """Its start-up."""
        self._pending = pending

    def established(self, private_data: bytes = b"") -> None:
        """Both ends may send."""
        self._manager.device.events.add("connection_made", "passive" if self._pending is None else "active")
        self._pending = None
        self.state = CmState.ESTABLISHED
        self.qp.ready_to_send()
        self._tell(Established(private_data))

    def end(self, event: ConnectionEvent | None) -> None:
        """It never was, or is no more: nothing follows."""
        self._pending = None
        self.qp.end()
        self.state = CmState.CLOSED
        self._manager.connections.discard(self)
        if event is not None:
            self._tell(event)

    # --- the queue pair's side ---

    def heard(self) -> None:
        """The first message is here: what an RTU is elsewhere."""
        if self.state is CmState.REPLY_SENT:
            self.established()

    def over(self, *, by_remote: bool, confirmed: bool) -> None:
        """The stream has ended."""
        if self.state is CmState.REPLY_SENT:
            self._manager.device.events.add("connection_failed", "refused_late" if confirmed else "reset")
            # An orderly end says that the other end's user did not like the Reply; a reset, that it did not wait.
            self.end(Rejected(REJECT_CONSUMER if confirmed else REJECT_TIMEOUT))
        elif self.state in (CmState.ESTABLISHED, CmState.DISCONNECT_SENT):
            self._tell(Disconnected(by_remote=by_remote, confirmed=confirmed))
            # TCP keeps its own TIME-WAIT, and the numbers of queue pairs are not on the wire.
            self.end(TimewaitExit())
        elif self.state is CmState.REQUEST_SENT:
            if self._pending is not None:
                self._pending.give_up()
            self.end(None)

    def _tell(self, event: ConnectionEvent) -> None:
        self._manager.device.notices.append(partial(self._handler, self, event))


class _Asking:
    """The start-up at the end that asks."""

    def __init__(
        self,
        manager: IwarpManager,
        connection: IwarpConnection,
        private_data: bytes,
        check_reply: Callable[[bytes], bool] | None,
    ) -> None:
        self._manager = manager
        self._loop = manager.device.loop
        self._connection = connection
        self._private_data = private_data
        self._check_reply = check_reply
        self._machine: Initiator | None = None
        self._timer: Timer | None = None
        self._tcp: Tcp | None = None
        self._unsent = b""
        connection.asks(self)

    def connect(self, address: str, port: int) -> None:
        """Begins TCP's handshake."""
        settings = self._manager.device.settings
        own = self._manager.device.address
        self._tcp, error = begin_connect(self._loop, own, (address, port), self, settings.silence_s)
        if error is not None:
            self._loop.notices.append(partial(self._tcp.run, partial(self._failed_to_connect, error)))
        else:
            self._timer = self._loop.call_later(settings.connect_s, partial(self._tcp.run, self._unreachable))

    def give_up(self) -> None:
        """Nobody wants it any more."""
        self._stop_timer()
        if self._tcp is not None:
            self._tcp.abort()

    def on_writable(self) -> None:
        """TCP is connected, or is not; or there is room for the rest of the Request."""
        assert self._tcp is not None
        if self._machine is None:
            self._stop_timer()
            if (error := self._tcp.error()) is not None:
                self._failed_to_connect(error)
                return
            self._tcp.opened(self._manager.device.taps, active=True)
            device = self._manager.device
            wanted = replace(device.settings.startup, depths=depths_of(self._connection.qp))
            self._machine = Initiator(wanted, self._private_data, now=self._loop.now)
            self._arm()
        self._send()

    def on_readable(self) -> None:
        """The Reply, or some of it."""
        assert self._tcp is not None
        assert self._machine is not None
        try:
            piece = self._tcp.read(_FRAMES_MAX)
        except OSError:
            self._machine.handle_closed(lost=True)
        else:
            if piece is None:
                return
            if piece:
                self._machine.handle_bytes(piece)
            else:
                self._machine.handle_closed()
        self._advance()

    def _advance(self) -> None:
        assert self._machine is not None
        while (event := self._machine.poll_event()) is not None:
            if isinstance(event, Agreed):
                self._agreed(event)
                return
            self._send()
            self._leave()
            if isinstance(event, Refused):
                self._manager.device.events.add("connection_refused", "user")
                self._connection.end(Rejected(REJECT_CONSUMER, event.private_data))
            elif isinstance(event, Failed):
                self._manager.device.events.add("connection_failed", event.cause.name.lower())
                silent = event.cause in (Cause.SILENT, Cause.ENDED)
                self._connection.end(Unreachable() if silent else Rejected(REJECT_CONSUMER))
            return

    def _agreed(self, agreed: Agreed) -> None:
        assert self._tcp is not None
        assert self._machine is not None
        wanted = self._check_reply is None or self._check_reply(agreed.private_data)
        if self._connection.state is not CmState.REQUEST_SENT:
            return  # ended by the user when he was asked
        if not wanted:
            self._machine.abandon("the user does not want the connection that the Reply offers")
            self._send()
            self._leave()
            self._manager.device.events.add("connection_failed", "reply_not_wanted")
            self._connection.end(Rejected(REJECT_CONSUMER))
            return
        self._stop_timer()
        device, qp = self._manager.device, self._connection.qp
        stream = Stream(self._tcp, qp, agreed, self._loop, device.settings)
        qp.attach(stream, ready=True)
        stream.sender.held = False
        if agreed.rtr:
            stream.sender.ready_to_receive(read=agreed.rtr is Rtr.READ)
        self._connection.established(agreed.private_data)
        stream.begin(agreed.leftover)
        stream.pump()
        stream.nudge_after(device.settings.nudges_s)

    def _send(self) -> None:
        assert self._machine is not None
        assert self._tcp is not None
        self._unsent += self._machine.poll_send()
        try:
            self._unsent = self._unsent[self._tcp.write(self._unsent) :] if self._unsent else b""
        except OSError:
            self._unsent = b""  # reading tells what became of the connection
        self._tcp.watch(write=bool(self._unsent))

    def _leave(self) -> None:
        """Orderly, if there is a connection: what was sent is to arrive."""
        self._stop_timer()
        assert self._tcp is not None
        self._tcp.end_writing()
        self._tcp.close()

    def _arm(self) -> None:
        assert self._machine is not None
        assert self._tcp is not None
        deadline = self._machine.next_deadline()
        if deadline is not None:
            self._timer = self._loop.call_later(deadline - self._loop.now, partial(self._tcp.run, self._timeout))

    def _timeout(self) -> None:
        assert self._machine is not None
        self._timer = None
        self._machine.handle_timeout(now=self._loop.now)
        self._advance()

    def on_broken(self, why: InternalError) -> None:
        """A fault of this end's own."""
        del why
        self._unreachable()

    def _failed_to_connect(self, error: OSError) -> None:
        if self._connection.state is not CmState.REQUEST_SENT:
            return
        self.give_up()
        refused = error.errno == ECONNREFUSED
        name = errorcode.get(error.errno or 0, "unknown")
        self._manager.device.events.add("connection_refused" if refused else "connection_failed", name)
        self._connection.end(Rejected(REJECT_INVALID_SERVICE_ID) if refused else Unreachable())

    def _unreachable(self) -> None:
        self.give_up()
        self._manager.device.events.add("connection_failed", "ETIMEDOUT")
        self._connection.end(Unreachable())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class IwarpRequest(ConnectionRequest):
    """The start-up at the end that is asked: from TCP's connection to the answer."""

    __slots__ = (
        "_answered",
        "_asked",
        "_listener",
        "_loop",
        "_machine",
        "_manager",
        "_port",
        "_tcp",
        "_timer",
        "_unsent",
        "_withdrawn",
        "initiator_depth",
        "private_data",
        "remote_address",
        "responder_resources",
        "service_id",
    )

    def __init__(self, manager: IwarpManager, tcp: Tcp, port: int) -> None:
        self._manager = manager
        self._loop = manager.device.loop
        self._tcp = tcp
        self._port = port
        self._machine = Responder(manager.device.settings.startup, now=self._loop.now)
        self._asked: Asked | None = None
        self._listener: SoftListener | None = None
        self._answered = False
        self._withdrawn: int | None = None  # the reason why an acceptance comes to nothing
        self._timer: Timer | None = None
        self._unsent = b""
        self.remote_address = tcp.remote_address
        self.service_id = 0
        self.private_data = b""
        self.responder_resources = self.initiator_depth = 0
        tcp.handler = self
        tcp.opened(manager.device.taps, active=False)
        tcp.watch()
        self._arm()

    # --- the user's side ---

    def accept(self, qp: QueuePair, private_data: bytes, handler: ConnectionHandler) -> IwarpConnection:
        """Sends a Reply that accepts."""
        manager = self._manager
        manager.check_private_data(private_data, manager.device.attributes.reply_private_data_max)
        own = manager.check_qp(qp)
        self._answer()
        connection = IwarpConnection(manager, own, self.remote_address, handler, CmState.REPLY_SENT)
        if self._withdrawn is not None:
            connection.end(Rejected(self._withdrawn))
            return connection
        self._machine.accept(private_data, depths=depths_of(own), now=self._loop.now)
        event = self._machine.poll_event()
        if not isinstance(event, Agreed):
            self._send()
            self._leave()
            connection.end(Rejected(REJECT_CONSUMER))
            return connection
        self._stop_timer()
        self._send()
        stream = Stream(self._tcp, own, event, self._loop, manager.device.settings)
        own.attach(stream, ready=False)
        if self._unsent:  # a fresh connection has room for a frame; this one is broken
            own.connection_lost("the Reply could not be sent")
            stream.abort()
            return connection
        deadline = self._machine.next_deadline()
        stream.begin(b"", first_s=None if deadline is None else deadline - self._loop.now)
        if not event.peer_to_peer:
            connection.established()
        return connection

    def reject(self, reason: int = REJECT_CONSUMER, private_data: bytes = b"") -> None:
        """Sends a Reply that rejects; the reason stays here."""
        del reason
        self._manager.check_private_data(private_data, self._manager.device.attributes.reject_private_data_max)
        self._answer()
        if self._withdrawn is None:
            self._machine.reject(private_data)
            self._manager.device.events.add("request_rejected", "user")
            self._send()
            self._leave()

    # --- the manager's side ---

    def deliver(self) -> None:
        """Hands it to the listener."""
        if self._answered:
            return
        assert self._listener is not None
        if self._listener.closed:
            self.reject()
        else:
            self._listener.handler(self)

    def drop(self) -> None:
        """Ends it without an answer."""
        self._withdraw(REJECT_TIMEOUT)
        self._tcp.abort()

    # --- the socket's side ---

    def on_readable(self) -> None:
        """The Request, or some of it; or the end."""
        try:
            piece = self._tcp.read(_FRAMES_MAX)
        except OSError:
            self._machine.handle_closed(lost=True)
        else:
            if piece is None:
                return
            if piece:
                self._machine.handle_bytes(piece, now=self._loop.now)
            else:
                self._machine.handle_closed()
        self._advance()

    def on_writable(self) -> None:
        """There is room for the rest of a Reply."""
        self._send()

    def on_broken(self, why: InternalError) -> None:
        """A fault of this end's own."""
        del why
        self.drop()

    def _advance(self) -> None:
        while (event := self._machine.poll_event()) is not None:
            if isinstance(event, Asked):
                self._was_asked(event)
            elif isinstance(event, Failed):
                self._manager.device.events.add("connection_failed", event.cause.name.lower())
                self._send()
                self._withdraw(REJECT_TIMEOUT)
                self._leave()

    def _was_asked(self, asked: Asked) -> None:
        self._asked = asked
        self._manager.half_open.pop(self, None)
        self._arm()
        self.private_data = asked.private_data
        self.initiator_depth = asked.remote_ord or 0
        self.responder_resources = asked.remote_ird or 0
        listener = self._manager.find(self._port, asked.private_data)
        if isinstance(listener, int):
            self._answered = True
            cause = "no_listener" if listener == REJECT_INVALID_SERVICE_ID else "backlog_or_match"
            self._manager.device.events.add("request_rejected", cause)
            self._machine.reject()
            self._send()
            self._leave()
            return
        self.service_id = listener.service_id
        self._listener = listener
        self._manager.requests.add(self)
        listener.count(1)
        self._manager.device.notices.append(self.deliver)

    def _answer(self) -> None:
        if self._answered:
            raise Misuse("the request was answered already")
        self._answered = True
        self._leave_backlog()

    def _withdraw(self, reason: int) -> None:
        """Who asked has given up; the request can still be answered, to no effect."""
        self._stop_timer()
        self._manager.half_open.pop(self, None)
        if self._withdrawn is None:
            self._withdrawn = reason
            if not self._answered:
                self._leave_backlog()

    def _leave_backlog(self) -> None:
        if self in self._manager.requests:
            self._manager.requests.discard(self)
            assert self._listener is not None
            self._listener.count(-1)

    def _send(self) -> None:
        self._unsent += self._machine.poll_send()
        try:
            self._unsent = self._unsent[self._tcp.write(self._unsent) :] if self._unsent else b""
        except OSError:
            self._unsent = b""
        self._tcp.watch(write=bool(self._unsent))

    def _leave(self) -> None:
        self._stop_timer()
        self._manager.half_open.pop(self, None)
        self._tcp.end_writing()
        self._tcp.close()

    def _arm(self) -> None:
        self._stop_timer()
        deadline = self._machine.next_deadline()
        if deadline is not None:
            self._timer = self._loop.call_later(deadline - self._loop.now, partial(self._tcp.run, self._timeout))

    def _timeout(self) -> None:
        self._machine.handle_timeout(now=self._loop.now)
        self._advance()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class IwarpManager(ConnectionManager):
    """The connection manager of one device."""

    __slots__ = ("_listeners", "_sockets", "connections", "device", "half_open", "requests")

    def __init__(self, device: IwarpDevice) -> None:
        self.device = device
        self._listeners = Listeners()
        self._sockets: dict[int, TcpListener] = {}  # by port
        self.connections: set[IwarpConnection] = set()
        self.half_open: dict[IwarpRequest, None] = {}  # without a Request, the oldest first
        self.requests: set[IwarpRequest] = set()  # with one, not answered

    # --- the user's side ---

    def listen(
        self,
        service_id: int,
        handler: RequestHandler,
        *,
        match: PrivateDataMatch | None = None,
        backlog: int = limits.RDMA_BACKLOG_DEFAULT,
    ) -> SoftListener:
        """Takes requests; the listener's service id says which port was found if 0 was asked for.

        Raises:
            Misuse: Somebody has it already, here.
            Unavailable: Another program has the port, or the address is not of this machine.
        """
        self.device.check_open()
        self._listeners.check(service_id, match, backlog)
        port = service_id & _PORT
        if port == 0 or port not in self._sockets:
            socket = TcpListener(
                self.device.loop, (self.device.address, port), _TCP_BACKLOG, lambda tcp: self._taken(tcp, socket.port),
                self.device.settings.silence_s,
            )  # fmt: skip
            self._sockets[socket.port] = socket
            service_id = service_id & ~_PORT | socket.port
        listener = SoftListener(service_id, handler, match, backlog, self._closed)
        self._listeners.add(listener)
        return listener

    def connect(
        self,
        address: str,
        service_id: int,
        qp: QueuePair,
        private_data: bytes,
        handler: ConnectionHandler,
        *,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> IwarpConnection:
        """Begins a connection to the port of the service id."""
        self.device.check_open()
        self.check_private_data(private_data, self.device.attributes.request_private_data_max)
        port = service_id & _PORT
        if not port:
            raise Misuse(f"service id {service_id:#x} names no port", remedy="its low 16 bits are the TCP port")
        check_address(address)
        connection = IwarpConnection(self, self.check_qp(qp), address, handler, CmState.REQUEST_SENT)
        try:
            _Asking(self, connection, private_data, check_reply).connect(address, port)
        except Unavailable:
            self.device.events.add("connection_failed", "local_address")
            connection.end(Unreachable())
        return connection

    def close(self) -> None:
        """Ends everything, without waiting for anybody."""
        for listener in self._listeners:
            listener.close()
        for request in [*self.half_open, *self.requests]:
            request.drop()
        for connection in list(self.connections):
            connection.disconnect()
        for stream in list(self.device.streams):
            stream.abort()

    @property
    def listeners_len(self) -> int:
        """Listeners that take requests."""
        return len(list(self._listeners))

    @property
    def ports(self) -> list[int]:
        """Those that somebody listens on."""
        return sorted(self._sockets)

    # --- for connections and requests ---

    def find(self, port: int, private_data: bytes) -> SoftListener | int:
        """Whom a request is for, whatever the high bits of his service id are."""
        reason = REJECT_INVALID_SERVICE_ID
        for service_id in {each.service_id: None for each in self._listeners if each.service_id & _PORT == port}:
            found = self._listeners.find(service_id, private_data)
            if isinstance(found, SoftListener):
                return found
            reason = found
        return reason

    def check_qp(self, qp: QueuePair) -> IwarpQueuePair:
        """A queue pair that can be connected.

        Raises:
            Misuse: Of another device, or not in INIT.
        """
        if not isinstance(qp, IwarpQueuePair) or qp.device is not self.device:
            raise Misuse("a queue pair of another device")
        if qp.state is not QpState.INIT or qp.connection is not None:
            raise Misuse(f"a queue pair in {qp.state.name} that was used before cannot be connected")
        return qp

    def check_private_data(self, private_data: bytes, most: int) -> None:
        """Raises Misuse if there is too much."""
        if len(private_data) > most:
            raise Misuse(f"{len(private_data)} bytes of private data; {most} have room")

    def _taken(self, tcp: Tcp, port: int) -> None:
        """A TCP connection came. Of too many that say nothing the oldest goes: it had the most time."""
        if len(self.half_open) >= self.device.settings.half_open_max:
            self.device.events.add("half_open_dropped")
            next(iter(self.half_open)).drop()
        self.half_open[IwarpRequest(self, tcp, port)] = None

    def _closed(self, listener: SoftListener) -> None:
        self._listeners.remove(listener)
        port = listener.service_id & _PORT
        if not any(each.service_id & _PORT == port for each in self._listeners):
            self._sockets.pop(port).close()


def depths_of(qp: IwarpQueuePair) -> ReadDepths:
    """RDMA Reads of a queue pair, each way."""
    wanted = qp.capabilities
    resources = wanted.responder_resources
    return ReadDepths(ird=resources, ird_max=resources, ord=wanted.initiator_depth)
