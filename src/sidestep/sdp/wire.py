"""SDP messages: one record each, how they are read from bytes and made into bytes.

A message is the base header (BSDH), an extended header whose layout the message identifier tells, and, for three of
them, payload: bytes of the stream. The records hold the extended header; payload is a view of the message on the way
in and is gathered behind the headers on the way out, so it is never copied.

What is read is judged as far as a message alone can be: its lengths, and values that no state of a connection makes
legal. Reserved bits are sent as 0 and not looked at (docs/wire/sdp.md §3, §6, §19). What the state of the connection
forbids is decided elsewhere.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from sidestep.errors import Misuse
from sidestep.sdp.header import (
    BSDH,
    BSDH_LEN,
    BUFFER_SIZE_MIN,
    LENGTH_MAX,
    OOB_PEND,
    OOB_PRES,
    REQ_PIPE,
    RULES,
    Bsdh,
    Header,
    Mid,
    Mode,
)
from sidestep.sdp.hello import Hello, HelloAck, IwarpHello, IwarpHelloAck, port_of, service_id

__all__ = [
    "BSDH", "BSDH_LEN", "BUFFER_SIZE_MIN", "LENGTH_MAX", "MESSAGES", "OOB_PEND", "OOB_PRES", "REQ_PIPE", "RULES",
    "AbortConn", "Bsdh", "ChRcvBuf", "ChRcvBufAck", "Data", "Decoded", "DisConn", "Header", "Hello", "HelloAck",
    "IwarpHello", "IwarpHelloAck", "Mid", "Mode", "ModeChange", "RdmaRdCompl", "RdmaWrCompl", "SendSm", "SinkAvail",
    "SinkAvailCancel", "SinkCancelAck", "SrcAvail", "SrcAvailCancel", "SuspComm", "SuspCommAck",
    "decode", "encode", "port_of", "service_id", "solicited",
]  # fmt: skip


_ADDRESS_END: Final = 1 << 64


class DisConn(Header, mid=Mid.DIS_CONN):
    """No more bytes of the stream from this end."""


class AbortConn(Header, mid=Mid.ABORT_CONN, solicited=True):
    """The connection is reset although DisConn was sent."""


class SendSm(Header, mid=Mid.SEND_SM, solicited=True):
    """The rest of the oldest SrcAvail is to be sent by Data; or a SrcAvailCancel is done."""


@dataclass(frozen=True, slots=True)
class _Completed(Header):
    """RDMA of so many bytes is done."""

    length: int  # bytes

    def fault(self, payload_len: int) -> str | None:
        """It cannot report more than can be advertised."""
        return "rdma_length" if self.length > LENGTH_MAX else None


class RdmaWrCompl(_Completed, mid=Mid.RDMA_WR_COMPL, layout="I", solicited=True):
    """So many bytes were written into the oldest SinkAvail, which is thereby used up."""


class RdmaRdCompl(_Completed, mid=Mid.RDMA_RD_COMPL, layout="I", solicited=True):
    """So many more bytes of the oldest SrcAvail were read; those that came as its payload never count."""


@dataclass(frozen=True, slots=True)
class ModeChange(Header, mid=Mid.MODE_CHANGE, layout="B3x"):
    """The sender is the master of a half-connection and has put it into this mode."""

    to_send_half: bool  # bit S: the half-connection in which the receiver of this message is the Data Source
    mode: Mode

    def encode(self) -> bytes:
        return self._LAYOUT.pack(self.to_send_half << 7 | self.mode << 4)

    @classmethod
    def decode(cls, message: memoryview) -> Self:
        (value,) = cls._unpack(message)
        code = value >> 4 & 7
        if code > Mode.PIPELINED:
            raise RULES.broken("mode_change_code", f"ModeChange byte {value:#04x}, mode {code}")
        return cls(value >> 7 == 1, Mode(code))

    def fault(self, payload_len: int) -> str | None:
        """A sink is the master of one transition only: Buffered to Combined."""
        return "mode_change_code" if self.to_send_half and self.mode is not Mode.COMBINED else None


class SrcAvailCancel(Header, mid=Mid.SRC_AVAIL_CANCEL, solicited=True):
    """All SrcAvails of the sender that are not processed are withdrawn."""


class SinkAvailCancel(Header, mid=Mid.SINK_AVAIL_CANCEL, solicited=True):
    """All SinkAvails of the sender that are not complete are withdrawn."""


class SinkCancelAck(Header, mid=Mid.SINK_CANCEL_ACK, solicited=True):
    """A SinkAvailCancel is done, and at least one advert was dropped by it."""


@dataclass(frozen=True, slots=True)
class ChRcvBuf(Header, mid=Mid.CH_RCV_BUF, layout="I"):
    """The receiver's Private Buffers had better have this size.

    Any size can be asked for: the answer may be that nothing changes.
    """

    size: int  # bytes, headers included


@dataclass(frozen=True, slots=True)
class ChRcvBufAck(Header, mid=Mid.CH_RCV_BUF_ACK, layout="I"):
    """The sender's Private Buffers have this size now."""

    size: int  # bytes, headers included

    def fault(self, payload_len: int) -> str | None:
        """Into smaller buffers no message would fit."""
        return None if BUFFER_SIZE_MIN <= self.size <= LENGTH_MAX else "buffer_size"


@dataclass(frozen=True, slots=True)
class SuspComm(Header, mid=Mid.SUSP_COMM, layout="Q", solicited=True):
    """The receiver shall connect anew to this service: the socket moves to another process."""

    service_id: int

    def fault(self, payload_len: int) -> str | None:
        """There must be a port to connect to."""
        return None if port_of(self.service_id) else "suspend_service_id"


