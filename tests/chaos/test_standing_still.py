"""Programs and providers stand still at random moments under load, and go on or are killed: no byte is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from common import PATIENCE_S
from load import faults_of_survivor, faults_of_whole, loaded, reached

from sidestep.testing import Sidestep

SEEDS = range(int(os.environ.get("SIDESTEP_CHAOS_SEEDS", "1")))


@pytest.mark.parametrize("promote_after", ["0", "30"])
@pytest.mark.parametrize("seed", SEEDS)
def test_who_stands_still_goes_on(load_program: Path, tmp_path: Path, seed: int, promote_after: str) -> None:
    """Of both ends and the provider some stand still, for moments and seconds, also while connections are promoted."""
    moment = random.Random(seed)
    with Sidestep(promote_after=promote_after) as sidestep, loaded(load_program, tmp_path, sidestep) as load:
        driver = load.drive(seed)
        all_of_them = [driver.pid, load.server.pid, sidestep.provider_pid]
        for for_s in [moment.uniform(0, 0.2) for _ in range(12)] + [2.5]:
            standing = moment.sample(all_of_them, moment.randint(1, 3))
            for pid in standing:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(for_s)  # how long they stand still is what is tested, not a wait for something
            for pid in standing:
                os.kill(pid, signal.SIGCONT)
            time.sleep(moment.uniform(0, 0.1))  # when they stop next is the seed's choice; any moment is right
        sidestep.wait_for(lambda found: any(c.tx.ring_bytes and c.rx.ring_bytes for c in found))
        assert faults_of_whole(load.enough()) == []


def _sent(sidestep: Sidestep, pid: int) -> int:
    """Bytes, by this program."""
    return sum(c.tx.ring_bytes + c.tx.tcp_bytes for c in sidestep.connections() if c.pid == pid)


def _asleep(pid: int) -> bool:
    """Whether no thread of it runs, or would if it had a CPU."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(path.read_text().rpartition(")")[2].split()[0] == "S" for path in threads)


@pytest.mark.parametrize("victim", ["driver", "server"])
def test_killed_while_it_stands_still(load_program: Path, tmp_path: Path, victim: str) -> None:
    """By then the other end has filled all that there is, and waits."""
    with Sidestep() as sidestep, loaded(load_program, tmp_path, sidestep) as load:
        driver = load.drive(1)
        sidestep.wait_for(lambda found: any(c.tx.ring_bytes and c.rx.ring_bytes for c in found))
        dies, survives = (driver, load.server) if victim == "driver" else (load.server, driver)
        dies.send_signal(signal.SIGSTOP)
        before = -1

        def waits() -> bool:
            nonlocal before
            last, before = before, _sent(sidestep, survives.pid)
            return before == last and _asleep(survives.pid)

        assert reached(waits, PATIENCE_S), "the end that goes on finds no rest"
        dies.kill()
        dies.wait()
        if victim == "driver":
            reached(lambda: all(e.server.done for e in load.entries()), PATIENCE_S)
        else:
            assert survives.wait(PATIENCE_S) == 0
        assert faults_of_survivor(load.entries(), killed=victim) == []
