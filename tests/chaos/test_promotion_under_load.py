"""Promotion at random moments, with many threads and bytes under way in both directions: not a byte lost or twice."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from load import THREADS, Load, faults_of_whole, loaded, reached
from selection import rotate

from sidestep.testing import Connection, Sidestep

SEEDS = range(int(os.environ.get("SIDESTEP_CHAOS_SEEDS", "1")))
SETTINGS = list(itertools.product(["0", "3", "17", "100", "4:50000"], [None, 4096]))


def _grows_to(load: Load, connections: int) -> bool:
    return reached(lambda: len(load.entries()) >= connections, 20.0)


def _carried(found: list[Connection]) -> bool:
    """Whether a connection has been promoted in the midst of its traffic: TCP first, then the ring, in a direction."""
    return any(way.ring_bytes and way.tcp_bytes > 100 for c in found for way in (c.tx, c.rx))


@pytest.mark.parametrize(("promote_after", "ring_size"), rotate(SETTINGS, ci=4))
@pytest.mark.parametrize("seed", SEEDS)
def test_every_byte_arrives(
    load_program: Path, tmp_path: Path, seed: int, promote_after: str, ring_size: int | None
) -> None:
    with (
        Sidestep(promote_after=promote_after, ring_size=ring_size) as sidestep,
        loaded(load_program, tmp_path, sidestep) as load,
    ):
        load.drive(seed)
        for _ in range(3):  # not only the first ones
            before = len(load.entries())
            sidestep.wait_for(_carried)
            assert _grows_to(load, before + THREADS), "the connections do not get on"
        entries = load.enough()
        assert faults_of_whole(entries) == []
        assert len(entries) >= 3 * THREADS


def test_checks_hold_over_kernel_tcp(load_program: Path, tmp_path: Path) -> None:
    with loaded(load_program, tmp_path, None) as load:
        load.drive(0)
        assert _grows_to(load, 10 * THREADS), "the connections do not get on"
        assert faults_of_whole(load.enough()) == []
