"""Unreliable datagrams (IBTA 9.8.3): a queue pair for them, and what it shares with the connection manager's.

A datagram is one packet. Who sends it learns nothing of it any more once it has left; who gets one checks it, and what
fails is dropped and counted by the device, in this order (IBTA 9.6.1, 9.8.3.2):

    transport    the opcode is not a datagram's
    state        the queue pair is in error
    qkey         the Q_Key is not that of the queue pair
    length       there is more payload than the largest path MTU
    no_receive   none is posted
    receive      that which is next is too short for the GRH and the payload; it stays where it is

A receive whose memory the datagram may not be written to is a fault of this end: it completes with
LOCAL_PROTECTION_ERROR, and the queue pair is in error.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, ClassVar, Final

from sidestep.rdma import grh
from sidestep.rdma.roce.counting import Tally
from sidestep.rdma.roce.packet import ICRC_LEN, PSN_MASK, Bth, Deth, ImmDt, Op, Packet
from sidestep.rdma.soft.qp import OP_RECEIVE, RTS, SUCCESS, UD, SoftQueuePair
from sidestep.rdma.verbs import QpType
from sidestep.rdma.work import GRH_LEN, QKEY_CONTROLLED, Completion, Status, UdSend

if TYPE_CHECKING:
    from sidestep.rdma.frames import IpAddress
    from sidestep.rdma.roce.device import RoceDevice
    from sidestep.rdma.soft.memory import QpInit
    from sidestep.rdma.work import Scatter, SendRequest

DATAGRAMS: Final = frozenset({Op.UD_SEND_ONLY, Op.UD_SEND_ONLY_IMM})
_HEADERS_LEN: Final = 8 + Bth.LENGTH + Deth.LAYOUT.size  # of UDP and of a datagram without immediate data


class DatagramMaker:
    """Makes the packets of one queue pair: their numbers count up, and nobody looks at them (IBTA 9.8.3.1)."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._psn = 0

    def packet(
        self, dest_qp: int, qkey: int, payload: bytes | memoryview, immediate: bytes | None = None, *,
        solicited: bool = False,
    ) -> Packet:  # fmt: skip
        self._psn = self._psn + 1 & PSN_MASK
        op = Op.UD_SEND_ONLY if immediate is None else Op.UD_SEND_ONLY_IMM
        deth = Deth(qkey, self._number)
        extensions = (deth,) if immediate is None else (deth, ImmDt(immediate))
        return Packet(Bth(op, dest_qp, self._psn, solicited=solicited, pad=-len(payload) % 4), extensions, payload)


def deth_of(packet: Packet, qkey: int) -> Deth | None:
    """The header of a datagram, if it has this Q_Key."""
    deth = packet.find(Deth)
    return deth if deth is not None and deth.qkey == qkey else None


class UdQueuePair(SoftQueuePair):
    """A queue pair for datagrams."""

    __slots__ = ("_maker", "_qkey", "_unsignaled", "_waiting", "tally")

    qp_type: ClassVar[QpType] = UD
    device: RoceDevice
    deadline: ClassVar[None] = None  # it waits for nothing
    wire: ClassVar[None] = None  # captures are of connections

    def __init__(self, device: RoceDevice, init: QpInit, qkey: int) -> None:
        super().__init__(device.next_qp_number(), device, init)
        self._qkey = qkey
        self.tally = Tally()
        self._maker = DatagramMaker(self.number)
        self._waiting: deque[UdSend] = deque()
        self._unsignaled = 0  # done, and in the queue until a signaled one is
        self.state = RTS
        device.queue_pairs_by_number[self.number] = self

    # --- the user's side ---

    @property
    def sends_outstanding(self) -> int:
        return len(self._waiting) + self._unsignaled

    def post_send(self, request: SendRequest) -> None:
        if self.check_post(request, self.sends_outstanding):
            assert isinstance(request, UdSend)  # it was checked
            self._waiting.append(request)
            self.device.has_work(self)

    def modify_to_error(self) -> None:
        self.end()

    def take_unfinished(self) -> list[SendRequest]:
        unfinished: list[SendRequest] = [*self._waiting]
        self._waiting.clear()
        return unfinished

    def destroy(self) -> None:
        super().destroy()
        self.device.forget_qp(self)

    def details(self) -> dict[str, object]:
        tally = self.tally
        return super().details() | {
            "packets_received": tally.packets_received, "packets_sent": tally.packets_sent,
        }  # fmt: skip

    # --- the device's side ---

    def poll_packet(self, now: float) -> tuple[str, Packet] | None:
        """The next one to send, and where to."""
        del now
        if not self._waiting:
            return None
        request = self._waiting[0]  # it stays until it is made: a fault flushes it
        status = self.begin(request)
        if status is not SUCCESS:
            self._waiting.popleft()
            self.complete(request, status)
            return None
        qkey = self._qkey if request.remote_qkey & QKEY_CONTROLLED else request.remote_qkey
        payload = b"".join(request.gather)
        packet = self._maker.packet(request.remote_qpn, qkey, payload, request.immediate, solicited=request.solicited)
        self._waiting.popleft()
        self.tally.packets_sent += 1
        self._unsignaled = 0 if request.signaled else self._unsignaled + 1
        self.complete(request, SUCCESS)
        return request.ah.address, packet

    def handle_timeout(self, now: float) -> None:
        """There is nothing that it waits for."""

    def handle_packet(self, remote: IpAddress, packet: Packet) -> str | None:
        """Takes in a packet with its number; or why it is dropped."""
        if packet.bth.opcode not in DATAGRAMS:
            return "transport"
        if self.state is not RTS:
            return "state"
        deth = deth_of(packet, self._qkey)
        if deth is None:
            return "qkey"
        length = len(packet.payload)
        if length > self.device.settings.mtu:
            return "length"
        receive = self.next_receive()
        if receive is None:
            return "no_receive"
        if GRH_LEN + length > sum(map(len, receive.scatter)):
            return "receive"
        self.take_receive()
        immediate = packet.find(ImmDt)
        udp_len = _HEADERS_LEN + (0 if immediate is None else ImmDt.LAYOUT.size) + length + packet.bth.pad + ICRC_LEN
        header = grh.written(remote, self.device.ip, udp_len)
        if not (self.may_receive(receive.scatter) and _placed(receive.scatter, header + bytes(packet.payload))):
            self.recv_cq.add(Completion(receive.wr_id, Status.LOCAL_PROTECTION_ERROR, OP_RECEIVE, 0, self.number))
            self.end()
            return None
        self.tally.packets_received += 1
        self.recv_cq.add(
            Completion(
                receive.wr_id, SUCCESS, OP_RECEIVE, GRH_LEN + length, self.number, packet.bth.solicited,
                immediate=None if immediate is None else immediate.data, source_qpn=deth.source_qp & 0xFF_FFFF,
            )
        )  # fmt: skip
        return None


def _placed(scatter: Scatter, data: bytes) -> bool:
    """Copies; False if the memory is not what the receive says: read-only, not bytes, or released."""
    try:
        for entry in scatter:
            room = entry[: len(data)]
            room[:] = data[: len(room)]
            data = data[len(room) :]
    except (TypeError, ValueError, BufferError):
        return False
    return not data
