"""Requests on their way to the device: how each is written down, and where inline bytes go.

Bytes of a request that are not registered memory are copied: by the device, if it copies that much (IBV_SEND_INLINE)
and all else in the request is registered; otherwise into a slot that its domain has for that, until it is done.
"""

from __future__ import annotations

import errno
import sys
from ctypes import byref, c_char_p, c_void_p, cast
from typing import TYPE_CHECKING, Any, Final

from sidestep import limits
from sidestep.errors import LimitReached, Misuse, Unavailable
from sidestep.rdma.address import buffer_address
from sidestep.rdma.kernel import abi, quirks
from sidestep.rdma.kernel.abi import SendFlags, WrOpcode
from sidestep.rdma.pools import MessagePool
from sidestep.rdma.soft.qp import entries_of
from sidestep.rdma.work import (
    QKEY_CONTROLLED,
    Access,
    BindWindow,
    LocalInvalidate,
    RdmaRead,
    RdmaWrite,
    Send,
    SendRequest,
    Status,
    UdSend,
)

if TYPE_CHECKING:
    from sidestep.rdma.kernel.memory import KernelDomain
    from sidestep.rdma.pools import Element
    from sidestep.rdma.work import RKey

REMOTE: Final = Access.REMOTE_READ | Access.REMOTE_WRITE
_TELLING: Final = (RdmaRead, LocalInvalidate, BindWindow)
_OPTIONAL: Final = (LocalInvalidate, BindWindow)  # what a device may refuse because it has none


class Posted:
    """A request in the send queue. With a verdict the device does not have it: it ends so when its turn comes."""

    __slots__ = ("key", "outcome", "request", "slot", "tells", "verdict")

    def __init__(self, request: SendRequest, verdict: Status | None = None) -> None:
        self.request = request
        self.verdict = verdict
        # What is to be known of it by itself: an effect, or that of a Read, which siw completes behind later requests.
        self.tells = request.signaled or isinstance(request, _TELLING)
        self.outcome: tuple[Status, int] | None = None  # what the device said, and how many bytes
        self.slot: tuple[MessagePool, Element] | None = None  # where its inline bytes are
        self.key: RKey | None = None  # of a bind


class InlineSlots:
    """Registered memory for inline bytes, of all queue pairs of a domain.

    Most have nothing under way, so it is little: it is made as it is needed, and all but the first given up again.
    """

    __slots__ = ("_domain", "_pools")

    def __init__(self, domain: KernelDomain) -> None:
        self._domain = domain
        self._pools: list[MessagePool] = []

    def take(self) -> tuple[MessagePool, Element]:
        """A slot; raises as `register` does."""
        for pool in self._pools:
            if (element := pool.take()) is not None:
                return pool, element
        pool = MessagePool(self._domain, size=limits.VERBS_INLINE_MAX, count=limits.VERBS_INLINE_SLOTS)
        self._pools.append(pool)
        element = pool.take()
        assert element is not None
        return pool, element

    def put(self, pool: MessagePool, element: Element) -> None:
        pool.put(element)
        if pool.available == pool.count and pool is not self._pools[0]:
            self._pools.remove(pool)
            pool.close()

    def close(self) -> None:
        """No queue pair is left."""
        for pool in self._pools:
            pool.close()
        self._pools.clear()


