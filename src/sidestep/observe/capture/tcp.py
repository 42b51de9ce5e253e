"""One direction of a TCP connection, put in order: what came early waits, what came twice is left out."""

from __future__ import annotations

from sidestep import limits
from sidestep.observe.capture.layers import Segment
from sidestep.sdp import serial


class Direction:
    """The bytes of one direction in their order."""

    def __init__(self) -> None:
        self._next: int | None = None  # sequence number of the byte that is waited for
        self._early: dict[int, bytes] = {}  # by sequence number
        self._early_len = 0
        self.lost = False  # too much waits behind a gap: the direction is given up

    def feed(self, segment: Segment) -> bytes:
        """The bytes that have become readable."""
        if segment.syn and self._next is None:
            self._next = serial.add(segment.sequence, 1)
        payload = bytes(segment.payload)
        if not payload or self.lost or segment.syn:
            return b""
        if self._next is None:
            self._next = segment.sequence
        self._keep(segment.sequence, payload)
        return self._readable()

    @property
    def gap(self) -> int:
        """Bytes that are missing in front of what waits; 0 if nothing waits."""
        if self._next is None or not self._early:
            return 0
        return min(serial.diff(sequence, self._next) for sequence in self._early)

    def _keep(self, sequence: int, payload: bytes) -> None:
        known = len(self._early.get(sequence, b""))
        if len(payload) > known:
            self._early[sequence] = payload
            self._early_len += len(payload) - known
        if self._early_len > limits.CAPTURE_AHEAD_MAX and sequence != self._next:
            self.lost = True
            self._early = {}

    def _readable(self) -> bytes:
        """What begins at the byte that is waited for, or before it."""
        found = bytearray()
        while self._next is not None:
            start = self._next
            if start not in self._early:
                start = next((early for early in self._early if not serial.gt(early, start)), -1)
            if start < 0:
                break
            piece = self._early.pop(start)
            self._early_len -= len(piece)
            piece = piece[serial.diff(self._next, start) :]
            found += piece
            self._next = serial.add(self._next, len(piece))
        return bytes(found)
