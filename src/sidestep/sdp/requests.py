"""What the user asks of a connection, what the connection asks of its surroundings, and what it tells.

A `StreamSend` or `StreamReceive` is made by the connection, belongs to the user, and comes back from `poll_event`
once it has ended; until then its memory belongs to the connection. Everything that `poll_work` gives is either a work
request of `rdma.work`, to be posted to the queue pair in this order, or one of the orders below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from sidestep.errors import SidestepError
from sidestep.rdma.work import Access, RdmaRead, RdmaWrite, Receive, RKey, Send


class Region:
    """Memory of the user as the device named it; with `remote`, the other end may read or write it."""

    __slots__ = ("handle", "remote", "rkey", "va")

    def __init__(self, handle: object, rkey: RKey, va: int, *, remote: bool = True) -> None:
        self.handle = handle  # the device's; the connection only hands it back
        self.rkey = rkey
        self.va = va  # address of the first byte
        self.remote = remote  # False: for the device's own use, where it wants all memory registered


class StreamSend:
    """Bytes for the other end, in order with all others of the connection."""

    __slots__ = (
        "bcopy_only", "cancelled", "done", "error", "length", "offset", "passed", "pending", "region", "registering",
        "urgent", "view",
    )  # fmt: skip

    def __init__(self, view: memoryview, *, urgent: bool = False, bcopy_only: bool = False) -> None:
        self.view = view
        self.length = len(view)
        self.urgent = urgent  # the last byte is out of band
        self.bcopy_only = bcopy_only or urgent
        self.offset = 0  # bytes given to a mechanism; goes back when an advertisement is void
        self.passed = 0  # bytes that the other end has, or will have if the connection lives
        self.pending = 0  # pieces whose end is not known yet: the memory is in use
        self.region: Region | None = None
        self.registering = False
        self.cancelled = False
        self.done = False
        self.error: SidestepError | None = None


class StreamReceive:
    """Room for bytes of the other end; `filled` counts them. Ended with none filled and no error: end of stream."""

    __slots__ = (
        "advert", "cancelled", "done", "error", "filled", "length", "planned", "reads", "region", "register_failed",
        "registering", "view", "waitall",
    )  # fmt: skip

    def __init__(self, view: memoryview, *, waitall: bool = False) -> None:
        self.view = view
        self.length = len(view)
        self.waitall = waitall  # ends only when full, at an urgent mark, or at the end of the stream
        self.filled = 0
        self.planned = 0  # bytes filled, or being filled by an RDMA Read
        self.reads = 0  # RDMA Reads under way
        self.advert = False  # the other end has been told where it is, by a SinkAvail
        self.region: Region | None = None
        self.registering = False
        self.register_failed = False
        self.cancelled = False
        self.done = False
        self.error: SidestepError | None = None


@dataclass(slots=True)
class NeedBuffers:
    """Asks for receives, each with room for `size` bytes in one piece; they come by `handle_buffers`."""

    count: int
    size: int


@dataclass(slots=True)
class ReturnBuffer:
    """The connection has no more use for this receive: it is too small, or the connection has ended."""

    receive: Receive


@dataclass(slots=True)
class Register:
    """Asks for a region over the request's memory; answered by `handle_registered` or `handle_registration_failed`."""

    request: StreamSend | StreamReceive
    access: Access


@dataclass(slots=True)
class Release:
    """The region must not be reachable any more: to be done before the next event is told."""

    region: Region


@dataclass(slots=True)
class Connect:
    """Asks the connection manager for a connection to this service, with the Hello."""

    service_id: int
    private_data: bytes


@dataclass(slots=True)
class Accept:
    """Answers a connection request with the HelloAck."""

    private_data: bytes


@dataclass(slots=True)
class Reject:
    """Refuses a connection request."""

    reason: int


@dataclass(slots=True)
class Disconnect:
    """Ends the transport connection; what comes of it is told by `handle_disconnected`."""


Order: TypeAlias = (
    NeedBuffers | ReturnBuffer | Register | Release | Connect | Accept | Reject | Disconnect
)  # fmt: skip
Work: TypeAlias = Send | RdmaWrite | RdmaRead | Receive | Order


class SdpCause(Enum):
    """Why a connection ended before its time; the endpoint has the errno of each."""

    REFUSED = "refused"  # nobody listens, no room, or a Hello that the other end does not take
    VIOLATION = "violation"  # the other end broke a rule
    RESET = "reset"  # the other end gave the connection up
    TRANSPORT = "transport"  # a completion with an error, or an event of the device
    TIMEOUT = "timeout"  # the other end does not answer
    ABORTED = "aborted"  # this end gave it up
    RESOURCES = "resources"  # this end has no memory or queue pair for it


class SdpEventKind(Enum):
    """What a connection tells besides requests that ended."""

    ESTABLISHED = "established"
    READABLE = "readable"  # there are bytes, or the end, and no receive waits
    WRITE_CLOSED = "write closed"  # everything queued has gone, and the other end knows that no more follows
    END_OF_STREAM = "end of stream"  # the other end sends no more; told once, all bytes may not be read yet
    URGENT = "urgent"  # an urgent byte is under way
    MODE_CHANGED = "mode changed"
    RESIZED = "resized"  # the other end's private buffers have a new size, or keep the old one
    SUSPENDED = "suspended"  # `SdpConnection.suspended` may go on with another process
    RESUMING = "resuming"  # the other end's socket moves; a new queue pair is needed
    BROKEN = "broken"  # the connection ended by an error
    CLOSED = "closed"  # nothing more will come


@dataclass(slots=True)
class SdpEvent:
    """One thing told; `error` for BROKEN only."""

    kind: SdpEventKind
    error: SidestepError | None = None


StreamEvent: TypeAlias = StreamSend | StreamReceive | SdpEvent


@dataclass(slots=True)
class Suspended:
    """What the process that takes over a suspended connection needs (draft-pinkerton-iwarp-sdp, socket duplication)."""

    remote_port: int
    receive_size: int  # bytes of a private buffer: its HelloAck must say the same
    unread: Sequence[tuple[bytes, int | None]]  # received and not read yet: bytes, or an urgent mark and its byte
    urgent_byte: int | None  # can still be had by `take_urgent`
    unsent: Sequence[StreamSend] = field(default_factory=tuple)
