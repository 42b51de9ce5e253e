"""What all devices made of software have in common; a device adds its queue pairs and its connection manager."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Final

from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.soft.keys import Keys
from sidestep.rdma.soft.memory import Domain
from sidestep.rdma.soft.queues import HandledQueue, PolledQueue, SoftQueue
from sidestep.rdma.soft.receives import SharedReceives
from sidestep.rdma.verbs import Device

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from random import Random

    from sidestep.rdma.soft.keys import Memory
    from sidestep.rdma.soft.qp import SoftQueuePair
    from sidestep.rdma.soft.queues import Notice
    from sidestep.rdma.verbs import (
        AsyncEvent,
        CompletionHandler,
        CompletionQueue,
        DeviceAttributes,
        EventHandler,
        QpCapabilities,
        SharedReceiveQueue,
    )
    from sidestep.rdma.work import Access

# Addresses are deliberately odd: nobody may take one for an address of this process, or for aligned.
VA_FIRST: Final = 0x7F00_0000_1003
VA_GAP: Final = 4099  # between two regions: what runs over the end of one does not reach the next


class SoftDevice(Device):
    """A device made of software.

    Args:
        name: For people.
        address: What the other end gives to `connect`.
        attributes: What it can do.
        notices: Calls to users that wait; whoever drives the device makes them with `queues.tell_next`.
        rng: Makes keys hard to guess: `secrets.SystemRandom()`, or a seeded one in simulations.
    """

    __slots__ = (
        "_va",
        "address",
        "attributes",
        "closed",
        "domains",
        "keys",
        "name",
        "notices",
        "region_count",
        "srq_count",
        "window_count",
    )

    def __init__(
        self, name: str, address: str, attributes: DeviceAttributes, notices: deque[Notice], rng: Random
    ) -> None:
        self.name = name
        self.address = address
        self.attributes = attributes
        self.notices = notices
        self.on_event: EventHandler | None = None
        self.keys = Keys(rng)
        self.domains: list[Domain] = []
        self.closed = False
        self.region_count = self.window_count = self.srq_count = 0
        self._va = VA_FIRST

    def alloc_pd(self) -> Domain:
        """Makes a protection domain."""
        self.check_open()
        domain = Domain(self)
        self.domains.append(domain)
        return domain

    def create_cq(self, capacity: int, handler: CompletionHandler | None = None) -> SoftQueue:
        """Makes a completion queue."""
        self.check_open()
        if not 0 < capacity <= self.attributes.completions_max:
            raise Misuse(f"a completion queue of {capacity}; the device offers up to {self.attributes.completions_max}")
        return PolledQueue(self, capacity) if handler is None else HandledQueue(self, capacity, handler)

    def close(self) -> None:
        """Ends everything."""
        if self.closed:
            return
        self.closed = True
        self.end_connections()
        for domain in self.domains:
            for window in list(domain.windows):
                window.deallocate()
            for qp in list(domain.queue_pairs):
                qp.destroy()
            for region in list(domain.regions):
                region.deregister()
        for domain in self.domains:  # a queue pair may use the shared receives of another domain
            for srq in list(domain.shared_receives):
                srq.destroy()
        self.domains.clear()

    @abstractmethod
    def end_connections(self) -> None:
        """Closes all listeners and connections."""

    # For what belongs to the device.

    def create_qp(
        self,
        domain: Domain,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        capabilities: QpCapabilities,
        remote_access: Access,
        srq: SharedReceiveQueue | None,
        on_event: EventHandler | None,
    ) -> SoftQueuePair:
        """Makes a queue pair, if it may be."""
        self.check_open()
        attributes = self.attributes
        for queue in (send_cq, recv_cq):
            if not isinstance(queue, SoftQueue) or queue.device is not self:
                raise Misuse("a completion queue of another device")
        assert isinstance(send_cq, SoftQueue)
        assert isinstance(recv_cq, SoftQueue)
        if srq is not None and (not isinstance(srq, SharedReceives) or srq.domain.device is not self or srq.destroyed):
            raise Misuse("a shared receive queue of another device, or one that is destroyed")
        assert srq is None or isinstance(srq, SharedReceives)
        if not 0 < capabilities.max_send_wr <= attributes.work_requests_max:
            raise Misuse(f"a send queue of {capabilities.max_send_wr}")
        if not 0 < capabilities.max_recv_wr <= attributes.work_requests_max:
            raise Misuse(f"a receive queue of {capabilities.max_recv_wr}")
        for depth in (capabilities.initiator_depth, capabilities.responder_resources):
            if not 0 <= depth <= attributes.read_depth_max:
                raise Misuse(f"a depth of {depth} RDMA Reads; the device offers {attributes.read_depth_max}")
        if sum(len(each.queue_pairs) for each in self.domains) >= attributes.queue_pairs_max:
            raise LimitReached(f"the device has {attributes.queue_pairs_max} queue pairs already")
        return self.make_qp(domain, send_cq, recv_cq, capabilities, int(remote_access), srq, on_event)

    @abstractmethod
    def make_qp(
        self,
        domain: Domain,
        send_cq: SoftQueue,
        recv_cq: SoftQueue,
        capabilities: QpCapabilities,
        remote_access: int,
        srq: SharedReceives | None,
        on_event: EventHandler | None,
    ) -> SoftQueuePair:
        """Makes a queue pair; everything about it was checked."""

    def tell(self, event: AsyncEvent) -> None:
        """An event for the device's handler."""
        if self.on_event is not None:
            self.notices.append(partial(self.on_event, event))

    def check_open(self) -> None:
        """Misuse when the device is closed."""
        if self.closed:
            raise Misuse(f"the device {self.name} is closed")

    # What memory asks; see `adapter.Adapter`.

    def next_va(self, length: int) -> int:
        """An address for a region."""
        va = self._va
        self._va += length + VA_GAP
        return va

    def registration_fails(self) -> bool:
        """Registering memory that is pinned by nobody does not fail."""
        return False

    def registration_due(self, finish: Callable[[], None]) -> None:
        """Nor does it take time."""
        self.notices.append(finish)

    def access_ended(self, memory: Memory) -> None:
        """A device that keeps memory queued for sending copies it here."""

    def forget(self, domain: Domain) -> None:
        """A domain was deallocated."""
        self.domains.remove(domain)
