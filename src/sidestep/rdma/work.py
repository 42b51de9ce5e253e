"""Work requests and completions: what is posted to a queue pair, and what comes of it.

The names are those of the verbs (IBTA volume 1, chapter 10; the `ibv_*` calls of rdma-core). Two things differ, on
purpose:

- A scatter or gather entry is a `memoryview`, not address, length and local key: it names memory, keeps it alive and
  cannot leave its bounds. A device that needs a local key finds it through the protection domain's regions.
- The flags of a request are fields of their own: in Python a test of an attribute is much cheaper than one of a flag.

Memory in a request belongs to the device from posting to completion. Work requests are records of the data path and
therefore mutable: freezing them would double what they cost. Nobody changes one after it was posted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, ClassVar, Final, NewType, TypeAlias

if TYPE_CHECKING:
    from sidestep.rdma.verbs import AddressHandle, MemoryRegion, MemoryWindow

RKey = NewType("RKey", int)  # 32 bits: what the other end shows to read or write a region (iWARP: STag)
LKey = NewType("LKey", int)  # 32 bits: what this end shows
Gather: TypeAlias = tuple[memoryview | bytes, ...]  # sent in this order; no payload is copied in Python
Scatter: TypeAlias = tuple[memoryview, ...]  # filled in this order; writable, contiguous bytes


class Access(IntFlag):
    """What may be done with a region; the values of `ibv_access_flags`."""

    LOCAL_READ = 0  # always allowed
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2  # asks for LOCAL_WRITE as well (IBTA 10.6.3.1)
    REMOTE_READ = 4
    REMOTE_ATOMIC = 8  # asks for LOCAL_WRITE as well (IBTA 10.6.3.1)
    WINDOW_BIND = 16  # of a region: parts of it may be opened by windows, whatever its own remote rights are


class Opcode(IntEnum):
    """What a completion is of; the values of `ibv_wc_opcode`."""

    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMPARE_SWAP = 3
    FETCH_ADD = 4
    BIND_WINDOW = 5
    LOCAL_INVALIDATE = 6
    RECEIVE = 128


class Status(IntEnum):
    """How a work request ended; the values of `ibv_wc_status`. After any but SUCCESS the queue pair is in error."""

    SUCCESS = 0
    LOCAL_LENGTH_ERROR = 1  # a message longer than the receive posted for it
    LOCAL_QP_OPERATION_ERROR = 2
    LOCAL_PROTECTION_ERROR = 4  # the entries do not name memory that the request may use
    FLUSHED = 5  # the queue pair was in error before this request was begun
    WINDOW_BIND_ERROR = 6  # window, region, range and rights do not go together
    BAD_RESPONSE = 7  # the other end answered something else than what it was asked for
    REMOTE_INVALID_REQUEST = 9  # the other end could not take the message: too long, or not allowed on this queue pair
    REMOTE_ACCESS_ERROR = 10  # key, bounds or rights of an RDMA Read or Write
    REMOTE_OPERATION_ERROR = 11
    RETRY_EXCEEDED = 12  # the other end does not answer
    RNR_RETRY_EXCEEDED = 13  # the other end had no receive posted
    FATAL = 19


@dataclass(slots=True)
class Send:
    """One message: consumes one receive of the other end."""

    wr_id: int
    gather: Gather
    signaled: bool = True  # whether success makes a completion; failure always does
    solicited: bool = False  # wakes a completion queue armed for solicited events only
    fence: bool = False  # waits for RDMA Reads posted before
    invalidate: RKey | None = None  # Send with Invalidate: the other end's key of this number is void
    immediate: bytes | None = None  # four bytes beside the message; not together with `invalidate`


@dataclass(slots=True, kw_only=True)
class UdSend:
    """One datagram, on a UD queue pair. It succeeds once it has left: nobody tells whether it has arrived.

    It arrives at a queue pair with this Q_Key that has a receive posted with room for `GRH_LEN` bytes and it; else it
    is dropped there. Where the highest bit of `remote_qkey` is set, the Q_Key of this end's queue pair goes out in its
    place (IBTA 10.2.5).
    """

    wr_id: int
    gather: Gather
    ah: AddressHandle
    remote_qpn: int
    remote_qkey: int
    signaled: bool = True
    solicited: bool = False
    immediate: bytes | None = None

    fence: ClassVar[bool] = False  # there are no RDMA Reads to wait for


@dataclass(slots=True)
class RdmaWrite:
    """Bytes into the other end's region; placed before a Send posted behind it is delivered."""

    wr_id: int
    gather: Gather
    remote_va: int  # address in the other end's region
    rkey: RKey
    signaled: bool = True
    fence: bool = False
    immediate: bytes | None = None  # four bytes, which take a receive of the other end and complete it
    solicited: bool = False  # of that completion; without immediate data it means nothing


