"""When what is to happen next: one deadline for each who has one, and timers whose time begins when they are seen."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Deadlines(Generic[_T]):
    """The earliest of many deadlines, each of which may move."""

    def __init__(self) -> None:
        self._at: dict[_T, float] = {}
        self._heap: list[tuple[float, int, _T]] = []
        self._number = 0

    def set(self, owner: _T, when: float | None) -> None:
        """None: it has none."""
        if when is None:
            self._at.pop(owner, None)
        elif self._at.get(owner) != when:
            self._at[owner] = when
            self._number += 1
            heappush(self._heap, (when, self._number, owner))
            if len(self._heap) > 64 + 4 * len(self._at):  # most are of deadlines that have moved
                self._heap = sorted(each for each in self._heap if self._at.get(each[2]) == each[0])

    def next(self) -> float | None:
        """The earliest."""
        while self._heap:
            when, _, owner = self._heap[0]
            if self._at.get(owner) == when:
                return when
            heappop(self._heap)
        return None

    def take_due(self, now: float) -> _T | None:
        """Who is due, and has no deadline then."""
        due = self.next()
        if due is None or due > now:
            return None
        owner = heappop(self._heap)[2]
        del self._at[owner]
        return owner


class Delay:
    """One call in the future."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """It does not happen."""
        self.callback = None


class Delays:
    """Calls in so many seconds, asked for by who does not know the time: it begins with the next look at the clock."""

    def __init__(self) -> None:
        self._new: list[tuple[float, Delay]] = []
        self._begun: Deadlines[Delay] = Deadlines()

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Delay:
        delay = Delay(callback)
        self._new.append((delay_s, delay))
        return delay

    def begin(self, now: float) -> None:
        """Those that are new begin now."""
        for delay_s, delay in self._new:
            if delay.callback is not None:
                self._begun.set(delay, now + delay_s)
        self._new.clear()

    def next(self) -> float | None:
        return self._begun.next()

    def run(self, now: float) -> None:
        """Makes the calls that are due."""
        while (delay := self._begun.take_due(now)) is not None:
            callback, delay.callback = delay.callback, None
            if callback is not None:
                callback()

    def clear(self) -> None:
        self._new.clear()
        self._begun = Deadlines()
