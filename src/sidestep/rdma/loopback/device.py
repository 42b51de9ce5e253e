"""A loopback device: what belongs to it, and what becomes of it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.loopback.immediate import ImmediateQueuePair
from sidestep.rdma.loopback.manager import LoopbackManager
from sidestep.rdma.loopback.memory import VA_FIRST, VA_GAP, Keys, LoopbackDomain
from sidestep.rdma.loopback.queues import HandledQueue, LoopbackQueue, PolledQueue
from sidestep.rdma.loopback.timed import TimedQueuePair
from sidestep.rdma.verbs import AsyncEvent, Device, EventKind

if TYPE_CHECKING:
    from sidestep.rdma.loopback.fabric import Fabric
    from sidestep.rdma.loopback.qp import LoopbackQueuePair
    from sidestep.rdma.verbs import (
        CompletionHandler,
        CompletionQueue,
        DeviceAttributes,
        EventHandler,
        QpCapabilities,
    )
    from sidestep.rdma.work import Access


class LoopbackDevice(Device):
    """One device of a fabric. `Fabric.device` makes it."""

    __slots__ = (
        "_bytes_until",
        "_closed",
        "_va",
        "address",
        "attributes",
        "cm",
        "domains",
        "fabric",
        "keys",
        "name",
        "port_active",
    )

    cm: LoopbackManager

    def __init__(self, fabric: Fabric, name: str, attributes: DeviceAttributes) -> None:
        self.fabric = fabric
        self.name = name
        self.address = name
        self.attributes = attributes
        self.on_event: EventHandler | None = None
        self.keys = Keys()
        self.domains: list[LoopbackDomain] = []
        self.port_active = True
        self.cm = LoopbackManager(self)
        self._va = VA_FIRST
        self._bytes_until = 0.0  # when the last byte given to the port has left
        self._closed = False

    def alloc_pd(self) -> LoopbackDomain:
        """Makes a protection domain."""
        self._check_open()
        domain = LoopbackDomain(self)
        self.domains.append(domain)
        return domain

    def create_cq(self, capacity: int, handler: CompletionHandler | None = None) -> LoopbackQueue:
        """Makes a completion queue."""
        self._check_open()
        if not 0 < capacity <= self.attributes.completions_max:
            raise Misuse(f"a completion queue of {capacity}; the device offers up to {self.attributes.completions_max}")
        return PolledQueue(self, capacity) if handler is None else HandledQueue(self, capacity, handler)

    def close(self) -> None:
        """Ends everything."""
        if self._closed:
            return
        self._closed = True
        self.cm.close()
        for domain in self.domains:
            for qp in list(domain.queue_pairs):
                qp.destroy()
            for region in list(domain.regions):
                region.deregister()
        self.domains.clear()
        del self.fabric.devices[self.name]

    # For what belongs to the device.

    def create_qp(
        self,
        domain: LoopbackDomain,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        capabilities: QpCapabilities,
        remote_access: Access,
        on_event: EventHandler | None,
    ) -> LoopbackQueuePair:
        """Makes a queue pair."""
        self._check_open()
        attributes = self.attributes
        for queue in (send_cq, recv_cq):
            if not isinstance(queue, LoopbackQueue) or queue.device is not self:
                raise Misuse("a completion queue of another device")
        assert isinstance(send_cq, LoopbackQueue)
        assert isinstance(recv_cq, LoopbackQueue)
        if not 0 < capabilities.max_send_wr <= attributes.work_requests_max:
            raise Misuse(f"a send queue of {capabilities.max_send_wr}")
        if not 0 < capabilities.max_recv_wr <= attributes.work_requests_max:
            raise Misuse(f"a receive queue of {capabilities.max_recv_wr}")
        for depth in (capabilities.initiator_depth, capabilities.responder_resources):
            if not 0 <= depth <= attributes.read_depth_max:
                raise Misuse(f"a depth of {depth} RDMA Reads; the device offers {attributes.read_depth_max}")
        if sum(len(each.queue_pairs) for each in self.domains) >= attributes.queue_pairs_max:
            raise LimitReached(f"the device has {attributes.queue_pairs_max} queue pairs already")
        make = ImmediateQueuePair if self.fabric.immediate else TimedQueuePair
        return make(domain, send_cq, recv_cq, capabilities, int(remote_access), on_event)

    def tell(self, event: AsyncEvent) -> None:
        """An event for the device's handler."""
        if self.on_event is not None:
            self.fabric.notices.append(partial(self.on_event, event))

    def next_va(self, length: int) -> int:
        """An address for a region."""
        va = self._va
        self._va += length + VA_GAP
        return va

    def registration_fails(self) -> bool:
        """Whether the fabric's faults want this registration to fail."""
        faults = self.fabric.faults
        if faults is None:
            return False
        if faults.fail_registrations_next > 0:
            faults.fail_registrations_next -= 1
            return True
        return self.fabric.chance(faults.fail_registration)

    def departs(self, size: int) -> float:
        """When bytes that are sent now have left the port: it sends one message after the other."""
        fabric = self.fabric
        if not fabric.timing.bandwidth:
            return fabric.now
        self._bytes_until = max(fabric.now, self._bytes_until) + size / fabric.timing.bandwidth
        return self._bytes_until

    def set_port(self, *, active: bool) -> None:
        """The cable is put in, or taken out."""
        if active == self.port_active:
            return
        self.port_active = active
        self.tell(AsyncEvent(EventKind.PORT_ACTIVE if active else EventKind.PORT_ERROR, self))
        if not active:
            for qp in self._queue_pairs():
                for end in qp.link.ends:
                    end.watch_out()
                qp.expect_silence()

    def die(self) -> None:
        """Nothing works any more."""
        self.port_active = False  # without a word: who is dead tells nothing of ports
        for qp in self._queue_pairs():
            qp.modify_to_error()
        self.tell(AsyncEvent(EventKind.DEVICE_FATAL, self, "the device failed"))

    def _queue_pairs(self) -> list[LoopbackQueuePair]:
        found = [qp for domain in self.domains for qp in domain.queue_pairs]
        return sorted(found, key=lambda qp: qp.number)  # a set has no order that can be repeated

    def _check_open(self) -> None:
        if self._closed:
            raise Misuse(f"the device {self.name} is closed")
