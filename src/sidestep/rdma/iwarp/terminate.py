"""Terminate: the last message of a stream, which tells the other end what was wrong (RFC 5040 4.8 and 7).

An end sends one at most, behind its last whole segment, and never in answer to one. Layer, type and code say what
happened; where a segment of the other end was at fault its header comes along, and of a Read Request what it asked for.
Nothing of it is needed to end a connection properly: what is read here is for people, so what is not there, or does
not fit, is left out and not complained of. Linux siw sets R for every error of RDMAP's protection and then sends no
read header; RNICs after the verbs draft fill what they leave out with zeros.

`CONDITIONS` is the one place that says which code is sent for what. The RFCs have none for missing rights to a tagged
buffer, for instance, so a part of it is a choice (docs/wire/iwarp.md tells which).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from struct import Struct
from typing import ClassVar, Final, NamedTuple, Self

from sidestep.errors import Misuse, PeerViolation
from sidestep.rdma.iwarp.ddp import QUEUE_TERMINATE, RdmapOp, ReadRequest, Segment

RULES: Final = {"terminate_short": "a Terminate says in four bytes what is wrong"}


class Layer(IntEnum):
    """Who complains."""

    RDMAP = 0
    DDP = 1
    MPA = 2  # whatever is beneath DDP


class Code(IntEnum):
    """Layer, type and code as the first two bytes of the message have them (RFC 5040 4.8, 5041 7.2, 5044 8, 6581 8)."""

    RDMAP_CATASTROPHIC = 0x0000
    RDMAP_INVALID_STAG = 0x0100
    RDMAP_BOUNDS = 0x0101
    RDMAP_RIGHTS = 0x0102
    RDMAP_OTHER_STREAM = 0x0103
    RDMAP_WRAP = 0x0104
    RDMAP_PROTECTION_INVALIDATE = 0x0109
    RDMAP_PROTECTION_UNSPECIFIED = 0x01FF
    RDMAP_VERSION = 0x0205
    RDMAP_OPCODE = 0x0206
    RDMAP_STREAM_CATASTROPHIC = 0x0207
    RDMAP_GLOBAL_CATASTROPHIC = 0x0208
    RDMAP_OPERATION_INVALIDATE = 0x0209
    RDMAP_OPERATION_UNSPECIFIED = 0x02FF
    DDP_CATASTROPHIC = 0x1000
    DDP_INVALID_STAG = 0x1100
    DDP_BOUNDS = 0x1101
    DDP_OTHER_STREAM = 0x1102
    DDP_WRAP = 0x1103
    DDP_TAGGED_VERSION = 0x1104
    DDP_QUEUE = 0x1201
    DDP_NO_BUFFER = 0x1202
    DDP_MSN_RANGE = 0x1203
    DDP_MESSAGE_OFFSET = 0x1204
    DDP_TOO_LONG = 0x1205
    DDP_UNTAGGED_VERSION = 0x1206
    MPA_TCP_LOST = 0x2001  # for the report at this end: where TCP is gone nothing can be sent
    MPA_CRC = 0x2002
    MPA_MARKER = 0x2003
    MPA_START_FRAME = 0x2004  # likewise: TCP is closed at once
    MPA_START_CATASTROPHIC = 0x2005
    MPA_START_IRD = 0x2006
    MPA_START_RTR = 0x2007


_LAYERS: Final = {layer.value: layer.name for layer in Layer}
_TYPES: Final = {
    0x00: "local catastrophic error", 0x01: "remote protection error", 0x02: "remote operation error",
    0x10: "local catastrophic error", 0x11: "tagged buffer error", 0x12: "untagged buffer error",
    0x20: "error of the start-up or the stream",
}  # fmt: skip
CODE_TEXT: Final[Mapping[int, str]] = {
    Code.RDMAP_CATASTROPHIC: "no more is told",
    Code.RDMAP_INVALID_STAG: "invalid STag",
    Code.RDMAP_BOUNDS: "base or bounds violation",
    Code.RDMAP_RIGHTS: "access rights violation",
    Code.RDMAP_OTHER_STREAM: "STag not associated with this stream",
    Code.RDMAP_WRAP: "TO wraps around",
    Code.RDMAP_PROTECTION_INVALIDATE: "STag cannot be invalidated",
    Code.RDMAP_PROTECTION_UNSPECIFIED: "unspecified",
    Code.RDMAP_VERSION: "invalid RDMAP version",
    Code.RDMAP_OPCODE: "unexpected opcode",
    Code.RDMAP_STREAM_CATASTROPHIC: "catastrophic for this stream",
    Code.RDMAP_GLOBAL_CATASTROPHIC: "catastrophic for all streams",
    Code.RDMAP_OPERATION_INVALIDATE: "STag cannot be invalidated",
    Code.RDMAP_OPERATION_UNSPECIFIED: "unspecified",
    Code.DDP_CATASTROPHIC: "no more is told",
    Code.DDP_INVALID_STAG: "invalid STag",
    Code.DDP_BOUNDS: "base or bounds violation",
    Code.DDP_OTHER_STREAM: "STag not associated with this stream",
    Code.DDP_WRAP: "TO wraps around",
    Code.DDP_TAGGED_VERSION: "invalid DDP version",
    Code.DDP_QUEUE: "invalid queue number",
    Code.DDP_NO_BUFFER: "no buffer for this MSN",
    Code.DDP_MSN_RANGE: "MSN out of range",
    Code.DDP_MESSAGE_OFFSET: "invalid MO",
    Code.DDP_TOO_LONG: "message too long for the buffer",
    Code.DDP_UNTAGGED_VERSION: "invalid DDP version",
    Code.MPA_TCP_LOST: "TCP closed or lost",
    Code.MPA_CRC: "CRC error",
    Code.MPA_MARKER: "marker and length of an FPDU disagree",
    Code.MPA_START_FRAME: "invalid Request or Reply",
    Code.MPA_START_CATASTROPHIC: "local error",
    Code.MPA_START_IRD: "insufficient IRD",
    Code.MPA_START_RTR: "no matching RTR",
}


def code_text(code: int) -> str:
    """In words, with the three numbers as the standards write them."""
    layer = _LAYERS.get(code >> 12, f"layer {code >> 12}")
    kind = _TYPES.get(code >> 8, f"error type {code >> 8 & 0xF}")
    return f"{layer}, {kind}: {CODE_TEXT.get(code, 'unknown code')} ({code >> 12}/{code >> 8 & 0xF}/{code & 0xFF:02X})"


class Condition(Enum):
    """What this end may find wrong."""

    DDP_VERSION_TAGGED = "tagged segment of another DDP version"
    DDP_VERSION_UNTAGGED = "untagged segment of another DDP version"
    RDMAP_VERSION = "segment of another RDMAP version"
    OPCODE_UNKNOWN = "opcode that is not supported"
    OPCODE_TAGGED = "tagged segment of an untagged operation, or the other way round"
    SEGMENT_SIZE = "segment shorter than its header, or longer than is taken"
    NOT_LAST = "Read Request or Terminate that is not a last segment"
    READ_REQUEST_MALFORMED = "Read Request of another size, or not at offset 0 of its message"
    QUEUE_NUMBER = "queue number that is not the operation's"
    READS_DISABLED = "Read Request where reads are not allowed"
    NO_RECEIVE = "Send for which no receive is posted"
    MSN_UNEXPECTED = "message sequence number other than the next"
    READS_TOO_MANY = "more Read Requests at a time than agreed (IRD)"
    MESSAGE_OFFSET = "message offset with a gap or an overlap"
    MESSAGE_TOO_LONG = "Send longer than the receive"
    RECEIVE_UNUSABLE = "memory of the receive is not usable"
    TAGGED_STAG = "Write or Read Response with an STag that is unknown, invalid or 0"
    TAGGED_BOUNDS = "Write or Read Response out of bounds"
    TAGGED_OTHER_STREAM = "Write or Read Response to memory of another domain or stream"
    TAGGED_RIGHTS = "Write without the right to"
    TAGGED_WRAP = "Write or Read Response that wraps around"
    TAGGED_STAG_CHANGED = "STag that changes within a message"
    TAGGED_GAP = "tagged offset with a gap or an overlap"
    RESPONSE_UNASKED = "Read Response without a read outstanding"
    RESPONSE_STAG = "Read Response with another STag than asked for"
    RESPONSE_OFFSET = "Read Response at another place than asked for"
    RESPONSE_LENGTH = "Read Response of another length than asked for"
    READ_STAG = "Read Request with an STag that is unknown, invalid or 0"
    READ_BOUNDS = "Read Request out of bounds"
    READ_RIGHTS = "Read Request without the right to"
    READ_OTHER_STREAM = "Read Request for memory of another domain or stream"
    READ_WRAP = "Read Request that wraps around"
    INVALIDATE_UNKNOWN = "STag to invalidate that is not allocated"
    INVALIDATE_OTHER_STREAM = "STag to invalidate of another domain or stream"
    INVALIDATE_RIGHTS = "STag to invalidate that the other end has no right to"
    INVALIDATE_FIXED = "STag to invalidate with windows on it, shared, or 0"
    CRC = "checksum that does not match"
    MARKER = "marker that does not point to the start of its FPDU"
    OUTGOING = "message of this end that could not be made"
    USER = "user ends the stream"
    END_TOO_EARLY = "end of the stream while work is outstanding, or within a message"
    STREAM_BROKEN = "completion queue or queue pair has failed"
    DEVICE_BROKEN = "device has failed"
    ATOMIC_MISALIGNED = "atomic operation on an address not aligned"
    TCP_LOST = "TCP connection closed, reset or timed out"
    START_FRAME = "Request or Reply that is none"
    START_LOCAL = "local error while the connection is set up"
    START_IRD = "other end wants to read more at a time than this one can hold"
    START_RTR = "none of the ready-to-receive messages that both ends can take"


class Includes(Enum):
    """Which headers of the segment at fault go into the message."""

    NOTHING = "nothing"
    DDP = "DDP header"
    READ = "DDP and read header"


class Answer(NamedTuple):
    """What is sent for a condition."""

    code: Code
    includes: Includes


CONDITIONS: Final[Mapping[Condition, Answer]] = {
    Condition.DDP_VERSION_TAGGED: Answer(Code.DDP_TAGGED_VERSION, Includes.DDP),
    Condition.DDP_VERSION_UNTAGGED: Answer(Code.DDP_UNTAGGED_VERSION, Includes.DDP),
    Condition.RDMAP_VERSION: Answer(Code.RDMAP_VERSION, Includes.DDP),
    Condition.OPCODE_UNKNOWN: Answer(Code.RDMAP_OPCODE, Includes.DDP),
    Condition.OPCODE_TAGGED: Answer(Code.RDMAP_OPCODE, Includes.DDP),
    Condition.SEGMENT_SIZE: Answer(Code.DDP_CATASTROPHIC, Includes.DDP),
    Condition.NOT_LAST: Answer(Code.RDMAP_STREAM_CATASTROPHIC, Includes.DDP),
    Condition.READ_REQUEST_MALFORMED: Answer(Code.RDMAP_STREAM_CATASTROPHIC, Includes.DDP),
    Condition.QUEUE_NUMBER: Answer(Code.DDP_QUEUE, Includes.DDP),
    Condition.READS_DISABLED: Answer(Code.DDP_QUEUE, Includes.DDP),
    Condition.NO_RECEIVE: Answer(Code.DDP_NO_BUFFER, Includes.DDP),
    Condition.MSN_UNEXPECTED: Answer(Code.DDP_MSN_RANGE, Includes.DDP),
    Condition.READS_TOO_MANY: Answer(Code.DDP_MSN_RANGE, Includes.DDP),
    Condition.MESSAGE_OFFSET: Answer(Code.DDP_MESSAGE_OFFSET, Includes.DDP),
    Condition.MESSAGE_TOO_LONG: Answer(Code.DDP_TOO_LONG, Includes.DDP),
    Condition.RECEIVE_UNUSABLE: Answer(Code.RDMAP_CATASTROPHIC, Includes.NOTHING),
    Condition.TAGGED_STAG: Answer(Code.DDP_INVALID_STAG, Includes.DDP),
    Condition.TAGGED_BOUNDS: Answer(Code.DDP_BOUNDS, Includes.DDP),
    Condition.TAGGED_OTHER_STREAM: Answer(Code.DDP_OTHER_STREAM, Includes.DDP),
    Condition.TAGGED_RIGHTS: Answer(Code.DDP_OTHER_STREAM, Includes.DDP),
    Condition.TAGGED_WRAP: Answer(Code.DDP_WRAP, Includes.DDP),
    Condition.TAGGED_STAG_CHANGED: Answer(Code.DDP_INVALID_STAG, Includes.DDP),
    Condition.TAGGED_GAP: Answer(Code.DDP_BOUNDS, Includes.DDP),
    Condition.RESPONSE_UNASKED: Answer(Code.RDMAP_OPCODE, Includes.DDP),
    Condition.RESPONSE_STAG: Answer(Code.DDP_INVALID_STAG, Includes.DDP),
    Condition.RESPONSE_OFFSET: Answer(Code.DDP_BOUNDS, Includes.DDP),
    Condition.RESPONSE_LENGTH: Answer(Code.DDP_BOUNDS, Includes.DDP),
    Condition.READ_STAG: Answer(Code.RDMAP_INVALID_STAG, Includes.READ),
    Condition.READ_BOUNDS: Answer(Code.RDMAP_BOUNDS, Includes.READ),
    Condition.READ_RIGHTS: Answer(Code.RDMAP_RIGHTS, Includes.READ),
    Condition.READ_OTHER_STREAM: Answer(Code.RDMAP_OTHER_STREAM, Includes.READ),
    Condition.READ_WRAP: Answer(Code.RDMAP_WRAP, Includes.READ),
    Condition.INVALIDATE_UNKNOWN: Answer(Code.RDMAP_OPERATION_INVALIDATE, Includes.DDP),
    Condition.INVALIDATE_OTHER_STREAM: Answer(Code.RDMAP_PROTECTION_INVALIDATE, Includes.DDP),
    Condition.INVALIDATE_RIGHTS: Answer(Code.RDMAP_PROTECTION_INVALIDATE, Includes.DDP),
    Condition.INVALIDATE_FIXED: Answer(Code.RDMAP_PROTECTION_INVALIDATE, Includes.DDP),
    Condition.CRC: Answer(Code.MPA_CRC, Includes.NOTHING),
    Condition.MARKER: Answer(Code.MPA_MARKER, Includes.NOTHING),
    Condition.OUTGOING: Answer(Code.RDMAP_CATASTROPHIC, Includes.NOTHING),
    Condition.USER: Answer(Code.RDMAP_CATASTROPHIC, Includes.NOTHING),
    Condition.END_TOO_EARLY: Answer(Code.RDMAP_STREAM_CATASTROPHIC, Includes.NOTHING),
    Condition.STREAM_BROKEN: Answer(Code.RDMAP_STREAM_CATASTROPHIC, Includes.NOTHING),
    Condition.DEVICE_BROKEN: Answer(Code.RDMAP_GLOBAL_CATASTROPHIC, Includes.NOTHING),
    Condition.ATOMIC_MISALIGNED: Answer(Code.RDMAP_STREAM_CATASTROPHIC, Includes.DDP),
    Condition.TCP_LOST: Answer(Code.MPA_TCP_LOST, Includes.NOTHING),
    Condition.START_FRAME: Answer(Code.MPA_START_FRAME, Includes.NOTHING),
    Condition.START_LOCAL: Answer(Code.MPA_START_CATASTROPHIC, Includes.NOTHING),
    Condition.START_IRD: Answer(Code.MPA_START_IRD, Includes.NOTHING),
    Condition.START_RTR: Answer(Code.MPA_START_RTR, Includes.NOTHING),
}

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
        code, includes = CONDITIONS[condition]
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
            raise _violation("terminate_short", f"{len(payload)} bytes")
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
    """What the payload of a Terminate complains of."""
    return told_by(payload)[1]


def _violation(rule: str, found: str) -> PeerViolation:
    return PeerViolation(f"{found}: {RULES[rule]}", rule=rule)
