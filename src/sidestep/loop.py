"""The event loop of everything here that waits: descriptors, timers, and the calls to users of a device.

    loop = Loop()
    while wanted: loop.turn()                                       # a program of its own
    asyncio_loop.add_reader(loop.fileno(), lambda: loop.turn(0))    # inside another loop; ask `next_in_s` for timers
    loop.nest(inner)                                                # one of these inside another

A turn takes what is ready, then timers that are due, then makes the calls to users (`notices`). At its end it calls
those that asked for it (`soon`), so that they send together what has gathered. No user is called from inside a call of
its own. Once closed, also in the midst of a turn, the loop calls nobody. It is not thread-safe: one thread drives it,
or its callers hold a lock.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
_NOTICES_MAX: Final = 10_000  # calls of one turn: a user that makes more and more of them must not stop the sockets
_EVENTS_MAX: Final = 256  # events of one turn
_CANCELLED_MAX: Final = 64  # cancelled timers that stay in the heap, or half of the heap


def nothing() -> None:
    """Does nothing, as a callback that is not wanted."""


class Timer:
    """One call in the future."""

    __slots__ = ("_loop", "callback")

    def __init__(self, loop: Loop, callback: Callable[[], object]) -> None:
        self._loop = loop
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self._loop.timer_cancelled()


class Loop:
    """Descriptors and timers, and their calls; `on_error` gets an exception of a call; None: the turn raises it."""

    def __init__(
        self, on_error: Callable[[Exception], object] | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_error = on_error
        self._clock = clock
        self._nested: list[Loop] = []
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_number = 0
        self._cancelled = 0  # cancelled timers among those in the heap
        self._soon: dict[Callable[[], object], None] = {}
        self.notices: deque[Callable[[], object]] = deque()
        self.closed = False

    # --- for the driver ---

    def fileno(self) -> int:
        """Descriptor that is readable when a socket is ready; timers and pending calls show in `next_in_s` only."""
        return self._epoll.fileno()

    @property
    def next_in_s(self) -> float | None:
        """Seconds until something is due without a socket; None if nothing is."""
        if self.notices or self._soon:
            return 0.0
        known = [due_s for nested in self._nested if (due_s := nested.next_in_s) is not None]
        while self._timers and self._timers[0][2].callback is None:
            heappop(self._timers)
            self._cancelled -= 1
        if self._timers:
            known.append(max(0.0, self._timers[0][0] - self.now))
        return min(known, default=None)

    @property
    def idle(self) -> bool:
        """True if it has nothing left to wait for: no descriptor, no timer, no call."""
        return not self._handlers and self.next_in_s is None

    @property
    def timers_held(self) -> int:
        """Timers that memory is held for, cancelled ones included."""
        return len(self._timers)

    @property
    def now(self) -> float:
        return self._clock()

    def turn(self, timeout_s: float | None = None) -> bool:
        """Lets things happen once, and waits for them so long at most; False if nothing did."""
        return self.run(self.poll(timeout_s))

    def poll(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """The first half of a turn: what is ready, waited for so long at most, or until something else is due."""
        due = self.next_in_s
        if timeout_s is None or (due is not None and due < timeout_s):
            timeout_s = due
        return self._epoll.poll(-1 if timeout_s is None else timeout_s, _EVENTS_MAX)

    def run(self, ready: list[tuple[int, int]]) -> bool:
        """The second half: lets it happen."""
        handlers = self._handlers
        # An earlier one may close a later one, and open a socket that gets the same number.
        for fd, events, handler in [(fd, events, handlers.get(fd)) for fd, events in ready]:
            if handler is not None and handlers.get(fd) == handler:
                self.call(handler, events)
        happened = bool(ready) | self._run_timers() | bool(self._soon) | bool(self.notices)
        for nested in [nested for nested in self._nested if nested.next_in_s == 0]:
            happened |= nested.turn(0)
        self._run_soon()
        for _ in range(_NOTICES_MAX):
            if not self.notices:
                break
            self.call(self.notices.popleft())
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
        if not self.closed:
            self.closed = True
            self._epoll.close()
            for waiting in (self._handlers, self._timers, self._soon, self.notices, self._nested):
                waiting.clear()

    # --- for users ---

    @property
    def nests(self) -> bool:
        """True if another loop takes its turns in this one."""
        return bool(self._nested)

    def nest(self, inner: Loop) -> None:
        """Lets another loop take its turns in this one, until `leave`."""
        self._nested.append(inner)
        self.watch(inner.fileno(), READ, lambda _events: inner.turn(0))

    def leave(self, inner: Loop) -> None:
        """Ends it; call before the inner one is closed."""
        self._nested.remove(inner)
        self.forget(inner.fileno())

    def watch(self, fd: int, events: int, handler: Callable[[int], object]) -> None:
        """Calls the handler with what a descriptor is ready for; changes what it was watched for."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def on_readable(self, fd: int, callback: Callable[[], object]) -> None:
        """Calls whenever a descriptor can be read."""
        self.watch(fd, READ, lambda _events: callback())

    def forget(self, fd: int) -> None:
        """Ends it; call before the descriptor is closed. Does nothing where nothing is watched."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(self, callback)
        self._timer_number += 1
        heappush(self._timers, (self.now + delay_s, self._timer_number, timer))
        return timer

    def timer_cancelled(self) -> None:
        """Counts a cancelled timer that is still in the heap; when they are too many it takes them out."""
        self._cancelled += 1
        if self._cancelled > max(_CANCELLED_MAX, len(self._timers) // 2):
            self._timers = [each for each in self._timers if each[2].callback is not None]
            heapify(self._timers)
            self._cancelled = 0

    def soon(self, callback: Callable[[], object]) -> None:
        """Calls in this turn or the next; once, however often it was asked for."""
        self._soon[callback] = None

    def _run_soon(self) -> None:
        for _ in range(len(self._soon)):  # calls that are added meanwhile come in the next turn
            if not self._soon:  # closed
                break
            callback = next(iter(self._soon))
            del self._soon[callback]
            self.call(callback)

    def _run_timers(self) -> bool:
        happened = False
        now = self.now
        while self._timers and self._timers[0][0] <= now:
            timer = heappop(self._timers)[2]
            if timer.callback is None:
                self._cancelled -= 1
                continue
            callback, timer.callback = timer.callback, None
            self.call(callback)
            happened = True
        return happened

    def call(self, callback: Callable[..., object], *given: int) -> None:
        """Calls, and answers for what that raises as for what is called in a turn."""
        try:
            callback(*given)
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)
