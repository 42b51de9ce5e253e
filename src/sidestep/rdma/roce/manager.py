"""The connection manager of the software HCA: the handshake of `soft.handshake` in datagrams on queue pair 1.

A message is a management datagram of 256 bytes (`mad`), as unreliable as UDP. Beside the six messages of the handshake
there are three:

- MRA asks for patience: who gets one waits so long, once. It is sent to who asks again while the user thinks.
- LAP offers an alternate path and is answered by APR: not supported (IBTA 12.8).

What a REQ asks for is checked before the user sees it; what cannot be is rejected with its reason (IBTA 12.6.7.2). A
REQ for a queue pair of the other end that has a connection here tells that it has started anew: the old connection
ends, and the REQ is rejected as stale (IBTA 12.9.8.3.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sidestep import limits
from sidestep.errors import LimitReached, PeerViolation
from sidestep.rdma.cm import REJECT_CONSUMER, REJECT_TIMEOUT, CmKind, CmState
from sidestep.rdma.roce import ip_cm
from sidestep.rdma.roce.datagram import known_address
from sidestep.rdma.roce.mad import Apr, CmMad, Drep, Dreq, Lap, Mad, Mra, Rej, Rep, Req, Rtu, gid
from sidestep.rdma.roce.numbers import timeout_s
from sidestep.rdma.roce.packet import MTU_CODES, QKEY_GSI, QP_GSI, Op, Packet
from sidestep.rdma.roce.path import Path
from sidestep.rdma.roce.qp import RoceQueuePair
from sidestep.rdma.roce.tap import PacketWire
from sidestep.rdma.roce.ud import DatagramMaker, deth_of
from sidestep.rdma.soft.handshake import HandshakeConnection, HandshakeManager

if TYPE_CHECKING:
    from sidestep.rdma.cm import ConnectionHandler
    from sidestep.rdma.roce.device import RoceDevice
    from sidestep.rdma.roce.schedule import Delay
    from sidestep.rdma.verbs import QueuePair

# Reasons of a rejection that only this end's own checks give (IBTA 12.6.7.2).
REJECT_TRANSPORT: Final = 9
REJECT_STALE: Final = 10
REJECT_GID: Final = 12
REJECT_MTU: Final = 26
_ABOUT_REQ, _ABOUT_REP, _ABOUT_OTHER = range(3)  # of which message a REJ or MRA speaks
_APR_UNKNOWN, _APR_UNSUPPORTED = 1, 2
_TIMEOUT_CODES: Final = (8, 22)  # 1 ms to 17 s: what a peer may make this end wait for an answer, each time
_PATIENCE_MAX: Final = 24  # 69 s: what an MRA may ask for, as Linux does
_EPHEMERAL: Final = 0xC000
_OF_SOME: Final = "service_id", "responder_resources", "initiator_depth", "reason"


Came: TypeAlias = "tuple[int, bytes | memoryview]"  # a datagram: the port that it comes from, and its payload


@dataclass(frozen=True, slots=True, kw_only=True)
class CmReceived:
    """A message that came, as the handshake looks at it."""

    kind: CmKind
    source: str
    local_id: int
    remote_id: int
    transaction_id: int
    message: CmMad
    came: Came
    private_data: bytes
    service_id: int  # as those that follow: 0 in a message that has none
    responder_resources: int
    initiator_depth: int
    reason: int


class RoceConnection(HandshakeConnection[RoceQueuePair, CmReceived]):
    """One side of a connection."""

    _manager: RoceManager

    def __init__(
        self,
        manager: RoceManager,
        qp: RoceQueuePair,
        remote_address: str,
        handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> None:
        super().__init__(manager, qp, remote_address, handler, check_reply)
        device = manager.device
        self.transaction_id = device.rng.getrandbits(32) << 32 | self.local_id
        self.receive_psn = device.rng.getrandbits(24)
        self.mtu_code = device.mtu_code_to(remote_address)
        self._timeout_code = device.settings.cm_timeout_code
        self._retries = device.settings.cm_retries
        self._patient = False  # the other end was given the time that it has asked for
        self.asked_as = 0  # transaction of the other end's REQ
        self.stale_key: tuple[str, int, int] | None = None  # the other end's queue pair
        remote = str(known_address(remote_address))
        self.wire = PacketWire(device.taps, device.address, remote, active=True)  # unless it has `joined`

    def patience(self) -> tuple[float, int]:
        if self.state is CmState.DISCONNECT_SENT:  # which nobody but this end has an interest in
            settings = self._manager.device.settings
            return timeout_s(settings.cm_timeout_code), settings.cm_retries
        return timeout_s(self._timeout_code), self._retries

    def timewait_s(self) -> float:
        return self._manager.device.settings.timewait_s

    def joined(self, req: CmReceived) -> None:
        message = req.message
        assert isinstance(message, Req)
        # IBTA 12.6.5: that of the REQ, through all of the handshake.
        self.transaction_id = self.asked_as = req.transaction_id
        self.wire.active = False
        self.wire.message(*req.came, outbound=False)
        self.mtu_code = message.mtu_code
        self._timeout_code = _bounded(message.local_timeout, *_TIMEOUT_CODES)
        self._retries = message.cm_retries
        ack = _bounded(message.ack_timeout, *_TIMEOUT_CODES)
        self._follow(message, message.retry_count, message.rnr_retry, ack)

    def agreed(self, reply: CmReceived) -> None:
        message = reply.message
        assert isinstance(message, Rep)
        settings = self._manager.device.settings
        self._follow(message, settings.retry_count, message.rnr_retry, settings.ack_timeout_code)

    def ask_patience(self, mra: Mra) -> None:
        """The other end needs more time, and gets it once (IBTA 12.6.6)."""
        waits = (CmState.REQUEST_SENT, _ABOUT_REQ), (CmState.REPLY_SENT, _ABOUT_REP)
        if (self.state, mra.received) in waits and not self._patient:
            self._patient = True
            self._stop_timer()
            seconds = timeout_s(min(mra.service_timeout, _PATIENCE_MAX)) + self.patience()[0]
            self._timer = self._manager.call_later(seconds, self._again)

    def end(self, event: Any) -> None:
        super().end(event)
        self._manager.no_longer(self)
        self.wire.closed(self.qp.number)

    def _follow(self, message: Req | Rep, retry_count: int, rnr_retry: int, ack_timeout_code: int) -> None:
        device = self._manager.device
        remote = known_address(self.remote_address)
        self.stale_key = (str(remote), message.ca_guid, message.qpn)
        self._manager.by_queue_pair[self.stale_key] = self
        self.qp.follow(
            Path(
                address=self.remote_address, remote=remote, remote_qp=message.qpn, mtu=MTU_CODES[self.mtu_code],
                # IBTA 12.7.22: each side tells the first number of the packets that it wants to get.
                send_psn=message.starting_psn, receive_psn=self.receive_psn, timeout_s=timeout_s(ack_timeout_code),
                retry_count=retry_count, rnr_retry=rnr_retry, rnr_timer_code=device.settings.rnr_timer_code,
                window=device.window,
            )
        )  # fmt: skip
        self.qp.wire = self.wire
        self.wire.opened(self.qp.number, message.qpn)


class RoceManager(HandshakeManager[RoceQueuePair, CmReceived]):
    """The connection manager of one device."""

    device: RoceDevice
    connections: dict[int, RoceConnection]

    def __init__(self, device: RoceDevice) -> None:
        super().__init__(device)
        self.count = device.events.add
        self.by_queue_pair: dict[tuple[str, int, int], RoceConnection] = {}  # of the other end
        self._comm_id = device.rng.getrandbits(32)
        self._datagrams = DatagramMaker(QP_GSI)
        self._unsent: deque[tuple[str, Mad, PacketWire | None]] = deque()
        self._over: dict[
            tuple[str, int, int], Mad | None
        ] = {}  # answers to requests that are no more, the oldest first

    # --- the user's side ---

    def connect(
        self, address: str, service_id: int, qp: QueuePair, private_data: bytes, handler: ConnectionHandler, *,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> RoceConnection:  # fmt: skip
        if ip_cm.has_header(service_id):
            remote, _ = self.device.reached(address)
            private_data = ip_cm.encode(self.device.ip, _EPHEMERAL | qp.number & 0x3FFF, remote) + private_data
        connection = super().connect(address, service_id, qp, private_data, handler, check_reply=check_reply)
        assert isinstance(connection, RoceConnection)
        return connection

    def check_target(self, address: str, service_id: int) -> str:
        self.device.check_open()
        return self.device.reached(super().check_target(address, service_id))[1]

    def open_service(self, service_id: int) -> int:
        """Port 0 of rdma_cm's port spaces is any that is free here."""
        self.device.check_open()
        if not ip_cm.has_header(service_id) or service_id & 0xFFFF:
            return service_id
        taken = {each.service_id for each in self.listeners}
        for port in range(_EPHEMERAL, 1 << 16):
            if service_id + port not in taken:
                return service_id + port
        raise LimitReached("all ports are taken")

    # --- the device's side ---

    def poll_packet(self) -> tuple[str, Packet, PacketWire | None] | None:
        """The next datagram to send, and of whose connection it is."""
        if not self._unsent:
            return None
        address, mad, wire = self._unsent.popleft()
        return address, self._datagrams.packet(QP_GSI, QKEY_GSI, mad.encode()), wire

    def handle_packet(self, address: str, packet: Packet, now: float, came: Came) -> None:
        """Takes in what came for queue pair 1."""
        self.device.delays.begin(now)
        if packet.bth.opcode is not Op.UD_SEND_ONLY or deth_of(packet, QKEY_GSI) is None:
            self.device.events.add("mad_dropped", "not_general_services")  # IBTA 10.2.5: privileged, and only there
            return
        try:
            mad = Mad.decode(packet.payload)
        except PeerViolation as broken:
            self.device.events.add("mad_dropped", broken.rule)
            return
        if (connection := self._connection_of(address, mad.message)) is not None:
            connection.wire.message(*came, outbound=False)
        if isinstance(mad.message, Mra | Lap | Apr):
            self._beside(address, mad)
        elif (heard := self._heard(address, mad, came)) is not None:
            self.receive(heard)

    def next_comm_id(self) -> int:
        while True:
            self._comm_id = self._comm_id + 1 & 0xFFFF_FFFF
            if self._comm_id and self._comm_id not in self.connections:
                return self._comm_id

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Delay:
        delay = self.device.delays.call_later(delay_s, callback)
        self.device.wake()
        return delay

    def make_connection(
        self,
        qp: RoceQueuePair,
        remote_address: str,
        handler: ConnectionHandler,
        check_reply: Callable[[bytes], bool] | None,
    ) -> RoceConnection:
        return RoceConnection(self, qp, remote_address, handler, check_reply)

    def no_longer(self, connection: RoceConnection) -> None:
        """It has ended."""
        if connection.asked_as:
            self._remember(connection.remote_address, connection.remote_id, connection.asked_as, None)
        key = connection.stale_key
        if key is not None and self.by_queue_pair.get(key) is connection:
            del self.by_queue_pair[key]

    # --- what goes out ---

    def send(
        self, kind: CmKind, address: str, local_id: int, remote_id: int, qp: RoceQueuePair | None = None, **fields: Any
    ) -> None:
        """Queues a message of a connection's, or of none; `fields` are those that not every kind has."""
        connection = self.connections.get(local_id)
        transaction_id = connection.transaction_id if connection is not None else 0
        message: CmMad
        if kind is CmKind.REQ:
            assert connection is not None
            message = self._request(connection, **fields)
        elif kind is CmKind.REP:
            assert connection is not None
            settings = self.device.settings
            message = Rep(
                local_id, remote_id, connection.qp.number, connection.receive_psn, ca_guid=self.device.guid,
                ack_delay=settings.ack_timeout_code, flow_control=False, rnr_retry=settings.rnr_retry,
                srq=connection.qp.srq is not None, **fields,
            )  # fmt: skip
        elif kind is CmKind.REJ:
            message = Rej(local_id, remote_id, **fields)
        elif kind is CmKind.DREQ:
            path = None if qp is None else qp.path
            message = Dreq(local_id, remote_id, 0 if path is None else path.remote_qp)
        else:
            message = (Rtu if kind is CmKind.RTU else Drep)(local_id, remote_id)
        self._queue(address, Mad(transaction_id, message))

    def reject(self, message: CmReceived, reason: int, private_data: bytes = b"") -> None:
        self.device.events.add("request_rejected", str(reason))
        about = {CmKind.REQ: _ABOUT_REQ, CmKind.REP: _ABOUT_REP}.get(message.kind, _ABOUT_OTHER)
        rej = Rej(message.remote_id, message.local_id, reason, about, private_data)
        answer = Mad(message.transaction_id, rej)
        self._remember(message.source, message.local_id, message.transaction_id, answer)
        if isinstance(message.message, Req) and self.device.taps:
            wire = self._shown(message, message.message)
            self._queue(message.source, answer, wire)
            wire.closed()
        else:
            self._queue(message.source, answer)

    def _shown(self, heard: CmReceived, req: Req) -> PacketWire:
        """Who looks on sees a REQ that becomes no connection here, and why."""
        wire = PacketWire(self.device.taps, self.device.address, str(known_address(heard.source)), active=False)
        wire.message(*heard.came, outbound=False)
        wire.opened(0, req.qpn)
        return wire

    def give_up_request(self, connection: HandshakeConnection[RoceQueuePair, CmReceived]) -> None:
        """The other end's id is not known: it knows the attempt by ours, and our GUID (IBTA 12.6.7.2, reason 4)."""
        self.send(
            CmKind.REJ, connection.remote_address, connection.local_id, 0, reason=REJECT_TIMEOUT,
            rejected=_ABOUT_OTHER, ari_len=8, ari_guid=self.device.guid,
        )  # fmt: skip

    def asked_again(self, message: CmReceived) -> None:
        request = self.requests.get((message.source, message.local_id))
        if request is not None:
            mra = Mra(0, message.local_id, _ABOUT_REQ, self.device.settings.patience_code)
            self._queue(message.source, Mad(message.transaction_id, mra))

    def _remember(self, source: str, comm_id: int, transaction_id: int, answer: Mad | None) -> None:
        """A REQ or REP may come again although it is done with: late, or since its answer was lost, then repeated."""
        while len(self._over) >= limits.ROCE_ANSWERED_MAX:
            del self._over[next(iter(self._over))]
        self._over[source, comm_id, transaction_id] = answer

    def _request(self, connection: RoceConnection, **fields: Any) -> Req:
        settings, device = self.device.settings, self.device
        return Req(
            local_comm_id=connection.local_id, qpn=connection.qp.number, starting_psn=connection.receive_psn,
            local_gid=gid(device.ip), remote_gid=gid(known_address(connection.remote_address)), ca_guid=device.guid,
            remote_timeout=settings.cm_timeout_code, local_timeout=settings.cm_timeout_code, flow_control=False,
            retry_count=settings.retry_count, rnr_retry=settings.rnr_retry, cm_retries=settings.cm_retries,
            mtu_code=connection.mtu_code, srq=connection.qp.srq is not None, ack_timeout=settings.ack_timeout_code,
            **fields,
        )  # fmt: skip

    def _queue(self, address: str, mad: Mad, wire: PacketWire | None = None) -> None:
        if len(self._unsent) >= limits.ROCE_MADS_MAX:
            self.device.events.add("mad_dropped", "too_many_to_send")
            return
        if wire is None and (connection := self.connections.get(mad.message.local_comm_id)) is not None:
            wire = connection.wire
        if wire is not None:
            wire.unsent += 1
        self._unsent.append((address, mad, wire))
        self.device.wake()

    # --- what comes ---

    def _connection_of(self, address: str, message: CmMad) -> RoceConnection | None:
        """The one that a message of that host names; None for a REQ, which has none yet."""
        connection = self.connections.get(getattr(message, "remote_comm_id", 0))
        return connection if connection is not None and connection.remote_address == address else None

    def _heard(self, address: str, mad: Mad, came: Came) -> CmReceived | None:
        message = mad.message
        if isinstance(message, Dreq):
            named = self.connections.get(message.remote_comm_id)
            if named is not None and named.qp.number != message.remote_qpn:
                self.device.events.add("mad_dropped", "other_queue_pair")  # IBTA 12.6.9: it names who gets it
                return None
            if (connection := self._connection_of(address, message)) is not None:
                connection.transaction_id = mad.transaction_id  # which the DREP repeats
        return CmReceived(
            kind=CmKind(message.ATTRIBUTE), source=address, local_id=message.local_comm_id,
            transaction_id=mad.transaction_id, message=message, came=came, private_data=message.private_data,
            remote_id=getattr(message, "remote_comm_id", 0), **{name: getattr(message, name, 0) for name in _OF_SOME},
        )  # fmt: skip

    def _on_request(self, message: CmReceived) -> None:
        req = message.message
        assert isinstance(req, Req)
        if self._repeats(message):
            return
        reason = self._unacceptable(message, req)
        if reason is not None:
            self.reject(message, reason)
            return
        if ip_cm.has_header(req.service_id):
            try:
                ip_cm.check(message.private_data)
            except PeerViolation:
                self.reject(message, REJECT_CONSUMER)  # as Linux's rdma_cm
                return
            message = replace(message, private_data=message.private_data[ip_cm.HEADER_LEN :])
        super()._on_request(message)

    def _unacceptable(self, message: CmReceived, req: Req) -> int | None:
        """Why a REQ cannot be accepted by whomever it is for (IBTA 12.6.7.2)."""
        remote = known_address(message.source)
        old = self.by_queue_pair.get((str(remote), req.ca_guid, req.qpn))
        if old is not None and old.remote_id != message.local_id:
            if old.state is CmState.ESTABLISHED:
                old.disconnect()
            return REJECT_STALE
        if req.transport or req.extended_transport:
            return REJECT_TRANSPORT
        if req.local_gid != gid(remote) or req.remote_gid != gid(self.device.ip):
            return REJECT_GID  # packets would go elsewhere
        if not 1 <= req.mtu_code <= self.device.mtu_code_to(message.source):
            return REJECT_MTU
        return None

    def _on_withdrawal(self, message: CmReceived) -> None:
        super()._on_withdrawal(message)
        self._remember(message.source, message.local_id, message.transaction_id, None)

    def _beside(self, address: str, mad: Mad) -> None:
        message = mad.message
        connection = self._connection_of(address, message)
        if isinstance(message, Lap):
            status = _APR_UNKNOWN if connection is None else _APR_UNSUPPORTED
            apr = Apr(message.remote_comm_id, message.local_comm_id, status)
            self._queue(address, Mad(mad.transaction_id, apr))
        elif isinstance(message, Mra) and connection is not None:
            connection.ask_patience(message)

    def _repeats(self, message: CmReceived) -> bool:
        """Whether it is done with; the answer, if there was one, is given again."""
        key = message.source, message.local_id, message.transaction_id
        if key not in self._over:
            return False
        if (answer := self._over[key]) is not None:
            self._queue(message.source, answer)
        return True

    def _stray(self, message: CmReceived) -> None:
        if message.kind is CmKind.REP and self._repeats(message):
            return
        if message.kind is CmKind.DREQ:
            drep = Drep(message.remote_id, message.local_id)
            self._queue(message.source, Mad(message.transaction_id, drep))
        else:
            super()._stray(message)


def _bounded(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))
