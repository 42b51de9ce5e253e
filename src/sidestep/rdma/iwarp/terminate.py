"""Terminate: the last message of a stream, which tells the other end what was wrong (RFC 5040 4.8 and 7).

An end sends one at most, behind its last whole segment, and never in answer to one. Layer, type and code say what
happened; where a segment of the other end was at fault its header comes along, and of a Read Request what it asked for.
Nothing of it is needed to end a connection properly: what is read here is for people, so what is not there, or does
not fit, is left out and not complained of. Linux siw sets R for every error of RDMAP's protection and then sends no
read header; RNICs after the verbs draft fill what they leave out with zeros.

`Condition` is the one place that says which code is sent for what. The RFCs have none for missing rights to a tagged
buffer, for instance, so a part of it is a choice (docs/wire/iwarp.md tells which).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from struct import Struct
from typing import ClassVar, Final, Self

from sidestep.errors import Misuse, PeerViolation, Rules
from sidestep.rdma.iwarp.ddp import QUEUE_TERMINATE, RdmapOp, ReadRequest, Segment

RULES: Final = Rules(terminate_short="a Terminate says in four bytes what is wrong")


class Layer(IntEnum):
    """Who complains."""

    RDMAP = 0
    DDP = 1
    MPA = 2  # whatever is beneath DDP


class Code(IntEnum):
    """Layer, type and code as the first two bytes of the message have them (RFC 5040 4.8, 5041 7.2, 5044 8, 6581 8)."""

    RDMAP_CATASTROPHIC = 0x0000, "no more is told"
    RDMAP_INVALID_STAG = 0x0100, "invalid STag"
    RDMAP_BOUNDS = 0x0101, "base or bounds violation"
    RDMAP_RIGHTS = 0x0102, "access rights violation"
    RDMAP_OTHER_STREAM = 0x0103, "STag not associated with this stream"
    RDMAP_WRAP = 0x0104, "TO wraps around"
    RDMAP_PROTECTION_INVALIDATE = 0x0109, "STag cannot be invalidated"
    RDMAP_PROTECTION_UNSPECIFIED = 0x01FF, "unspecified"
    RDMAP_VERSION = 0x0205, "invalid RDMAP version"
    RDMAP_OPCODE = 0x0206, "unexpected opcode"
    RDMAP_STREAM_CATASTROPHIC = 0x0207, "catastrophic for this stream"
    RDMAP_GLOBAL_CATASTROPHIC = 0x0208, "catastrophic for all streams"
    RDMAP_OPERATION_INVALIDATE = 0x0209, "STag cannot be invalidated"
    RDMAP_OPERATION_UNSPECIFIED = 0x02FF, "unspecified"
    DDP_CATASTROPHIC = 0x1000, "no more is told"
    DDP_INVALID_STAG = 0x1100, "invalid STag"
    DDP_BOUNDS = 0x1101, "base or bounds violation"
    DDP_OTHER_STREAM = 0x1102, "STag not associated with this stream"
    DDP_WRAP = 0x1103, "TO wraps around"
    DDP_TAGGED_VERSION = 0x1104, "invalid DDP version"
    DDP_QUEUE = 0x1201, "invalid queue number"
    DDP_NO_BUFFER = 0x1202, "no buffer for this MSN"
    DDP_MSN_RANGE = 0x1203, "MSN out of range"
    DDP_MESSAGE_OFFSET = 0x1204, "invalid MO"
    DDP_TOO_LONG = 0x1205, "message too long for the buffer"
    DDP_UNTAGGED_VERSION = 0x1206, "invalid DDP version"
    MPA_TCP_LOST = 0x2001, "TCP closed or lost"  # for the report at this end: where TCP is gone nothing can be sent
    MPA_CRC = 0x2002, "CRC error"
    MPA_MARKER = 0x2003, "marker and length of an FPDU disagree"
    MPA_START_FRAME = 0x2004, "invalid Request or Reply"  # likewise: TCP is closed at once
    MPA_START_CATASTROPHIC = 0x2005, "local error"
    MPA_START_IRD = 0x2006, "insufficient IRD"
    MPA_START_RTR = 0x2007, "no matching RTR"

    text: str

    def __new__(cls, value: int, text: str) -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member


_LAYERS: Final = {layer.value: layer.name for layer in Layer}
_TYPES: Final = {
    0x00: "local catastrophic error", 0x01: "remote protection error", 0x02: "remote operation error",
    0x10: "local catastrophic error", 0x11: "tagged buffer error", 0x12: "untagged buffer error",
    0x20: "error of the start-up or the stream",
}  # fmt: skip
CODE_TEXT: Final[Mapping[int, str]] = {code.value: code.text for code in Code}


def code_text(code: int) -> str:
    layer = _LAYERS.get(code >> 12, f"layer {code >> 12}")
    kind = _TYPES.get(code >> 8, f"error type {code >> 8 & 0xF}")
    return f"{layer}, {kind}: {CODE_TEXT.get(code, 'unknown code')} ({code >> 12}/{code >> 8 & 0xF}/{code & 0xFF:02X})"


class Includes(Enum):
    """Which headers of the segment at fault go into the message."""

    NOTHING = "nothing"
    DDP = "DDP header"
    READ = "DDP and read header"


class Condition(Enum):
    """What this end may find wrong, the code that is sent for it, and what goes with that."""

    DDP_VERSION_TAGGED = "tagged segment of another DDP version", Code.DDP_TAGGED_VERSION
    DDP_VERSION_UNTAGGED = "untagged segment of another DDP version", Code.DDP_UNTAGGED_VERSION
    RDMAP_VERSION = "segment of another RDMAP version", Code.RDMAP_VERSION
    OPCODE_UNKNOWN = "opcode that is not supported", Code.RDMAP_OPCODE
    OPCODE_TAGGED = "tagged segment of an untagged operation, or the other way round", Code.RDMAP_OPCODE
    SEGMENT_SIZE = "segment shorter than its header, or longer than is taken", Code.DDP_CATASTROPHIC
    NOT_LAST = "Read Request or Terminate that is not a last segment", Code.RDMAP_STREAM_CATASTROPHIC
    READ_REQUEST_MALFORMED = (
        "Read Request of another size, or not at offset 0 of its message",
        Code.RDMAP_STREAM_CATASTROPHIC,
    )
    QUEUE_NUMBER = "queue number that is not the operation's", Code.DDP_QUEUE
    READS_DISABLED = "Read Request where reads are not allowed", Code.DDP_QUEUE
    NO_RECEIVE = "Send for which no receive is posted", Code.DDP_NO_BUFFER
    MSN_UNEXPECTED = "message sequence number other than the next", Code.DDP_MSN_RANGE
    READS_TOO_MANY = "more Read Requests at a time than agreed (IRD)", Code.DDP_MSN_RANGE
    MESSAGE_OFFSET = "message offset with a gap or an overlap", Code.DDP_MESSAGE_OFFSET
    MESSAGE_TOO_LONG = "Send longer than the receive", Code.DDP_TOO_LONG
    RECEIVE_UNUSABLE = "memory of the receive is not usable", Code.RDMAP_CATASTROPHIC, Includes.NOTHING
    TAGGED_STAG = "Write or Read Response with an STag that is unknown, invalid or 0", Code.DDP_INVALID_STAG
    TAGGED_BOUNDS = "Write or Read Response out of bounds", Code.DDP_BOUNDS
    TAGGED_OTHER_STREAM = "Write or Read Response to memory of another domain or stream", Code.DDP_OTHER_STREAM
    TAGGED_RIGHTS = "Write without the right to", Code.DDP_OTHER_STREAM
    TAGGED_WRAP = "Write or Read Response that wraps around", Code.DDP_WRAP
    TAGGED_STAG_CHANGED = "STag that changes within a message", Code.DDP_INVALID_STAG
    TAGGED_GAP = "tagged offset with a gap or an overlap", Code.DDP_BOUNDS
    RESPONSE_UNASKED = "Read Response without a read outstanding", Code.RDMAP_OPCODE
    RESPONSE_STAG = "Read Response with another STag than asked for", Code.DDP_INVALID_STAG
    RESPONSE_OFFSET = "Read Response at another place than asked for", Code.DDP_BOUNDS
    RESPONSE_LENGTH = "Read Response of another length than asked for", Code.DDP_BOUNDS
    READ_STAG = "Read Request with an STag that is unknown, invalid or 0", Code.RDMAP_INVALID_STAG, Includes.READ
    READ_BOUNDS = "Read Request out of bounds", Code.RDMAP_BOUNDS, Includes.READ
    READ_RIGHTS = "Read Request without the right to", Code.RDMAP_RIGHTS, Includes.READ
    READ_OTHER_STREAM = "Read Request for memory of another domain or stream", Code.RDMAP_OTHER_STREAM, Includes.READ
    READ_WRAP = "Read Request that wraps around", Code.RDMAP_WRAP, Includes.READ
    INVALIDATE_UNKNOWN = "STag to invalidate that is not allocated", Code.RDMAP_OPERATION_INVALIDATE
    INVALIDATE_OTHER_STREAM = "STag to invalidate of another domain or stream", Code.RDMAP_PROTECTION_INVALIDATE
    INVALIDATE_RIGHTS = "STag to invalidate that the other end has no right to", Code.RDMAP_PROTECTION_INVALIDATE
    INVALIDATE_FIXED = "STag to invalidate with windows on it, shared, or 0", Code.RDMAP_PROTECTION_INVALIDATE
    CRC = "checksum that does not match", Code.MPA_CRC, Includes.NOTHING
    MARKER = "marker that does not point to the start of its FPDU", Code.MPA_MARKER, Includes.NOTHING
    OUTGOING = "message of this end that could not be made", Code.RDMAP_CATASTROPHIC, Includes.NOTHING
    USER = "user ends the stream", Code.RDMAP_CATASTROPHIC, Includes.NOTHING
    END_TOO_EARLY = (
        "end of the stream while work is outstanding, or within a message",
        Code.RDMAP_STREAM_CATASTROPHIC,
        Includes.NOTHING,
    )
    STREAM_BROKEN = "completion queue or queue pair has failed", Code.RDMAP_STREAM_CATASTROPHIC, Includes.NOTHING
    DEVICE_BROKEN = "device has failed", Code.RDMAP_GLOBAL_CATASTROPHIC, Includes.NOTHING
    ATOMIC_MISALIGNED = "atomic operation on an address not aligned", Code.RDMAP_STREAM_CATASTROPHIC
    TCP_LOST = "TCP connection closed, reset or timed out", Code.MPA_TCP_LOST, Includes.NOTHING
    START_FRAME = "Request or Reply that is none", Code.MPA_START_FRAME, Includes.NOTHING
    START_LOCAL = "local error while the connection is set up", Code.MPA_START_CATASTROPHIC, Includes.NOTHING
    START_IRD = "other end wants to read more at a time than this one can hold", Code.MPA_START_IRD, Includes.NOTHING
    START_RTR = "none of the ready-to-receive messages that both ends can take", Code.MPA_START_RTR, Includes.NOTHING

    code: Code
    includes: Includes

    def __new__(cls, text: str, code: Code, includes: Includes = Includes.DDP) -> Self:
        member = object.__new__(cls)
        member._value_ = text
        member.code, member.includes = code, includes
        return member


_TAGGED_HEADER_LEN: Final = 14
_UNTAGGED_HEADER_LEN: Final = 18
_READ_HEADER_LEN: Final = 28
_OFFSET_MASK: Final = (1 << 64) - 1


def _header_len(segment: bytes | memoryview) -> int:
    """Of the DDP header at the front of a segment that is not empty (RFC 5041 4.1)."""
    return _TAGGED_HEADER_LEN if segment[0] & 0x80 else _UNTAGGED_HEADER_LEN


def _rest(asked: ReadRequest, answered: int) -> ReadRequest:
    """What is still to be sent. Where the reader wants it is nobody's check before, and may wrap around."""
    return replace(
        asked,
        sink_offset=asked.sink_offset + answered & _OFFSET_MASK,
        length=asked.length - answered,
        source_offset=asked.source_offset + answered & _OFFSET_MASK,
    )