@dataclass(slots=True)
class RdmaRead:
    """Bytes out of the other end's region; may complete after a Send posted behind it was delivered."""

    wr_id: int
    scatter: Scatter
    remote_va: int
    rkey: RKey
    signaled: bool = True
    fence: bool = False


@dataclass(slots=True)
class CompareSwap:
    """Puts a number of 64 bits in the other end's region if the one there equals another; brings the one before.

    Numbers in memory are in the byte order of their host. The address is a multiple of 8. Nothing comes between the
    look and the change that another queue pair of that device does; what its host does may (IBTA 9.4.5).
    """

    wr_id: int
    scatter: Scatter  # 8 bytes for the number before
    remote_va: int
    rkey: RKey
    compare: int
    swap: int
    signaled: bool = True
    fence: bool = False


@dataclass(slots=True)
class FetchAdd:
    """Adds to a number of 64 bits in the other end's region, modulo 2^64; else as `CompareSwap`."""

    wr_id: int
    scatter: Scatter
    remote_va: int
    rkey: RKey
    add: int
    signaled: bool = True
    fence: bool = False


@dataclass(slots=True)
class LocalInvalidate:
    """Voids a key of this end, of a region or a window, in the order of the send queue, behind all before it.

    It fails for a key that is none, of another domain, of a window bound to another queue pair, and of a region with
    windows. One that is void already stays so.
    """

    wr_id: int
    rkey: RKey
    signaled: bool = True
    fence: bool = False


@dataclass(slots=True, kw_only=True)
class BindWindow:
    """Opens a part of a region to the other end of this queue pair, before any request posted behind it begins.

    The window must be void, the region valid, not zero-based and open to windows, both of the queue pair's domain, and
    the range must lie in the region; else WINDOW_BIND_ERROR (verbs draft for iWARP 7.10.2, 7.10.6).
    """

    wr_id: int
    window: MemoryWindow
    region: MemoryRegion
    access: Access  # REMOTE_READ, or REMOTE_WRITE where the region has LOCAL_WRITE, or both
    offset: int = 0  # bytes from the begin of the region
    length: int  # bytes, one at least
    zero_based: bool = False  # the address of the first byte is 0
    key_part: int | None = None  # the low 8 bits of the key; None: not those before; the window tells once it is bound
    signaled: bool = True
    fence: bool = False


@dataclass(slots=True)
class Receive:
    """Room for one message; for a datagram with `GRH_LEN` bytes in front, from where it comes (`rdma.grh`)."""

    wr_id: int
    scatter: Scatter


SendRequest: TypeAlias = Send | UdSend | RdmaWrite | RdmaRead | CompareSwap | FetchAdd | LocalInvalidate | BindWindow
IMMEDIATE_LEN: Final = 4  # bytes
ATOMIC_LEN: Final = 8  # bytes of the number that an atomic operation is about
GRH_LEN: Final = 40  # bytes that a device writes in front of a received datagram (IBTA 11.4.1.2)
QKEY_CONTROLLED: Final = 1 << 31  # the bit of those that only the system's own queue pairs have (IBTA 10.2.5)


@dataclass(slots=True)
class Completion:
    """What came of one work request."""

    wr_id: int
    status: Status
    opcode: Opcode
    byte_len: int = 0  # bytes received, or read; of a datagram `GRH_LEN` of them are not its own
    qp_number: int = 0
    solicited: bool = False  # of a receive: the sender asked for an event
    invalidated: RKey | None = None  # of a receive: the key that the message voided
    immediate: bytes | None = None  # of a receive: four bytes beside the message
    source_qpn: int | None = None  # of a datagram received: the queue pair that has sent it

    @property
    def ok(self) -> bool:
        return self.status is Status.SUCCESS
