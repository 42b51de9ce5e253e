"""Arithmetic on a circle of 2^32: sequence numbers and the counters of stale adverts.

MSeq, MSeqAck, NonDiscards and PotentialNonDiscards wrap from 0xFFFFFFFF to 0 and are compared here only. A number is
"at or after" another if it lies less than half the circle ahead (docs/wire/sdp.md §8); of two numbers exactly half a
circle apart neither is.
"""

from __future__ import annotations

from typing import Final

MASK: Final = 0xFFFF_FFFF


def add(a: int, count: int) -> int:
    """The number `count` steps after `a`; before it if `count` is negative."""
    return (a + count) & 0xFFFF_FFFF


def diff(a: int, b: int) -> int:
    """How many steps lead from `b` forward to `a`: 0 to 2^32 - 1."""
    return (a - b) & 0xFFFF_FFFF


def ge(a: int, b: int) -> bool:
    """Whether `a` is `b` or comes after it."""
    return (a - b) & 0xFFFF_FFFF < 0x8000_0000
