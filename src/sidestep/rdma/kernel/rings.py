"""Rings of applications that a device has pinned: those that much goes out from, for as long as it does.

An application gives the pages of its ring back once it has rested; what it writes then lies in others, and the device
would go on reading the old ones. It counts that (`channel_trim` in channel.h), so it need not wait for us, nor
we for it: before each message the engine (engine_verbs.c) compares the count with the one that was read before
the ring was pinned. Where they differ it copies, as from any ring that is not pinned.

So these regions are the engine's alone. What Python posts is not looked for in them: it would not compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidestep import limits
from sidestep.errors import SidestepError

if TYPE_CHECKING:
    from sidestep.loop import Timer
    from sidestep.rdma.kernel.lending import Lending
    from sidestep.rdma.kernel.memory import KernelDomain, KernelRegion
    from sidestep.rdma.verbs import SendRing


@dataclass(slots=True)
class _Pinned:
    """One of them."""

    region: KernelRegion
    pages: int  # the application's count, from before
    gathered: int  # what had gone out from it at the last look
    moved_at: float  # the last time that this had changed
    leaving: bool = False  # it is not used any more, but the device may still read it


class Rings:
    """Of one domain."""

    def __init__(self, domain: KernelDomain) -> None:
        self._domain = domain
        self._pinned: dict[Lending, _Pinned] = {}
        self._timer: Timer | None = None

    def __contains__(self, lending: Lending) -> bool:
        return lending in self._pinned

    @property
    def pinned_bytes(self) -> int:
        return sum(each.region.length for each in self._pinned.values())

    def words(self, lending: Lending, ring: SendRing) -> tuple[int, int]:
        """`ring_lkey` and `ring_pages` of a queue pair that is about to be lent."""
        pinned = self._pinned.get(lending)
        if pinned is None or pinned.leaving or pinned.pages != ring.pages:
            return 0, 0
        return int(pinned.region.lkey), pinned.pages

    def pin(self, lending: Lending, ring: SendRing) -> None:
        """Pins what this queue pair sends from, if that can be now."""
        if not ring.pages or (lending in self._pinned and not self._unpin(lending)):
            return
        device = self._domain.device
        if not self._make_room(len(ring.memory)):
            return
        try:
            region = self._domain.pin(ring.memory, ring.uid)
        except SidestepError as why:
            device.log.debug("a ring is not pinned: %s", why)
            return
        self._pinned[lending] = _Pinned(region, ring.pages, lending.gathered, device.loop.now)
        self._look_later()

    def forget(self, lending: Lending) -> None:
        """Its queue pair is no more."""
        if (pinned := self._pinned.pop(lending, None)) is not None:
            pinned.region.deregister()
        if not self._pinned and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_room(self, needed: int) -> bool:
        """For so many bytes, by those that have rested for a while, the longest first."""
        before = self._domain.device.loop.now - limits.VERBS_RING_REST_S / 2
        while self.pinned_bytes + needed > limits.VERBS_RINGS_BYTES:
            rested = min(self._pinned, key=lambda each: self._pinned[each].moved_at, default=None)
            if rested is None or self._pinned[rested].moved_at > before or not self._unpin(rested):
                return False
        return True

    def _unpin(self, lending: Lending) -> bool:
        """False: the device may still read it, so that is done at a later look."""
        lending.reclaim()
        if lending.gathering:
            self._pinned[lending].leaving = True
            return False
        self.forget(lending)
        return True

    def _look_later(self) -> None:
        if self._pinned and self._timer is None:
            self._timer = self._domain.device.loop.call_later(limits.VERBS_RING_REST_S / 4, self._look)

    def _look(self) -> None:
        self._timer = None
        self._look_later()
        now = self._domain.device.loop.now
        for lending, pinned in list(self._pinned.items()):
            if lending.gathered != pinned.gathered:
                pinned.gathered, pinned.moved_at = lending.gathered, now
            if pinned.leaving or now - pinned.moved_at >= limits.VERBS_RING_REST_S:
                self._unpin(lending)
