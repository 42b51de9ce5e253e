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

from sidestep.errors import Misuse, Unavailable
from sidestep.rdma.cm import (
    REJECT_CONSUMER,
    REJECT_INVALID_SERVICE_ID,
    REJECT_TIMEOUT,
    CmState,
    Connection,
    Disconnected,
    Established,
    Rejected,
    TimewaitExit,
    Unreachable,
)
from sidestep.rdma.iwarp.qp import IwarpQueuePair
from sidestep.rdma.iwarp.startup.connection import Starting
from sidestep.rdma.iwarp.startup.frame import Rtr
from sidestep.rdma.iwarp.startup.negotiation import Initiator, Responder
from sidestep.rdma.iwarp.startup.terms import Agreed, Asked, Failed, MpaCause, ReadDepths, Refused
from sidestep.rdma.iwarp.stream import RdmapStream
from sidestep.rdma.iwarp.tcp import Tcp, TcpListener, begin_connect, check_address
from sidestep.rdma.soft.manager import SoftListener, SoftManager, SoftRequest

if TYPE_CHECKING:
    from sidestep.errors import InternalError
    from sidestep.rdma.cm import ConnectionEvent, ConnectionHandler, Transport
    from sidestep.rdma.iwarp.device import IwarpDevice
    from sidestep.rdma.verbs import QueuePair

_PORT: Final = 0xFFFF
_TCP_BACKLOG: Final = 256  # connections that the kernel holds for us


class IwarpConnection(Connection):
    """One side of a connection."""

    qp: IwarpQueuePair

    def __init__(
        self, manager: IwarpManager, qp: IwarpQueuePair, remote_address: str, handler: ConnectionHandler, state: CmState
    ) -> None:
        self._manager = manager
        self.qp = qp
        self.remote_address = remote_address
        self.transport: Transport | None = None
        self._handler = handler
        self._pending: _Asking | None = None  # a start-up that goes on
        self.state = state
        qp.connection = self
        manager.connections.add(self)

    # --- the user's side ---

    def disconnect(self) -> None:
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
        self._pending = pending

    def established(self, private_data: bytes = b"") -> None:
        self._manager.count("connection_made", "passive" if self._pending is None else "active")
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
        if self.state is CmState.REPLY_SENT:
            self._manager.count("connection_failed", "refused_late" if confirmed else "reset")
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