class SuspCommAck(Header, mid=Mid.SUSP_COMM_ACK, solicited=True):
    """The sender is quiet now and will connect anew."""


@dataclass(frozen=True, slots=True)
class SinkAvail(Header, mid=Mid.SINK_AVAIL, layout="IIQI", payload=True):
    """A buffer that the other end may fill by RDMA Write; with payload it is a Transaction."""

    length: int  # bytes of the buffer
    rkey: int
    va: int  # of its first byte
    non_discards: int  # the sink's count; with another count at the source the advert is stale

    def fault(self, payload_len: int) -> str | None:
        """That it exceeds the Private Buffer size cannot be told from the message."""
        if not 0 < self.length <= LENGTH_MAX:
            return "sink_avail_length"
        return "address" if self.va + self.length > _ADDRESS_END else None


@dataclass(frozen=True, slots=True)
class SrcAvail(Header, mid=Mid.SRC_AVAIL, layout="IIQ", payload=True):
    """A buffer that the other end may read; payload is a copy of its first bytes."""

    length: int  # bytes of the whole buffer, those that are also payload included
    rkey: int
    va: int  # of its first byte

    def fault(self, payload_len: int) -> str | None:
        """If all of it came as payload there would be nothing to read."""
        if not payload_len < self.length <= LENGTH_MAX:
            return "src_avail_length"
        return "address" if self.va + self.length > _ADDRESS_END else None


class Data(Header, mid=Mid.DATA, payload=True):
    """Bytes of the stream; without any it only tells of receive buffers."""


# By message identifier. Hello and HelloAck are those of InfiniBand; iWARP's are told by their length.
MESSAGES: Final[dict[int, type[Header]]] = {
    int(record.MID): record
    for record in (
        Hello, HelloAck, DisConn, AbortConn, SendSm, RdmaWrCompl, RdmaRdCompl, ModeChange, SrcAvailCancel,
        SinkAvailCancel, SinkCancelAck, ChRcvBuf, ChRcvBufAck, SuspComm, SuspCommAck, SinkAvail, SrcAvail, Data,
    )
}  # fmt: skip
_HELLOS: Final[dict[tuple[int, int], type[Header]]] = {
    (int(record.MID), BSDH_LEN + record.LENGTH): record for record in (Hello, HelloAck, IwarpHello, IwarpHelloAck)
}
_DATA: Final = Data()  # it has no fields, and is by far the most frequent
_unpack: Final = BSDH.unpack_from
_new: Final = tuple.__new__


class Decoded(NamedTuple):
    """A message in parts; the payload is a view of what was received."""

    bsdh: Bsdh
    header: Header
    payload: memoryview


def decode(message: memoryview) -> Decoded:
    """The parts of a whole message; `PeerViolation` with a rule of `RULES` if it breaks one by itself."""
    size = len(message)
    if size < 16:
        raise RULES.broken("short_message", f"{size} bytes")
    fields = _unpack(message)
    if fields[3] != size:
        raise RULES.broken("length", f"Len {fields[3]} in a message of {size} bytes")
    bsdh = _new(Bsdh, fields)  # half the time of Bsdh(*fields)
    if fields[0] == 0xFF:
        return _new(Decoded, (bsdh, _DATA, message[16:]))
    record = record_of(bsdh.mid, size)
    header_end = BSDH_LEN + record.LENGTH
    header = record.decode(message)
    if size > header_end and not record.PAYLOAD:
        raise RULES.broken("stray_payload", f"{record.__name__} with {size - header_end} bytes behind its header")
    if (rule := header.fault(size - header_end)) is not None:
        raise RULES.broken(rule, f"{header} with {size - header_end} bytes of payload")
    return Decoded(bsdh, header, message[header_end:])


def record_of(mid: int, size: int) -> type[Header]:
    """The record of a message with this identifier and so many bytes; `PeerViolation` if there is none."""
    if mid <= Mid.HELLO_ACK:
        if (mid, size) not in _HELLOS:
            raise RULES.broken("hello_length", f"{MESSAGES[mid].__name__} of {size} bytes")
        return _HELLOS[mid, size]
    if mid not in MESSAGES:
        kind = "experimental" if 0x40 <= mid <= 0x7F else "reserved"
        raise RULES.broken("unknown_mid", f"MID {mid:#04x}, {kind}")
    return MESSAGES[mid]


def encode(header: Header, *, flags: int = 0, bufs: int, mseq: int, mseq_ack: int, payload_len: int = 0) -> bytes:
    """Base and extended header of a message whose payload of so many bytes is gathered behind it.

    `Misuse` if what it would say can never be said.
    """
    if payload_len and not header.PAYLOAD:
        raise Misuse(f"{type(header).__name__} carries no payload")
    if (rule := header.fault(payload_len)) is not None:
        raise Misuse(f"{header} with {payload_len} bytes of payload: {RULES[rule]}")
    try:
        length = BSDH_LEN + header.LENGTH + payload_len
        return BSDH.pack(header.MID, flags, bufs, length, mseq, mseq_ack) + header.encode()
    except struct.error as error:
        raise Misuse(f"{header} does not fit its fields: {error}") from error


def solicited(header: Header, flags: int) -> bool:
    """Whether a message is sent with a solicited event: it may have to wake the other end up."""
    return header.SOLICITED or flags & (OOB_PRES | OOB_PEND) != 0
