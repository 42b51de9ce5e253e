"""Datagrams of the kernel's devices: queue pairs for them, and address handles.

Over RoCE v2 alone, as with `joining`: iWARP has none, and with InfiniBand's own link layer the way to a GID is known to
the subnet manager.
"""

from __future__ import annotations

from ctypes import byref
from typing import TYPE_CHECKING, ClassVar, Final

from sidestep.errors import Misuse
from sidestep.rdma.kernel import abi, gids
from sidestep.rdma.kernel.abi import QpMask
from sidestep.rdma.kernel.joining import fill_vector, mtu_to
from sidestep.rdma.kernel.libraries import told
from sidestep.rdma.kernel.qp import KernelQueuePair
from sidestep.rdma.verbs import AddressHandle, QpState, QpType

if TYPE_CHECKING:
    from sidestep.rdma.kernel.memory import KernelDomain
    from sidestep.rdma.kernel.queues import KernelQueue
    from sidestep.rdma.kernel.receives import KernelSharedReceives
    from sidestep.rdma.verbs import EventHandler, QpCapabilities

_INIT: Final = QpMask.STATE | QpMask.PORT | QpMask.PKEY_INDEX | QpMask.QKEY


class KernelUdQueuePair(KernelQueuePair):
    """A queue pair for datagrams."""

    qp_type: ClassVar[QpType] = QpType.UD

    def __init__(
        self,
        domain: KernelDomain,
        queues: tuple[KernelQueue, KernelQueue],
        capabilities: QpCapabilities,
        qkey: int,
        srq: KernelSharedReceives | None,
        on_event: EventHandler | None,
    ) -> None:
        self._qkey = qkey
        super().__init__(domain, queues, capabilities, 0, srq, on_event)
        self._writer.own_qkey = qkey

    def _make_ready(self) -> None:
        init = abi.QpAttr(qp_state=QpState.INIT, port_num=self.device.port, qkey=self._qkey)
        self.modify(init, _INIT)
        self.modify(abi.QpAttr(qp_state=QpState.RTR), QpMask.STATE)
        self.modify(abi.QpAttr(qp_state=QpState.RTS), QpMask.STATE | QpMask.SQ_PSN)
        self.told_state(QpState.RTS)


class KernelAddressHandle(AddressHandle):
    """The way to a host. `pointer` is the address of the `ibv_ah`."""

    domain: KernelDomain

    def __init__(self, domain: KernelDomain, address: str) -> None:
        device = domain.device
        try:
            gid = gids.wanted(address)
        except ValueError as error:
            raise Misuse(f"{address!r} is no IP address") from error
        if (gid.ipv4_mapped or gid).is_multicast or (gid.ipv4_mapped or gid).is_unspecified:
            raise Misuse(f"{address} is not the address of one host")
        if (gid.ipv4_mapped is None) != (gids.wanted(device.address).ipv4_mapped is None):
            raise Misuse(f"{address} is of another version of IP than {device.address}")
        attributes = abi.AhAttr()
        fill_vector(attributes, device.port, device.own_gid(), gid.packed)
        try:
            self.pointer: int = device.libraries.ibv_create_ah(domain.address, byref(attributes))
        except OSError as error:
            raise told(error, f"{address} is not reached from {device.name}") from error
        self.domain = domain
        self.address = address
        self.mtu = mtu_to(device, address)
        self.valid = True

    def destroy(self) -> None:
        if not self.valid:
            return
        try:
            self.domain.device.libraries.ibv_destroy_ah(self.pointer)
        except OSError as error:
            raise told(error, "the address handle could not be destroyed") from error
        self.valid = False
        self.domain.handles.discard(self)
