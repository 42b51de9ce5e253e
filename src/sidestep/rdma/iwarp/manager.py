"""The connection manager of the software RNIC: MPA's start-up on TCP connections, as rdma_cm does it for iWARP.

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
from typing import TYPE_CHECKING, Any, Final

from sidestep.errors import Unavailable
from sidestep.rdma.cm import (
    REJECT_CONSUMER,
    REJECT_INVALID_SERVICE_ID,
    REJECT_TIMEOUT,
    CmKind,
    CmState,
    Connection,
    ConnectionRequest,
    PortManager,
    Rejected,
    Unreachable,
)
from sidestep.rdma.iwarp.qp import IwarpQueuePair
from sidestep.rdma.iwarp.startup.connection import Starting
from sidestep.rdma.iwarp.startup.frame import Rtr
from sidestep.rdma.iwarp.startup.negotiation import Initiator, Responder
from sidestep.rdma.iwarp.startup.terms import Agreed, Asked, Failed, MpaCause, ReadDepths, Refused
from sidestep.rdma.iwarp.stream import RdmapStream
from sidestep.rdma.iwarp.tcp import Tcp, TcpListener, begin_connect, check_address

if TYPE_CHECKING:
    from sidestep.errors import InternalError
    from sidestep.rdma.cm import ConnectionEvent, ConnectionHandler
    from sidestep.rdma.iwarp.device import IwarpDevice

_TCP_BACKLOG: Final = 256  # connections that the kernel holds for us


class IwarpConnection(Connection):
    """One side of a connection."""

    _manager: IwarpManager
    qp: IwarpQueuePair
    _pending: _Asking | None = None  # a start-up that goes on

    def ask(self, service_id: int, private_data: bytes) -> None:
        self._pending = _Asking(self._manager, self, private_data)
        self._pending.connect(self.remote_address, service_id & self._manager.service_mask)

    def send(self, kind: CmKind, *, reason: int = 0, **_fields: Any) -> None:
        """An RTU is the RTR, or the first message; a DREP is TCP's."""
        stream = self.qp.stream
        if kind is CmKind.REJ and self._pending is not None:
            self._pending.give_up(reason)
        elif kind is CmKind.DREQ and stream is not None:
            if self.state is CmState.DISCONNECT_SENT:
                stream.leave()
            else:
                stream.abort()

    def answered(self, reply: Agreed) -> bool:
        pending, self._pending = self._pending, None
        assert pending is not None
        stream = pending.go_on(reply)
        self.qp.attach(stream, ready=True)
        stream.sender.held = False
        if reply.rtr:
            stream.sender.ready_to_receive(read=reply.rtr is Rtr.READ)
        return True

    def lost(self, *, by_remote: bool | None = None, confirmed: bool = False) -> None:
        if self.state is CmState.REPLY_SENT:
            self._manager.count("connection_failed", "refused_late" if confirmed else "reset")
            # An orderly end says that the other end's user did not like the Reply; a reset, that it did not wait.
            self.end(Rejected(REJECT_CONSUMER if confirmed else REJECT_TIMEOUT))
        elif self.state is CmState.REQUEST_SENT:  # the queue pair has ended
            self._give_up()
        else:
            super().lost(by_remote=by_remote, confirmed=confirmed)

    def end(self, event: ConnectionEvent | None) -> None:
        self._pending = None
        super().end(event)


class _Asking(Starting):
    """The start-up at the end that asks."""

    _machine: Initiator  # from when TCP is connected

    def __init__(self, manager: IwarpManager, connection: IwarpConnection, private_data: bytes) -> None:
        super().__init__(manager.device.loop)
        self._manager = manager
        self._connection = connection
        self._private_data = private_data
        self._begun = False  # TCP is connected

    def connect(self, address: str, port: int) -> None:
        device = self._manager.device
        try:
            self._tcp, error = begin_connect(
                self._loop, device.address, (address, port), self, device.settings.silence_s
            )
        except Unavailable:
            self._fail("local_address", Unreachable())
            return
        if error is not None:
            self._loop.notices.append(partial(self._tcp.run, partial(self._failed_to_connect, error)))
        else:
            self._timer = self._loop.call_later(device.settings.connect_s, partial(self._tcp.run, self._unreachable))

    def give_up(self, reason: int = REJECT_TIMEOUT) -> None:
        """Resets TCP; a Reply that the user does not want is answered by a Terminate."""
        if reason == REJECT_CONSUMER:
            self._machine.abandon("the user does not want the connection that the Reply offers")
            self._manager.count("connection_failed", "reply_not_wanted")
            self._leave()
        else:
            self._stop_timer()
            self._tcp.abort()

    def go_on(self, agreed: Agreed) -> RdmapStream:
        """The start-up is over; the stream has the connection."""
        self._stop_timer()
        device, connection = self._manager.device, self._connection
        connection.transport = self._tcp.wire.ends
        return RdmapStream(self._tcp, connection.qp, agreed, self._loop, device.settings)

    def on_writable(self) -> None:
        """TCP is connected, or is not; or there is room for the rest of the Request."""
        if not self._begun:
            self._stop_timer()
            if (error := self._tcp.error()) is not None:
                self._failed_to_connect(error)
                return
            self._tcp.opened(self._manager.device.taps, active=True)
            wanted = replace(self._manager.device.settings.startup, depths=depths_of(self._connection.qp))
            self._machine = Initiator(wanted, self._private_data, now=self._loop.now)
            self._begun = True
            self._arm()
        self._send()

    def _handle_bytes(self, piece: bytes) -> None:
        self._machine.handle_bytes(piece)

    def _advance(self) -> None:
        while (event := self._machine.poll_event()) is not None:
            connection = self._connection
            if isinstance(event, Agreed):
                connection.handle(CmKind.REP, event)
                if connection.state is CmState.ESTABLISHED:
                    assert connection.qp.stream is not None
                    connection.qp.stream.begin(event.leftover)
                    connection.qp.stream.pump()
                    connection.qp.stream.nudge_after(self._manager.device.settings.nudges_s)
                return
            self._leave()
            if isinstance(event, Refused):
                self._manager.count("connection_refused", "user")
                connection.handle(CmKind.REJ, Rejected(REJECT_CONSUMER, event.private_data))
            elif isinstance(event, Failed):
                silent = event.cause in (MpaCause.SILENT, MpaCause.ENDED)
                self._fail(event.cause.name.lower(), Unreachable() if silent else Rejected(REJECT_CONSUMER))
            return

    def on_broken(self, why: InternalError) -> None:
        del why
        self._unreachable()

    def _failed_to_connect(self, error: OSError) -> None:
        if self._connection.state is not CmState.REQUEST_SENT:
            return
        self.give_up()
        name = errorcode.get(error.errno or 0, "unknown")
        if error.errno == ECONNREFUSED:
            self._manager.count("connection_refused", name)
            self._connection.end(Rejected(REJECT_INVALID_SERVICE_ID))
        else:
            self._fail(name, Unreachable())

    def _unreachable(self) -> None:
        self.give_up()
        self._fail("ETIMEDOUT", Unreachable())

    def _fail(self, why: str, event: ConnectionEvent) -> None:
        self._manager.count("connection_failed", why)
        self._connection.end(event)


