"""A device of the kernel: an adapter, or Linux's rxe and siw, used by way of libibverbs and librdmacm.

    device = KernelDevice("198.18.2.11", loop)  # the RDMA device that has this address

Each has an `ibv_context` of its own, and so its own descriptors: of asynchronous events, of completions, of the
connection manager. They do not block and are watched by the loop that drives the device; whatever comes of them is put
into `notices`, so nobody is called from inside a call. Everything is done in the thread of that loop.

What the calls of verbs do in the kernel they do at once, and may wait there: registering pins memory, and siw connects
TCP within `rdma_connect`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from ctypes import POINTER, Structure, byref, c_void_p, cast
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

from sidestep import limits
from sidestep.errors import LimitReached, Misuse, Unavailable
from sidestep.loop import Loop
from sidestep.rdma.kernel import abi, gids, quirks
from sidestep.rdma.kernel.finding import NoManager, open_context
from sidestep.rdma.kernel.libraries import libraries, told
from sidestep.rdma.kernel.manager import KernelManager
from sidestep.rdma.kernel.memory import KernelDomain
from sidestep.rdma.kernel.pinned import PinnedMemory
from sidestep.rdma.kernel.queues import KernelHandledQueue, KernelPolledQueue
from sidestep.rdma.kernel.receives import KernelSharedReceives
from sidestep.rdma.kernel.removal import Removal
from sidestep.rdma.roce.packet import MTU_CODES
from sidestep.rdma.verbs import AsyncEvent, Device, DeviceAttributes, EventKind
from sidestep.rdma.work import RKey

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from sidestep.rdma.kernel.memory import KernelRegion, KernelWindow
    from sidestep.rdma.kernel.qp import KernelQueuePair
    from sidestep.rdma.kernel.queues import KernelQueue, OwnHardware
    from sidestep.rdma.verbs import CompletionHandler, CompletionQueue, EventHandler, QpCapabilities

# Private data with rdma_cm: the TCP port space of InfiniBand begins with 36 bytes of the IP addressing annex (A11), and
# rdma_conn_param counts in 8 bits, and Linux takes 256 of iWARP, with the 4 of RFC 6581 (siw_cm.h: MPA_MAX_PRIVDATA).
_IB_REQUEST: Final = 92 - 36
_IWARP_PRIVATE: Final = 248  # bytes; with 252 Linux 6.1 makes no connection
_DEPTH_MAX: Final = 255  # RDMA Reads: of 8 bits
_KINDS: Final = {int(kind) for kind in EventKind}
_OF_SRQ: Final = (EventKind.SRQ_LIMIT_REACHED,)
_OF_PORT: Final = (EventKind.PORT_ACTIVE, EventKind.PORT_ERROR, EventKind.GID_CHANGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbsSettings:
    """Choices of a device's owner; times are in seconds, but for those that InfiniBand encodes."""

    resolve_s: float = limits.VERBS_RESOLVE_S  # for an address or a route to be found
    connect_s: float = limits.VERBS_CONNECT_S  # from `connect` to the answer; then Unreachable
    # On a dead path the kernel's own proposal lasts half a minute; a broken connection is to be known in seconds.
    # IBTA 9.7.6.1.3: 4.096 us * 2^16 = 268 ms until a request is sent again; a busy host has answered after 67, too.
    ack_timeout: int = 16
    retries: int = 6  # so often; rxe takes 7 for ever, though that is a number like others here (IBTA 9.7.6.1.3)
    rnr_timer: int = 14  # IBTA 9.7.5.2.8, table 45: 1.28 ms until a sender without a receive tries again
    rnr_retries: int = 6  # so often; 7 would be for ever


