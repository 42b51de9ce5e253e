"""Protection domains, regions and windows of a device of the kernel.

A region is one `ibv_mr`; its address is the real one. What differs from devices made of software:

- `rekey` registers anew, so the local key changes too: nothing may be posted in the region meanwhile. A pool rekeys
  what nobody uses (`pools.RdmaPool`).
- Requests void keys of windows, and none of regions (`regions_voided`): drivers fail such a request, and the queue pair
  with it.
- Not offered: zero-based memory, as the kernel wants an address with the offset of its page, and a chosen part of a
  region's key. Windows are of type 2B, where the device has them.
"""

from __future__ import annotations

from ctypes import POINTER, c_void_p, cast
from functools import partial
from mmap import mmap
from typing import TYPE_CHECKING, Any, Final

from sidestep import limits
from sidestep.errors import LimitReached, Misuse, SidestepError, Unavailable
from sidestep.rdma.address import buffer_address
from sidestep.rdma.kernel import abi
from sidestep.rdma.kernel.libraries import told
from sidestep.rdma.kernel.qp import KernelQueuePair
from sidestep.rdma.kernel.receives import KernelSharedReceives
from sidestep.rdma.kernel.rings import Rings
from sidestep.rdma.kernel.sends import InlineSlots
from sidestep.rdma.kernel.ud import KernelAddressHandle, KernelUdQueuePair
from sidestep.rdma.soft.handles import check_datagrams
from sidestep.rdma.verbs import MemoryRegion, MemoryWindow, ProtectionDomain, QpCapabilities
from sidestep.rdma.work import Access, LKey, RKey

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from sidestep.native._engine import SendSlab
    from sidestep.rdma.kernel.device import KernelDevice
    from sidestep.rdma.kernel.queues import KernelQueue
    from sidestep.rdma.verbs import CompletionQueue, EventHandler, Registered, SharedReceiveQueue

_EVERYTHING: Final = Access.REMOTE_READ | Access.REMOTE_WRITE


class KernelRegion(MemoryRegion):
    """A region. `handle` is None once it is deregistered."""

    __slots__ = ("_handle", "_pinned", "_uid", "domain", "exporter", "windows")

    def __init__(self, domain: KernelDomain, view: memoryview, access: Access, uid: int | None) -> None:
        self.domain = domain
        self._uid = uid
        self.view = view
        self.va = buffer_address(view)
        self.length = len(view)
        self.access = access
        self.exporter = id(view.obj)
        self.windows: set[KernelWindow] = set()  # bound to it
        self._register()

    def _register(self) -> None:
        device = self.domain.device
        pinned = device.pin(self.va, self.length, self._uid)
        try:
            handle = device.libraries.ibv_reg_mr(self.domain.address, self.va, self.length, int(self.access))
        except OSError as error:
            device.unpin(pinned, self._uid, refused=True)
            raise told(error, f"{self.length} bytes could not be registered") from error
        self._pinned = pinned
        self._handle: Any = handle
        self.lkey = LKey(handle.contents.lkey)
        self.rkey = RKey(handle.contents.rkey)
        self.valid = True
        device.memory_by_index[self.rkey >> 8] = self

    @property
    def handle(self) -> Any:
        """The address of the `ibv_mr`, or None."""
        return None if self._handle is None else cast(self._handle, c_void_p).value

    def covers(self, address: int, length: int) -> bool:
        return self.valid and self.va <= address and address + length <= self.va + self.length

    def deregister(self) -> None:
        if self._handle is not None:
            self._give_back("deregistered")
            self.domain.forget_region(self)

    def rekey(self) -> None:
        if self._handle is None:
            raise Misuse("the region is deregistered")
        self._give_back("rekeyed")
        try:
            self._register()
        except SidestepError:
            self.domain.forget_region(self)
            raise

    def invalidated(self) -> None:
        """A request voided the key."""
        self.valid = False

    def _give_back(self, what: str) -> None:
        if self.windows:  # the verbs draft for iWARP 7.10.5
            raise Misuse(f"{len(self.windows)} windows are bound to the region: it cannot be {what}")
        device = self.domain.device
        try:
            device.libraries.ibv_dereg_mr(self._handle)
        except OSError as error:
            raise told(error, f"the region could not be {what}") from error
        device.unpin(self._pinned, self._uid)
        self._handle = None
        self.valid = False
        device.memory_by_index.pop(self.rkey >> 8, None)


