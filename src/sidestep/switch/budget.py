"""The budget of channel memory: a ledger without I/O and without a clock.

The ledger counts the segments on offer or in use: their rings as if each were full, their spills by the pages that were
touched. The provider sees a channel begin, not end, because it closes its descriptors at once. It therefore looks into
the arenas when the budget is used up, when the ledger has become twice as long, and from time to time. It finds the
segments still in use and the size of their spills, and reports them (`handle_sweep`). Recent grants are kept, since
their two ends may not have written them down yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

SETTLE_S: Final = 5.0  # seconds from an offer until both ends have surely attached, or never will
SWEEP_INTERVAL_S: Final = 1.0  # seconds between two sweeps, which read every slot of every arena
SWEEP_AFTER_S: Final = 10.0  # seconds after which spills may have grown so much that a new grant is worth a sweep
GRANTS_UNSWEPT: Final = 1024  # entries of the ledger that are not worth a sweep


class ChannelBudget:
    """A ledger of the channel memory that each user holds."""

    def __init__(self, limit_bytes: int, *, owner_max: Callable[[int], int] | None = None) -> None:
        """`owner_max`: how many bytes a user may have; None: as many as all together."""
        self.limit_bytes = limit_bytes
        self._owner_max = owner_max or (lambda _: limit_bytes)
        self._of_owner: Counter[int] = Counter()
        self._granted: dict[bytes, tuple[int, float, int]] = {}  # segment id -> bytes, time, owner
        self._spilled: Counter[bytes] = Counter()  # segment id -> bytes beside those
        self._swept_at = float("-inf")
        self._long = GRANTS_UNSWEPT  # entries at which a sweep is worth its while

    def __contains__(self, segment_id: bytes) -> bool:
        return segment_id in self._granted

    @property
    def used_bytes(self) -> int:
        """Bytes in use. A user counts for at most its share, because users report their own spills and may lie."""
        return sum(min(used, self._owner_max(owner)) for owner, used in self._of_owner.items())

    def reserve(self, segment_id: bytes, segment_len: int, *, now: float, owner: int = 0) -> bool:
        """Grants a segment to a user; False if it does not fit, or is granted already."""
        if segment_id in self._granted or self.used_bytes + segment_len > self.limit_bytes:
            return False
        if self._of_owner[owner] + segment_len > self._owner_max(owner):
            return False
        self._granted[segment_id] = (segment_len, now, owner)
        self._of_owner[owner] += segment_len
        return True

    def release(self, segment_id: bytes) -> None:
        """Takes a grant back; KeyError if there is none."""
        segment_len, _, owner = self._granted.pop(segment_id)
        segment_len += self._spilled.pop(segment_id, 0)
        self._of_owner[owner] -= segment_len
        if not self._of_owner[owner]:
            del self._of_owner[owner]

    def may_sweep(self, *, now: float) -> bool:
        return now - self._swept_at >= SWEEP_INTERVAL_S

    def wants_sweep(self, *, now: float) -> bool:
        """True if a sweep may be made and is worth it: much of the ledger is probably void, or it is old."""
        due = len(self._granted) >= self._long or now - self._swept_at >= SWEEP_AFTER_S
        return bool(self._granted) and due and self.may_sweep(now=now)

    def handle_sweep(self, in_use: Mapping[bytes, int] | None, *, now: float) -> None:
        """Releases every segment that has settled and is not in use; None: that could not be found out.

        `in_use`: how many bytes of its spills each segment has touched.
        """
        self._swept_at = now
        if in_use is None:
            return
        settled_before = now - SETTLE_S
        for segment_id in [
            segment_id
            for segment_id, (_, granted_at, _) in self._granted.items()
            if granted_at < settled_before and segment_id not in in_use
        ]:
            self.release(segment_id)
        for segment_id, (_, _, owner) in self._granted.items():
            grown = in_use.get(segment_id, 0) - self._spilled[segment_id]
            self._spilled[segment_id] += grown
            self._of_owner[owner] += grown
        self._long = max(2 * len(self._granted), GRANTS_UNSWEPT)
