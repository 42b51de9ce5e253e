"""Receives: how they are handed to the device, and the queue that several queue pairs share.

A receive has a number in `KernelDevice.receives` from posting to completion; the completion names it, and so whose it
was. A queue pair that is destroyed may take completions with it (ibv_destroy_qp(3)): shared receives of such messages
stay counted until the shared queue is destroyed.
"""

from __future__ import annotations

import errno
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING

from sidestep.errors import LimitReached, Misuse, Unavailable
from sidestep.rdma.address import buffer_address
from sidestep.rdma.kernel import abi
from sidestep.rdma.kernel.libraries import told
from sidestep.rdma.verbs import AsyncEvent, EventKind, SharedReceiveQueue

if TYPE_CHECKING:
    from typing import Any

    from sidestep.rdma.kernel.device import KernelDevice
    from sidestep.rdma.kernel.memory import KernelDomain
    from sidestep.rdma.kernel.qp import KernelQueuePair
    from sidestep.rdma.verbs import EventHandler
    from sidestep.rdma.work import Receive, Scatter


class Poster:
    """Fills in what the device is told of a receive; one for each queue of receives."""

    __slots__ = ("_bad", "_domain", "_entries", "_wr")

    def __init__(self, domain: KernelDomain, entries_max: int) -> None:
        self._domain = domain
        self._entries = (abi.Sge * max(1, entries_max))()
        self._wr = abi.RecvWr(sg_list=self._entries)
        self._bad = c_void_p()

    def post(self, call: Any, queue: int, wr_id: int, scatter: Scatter) -> None:
        """Raises LimitReached, or Unavailable with what the device says."""
        used = 0
        for entry in scatter:
            if not len(entry):
                continue  # to some devices no length is 2^31 bytes
            address = buffer_address(entry)
            region = self._domain.find(entry, address)
            place = self._entries[used]
            # The key 0 names nothing: the message that comes for it fails, as the rule is.
            place.addr, place.length, place.lkey = address, len(entry), region.lkey if region is not None else 0
            used += 1
        wr = self._wr
        wr.wr_id, wr.num_sge = wr_id, used
        if error := call(queue, byref(wr), byref(self._bad)):
            if abs(error) == errno.ENOMEM:
                raise LimitReached("the device has no room for a receive")
            raise Unavailable(f"the device took no receive: error {abs(error)}")


class KernelSharedReceives(SharedReceiveQueue):
    """A shared receive queue."""

    domain: KernelDomain

    def __init__(self, domain: KernelDomain, max_wr: int, on_event: EventHandler | None) -> None:
        self.domain = domain
        self.max_wr = max_wr
        self.on_event = on_event
        self.users: set[KernelQueuePair] = set()
        self.posted: dict[int, Receive] = {}  # by number
        self._limit = 0
        device = domain.device
        attributes = abi.SrqInitAttr(attr=abi.SrqAttr(max_wr=max_wr, max_sge=device.shared_scatter_max))
        try:
            self.address: int | None = device.libraries.ibv_create_srq(domain.address, byref(attributes))
        except OSError as error:
            raise told(error, "no shared receive queue could be made") from error
        self._poster = Poster(domain, device.shared_scatter_max)
        device.shared[self.address] = self

    @property
    def device(self) -> KernelDevice:
        return self.domain.device

    @property
    def receives_posted(self) -> int:
        for qp in self.users:
            qp.recv_cq.look()
        return len(self.posted)

    def post_recv(self, receive: Receive) -> None:
        if self.address is None:
            raise Misuse("the shared receive queue is destroyed")
        if len(self.posted) >= self.max_wr and self.receives_posted >= self.max_wr:
            raise LimitReached(f"{self.max_wr} receives are posted already")
        if len(receive.scatter) > self.device.attributes.scatter_max:
            raise Misuse(f"a receive of {len(receive.scatter)} entries")
        number = self.device.next_receive()
        self._poster.post(self.device.ops.post_srq_recv, self.address, number << 1 | 1, receive.scatter)
        self.posted[number] = receive
        self.device.receives[number] = self

    def arm(self, limit: int) -> None:
        if not 0 <= limit <= self.max_wr:
            raise Misuse(f"a limit of {limit} for a queue of {self.max_wr}")
        self._limit = limit
        wanted = abi.SrqAttr(srq_limit=limit)
        try:
            self.device.libraries.ibv_modify_srq(self.address, byref(wanted), abi.SRQ_LIMIT)
        except OSError as error:
            raise told(error, "the shared receive queue could not be armed") from error
        if self.receives_posted < limit:
            self.low()

    def low(self) -> None:
        """Fewer receives than the limit are left: told once."""
        if self._limit and self.receives_posted < self._limit:
            self._limit = 0
            event = AsyncEvent(EventKind.SRQ_LIMIT_REACHED, self, f"{len(self.posted)} receives are left")
            self.device.tell(event, self.on_event)

    def destroy(self) -> None:
        if self.users:
            raise Misuse(f"the shared receive queue is used by {len(self.users)} queue pairs")
        if self.address is None:
            return
        try:
            self.device.libraries.ibv_destroy_srq(self.address)
        except OSError as error:
            raise told(error, "the shared receive queue could not be destroyed") from error
        del self.device.shared[self.address]
        self.address = None
        for number in self.posted:
            self.device.receives.pop(number, None)
        self.posted.clear()
        self.domain.shared_receives.discard(self)
