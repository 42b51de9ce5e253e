"""The memory of channels: the share of a user, the users' present parts, and the segments that the provider makes.

Segments of offers are the programs' own. A sweep over the slots in their arenas finds out which of them are still in
use, and which pages were touched beside the rings. A connection through the provider has a second segment, which no
arena names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from sidestep import limits
from sidestep.errors import PeerViolation, Unavailable
from sidestep.loop import Loop
from sidestep.native import _channel, layout
from sidestep.provider import arena as arenas
from sidestep.provider import memory
from sidestep.provider.clients import Arena
from sidestep.switch.budget import ChannelBudget

_SWEEP_SLOTS_MAX: Final = 1 << 18  # slots read in one sweep; beyond it the sweep ends and releases nothing
NO_BUDGET: Final = "the budget for channel memory is used up"


class Segments:
    """Memory of channels within the budget; `share` gives a user's part of a whole."""

    def __init__(
        self,
        budget_bytes: int,
        arenas_known: Mapping[bytes, Arena],
        share: Callable[[int, int], int],
        loop: Loop,
    ) -> None:
        self._arenas = arenas_known
        self._loop = loop
        self._second: set[bytes] = set()
        self.budget = ChannelBudget(budget_bytes, owner_max=lambda uid: share(budget_bytes, uid))

    def reserve(self, segment_id: bytes, ring_size: tuple[int, int], uid: int) -> bool:
        """Takes a channel into the budget, after a sweep where that may help; whether there was room."""
        now, memory_len = self._loop.now, memory.channel_memory(ring_size)
        if self.budget.wants_sweep(now=now):
            self._sweep(now)
        if self.budget.reserve(segment_id, memory_len, now=now, owner=uid):
            return True
        if not self.budget.may_sweep(now=now):
            return False
        self._sweep(now)
        return self.budget.reserve(segment_id, memory_len, now=now, owner=uid)

    def make(self, segment_id: bytes, ring_size: tuple[int, int], uid: int) -> int:
        """A second segment's descriptor; raises Unavailable."""
        if not self.reserve(segment_id, ring_size, uid):
            raise Unavailable(NO_BUDGET)
        try:
            made = _channel.create(*ring_size)
        except OSError as error:
            self.budget.release(segment_id)
            raise Unavailable(f"no memory for a channel: {error.strerror}") from error
        self._second.add(segment_id)
        return made

    @contextmanager
    def made(self, segment_id: bytes, ring_size: tuple[int, int], uid: int) -> Iterator[int]:
        """Makes a segment, open within the block; an exception there frees its memory. Raises Unavailable."""
        segment = self.make(segment_id, ring_size, uid)
        try:
            yield segment
        except BaseException as error:
            self.release_second(segment_id)
            if isinstance(error, OSError):
                raise Unavailable(f"the channel cannot be mapped: {error.strerror}") from error
            raise
        finally:
            os.close(segment)

    def release_second(self, segment_id: bytes) -> None:
        """A segment that was made here is gone; twice is allowed."""
        if segment_id in self._second:
            self._second.discard(segment_id)
            self.budget.release(segment_id)

    def _sweep(self, now: float) -> None:
        spilled = dict.fromkeys(self._second, 0)  # bytes beside the rings, by segment
        slots_left = _SWEEP_SLOTS_MAX
        for arena in self._arenas.values():
            for segment_id, touched in arenas.segments_in_use(arena.fd):
                slots_left -= 1
                if not slots_left:
                    self.budget.handle_sweep(None, now=now)
                    return
                if segment_id is not None:
                    # both ends report their own; a stranger may report any, in as many slots as it likes
                    spilled[segment_id] = min(spilled.get(segment_id, 0) + touched, 2 * layout.CHANNEL_SPILL)
        self.budget.handle_sweep(spilled, now=now)


def check_geometry(segment: int, ring_size: tuple[int, int]) -> None:
    """Raises PeerViolation unless the segment is sealed and of the size that its rings need."""
    segment_len = memory.sealed_size(segment, "segment")
    if segment_len != memory.segment_size(ring_size) or not all(
        limits.RING_SIZE_MIN <= size <= limits.RING_SIZE_MAX and not size & (size - 1) for size in ring_size
    ):
        raise PeerViolation(f"a segment of {segment_len} bytes for rings of {ring_size}", rule="malformed")