class IwarpRequest(Starting, ConnectionRequest):
    """The start-up at the end that is asked: from TCP's connection to the answer."""

    _manager: IwarpManager
    _machine: Responder

    def __init__(self, manager: IwarpManager, tcp: Tcp, port: int) -> None:
        Starting.__init__(self, manager.device.loop)
        ConnectionRequest.__init__(self, manager, tcp.remote_address, service_id=port)
        self._tcp = tcp
        self._machine = Responder(manager.device.settings.startup, now=self._loop.now)
        tcp.handler = self
        tcp.opened(manager.device.taps, active=False)
        self.transport = tcp.wire.ends
        tcp.watch()
        self._arm()

    # --- the manager's side ---

    def answer(self, connection: IwarpConnection, private_data: bytes, _depth: int, _resources: int) -> None:
        qp, loop = connection.qp, self._loop
        self._machine.accept(private_data, depths=depths_of(qp), now=loop.now)
        event = self._machine.poll_event()
        if not isinstance(event, Agreed):
            self._leave()
            connection.end(Rejected(REJECT_CONSUMER))
            return
        self._stop_timer()
        self._send()
        stream = RdmapStream(self._tcp, qp, event, loop, self._manager.device.settings)
        qp.attach(stream, ready=False)
        if self._unsent:  # a fresh connection has room for a frame; this one is broken
            qp.connection_lost("the Reply could not be sent")
            stream.abort()
            return
        deadline = self._machine.next_deadline()
        stream.begin(b"", first_s=None if deadline is None else deadline - loop.now)
        if not event.peer_to_peer:
            connection.establish()

    def refuse(self, reason: int, private_data: bytes) -> None:
        """The reason stays here."""
        causes = {REJECT_INVALID_SERVICE_ID: "no_listener", REJECT_CONSUMER: "backlog_or_match"}
        self._manager.count("request_rejected", "user" if self._listener is not None else causes[reason])
        self._machine.reject(private_data)
        self._leave()

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
        self.seek_listener()

    def _leave(self) -> None:
        self._manager.half_open.pop(self, None)
        super()._leave()


class IwarpManager(PortManager):
    """The connection manager of one device."""

    device: IwarpDevice

    def __init__(self, device: IwarpDevice) -> None:
        super().__init__(device)
        self.half_open: dict[IwarpRequest, None] = {}  # without a Request, the oldest first
        self.count = device.events.add

    def make_connection(
        self, qp: IwarpQueuePair, remote_address: str, handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None,
    ) -> IwarpConnection:  # fmt: skip
        return IwarpConnection(self, qp, remote_address, handler, check_reply)

    def open_port(self, number: int) -> TcpListener:
        """Listens; Unavailable if another program has the port, or the address is not of this machine."""
        device = self.device
        listener = TcpListener(
            device.loop, (device.address, number), _TCP_BACKLOG, lambda tcp: self._taken(tcp, listener.number),
            device.settings.silence_s,
        )  # fmt: skip
        return listener

    def check_target(self, address: str, service_id: int) -> str:
        check_address(address)
        return super().check_target(address, service_id)

    def close(self) -> None:
        """Ends everything, without waiting for anybody."""
        super().close()
        for request in list(self.half_open):
            request.drop()
        for stream in list(self.device.streams):
            stream.abort()

    def _taken(self, tcp: Tcp, port: int) -> None:
        """A TCP connection came. Of too many that say nothing the oldest goes: it had the most time."""
        if len(self.half_open) >= self.device.settings.half_open_max:
            self.count("half_open_dropped")
            next(iter(self.half_open)).drop()
        self.half_open[IwarpRequest(self, tcp, port)] = None


def depths_of(qp: IwarpQueuePair) -> ReadDepths:
    wanted = qp.capabilities
    resources = wanted.responder_resources
    return ReadDepths(ird=resources, ird_max=resources, ord=wanted.initiator_depth)
