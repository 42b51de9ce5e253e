"""Programs and providers die at random moments under load: every byte is accounted for, every end is as TCP shows it.

Each case has a seed, printed with its name, that decides the traffic and the moment. The same checks run over kernel
TCP, so that what is asked of the shim is what TCP does.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from common import PATIENCE_S
from load import THREADS, Load, carried, faults_of_survivor, faults_of_whole, loaded, reached
from selection import rotate

from sidestep.testing import Sidestep

SEEDS = rotate(range(4))
END_S = PATIENCE_S


@pytest.fixture(params=rotate(["after-0", "after-30"]))
def stage(request: pytest.FixtureRequest) -> Iterator[Sidestep]:
    """A provider with programs that promote at once or in the midst of things."""
    with Sidestep(promote_after=str(request.param).removeprefix("after-")) as sidestep:
        yield sidestep


def _still_busy(load: Load, survivor: subprocess.Popen[bytes], killed: str) -> bool:
    """Whether the survivor has yet to see the end of a connection; a driver ends with the last, a server goes on."""
    if killed == "server":
        return survivor.poll() is None
    return survivor.poll() is None and not all(entry.server.done for entry in load.entries())


@pytest.mark.parametrize("killed", ["driver", "server"])
@pytest.mark.parametrize("seed", SEEDS)
def test_program_killed(load_program: Path, tmp_path: Path, stage: Sidestep, seed: int, killed: str) -> None:
    _kill_one(load_program, tmp_path, stage, seed, killed)


@pytest.mark.parametrize("killed", ["driver", "server"])
def test_checks_hold_over_kernel_tcp(load_program: Path, tmp_path: Path, killed: str) -> None:
    _kill_one(load_program, tmp_path, None, 0, killed)


def _kill_one(load_program: Path, tmp_path: Path, stage: Sidestep | None, seed: int, killed: str) -> None:
    moment = random.Random(seed)
    with loaded(load_program, tmp_path, stage) as load:
        driver = load.drive(seed)
        load.wait_for_traffic(stage)
        time.sleep(moment.uniform(0, 0.3))  # the moment is what the seed decides; any is right
        assert driver.poll() is None
        assert load.server.poll() is None
        victim = driver if killed == "driver" else load.server
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        survivor = load.server if killed == "driver" else driver
        reached(lambda: not _still_busy(load, survivor, killed), END_S)  # if it is not, the ledger below says where
        assert faults_of_survivor(load.entries(), killed=killed) == []
        assert survivor.poll() == (None if killed == "driver" else 0)


@pytest.mark.least("ci")  # half a minute, on both CPUs
@pytest.mark.parametrize("seed", SEEDS)
def test_provider_killed(load_program: Path, tmp_path: Path, seed: int) -> None:
    moment = random.Random(seed)
    with Sidestep(promote_after="4") as sidestep, loaded(load_program, tmp_path, sidestep) as load:
        load.drive(seed)
        load.wait_for_traffic(sidestep)
        for _ in range(6):
            time.sleep(moment.uniform(0, 0.15))  # the moments of death and return are what the seed decides
            sidestep.kill_provider(signal.SIGKILL if moment.random() < 0.7 else signal.SIGTERM)
            time.sleep(moment.uniform(0, 0.1))  # for so long there is no provider
            sidestep.restart_provider()
        sidestep.wait_for(carried)  # with the last provider new connections are promoted again
        entries = load.enough()
        assert faults_of_whole(entries) == []
        assert len(entries) >= THREADS


@pytest.mark.parametrize("seed", SEEDS)
def test_provider_gone_for_good(load_program: Path, tmp_path: Path, seed: int) -> None:
    with Sidestep(promote_after="4") as sidestep, loaded(load_program, tmp_path, sidestep) as load:
        load.drive(seed)
        load.wait_for_traffic(sidestep)
        time.sleep(random.Random(seed).uniform(0, 0.2))  # the moment is what the seed decides
        sidestep.kill_provider()
        before = len(load.entries())
        reached(lambda: len(load.entries()) >= before + 2 * THREADS, END_S)  # asserted below, after the bytes
        entries = load.enough()
        assert faults_of_whole(entries) == []
        assert len(entries) >= before + 2 * THREADS, "new connections have stopped with the provider"
