"""One direction of an iWARP connection, cut where its frames end: MPA's Request or Reply, then FPDU by FPDU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidestep.errors import PeerViolation
from sidestep.rdma.iwarp.mpa import MARKER_LEN, MARKER_SPACING, frame_len
from sidestep.rdma.iwarp.start_frame import StartFrame

if TYPE_CHECKING:
    from sidestep.rdma.iwarp.tap import Seen


@dataclass(frozen=True, slots=True)
class Piece:
    """A frame, or bytes that cannot be cut."""

    offset: int  # in the direction
    data: bytes
    missing: int  # bytes before it that were not seen


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
        self._raw = False  # nobody knows where frames end

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
            self._raw = self._raw or not self._begins_late
            self._begins_late = False
        self._pending += seen.data
        while self._pending and (size := self._next_len(other)):
            pieces.append(self._cut(size))
        return pieces

    def finish(self) -> list[Piece]:
        """What is left of a frame whose end does not come."""
        return [self._cut(len(self._pending))] if self._pending else []

    def _cut(self, size: int) -> Piece:
        piece = Piece(self._offset, bytes(self._pending[:size]), self._missing)
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
        position, markers = self._offset - self._base, other.markers
        begin = MARKER_LEN if markers and position % MARKER_SPACING == 0 else 0
        if len(self._pending) < begin + 2:
            return 0
        size = frame_len(int.from_bytes(self._pending[begin : begin + 2]), position, markers=markers)
        return size if size <= len(self._pending) else 0

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
