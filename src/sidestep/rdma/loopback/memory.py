"""Protection domains and regions: who may touch which bytes.

A key is an index of 24 bits and a part of 8 bits that changes whenever the index is used again, so an old key of the
same index is no key (as in iWARP's STags, RFC 5042 6.1.1). Addresses come from a counter and are deliberately odd:
nobody may take one for an address of this process, or for aligned.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from sidestep.errors import LimitReached, Misuse, Unavailable
from sidestep.rdma.address import buffer_address
from sidestep.rdma.verbs import MemoryRegion, ProtectionDomain, QpCapabilities
from sidestep.rdma.work import Access, LKey, RKey, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

    from sidestep.rdma.loopback.device import LoopbackDevice
    from sidestep.rdma.loopback.qp import LoopbackQueuePair
    from sidestep.rdma.verbs import CompletionQueue, EventHandler, Registered

VA_FIRST: Final = 0x7F00_0000_1003
VA_GAP: Final = 4099  # between two regions: what runs over the end of one does not reach the next
_REMOTE: Final = int(Access.REMOTE_READ | Access.REMOTE_WRITE)
_LOCAL_WRITE: Final = int(Access.LOCAL_WRITE)
_EVERYTHING: Final = Access.REMOTE_READ | Access.REMOTE_WRITE


class LoopbackRegion(MemoryRegion):
    """A region; `rights` is its access as a plain number."""

    __slots__ = ("domain", "rights")

    def __init__(self, domain: LoopbackDomain, view: memoryview, access: Access, key: int, va: int) -> None:
        self.domain = domain
        self.view = view
        self.va = va
        self.length = len(view)
        self.access = access
        self.rights = int(access)
        self.rkey = RKey(key)
        self.lkey = LKey(key)
        self.valid = True

    def deregister(self) -> None:
        """The keys are void from now on."""
        if self in self.domain.regions:
            self.invalidate()
            self.domain.forget(self)

    def rekey(self) -> None:
        """The index stays, the part of 8 bits changes."""
        if self not in self.domain.regions:
            raise Misuse("the region is deregistered")
        self.invalidate()
        self.rkey = RKey(_next_part(self.rkey))
        self.lkey = LKey(self.rkey)
        self.valid = True
        self.domain.device.keys.offer(self)
        self.domain.note(self)

    def invalidate(self) -> None:
        """Nobody has access any more; the memory stays registered."""
        if self.valid:
            self.valid = False
            self.domain.device.keys.withdraw(self)
            self.domain.withdraw(self)


class Keys:
    """The regions of a device by key."""

    def __init__(self) -> None:
        self._regions: dict[int, LoopbackRegion] = {}
        self._freed: deque[int] = deque()  # keys whose index may be used again
        self._indices = 0

    def __len__(self) -> int:
        return len(self._regions)

    def get(self, key: int) -> LoopbackRegion | None:
        """The region of exactly this key, all 32 bits."""
        return self._regions.get(key)

    def next_key(self) -> int:
        """A key that no region has: a freed index with the next part of 8 bits, or a new index; never 0."""
        if self._freed:
            freed = self._freed.popleft()
            return _next_part(freed)
        self._indices += 1
        return self._indices << 8

    def offer(self, region: LoopbackRegion) -> None:
        """The key is good from now on."""
        self._regions[region.rkey] = region

    def withdraw(self, region: LoopbackRegion) -> None:
        """The key is good for nothing any more."""
        del self._regions[region.rkey]

    def free(self, region: LoopbackRegion) -> None:
        """The index may be used again."""
        self._freed.append(region.rkey)


def _one_covers(regions: Iterable[LoopbackRegion], entry: memoryview, rights: int) -> bool:
    start = buffer_address(entry)
    end = start + len(entry)
    for region in regions:
        if region.valid and region.rights & rights == rights:
            first = buffer_address(region.view)
            if first <= start and end <= first + region.length:
                return True
    return False


def _next_part(key: int) -> int:
    return key & 0xFFFF_FF00 | (key + 1) & 0xFF


class _Everything(set[int]):
    """Says yes to whatever it is asked."""

    __slots__ = ()

    def __contains__(self, item: object) -> bool:
        return True


class LoopbackDomain(ProtectionDomain):
    """A protection domain.

    `readable` and `writable` answer the common question about an entry of a request, "does it lie in a region", by the
    identity of the object it is a view of: as long as a region covers all of an object, the object cannot go away.
    """

    __slots__ = ("_by_object", "device", "queue_pairs", "readable", "regions", "writable")

    def __init__(self, device: LoopbackDevice) -> None:
        self.device = device
        self.regions: set[LoopbackRegion] = set()
        self._by_object: dict[int, list[LoopbackRegion]] = {}  # the valid ones, by identity of what they are views of
        self.queue_pairs: set[LoopbackQueuePair] = set()
        lenient = not device.attributes.checks_local_memory
        self.readable: set[int] = _Everything() if lenient else set()
        self.writable: set[int] = _Everything() if lenient else set()

    def register(self, buffer: Buffer, access: Access) -> MemoryRegion:
        """Makes a region at once."""
        view = self._view(buffer, access)
        return self._register(view, access)

    def register_later(self, buffer: Buffer, access: Access, done: Registered) -> None:
        """Makes a region after `Timing.registration_s`."""
        fabric = self.device.fabric
        view = self._view(buffer, access)

        def finish() -> None:
            try:
                result: MemoryRegion | LimitReached | Unavailable = self._register(view, access)
            except (LimitReached, Unavailable) as why:
                result = why
            fabric.notices.append(partial(done, result))

        delay_s = 0.0 if fabric.immediate else fabric.draw(fabric.timing.registration_s)
        fabric.arrive(fabric.now + delay_s, finish)

    def create_qp(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        capabilities: QpCapabilities | None = None,
        *,
        remote_access: Access | None = None,
        on_event: EventHandler | None = None,
    ) -> LoopbackQueuePair:
        """Makes a queue pair in INIT."""
        return self.device.create_qp(
            self,
            send_cq,
            recv_cq,
            capabilities or QpCapabilities(),
            _EVERYTHING if remote_access is None else remote_access,
            on_event,
        )

    def deallocate(self) -> None:
        """Misuse while it has regions or queue pairs."""
        if self.regions or self.queue_pairs:
            raise Misuse(f"the domain has {len(self.regions)} regions and {len(self.queue_pairs)} queue pairs")

    # For the queue pairs.

    def covers(self, entry: memoryview, rights: int) -> bool:
        """Whether the entry lies in one region with these rights: the long way, by address."""
        if not len(entry) or not self.device.attributes.checks_local_memory:
            return True
        near = self._by_object.get(id(entry.obj), ())
        # The same memory may be seen through another object: then all regions are looked at.
        return _one_covers(near, entry, rights) or _one_covers(self.regions, entry, rights)

    def grant(self, key: int, va: int, length: int, right: int) -> memoryview | Status:
        """The bytes that the other end may touch: key, domain, rights, wrap, bounds, in this order (RFC 5040 7.2)."""
        region = self.device.keys.get(key)
        if region is None or region.domain is not self or not region.rights & right:
            return Status.REMOTE_ACCESS_ERROR
        start = va - region.va
        # A sum beyond 64 bits wraps (RFC 5041 7.1); Python's numbers do not, and no region reaches that far.
        if va + length > 0xFFFF_FFFF_FFFF_FFFF or start < 0 or start + length > region.length:
            return Status.REMOTE_ACCESS_ERROR
        return region.view[start : start + length]

    def own(self, key: int) -> LoopbackRegion | None:
        """The region of this domain with this key."""
        region = self.device.keys.get(key)
        return region if region is not None and region.domain is self else None

    def may_invalidate(self, key: int) -> LoopbackRegion | None:
        """The region whose key a message of the other end voids: it must be open to the other end (RFC 5040 5.3)."""
        region = self.own(key)
        return region if region is not None and region.rights & _REMOTE else None

    # For the regions.

    def withdraw(self, region: LoopbackRegion) -> None:
        """A region is good for nothing any more: what covered its object is counted anew."""
        exporter = id(region.view.obj)
        left = self._by_object[exporter]
        left.remove(region)
        self.readable.discard(exporter)
        self.writable.discard(exporter)
        for other in left:
            self._note_whole(other)
        if not left:
            del self._by_object[exporter]

    def forget(self, region: LoopbackRegion) -> None:
        """A region is deregistered."""
        self.regions.discard(region)
        self.device.keys.free(region)

    def note(self, region: LoopbackRegion) -> None:
        """A region is good from now on."""
        self._by_object.setdefault(id(region.view.obj), []).append(region)
        self._note_whole(region)

    def _note_whole(self, region: LoopbackRegion) -> None:
        exporter = region.view.obj
        if memoryview(exporter).nbytes == region.length:
            self.readable.add(id(exporter))
            if region.rights & _LOCAL_WRITE:
                self.writable.add(id(exporter))

    def _view(self, buffer: Buffer, access: Access) -> memoryview:
        rights = int(access)
        view = memoryview(buffer)
        if not view.c_contiguous or not view.nbytes:
            raise Misuse("only contiguous memory of at least a byte can be registered")
        if rights & Access.REMOTE_WRITE and not rights & Access.LOCAL_WRITE:
            raise Misuse("a region that the other end may write must be writable here as well")  # IBTA 10.6.3.1
        if rights & Access.LOCAL_WRITE and view.readonly:
            raise Misuse("read-only memory cannot be registered for writing")
        return view.cast("B")

    def _register(self, view: memoryview, access: Access) -> MemoryRegion:
        attributes = self.device.attributes
        if len(self.device.keys) >= attributes.regions_max:
            raise LimitReached(f"the device has {attributes.regions_max} regions already")
        if len(view) > attributes.region_bytes_max:
            raise LimitReached(f"a region of {len(view)} bytes; the device takes {attributes.region_bytes_max}")
        if self.device.registration_fails():
            raise Unavailable("the device could not register the memory")
        region = LoopbackRegion(self, view, access, self.device.keys.next_key(), self.device.next_va(len(view)))
        self.device.keys.offer(region)
        self.regions.add(region)
        self.note(region)
        return region
