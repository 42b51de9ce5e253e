"""Spinning instead of sleeping, for a moment after something has come over a link.

A wake-up takes tens of microseconds, and an answer often comes sooner. One budget serves all connections: it doubles
when something came while it lasted, and halves when nothing came. So spinning in vain soon stops. Where as many
threads run as there are processors nothing spins: it would take a processor from the thread that makes the news.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sidestep import limits

if TYPE_CHECKING:
    from sidestep.loop import Loop
    from sidestep.provider.carry.hub import Hub

_LOAD: Final = "/proc/loadavg"


class Waiting:
    """Waits of a loop with connections that go through its process."""

    def __init__(self, loop: Loop, hub: Hub) -> None:
        self._loop = loop
        self._hub = hub
        self._load_fd = -1
        self._looked_at = -1.0  # time of the last look at the load
        self._crowded = False
        self._processors = len(os.sched_getaffinity(0))
        self.budget_s = limits.POLL_MIN_S
        self.warm = False  # the last turn had something to do with other hosts

    def close(self) -> None:
        if self._load_fd >= 0:
            os.close(self._load_fd)
            self._load_fd = -1

    def look(self, found: Callable[[], bool]) -> bool:
        """Calls `found` again and again until it is true, or the budget is used up; False then, or at once."""
        if not self.warm:
            return False
        self.warm = False
        now = self._loop.now
        if self._is_crowded(now):
            return False
        until = now + self.budget_s
        while not found():
            if self._loop.now >= until:
                self.budget_s = max(self.budget_s / 2, limits.POLL_MIN_S)
                return False
        self.budget_s = min(self.budget_s * 2, limits.POLL_MAX_S)
        return True

    def _is_crowded(self, now: float) -> bool:
        """True if others want the processor; not looked up more often than every few milliseconds."""
        if now - self._looked_at >= limits.POLL_LOAD_S:
            self._looked_at = now
            self._crowded = self._running() > self._processors
        return self._crowded

    def _running(self) -> int:
        """Threads that run or want to, ours included (proc(5), the fourth field); many, if that cannot be read."""
        try:
            if self._load_fd < 0:
                self._load_fd = os.open(_LOAD, os.O_RDONLY | os.O_CLOEXEC)
            return int(os.pread(self._load_fd, 64, 0).split()[3].split(b"/")[0])
        except (OSError, ValueError, IndexError):
            return self._processors + 1

    def wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Returns the ready descriptors; spins for a moment first if something has just come over a link."""
        ready: list[tuple[int, int]] = []

        def found() -> bool:
            nonlocal ready
            ready = self._loop.poll(0)
            return bool(ready) or self._hub.news

        if timeout_s == 0 or self._loop.next_in_s == 0 or not self.look(found):
            ready = self._loop.poll(0 if self._hub.about_to_wait() else timeout_s)
        self.warm = self._loop.nests and (bool(ready) or self._hub.news)
        return ready
