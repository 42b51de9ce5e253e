"""What has arrived is the receiver's: it waits for no call of the peer, whatever either end does or waits on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import toolchain
from common import PATIENCE_S
from selection import rotate

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).resolve().parent / "programs"
NOBODY = 65534

STAYS = {"exclusive", "nested"}  # on its ring
IN_SETS = {"exclusive", "nested"}


@pytest.mark.parametrize("wait", rotate(["asleep", "recv", "poll"], test=1, ci=2))
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


def _answered(sidestep: Sidestep, how: str, wait: str, *reader: Path) -> None:
    program = toolchain.build("two-connections", [PROGRAMS / "two_connections.c"], ["-D_GNU_SOURCE", "-pthread"])
    with sidestep.popen(
        [program, how, wait, *reader], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        promoted = 2 if wait.startswith("pinned") else 4
        sidestep.wait_for(lambda found: len(found) == 4 and sum(c.promoted for c in found) == promoted)
        told, _ = server.communicate("go", timeout=PATIENCE_S)
    assert told.split() == ["whole", "answered"]
    assert server.returncode == 0


# From the third on they do not hear the data connection's doorbell: the provider tells them.
WAITS = ["recv", "poll", "set", "thread", "busy-recv", "busy-poll", "busy-set", "select", "epoll", "nested"]
WAITS += [f"pinned-{wait}" for wait in WAITS]  # the kernel alone knows what ends the wait


@pytest.mark.parametrize("wait", rotate(WAITS, test=3, ci=7))
def test_who_waits_on_another_connection_answers(sidestep: Sidestep, wait: str) -> None:
    """A program that is started may read the data, so its sender is asked to send it again."""
    _answered(sidestep, "popen", wait)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a program of another user's")
@pytest.mark.parametrize("wait", rotate(WAITS, 1, test=3, ci=7))
def test_and_for_a_program_without_the_shim(sidestep: Sidestep, wait: str, tmp_path: Path) -> None:
    program = toolchain.build("two-connections", [PROGRAMS / "two_connections.c"], ["-D_GNU_SOURCE", "-pthread"])
    reader = tmp_path / "reader"
    shutil.copy(program, reader)
    os.chown(reader, NOBODY, NOBODY)
    reader.chmod(0o4755)
    _answered(sidestep, "exec", wait, reader)
