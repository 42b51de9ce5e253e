"""What drives a device that has sockets: readiness, timers, and the calls to users that wait.

    loop = Loop()
    while wanted: loop.turn()                                       # a program of its own
    asyncio_loop.add_reader(loop.fileno(), lambda: loop.turn(0))    # inside another loop; ask `next_in_s` for timers

A turn takes what is ready, then timers that are due, then makes the calls to users (`notices`), then lets those who
asked for it (`soon`) send what came together meanwhile. Nobody is called from inside a call of his own. Not
thread-safe: whoever drives it does so from one thread, or holds a lock.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from sidestep.rdma.soft.queues import tell_next

if TYPE_CHECKING:
    from sidestep.rdma.soft.queues import Notice

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
_NOTICES_MAX: Final = 10_000  # calls of one turn: a user who makes more and more of them must not stop the sockets
_EVENTS_MAX: Final = 256  # of one turn


class Timer:
    """One call in the future."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """It will not be made."""
        self.callback = None


class Loop:
    """The sockets and timers of any number of devices."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_number = 0
        self._soon: dict[Callable[[], object], None] = {}
        self.notices: deque[Notice] = deque()
        self.closed = False

    # --- who drives it ---

    def fileno(self) -> int:
        """Readable when a socket is ready; not for timers and calls that wait, which `next_in_s` tells of."""
        return self._epoll.fileno()

    @property
    def next_in_s(self) -> float | None:
        """Seconds until something is due without a socket; None if nothing is."""
        if self.notices or self._soon:
            return 0.0
        while self._timers and self._timers[0][2].callback is None:
            heappop(self._timers)
        return max(0.0, self._timers[0][0] - self.now) if self._timers else None

    @property
    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def turn(self, timeout_s: float | None = None) -> bool:
        """Lets things happen once, and waits for them so long at most; False if nothing did."""
        due = self.next_in_s
        if timeout_s is None or (due is not None and due < timeout_s):
            timeout_s = due
        ready = self._epoll.poll(-1 if timeout_s is None else timeout_s, _EVENTS_MAX)
        for fd, events in ready:
            if (handler := self._handlers.get(fd)) is not None:  # an earlier one may have closed it
                handler(events)
        happened = bool(ready) | self._run_timers() | bool(self._soon) | bool(self.notices)
        self._run_soon()
        for _ in range(_NOTICES_MAX):
            if not self.notices:
                break
            tell_next(self.notices)
        self._run_soon()
        return happened

    def run_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Lets things happen until something is so; False if it is not after so many seconds."""
        until = self.now + timeout_s
        while not condition():
            left = until - self.now
            if left <= 0:
                return False
            self.turn(left)
        return True

    def close(self) -> None:
        """No more turns."""
        if not self.closed:
            self.closed = True
            self._epoll.close()

    # --- for devices ---

    def watch(self, fd: int, events: int, handler: Callable[[int], object]) -> None:
        """Calls the handler with what a descriptor is ready for; changes what it was watched for."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def forget(self, fd: int) -> None:
        """The descriptor is about to be closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Calls once."""
        timer = Timer(callback)
        self._timer_number += 1
        heappush(self._timers, (self.now + delay_s, self._timer_number, timer))
        return timer

    def soon(self, callback: Callable[[], object]) -> None:
        """Calls in this turn or the next; once, however often it was asked for."""
        self._soon[callback] = None

    def _run_soon(self) -> None:
        asked, self._soon = self._soon, {}
        for callback in asked:
            callback()

    def _run_timers(self) -> bool:
        happened = False
        timers, now = self._timers, self.now
        while timers and timers[0][0] <= now:
            callback, timers[0][2].callback = timers[0][2].callback, None
            heappop(timers)
            if callback is not None:
                callback()
                happened = True
        return happened
