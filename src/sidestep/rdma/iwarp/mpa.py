"""MPA: how frames lie in a TCP stream (RFC 5044, RFC 6581).

A connection begins with a Request and a Reply (start_frame.py); then each direction is a row of FPDUs: length,
payload, padding, checksum. If the receiver of a direction has asked for them, a 4-byte marker stands at every 512th
byte of it, wherever that is. `Deframer` takes a direction in any pieces and gives the payloads. It looks neither at the
contents of markers, which an ordered stream does not need, nor at checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sidestep.rdma.iwarp.crc32c import crc32c

MARKER_SPACING: Final = 512  # bytes of the stream from marker to marker
MARKER_LEN: Final = 4
CRC_LEN: Final = 4


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
