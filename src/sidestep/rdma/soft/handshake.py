"""InfiniBand's handshake: the connection manager's states, whatever carries its messages.

Theory of operation. Each side of a connection has a communication id and a state (`CmState`). Messages are datagrams:
they can be lost and overtake each other and data, so REQ, REP and DREQ are sent again until something answers them;
RTU, REJ and DREP are sent again only when what they answer comes again (IBTA 12.9.8). What a message does in a state is
in `TRANSITIONS`; a message for a connection that does not exist, or that is not in the table, is answered by `_stray`
so that its sender comes to rest.

A device adds how messages travel, what a reply agrees on, and timers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from sidestep.rdma.cm import (
    REJECT_CONSUMER,
    REJECT_INVALID_COMM_ID,
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
from sidestep.rdma.soft.manager import SoftManager, SoftRequest
from sidestep.rdma.soft.ordered import OrderedQueuePair
from sidestep.rdma.verbs import QpState

if TYPE_CHECKING:
    from sidestep.rdma.cm import ConnectionEvent, ConnectionHandler
    from sidestep.rdma.soft.device import SoftDevice
    from sidestep.rdma.soft.manager import SoftListener
    from sidestep.rdma.verbs import QueuePair


class CmKind(IntEnum):
    """Messages of the connection manager; the values are the attribute ids of the MADs (IBTA 16.7.2)."""

    REQ = 0x10
    REJ = 0x12
    REP = 0x13
    RTU = 0x14
    DREQ = 0x15
    DREP = 0x16


_Q = TypeVar("_Q", bound=OrderedQueuePair)


class CmSent(Protocol):
    """What a message says, as far as the states ask."""

    @property
    def kind(self) -> CmKind: ...
    @property
    def source(self) -> str: ...
    @property
    def local_id(self) -> int: ...  # of who sends it
    @property
    def remote_id(self) -> int: ...  # of who receives it; 0 where the sender does not know it
    @property
    def service_id(self) -> int: ...
    @property
    def responder_resources(self) -> int: ...
    @property
    def initiator_depth(self) -> int: ...
    @property
    def reason(self) -> int: ...
    @property
    def private_data(self) -> bytes: ...


_M = TypeVar("_M", bound=CmSent)


class Cancelled(Protocol):
    """What can be: a timer."""

    def cancel(self) -> None:
        """It does not happen."""


class HandshakeRequest(SoftRequest, Generic[_Q, _M]):
    """A REQ that waits for its answer."""

    def __init__(self, manager: HandshakeManager[_Q, _M], listener: SoftListener, req: _M) -> None:
        super().__init__(req.source)
        self._manager = manager
        self._req = req
        self.service_id = req.service_id
        self.private_data = req.private_data
        self.responder_resources = req.responder_resources
        self.initiator_depth = req.initiator_depth
        manager.requests[req.source, req.local_id] = self
        self._enter_backlog(listener)

    def accept(self, qp: QueuePair, private_data: bytes, handler: ConnectionHandler) -> HandshakeConnection[_Q, _M]:
        manager, req = self._manager, self._req
        manager.check_private_data(private_data, manager.device.attributes.reply_private_data_max)
        own = manager.check_qp(qp)
        self._answer()
        connection = manager.make_connection(own, req.source, handler, None)
        connection.remote_id = req.local_id
        if self.withdrawn:
            connection.end(Rejected(REJECT_TIMEOUT))
            return connection
        connection.joined(req)
        own.initiator_depth = min(own.capabilities.initiator_depth, req.responder_resources)
        own.ready_to_receive()
        manager.by_remote[req.source, req.local_id] = connection
        connection.state = CmState.REPLY_SENT
        connection.send_again_and_again(
            CmKind.REP,
            partial(connection.end, Unreachable()),
            private_data=manager.padded(private_data, manager.device.attributes.reply_private_data_max),
            responder_resources=min(own.capabilities.responder_resources, req.initiator_depth),
            initiator_depth=own.initiator_depth,
        )
        return connection

    def reject(self, reason: int = REJECT_CONSUMER, private_data: bytes = b"") -> None:
        self._manager.check_private_data(private_data, self._manager.device.attributes.reject_private_data_max)
        self._answer()
        if not self.withdrawn:
            self._manager.reject(self._req, reason, private_data)

    def forget(self) -> None:
        del self._manager.requests[self._req.source, self._req.local_id]


class HandshakeConnection(Connection, Generic[_Q, _M]):
    """One side of a connection."""

    qp: _Q

    def __init__(
        self,
        manager: HandshakeManager[_Q, _M],
        qp: _Q,
        remote_address: str,
        handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._manager = manager
        self.qp = qp
        self.remote_address = remote_address
        self._handler = handler
        self._check_reply = check_reply
        self._timer: Cancelled | None = None
        self._again: Callable[[], object] = _nothing  # sends once more what waits for an answer
        self._silent = False  # given up before it was established: no event is told
        self.local_id = manager.next_comm_id()
        self.remote_id = 0
        self.state = CmState.REQUEST_SENT
        qp.connection = self
        manager.connections[self.local_id] = self

    # A device's.

    def joined(self, req: _M) -> None:
        """This end accepts what the other one asked for."""

    def answered(self, reply: _M) -> None:
        """The other end accepted."""

    @abstractmethod
    def patience(self) -> tuple[float, int]:
        """Seconds until a message that was not answered is sent again, and how often it is."""

    @abstractmethod
    def timewait_s(self) -> float:
        """Seconds from the end until the last event."""

    # The user's side.

    def disconnect(self) -> None:
        if self.state is CmState.REQUEST_SENT:
            self._silent = True
            self._manager.give_up_request(self)
            self.end(None)
        elif self.state in (CmState.REPLY_SENT, CmState.ESTABLISHED):
            self._silent = self.state is CmState.REPLY_SENT
            self.qp.end()
            self.state = CmState.DISCONNECT_SENT
            self.send_again_and_again(CmKind.DREQ, partial(self._over, Disconnected(by_remote=False, confirmed=False)))

    # The queue pair's side.

    def communication_established(self) -> None:
        """A message arrived: the RTU need not."""
        if self.state is CmState.REPLY_SENT:
            self._establish(Established())

    # Messages: one method for each entry of TRANSITIONS.

    def on_reply(self, message: _M) -> None:
        """The other end accepts."""
        self._stop_timer()
        self.remote_id = message.local_id
        if self._check_reply is not None and not self._check_reply(message.private_data):
            self._manager.reject(message, REJECT_CONSUMER)
            self.end(Rejected(REJECT_CONSUMER))
            return
        self.answered(message)
        qp = self.qp
        qp.initiator_depth = min(qp.capabilities.initiator_depth, message.responder_resources)
        if qp.state is QpState.INIT:
            qp.ready_to_receive()
        self.send(CmKind.RTU)
        self._establish(Established(message.private_data))

    def on_reply_again(self, message: _M) -> None:
        """The RTU was lost."""
        self.send(CmKind.RTU)

    def on_ready_to_use(self, message: _M) -> None:
        """The last word of the handshake."""
        self._establish(Established())

    def on_reject(self, message: _M) -> None:
        """The other end does not want, or no longer."""
        self.end(Rejected(message.reason, message.private_data))

    def on_reject_established(self, message: _M) -> None:
        """The other end knows of no connection (IBTA 12.9.7: as if disconnected)."""
        self._over(Disconnected(by_remote=True))

    def on_disconnect(self, message: _M) -> None:
        """The other end disconnects."""
        self.send(CmKind.DREP)
        self.qp.catch_up()
        self._over(Disconnected(by_remote=True))

    def on_disconnect_early(self, message: _M) -> None:
        """The other end gave up before this one knew of a connection."""
        self.remote_id = message.local_id
        self.send(CmKind.DREP)
        self.end(Rejected(REJECT_TIMEOUT))

    def on_disconnect_again(self, message: _M) -> None:
        """The DREP was lost."""
        self.send(CmKind.DREP)

    def on_disconnected(self, message: _M) -> None:
        """The other end agrees."""
        self._over(Disconnected(by_remote=False))

    def ignore(self, message: _M) -> None:
        """It changes nothing: what matters is on its way, or came before."""

    # What follows.

    def end(self, event: ConnectionEvent | None) -> None:
        """It never was, or is no more: nothing follows."""
        self._stop_timer()
        self.qp.end()
        self.state = CmState.CLOSED
        self._manager.forget(self)
        if event is not None:
            self._tell(event)

    def send(self, kind: CmKind, **fields: Any) -> None:
        self._manager.send(kind, self.remote_address, self.local_id, self.remote_id, self.qp, **fields)

    def send_again_and_again(self, kind: CmKind, give_up: Callable[[], object], **fields: Any) -> None:
        """Sends a message until the state changes, or it was sent often enough."""
        self._stop_timer()
        interval_s, left = self.patience()

        def send() -> None:
            nonlocal left
            if left < 0:
                give_up()
                return
            left -= 1
            self._timer = self._manager.call_later(interval_s, send)
            self.send(kind, **fields)

        self._again = send
        send()

    def _establish(self, event: Established) -> None:
        self._stop_timer()
        self.state = CmState.ESTABLISHED
        self.qp.ready_to_send()
        self._tell(event)

    def _over(self, event: Disconnected) -> None:
        self._stop_timer()
        self.qp.end()
        if self._silent:
            self.end(None)
            return
        self.state = CmState.TIMEWAIT
        self._tell(event)
        self._timer = self._manager.call_later(self.timewait_s(), partial(self.end, TimewaitExit()))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, event: ConnectionEvent) -> None:
        self._manager.device.notices.append(partial(self._handler, self, event))


_On = Callable[[Any, Any], None]  # a connection, and the message
TRANSITIONS: Final[dict[tuple[CmState, CmKind], _On]] = {
    (CmState.REQUEST_SENT, CmKind.REP): HandshakeConnection.on_reply,
    (CmState.REQUEST_SENT, CmKind.REJ): HandshakeConnection.on_reject,
    (CmState.REQUEST_SENT, CmKind.DREQ): HandshakeConnection.on_disconnect_early,
    (CmState.REPLY_SENT, CmKind.RTU): HandshakeConnection.on_ready_to_use,
    (CmState.REPLY_SENT, CmKind.REJ): HandshakeConnection.on_reject,
    (CmState.REPLY_SENT, CmKind.DREQ): HandshakeConnection.on_disconnect_early,
    (CmState.ESTABLISHED, CmKind.REP): HandshakeConnection.on_reply_again,
    (CmState.ESTABLISHED, CmKind.RTU): HandshakeConnection.ignore,
    (CmState.ESTABLISHED, CmKind.REJ): HandshakeConnection.on_reject_established,
    (CmState.ESTABLISHED, CmKind.DREQ): HandshakeConnection.on_disconnect,
    (CmState.DISCONNECT_SENT, CmKind.REP): HandshakeConnection.ignore,  # our DREQ answers it
    (CmState.DISCONNECT_SENT, CmKind.RTU): HandshakeConnection.ignore,
    (CmState.DISCONNECT_SENT, CmKind.REJ): HandshakeConnection.on_disconnected,
    (CmState.DISCONNECT_SENT, CmKind.DREQ): HandshakeConnection.on_disconnect,  # crossing
    (CmState.DISCONNECT_SENT, CmKind.DREP): HandshakeConnection.on_disconnected,
    (CmState.TIMEWAIT, CmKind.REP): HandshakeConnection.ignore,
    (CmState.TIMEWAIT, CmKind.RTU): HandshakeConnection.ignore,
    (CmState.TIMEWAIT, CmKind.REJ): HandshakeConnection.ignore,
    (CmState.TIMEWAIT, CmKind.DREQ): HandshakeConnection.on_disconnect_again,
    (CmState.TIMEWAIT, CmKind.DREP): HandshakeConnection.ignore,
}


class HandshakeManager(SoftManager[_Q], Generic[_Q, _M]):
    """The connection manager of one device."""

    def __init__(self, device: SoftDevice) -> None:
        super().__init__(device)
        self.connections: dict[int, HandshakeConnection[_Q, _M]] = {}  # by local communication id
        self.by_remote: dict[tuple[str, int], HandshakeConnection[_Q, _M]] = {}  # accepted ones, by the other end's
        self.requests: dict[tuple[str, int], HandshakeRequest[_Q, _M]] = {}  # not answered yet, by the other end's

    # A device's.

    @abstractmethod
    def next_comm_id(self) -> int:
        """A communication id that is in no use."""

    @abstractmethod
    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Cancelled:
        """Calls in so many seconds, from where the device is driven."""

    @abstractmethod
    def make_connection(
        self,
        qp: _Q,
        remote_address: str,
        handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None,
    ) -> HandshakeConnection[_Q, _M]:
        """One side of a connection, which adds itself to `connections`."""

    def make_request(self, listener: SoftListener, message: _M) -> HandshakeRequest[_Q, _M]:
        return HandshakeRequest(self, listener, message)

    @abstractmethod
    def send(
        self, kind: CmKind, address: str, local_id: int, remote_id: int, qp: _Q | None = None, **fields: Any
    ) -> None:
        """Sends a message, which may be lost; `fields` are those of a message that not every kind has."""

    # The user's side.

    def connect(
        self, address: str, service_id: int, qp: QueuePair, private_data: bytes, handler: ConnectionHandler, *,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> HandshakeConnection[_Q, _M]:  # fmt: skip
        attributes = self.device.attributes
        self.check_private_data(private_data, attributes.request_private_data_max)
        connection = self.make_connection(self.check_qp(qp), address, handler, check_reply)
        connection.send_again_and_again(
            CmKind.REQ,
            partial(connection.end, Unreachable()),
            service_id=service_id,
            private_data=self.padded(private_data, attributes.request_private_data_max),
            responder_resources=qp.capabilities.responder_resources,
            initiator_depth=qp.capabilities.initiator_depth,
        )
        return connection

    def close(self) -> None:
        """Ends everything, without waiting for anybody."""
        for listener in list(self.listeners):
            listener.close()
        for request in list(self.requests.values()):
            request.reject(REJECT_INVALID_SERVICE_ID)
        for connection in list(self.connections.values()):
            if connection.state is CmState.ESTABLISHED:
                connection.send(CmKind.DREQ)
            connection.end(None)

    # For connections and requests.

    def padded(self, private_data: bytes, size: int) -> bytes:
        """As the message carries it (IBTA 12.6: a field of fixed size, without a length)."""
        return private_data.ljust(size, b"\0") if self.device.attributes.private_data_padded else private_data

    def forget(self, connection: HandshakeConnection[_Q, _M]) -> None:
        self.connections.pop(connection.local_id, None)
        self.by_remote.pop((connection.remote_address, connection.remote_id), None)

    def reject(self, message: _M, reason: int, private_data: bytes = b"") -> None:
        padded = self.padded(private_data, self.device.attributes.reject_private_data_max)
        self.send(CmKind.REJ, message.source, message.remote_id, message.local_id, reason=reason, private_data=padded)

    def give_up_request(self, connection: HandshakeConnection[_Q, _M]) -> None:
        """Tells the other end that the REQ is no more; its communication id is not known yet (IBTA 12.6.7)."""
        self.send(CmKind.REJ, connection.remote_address, connection.local_id, 0, reason=REJECT_TIMEOUT)

    # The other end's side.

    def receive(self, message: _M) -> None:
        if message.kind is CmKind.REQ:
            self._on_request(message)
            return
        if message.kind is CmKind.REJ and not message.remote_id:
            self._on_withdrawal(message)
            return
        connection = self.connections.get(message.remote_id)
        if connection is None or connection.remote_address != message.source:
            self._stray(message)
            return
        transition = TRANSITIONS.get((connection.state, message.kind))
        if transition is None:
            self._stray(message)
            return
        transition(connection, message)

    def _on_request(self, message: _M) -> None:
        asked_by = (message.source, message.local_id)
        if asked_by in self.requests or asked_by in self.by_remote:
            self.asked_again(message)  # the answer is on its way, or being thought about
            return
        listener = self.find_listener(message.service_id, message.private_data)
        if isinstance(listener, int):
            self.reject(message, listener)
            return
        self.device.notices.append(self.make_request(listener, message).deliver)

    def asked_again(self, message: _M) -> None:
        """A REQ came once more."""

    def _on_withdrawal(self, message: _M) -> None:
        asked_by = (message.source, message.local_id)
        if (request := self.requests.get(asked_by)) is not None:
            request.withdraw()
        elif (connection := self.by_remote.get(asked_by)) is not None and connection.state is CmState.REPLY_SENT:
            connection.on_reject(message)

    def _stray(self, message: _M) -> None:
        if message.kind is CmKind.REP:
            self.reject(message, REJECT_INVALID_COMM_ID)
        elif message.kind is CmKind.DREQ:
            self.send(CmKind.DREP, message.source, message.remote_id, message.local_id)


def _nothing() -> None:
    """Nothing is sent."""
