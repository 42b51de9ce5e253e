"""Numbers of a reliable connection: packets on their circle of 2^24, and times as they stand on the wire.

Packet sequence numbers and message counts wrap from 0xFFFFFF to 0 and are compared here only. One is ahead of another
if it lies less than half the circle in front of it (IBTA 9.7.1).
"""

from __future__ import annotations

from typing import Final

from sidestep.rdma.roce.packet import PSN_MASK

_HALF: Final = 1 << 23
_TICK_S: Final = 4.096e-6  # IBTA 9.7.6.1.3, 12.7: times of 5 bits are this, doubled so often
_RNR_MS: Final = (  # IBTA 9.7.5.2.8, table 45
    655.36, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64, 0.96, 1.28, 1.92,
    2.56, 3.84, 5.12, 7.68, 10.24, 15.36, 20.48, 30.72, 40.96, 61.44, 81.92, 122.88, 163.84, 245.76, 327.68, 491.52,
)  # fmt: skip


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


def rnr_timer_s(code: int) -> float:
    """Seconds that a requester waits at least, as the five bits of an RNR NAK say."""
    return _RNR_MS[code] / 1000
