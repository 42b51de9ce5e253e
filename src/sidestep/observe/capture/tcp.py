"""One direction of a TCP connection, put in order: what came early waits, what came twice is left out."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

from sidestep import limits
from sidestep.observe.capture.layers import Segment
from sidestep.sdp.header import add, diff, ge

_SEGMENT_COST: Final = 128  # bytes that a segment takes which waits, beside its own


class Direction:
    """The bytes of one direction in their order."""

    def __init__(self) -> None:
        self._next: int | None = None  # sequence number of the byte that is waited for
        self._offset = 0  # of that byte in the stream
        self._early: dict[int, bytes] = {}  # by offset
        self._offsets: list[int] = []  # of those, a heap
        self._early_len = 0
        self.lost = False  # too much waits behind a gap: the direction is given up

    def feed(self, segment: Segment) -> bytes:
        if segment.syn and self._next is None:
            self._next = add(segment.sequence, 1)
        payload = bytes(segment.payload)
        if not payload or self.lost or segment.syn:
            return b""
        if self._next is None:
            self._next = segment.sequence
        ahead = diff(segment.sequence, self._next)
        if not ge(segment.sequence, self._next):  # it begins before
            ahead = -diff(self._next, segment.sequence)
        self._keep(self._offset + ahead, payload)
        return self._readable(self._next)

    @property
    def gap(self) -> int:
        """Bytes that are missing in front of what waits; 0 if nothing waits."""
        return self._offsets[0] - self._offset if self._offsets else 0

    def _keep(self, offset: int, payload: bytes) -> None:
        known = self._early.get(offset)
        if known is None:
            heappush(self._offsets, offset)
            self._early_len += _SEGMENT_COST
        if known is None or len(payload) > len(known):
            self._early[offset] = payload
            self._early_len += len(payload) - len(known or b"")
        if self._early_len > limits.CAPTURE_AHEAD_MAX and offset > self._offset:
            self.lost = True
            self._early.clear()
            self._offsets.clear()

    def _readable(self, sequence: int) -> bytes:
        found = bytearray()
        while self._offsets and self._offsets[0] <= self._offset + len(found):
            offset = heappop(self._offsets)
            piece = self._early.pop(offset)
            self._early_len -= len(piece) + _SEGMENT_COST
            found += piece[self._offset + len(found) - offset :]
        self._offset += len(found)
        self._next = add(sequence, len(found))
        return bytes(found)
