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
from functools import partial
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import Misuse, PeerViolation, SidestepError, Unavailable
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
from sidestep.rdma.soft.manager import ListenerTable, SoftRequest
from sidestep.rdma.verbs import Beginning, QpState
from sidestep.remote.control_link import PRIVATE_DATA_MAX, Kind, Rej, Rep, Req
from sidestep.remote.control_pool import POOL_SERVICE, QueuePairPool

if TYPE_CHECKING:
    from sidestep.rdma.cm import ConnectionEvent, ConnectionHandler, Driver
    from sidestep.rdma.verbs import Device, EventHandler, QpCapabilities, QpEndpoint, QueuePair
    from sidestep.remote.control_link import ControlLink, Talker

_PATH_FAILED: Final = 24  # IBTA 12.6.7.2: invalid path


def _unheard(_connection: Connection, _event: ConnectionEvent) -> None:
    """The handler while whoever has it has not asked for, or accepted, a connection by it."""


class ControlRequest(SoftRequest):
    """A REQ that waits for its answer."""

    def __init__(
        self, manager: ControlManager, link: ControlLink, number: int, req: Req, joined: ControlConnection | None = None
    ) -> None:
        super().__init__(link.address)
        self._manager = manager
        self.link = link
        self._number = number
        self._req = req
        self._joined = joined  # whose queue pair it is for
        self._made: ControlConnection | None = None  # once it is accepted
        self.service_id = req.service_id
        self.private_data = req.private_data
        self.responder_resources = req.responder_resources
        self.initiator_depth = req.initiator_depth

    def begin(self) -> bool:
        """Whether somebody is there to answer it."""
        listener = self._manager.find_listener(self.service_id, self.private_data)
        if isinstance(listener, int):
            self._refuse(listener)
            self._give_up_joined()
            return False
        self._enter_backlog(listener)
        self._manager.requests.add(self)
        self._manager.driver.notices.append(self.deliver)
        return True

    def accept(self, qp: QueuePair, private_data: bytes, handler: ConnectionHandler) -> ControlConnection:
        manager, req, joined = self._manager, self._req, self._joined
        manager.check_private_data(private_data, PRIVATE_DATA_MAX)
        if joined is None:
            manager.check_qp(qp)
        elif qp is not joined.qp:
            raise Misuse("another queue pair than the one that is joined already")
        self._answer()
        made = self._made = joined or ControlConnection(manager, qp, self.remote_address, handler)
        made.handler = handler
        if self.withdrawn or made.state is CmState.CLOSED:
            made.end(Rejected(REJECT_TIMEOUT))
            return made
        made.adopt(self.link, self._number)
        depth = min(qp.capabilities.initiator_depth, req.responder_resources)
        resources = min(qp.capabilities.responder_resources, req.initiator_depth)
        try:
            if joined is None:
                made.join(req.endpoint, initiator_depth=depth, responder_resources=resources)
            own = made.endpoint()  # with the MTU of both
        except SidestepError:
            self._refuse(_PATH_FAILED)
            made.end(Unreachable())
            return made
        if req.service_id == POOL_SERVICE:
            made.state = CmState.JOINED
        else:
            qp.tell_beginning(Beginning(False, req.service_id, req.private_data, private_data))
            made.state = CmState.REPLY_SENT
        self.link.send(Kind.REP, self._number, Rep(resources, depth, own, private_data).encode())
        return made

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
        self._manager.check_private_data(private_data, PRIVATE_DATA_MAX)
        self._answer()
        if not self.withdrawn:
            self._refuse(reason, private_data)
        self._give_up_joined()

    def _refuse(self, reason: int, private_data: bytes = b"") -> None:
        self.link.send(Kind.REJ, self._number, Rej(reason, private_data).encode())
        self.link.remove(self._number)

    def _give_up_joined(self) -> None:
        if self._joined is not None:
            self._joined.end(Unreachable())

    def forget(self) -> None:
        self._manager.requests.discard(self)

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

    def __init__(
        self,
        manager: ControlManager,
        qp: QueuePair,
        remote_address: str,
        handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._manager = manager
        self.qp = qp
        self.remote_address = remote_address
        self.handler = handler
        self._check_reply = check_reply
        self._link: ControlLink | None = None
        self._number = 0
        self._asked = 0, b""  # service id and private data
        self._own: QpEndpoint | None = None  # once it was told
        self._other: QpEndpoint | None = None  # once they are joined
        self.state = CmState.REQUEST_SENT
        manager.connections[qp.number] = self

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

    def reuse(
        self, service_id: int, private_data: bytes, handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None,
    ) -> None:  # fmt: skip
        """Asks for a connection, as the queue pairs are joined already."""
        self.handler, self._check_reply = handler, check_reply
        self.state = CmState.REQUEST_SENT
        self.request(self._link, service_id, private_data)

    def request(self, link: ControlLink | None, service_id: int, private_data: bytes) -> None:
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
            self._say(Kind.DREQ)
            self.end(Unreachable())
            return
        self._asked = service_id, private_data
        if self._other is None:
            self.adopt(link, link.add(self))
        link.send(Kind.REQ, self._number, req.encode())

    # ---- the user's side ----

    def disconnect(self) -> None:
        if self.state is CmState.REQUEST_SENT:
            self._say(Kind.REJ, Rej(REJECT_TIMEOUT).encode())
            self.end(None)
        elif self.state in (CmState.REPLY_SENT, CmState.JOINED):
            self._say(Kind.DREQ)
            self.end(None)
        elif self.state is CmState.ESTABLISHED:
            if self.qp.state is QpState.ERROR and self._manager.pool is not None:
                self._manager.pool.doubt(self.remote_address)
            self.qp.modify_to_error()
            self.state = CmState.DISCONNECT_SENT
            self._say(Kind.DREQ)

    # ---- the queue pair's side ----

    def communication_established(self) -> None:
        """A message has come: the RTU will."""
        if self.state is CmState.REPLY_SENT:
            self._establish(Established())

    def lost(self) -> None:
        """The queue pair hears nothing of the other one."""
        if self.state is CmState.ESTABLISHED:
            self._say(Kind.DREQ)
            self._over(Disconnected(by_remote=True, confirmed=False))

    # ---- what the link says ----

    def handle_record(self, kind: Kind, body: bytes) -> None:
        state = self.state
        if kind is Kind.REP and state is CmState.REQUEST_SENT:
            self._replied(Rep.decode(body))
        elif kind is Kind.REJ and state in (CmState.REQUEST_SENT, CmState.REPLY_SENT, CmState.JOINED):
            rej = Rej.decode(body)
            self.end(Rejected(rej.reason, rej.private_data))
        elif kind is Kind.RTU and state is CmState.REPLY_SENT:
            self._establish(Established())
        elif kind is Kind.DREQ:
            self._left(state)
        elif kind is Kind.REQ and state is CmState.JOINED:
            self._asked_for(Req.decode(body))
        elif kind is Kind.DREP and state is CmState.DISCONNECT_SENT:
            self._over(Disconnected(by_remote=False))
        elif kind is not Kind.RTU:  # which may come after a message has made it unneeded
            raise PeerViolation(f"{kind.name} in {state.name}", rule="control_order")

    def _left(self, state: CmState) -> None:
        """The other end has said that it is over."""
        if state is CmState.REQUEST_SENT:  # what it had joined with is no more, and the two words have crossed
            self.disconnect()
            self._tell(Rejected(REJECT_TIMEOUT))
            return
        self._say(Kind.DREP)
        if state is CmState.ESTABLISHED:
            self.qp.catch_up()
            self._over(Disconnected(by_remote=True))
        elif state in (CmState.REPLY_SENT, CmState.JOINED):
            self.end(Rejected(REJECT_TIMEOUT))
        elif state is CmState.DISCONNECT_SENT:
            self._over(Disconnected(by_remote=True))

    def _asked_for(self, req: Req) -> None:
        """The other end wants a connection by the queue pairs that are joined."""
        manager, link = self._manager, self._link
        asks_by_it = req.wire == manager.wire and self._is_other(req.endpoint) and req.service_id != POOL_SERVICE
        if link is None or not asks_by_it:
            raise PeerViolation("it asks by queue pairs that were not joined", rule="control_joined")
        request = ControlRequest(manager, link, self._number, req, self)
        if request.begin():
            link.hand_over(self._number, request)

    def _is_other(self, told: QpEndpoint) -> bool:
        """Whether that is what it is joined with; the MTU may have become that of both."""
        other = self._other
        return other is not None and (told.gid, told.number, told.psn) == (other.gid, other.number, other.psn)

    def handle_lost(self) -> None:
        self._link = None
        if self.state in (CmState.REQUEST_SENT, CmState.REPLY_SENT, CmState.JOINED):
            self.end(Unreachable())
        else:
            by_remote = self.state is CmState.ESTABLISHED
            self.qp.catch_up()
            self._over(Disconnected(by_remote=by_remote, confirmed=False))

    def _replied(self, rep: Rep) -> None:
        if self._other is not None and not self._is_other(rep.endpoint):
            raise PeerViolation("it answers with a queue pair that was not joined", rule="control_joined")
        if self._check_reply is not None and not self._check_reply(rep.private_data):
            self._say(Kind.REJ, Rej(REJECT_CONSUMER).encode())
            self.end(Rejected(REJECT_CONSUMER))
            return
        if self._other is None:
            able = self.qp.capabilities
            try:
                self.join(
                    rep.endpoint, initiator_depth=min(able.initiator_depth, rep.responder_resources),
                    responder_resources=min(able.responder_resources, rep.initiator_depth),
                )  # fmt: skip
            except SidestepError:
                self._say(Kind.REJ, Rej(_PATH_FAILED).encode())
                self.end(Unreachable())
                return
        service_id, private_data = self._asked
        if service_id == POOL_SERVICE:
            self.state = CmState.JOINED
            self.qp.ready_to_send()
            self._tell(Established())
            return
        self.qp.tell_beginning(Beginning(True, service_id, private_data, rep.private_data))
        self._say(Kind.RTU)
        self._establish(Established(rep.private_data))
        if self._manager.pool is not None:
            self._manager.pool.note(self.remote_address)

    # ---- what follows ----

    def end(self, event: ConnectionEvent | None) -> None:
        """It never was, or is no more: nothing follows."""
        self._fail_qp()
        self.state = CmState.CLOSED
        self._forget()
        if event is not None:
            self._tell(event)

    def _establish(self, event: Established) -> None:
        self.state = CmState.ESTABLISHED
        self.qp.ready_to_send()
        self._tell(event)

    def _over(self, event: Disconnected) -> None:
        self._fail_qp()
        self.state = CmState.TIMEWAIT
        self._forget()
        self._tell(event)
        self._manager.driver.call_later(limits.CONTROL_TIMEWAIT_S, partial(self.end, TimewaitExit()))

    def _fail_qp(self) -> None:
        if self.qp.state not in (QpState.RESET, QpState.ERROR):
            self.qp.modify_to_error()

    def _forget(self) -> None:
        if self._manager.connections.get(self.qp.number) is self:
            del self._manager.connections[self.qp.number]
        if self._link is not None:
            self._link.remove(self._number)
            self._link = None

    def _say(self, kind: Kind, body: bytes = b"") -> None:
        if self._link is not None:
            self._link.send(kind, self._number, body)

    def _tell(self, event: ConnectionEvent) -> None:
        self._manager.driver.notices.append(partial(self.handler, self, event))


class ControlManager(ListenerTable):
    """That of one device at one address of this host.

    Args:
        device: Whose queue pairs it connects.
        driver: The device's.
        wire: What the device speaks: the other host's has to speak the same.
        reach: Gives, now or later, the link with the host at an address; None: there is none.
    """

    def __init__(
        self,
        device: Device,
        driver: Driver,
        wire: str,
        reach: Callable[[str, Callable[[ControlLink | None], None]], None],
    ) -> None:
        super().__init__()
        self.device = device
        self.driver = driver
        self.wire = wire
        self._reach = reach
        self.connections: dict[int, ControlConnection] = {}  # by queue pair
        self.requests: set[ControlRequest] = set()  # not answered yet
        self.pool: QueuePairPool | None = None  # None: each connection joins its own

    def keep_joined(self, make_qp: Callable[[EventHandler], QueuePair], count: Callable[[str], object]) -> None:
        """Has queue pairs joined for connections to come; see `control_pool`."""
        self.pool = QueuePairPool(self, make_qp, count)

    def join_no_more(self) -> None:
        """Gives those up that no connection has."""
        if self.pool is not None:
            self.pool.close()

    def connect(
        self, address: str, service_id: int, qp: QueuePair, private_data: bytes, handler: ConnectionHandler, *,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> ControlConnection:  # fmt: skip
        self.check_private_data(private_data, PRIVATE_DATA_MAX)
        made = self.connections.get(qp.number)
        if made is not None and made.qp is qp and made.state is CmState.JOINED:
            made.reuse(service_id, private_data, handler, check_reply)
            return made
        self.check_qp(qp)
        made = ControlConnection(self, qp, address, handler, check_reply)
        self._reach(address, lambda link: made.request(link, service_id, private_data))
        return made

    def check_qp(self, qp: QueuePair) -> None:
        """Raises Misuse for a queue pair of another device, or one that is, or has been, connected."""
        if qp.device is not self.device:
            raise Misuse("a queue pair of another device")
        if qp.state is not QpState.INIT or qp.number in self.connections:
            raise Misuse(f"a queue pair in {qp.state.name} that was used before cannot be connected")

    def take(self, link: ControlLink, number: int, req: Req) -> Talker | None:
        """Somebody asks; he is answered by whoever listens. None: he has been answered already."""
        request = ControlRequest(self, link, number, req)
        if req.service_id == POOL_SERVICE and self.pool is not None:
            return request if self.pool.join(request) else None
        return request if request.begin() else None

    def take_joined(self, address: str, capabilities: QpCapabilities) -> ControlConnection | None:
        found = None if self.pool is None else self.pool.take(address, capabilities)
        if found is not None:
            found.handler = _unheard
        return found

    def close(self) -> None:
        """Ends everything, without waiting for anybody."""
        self.join_no_more()
        for listener in list(self.listeners):
            listener.close()
        for request in list(self.requests):
            request.reject(REJECT_INVALID_SERVICE_ID)
        for connection in list(self.connections.values()):
            if connection.state is CmState.ESTABLISHED:
                connection.disconnect()
            connection.end(None)
