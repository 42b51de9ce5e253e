"""What all devices made of software have in common; a device adds its queue pairs and its connection manager."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Final

from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.soft.handles import SoftAddressHandle
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
    from sidestep.rdma.soft.memory import QpInit
    from sidestep.rdma.soft.qp import SoftQueuePair
    from sidestep.rdma.verbs import (
        AsyncEvent,
        CompletionHandler,
        CompletionQueue,
        DeviceAttributes,
        EventHandler,
        QpCapabilities,
        SharedReceiveQueue,
    )

# Addresses are deliberately odd: nobody may take one for an address of this process, or for aligned.
VA_FIRST: Final = 0x7F00_0000_1003
VA_GAP: Final = 4099  # between two regions: what runs over the end of one does not reach the next


class SoftDevice(Device):
    """A device made of software.

    Args:
        name: For people.
        address: What the other end gives to `connect`.
        attributes: What it can do.
        notices: Calls to users that wait; whoever drives the device makes them.
        rng: Makes keys hard to guess: `secrets.SystemRandom()`, or a seeded one in simulations.
    """

    def __init__(
        self, name: str, address: str, attributes: DeviceAttributes, notices: deque[Callable[[], object]], rng: Random
    ) -> None:
        self.name = name
        self.address = address
        self.attributes = attributes
        self.notices = notices
        self.on_event: EventHandler | None = None
        self.keys = Keys(rng)
        self.domains: list[Domain] = []
        self.closed = False
        self.region_count = self.window_count = self.srq_count = self.ah_count = 0  # of all domains
        self._va = VA_FIRST

    def alloc_pd(self) -> Domain:
        self.check_open()
        domain = Domain(self)
        self.domains.append(domain)
        return domain

    def create_cq(self, capacity: int, handler: CompletionHandler | None = None) -> SoftQueue:
        self.check_open()
        if not 0 < capacity <= self.attributes.completions_max:
            raise Misuse(f"a completion queue of {capacity}; the device offers up to {self.attributes.completions_max}")
        return PolledQueue(self, capacity) if handler is None else HandledQueue(self, capacity, handler)

    def close(self) -> None:
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
            for handle in list(domain.handles):
                handle.destroy()
        for domain in self.domains:  # a queue pair may use the shared receives of another domain
            for srq in list(domain.shared_receives):
                srq.destroy()
        self.domains.clear()

    @abstractmethod
    def end_connections(self) -> None:
        """Closes all listeners and connections."""

    # For what belongs to the device.

    @abstractmethod
    def make_qp(self, init: QpInit) -> SoftQueuePair:
        """Makes a queue pair, which adds itself to `Domain.queue_pairs`."""

    def make_ud_qp(self, init: QpInit, qkey: int) -> SoftQueuePair:
        """The same for datagrams, of a device whose attributes offer them."""
        raise NotImplementedError

    def make_ah(self, domain: Domain, address: str) -> SoftAddressHandle:
        """Finds the way; raises Misuse for what is not the address of one host."""
        raise NotImplementedError

    def own_queue(self, queue: CompletionQueue) -> SoftQueue:
        """Misuse if the completion queue is not of this device."""
        if not isinstance(queue, SoftQueue) or queue.device is not self:
            raise Misuse("a completion queue of another device")
        return queue

    def own_shared(self, srq: SharedReceiveQueue | None) -> SharedReceives | None:
        """Misuse if the shared receive queue is not of this device."""
        if srq is None:
            return None
        if not isinstance(srq, SharedReceives) or srq.domain.device is not self or srq.destroyed:
            raise Misuse("a shared receive queue of another device, or one that is destroyed")
        return srq

    def check_capabilities(self, capabilities: QpCapabilities) -> None:
        """Misuse if no queue pair can have them; LimitReached if there is no more room for one."""
        attributes = self.attributes
        if not 0 < capabilities.max_send_wr <= attributes.work_requests_max:
            raise Misuse(f"a send queue of {capabilities.max_send_wr}")
        if not 0 < capabilities.max_recv_wr <= attributes.work_requests_max:
            raise Misuse(f"a receive queue of {capabilities.max_recv_wr}")
        for depth in (capabilities.initiator_depth, capabilities.responder_resources):
            if not 0 <= depth <= attributes.read_depth_max:
                raise Misuse(f"a depth of {depth} RDMA Reads; the device offers {attributes.read_depth_max}")
        if sum(len(each.queue_pairs) for each in self.domains) >= attributes.queue_pairs_max:
            raise LimitReached(f"the device has {attributes.queue_pairs_max} queue pairs already")

    def tell(self, event: AsyncEvent, handler: EventHandler | None = None) -> None:
        """To the handler of what it is about, else to the device's, if there is one."""
        if (handler := handler or self.on_event) is not None:
            self.notices.append(partial(handler, event))

    def check_open(self) -> None:
        """Misuse when the device is closed."""
        if self.closed:
            raise Misuse(f"the device {self.name} is closed")

    # What memory asks.

    def next_va(self, length: int) -> int:
        va = self._va
        self._va += length + VA_GAP
        return va

    def registration_fails(self) -> bool:
        """Whether this registration shall fail, as one of a hardware device may: memory pinned by nobody is there."""
        return False

    def registration_due(self, finish: Callable[[], None]) -> None:
        """Calls when a slow registration is done, from where the device is driven; here it takes no time."""
        self.notices.append(finish)

    def access_ended(self, memory: Memory) -> None:
        """The other end has no access any more, and the user may change the memory: what still refers to it is copied.

        Called before the call that ends the access returns, when the key is void already. Without memory that is queued
        for sending there is nothing to do.
        """

    def forget(self, domain: Domain) -> None:
        self.domains.remove(domain)
