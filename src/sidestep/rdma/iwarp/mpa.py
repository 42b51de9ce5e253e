"""MPA: how frames lie in a TCP stream (RFC 5044, RFC 6581).

A connection begins with a Request and a Reply (startup/frame.py); then each direction is a row of FPDUs: length,
payload, padding, checksum. If the receiver of a direction has asked for them, a 4-byte marker stands at every 512th
byte of it, wherever that is. All this is slow: what carries traffic is `sidestep.native._framing`.
"""

from __future__ import annotations

from typing import Final

MARKER_SPACING: Final = 512  # bytes of the stream from marker to marker
MARKER_LEN: Final = 4
CRC_LEN: Final = 4
_REFLECTED: Final = 0x82F63B78  # CRC32C's polynomial 0x1EDC6F41, reflected


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


def next_frame(pending: bytes | bytearray, position: int, *, markers: bool) -> int:
    """Bytes of the frame that `pending` begins with, at `position`; 0 if it is not all there."""
    start = MARKER_LEN if markers and position % MARKER_SPACING == 0 else 0
    if len(pending) < start + 2:
        return 0
    size = frame_len(int.from_bytes(pending[start : start + 2]), position, markers=markers)
    return size if size <= len(pending) else 0


def payload_of(frame: bytes, position: int, *, markers: bool) -> bytes:
    """What a frame that begins at `position` holds."""
    content = bytearray(frame)
    for offset in reversed(markers_in(frame, position, markers=markers)):
        del content[offset : offset + MARKER_LEN]
    return bytes(content[2 : 2 + int.from_bytes(content[:2])])


def markers_in(frame: bytes, position: int, *, markers: bool) -> range:
    """Where in the frame its markers stand."""
    return range(-position % MARKER_SPACING, len(frame), MARKER_SPACING) if markers else range(0)


def _entry(index: int) -> int:
    for _ in range(8):
        index = index >> 1 ^ (_REFLECTED if index & 1 else 0)
    return index


_TABLE: Final = tuple(_entry(index) for index in range(256))


def crc32c(data: bytes | bytearray | memoryview, start: int = 0) -> int:
    """CRC32C of the data, `start` being that of what comes before: readable and slow, the oracle of faster ones.

    This speed is enough for tests and tools (RFC 3720 B.4).
    """
    crc = start ^ 0xFFFF_FFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFF_FFFF
