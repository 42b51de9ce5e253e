"""No call of the kernel's holds the provider up for long."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from sidestep import limits


@contextmanager
def interrupted() -> Iterator[None]:
    """Around work that touches strangers' descriptors: no call of the kernel's that a signal can end lasts long.

    Whoever closes a socket last waits for its lingering, and that may be us, with a duplicate that a stranger has left
    alone.
    """
    signal.setitimer(signal.ITIMER_REAL, limits.HELD_UP_S, limits.HELD_UP_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def interrupt(_number: int, _frame: object) -> None:
    """The signal itself is what ends the call."""
