"""What all SDP messages share: the 16-byte base header, the identifiers, and the rules a message can break by itself.

All fields are big-endian (docs/wire/sdp.md §0.3). What a message may do in which state is not decided here.

MSeq, MSeqAck, NonDiscards and PotentialNonDiscards wrap from 0xFFFFFFFF to 0 and are compared here only. A number is
"at or after" another if it lies less than half the circle ahead (docs/wire/sdp.md §8); of two numbers exactly half a
circle apart neither is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Any, ClassVar, Final, NamedTuple, Self

from sidestep.errors import Rules

BSDH: Final = Struct(">BBHIII")  # SDP (A4) BSDH: MID, Flags, Bufs, Len, MSeq, MSeqAck
BSDH_LEN: Final = 16

# Flags, plain integers because they are tested for every message. The other five bits are sent as 0 and not looked at.
OOB_PRES: Final = 1  # the last payload byte is the urgent one; in Data only
OOB_PEND: Final = 2  # an urgent byte is on its way; in any message
REQ_PIPE: Final = 4  # the Data Sink would like the mode Pipelined; in RdmaRdCompl, and in RdmaWrCompl as the draft says

MASK: Final = 0xFFFF_FFFF  # of numbers that wrap
LENGTH_MAX: Final = 1 << 31  # bytes: the most that a Len or a size field may name (draft-pinkerton-iwarp-sdp)
BUFFER_SIZE_MIN: Final = 37  # bytes of a Private Buffer: BSDH, SinkAH and one byte


class Mid(IntEnum):
    """Message identifiers. 0x40 to 0x7F are for experiments, all others that are not here are reserved."""

    HELLO = 0x00
    HELLO_ACK = 0x01
    DIS_CONN = 0x02
    ABORT_CONN = 0x03
    SEND_SM = 0x04
    RDMA_WR_COMPL = 0x05
    RDMA_RD_COMPL = 0x06
    MODE_CHANGE = 0x07
    SRC_AVAIL_CANCEL = 0x08
    SINK_AVAIL_CANCEL = 0x09
    SINK_CANCEL_ACK = 0x0A
    CH_RCV_BUF = 0x0B
    CH_RCV_BUF_ACK = 0x0C
    SUSP_COMM = 0x0D
    SUSP_COMM_ACK = 0x0E
    SINK_AVAIL = 0xFD
    SRC_AVAIL = 0xFE
    DATA = 0xFF


class Mode(IntEnum):
    """The flow-control mode of a half-connection; the codes of ModeChange."""

    BUFFERED = 0
    COMBINED = 1
    PIPELINED = 2


# The rules that a message breaks by itself, whatever the state of the connection.
RULES: Final = Rules(
    short_message="a message holds at least the 16 bytes of its base header",
    length="Len is the number of bytes received",
    unknown_mid="reserved and experimental message identifiers are not used",
    short_header="Len covers the extended header of the message",
    stray_payload="only Data, SrcAvail and SinkAvail carry payload",
    hello_length="a Hello is 92 bytes (iWARP: 32), a HelloAck 196 (iWARP: 28)",
    mode_change_code="ModeChange names one of the four transitions there are",
    src_avail_length="SrcAvail offers 1 to 2^31 bytes, and more than it carries as payload",
    sink_avail_length="SinkAvail offers 1 to 2^31 bytes",
    address="memory that is advertised does not wrap around the end of the address space",
    rdma_length="RdmaRdCompl and RdmaWrCompl report at most 2^31 bytes",
    buffer_size="a Private Buffer has 37 to 2^31 bytes",
    suspend_service_id="SuspComm names an SDP service ID with a port",
)


class Bsdh(NamedTuple):
    """The base header of a message."""

    mid: int
    flags: int
    bufs: int  # receive buffers posted, less messages received
    length: int  # bytes of the whole message
    mseq: int
    mseq_ack: int

    def encode(self) -> bytes:
        """Its 16 bytes."""
        return BSDH.pack(*self)

    @classmethod
    def decode(cls, message: memoryview) -> Self:
        """The first 16 bytes, unjudged; `PeerViolation` if they are not all there."""
        if len(message) < BSDH_LEN:
            raise RULES.broken("short_message", f"{len(message)} bytes")
        return cls._make(BSDH.unpack_from(message))


@dataclass(frozen=True, slots=True)
class Header:
    """A message without its base header and its payload: the base of all records of this protocol.

    Args:
        mid: Its identifier.
        layout: Of the extended header: the fields of the record, in their order.
        payload: Whether bytes of the stream may follow.
        solicited: Whether it is sent with a solicited event, when no OOB flag is set.
    """

    MID: ClassVar[Mid]
    LENGTH: ClassVar[int]  # bytes of the extended header
    PAYLOAD: ClassVar[bool] = False
    SOLICITED: ClassVar[bool] = False

    _LAYOUT: ClassVar[Struct] = Struct(">")

    def __init_subclass__(
        cls, *, mid: Mid | None = None, layout: str = "", payload: bool = False, solicited: bool = False
    ) -> None:
        if mid is not None:  # not what is only a base, nor the copy that a dataclass with slots makes of its class
            cls.MID, cls.PAYLOAD, cls.SOLICITED, cls._LAYOUT = mid, payload, solicited, Struct(">" + layout)
            cls.LENGTH = cls._LAYOUT.size

    def encode(self) -> bytes:
        """The extended header, without the base header."""
        names: tuple[str, ...] = self.__slots__
        return self._LAYOUT.pack(*(getattr(self, name) for name in names))

    @classmethod
    def decode(cls, message: memoryview) -> Self:
        """Reads it from the whole message, whose base header has been looked at.

        Raises:
            PeerViolation: The message ends before the extended header does.
        """
        return cls(*cls._unpack(message))

    @classmethod
    def _unpack(cls, message: memoryview) -> tuple[Any, ...]:
        if len(message) < BSDH_LEN + cls.LENGTH:
            raise RULES.broken("short_header", f"{cls.__name__} of {len(message)} bytes")
        return cls._LAYOUT.unpack_from(message, BSDH_LEN)

    def fault(self, payload_len: int) -> str | None:
        """The rule of `RULES` that it breaks with so many bytes of payload, if any."""
        return None


def add(a: int, count: int) -> int:
    """The number `count` steps after `a`; before it if `count` is negative."""
    return (a + count) & 0xFFFF_FFFF


def diff(a: int, b: int) -> int:
    """How many steps lead from `b` forward to `a`: 0 to 2^32 - 1."""
    return (a - b) & 0xFFFF_FFFF


def ge(a: int, b: int) -> bool:
    """Whether `a` is `b` or comes after it."""
    return (a - b) & 0xFFFF_FFFF < 0x8000_0000
