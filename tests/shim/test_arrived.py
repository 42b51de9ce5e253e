"""What has arrived is the receiver's: it waits for no call of the peer, whatever the receiver does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import toolchain

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).resolve().parent / "programs"
STAYS = {"exclusive"}  # on its ring
IN_SETS = {"exclusive", "nested"}


@pytest.mark.parametrize("wait", ["asleep", "recv", "poll"])
@pytest.mark.parametrize("thing", ["async", "fioasync", "seccomp", "exclusive", "nested"])
def test_needs_no_call_of_the_peer(sidestep: Sidestep, thing: str, wait: str) -> None:
    """The peer sleeps in a read of a pipe, in a receive of the same connection, or in a wait for something else."""
    program = toolchain.build("arrived", [PROGRAMS / "arrived.c"], ["-D_GNU_SOURCE"])
    with sidestep.popen([program, thing, wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
        reader.stdin.write("go")
        reader.stdin.flush()
        told = ", epoll 1" if thing in IN_SETS else ""
        assert reader.stdout.readline() == f"1000 bytes, poll 1{told}, read 1000\n"
        assert reader.stdout.readline() == f"10 bytes, poll 1{told}, read 10\n"
        promoted = [c.promoted for c in sidestep.connections()]
        reader.stdin.close()
    assert reader.returncode == 0
    assert len(promoted) == 2
    assert all(promoted) == (thing in STAYS)