class Writer:
    """Fills in what the device is told of a request; one for each queue pair."""

    __slots__ = ("_bad", "_domain", "_entries", "_inline_max", "_no_read_fence", "_wr", "own_qkey")

    def __init__(self, domain: KernelDomain, entries_max: int, inline_max: int) -> None:
        self._domain = domain
        self._entries = (abi.Sge * max(1, entries_max))()
        self._wr = abi.SendWr(sg_list=self._entries)
        self._bad = c_void_p()
        self._inline_max = inline_max
        self._no_read_fence = quirks.is_siw(domain.device.kernel_name)
        self.own_qkey = 0  # of a queue pair for datagrams

    def post(self, call: Any, queue: int, wr_id: int, posted: Posted) -> None:
        """Hands it over, or sets the verdict; raises LimitReached, Misuse or Unavailable."""
        request = posted.request
        wr = self._wr
        wr.wr_id = wr_id
        fence = request.fence and not (self._no_read_fence and isinstance(request, RdmaRead))
        wr.send_flags = (SendFlags.SIGNALED if posted.tells else 0) | (SendFlags.FENCE if fence else 0)
        wr.num_sge = 0
        if isinstance(request, LocalInvalidate):
            memory = self._domain.device.memory_of(request.rkey)
            if memory is None or memory.domain is not self._domain:
                posted.verdict = Status.LOCAL_PROTECTION_ERROR
                return
            wr.opcode, wr.invalidate_rkey = WrOpcode.LOCAL_INV, request.rkey
        elif isinstance(request, BindWindow):
            self._bind(request, posted)
        elif isinstance(request, Send | UdSend | RdmaWrite | RdmaRead):  # the others are not offered
            self._move(request, posted)
        if posted.verdict is not None:
            return
        if error := call(queue, byref(wr), byref(self._bad)):
            self.release(posted)
            self._refused(request, abs(error))

    def release(self, posted: Posted) -> None:
        """The device is done with it."""
        if posted.slot is not None:
            self._domain.inline.put(*posted.slot)
            posted.slot = None

    def _move(self, request: Send | UdSend | RdmaWrite | RdmaRead, posted: Posted) -> None:
        self._describe(request)
        wr = self._wr
        entries = entries_of(request)
        copied = sum(len(entry) for entry in entries if isinstance(entry, bytes))
        inline = bool(copied) and sum(map(len, entries)) <= self._inline_max
        if inline:
            wr.send_flags |= SendFlags.INLINE
        elif copied:
            posted.slot = self._domain.inline.take()
        used = offset = 0
        for entry in entries:
            length = len(entry)
            if not length:
                continue  # to some devices no length is 2^31 bytes
            place = self._entries[used]
            used += 1
            place.length = length
            if isinstance(entry, bytes):
                if inline:
                    place.addr = cast(c_char_p(entry), c_void_p).value
                else:
                    place.addr, place.lkey = _copy(entry, posted, offset)
                    offset += length
                continue
            place.addr = address = buffer_address(entry)
            region = self._domain.find(entry, address)
            if region is None or (isinstance(request, RdmaRead) and not region.access & Access.LOCAL_WRITE):
                posted.verdict = Status.LOCAL_PROTECTION_ERROR
                self.release(posted)
                return
            place.lkey = region.lkey
        wr.num_sge = used

    def _describe(self, request: Send | UdSend | RdmaWrite | RdmaRead) -> None:
        """The opcode, and what goes with it."""
        wr = self._wr
        if isinstance(request, RdmaRead):
            wr.opcode = WrOpcode.RDMA_READ
            wr.wr.rdma.remote_addr, wr.wr.rdma.rkey = request.remote_va, request.rkey
            return
        immediate = request.immediate
        if isinstance(request, RdmaWrite):
            wr.opcode = WrOpcode.RDMA_WRITE if immediate is None else WrOpcode.RDMA_WRITE_WITH_IMM
            wr.wr.rdma.remote_addr, wr.wr.rdma.rkey = request.remote_va, request.rkey
        else:
            wr.opcode = WrOpcode.SEND if immediate is None else WrOpcode.SEND_WITH_IMM
        if request.solicited and not (isinstance(request, RdmaWrite) and immediate is None):
            wr.send_flags |= SendFlags.SOLICITED
        if immediate is not None:  # imm_data shares its place, and is in the order of the wire
            wr.invalidate_rkey = int.from_bytes(immediate, sys.byteorder)
        if isinstance(request, UdSend):
            ah: Any = request.ah  # of this domain: it was looked at
            qkey = self.own_qkey if request.remote_qkey & QKEY_CONTROLLED else request.remote_qkey
            wr.wr.ud.ah, wr.wr.ud.remote_qpn, wr.wr.ud.remote_qkey = ah.pointer, request.remote_qpn, qkey
        elif isinstance(request, Send) and request.invalidate is not None:
            wr.opcode, wr.invalidate_rkey = WrOpcode.SEND_WITH_INV, request.invalidate

    def _bind(self, request: BindWindow, posted: Posted) -> None:
        """Checks what cannot change before its turn comes; the rest is the device's matter (verbs draft 7.10.6)."""
        window: Any = request.window  # ours, if they are of the domain
        region: Any = request.region
        domain = self._domain
        end = request.offset + request.length
        rights = int(request.access)
        if (
            window not in domain.windows
            or region not in domain.regions
            or not region.access & Access.WINDOW_BIND
            or request.offset < 0
            or request.length < 1
            or end > region.length
            or not rights & REMOTE
            or rights & ~REMOTE
            or (rights & Access.REMOTE_WRITE and not region.access & Access.LOCAL_WRITE)
        ):
            posted.verdict = Status.WINDOW_BIND_ERROR
            return
        part = request.key_part
        if part is None:
            part = window.last_part + 1 & 0xFF
        posted.key = window.key(part)
        wr = self._wr
        wr.opcode = WrOpcode.BIND_MW
        bind = wr.bind_mw
        bind.mw, bind.rkey = window.handle, posted.key
        info = bind.bind_info
        info.mr, info.addr, info.length = region.handle, region.va + request.offset, request.length
        info.mw_access_flags = rights
        window.last_part = part

    def _refused(self, request: SendRequest, number: int) -> None:
        if number == errno.ENOMEM:
            raise LimitReached("the device has no room for a request")
        if isinstance(request, _OPTIONAL) or (isinstance(request, Send) and request.invalidate is not None):
            raise Misuse(
                f"the device does not offer a {type(request).__name__} of this kind"
            )  # whatever number it gives
        raise Unavailable(f"the device took no {type(request).__name__}: error {number}")


def _copy(entry: bytes, posted: Posted, offset: int) -> tuple[int, int]:
    """Puts it into the slot of the request, behind so many bytes; address and key."""
    assert posted.slot is not None
    pool, element = posted.slot
    element.view[offset : offset + len(entry)] = entry
    return buffer_address(element.view) + offset, pool.region.lkey
