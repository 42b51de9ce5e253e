"""Shared receive queues."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.verbs import AsyncEvent, EventKind, SharedReceiveQueue

if TYPE_CHECKING:
    from sidestep.rdma.soft.memory import Domain
    from sidestep.rdma.soft.qp import SoftQueuePair
    from sidestep.rdma.verbs import EventHandler
    from sidestep.rdma.work import Receive


class SharedReceives(SharedReceiveQueue):
    """A shared receive queue: its queue pairs take receives out of `receives`, and say so by `taken`."""

    domain: Domain

    def __init__(self, domain: Domain, max_wr: int, on_event: EventHandler | None) -> None:
        self.domain = domain
        self.max_wr = max_wr
        self.on_event = on_event
        self.receives: deque[Receive] = deque()
        self.users: set[SoftQueuePair] = set()
        self._limit = 0
        self.destroyed = False

    @property
    def receives_posted(self) -> int:
        return len(self.receives)

    def post_recv(self, receive: Receive) -> None:
        if self.destroyed:
            raise Misuse("the shared receive queue is destroyed")
        if len(self.receives) >= self.max_wr:
            raise LimitReached(f"{self.max_wr} receives are posted already")
        if len(receive.scatter) > self.domain.device.attributes.scatter_max:
            raise Misuse(f"a receive of {len(receive.scatter)} entries")
        self.receives.append(receive)

    def arm(self, limit: int) -> None:
        if not 0 <= limit <= self.max_wr:
            raise Misuse(f"a limit of {limit} for a queue of {self.max_wr}")
        self._limit = limit
        self.taken()

    def taken(self) -> None:
        if len(self.receives) >= self._limit:
            return
        self._limit = 0
        event = AsyncEvent(EventKind.SRQ_LIMIT_REACHED, self, f"{len(self.receives)} receives are left")
        self.domain.device.tell(event, self.on_event)

    def destroy(self) -> None:
        if self.users:
            raise Misuse(f"the shared receive queue is used by {len(self.users)} queue pairs")
        if not self.destroyed:
            self.destroyed = True
            self.receives.clear()
            self.domain.shared_receives.discard(self)
            self.domain.device.srq_count -= 1
