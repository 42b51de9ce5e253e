"""Queue pairs that are joined by number: what another way than rdma_cm has told of the other end is told to the device.

    INIT -> RTR   the other end's GID and number, the path MTU of both, the PSN that its first packet has
    RTR -> RTS    the PSN of our first packet, retries, RDMA Reads under way

That is InfiniBand's (IBTA 10.3.1), over RoCE v2 alone: with iWARP a connection is TCP's, which the kernel makes. With
InfiniBand's own link layer the way to a GID is known to the subnet manager, whom rdma_cm asks; RoCE v1 and v2 do not
hear each other, and a GID does not say which of them it is of.
"""

from __future__ import annotations

from secrets import SystemRandom
from typing import TYPE_CHECKING, Final

from sidestep.errors import Misuse, Unavailable
from sidestep.rdma.kernel import abi
from sidestep.rdma.kernel.abi import QpMask
from sidestep.rdma.kernel.gids import address_of
from sidestep.rdma.path_mtu import PACKET_OVERHEAD, largest_code, route_mtu
from sidestep.rdma.roce.packet import MTU_CODES
from sidestep.rdma.verbs import EventKind, JoinedBy, QpEndpoint, QpState

if TYPE_CHECKING:
    from ctypes import Structure

    from sidestep.rdma.kernel.device import KernelDevice
    from sidestep.rdma.kernel.gids import GidEntry
    from sidestep.rdma.kernel.qp import KernelQueuePair

_HOPS: Final = 64  # of the packets; those of rdma_cm have as many
_RANDOM: Final = SystemRandom()
_READY_TO_RECEIVE: Final = (
    QpMask.STATE | QpMask.AV | QpMask.PATH_MTU | QpMask.DEST_QPN | QpMask.RQ_PSN | QpMask.MAX_DEST_RD_ATOMIC
    | QpMask.MIN_RNR_TIMER
)  # fmt: skip
_READY_TO_SEND: Final = (
    QpMask.STATE | QpMask.TIMEOUT | QpMask.RETRY_CNT | QpMask.RNR_RETRY | QpMask.SQ_PSN | QpMask.MAX_QP_RD_ATOMIC
)


class Joining:
    """One queue pair's."""

    __slots__ = ("_mtu", "_psn", "_qp", "_send_psn")

    def __init__(self, qp: KernelQueuePair) -> None:
        self._qp = qp
        self._psn = _RANDOM.getrandbits(24)  # of the first packet to come
        self._send_psn = 0
        self._mtu = 0  # once it is known, that of both

    def endpoint(self, address: str) -> QpEndpoint:
        device = self._qp.device
        entry = device.own_gid()
        return QpEndpoint(entry.gid.packed, self._qp.number, self._psn, self._mtu or mtu_to(device, address))

    def join(self, other: QpEndpoint, owner: JoinedBy, *, initiator_depth: int, responder_resources: int) -> None:
        """As `QueuePair.join`."""
        qp, device = self._qp, self._qp.device
        if qp.state is not QpState.INIT or qp.connection is not None:
            raise Misuse(f"a queue pair in {qp.state.name} that was used before cannot be joined")
        if not 0 < other.number < 1 << 24 or not 0 <= other.psn < 1 << 24:
            raise Unavailable(f"the other end tells of queue pair {other.number} with PSN {other.psn}")
        entry, remote = device.own_gid(), address_of(other.gid)
        code = largest_code(min(other.mtu, mtu_to(device, remote)))
        attributes = abi.QpAttr(
            qp_state=QpState.RTR, path_mtu=code, dest_qp_num=other.number, rq_psn=self._psn,
            max_dest_rd_atomic=responder_resources, min_rnr_timer=device.settings.rnr_timer,
        )  # fmt: skip
        fill_vector(attributes.ah_attr, device.port, entry, other.gid)
        try:
            qp.modify(attributes, _READY_TO_RECEIVE)
        except OSError as error:
            raise Unavailable(f"{remote} is not reached from {device.name}: {error.strerror}") from error
        self._send_psn, self._mtu = other.psn, MTU_CODES[code]
        qp.connection = owner
        qp.initiator_depth = initiator_depth
        qp.told_state(QpState.RTR)

    def ready_to_send(self) -> None:
        """As `QueuePair.ready_to_send`."""
        qp, settings = self._qp, self._qp.device.settings
        if qp.state is not QpState.RTR:
            return
        attributes = abi.QpAttr(
            qp_state=QpState.RTS, sq_psn=self._send_psn, max_rd_atomic=qp.initiator_depth, timeout=settings.ack_timeout,
            retry_cnt=settings.retries, rnr_retry=settings.rnr_retries,
        )  # fmt: skip
        try:
            qp.modify(attributes, _READY_TO_SEND)
        except OSError as error:
            qp.break_off(EventKind.QP_FATAL, f"the device does not make it ready to send: {error.strerror}")
        else:
            qp.told_state(QpState.RTS)


def fill_vector(vector: Structure, port: int, own: GidEntry, gid: bytes) -> None:
    """The way to a GID of RoCE v2."""
    vector.is_global, vector.port_num = 1, port
    vector.grh.dgid.raw[:] = gid
    vector.grh.sgid_index, vector.grh.hop_limit = own.index, _HOPS


def mtu_to(device: KernelDevice, address: str) -> int:
    """Bytes of payload a packet: as the port has it, and the way there."""
    route = route_mtu(device.address, address, ipv6=":" in device.address)
    return MTU_CODES[largest_code(min(device.active_mtu(), route - PACKET_OVERHEAD))]
