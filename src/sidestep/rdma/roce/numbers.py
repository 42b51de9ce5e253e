"""Numbers of a reliable connection: packets on their circle of 2^24, and times as they stand on the wire.

Packet sequence numbers and message counts wrap from 0xFFFFFF to 0 and are compared here only. One is ahead of another
if it lies less than half the circle in front of it (IBTA 9.7.1).
"""

from __future__ import annotations

from typing import Final

from sidestep.rdma.roce.packet import PSN_MASK

_HALF: Final = 1 << 23
_TICK_S: Final = 4.096e-6  # IBTA 9.7.6.1.3, 12.7: times of 5 bits are this, doubled so often


def after(psn: int, count: int) -> int:
    """The number so many steps after it; before it if `count` is negative."""
    return (psn + count) & PSN_MASK


def ahead(psn: int, of: int) -> int:
    """How many steps it is in front of another; negative if it is behind."""
    steps = (psn - of) & PSN_MASK
    return steps - (1 << 24) if steps >= _HALF else steps


def packets_of(length: int, mtu: int) -> int:
    """Sequence numbers that a message, or the answer to an RDMA Read, takes: one at least (IBTA 9.7.2)."""
    return max(1, -(-length // mtu))


def timeout_s(code: int) -> float:
    """Seconds that five bits stand for."""
    return _TICK_S * float(1 << code)
