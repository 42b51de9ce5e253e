"""A connection manager that connects a device's queue pairs by a control link between the two hosts' providers.

It is for devices whose own has too little room beside a Hello: that of InfiniBand takes 92 bytes (IBTA 12.6.5). The
handshake is InfiniBand's (`rdma.cm`), and the link is reliable and ordered, so each word is said once:

    REQ, with queue pair and private data  -->
                                           <--  REP, with its own; or REJ
    RTU                                    -->
    DREQ, from either end; or the link is gone  --  DREP

Two queue pairs may be joined before a connection asks for them (`control_pool`); then they are not by these words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sidestep import limits
from sidestep.errors import Misuse, PeerViolation, SidestepError, Unavailable
from sidestep.rdma import cm
from sidestep.rdma.cm import (
    BEGINNING,
    REJECT_CONSUMER,
    REJECT_TIMEOUT,
    CmKind,
    CmState,
    Connection,
    ConnectionManager,
    ConnectionRequest,
    Disconnected,
    Established,
    Rejected,
    Unreachable,
    depths,
)
from sidestep.rdma.verbs import Beginning, QpState
from sidestep.remote.control_link import PRIVATE_DATA_MAX, Kind, Rej, Rep, Req
from sidestep.remote.control_pool import POOL_SERVICE, QueuePairPool

if TYPE_CHECKING:
    from sidestep.rdma.cm import Cancelled, ConnectionEvent, ConnectionHandler, Driver
    from sidestep.rdma.verbs import Device, EventHandler, QpCapabilities, QpEndpoint, QueuePair
    from sidestep.remote.control_link import ControlLink, Talker

_PATH_FAILED: Final = 24  # IBTA 12.6.7.2: invalid path


def _unheard(_connection: Connection, _event: ConnectionEvent) -> None:
    """The handler while whoever has it has not asked for, or accepted, a connection by it."""


class ControlRequest(ConnectionRequest):
    """A REQ that waits for its answer."""

    _manager: ControlManager

    def __init__(
        self, manager: ControlManager, link: ControlLink, number: int, req: Req, joined: ControlConnection | None = None
    ) -> None:
        super().__init__(
            manager, link.address, service_id=req.service_id, private_data=req.private_data,
            responder_resources=req.responder_resources, initiator_depth=req.initiator_depth,
        )  # fmt: skip
        self.link = link
        self._number = number
        self._endpoint = req.endpoint
        self._joined = joined  # whose queue pair it is for
        self._made: ControlConnection | None = None  # once it is accepted

    def connection_of(self, qp: QueuePair) -> Connection | None:
        if self._joined is None:
            return super().connection_of(qp)
        if qp is not self._joined.qp:
            raise Misuse("another queue pair than the one that is joined already")
        if self._joined.state is CmState.CLOSED:
            self.withdraw()
        return self._joined

    def answer(self, connection: ControlConnection, private_data: bytes, depth: int, resources: int) -> None:
        self._made = connection
        connection.adopt(self.link, self._number)
        try:
            if self._joined is None:
                connection.join(self._endpoint, initiator_depth=depth, responder_resources=resources)
            own = connection.endpoint()  # with the MTU of both
        except SidestepError:
            self.refuse(_PATH_FAILED, b"")
            connection.end(Unreachable())
            return
        if self.service_id == POOL_SERVICE:
            connection.state = CmState.JOINED
        else:
            connection.qp.tell_beginning(Beginning(False, self.service_id, self.private_data, private_data))
        self.link.send(Kind.REP, self._number, Rep(resources, depth, own, private_data).encode())

    def take_joined(self, capabilities: QpCapabilities) -> ControlConnection | None:
        joined = self._joined
        if joined is not None:
            if joined.state is not CmState.JOINED or joined.qp.capabilities != capabilities:
                raise Unavailable("the queue pair that was joined for it is not as wanted, or no more")
            joined.handler = _unheard
            if self._manager.pool is not None:
                self._manager.pool.hand_over(joined)
        return joined

    def reject(self, reason: int = REJECT_CONSUMER, private_data: bytes = b"") -> None:
        super().reject(reason, private_data)
        self._give_up_joined()

    def refuse(self, reason: int, private_data: bytes) -> None:
        self.link.send(Kind.REJ, self._number, Rej(reason, private_data).encode())
        self.link.remove(self._number)
        self._give_up_joined()

    def _give_up_joined(self) -> None:
        if self._joined is not None and self._joined.state is CmState.JOINED:
            self._joined.end(Unreachable())

    # ---- what the link says ----

    def handle_record(self, kind: Kind, body: bytes) -> None:
        if self._made is not None:
            self._made.handle_record(kind, body)
        elif kind is Kind.REJ:
            self.link.remove(self._number)
            self.withdraw()
        else:
            raise PeerViolation(f"{kind.name} before there is an answer", rule="control_order")

    def handle_lost(self) -> None:
        if self._made is not None:
            self._made.handle_lost()
        else:
            self.withdraw()


class ControlConnection(Connection):
    """One side of a connection."""

    _manager: ControlManager

    def __init__(
        self,
        manager: ControlManager,
        qp: Any,
        remote_address: str,
        handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> None:
        super().__init__(manager, qp, remote_address, handler, check_reply)
        qp.connection = None  # until `join`
        self._link: ControlLink | None = None
        self._number = 0
        self._asked = 0, b""  # service id and private data
        self._own: QpEndpoint | None = None  # once it was told
        self._other: QpEndpoint | None = None  # once they are joined

    @property
    def key(self) -> int:
        return self.qp.number

    def adopt(self, link: ControlLink, number: int) -> None:
        self._link, self._number = link, number

    def endpoint(self) -> QpEndpoint:
        """As `QueuePair.endpoint`, which asks the device and the routes: once."""
        if self._own is None:
            self._own = self.qp.endpoint(self.remote_address)
        return self._own

    def join(self, other: QpEndpoint, *, initiator_depth: int, responder_resources: int) -> None:
        """As `QueuePair.join`."""
        self.qp.join(other, self, initiator_depth=initiator_depth, responder_resources=responder_resources)
        self._other = other

    def timewait_s(self) -> float:
        return limits.CONTROL_TIMEWAIT_S

    # ---- what is sent ----

    def ask(self, service_id: int, private_data: bytes) -> None:
        self._manager.reach(self.remote_address, lambda link: self._request(link, service_id, private_data))

    def reuse(
        self, service_id: int, private_data: bytes, handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None,
    ) -> None:  # fmt: skip
        """Asks for a connection, as the queue pairs are joined already."""
        self.state, self.handler, self._check_reply = CmState.REQUEST_SENT, handler, check_reply
        self._request(self._link, service_id, private_data)

    def _request(self, link: ControlLink | None, service_id: int, private_data: bytes) -> None:
        """The link is there, or there is none."""
        if self.state is not CmState.REQUEST_SENT:
            return
        if link is None:
            self.end(Unreachable())
            return
        able = self.qp.capabilities
        try:
            req = Req(
                self._manager.wire, service_id, able.responder_resources, able.initiator_depth, self.endpoint(),
                private_data,
            )  # fmt: skip
        except SidestepError:
            self.send(CmKind.DREQ)
            self.end(Unreachable())
            return
        self._asked = service_id, private_data
        if self._other is None:
            self.adopt(link, link.add(self))
        link.send(Kind.REQ, self._number, req.encode())

    def send(self, kind: CmKind, *, reason: int = 0, **_fields: Any) -> None:
        if self._link is not None:
            self._link.send(Kind[kind.name], self._number, Rej(reason).encode() if kind is CmKind.REJ else b"")

    def disconnect(self) -> None:
        pool = self._manager.pool
        if self.state is CmState.ESTABLISHED and self.qp.state is QpState.ERROR and pool is not None:
            pool.doubt(self.remote_address)
        super().disconnect()

    # ---- what the queue pair and the link say ----

    def lost(self, *, by_remote: bool | None = None, confirmed: bool = False) -> None:
        """The queue pair hears nothing of the other one."""
        if self.state is CmState.ESTABLISHED:
            self.send(CmKind.DREQ)
            super().lost(by_remote=by_remote, confirmed=confirmed)

    def handle_lost(self) -> None:
        self._link = None
        if self.state not in BEGINNING:
            self.qp.catch_up()
        super().lost()

    def handle_record(self, kind: Kind, body: bytes) -> None:
        state, record = self.state, _RECORDS.get(kind)
        message: Any = None if record is None else record.decode(body)
        known: Any = CmKind.__members__.get(kind.name)
        if not self.handle(known, message):
            raise PeerViolation(f"{kind.name} in {state.name}", rule="control_order")

    def on_crossed(self, _message: None) -> None:
        """The queue pair that it was joined with is gone, and the two words have crossed."""
        self.disconnect()
        self._tell(Rejected(REJECT_TIMEOUT))

    def on_request(self, req: Req) -> None:
        """The other end wants a connection by the queue pairs that are joined."""
        manager, link = self._manager, self._link
        asks_by_it = req.wire == manager.wire and self._is_other(req.endpoint) and req.service_id != POOL_SERVICE
        if link is None or not asks_by_it:
            raise PeerViolation("it asks by queue pairs that were not joined", rule="control_joined")
        request = ControlRequest(manager, link, self._number, req, self)
        if request.seek_listener():
            link.hand_over(self._number, request)

    def _is_other(self, told: QpEndpoint) -> bool:
        """Whether that is what it is joined with; the MTU may have become that of both."""
        other = self._other
        return other is not None and (told.gid, told.number, told.psn) == (other.gid, other.number, other.psn)

    def on_reply(self, reply: Rep) -> None:
        if self._other is not None and not self._is_other(reply.endpoint):
            raise PeerViolation("it answers with a queue pair that was not joined", rule="control_joined")
        super().on_reply(reply)

    def answered(self, reply: Rep) -> bool:
        if self._other is None:
            depth, resources = depths(self.qp, reply)
            try:
                self.join(reply.endpoint, initiator_depth=depth, responder_resources=resources)
            except SidestepError:
                self.send(CmKind.REJ, reason=_PATH_FAILED)
                self.end(Unreachable())
                return False
        service_id, private_data = self._asked
        if service_id == POOL_SERVICE:
            self.state = CmState.JOINED
            self.qp.ready_to_send()
            self._tell(Established())
            return False
        self.qp.tell_beginning(Beginning(True, service_id, private_data, reply.private_data))
        self.send(CmKind.RTU)
        if self._manager.pool is not None:
            self._manager.pool.note(self.remote_address)
        return True

    # ---- what follows ----

    def _over(self, event: Disconnected) -> None:
        super()._over(event)
        self._forget()

    def _forget(self) -> None:
        super()._forget()
        if self._link is not None:
            self._link.remove(self._number)
            self._link = None


_RECORDS: Final[dict[Kind, type[Req | Rep | Rej]]] = {Kind.REQ: Req, Kind.REP: Rep, Kind.REJ: Rej}


class ControlManager(ConnectionManager):
    """That of one device at one address of this host.

    Args:
        device: Whose queue pairs it connects.
        driver: The device's.
        wire: What the device speaks: the other host's has to speak the same.
        reach: Gives, now or later, the link with the host at an address; None: there is none.
    """

    transitions = cm.TRANSITIONS | {
        (CmState.REQUEST_SENT, CmKind.REP): ControlConnection.on_reply,
        (CmState.REQUEST_SENT, CmKind.DREQ): ControlConnection.on_crossed,
        (CmState.JOINED, CmKind.REQ): ControlConnection.on_request,
        (CmState.JOINED, CmKind.RTU): cm.ignore,
        (CmState.JOINED, CmKind.REJ): ControlConnection.on_reject,
        (CmState.JOINED, CmKind.DREQ): ControlConnection.on_disconnect_early,
    }

    def __init__(
        self,
        device: Device,
        driver: Driver,
        wire: str,
        reach: Callable[[str, Callable[[ControlLink | None], None]], None],
    ) -> None:
        super().__init__(device, driver.notices)
        self.driver = driver
        self.wire = wire
        self.reach = reach
        self.pool: QueuePairPool | None = None  # None: each connection joins its own

    def keep_joined(self, make_qp: Callable[[EventHandler], QueuePair], count: Callable[[str], object]) -> None:
        """Has queue pairs joined for connections to come; see `control_pool`."""
        self.pool = QueuePairPool(self, make_qp, count)

    def join_no_more(self) -> None:
        """Gives those up that no connection has."""
        if self.pool is not None:
            self.pool.close()

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Cancelled:
        return self.driver.call_later(delay_s, callback)

    def make_connection(
        self, qp: QueuePair, remote_address: str, handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None,
    ) -> ControlConnection:  # fmt: skip
        return ControlConnection(self, qp, remote_address, handler, check_reply)

    def connect(
        self, address: str, service_id: int, qp: QueuePair, private_data: bytes, handler: ConnectionHandler, *,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> Any:  # fmt: skip
        made: ControlConnection | None = self.connections.get(qp.number)
        if made is None or made.qp is not qp or made.state is not CmState.JOINED:
            return super().connect(address, service_id, qp, private_data, handler, check_reply=check_reply)
        self.check_private_data(CmKind.REQ, private_data)
        made.reuse(service_id, private_data, handler, check_reply)
        return made

    def private_data_max(self, kind: CmKind) -> int:
        del kind
        return PRIVATE_DATA_MAX

    def check_qp(self, qp: QueuePair) -> None:
        super().check_qp(qp)
        if qp.number in self.connections:
            raise Misuse("a queue pair that is being connected already")

    def take(self, link: ControlLink, number: int, req: Req) -> Talker | None:
        """Somebody asks; he is answered by whoever listens. None: he has been answered already."""
        request = ControlRequest(self, link, number, req)
        if req.service_id == POOL_SERVICE and self.pool is not None:
            return request if self.pool.join(request) else None
        return request if request.seek_listener() else None

    def take_joined(self, address: str, capabilities: QpCapabilities) -> ControlConnection | None:
        found = None if self.pool is None else self.pool.take(address, capabilities)
        if found is not None:
            found.handler = _unheard
        return found

    def close(self) -> None:
        """Ends everything, without waiting for anybody."""
        self.join_no_more()
        super().close()
