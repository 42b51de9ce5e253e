"""Connections through the provider, while everything dies: programs, the protocol, the provider itself.

The relay of examples/, installed as a distribution of its own, carries the load. Every byte is accounted for: what was
lost ends in a reset, and nothing ends as if it were whole that is not.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from common import PATIENCE_S
from load import (
    THREADS,
    faults_of_survivor,
    faults_of_whole,
    faults_where_some_were_reset,
    loaded,
    reached,
)
from relay_example import relayed
from selection import rotate

from sidestep.provider import control
from sidestep.testing import Sidestep

SEEDS = rotate(range(3))
END_S = PATIENCE_S
LONG = 20_000_000  # bytes a connection may carry: long enough for both directions to switch


@pytest.fixture(params=rotate(["after-0", "after-30"]))
def stage(request: pytest.FixtureRequest) -> Iterator[Sidestep]:
    """A provider with the relay, and programs that promote at once or in the midst of things."""
    with relayed(Sidestep(promote_after=str(request.param).removeprefix("after-"))) as sidestep:
        yield sidestep


def _opened(stage: Sidestep) -> int:
    """Connections that went through the provider, all of which were promoted by it and none by `local`."""
    counters = stage.status()["counters"]
    assert counters["claim_matched"] <= counters["relay_opened"], counters
    return int(counters["relay_opened"])


@pytest.mark.parametrize("seed", SEEDS)
def test_every_byte_arrives(load_program: Path, tmp_path: Path, stage: Sidestep, seed: int) -> None:
    with loaded(load_program, tmp_path, stage) as load:
        load.drive(seed, most=LONG)
        load.wait_for_traffic(stage)
        reached(lambda: len(load.entries()) >= 2 * THREADS, END_S)
        entries = load.enough()
        assert faults_of_whole(entries) == []
        assert _opened(stage) >= THREADS
        assert not [name for name in stage.status()["counters"] if name.startswith("relay_reset")]


@pytest.mark.parametrize("killed", ["driver", "server"])
@pytest.mark.parametrize("seed", SEEDS)
def test_program_killed(load_program: Path, tmp_path: Path, stage: Sidestep, seed: int, killed: str) -> None:
    moment = random.Random(seed)
    with loaded(load_program, tmp_path, stage) as load:
        driver = load.drive(seed, most=LONG)
        load.wait_for_traffic(stage)
        time.sleep(moment.uniform(0, 0.3))  # the moment is what the seed decides; any is right
        victim, survivor = (driver, load.server) if killed == "driver" else (load.server, driver)
        victim.send_signal(signal.SIGKILL)
        victim.wait()

        def ended() -> bool:
            return survivor.poll() is not None or all(e.server.done for e in load.entries() if killed == "driver")

        reached(ended if killed == "driver" else lambda: survivor.poll() is not None, END_S)
        assert faults_of_survivor(load.entries(), killed=killed) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, "remove"], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_provider_leaves(
    load_program: Path, tmp_path: Path, stage: Sidestep, seed: int, number: signal.Signals | str
) -> None:
    """A protocol that is removed hands its connections back to TCP, whole; so does a provider that stops, in time."""
    with loaded(load_program, tmp_path, stage) as load:
        load.drive(seed, most=LONG)
        load.wait_for_traffic(stage)
        time.sleep(random.Random(seed).uniform(0, 0.2))  # the moment is what the seed decides
        if number == "remove":
            with control.ControlConnection(stage.socket) as connection:
                connection.request("module_remove", name="relay")[1].close()
            assert stage.status()["counters"].get("relay_left", 0) > 0
        else:
            assert isinstance(number, signal.Signals)
            stage.kill_provider(number)
        before = len(load.entries())
        reached(lambda: len(load.entries()) >= before + THREADS, END_S)
        # where neither end makes a call for RELAY_LEAVE_S, what is on its way then is lost with a provider that stops
        faults = faults_of_whole if number == "remove" else faults_where_some_were_reset
        assert faults(load.enough()) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_provider_killed(load_program: Path, tmp_path: Path, stage: Sidestep, seed: int) -> None:
    with loaded(load_program, tmp_path, stage) as load:
        load.drive(seed, most=LONG)
        load.wait_for_traffic(stage)
        time.sleep(random.Random(seed).uniform(0, 0.2))  # the moment is what the seed decides
        stage.kill_provider()
        before = len(load.entries())
        reached(lambda: len(load.entries()) >= before + THREADS, END_S)
        assert faults_where_some_were_reset(load.enough()) == []