class KernelWindow(MemoryWindow):
    """A window of type 2."""

    __slots__ = ("_handle", "domain", "last_part", "qp", "region")

    def __init__(self, domain: KernelDomain) -> None:
        self.domain = domain
        device = domain.device
        address = device.ops.alloc_mw(domain.address, abi.MW_TYPE_2)
        if not address:
            raise LimitReached("the device has no more memory windows")
        self._handle: int | None = address
        self.rkey = RKey(cast(address, POINTER(abi.Mw)).contents.rkey)
        self.last_part = self.rkey & 0xFF  # of the last bind that was posted
        self.access = Access.LOCAL_READ
        self.va = self.length = 0
        self.valid = False
        self.qp: KernelQueuePair | None = None
        self.region: KernelRegion | None = None
        device.memory_by_index[self.rkey >> 8] = self

    @property
    def handle(self) -> int | None:
        """The address of the `ibv_mw`, or None once it is given back."""
        return self._handle

    def bound(
        self, key: RKey, qp: KernelQueuePair, region: KernelRegion, access: Access, span: tuple[int, int]
    ) -> None:
        """A bind has succeeded."""
        self.rkey, self.qp, self.region, self.access = key, qp, region, access
        self.va, self.length = span
        self.valid = True
        region.windows.add(self)
        qp.windows.add(self)

    def invalidated(self) -> None:
        """A request voided the key."""
        if self.valid:
            assert self.qp is not None
            assert self.region is not None
            self.valid = False
            self.qp.windows.discard(self)
            self.region.windows.discard(self)
            self.qp = self.region = None

    def deallocate(self) -> None:
        if self._handle is None:
            return
        device = self.domain.device
        if error := device.ops.dealloc_mw(self._handle):
            raise told(OSError(abs(error), f"error {abs(error)}"), "the window could not be given back")
        self.invalidated()
        self._handle = None
        self.domain.windows.discard(self)
        device.memory_by_index.pop(self.rkey >> 8, None)


