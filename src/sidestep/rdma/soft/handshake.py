"""InfiniBand's handshake in datagrams, which can be lost and overtake each other and data.

Theory of operation. Each side of a connection has a communication id. REQ, REP and DREQ are sent again until something
answers them; RTU, REJ and DREP are sent again only when what they answer comes again (IBTA 12.9.8). A message for a
connection that does not exist, or that is not in `TRANSITIONS`, is answered by `_stray` so that its sender comes to
rest.

A device adds how messages travel, what a reply agrees on, and timers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from sidestep.loop import nothing
from sidestep.rdma import cm
from sidestep.rdma.cm import (
    REJECT_INVALID_COMM_ID,
    REJECT_TIMEOUT,
    CmKind,
    CmState,
    Connection,
    ConnectionManager,
    ConnectionRequest,
    Disconnected,
    depths,
    ignore,
)
from sidestep.rdma.soft.ordered import OrderedQueuePair
from sidestep.rdma.verbs import QpState

if TYPE_CHECKING:
    from sidestep.rdma.cm import ConnectionHandler, Listener
    from sidestep.rdma.soft.device import SoftDevice


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


class HandshakeRequest(ConnectionRequest, Generic[_Q, _M]):
    """A REQ that waits for its answer."""

    _manager: HandshakeManager[_Q, _M]

    def __init__(self, manager: HandshakeManager[_Q, _M], listener: Listener, req: _M) -> None:
        super().__init__(
            manager, req.source, service_id=req.service_id, private_data=req.private_data,
            responder_resources=req.responder_resources, initiator_depth=req.initiator_depth,
        )  # fmt: skip
        self._req = req
        self.await_answer(listener)

    @property
    def key(self) -> object:
        return self._req.source, self._req.local_id

    def answer(self, connection: HandshakeConnection[_Q, _M], private_data: bytes, depth: int, resources: int) -> None:
        connection.accept(self._req, private_data, depth, resources)

    def refuse(self, reason: int, private_data: bytes) -> None:
        self._manager.reject(self._req, reason, private_data)


class HandshakeConnection(Connection, Generic[_Q, _M]):
    """One side of a connection."""

    _manager: HandshakeManager[_Q, _M]
    qp: _Q

    def __init__(
        self,
        manager: HandshakeManager[_Q, _M],
        qp: _Q,
        remote_address: str,
        handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._again: Callable[[], object] = nothing  # sends once more what waits for an answer
        self._silent = False  # given up before it was established: no event is told
        self.local_id = manager.next_comm_id()
        self.remote_id = 0
        super().__init__(manager, qp, remote_address, handler, check_reply)

    @property
    def key(self) -> int:
        return self.local_id

    # A device's.

    def joined(self, req: _M) -> None:
        """This end accepts what the other one asked for."""

    def agreed(self, reply: _M) -> None:
        """The other end accepted."""

    @abstractmethod
    def patience(self) -> tuple[float, int]:
        """Seconds until a message that was not answered is sent again, and how often it is."""

    # The handshake.

    def ask(self, service_id: int, private_data: bytes) -> None:
        able = self.qp.capabilities
        self.send_again_and_again(
            CmKind.REQ, super().lost, private_data=self._manager.padded(CmKind.REQ, private_data),
            service_id=service_id, responder_resources=able.responder_resources, initiator_depth=able.initiator_depth,
        )  # fmt: skip

    def accept(self, req: _M, private_data: bytes, depth: int, resources: int) -> None:
        self.remote_id = req.local_id
        self.joined(req)
        self.qp.initiator_depth = depth
        self.qp.ready_to_receive()
        self._manager.by_remote[req.source, req.local_id] = self
        self.send_again_and_again(
            CmKind.REP, super().lost, private_data=self._manager.padded(CmKind.REP, private_data),
            responder_resources=resources, initiator_depth=depth,
        )  # fmt: skip

    def answered(self, reply: _M) -> bool:
        self.agreed(reply)
        self.qp.initiator_depth, _ = depths(self.qp, reply)
        if self.qp.state is QpState.INIT:
            self.qp.ready_to_receive()
        self.send(CmKind.RTU)
        return True

    def send(self, kind: CmKind, *, reason: int = 0, reply: _M | None = None, **fields: Any) -> None:
        if reply is not None:
            self._manager.reject(reply, reason)
        elif kind is CmKind.REJ:
            self._manager.give_up_request(self)
        elif kind is CmKind.DREQ:
            self.send_again_and_again(kind, super().lost)
        else:
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
            self._manager.send(kind, self.remote_address, self.local_id, self.remote_id, self.qp, **fields)

        self._again = send
        send()

    # Messages that come more than once, or tell the other end's communication id.

    def on_reply(self, reply: _M) -> None:
        """The other end accepts."""
        self._stop_timer()
        self.remote_id = reply.local_id
        super().on_reply(reply)

    def on_reply_again(self, _message: _M) -> None:
        """The RTU was lost."""
        self.send(CmKind.RTU)

    def on_reject_established(self, _message: _M) -> None:
        """The other end knows of no connection (IBTA 12.9.7: as if disconnected)."""
        self._over(Disconnected(by_remote=True))

    def on_disconnect_early(self, message: _M) -> None:
        """The other end gave up before this one knew of a connection."""
        self.remote_id = message.local_id
        super().on_disconnect_early(message)

    def on_disconnect_again(self, _message: _M) -> None:
        """The DREP was lost."""
        self.send(CmKind.DREP)

    # What follows.

    def _over(self, event: Disconnected) -> None:
        if self._silent:
            self.end(None)
        else:
            super()._over(event)

    def _give_up(self) -> None:
        """An acceptance may have arrived: its end is said until it is answered."""
        self._silent = True
        if self.state is CmState.REPLY_SENT:
            self.state = CmState.DISCONNECT_SENT
            self.qp.end()
            self.send(CmKind.DREQ)
        else:
            super()._give_up()

    def _forget(self) -> None:
        super()._forget()
        self._manager.by_remote.pop((self.remote_address, self.remote_id), None)


_Of = HandshakeConnection
TRANSITIONS: Final[cm.Transitions] = cm.TRANSITIONS | {
    (CmState.REQUEST_SENT, CmKind.REP): _Of.on_reply,
    (CmState.REQUEST_SENT, CmKind.DREQ): _Of.on_disconnect_early,
    (CmState.REPLY_SENT, CmKind.DREQ): _Of.on_disconnect_early,
    (CmState.ESTABLISHED, CmKind.REP): _Of.on_reply_again,
    (CmState.ESTABLISHED, CmKind.REJ): _Of.on_reject_established,
    (CmState.DISCONNECT_SENT, CmKind.REP): ignore,  # our DREQ answers it
    (CmState.DISCONNECT_SENT, CmKind.REJ): _Of.on_disconnected,
    (CmState.TIMEWAIT, CmKind.REP): ignore,
    (CmState.TIMEWAIT, CmKind.RTU): ignore,
    (CmState.TIMEWAIT, CmKind.REJ): ignore,
    (CmState.TIMEWAIT, CmKind.DREQ): _Of.on_disconnect_again,
    (CmState.TIMEWAIT, CmKind.DREP): ignore,
}


class HandshakeManager(ConnectionManager, Generic[_Q, _M]):
    """The connection manager of one device."""

    transitions = TRANSITIONS

    def __init__(self, device: SoftDevice) -> None:
        super().__init__(device, device.notices)
        self.by_remote: dict[tuple[str, int], HandshakeConnection[_Q, _M]] = {}  # accepted ones, by the other end's

    # A device's.

    @abstractmethod
    def next_comm_id(self) -> int:
        """A communication id that is in no use."""

    def make_request(self, listener: Listener, message: _M) -> HandshakeRequest[_Q, _M]:
        return HandshakeRequest(self, listener, message)

    @abstractmethod
    def send(
        self, kind: CmKind, address: str, local_id: int, remote_id: int, qp: _Q | None = None, **fields: Any
    ) -> None:
        """Sends a message, which may be lost; `fields` are those of a message that not every kind has."""

    # For connections and requests.

    def padded(self, kind: CmKind, private_data: bytes) -> bytes:
        """As the message carries it (IBTA 12.6: a field of fixed size, without a length)."""
        most = self.private_data_max(kind) if self.device.attributes.private_data_padded else 0
        return private_data.ljust(most, b"\0")

    def reject(self, message: _M, reason: int, private_data: bytes = b"") -> None:
        padded = self.padded(CmKind.REJ, private_data)
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
        known = connection is not None and connection.remote_address == message.source
        if not (known and connection and connection.handle(message.kind, message)):
            self._stray(message)

    def _on_request(self, message: _M) -> None:
        asked_by = (message.source, message.local_id)
        if asked_by in self.requests or asked_by in self.by_remote:
            self.asked_again(message)  # the answer is on its way, or being thought about
            return
        listener = self.find_listener(message.service_id, message.private_data)
        if isinstance(listener, int):
            self.reject(message, listener)
        else:
            self.make_request(listener, message)

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