class _Asking(Starting):
    """The start-up at the end that asks."""

    _machine: Initiator  # from when TCP is connected

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
        self._begun = False  # TCP is connected
        self._timer = None
        self._unsent = b""
        connection.asks(self)

    def connect(self, address: str, port: int) -> None:
        settings = self._manager.device.settings
        own = self._manager.device.address
        self._tcp, error = begin_connect(self._loop, own, (address, port), self, settings.silence_s)
        if error is not None:
            self._loop.notices.append(partial(self._tcp.run, partial(self._failed_to_connect, error)))
        else:
            self._timer = self._loop.call_later(settings.connect_s, partial(self._tcp.run, self._unreachable))

    def give_up(self) -> None:
        self._stop_timer()
        self._tcp.abort()

    def on_writable(self) -> None:
        """TCP is connected, or is not; or there is room for the rest of the Request."""
        if not self._begun:
            self._stop_timer()
            if (error := self._tcp.error()) is not None:
                self._failed_to_connect(error)
                return
            self._tcp.opened(self._manager.device.taps, active=True)
            device = self._manager.device
            wanted = replace(device.settings.startup, depths=depths_of(self._connection.qp))
            self._machine = Initiator(wanted, self._private_data, now=self._loop.now)
            self._begun = True
            self._arm()
        self._send()

    def _handle_bytes(self, piece: bytes) -> None:
        self._machine.handle_bytes(piece)

    def _advance(self) -> None:
        while (event := self._machine.poll_event()) is not None:
            if isinstance(event, Agreed):
                self._agreed(event)
                return
            self._leave()
            if isinstance(event, Refused):
                self._manager.count("connection_refused", "user")
                self._connection.end(Rejected(REJECT_CONSUMER, event.private_data))
            elif isinstance(event, Failed):
                self._manager.count("connection_failed", event.cause.name.lower())
                silent = event.cause in (MpaCause.SILENT, MpaCause.ENDED)
                self._connection.end(Unreachable() if silent else Rejected(REJECT_CONSUMER))
            return

    def _agreed(self, agreed: Agreed) -> None:
        wanted = self._check_reply is None or self._check_reply(agreed.private_data)
        if self._connection.state is not CmState.REQUEST_SENT:
            return  # ended by the user when he was asked
        if not wanted:
            self._machine.abandon("the user does not want the connection that the Reply offers")
            self._leave()
            self._manager.count("connection_failed", "reply_not_wanted")
            self._connection.end(Rejected(REJECT_CONSUMER))
            return
        self._stop_timer()
        self._connection.transport = self._tcp.wire.ends
        device, qp = self._manager.device, self._connection.qp
        stream = RdmapStream(self._tcp, qp, agreed, self._loop, device.settings)
        qp.attach(stream, ready=True)
        stream.sender.held = False
        if agreed.rtr:
            stream.sender.ready_to_receive(read=agreed.rtr is Rtr.READ)
        self._connection.established(agreed.private_data)
        stream.begin(agreed.leftover)
        stream.pump()
        stream.nudge_after(device.settings.nudges_s)

    def on_broken(self, why: InternalError) -> None:
        del why
        self._unreachable()

    def _failed_to_connect(self, error: OSError) -> None:
        if self._connection.state is not CmState.REQUEST_SENT:
            return
        self.give_up()
        refused = error.errno == ECONNREFUSED
        name = errorcode.get(error.errno or 0, "unknown")
        self._manager.count("connection_refused" if refused else "connection_failed", name)
        self._connection.end(Rejected(REJECT_INVALID_SERVICE_ID) if refused else Unreachable())

    def _unreachable(self) -> None:
        self.give_up()
        self._manager.count("connection_failed", "ETIMEDOUT")
        self._connection.end(Unreachable())


class IwarpRequest(Starting, SoftRequest):
    """The start-up at the end that is asked: from TCP's connection to the answer."""

    _machine: Responder

    def __init__(self, manager: IwarpManager, tcp: Tcp, port: int) -> None:
        super().__init__(tcp.remote_address)
        self._manager = manager
        self._loop = manager.device.loop
        self._tcp = tcp
        self._port = port
        self._machine = Responder(manager.device.settings.startup, now=self._loop.now)
        self._timer = None
        self._unsent = b""
        tcp.handler = self
        tcp.opened(manager.device.taps, active=False)
        self.transport = tcp.wire.ends
        tcp.watch()
        self._arm()

    # --- the user's side ---

    def accept(self, qp: QueuePair, private_data: bytes, handler: ConnectionHandler) -> IwarpConnection:
        manager = self._manager
        manager.check_private_data(private_data, manager.device.attributes.reply_private_data_max)
        own = manager.check_qp(qp)
        self._answer()
        connection = IwarpConnection(manager, own, self.remote_address, handler, CmState.REPLY_SENT)
        if self.withdrawn:
            connection.end(Rejected(REJECT_TIMEOUT))
            return connection
        self._machine.accept(private_data, depths=depths_of(own), now=self._loop.now)
        event = self._machine.poll_event()
        if not isinstance(event, Agreed):
            self._leave()
            connection.end(Rejected(REJECT_CONSUMER))
            return connection
        self._stop_timer()
        self._send()
        connection.transport = self.transport
        stream = RdmapStream(self._tcp, own, event, self._loop, manager.device.settings)
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
        if not self.withdrawn:
            self._machine.reject(private_data)
            self._manager.count("request_rejected", "user")
            self._leave()

    # --- the manager's side ---

    def forget(self) -> None:
        self._manager.requests.discard(self)

    def withdraw(self) -> None:
        self._stop_timer()
        self._manager.half_open.pop(self, None)
        super().withdraw()

    def drop(self) -> None:
        """Ends it without an answer."""
        self.withdraw()
        self._tcp.abort()

    # --- the socket's side ---

    def on_writable(self) -> None:
        self._send()

    def on_broken(self, why: InternalError) -> None:
        del why
        self.drop()

    def _handle_bytes(self, piece: bytes) -> None:
        self._machine.handle_bytes(piece, now=self._loop.now)

    def _advance(self) -> None:
        while (event := self._machine.poll_event()) is not None:
            if isinstance(event, Asked):
                self._was_asked(event)
            elif isinstance(event, Failed):
                self._manager.count("connection_failed", event.cause.name.lower())
                self.withdraw()
                self._leave()

    def _was_asked(self, asked: Asked) -> None:
        self._manager.half_open.pop(self, None)
        self._arm()
        self.private_data = asked.private_data
        self.initiator_depth = asked.remote_ord or 0
        self.responder_resources = asked.remote_ird or 0
        listener = self._manager.find(self._port, asked.private_data)
        if isinstance(listener, int):
            self._answered = True
            cause = "no_listener" if listener == REJECT_INVALID_SERVICE_ID else "backlog_or_match"
            self._manager.count("request_rejected", cause)
            self._machine.reject()
            self._leave()
            return
        self.service_id = listener.service_id
        self._manager.requests.add(self)
        self._enter_backlog(listener)
        self._manager.device.notices.append(self.deliver)

    def _leave(self) -> None:
        self._manager.half_open.pop(self, None)
        super()._leave()


