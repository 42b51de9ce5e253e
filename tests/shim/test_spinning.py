"""Spins that are lost time and again are given up: who is to answer may wait for the very CPU that spins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from busy import busy
from told_ends import End, join, promote

from sidestep.native import layout
from sidestep.testing import Sidestep

ROUNDS = 60
LATE_S = 1.2e-6 * layout.SPIN_US_MAX  # an answer that spinning a little longer seems to catch, and never does
LOST_MAX = ROUNDS // 4  # four, then one for each rest, which lasts as long as 64 spins
WAITS = {
    "recv": "s.recv(1)",
    "poll": "s_polled()",
    "epoll": "watched.poll() and s.recv(1)",
}


@contextmanager
def on_cpus(cpus: set[int]) -> Iterator[None]:
    """What is started in the block runs there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS)
def test_spins_that_are_always_lost_are_given_up(wait: str) -> None:
    longest = str(layout.SPIN_US_MAX)
    cpus = os.sched_getaffinity(0)
    ours = {min(cpus)}  # whoever is busy elsewhere is counted among those who want it, and takes none of it
    with Sidestep() as sidestep, ExitStack() as stack:
        with on_cpus(cpus - ours or ours):
            stack.enter_context(busy(1))
        with on_cpus(ours):
            a, b = End(sidestep, SIDESTEP_SPIN_US=longest), End(sidestep, SIDESTEP_SPIN_US=longest)
        join(a, b)
        join(a, b, "near")  # what watch() puts into the set beside it
        promote(sidestep, a, b, count=2)
        a.ask("watch()")

        def lost() -> int:
            port = a.ask("s.getsockname()[1]")
            return sum(c.spins_lost for c in sidestep.connections() if c.local.endswith(f":{port}"))

        before = lost()
        # the pause is the answer's lateness, which is what is tried; nothing waits for luck in it
        b.ask(f"Later.of(lambda: [s.recv(1) and time.sleep({LATE_S}) or s.sendall(b'x') for _ in range({ROUNDS})])")
        a.ask(f"[s.sendall(b'x') or {WAITS[wait]} for _ in range({ROUNDS})]")
        assert lost() - before <= LOST_MAX
