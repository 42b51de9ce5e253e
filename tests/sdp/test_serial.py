"""Arithmetic on the circle, against plain numbers that never wrap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidestep.sdp.header import MASK, add, diff, ge

TRUE = st.integers(0, 1 << 40)  # a count that does not wrap
STEPS = st.integers(-(1 << 31) + 1, (1 << 31) - 1)


@given(TRUE, STEPS)
def test_order_is_that_of_the_counts(start: int, steps: int) -> None:
    a, b = (start + steps) & MASK, start & MASK
    assert add(b, steps) == a
    assert diff(a, b) == steps % (1 << 32)
    assert ge(a, b) == (steps >= 0)


@given(st.integers(0, MASK))
def test_half_a_circle_apart_neither_is_after(a: int) -> None:
    b = add(a, 1 << 31)
    assert [ge(a, b), ge(b, a)] == [False] * 2


def test_the_wrap() -> None:
    assert add(MASK, 1) == 0
    assert ge(0, MASK)
    assert not ge(MASK, 0)
    assert diff(0, MASK) == 1
