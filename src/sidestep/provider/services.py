"""What the switch does for offload protocols: watching descriptors, timers, the log."""

from __future__ import annotations

import heapq
import selectors
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final

from sidestep import limits
from sidestep.errors import LimitReached
from sidestep.switch.modules import Transports
from sidestep.switch.protocol import OffloadTransport


class ProviderServices:
    """The provider's loop, as a module sees it (`sidestep.switch.protocol.Services`)."""

    def __init__(
        self, selector: selectors.BaseSelector, clock: Callable[[], float], log: Callable[[str], None]
    ) -> None:
        self._selector: Final = selector
        self._clock = clock
        self._log = log
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # a heap; the number keeps equal times apart
        self._numbers = count()
        self.transports_known: Transports | None = None  # set once there are any to ask

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Calls `on_readable` whenever `fd` can be read, until `unwatch`."""
        self._selector.register(fd, selectors.EVENT_READ, on_readable)

    def unwatch(self, fd: int) -> None:
        """Ends it; call before `fd` is closed."""
        self._selector.unregister(fd)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Calls once, `delay_s` seconds from now at the earliest; raises LimitReached."""
        if len(self._timers) >= limits.MODULE_TIMERS_MAX:
            raise LimitReached(f"{limits.MODULE_TIMERS_MAX} timers are pending")
        heapq.heappush(self._timers, (self._clock() + delay_s, next(self._numbers), callback))

    def transports(self) -> Iterator[OffloadTransport]:
        """The transports that work, in order of preference; one is loaded only when it is reached."""
        return self.transports_known.each() if self.transports_known else iter(())

    def now(self) -> float:
        """Seconds, on the clock of the timers."""
        return self._clock()

    def log(self, text: str) -> None:
        """A line for the provider's log."""
        self._log(text)

    def next_deadline(self) -> float | None:
        """When the next timer is due."""
        return self._timers[0][0] if self._timers else None

    def poll_due(self, now: float) -> Callable[[], None] | None:
        """The next callback whose time has come; call until None."""
        return heapq.heappop(self._timers)[2] if self._timers and self._timers[0][0] <= now else None