@dataclass(frozen=True, slots=True)
class Terminate:
    """The payload of the message; what is None or empty is not in it."""

    code: int  # a `Code`, unless the other end knows others
    segment_len: int | None = None  # bytes of the segment at fault, from its DDP header on; siw: of its payload
    ddp_header: bytes = b""  # its header, 14 or 18 bytes
    read: ReadRequest | None = None  # what the Read Request at fault asked for

    _CONTROL: ClassVar[Struct] = Struct(">HH")
    _M: ClassVar[int] = 0x8000
    _D: ClassVar[int] = 0x4000
    _R: ClassVar[int] = 0x2000
    _RIGHT: ClassVar[int] = 0xE000  # where they are
    _MIRRORED: ClassVar[int] = 0x0700  # where they are in siw's
    _HEADER_AT: ClassVar[int] = 6

    @classmethod
    def about(cls, condition: Condition, segment: bytes | memoryview = b"", *, answered: int = 0) -> Self:
        """The message for a condition.

        `segment` is the one at fault, whole; if there was none, or it is shorter than the header that it should have,
        no header is included. `answered` is how many bytes of a Read Request were sent before it failed: then what is
        told is the rest (RFC 5040 4.8).
        """
        code, includes = condition.code, condition.includes
        if includes is Includes.NOTHING or not segment or len(segment) < (size := _header_len(segment)):
            return cls(code)
        read = None
        if includes is Includes.READ and len(segment) == _UNTAGGED_HEADER_LEN + _READ_HEADER_LEN:
            read = _rest(ReadRequest.decode(bytes(segment[size:])), answered)
        return cls(code, len(segment), bytes(segment[:size]), read)

    def encode(self) -> bytes:
        """Its bytes; `Misuse` if it does not hold together."""
        header = self.ddp_header
        if header and len(header) != _header_len(header):
            raise Misuse(f"a DDP header of {len(header)} bytes")
        if self.segment_len is not None and not header:
            raise Misuse("the length of a segment without its header")
        if self.read is not None and len(header) != _UNTAGGED_HEADER_LEN:
            raise Misuse("what was to be read without the header of a Read Request")
        if not 0 <= self.code <= 0xFFFF or not 0 <= (self.segment_len or 0) <= 0xFFFF:
            raise Misuse(f"{self} does not fit its fields")
        flags = (
            (self._M if self.segment_len is not None else 0)
            | (self._D if header else 0)
            | (self._R if self.read is not None else 0)
        )
        control = self._CONTROL.pack(self.code, flags)
        if not header:
            return control
        read = self.read.encode() if self.read is not None else b""
        return control + (self.segment_len or 0).to_bytes(2) + header + read

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> Self:
        """Read what is there; `PeerViolation` only if not even the code is. Flags are believed as far as bytes go.

        Linux siw on a little-endian machine has the bit fields of a byte in the opposite order. What makes sense in
        that order only is read so; of siw, 0/2/05 to 07 without a header may mean 2/0/05 to 07.
        """
        if len(payload) < cls._CONTROL.size:
            raise RULES.broken("terminate_short", f"{len(payload)} bytes")
        code, flags = cls._CONTROL.unpack_from(payload)
        if not flags & cls._RIGHT:
            mirrored = code & 0xFF | code << 4 & 0xF000 | code >> 4 & 0x0F00
            if flags & cls._MIRRORED or (code not in CODE_TEXT and mirrored in CODE_TEXT):
                code = mirrored
                flags = flags << 7 & cls._M | flags << 5 & cls._D | flags << 3 & cls._R
        behind = bytes(payload[cls._HEADER_AT :])
        if not flags & cls._D or not behind or len(behind) < (size := _header_len(behind)):
            return cls(code)
        segment_len = int.from_bytes(payload[cls._CONTROL.size : cls._HEADER_AT]) if flags & cls._M else None
        rest = behind[size : size + _READ_HEADER_LEN]
        wanted = flags & cls._R and size == _UNTAGGED_HEADER_LEN and len(rest) == _READ_HEADER_LEN
        return cls(code, segment_len, behind[:size], ReadRequest.decode(rest) if wanted else None)

    @property
    def segment(self) -> Segment:
        """The one segment that the message is: the first of its queue, and the only one (RFC 5040 5.4)."""
        return Segment(RdmapOp.TERMINATE, True, self.encode(), queue=QUEUE_TERMINATE, msn=1)

    @property
    def text(self) -> str:
        about = ""
        if self.ddp_header:
            try:
                about = f", about a {Segment.decode(self.ddp_header).op.name}"
            except PeerViolation:
                about = ", about a segment that is none"
        return f"Terminate: {code_text(self.code)}{about}"


def told_by(payload: bytes | memoryview) -> tuple[int, str]:
    """The code in the payload of a Terminate, and its words; -1 if it is too short for one."""
    try:
        told = Terminate.decode(payload)
    except PeerViolation:
        return -1, "Terminate without a reason"
    return told.code, told.text


def terminate_text(payload: bytes | memoryview) -> str:
    return told_by(payload)[1]
