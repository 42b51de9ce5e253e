"""Completion queues: one that is polled, and one that hands its completions over; and the calls to users that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from sidestep.errors import Misuse
from sidestep.rdma.verbs import AsyncEvent, CompletionQueue, EventKind
from sidestep.rdma.work import Opcode, Status

if TYPE_CHECKING:
    from sidestep.rdma.verbs import CompletionHandler, EventHandler
    from sidestep.rdma.work import Completion

_SUCCESS = Status.SUCCESS
_RECEIVE = Opcode.RECEIVE


class Owner(Protocol):
    """The device of a queue, as far as queues know it."""

    notices: deque[Callable[[], object]]

    def tell(self, event: AsyncEvent, handler: EventHandler | None = None) -> None: ...


class User(Protocol):
    """A queue pair that completes in a queue."""

    def break_off(self, kind: EventKind, why: str) -> None: ...


class SoftQueue(CompletionQueue):
    """What both have in common."""

    __slots__ = ("capacity", "device", "users")

    def __init__(self, device: Owner, capacity: int) -> None:
        self.device = device
        self.capacity = capacity
        self.users: list[User] = []  # once for each of its two queues

    def add(self, completion: Completion) -> None:
        raise NotImplementedError

    def destroy(self) -> None:
        if self.users:
            raise Misuse(f"the completion queue is used by {len(self.users)} queues")


class HandledQueue(SoftQueue):
    """Hands each batch to its handler, from where the device is driven."""

    __slots__ = ("_notices", "entries", "handler")

    def __init__(self, device: Owner, capacity: int, handler: CompletionHandler) -> None:
        super().__init__(device, capacity)
        self.handler = handler
        self.entries: list[Completion] = []
        self._notices = device.notices

    def add(self, completion: Completion) -> None:
        entries = self.entries
        if not entries:
            self._notices.append(self._hand_over)
        entries.append(completion)

    def _hand_over(self) -> None:
        batch, self.entries = self.entries, []
        self.handler(batch)

    def poll(self, max_count: int) -> list[Completion]:
        raise Misuse("a completion queue with a handler is not polled")

    def arm(self, callback: Callable[[CompletionQueue], object], *, solicited_only: bool = False) -> None:
        raise Misuse("a completion queue with a handler is not armed")


class PolledQueue(SoftQueue):
    """Keeps completions until they are polled."""

    __slots__ = ("_armed", "_dead", "_entries", "_solicited_only")

    def __init__(self, device: Owner, capacity: int) -> None:
        super().__init__(device, capacity)
        self._entries: deque[Completion] = deque()
        self._armed: Callable[[CompletionQueue], object] | None = None
        self._solicited_only = False
        self._dead = False

    def add(self, completion: Completion) -> None:
        if self._dead:
            return
        if len(self._entries) >= self.capacity:
            self._overflow()
            return
        self._entries.append(completion)
        if self._armed is not None and (not self._solicited_only or _is_solicited(completion)):
            callback, self._armed = self._armed, None
            self.device.notices.append(partial(callback, self))

    def poll(self, max_count: int) -> list[Completion]:
        entries = self._entries
        return [entries.popleft() for _ in range(min(max_count, len(entries)))]

    def arm(self, callback: Callable[[CompletionQueue], object], *, solicited_only: bool = False) -> None:
        self._solicited_only = solicited_only and (self._armed is None or self._solicited_only)
        self._armed = callback

    def _overflow(self) -> None:
        # IBTA 10.10.2.3: an affiliated asynchronous error; the queue pairs cannot go on, since completions are lost.
        self._dead = True
        self.device.tell(AsyncEvent(EventKind.CQ_ERROR, self, f"more than {self.capacity} completions"))
        for qp in dict.fromkeys(self.users):
            qp.break_off(EventKind.QP_FATAL, "its completion queue overflowed")


def _is_solicited(completion: Completion) -> bool:
    # IBTA 11.4.2.2: a receive whose sender asked for it, or any completion in error.
    return completion.status is not _SUCCESS or (completion.opcode is _RECEIVE and completion.solicited)