class KernelDomain(ProtectionDomain):
    """A protection domain."""

    def __init__(self, device: KernelDevice) -> None:
        self.device = device
        self.address: int = device.libraries.ibv_alloc_pd(device.context)
        self.regions: set[KernelRegion] = set()
        self.windows: set[KernelWindow] = set()
        self.queue_pairs: set[KernelQueuePair] = set()
        self.shared_receives: set[KernelSharedReceives] = set()
        self.handles: set[KernelAddressHandle] = set()
        self._by_object: dict[int, list[KernelRegion]] = {}  # by identity of what they are views of
        self.inline = InlineSlots(self)
        self._slab: tuple[SendSlab, KernelRegion] | None = None
        self.rings: Final = Rings(self)
        self._deallocated = False

    def memory(self, length: int) -> memoryview:
        return memoryview(mmap(-1, length))  # see `libraries` on forks

    def register(
        self, buffer: Buffer, access: Access, *, zero_based: bool = False, key_part: int | None = None,
        uid: int | None = None,
    ) -> KernelRegion:  # fmt: skip
        self._check_usable()
        return self._register(self._view(buffer, access, zero_based, key_part), access, uid)

    def register_later(
        self, buffer: Buffer, access: Access, done: Registered, *, zero_based: bool = False, key_part: int | None = None
    ) -> None:
        """The call into the kernel is made from where the device is driven; it waits there."""
        self._check_usable()
        view = self._view(buffer, access, zero_based, key_part)

        def finish() -> None:
            result: MemoryRegion | SidestepError
            try:
                if self._deallocated or self.device.closed:
                    raise Unavailable("the domain is gone")
                result = self._register(view, access)
            except (LimitReached, Unavailable) as why:
                result = why
            self.device.notices.append(partial(done, result))

        self.device.notices.append(finish)

    def create_qp(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        capabilities: QpCapabilities | None = None,
        *,
        remote_access: Access | None = None,
        srq: SharedReceiveQueue | None = None,
        on_event: EventHandler | None = None,
    ) -> KernelQueuePair:
        queues, wanted, own = self._qp_parts(send_cq, recv_cq, capabilities, srq)
        access = _EVERYTHING if remote_access is None else remote_access
        return KernelQueuePair(self, queues, wanted, int(access), own, on_event)

    def create_ud_qp(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        qkey: int,
        capabilities: QpCapabilities | None = None,
        *,
        srq: SharedReceiveQueue | None = None,
        on_event: EventHandler | None = None,
    ) -> KernelUdQueuePair:
        check_datagrams(self.device.attributes, qkey)
        queues, wanted, own = self._qp_parts(send_cq, recv_cq, capabilities, srq)
        return KernelUdQueuePair(self, queues, wanted, qkey, own, on_event)

    def _qp_parts(
        self,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        capabilities: QpCapabilities | None,
        srq: SharedReceiveQueue | None,
    ) -> tuple[tuple[KernelQueue, KernelQueue], QpCapabilities, KernelSharedReceives | None]:
        """What a queue pair is made of, checked."""
        self._check_usable()
        device = self.device
        queues = device.own_queue(send_cq), device.own_queue(recv_cq)
        if srq is not None and not (
            isinstance(srq, KernelSharedReceives) and srq.domain.device is device and srq.address is not None
        ):
            raise Misuse("a shared receive queue of another device, or one that is destroyed")
        wanted = capabilities or QpCapabilities()
        device.check_capabilities(wanted)
        return queues, wanted, srq

    def create_ah(self, address: str) -> KernelAddressHandle:
        self._check_usable()
        check_datagrams(self.device.attributes)
        handle = KernelAddressHandle(self, address)
        self.handles.add(handle)
        return handle

    def create_srq(self, max_wr: int, *, on_event: EventHandler | None = None) -> KernelSharedReceives:
        self._check_usable()
        attributes = self.device.attributes
        if not attributes.shared_receive_queues_max:
            raise Misuse("the device has no shared receive queues")
        if not 0 < max_wr <= attributes.work_requests_max:
            raise Misuse(f"a shared receive queue of {max_wr}; the device offers {attributes.work_requests_max}")
        srq = KernelSharedReceives(self, max_wr, on_event)
        self.shared_receives.add(srq)
        return srq

    def alloc_window(self) -> KernelWindow:
        self._check_usable()
        if not self.device.attributes.windows_max:
            raise Misuse("the device has no memory windows")
        window = KernelWindow(self)
        self.windows.add(window)
        return window

    def deallocate(self) -> None:
        if not self.queue_pairs:
            self.inline.close()
            if self._slab is not None:
                self._slab[1].deregister()
                self._slab = None
        for what in (self.regions, self.windows, self.queue_pairs, self.handles, self.shared_receives):
            if what:
                raise Misuse(f"the domain has {len(what)} {type(next(iter(what))).__name__} still")
        if not self._deallocated:
            self.device.libraries.ibv_dealloc_pd(self.address)
            self._deallocated = True
            self.device.domains.remove(self)

    # For the queue pairs.

    def send_slab(self) -> SendSlab:
        """What an engine sends from, on all of them; raises as `register` does."""
        from sidestep.native._engine import SendSlab

        if self._slab is None:
            memory = self.memory(limits.VERBS_ENGINE_SLAB)
            region = self.register(memory, Access.LOCAL_READ)
            self._slab = SendSlab(memory, region.lkey), region
        return self._slab[0]

    def find(self, entry: memoryview, address: int) -> KernelRegion | None:
        """The region that an entry of a request lies in."""
        length = len(entry)
        for region in self._by_object.get(id(entry.obj), ()):
            if region.covers(address, length):
                return region
        for region in self.regions:  # the same memory may be seen through another object
            if region.covers(address, length):
                return region
        return None

    def forget_region(self, region: KernelRegion) -> None:
        if region not in self.regions:  # of `rings`
            return
        self.regions.remove(region)
        alike = self._by_object[region.exporter]
        alike.remove(region)
        if not alike:
            del self._by_object[region.exporter]

    def pin(self, view: memoryview, uid: int | None) -> KernelRegion:
        """A region that `find` does not find; raises as `register` does."""
        return KernelRegion(self, view, Access.LOCAL_READ, uid)

    def _register(self, view: memoryview, access: Access, uid: int | None = None) -> KernelRegion:
        region = KernelRegion(self, view, access, uid)
        self.regions.add(region)
        self._by_object.setdefault(region.exporter, []).append(region)
        return region

    def _view(self, buffer: Buffer, access: Access, zero_based: bool, key_part: int | None) -> memoryview:
        rights = int(access)
        view = memoryview(buffer)
        if zero_based:
            raise Misuse("the device has no zero-based memory")
        if key_part is not None:
            raise Misuse("the device chooses all of a key")
        if not view.c_contiguous or not view.nbytes:
            raise Misuse("only contiguous memory of at least a byte can be registered")
        if rights & Access.REMOTE_WRITE and not rights & Access.LOCAL_WRITE:
            raise Misuse("a region that the other end may write must be writable here as well")  # IBTA 10.6.3.1
        if rights & Access.LOCAL_WRITE and view.readonly:
            raise Misuse("read-only memory cannot be registered for writing")
        return view.cast("B")

    def _check_usable(self) -> None:
        if self._deallocated or self.device.closed:
            raise Misuse("the domain is deallocated")


__all__ = ["KernelDomain", "KernelRegion", "KernelWindow"]
