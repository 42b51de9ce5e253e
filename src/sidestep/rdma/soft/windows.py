"""Memory windows: parts of a region that are open to one queue pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sidestep.rdma.verbs import MemoryWindow
from sidestep.rdma.work import Access, RKey

if TYPE_CHECKING:
    from sidestep.rdma.soft.memory import Domain, SoftRegion
    from sidestep.rdma.soft.qp import SoftQueuePair
    from sidestep.rdma.work import BindWindow

REMOTE: Final = int(Access.REMOTE_READ | Access.REMOTE_WRITE)
_NOTHING: Final = memoryview(b"")
_CLOSED: Final = Access.LOCAL_READ


class SoftWindow(MemoryWindow):
    """A window; `rights` is its access as a plain number.

    It keeps its last rights when it is void, and has them before it is bound: it is meant for the other end, which
    therefore may void it once more (verbs draft 7.8).
    """

    __slots__ = ("domain", "qp", "region", "rights", "view")

    def __init__(self, domain: Domain, key: int) -> None:
        self.domain = domain
        self.qp: SoftQueuePair | None = None  # whose it is while it is bound
        self.region: SoftRegion | None = None
        self.view = _NOTHING
        self.access = _CLOSED
        self.rights = REMOTE
        self.va = 0
        self.length = 0
        self.rkey = RKey(key)
        self.valid = False

    def bind(self, request: BindWindow, qp: SoftQueuePair) -> str | None:
        """Opens it; or what is wrong, and nothing is changed (verbs draft for iWARP 7.10.2, 7.10.6.1)."""
        region = request.region
        domain = qp.domain
        if self not in domain.windows:
            return "the window is not of this queue pair's domain"
        if self.valid:
            return "the window is bound already"
        if region not in domain.regions or not region.valid:
            return "the region is void, or not of this queue pair's domain"
        if not region.access & Access.WINDOW_BIND:
            return "the region is not open to windows"
        if region.zero_based:
            return "the region has no addresses of its own"
        rights = int(request.access)
        if not rights & REMOTE or rights & ~REMOTE:
            return "the rights of a window are those of the other end, one at least"
        if rights & Access.REMOTE_WRITE and not region.access & Access.LOCAL_WRITE:
            return "the region may not be written"
        begin, end = request.offset, request.offset + request.length
        if begin < 0 or request.length < 1 or end > region.length:
            return "the range does not lie in the region"
        keys = domain.device.keys
        part = keys.part(request.key_part)
        if request.key_part is None and part == self.rkey & 0xFF:
            part ^= 1  # who knows the last key has to guess
        self.rkey = self.key(part)
        self.qp, self.region = qp, region
        self.view = region.view[begin:end]
        self.access, self.rights = request.access, rights
        self.va = 0 if request.zero_based else region.va + begin
        self.length = request.length
        self.valid = True
        region.windows.add(self)
        qp.windows.add(self)
        keys.offer(self)
        return None

    def invalidate(self) -> None:
        if self.valid:
            assert self.qp is not None
            assert self.region is not None
            self.valid = False
            device = self.domain.device
            device.keys.withdraw(self)
            self.region.windows.discard(self)
            self.qp.windows.discard(self)
            device.access_ended(self)
            self.qp = self.region = None
            self.view = _NOTHING

    def deallocate(self) -> None:
        if self in self.domain.windows:
            self.invalidate()
            self.domain.windows.discard(self)
            device = self.domain.device
            device.keys.free(self.rkey)
            device.window_count -= 1
