"""MPA: how frames lie in a TCP stream (RFC 5044, RFC 6581).

A connection begins with a Request frame from the initiator and a Reply; then each direction is a row of FPDUs: length,
payload, padding, checksum. If the receiver of a direction has asked for them, a 4-byte marker stands at every 512th
byte of it, wherever that is. `Deframer` takes a direction in any pieces and gives the payloads. It looks neither at the
contents of markers, which an ordered stream does not need, nor at checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from struct import Struct
from typing import ClassVar, Final, Self

from sidestep.errors import Misuse, PeerViolation
from sidestep.rdma.iwarp.crc32c import crc32c

MARKER_SPACING: Final = 512  # bytes of the stream from marker to marker
MARKER_LEN: Final = 4
CRC_LEN: Final = 4
PRIVATE_DATA_MAX: Final = 512  # bytes
ENHANCED_LEN: Final = 4  # bytes in front of the private data (RFC 6581)

RULES: Final = {
    "mpa_key": "an MPA connection begins with the key of a Request or a Reply",
    "mpa_private_data": "private data are 512 bytes at most",
}


class Role(Enum):
    """Whose frame it is, with its key."""

    REQUEST = b"MPA ID Req Frame"
    REPLY = b"MPA ID Rep Frame"


@dataclass(frozen=True, slots=True)
class StartFrame:
    """A Request or a Reply."""

    role: Role
    private_data: bytes = b""  # the enhanced part included
    markers: bool = False  # the sender wants them in what it receives
    crc: bool = True
    rejected: bool = False
    enhanced: bool = False
    revision: int = 1

    _LAYOUT: ClassVar[Struct] = Struct(">16sBBH")
    LENGTH: ClassVar[int] = 20

    def encode(self) -> bytes:
        """Its bytes."""
        if len(self.private_data) > PRIVATE_DATA_MAX:
            raise Misuse(f"{len(self.private_data)} bytes of private data")
        flags = self.markers << 7 | self.crc << 6 | self.rejected << 5 | self.enhanced << 4
        return self._LAYOUT.pack(self.role.value, flags, self.revision, len(self.private_data)) + self.private_data

    @classmethod
    def decode(cls, stream: bytes | bytearray) -> tuple[Self, int] | None:
        """The frame at the start of a stream and its length; None if there is not all of it yet."""
        key = bytes(stream[: len(Role.REQUEST.value)])
        if not any(role.value.startswith(key) for role in Role):
            raise _violation("mpa_key", f"it begins with {key.hex()}")
        if len(stream) < cls.LENGTH:
            return None
        _, flags, revision, private_len = cls._LAYOUT.unpack_from(stream)
        if private_len > PRIVATE_DATA_MAX:
            raise _violation("mpa_private_data", f"{private_len} bytes")
        end = cls.LENGTH + private_len
        if len(stream) < end:
            return None
        frame = cls(
            role=Role(key),
            private_data=bytes(stream[cls.LENGTH : end]),
            markers=flags & 0x80 != 0,
            crc=flags & 0x40 != 0,
            rejected=flags & 0x20 != 0,
            enhanced=flags & 0x10 != 0 and revision > 1,
            revision=revision,
        )
        return frame, end

    @property
    def upper_data(self) -> bytes:
        """The private data of whoever uses MPA."""
        return self.private_data[ENHANCED_LEN:] if self.enhanced else self.private_data


def fpdu(payload: bytes, position: int, *, markers: bool = False, crc: bool = True) -> bytes:
    """One frame; `position` is where in its direction it begins, counted from the first frame."""
    body = len(payload).to_bytes(2) + payload
    body += bytes(-len(body) % 4)
    out = bytearray()
    start = None  # where in the stream the length field stands
    for index in range(0, len(body) + 1, 4):  # once more before the checksum
        if markers and (position + len(out)) % MARKER_SPACING == 0:
            out += (0 if start is None else position + len(out) - start).to_bytes(4)
        if start is None:
            start = position + len(out)
        out += body[index : index + 4]
    return bytes(out) + (crc32c(out).to_bytes(4, "little") if crc else bytes(CRC_LEN))


class Deframer:
    """The payloads of one direction."""

    def __init__(self, *, markers: bool) -> None:
        self._to_marker = 0 if markers else -1  # bytes until the next one; less than 0: there are none
        self._marker_rest = 0  # bytes of a marker that are still to come
        self._pending = bytearray()

    def feed(self, piece: bytes | memoryview) -> Iterator[bytes]:
        """The payloads that this piece of the stream completes."""
        self._pending += self._without_markers(bytes(piece))
        while len(self._pending) >= 2:
            length = int.from_bytes(self._pending[:2])
            end = 2 + length + -(2 + length) % 4 + CRC_LEN
            if len(self._pending) < end:
                return
            payload = bytes(self._pending[2 : 2 + length])
            del self._pending[:end]
            yield payload

    def _without_markers(self, piece: bytes) -> bytes:
        if self._to_marker < 0:
            return piece
        kept = bytearray()
        at = 0
        while at < len(piece):
            if self._to_marker == 0 and self._marker_rest == 0:
                self._marker_rest = MARKER_LEN
            if self._marker_rest:
                taken = min(self._marker_rest, len(piece) - at)
                self._marker_rest -= taken
                if self._marker_rest == 0:
                    self._to_marker = MARKER_SPACING - MARKER_LEN
            else:
                taken = min(self._to_marker, len(piece) - at)
                kept += piece[at : at + taken]
                self._to_marker -= taken
            at += taken
        return bytes(kept)

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._pending)


def _violation(rule: str, found: str) -> PeerViolation:
    return PeerViolation(f"{found}: {RULES[rule]}", rule=rule)
