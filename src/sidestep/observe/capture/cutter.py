"""One direction of an iWARP connection, cut where its frames end: MPA's Request or Reply, then FPDU by FPDU.

Behind bytes that were lost nobody knows where the next FPDU begins. Frames have a multiple of four bytes (RFC 5044
4.1), headers of DDP and RDMAP that few other bytes look like, and a checksum: the first place where all of that is
right is one. With markers, or without checksums, it is not looked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sidestep.errors import PeerViolation
from sidestep.native._framing import FPDU_MAX, crc32c
from sidestep.rdma.iwarp.ddp import Segment
from sidestep.rdma.iwarp.mpa import CRC_LEN, frame_len, next_frame, payload_of
from sidestep.rdma.iwarp.startup.frame import StartFrame

if TYPE_CHECKING:
    from sidestep.rdma.iwarp.tap import Seen

_STEP: Final = 4  # RFC 5044 4.1: FPDUs end on a boundary of so many bytes
_HEAD_LEN: Final = 2 + 18  # length, and the longer header of the two that DDP has; no frame is shorter


@dataclass(frozen=True, slots=True)
class Piece:
    """A frame, or bytes that cannot be cut."""

    offset: int  # in the direction
    data: bytes
    missing: int  # bytes before it that were not seen
    whole: bool = True  # a frame, as far as anybody knows


class Cutter:
    """A direction.

    Args:
        begins_late: What follows the first gap begins with an FPDU: the connection is seen from its middle.
    """

    def __init__(self, *, begins_late: bool) -> None:
        self.start: StartFrame | None = None
        self._begins_late = begins_late
        self._base = 0  # where the first FPDU begins
        self._offset = 0  # of what is pending
        self._pending = bytearray()
        self._missing = 0
        self._raw = False  # nobody knows where frames end, nor can know it
        self._seeking = False  # nobody knows where the next one begins
        self._sought = 0  # bytes of what is pending at which none begins

    @property
    def pending(self) -> bool:
        """Bytes of a frame that is not complete."""
        return bool(self._pending)

    @property
    def end(self) -> int:
        """Bytes up to here."""
        return self._offset + len(self._pending)

    def feed(self, seen: Seen, other: StartFrame | None) -> list[Piece]:
        """The frames that these bytes complete; `other` is the Request or Reply of the other direction."""
        pieces: list[Piece] = []
        if seen.offset != self.end:
            pieces = self.finish()
            self._missing = max(0, seen.offset - self._offset)
            self._offset = seen.offset
            self._seeking, self._sought = self._seeking or not self._begins_late, 0
            self._begins_late = False
        self._pending += seen.data
        if self._seeking and (strange := self._seek(other)):
            pieces.append(self._cut(strange, whole=False))
        while self._pending and not self._seeking and (size := self._next_len(other)):
            pieces.append(self._cut(size, whole=not self._raw))
        return pieces

    def _seek(self, other: StartFrame | None) -> int:
        """How many of the bytes that are pending cannot be cut; the search is over if a frame begins behind them."""
        if self._raw or self.start is None or other is None or other.markers or not (self.start.crc or other.crc):
            self._raw, self._seeking = True, False  # RFC 5044 7.1.1: there are checksums if either end wants them
            return 0
        waits = None  # the first place where a frame may begin that is not all there
        at = self._sought or -(self._offset - self._base) % _STEP
        while at + _HEAD_LEN <= len(self._pending):
            size = self._looks_like(at)
            end = at + size
            if size and end <= len(self._pending):
                frame = memoryview(self._pending)[at:end]
                right = crc32c(frame[:-CRC_LEN]).to_bytes(4, "little") == frame[-CRC_LEN:]
                frame.release()
                if right:
                    self._seeking = False
                    return at
            elif size and waits is None:
                waits = at
            at += _STEP
        self._sought = at if waits is None else waits
        # What lies so far back that a frame from there would be complete is given up.
        if len(self._pending) <= 2 * FPDU_MAX:
            return 0
        given_up, self._sought = self._sought, 0
        return given_up

    def _looks_like(self, at: int) -> int:
        """Bytes of the frame that begins there, if one may (RFC 5041 4, RFC 5040 4.1); else 0."""
        try:
            Segment.decode(bytes(self._pending[at + 2 : at + _HEAD_LEN]))
        except PeerViolation:
            return 0
        return frame_len(int.from_bytes(self._pending[at : at + 2]), 0, markers=False)

    def payload(self, piece: Piece, other: StartFrame) -> bytes:
        return payload_of(piece.data, piece.offset - self._base, markers=other.markers)

    def finish(self) -> list[Piece]:
        """What is left of a frame whose end does not come."""
        return [self._cut(len(self._pending), whole=False)] if self._pending else []

    def _cut(self, size: int, *, whole: bool) -> Piece:
        piece = Piece(self._offset, bytes(self._pending[:size]), self._missing, whole)
        del self._pending[:size]
        self._offset += size
        self._missing = 0
        return piece

    def _next_len(self, other: StartFrame | None) -> int:
        """Bytes of the next frame; 0 if it is not all there."""
        if self.start is None and not self._raw:
            return self._start_len()
        if self._raw or other is None:
            return len(self._pending)
        # Each frame of the start-up speaks of what its sender receives (RFC 5044 7.1.1).
        return next_frame(self._pending, self._offset - self._base, markers=other.markers)

    def _start_len(self) -> int:
        try:
            found = StartFrame.decode(self._pending)
        except PeerViolation:
            self._raw = True
            return len(self._pending)
        if found is None:
            return 0
        self.start, size = found
        self._base = self._offset + size
        return size
