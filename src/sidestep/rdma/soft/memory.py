"""Protection domains and regions: who may touch which bytes. Parts of a region are opened by `windows`.

`Domain.grant` decides about every access of the other end, and says why it refuses: to iWARP each reason is another
Terminate code. Addresses come from the device, and 0 is the first byte of a region that is zero-based.

After a call that ends access (`deregister`, `rekey`, an invalidation) not one more byte is placed or read; a device
that has the memory queued for sending is told while the call still runs (`SoftDevice.access_ended`), and copies it.

A region is good on every queue pair of its domain, and the other end of each may also void it (RFC 5042 6.4.5). Who
talks to peers that do not trust each other gives each a domain of its own, or windows: they belong to one queue pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from sidestep.errors import LimitReached, Misuse, Unavailable
from sidestep.rdma.address import buffer_address
from sidestep.rdma.soft.handles import SoftAddressHandle, check_datagrams
from sidestep.rdma.soft.receives import SharedReceives
from sidestep.rdma.soft.windows import REMOTE, SoftWindow
from sidestep.rdma.verbs import MemoryRegion, ProtectionDomain, QpCapabilities
from sidestep.rdma.work import Access, LKey, RKey

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

    from sidestep.rdma.soft.device import SoftDevice
    from sidestep.rdma.soft.keys import Memory
    from sidestep.rdma.soft.qp import SoftQueuePair
    from sidestep.rdma.soft.queues import SoftQueue
    from sidestep.rdma.verbs import CompletionQueue, EventHandler, Registered, SharedReceiveQueue

_LOCAL_WRITE: Final = int(Access.LOCAL_WRITE)
_EVERYTHING: Final = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
_ADDRESS_LAST: Final = 0xFFFF_FFFF_FFFF_FFFF
_NOTHING: Final = memoryview(b"")


class AccessRefusal(IntEnum):
    """Why the other end may not do what it wants, in the order of the checks (RFC 5041 7.1, RFC 5040 7.2)."""

    INVALID_STAG = 1  # key 0, unknown, of another part of 8 bits, or voided
    NOT_ASSOCIATED = 2  # of another protection domain, or a window bound to another queue pair
    ACCESS = 3  # the right is not granted
    WRAP = 4  # address and length pass the end of the 64 bits
    BOUNDS = 5  # before the first byte or behind the last one
    IN_USE = 6  # of an invalidation only: windows are bound to the region (verbs draft for iWARP 7.8)


class SoftRegion(MemoryRegion):
    """A region; `rights` is its access as a plain number."""

    __slots__ = ("domain", "rights", "windows", "zero_based")

    qp: ClassVar[None] = None  # good on every queue pair of the domain

    def __init__(
        self, domain: Domain, view: memoryview, access: Access, key: int, va: int, *, zero_based: bool
    ) -> None:
        self.domain = domain
        self.windows: set[SoftWindow] = set()  # bound to it
        self.zero_based = zero_based
        self.view = view
        self.va = va
        self.length = len(view)
        self.access = access
        self.rights = int(access)
        self.rkey = RKey(key)
        self.lkey = LKey(key)
        self.valid = True

    def deregister(self) -> None:
        if self in self.domain.regions:
            if self.windows:
                self._refuse_windows()
            self.invalidate()
            self.domain.regions.discard(self)
            device = self.domain.device
            device.keys.free(self.rkey)
            device.region_count -= 1

    def rekey(self) -> None:
        """Another index as well: who knows the old key cannot tell the new one (RFC 5042 6.1.1)."""
        if self not in self.domain.regions:
            raise Misuse("the region is deregistered")
        if self.windows:
            self._refuse_windows()
        device = self.domain.device
        keys = device.keys
        if self.valid:  # and stays so: for requests of this end nothing changes
            keys.withdraw(self)
            device.access_ended(self)
        else:
            self.valid = True
            self.domain.note(self)
        keys.free(self.rkey)
        self.rkey = RKey(keys.take(keys.part()))
        self.lkey = LKey(self.rkey)
        keys.offer(self)

    def invalidate(self) -> None:
        """Nobody has access any more; the memory stays registered. No window may be bound to it."""
        assert not self.windows
        if self.valid:
            self.valid = False
            device = self.domain.device
            device.keys.withdraw(self)
            self.domain.withdraw(self)
            device.access_ended(self)

    def _refuse_windows(self) -> None:
        # The verbs draft for iWARP 7.10.5: neither deallocate nor reregister a region with windows.
        raise Misuse(f"{len(self.windows)} windows are bound to the region")


@dataclass(frozen=True, slots=True)
class QpInit:
    """What `ProtectionDomain.create_qp` was asked for, everything about it checked; verbs has `ibv_qp_init_attr`."""

    domain: Domain
    send_cq: SoftQueue
    recv_cq: SoftQueue
    capabilities: QpCapabilities
    remote_access: int  # bits of `Access`
    srq: SharedReceives | None
    on_event: EventHandler | None


class _Everything(set[int]):
    """Says yes to whatever it is asked."""

    __slots__ = ()

    def __contains__(self, item: object) -> bool:
        return True


class Domain(ProtectionDomain):
    """A protection domain.

    `readable` and `writable` answer the common question about an entry of a request, "does it lie in a region", by the
    identity of the object it is a view of: as long as a region covers all of an object, the object cannot go away.
    """

    def __init__(self, device: SoftDevice) -> None:
        self.device = device
        self.regions: set[SoftRegion] = set()
        self.windows: set[SoftWindow] = set()
        self.queue_pairs: set[SoftQueuePair] = set()
        self.shared_receives: set[SharedReceives] = set()
        self.handles: set[SoftAddressHandle] = set()
        self._by_object: dict[int, list[SoftRegion]] = {}  # the valid ones, by identity of what they are views of
        self._deallocated = False
        self._lenient = not device.attributes.checks_local_memory
        self.readable: set[int] = _Everything() if self._lenient else set()
        self.writable: set[int] = _Everything() if self._lenient else set()

    def register(
        self, buffer: Buffer, access: Access, *, zero_based: bool = False, key_part: int | None = None,
        uid: int | None = None,
    ) -> MemoryRegion:  # fmt: skip
        self._check_usable()
        view = self._view(buffer, access)
        return self._register(view, access, zero_based, self.part(key_part, zero_based=zero_based))

    def register_later(
        self, buffer: Buffer, access: Access, done: Registered, *, zero_based: bool = False, key_part: int | None = None
    ) -> None:
        self._check_usable()
        view = self._view(buffer, access)
        part = self.part(key_part, zero_based=zero_based)

        def finish() -> None:
            result: MemoryRegion | LimitReached | Unavailable
            try:
                if self._deallocated or self.device.closed:
                    raise Unavailable("the domain is gone")
                result = self._register(view, access, zero_based, part)
            except (LimitReached, Unavailable) as why:
                result = why
            self.device.notices.append(partial(done, result))

        self.device.registration_due(finish)

    def create_qp(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        capabilities: QpCapabilities | None = None,
        *,
        remote_access: Access | None = None,
        srq: SharedReceiveQueue | None = None,
        on_event: EventHandler | None = None,
    ) -> SoftQueuePair:
        access = _EVERYTHING if remote_access is None else remote_access
        return self.device.make_qp(self._qp_init(send_cq, recv_cq, capabilities, int(access), srq, on_event))

    def create_ud_qp(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        qkey: int,
        capabilities: QpCapabilities | None = None,
        *,
        srq: SharedReceiveQueue | None = None,
        on_event: EventHandler | None = None,
    ) -> SoftQueuePair:
        check_datagrams(self.device.attributes, qkey)
        return self.device.make_ud_qp(self._qp_init(send_cq, recv_cq, capabilities, 0, srq, on_event), qkey)

    def create_ah(self, address: str) -> SoftAddressHandle:
        self._check_usable()
        device = self.device
        check_datagrams(device.attributes)
        if device.ah_count >= device.attributes.address_handles_max:
            raise LimitReached(f"the device has {device.ah_count} address handles already")
        handle = device.make_ah(self, address)
        self.handles.add(handle)
        device.ah_count += 1
        return handle

    def create_srq(self, max_wr: int, *, on_event: EventHandler | None = None) -> SharedReceives:
        self._check_usable()
        device = self.device
        attributes = device.attributes
        if not attributes.shared_receive_queues_max:
            raise Misuse("the device has no shared receive queues")
        if not 0 < max_wr <= attributes.work_requests_max:
            raise Misuse(f"a shared receive queue of {max_wr}; the device offers {attributes.work_requests_max}")
        if device.srq_count >= attributes.shared_receive_queues_max:
            raise LimitReached(f"the device has {device.srq_count} shared receive queues already")
        srq = SharedReceives(self, max_wr, on_event)
        self.shared_receives.add(srq)
        device.srq_count += 1
        return srq

    def alloc_window(self) -> SoftWindow:
        self._check_usable()
        device = self.device
        if not device.attributes.windows_max:
            raise Misuse("the device has no memory windows")
        if device.window_count >= device.attributes.windows_max:
            raise LimitReached(f"the device has {device.window_count} memory windows already")
        window = SoftWindow(self, device.keys.take(device.keys.part()))
        device.keys.hold(window)
        self.windows.add(window)
        device.window_count += 1
        return window

    def deallocate(self) -> None:
        for what in (self.regions, self.windows, self.queue_pairs, self.handles, self.shared_receives):
            if what:
                raise Misuse(f"the domain has {len(what)} {type(next(iter(what))).__name__} still")
        if not self._deallocated:
            self._deallocated = True
            self.device.forget(self)

    def _qp_init(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        capabilities: QpCapabilities | None,
        access: int,
        srq: SharedReceiveQueue | None,
        on_event: EventHandler | None,
    ) -> QpInit:
        self._check_usable()
        device = self.device
        own_send, own_recv, own_srq = device.own_queue(send_cq), device.own_queue(recv_cq), device.own_shared(srq)
        wanted = capabilities or QpCapabilities()
        device.check_capabilities(wanted)
        return QpInit(self, own_send, own_recv, wanted, access, own_srq, on_event)

    # For the queue pairs.

    def grant(self, key: int, va: int, length: int, right: int, qp: SoftQueuePair) -> memoryview | AccessRefusal:
        """The bytes that the other end may touch, or the first check that fails (RFC 5041 7.1, RFC 5040 7.2).

        To be asked for every segment, since access may end between two of one message (RFC 5042 6.2.2).

        Args:
            key: All 32 bits.
            va: Of the first byte.
            length: Bytes; of none neither key nor address is looked at (RFC 5041 5.2).
            right: REMOTE_READ, REMOTE_WRITE or REMOTE_ATOMIC. What the queue pair allows is the caller's matter.
            qp: On which the other end asks.
        """
        if not length:
            return _NOTHING
        memory = self.device.keys.get(key)
        if memory is None:
            return AccessRefusal.INVALID_STAG
        if memory.domain is not self or (memory.qp is not None and memory.qp is not qp):
            return AccessRefusal.NOT_ASSOCIATED
        if not memory.rights & right:
            return AccessRefusal.ACCESS
        # A sum beyond 64 bits wraps (RFC 5041 7.1); Python's numbers do not, and no region reaches that far.
        if va + length > _ADDRESS_LAST:
            return AccessRefusal.WRAP
        start = va - memory.va
        if start < 0 or start + length > memory.length:
            return AccessRefusal.BOUNDS
        return memory.view[start : start + length]

    def covers(self, entry: memoryview, rights: int) -> bool:
        """Whether the entry lies in one region with these rights: the long way, by address."""
        if self._lenient or not len(entry):
            return True
        near = self._by_object.get(id(entry.obj), ())
        # The same memory may be seen through another object: then all regions are looked at.
        return _one_covers(near, entry, rights) or _one_covers(self.regions, entry, rights)

    def may_invalidate(self, key: int, qp: SoftQueuePair) -> Memory | AccessRefusal:
        """What a request with this key voids (verbs draft 7.8). What is void already may be voided again."""
        memory = self.device.keys.find(key)
        if memory is None:
            return AccessRefusal.INVALID_STAG
        if memory.domain is not self or (memory.qp is not None and memory.qp is not qp):
            return AccessRefusal.NOT_ASSOCIATED
        if isinstance(memory, SoftRegion) and memory.windows:
            return AccessRefusal.IN_USE
        return memory

    def may_be_invalidated(self, key: int, qp: SoftQueuePair) -> Memory | AccessRefusal:
        """What a message of the other end voids: it and the queue pair must be open to the other end (RFC 5040 5.3)."""
        memory = self.may_invalidate(key, qp)
        if isinstance(memory, AccessRefusal):
            return memory
        return memory if memory.rights & REMOTE and qp.remote_access & REMOTE else AccessRefusal.ACCESS

    def part(self, chosen: int | None, *, zero_based: bool) -> int:
        """The low 8 bits of a key; Misuse if the device does not offer what the consumer wants."""
        attributes = self.device.attributes
        if zero_based and not attributes.zero_based:
            raise Misuse("the device has no zero-based memory")
        if chosen is not None and not attributes.key_part_chosen:
            raise Misuse("the device chooses all of a key")
        return self.device.keys.part(chosen)

    # For the regions.

    def withdraw(self, region: SoftRegion) -> None:
        """A region is good for nothing any more: what covered its object is counted anew."""
        if self._lenient:
            return
        exporter = id(region.view.obj)
        left = self._by_object[exporter]
        left.remove(region)
        self.readable.discard(exporter)
        self.writable.discard(exporter)
        for other in left:
            self._note_whole(other)
        if not left:
            del self._by_object[exporter]

    def note(self, region: SoftRegion) -> None:
        if self._lenient:
            return
        self._by_object.setdefault(id(region.view.obj), []).append(region)
        self._note_whole(region)

    def _note_whole(self, region: SoftRegion) -> None:
        exporter: Buffer | None = region.view.obj
        if exporter is not None and memoryview(exporter).nbytes == region.length:  # None: memory of no Python object
            self.readable.add(id(exporter))
            if region.rights & _LOCAL_WRITE:
                self.writable.add(id(exporter))

    def _view(self, buffer: Buffer, access: Access) -> memoryview:
        rights = int(access)
        view = memoryview(buffer)
        if not view.c_contiguous or not view.nbytes:
            raise Misuse("only contiguous memory of at least a byte can be registered")
        if rights & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC) and not rights & Access.LOCAL_WRITE:
            raise Misuse("a region that the other end may write must be writable here as well")  # IBTA 10.6.3.1
        if rights & Access.LOCAL_WRITE and view.readonly:
            raise Misuse("read-only memory cannot be registered for writing")
        return view.cast("B")

    def _register(self, view: memoryview, access: Access, zero_based: bool, part: int) -> MemoryRegion:
        device = self.device
        attributes = device.attributes
        if device.region_count >= attributes.regions_max:
            raise LimitReached(f"the device has {attributes.regions_max} regions already")
        if len(view) > attributes.region_bytes_max:
            raise LimitReached(f"a region of {len(view)} bytes; the device takes {attributes.region_bytes_max}")
        if device.registration_fails():
            raise Unavailable("the device could not register the memory")
        va = 0 if zero_based else device.next_va(len(view))
        region = SoftRegion(self, view, access, device.keys.take(part), va, zero_based=zero_based)
        device.keys.offer(region)
        self.regions.add(region)
        device.region_count += 1
        self.note(region)
        return region

    def _check_usable(self) -> None:
        if self._deallocated or self.device.closed:
            raise Misuse("the domain is deallocated")


def _one_covers(regions: Iterable[SoftRegion], entry: memoryview, rights: int) -> bool:
    start = buffer_address(entry)
    end = start + len(entry)
    for region in regions:
        if region.valid and region.rights & rights == rights:
            first = buffer_address(region.view)
            if first <= start and end <= first + region.length:
                return True
    return False
