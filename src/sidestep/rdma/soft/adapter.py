"""What memory needs of its device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from sidestep.rdma.soft.keys import Keys, Memory
    from sidestep.rdma.soft.memory import Domain
    from sidestep.rdma.soft.qp import SoftQueuePair
    from sidestep.rdma.soft.queues import Notice
    from sidestep.rdma.verbs import (
        AsyncEvent,
        CompletionQueue,
        DeviceAttributes,
        EventHandler,
        QpCapabilities,
        SharedReceiveQueue,
    )
    from sidestep.rdma.work import Access


class Adapter(Protocol):
    """A device, as protection domains see it; `device.SoftDevice` is one."""

    attributes: DeviceAttributes
    keys: Keys
    notices: deque[Notice]
    closed: bool
    region_count: int  # of all domains, like the next ones
    window_count: int
    srq_count: int

    def tell(self, event: AsyncEvent) -> None:
        """An event for the device's handler."""

    def next_va(self, length: int) -> int:
        """An address for a region of so many bytes."""

    def registration_fails(self) -> bool:
        """Whether this registration shall fail, as one of a hardware device may."""

    def registration_due(self, finish: Callable[[], None]) -> None:
        """Calls when a slow registration is done, from where the device is driven."""

    def access_ended(self, memory: Memory) -> None:
        """The other end has no access any more, and the user may change the memory: what still refers to it is copied.

        Called before the call that ends the access returns, when the key is void already.
        """

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
        """Makes a queue pair, which adds itself to `Domain.queue_pairs`."""

    def forget(self, domain: Domain) -> None:
        """A domain was deallocated."""
