"""How much of a process's memory devices of the kernel pin: counted where it is registered, and bounded.

Whole pages count, for each region anew, as the kernel counts them against RLIMIT_MEMLOCK (ib_umem_get). What drivers
pin for the queues of queue pairs is not told, and not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from mmap import PAGESIZE
from typing import Final

from sidestep.errors import LimitReached

_REMEDY: Final = "give more with --remote-pinned"


class PinnedMemory:
    """What all devices that share it pin.

    Args:
        bytes_max: Of all regions; None: as many as the kernel allows.
        share: How many of so many bytes a user may have.
    """

    def __init__(self, bytes_max: int | None = None, share: Callable[[int, int], int] = lambda whole, _uid: whole):
        self._bytes_max = bytes_max
        self._share = share
        self._of_user: Counter[int] = Counter()
        self.bytes = 0

    def take(self, address: int, length: int, uid: int | None) -> int:
        """Counts the pages of that memory, as a user's or nobody's; gives their bytes, or raises LimitReached."""
        pages = (address + length - 1) // PAGESIZE - address // PAGESIZE + 1
        size = pages * PAGESIZE
        if self._bytes_max is not None:
            if self.bytes + size > self._bytes_max:
                raise LimitReached(f"RDMA devices have pinned {self.bytes} bytes of memory already", remedy=_REMEDY)
            if uid is not None and self._of_user[uid] + size > self._share(self._bytes_max, uid):
                raise LimitReached(
                    f"RDMA devices have pinned {self._of_user[uid]} bytes for uid {uid} already", remedy=_REMEDY
                )
        self.bytes += size
        if uid is not None:
            self._of_user[uid] += size
        return size

    def give_back(self, size: int, uid: int | None) -> None:
        """What `take` has counted."""
        self.bytes -= size
        if uid is not None:
            self._of_user[uid] -= size
            if not self._of_user[uid]:
                del self._of_user[uid]


__all__ = ["PinnedMemory"]
