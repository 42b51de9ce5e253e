"""Address handles, and what is asked of a datagram before it is queued; devices of the kernel ask the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sidestep.errors import Misuse
from sidestep.rdma.verbs import AddressHandle, QpType
from sidestep.rdma.work import QKEY_CONTROLLED, UdSend

if TYPE_CHECKING:
    from sidestep.rdma.soft.memory import Domain
    from sidestep.rdma.verbs import DeviceAttributes, QueuePair
    from sidestep.rdma.work import SendRequest

_QPN_MULTICAST: Final = 0xFF_FFFF


class SoftAddressHandle(AddressHandle):
    """One of a device made of software."""

    domain: Domain

    def __init__(self, domain: Domain, address: str, mtu: int) -> None:
        self.domain = domain
        self.address = address
        self.mtu = mtu
        self.valid = True

    def destroy(self) -> None:
        if self.valid:
            self.valid = False
            self.domain.handles.discard(self)
            self.domain.device.ah_count -= 1


def check_datagrams(attributes: DeviceAttributes, qkey: int = 0) -> None:
    """Misuse if the device offers none, or no queue pair of a program's can have this Q_Key."""
    if not attributes.address_handles_max:
        raise Misuse("the device has no unreliable datagrams")
    if not 0 <= qkey < QKEY_CONTROLLED:
        raise Misuse("a Q_Key has 31 bits: those with the highest one are the system's own")  # IBTA 10.2.5


def check_type(request: SendRequest, qp: QueuePair) -> None:
    """Misuse unless this type of queue pair sends such a thing; of a datagram also its way and its length."""
    if not isinstance(request, UdSend):
        if qp.qp_type is QpType.UD:
            raise Misuse(f"a queue pair for datagrams sends no {type(request).__name__}")
        return
    if qp.qp_type is not QpType.UD:
        raise Misuse("a connected queue pair sends no datagrams")
    ah = request.ah
    if ah.domain is not qp.domain or not ah.valid:
        raise Misuse("an address handle of another domain, or one that is destroyed")
    if not 0 < request.remote_qpn < _QPN_MULTICAST:
        raise Misuse(f"{request.remote_qpn:#x} is not the number of a queue pair")
    if not 0 <= request.remote_qkey < 1 << 32:
        raise Misuse("a Q_Key has 32 bits")
    length = sum(map(len, request.gather))
    if length > ah.mtu:  # IBTA C10-93.1.1: nothing would be sent, and no completion tell
        raise Misuse(f"a datagram of {length} bytes; {ah.mtu} go to {ah.address} at most")