class IwarpManager(SoftManager[IwarpQueuePair]):
    """The connection manager of one device."""

    device: IwarpDevice

    def __init__(self, device: IwarpDevice) -> None:
        super().__init__(device)
        self._sockets: dict[int, TcpListener] = {}  # by port
        self.connections: set[IwarpConnection] = set()
        self.half_open: dict[IwarpRequest, None] = {}  # without a Request, the oldest first
        self.requests: set[IwarpRequest] = set()  # with one, not answered
        self.count = device.events.add

    # --- the user's side ---

    def open_service(self, service_id: int) -> int:
        """Listens on the port; for port 0 on any that is free.

        Raises:
            Misuse: The device is closed.
            Unavailable: Another program has the port, or the address is not of this machine.
        """
        self.device.check_open()
        port = service_id & _PORT
        if port in self._sockets:
            return service_id
        socket = TcpListener(
            self.device.loop, (self.device.address, port), _TCP_BACKLOG, lambda tcp: self._taken(tcp, socket.port),
            self.device.settings.silence_s,
        )  # fmt: skip
        self._sockets[socket.port] = socket
        return service_id & ~_PORT | socket.port

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
            self.count("connection_failed", "local_address")
            connection.end(Unreachable())
        return connection

    def close(self) -> None:
        """Ends everything, without waiting for anybody."""
        for listener in list(self.listeners):
            listener.close()
        for request in [*self.half_open, *self.requests]:
            request.drop()
        for connection in list(self.connections):
            connection.disconnect()
        for stream in list(self.device.streams):
            stream.abort()

    @property
    def ports(self) -> list[int]:
        return sorted(self._sockets)

    # --- for connections and requests ---

    def find(self, port: int, private_data: bytes) -> SoftListener | int:
        """Whom a request is for, whatever the high bits of his service id are."""
        reason = REJECT_INVALID_SERVICE_ID
        for service_id in {each.service_id: None for each in self.listeners if each.service_id & _PORT == port}:
            found = self.find_listener(service_id, private_data)
            if isinstance(found, SoftListener):
                return found
            reason = found
        return reason

    def _taken(self, tcp: Tcp, port: int) -> None:
        """A TCP connection came. Of too many that say nothing the oldest goes: it had the most time."""
        if len(self.half_open) >= self.device.settings.half_open_max:
            self.count("half_open_dropped")
            next(iter(self.half_open)).drop()
        self.half_open[IwarpRequest(self, tcp, port)] = None

    def listener_closed(self, listener: SoftListener) -> None:
        super().listener_closed(listener)
        port = listener.service_id & _PORT
        if not any(each.service_id & _PORT == port for each in self.listeners):
            self._sockets.pop(port).close()


def depths_of(qp: IwarpQueuePair) -> ReadDepths:
    wanted = qp.capabilities
    resources = wanted.responder_resources
    return ReadDepths(ird=resources, ird_max=resources, ord=wanted.initiator_depth)
