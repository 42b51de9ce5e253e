"""FPDUs read slowly, with their markers and checksums: what `sidestep.native._framing` is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sidestep.errors import Rules
from sidestep.rdma.iwarp.mpa import CRC_LEN, MARKER_LEN, crc32c, markers_in, next_frame, payload_of

RULES: Final = Rules(
    mpa_crc="the checksum of a frame is that of its bytes",
    mpa_marker="a marker says how far before it its frame begins",
)


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
        while not self._failed and (size := next_frame(self._pending, self._position, markers=self._markers)):
            frame = bytes(self._pending[:size])
            del self._pending[:size]
            payload = self._payload(frame)
            self._position += size
            yield payload

    def _payload(self, frame: bytes) -> bytes:
        if self._check:
            self._check_frame(frame, markers_in(frame, self._position, markers=self._markers))
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