class KernelDevice(Device):
    """One of them.

    Args:
        address: An IP address of this host, whose interface has an RDMA device.
        loop: What drives it; its own unless given, and then closed with it.
        settings: Times.
        name: For people.
        by_number: Without rdma_cm, which would keep the kernel's device open for as long as this process lives.
        pinned: Bounds what it pins, together with others; what the kernel allows unless given.

    Raises:
        Misuse: The address is none.
        Unavailable: A library is missing, which the remedy names, or no RDMA device has the address.
    """

    cm: KernelManager | NoManager
    taps = None  # what is on the wire the kernel keeps to itself

    def __init__(
        self, address: str, loop: Loop | None = None, settings: VerbsSettings | None = None, *, name: str = "verbs",
        by_number: bool = False, pinned: PinnedMemory | None = None,
    ) -> None:  # fmt: skip
        _check_address(address)
        self.libraries: Any = libraries()
        self.address = address
        self.name = name
        self.settings = settings or VerbsSettings()
        self.on_event: EventHandler | None = None
        self.log = logging.getLogger(__name__)
        self.closed = False
        self.failed = False  # nothing works on it any more
        self.domains: list[KernelDomain] = []
        self.queues: dict[int, KernelPolledQueue] = {}  # by address
        self.own_queues: dict[int, OwnHardware] = {}  # likewise: of single queue pairs
        self.shared: dict[int | None, KernelSharedReceives] = {}
        self.by_number: dict[int, KernelQueuePair] = {}
        self.by_address: dict[int, KernelQueuePair] = {}
        self.receives: dict[int, KernelQueuePair | KernelSharedReceives] = {}  # whose, by number
        self.memory_by_index: dict[int, KernelRegion | KernelWindow] = {}  # by the upper 24 bits of the key
        self._pinned = pinned or PinnedMemory()
        self._pinned_bytes = 0  # of this device
        self._registrations_refused: Counter[str] = Counter()
        self._receive_number = 0
        self.inline_max = limits.VERBS_INLINE_ASKED
        self._owns_loop = loop is None
        self.loop = loop or Loop()
        self.notices: deque[Callable[[], object]] = self.loop.notices
        try:
            self._open(by_number=by_number)
        except BaseException:
            if self._owns_loop:
                self.loop.close()
            raise

    def _open(self, *, by_number: bool) -> None:
        if by_number:
            self.cm = NoManager(self)
            self.context, self.port, self.kernel_name = open_context(self.libraries, self.address)
        else:
            self.cm = KernelManager(self)
            try:
                self.context, self.port, self.kernel_name = self.cm.open_context()
            except BaseException:
                self.cm.release()
                raise
        found = cast(self.context, POINTER(abi.Context)).contents
        self.ops = found.ops
        self.iwarp: bool = found.device.contents.transport_type == abi.TRANSPORT_IWARP
        self.channel = self.libraries.ibv_create_comp_channel(self.context)
        self._async_fd: int = found.async_fd
        self._completion_fd: int = self.channel.contents.fd
        self._cq_address, self._cq_context = c_void_p(), c_void_p()
        self._filler: int | None = None
        if quirks.is_siw(self.kernel_name):
            self._filler = self.libraries.ibv_create_cq(self.context, quirks.SIW_FILLER, None, None, 0)
        self._read_attributes()
        self._removal: Removal | None = None
        try:
            name = found.device.contents.dev_name.decode()
            self._removal = Removal(self.loop, name, lambda: self.fail(f"the kernel takes {self.kernel_name} away"))
        except OSError as error:
            self.log.debug("%s: nobody tells when it is taken away: %s", self.name, error)
        for fd, handler in ((self._async_fd, self._read_events), (self._completion_fd, self._read_completions)):
            os.set_blocking(fd, False)
            self.loop.on_readable(fd, handler)

    def _read_attributes(self) -> None:
        device, port = abi.DeviceAttr(), self._port()
        self.libraries.ibv_query_device(self.context, byref(device))
        self.attributes = _attributes(device, port, iwarp=self.iwarp, driver=self.kernel_name)
        self.shared_scatter_max = min(self.attributes.scatter_max, device.max_srq_sge or self.attributes.scatter_max)
        table = [] if self.iwarp else gids.entries(self.libraries, self.context, self.port)
        self.gid = gids.choose(table, self.address)

    # ---- the user's side ----

    def alloc_pd(self) -> KernelDomain:
        self.check_open()
        try:
            domain = KernelDomain(self)
        except OSError as error:
            raise told(error, "no protection domain could be made") from error
        self.domains.append(domain)
        return domain

    def create_cq(self, capacity: int, handler: CompletionHandler | None = None) -> KernelQueue:
        self.check_open()
        if not 0 < capacity <= self.attributes.completions_max:
            raise Misuse(f"a completion queue of {capacity}; the device offers up to {self.attributes.completions_max}")
        return KernelPolledQueue(self, capacity) if handler is None else KernelHandledQueue(self, capacity, handler)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.cm.close()
        for domain in self.domains:
            for window in list(domain.windows):
                window.deallocate()
            for qp in list(domain.queue_pairs):
                qp.destroy()
            for region in list(domain.regions):
                region.deregister()
            for handle in list(domain.handles):
                handle.destroy()
        for domain in list(self.domains):  # a queue pair may use the shared receives of another domain
            for srq in list(domain.shared_receives):
                srq.destroy()
            domain.deallocate()
        for queue in list(self.queues.values()):
            queue.destroy()
        self.cm.release()
        for fd in (self._async_fd, self._completion_fd):
            self.loop.forget(fd)
        if self._removal is not None:
            self._removal.close()
        if self._filler is not None:
            self.libraries.ibv_destroy_cq(self._filler)
        self.libraries.ibv_destroy_comp_channel(self.channel)
        self.libraries.ibv_close_device(self.context)
        if self._owns_loop:
            self.loop.close()

    # ---- for what belongs to the device ----

    def check_joins(self) -> None:
        """Misuse if queue pairs of this device cannot be joined by number."""
        if self.iwarp:
            raise Misuse("an iWARP device's queue pairs are connected by its connection manager only")

    def own_gid(self) -> gids.GidEntry:
        """The entry of RoCE v2 that has the device's address, as the table is now; raises Unavailable."""
        port = self._port()
        if port.link_layer != abi.LINK_LAYER_ETHERNET:
            raise Unavailable(f"{self.kernel_name} is InfiniBand: its paths are known to rdma_cm only")
        if self.gid is None or gids.entry(self.libraries, self.context, self.port, self.gid.index) != self.gid:
            table = gids.entries(self.libraries, self.context, self.port)
            self.gid = gids.choose(table, self.address)
        if self.gid is None:
            raise Unavailable(f"{self.kernel_name} has no GID of RoCE v2 for {self.address}")
        return self.gid

    def active_mtu(self) -> int:
        """Bytes of payload that a packet of the port has at most, now."""
        return MTU_CODES.get(self._port().active_mtu, MTU_CODES[1])

    def _port(self) -> Structure:
        port = abi.PortAttr()
        try:
            self.libraries.ibv_query_port(self.context, self.port, byref(port))
        except OSError as error:
            raise Unavailable(f"{self.kernel_name} tells nothing of its port: {error.strerror}") from error
        return port

    def check_open(self) -> None:
        """Misuse when the device is closed."""
        if self.closed:
            raise Misuse(f"the device {self.name} is closed")

    def own_queue(self, queue: CompletionQueue) -> KernelQueue:
        """Misuse if the completion queue is not of this device."""
        if not isinstance(queue, KernelHandledQueue | KernelPolledQueue) or queue.device is not self:
            raise Misuse("a completion queue of another device")
        return queue

    def check_capabilities(self, capabilities: QpCapabilities) -> None:
        """Misuse if no queue pair can have them; LimitReached if there is no more room for one."""
        attributes = self.attributes
        if not 0 < capabilities.max_send_wr <= attributes.work_requests_max:
            raise Misuse(f"a send queue of {capabilities.max_send_wr}")
        if not 0 < capabilities.max_recv_wr <= attributes.work_requests_max:
            raise Misuse(f"a receive queue of {capabilities.max_recv_wr}")
        for depth in (capabilities.initiator_depth, capabilities.responder_resources):
            if not 0 <= depth <= attributes.read_depth_max:
                raise Misuse(f"a depth of {depth} RDMA Reads; the device offers {attributes.read_depth_max}")
        if len(self.by_number) >= attributes.queue_pairs_max:
            raise LimitReached(f"the device has {attributes.queue_pairs_max} queue pairs already")

    def pin(self, address: int, length: int, uid: int | None) -> int:
        """Memory is about to be registered: the bytes of its pages, which count now; LimitReached if they may not."""
        try:
            size = self._pinned.take(address, length, uid)
        except LimitReached:
            self._registrations_refused["bound"] += 1
            raise
        self._pinned_bytes += size
        return size

    def unpin(self, size: int, uid: int | None, *, refused: bool = False) -> None:
        """It is not any more, or the kernel has refused it."""
        self._pinned.give_back(size, uid)
        self._pinned_bytes -= size
        self._registrations_refused["kernel"] += refused

    def next_receive(self) -> int:
        self._receive_number += 1
        return self._receive_number

    def tell(self, event: AsyncEvent, handler: EventHandler | None = None) -> None:
        """To the handler of what it is about, else to the device's, if there is one."""
        if (handler := handler or self.on_event) is not None:
            self.notices.append(lambda: handler(event))

    def memory_of(self, key: RKey) -> KernelRegion | KernelWindow | None:
        """What has that key, or another one of the same index."""
        return self.memory_by_index.get(key >> 8)

    def invalidated(self, key: RKey) -> None:
        """A request, of this end or the other one, voided a key."""
        memory = self.memory_of(key)
        if memory is not None and memory.rkey == key:
            memory.invalidated()

    def completed(self, wc: Structure) -> None:
        """Finds what a completion is of: the lowest bit of its number tells receives, the rest which."""
        number = wc.wr_id >> 1
        qp = self.by_number.get(wc.qp_num)
        if not wc.wr_id & 1:
            if qp is not None:
                qp.send_completed(number, wc)
            return
        owner = self.receives.pop(number, None)
        if owner is None:
            return
        if isinstance(owner, KernelSharedReceives):
            receive = owner.posted.pop(number, None)
            owner.low()
        else:
            receive = owner.take_receive(number)
        if qp is not None and receive is not None:
            qp.receive_completed(receive, wc)

    def queue_pairs(self) -> list[dict[str, object]]:
        """Each as it is, by number."""
        return [qp.details() for _, qp in sorted(self.by_number.items())]

    def listening(self) -> list[int]:
        return self.cm.ports

    def counters(self) -> dict[str, int]:
        """What there is now, and how many registrations were refused: by our bound, or by the kernel's."""
        refused = {f"registration_refused{{{by}}}": count for by, count in self._registrations_refused.items() if count}
        return {
            "connections": len(self.cm.connections),
            "listeners": len(self.cm.listeners),
            "queue_pairs": len(self.by_number),
            "regions": sum(len(domain.regions) for domain in self.domains),
            "windows": sum(len(domain.windows) for domain in self.domains),
            "address_handles": sum(len(domain.handles) for domain in self.domains),
            "pinned_bytes": self._pinned_bytes,
        } | refused

    # ---- the descriptors' side ----

    def _read_completions(self) -> None:
        address = self._cq_address
        while True:
            try:
                self.libraries.ibv_get_cq_event(self.channel, byref(address), byref(self._cq_context))
            except OSError:  # EAGAIN
                return
            self.libraries.ibv_ack_cq_events(address, 1)
            queue = self.queues.get(address.value or 0)
            if queue is not None:
                queue.woken()
            if self.closed:
                return

    def _read_events(self) -> None:
        record = abi.AsyncEventRecord()
        while not self.closed:
            try:
                self.libraries.ibv_get_async_event(self.context, byref(record))
            except OSError:  # EAGAIN
                return
            number, address, port = record.event_type, record.element.object or 0, record.element.port_num
            self.libraries.ibv_ack_async_event(byref(record))
            if number in _OF_PORT:
                if port == self.port:
                    self._port_event(EventKind(number))
            elif number in _KINDS:
                self._event(EventKind(number), address)

    def _event(self, kind: EventKind, address: int) -> None:
        if kind is EventKind.DEVICE_FATAL:
            self.fail(f"{self.kernel_name} says so")
        elif kind is EventKind.CQ_ERROR:
            if (queue := self.queues.get(address)) is not None:
                self.tell(AsyncEvent(kind, queue, "the device's own queue ran over"))
                for user in dict.fromkeys(queue.users):
                    user.break_off(EventKind.QP_FATAL, "its completion queue ran over")
            elif (own := self.own_queues.get(address)) is not None:
                own.qp.break_off(EventKind.QP_FATAL, "its completion queue ran over")
        elif kind in _OF_SRQ:
            if (srq := self.shared.get(address)) is not None:
                srq.low()
        elif (qp := self.by_address.get(address)) is not None:
            qp.event(kind)

    def _port_event(self, kind: EventKind) -> None:
        if kind is EventKind.GID_CHANGE:
            before = self.gid
            try:
                if self.iwarp or before is None or self.own_gid() == before:
                    return  # it is about another address
            except Unavailable as error:
                self.log.debug("%s: %s", self.name, error)
        self.tell(AsyncEvent(kind, self, f"{self.kernel_name} says so of port {self.port}"))

    def fail(self, why: str) -> None:
        """The device is gone: everything on it is over, which is told once."""
        if self.failed:
            return
        self.failed = True
        self.tell(AsyncEvent(EventKind.DEVICE_FATAL, self, why))
        for qp in list(self.by_number.values()):
            qp.lose_device()


