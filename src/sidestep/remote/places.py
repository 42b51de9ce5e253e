"""How many connections go over one device, and whose place goes to another one.

An adapter has the state of so many connections at hand, and fetches that of the others from the host's memory for each
of their messages. So a device carries a bounded number, and where one more wants to leave TCP, the one that has rested
longest goes back to TCP, as when its device is given up. Who wants its place stays on TCP until then, and asks again
by itself. Nobody who does not rest has to go.

Whether a connection rests is seen by what its rings have moved, also while the engine has it: nobody has to tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sidestep import limits
from sidestep.errors import LimitReached

if TYPE_CHECKING:
    from sidestep.loop import Loop, Timer
    from sidestep.switch.link import Carried


class Places:
    """Those of one device.

    Args:
        loop: Drives it.
        most: How many there are.
        taken: Gives how many are taken, by connections that begin or end among them.
    """

    def __init__(self, loop: Loop, most: int, taken: Callable[[], int]) -> None:
        self._loop = loop
        self._most = most
        self._taken = taken
        self._seen: dict[Carried, tuple[int, float]] = {}  # what each had moved, and since when it has no more
        self._leaving: dict[Carried, float] = {}  # since when, the last one last
        self._timer: Timer | None = None

    def add(self, far: Carried) -> None:
        """It is carried over the device."""
        self._seen[far] = far.moved, self._loop.now
        self._look_later()

    def discard(self, far: Carried) -> None:
        """It is not any more."""
        self._seen.pop(far, None)
        self._leaving.pop(far, None)

    def close(self) -> None:
        """Nobody looks any more."""
        if self._timer is not None:
            self._timer.cancel()

    def need(self) -> None:
        """One more wants a place; raises LimitReached if there is none, and then one is on its way to be free."""
        if self._taken() < self._most:
            return
        why = "one of them is leaving" if self._is_leaving() or self._send_back() else "all of them busy"
        raise LimitReached(
            f"{self._most} connections go over the device, {why}", remedy="allow more with --remote-connections"
        )

    def _is_leaving(self) -> bool:
        """One at a time; but for one whose other end does not let go of it nobody waits for ever."""
        since = next(reversed(self._leaving.values()), None)
        return since is not None and self._loop.now - since < limits.RELAY_LEAVE_S

    def _send_back(self) -> bool:
        """Whether one rests, which is on its way now."""
        self._look()
        stay = (far for far in self._seen if far not in self._leaving)
        resting = min(stay, key=lambda far: self._seen[far][1], default=None)
        if resting is None or self._loop.now - self._seen[resting][1] < limits.REMOTE_RESTED_S:
            return False
        self._leaving[resting] = self._loop.now
        resting.leave(crowded=True)
        return True

    def _look(self) -> None:
        now = self._loop.now
        for far, (before, _) in self._seen.items():
            if (moved := far.moved) != before:
                self._seen[far] = moved, now

    def _look_later(self) -> None:
        """Now and then, once so many places are taken that somebody may have to go."""
        if self._timer is None and 2 * len(self._seen) >= self._most:
            self._timer = self._loop.call_later(limits.REMOTE_RESTED_S / 2, self._due)

    def _due(self) -> None:
        self._timer = None
        self._look()
        self._look_later()
