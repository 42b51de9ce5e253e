"""TCP connections as frames, for captures that tests make."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from sidestep.rdma.frames import Side


@dataclass
class TcpTalk:
    """Segments of one TCP connection over IPv4, in the order of sending."""

    ports: tuple[int, int] = (40000, 5001)
    start: tuple[int, int] = (0xFFFF_FF00, 7)  # sequence numbers; the first wraps
    frames: list[bytes] = field(default_factory=list)
    sent: list[int] = field(default_factory=lambda: [0, 0])

    def segment(self, side: Side, payload: bytes, *, flags: int = 0x10, at: int | None = None) -> bytes:
        """One of them, made but not sent; `at` is where in the direction."""
        here, there = side.value, side.other.value
        offset = self.sent[here] if at is None else at
        sequence = self.start[here] + (0 if flags & 2 else 1) + offset & 0xFFFF_FFFF
        tcp = struct.pack(">HHIIBBHHH", self.ports[here], self.ports[there], sequence, 0, 5 << 4, flags, 0xFFFF, 0, 0)
        addresses = bytes([10, 0, 0, here + 1]), bytes([10, 0, 0, there + 1])
        ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 40 + len(payload), 0, 0x4000, 64, 6, 0, *addresses)
        return bytes(12) + b"\x08\0" + ip + tcp + payload

    def open(self) -> None:
        """The three first segments."""
        self.frames.append(self.segment(Side.CONNECTING, b"", flags=0x02))
        self.frames.append(self.segment(Side.ACCEPTING, b"", flags=0x12))
        self.frames.append(self.segment(Side.CONNECTING, b""))

    def send(self, side: Side, payload: bytes) -> None:
        """One more segment."""
        self.frames.append(self.segment(side, payload))
        self.sent[side.value] += len(payload)