def _attributes(device: Structure, port: Structure, *, iwarp: bool, driver: str) -> DeviceAttributes:
    """What the device says of itself, and what its transport is known for."""
    windows = device.max_mw if device.device_cap_flags & abi.DEVICE_MEM_WINDOW_TYPE_2B else 0
    if quirks.is_rxe(driver):
        windows = 0
    depth = min(device.max_qp_rd_atom, device.max_qp_init_rd_atom or device.max_qp_rd_atom, _DEPTH_MAX)
    return DeviceAttributes(
        request_private_data_max=_IWARP_PRIVATE if iwarp else _IB_REQUEST,
        reply_private_data_max=_IWARP_PRIVATE if iwarp else 196,
        reject_private_data_max=_IWARP_PRIVATE if iwarp else 148,
        reject_reasons=False,  # rdma_reject has none
        private_data_padded=not iwarp,
        queue_pairs_max=device.max_qp,
        work_requests_max=device.max_qp_wr,
        completions_max=device.max_cqe,
        regions_max=device.max_mr,
        region_bytes_max=min(device.max_mr_size, (1 << 63) - 1),
        message_max=port.max_msg_sz,
        gather_max=min(device.max_sge, limits.VERBS_GATHER_MAX),
        scatter_max=min(device.max_sge, limits.VERBS_GATHER_MAX),
        read_scatter_max=1 if iwarp else min(device.max_sge_rd or device.max_sge, limits.VERBS_GATHER_MAX),
        inline_max=limits.VERBS_INLINE_MAX,
        read_depth_max=depth,
        zero_based=False,
        key_part_chosen=False,
        windows_max=windows,
        shared_receive_queues_max=device.max_srq,
        address_handles_max=0 if iwarp else device.max_ah,
        atomics=False,  # not asked of the kernel's devices yet
        immediate=not iwarp,
        acknowledged=not iwarp,
        error_disconnects=iwarp,
        # RFC 5040 5.2 has the sink's key on the wire; siw asks for local rights of it, adapters for remote ones.
        read_sink_remote_write=iwarp and not quirks.is_siw(driver),
        access_errors_reported=not quirks.is_rxe(driver),
        regions_voided=False,  # what ibv_reg_mr makes no request of a driver's voids
        pins_memory=True,
        solicited_reported=False,  # ibv_wc does not say so
    )


def _check_address(address: str) -> None:
    try:
        ip_address(address.partition("%")[0])
    except ValueError as error:
        raise Misuse(f"{address!r} is no IP address") from error
