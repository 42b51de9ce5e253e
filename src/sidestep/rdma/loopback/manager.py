"""The connection manager of the loopback device: InfiniBand's handshake, with its losses and crossings.

Theory of operation. Each side of a connection has a communication id and a state (`CmState`). Messages are datagrams:
they can be lost and overtake each other and data, so REQ, REP and DREQ are sent again until something answers them;
RTU, REJ and DREP are sent again only when what they answer comes again (IBTA 12.9.8). What a message does in a state is
in `TRANSITIONS`; a message for a connection that does not exist, or that is not in the table, is answered by `_stray`
so that its sender comes to rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

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
from sidestep.rdma.loopback.observer import CmMessage
from sidestep.rdma.loopback.qp import LoopbackQueuePair
from sidestep.rdma.loopback.settings import CmKind
from sidestep.rdma.soft.manager import SoftManager, SoftRequest
from sidestep.rdma.verbs import QpState

if TYPE_CHECKING:
    from sidestep.rdma.cm import ConnectionEvent, ConnectionHandler
    from sidestep.rdma.loopback.device import LoopbackDevice
    from sidestep.rdma.loopback.fabric import Fabric, Timer
    from sidestep.rdma.soft.manager import SoftListener
    from sidestep.rdma.verbs import QueuePair


class LoopbackRequest(SoftRequest):
    """A REQ that waits for its answer."""

    def __init__(self, manager: LoopbackManager, listener: SoftListener, req: CmMessage) -> None:
        super().__init__(req.source)
        self._manager = manager
        self._req = req
        self.service_id = req.service_id
        self.private_data = req.private_data
        self.responder_resources = req.responder_resources
        self.initiator_depth = req.initiator_depth
        manager.requests[req.source, req.local_id] = self
        self._enter_backlog(listener)

    def accept(self, qp: QueuePair, private_data: bytes, handler: ConnectionHandler) -> LoopbackConnection:
        manager, req = self._manager, self._req
        manager.check_private_data(private_data, manager.device.attributes.reply_private_data_max)
        own = manager.check_qp(qp)
        self._answer()
        connection = LoopbackConnection(manager, own, req.source, handler)
        connection.remote_id = req.local_id
        if self.withdrawn:
            connection.end(Rejected(REJECT_TIMEOUT))
            return connection
        peer = manager.device.fabric.queue_pairs.get(req.qp_number)
        if peer is not None:
            own.pair_with(peer)
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


class LoopbackConnection(Connection):
    """One side of a connection."""

    qp: LoopbackQueuePair

    def __init__(
        self,
        manager: LoopbackManager,
        qp: LoopbackQueuePair,
        remote_address: str,
        handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._manager = manager
        self.qp = qp
        self.remote_address = remote_address
        self._handler = handler
        self._check_reply = check_reply
        self._timer: Timer | None = None
        self._silent = False  # given up before it was established: no event is told
        self.local_id = manager.device.fabric.next_comm_id()
        self.remote_id = 0
        self.state = CmState.REQUEST_SENT
        qp.connection = self
        manager.connections[self.local_id] = self

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

    def lost(self) -> None:
        if self.state is CmState.ESTABLISHED:
            self._over(Disconnected(by_remote=True, confirmed=False))
        elif self.state in (CmState.REQUEST_SENT, CmState.REPLY_SENT):
            self.end(Unreachable())

    # Messages: one method for each entry of TRANSITIONS.

    def on_reply(self, message: CmMessage) -> None:
        """The other end accepts."""
        self._stop_timer()
        self.remote_id = message.local_id
        if self._check_reply is not None and not self._check_reply(message.private_data):
            self._manager.reject(message, REJECT_CONSUMER)
            self.end(Rejected(REJECT_CONSUMER))
            return
        qp = self.qp
        qp.initiator_depth = min(qp.capabilities.initiator_depth, message.responder_resources)
        if qp.state is QpState.INIT:
            qp.ready_to_receive()
        self.send(CmKind.RTU)
        self._establish(Established(message.private_data))

    def on_reply_again(self, message: CmMessage) -> None:
        """The RTU was lost."""
        self.send(CmKind.RTU)

    def on_ready_to_use(self, message: CmMessage) -> None:
        """The last word of the handshake."""
        self._establish(Established())

    def on_reject(self, message: CmMessage) -> None:
        """The other end does not want, or no longer."""
        self.end(Rejected(message.reason, message.private_data))

    def on_reject_established(self, message: CmMessage) -> None:
        """The other end knows of no connection (IBTA 12.9.7: as if disconnected)."""
        self._over(Disconnected(by_remote=True))

    def on_disconnect(self, message: CmMessage) -> None:
        """The other end disconnects."""
        self.send(CmKind.DREP)
        self._over(Disconnected(by_remote=True))

    def on_disconnect_early(self, message: CmMessage) -> None:
        """The other end gave up before this one knew of a connection."""
        self.remote_id = message.local_id
        self.send(CmKind.DREP)
        self.end(Rejected(REJECT_TIMEOUT))

    def on_disconnect_again(self, message: CmMessage) -> None:
        """The DREP was lost."""
        self.send(CmKind.DREP)

    def on_disconnected(self, message: CmMessage) -> None:
        """The other end agrees."""
        self._over(Disconnected(by_remote=False))

    def ignore(self, message: CmMessage) -> None:
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
        fabric = self._manager.device.fabric
        left = fabric.timing.cm_retries

        def send() -> None:
            nonlocal left
            if left < 0:
                give_up()
                return
            left -= 1
            self._timer = fabric.call_later(fabric.timing.cm_timeout_s, send)
            self.send(kind, **fields)

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
        fabric = self._manager.device.fabric
        self._timer = fabric.call_later(fabric.timing.timewait_s, partial(self.end, TimewaitExit()))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, event: ConnectionEvent) -> None:
        self._manager.device.fabric.notices.append(partial(self._handler, self, event))


_On = Callable[[LoopbackConnection, CmMessage], None]
TRANSITIONS: Final[dict[tuple[CmState, CmKind], _On]] = {
    (CmState.REQUEST_SENT, CmKind.REP): LoopbackConnection.on_reply,
    (CmState.REQUEST_SENT, CmKind.REJ): LoopbackConnection.on_reject,
    (CmState.REQUEST_SENT, CmKind.DREQ): LoopbackConnection.on_disconnect_early,
    (CmState.REPLY_SENT, CmKind.RTU): LoopbackConnection.on_ready_to_use,
    (CmState.REPLY_SENT, CmKind.REJ): LoopbackConnection.on_reject,
    (CmState.REPLY_SENT, CmKind.DREQ): LoopbackConnection.on_disconnect_early,
    (CmState.ESTABLISHED, CmKind.REP): LoopbackConnection.on_reply_again,
    (CmState.ESTABLISHED, CmKind.RTU): LoopbackConnection.ignore,
    (CmState.ESTABLISHED, CmKind.REJ): LoopbackConnection.on_reject_established,
    (CmState.ESTABLISHED, CmKind.DREQ): LoopbackConnection.on_disconnect,
    (CmState.DISCONNECT_SENT, CmKind.REP): LoopbackConnection.ignore,  # our DREQ answers it
    (CmState.DISCONNECT_SENT, CmKind.RTU): LoopbackConnection.ignore,
    (CmState.DISCONNECT_SENT, CmKind.REJ): LoopbackConnection.on_disconnected,
    (CmState.DISCONNECT_SENT, CmKind.DREQ): LoopbackConnection.on_disconnect,  # crossing
    (CmState.DISCONNECT_SENT, CmKind.DREP): LoopbackConnection.on_disconnected,
    (CmState.TIMEWAIT, CmKind.REP): LoopbackConnection.ignore,
    (CmState.TIMEWAIT, CmKind.RTU): LoopbackConnection.ignore,
    (CmState.TIMEWAIT, CmKind.REJ): LoopbackConnection.ignore,
    (CmState.TIMEWAIT, CmKind.DREQ): LoopbackConnection.on_disconnect_again,
    (CmState.TIMEWAIT, CmKind.DREP): LoopbackConnection.ignore,
}


class LoopbackManager(SoftManager[LoopbackQueuePair]):
    """The connection manager of one device."""

    device: LoopbackDevice

    def __init__(self, device: LoopbackDevice) -> None:
        super().__init__(device)
        self.connections: dict[int, LoopbackConnection] = {}  # by local communication id
        self.by_remote: dict[tuple[str, int], LoopbackConnection] = {}  # accepted ones, by the other end's
        self.requests: dict[tuple[str, int], LoopbackRequest] = {}  # not answered yet, by the other end's

    # The user's side.

    def connect(
        self, address: str, service_id: int, qp: QueuePair, private_data: bytes, handler: ConnectionHandler, *,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> LoopbackConnection:  # fmt: skip
        attributes = self.device.attributes
        self.check_private_data(private_data, attributes.request_private_data_max)
        connection = LoopbackConnection(self, self.check_qp(qp), address, handler, check_reply)
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

    def forget(self, connection: LoopbackConnection) -> None:
        self.connections.pop(connection.local_id, None)
        self.by_remote.pop((connection.remote_address, connection.remote_id), None)

    def reject(self, message: CmMessage, reason: int, private_data: bytes = b"") -> None:
        padded = self.padded(private_data, self.device.attributes.reject_private_data_max)
        self.send(CmKind.REJ, message.source, message.remote_id, message.local_id, reason=reason, private_data=padded)

    def give_up_request(self, connection: LoopbackConnection) -> None:
        """Tells the other end that the REQ is no more; its communication id is not known yet (IBTA 12.6.7)."""
        self.send(CmKind.REJ, connection.remote_address, connection.local_id, 0, reason=REJECT_TIMEOUT)

    def send(
        self, kind: CmKind, address: str, local_id: int, remote_id: int, qp: LoopbackQueuePair | None = None,
        **fields: Any,
    ) -> None:  # fmt: skip
        """Sends a message, which may be lost; `fields` are those of `CmMessage` that not every kind has."""
        fabric = self.device.fabric
        message = CmMessage(
            at=fabric.now, kind=kind, source=self.device.name, target=address, local_id=local_id, remote_id=remote_id,
            qp_number=0 if qp is None else qp.number, **fields,
        )  # fmt: skip
        if fabric.observer is not None:
            fabric.observer.cm_message(message)
        if not self.device.port_active or (qp is not None and qp.link.cut) or _is_lost(fabric, kind):
            return
        fabric.arrive(fabric.now + fabric.draw(fabric.timing.cm_s), _arrive, fabric, message)

    # The other end's side.

    def receive(self, message: CmMessage) -> None:
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

    def _on_request(self, message: CmMessage) -> None:
        asked_by = (message.source, message.local_id)
        if asked_by in self.requests or asked_by in self.by_remote:
            return  # sent again: the answer is on its way, or being thought about
        listener = self.find_listener(message.service_id, message.private_data)
        if isinstance(listener, int):
            self.reject(message, listener)
            return
        request = LoopbackRequest(self, listener, message)
        self.device.fabric.notices.append(request.deliver)

    def _on_withdrawal(self, message: CmMessage) -> None:
        asked_by = (message.source, message.local_id)
        if (request := self.requests.get(asked_by)) is not None:
            request.withdraw()
        elif (connection := self.by_remote.get(asked_by)) is not None and connection.state is CmState.REPLY_SENT:
            connection.on_reject(message)

    def _stray(self, message: CmMessage) -> None:
        if message.kind is CmKind.REP:
            self.reject(message, REJECT_INVALID_COMM_ID)
        elif message.kind is CmKind.DREQ:
            self.send(CmKind.DREP, message.source, message.remote_id, message.local_id)


def _is_lost(fabric: Fabric, kind: CmKind) -> bool:
    if (faults := fabric.faults) is None:
        return False
    if faults.lose_cm_next.get(kind, 0) > 0:
        faults.lose_cm_next[kind] -= 1
        return True
    return fabric.chance(faults.lose_cm)


def _arrive(fabric: Fabric, message: CmMessage) -> None:
    target = fabric.devices.get(message.target)
    if target is not None and target.port_active:
        target.cm.receive(message)
