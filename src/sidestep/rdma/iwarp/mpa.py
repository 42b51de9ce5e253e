"""MPA: how frames lie in a TCP stream (RFC 5044, RFC 6581).

A connection begins with a Request and a Reply (startup/frame.py); then each direction is a row of FPDUs: length,
payload, padding, checksum. If the receiver of a direction has asked for them, a 4-byte marker stands at every 512th
byte of it, wherever that is. `Deframer` takes a direction in any pieces and gives the payloads; at checksums and at the
contents of markers, which an ordered stream does not need, it looks if told to. Both it and `fpdu` are slow: what
carries traffic is `sidestep.native._framing`, and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sidestep.errors import Rules
from sidestep.rdma.iwarp.crc32c import crc32c

MARKER_SPACING: Final = 512  # bytes of the stream from marker to marker
MARKER_LEN: Final = 4
CRC_LEN: Final = 4

RULES: Final = Rules(
    mpa_crc="the checksum of a frame is that of its bytes",
    mpa_marker="a marker says how far before it its frame begins",
)


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


def frame_len(payload_len: int, position: int, *, markers: bool) -> int:
    """Bytes that a frame takes, with its markers, if it begins at `position`."""
    content = 2 + payload_len + -(2 + payload_len) % 4 + CRC_LEN
    if not markers:
        return content
    first = -position % MARKER_SPACING  # bytes of it before the first marker
    return content + MARKER_LEN * max(0, -((first - content) // (MARKER_SPACING - MARKER_LEN)))


def payload_of(frame: bytes, position: int, *, markers: bool) -> bytes:
    """What a frame that begins at `position` holds."""
    content = bytearray(frame)
    for offset in reversed(_markers_in(frame, position, markers=markers)):
        del content[offset : offset + MARKER_LEN]
    return bytes(content[2 : 2 + int.from_bytes(content[:2])])


def _markers_in(frame: bytes, position: int, *, markers: bool) -> range:
    return range(-position % MARKER_SPACING, len(frame), MARKER_SPACING) if markers else range(0)


class Deframer:
    """The payloads of one direction.

    If it is to `check`, markers have to be right, and checksums unless `crc` says that there are none: `PeerViolation`,
    and nothing behind that frame is looked at.
    """

    def __init__(self, *, markers: bool, check: bool = False, crc: bool = True) -> None:
        self._markers = markers
        self._check = check
        self._crc = crc
        self._position = 0  # of what is pending, in the direction
        self._pending = bytearray()
        self._failed = False

    def feed(self, piece: bytes | memoryview) -> Iterator[bytes]:
        self._pending += piece
        while not self._failed and (frame := self._next()):
            payload = self._payload(frame)
            self._position += len(frame)
            yield payload

    def _next(self) -> bytes:
        """The next frame with its markers; nothing if there is not all of it."""
        start = MARKER_LEN if self._markers and self._position % MARKER_SPACING == 0 else 0
        if len(self._pending) < start + 2:
            return b""
        length = int.from_bytes(self._pending[start : start + 2])
        end = frame_len(length, self._position, markers=self._markers)
        if len(self._pending) < end:
            return b""
        frame = bytes(self._pending[:end])
        del self._pending[:end]
        return frame

    def _payload(self, frame: bytes) -> bytes:
        if self._check:
            self._check_frame(frame, _markers_in(frame, self._position, markers=self._markers))
        return payload_of(frame, self._position, markers=self._markers)

    def _check_frame(self, frame: bytes, markers: range) -> None:
        """RFC 5044 4.3, 4.4; the reserved half of a marker and the two low bits of its pointer say nothing."""
        self._failed = True
        if self._crc and crc32c(frame[:-CRC_LEN]).to_bytes(4, "little") != frame[-CRC_LEN:]:
            raise RULES.broken("mpa_crc", f"a frame of {len(frame)} bytes at {self._position}")
        start = MARKER_LEN if 0 in markers else 0  # of the length field
        for offset in markers:
            pointer = int.from_bytes(frame[offset + 2 : offset + MARKER_LEN])
            if (pointer ^ max(0, offset - start)) & 0xFFFC:
                raise RULES.broken("mpa_marker", f"a marker at {self._position + offset} that says {pointer}")
        self._failed = False

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete."""
        return 0 if self._failed else len(self._pending)
