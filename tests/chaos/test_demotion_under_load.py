"""Connections sent to TCP and back to the rings at random moments, many times, under load: not a byte lost or twice."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import toolchain
from common import PATIENCE_S
from load import Load, faults_of_survivor, faults_of_whole, loaded, reached
from selection import rotate
from toolchain import ADDRESS, THREAD, SanitizedShim, Sanitizer

from sidestep.observe.demotion import Result
from sidestep.testing import Connection, Sidestep

HERE = Path(__file__).resolve().parent
SEEDS = range(int(os.environ.get("SIDESTEP_CHAOS_SEEDS", "1")))
SETTINGS = [("0", None), ("4:50000", 4096), ("0", 4096), ("4:50000", None)]  # a run takes two that differ in both
WITHIN_S = PATIENCE_S
LONG = 60_000_000  # bytes a connection may carry: long enough to go to and fro


class Hand:
    """Gives random orders, and counts what came of them."""

    def __init__(self, sidestep: Sidestep, seed: int) -> None:
        self._sidestep, self._dice = sidestep, random.Random(seed)
        self.demoted = self.promoted_again = self.most_rounds = 0

    def _some(self, share: float) -> set[str]:
        """One end each of some connections, or both: as the dice fall; always the end that was promoted most often."""
        found = self._sidestep.connections()
        # by the dice alone few connections live long enough to go to and fro several times
        often = max(found, key=lambda c: c.promotions, default=None)
        return {c.local + c.remote for c in found if c is often or self._dice.random() < share}

    def play(self) -> None:
        """Some ends to TCP, and some of all back; sometimes the next order does not wait for the last."""
        patience = [0.0, 0.0, 0.02, 1.0]
        chosen = self._some(0.4)
        for outcome in self._sidestep.demote(lambda c: c.local + c.remote in chosen, self._dice.choice(patience)):
            self.demoted += outcome.result is Result.TCP and outcome.connection.promotions > 0
        chosen = self._some(0.9)
        for outcome in self._sidestep.promote(lambda c: c.local + c.remote in chosen, self._dice.choice(patience)):
            self._see(outcome.connection)

    def _see(self, found: Connection) -> None:
        self.promoted_again += found.promoted and found.promotions > 1
        self.most_rounds = max(self.most_rounds, found.promotions)

    @property
    def enough(self) -> bool:
        """Whether it can be said that connections were demoted and promoted again, several times."""
        return self.demoted >= 20 and self.promoted_again >= 20 and self.most_rounds >= 4


def _stir(
    sidestep: Sidestep, load: Load, hand: Hand, enough: Callable[[Hand], bool] = lambda hand: hand.enough
) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not enough(hand):
        assert time.monotonic() < deadline, vars(hand)
        assert load.driver is not None
        assert load.driver.poll() is None
        hand.play()
    # what a demoted connection has still to carry goes by TCP, or by ring again: both must end well
    sidestep.promote(timeout_s=0)


@pytest.mark.parametrize(("promote_after", "ring_size"), rotate(SETTINGS, ci=2))
@pytest.mark.parametrize("seed", SEEDS)
def test_every_byte_arrives(
    load_program: Path, tmp_path: Path, seed: int, promote_after: str, ring_size: int | None
) -> None:
    with (
        Sidestep(promote_after=promote_after, ring_size=ring_size) as sidestep,
        loaded(load_program, tmp_path, sidestep) as load,
    ):
        load.drive(seed, most=LONG)
        _stir(sidestep, load, Hand(sidestep, seed))
        assert faults_of_whole(load.enough()) == []


@pytest.mark.parametrize("killed", ["driver", "server"])
@pytest.mark.parametrize("seed", rotate(range(2)))
def test_a_program_killed_amid_orders(load_program: Path, tmp_path: Path, seed: int, killed: str) -> None:
    with Sidestep(promote_after="0") as sidestep, loaded(load_program, tmp_path, sidestep) as load:
        driver = load.drive(seed, most=LONG)
        hand = Hand(sidestep, seed)
        _stir(sidestep, load, hand, lambda hand: hand.promoted_again >= 5)
        sidestep.demote(timeout_s=0)  # the two ends of a connection are at different points of the way
        victim, survivor = (driver, load.server) if killed == "driver" else (load.server, driver)
        victim.kill()
        victim.wait()
        sidestep.promote(timeout_s=0)

        def ended() -> bool:
            return survivor.poll() is not None or (killed == "driver" and all(e.server.done for e in load.entries()))

        reached(ended, WITHIN_S / 2)  # if it is not, the ledger below says where
        assert faults_of_survivor(load.entries(), killed=killed) == []
        assert survivor.poll() == (None if killed == "driver" else 0)


@pytest.mark.parametrize("sanitizer", [ADDRESS, THREAD], ids=lambda one: one.name)
def test_no_report(tmp_path: Path, sanitizer: Sanitizer) -> None:
    program = toolchain.build(f"load-{sanitizer.name}", [HERE / "load.c"], ["-D_GNU_SOURCE", *sanitizer.flags])
    with Sidestep(promote_after="0", ring_size=65536) as sidestep:
        shim = SanitizedShim(sanitizer, sidestep, tmp_path)
        if sanitizer is THREAD:  # the threads of load.c end with their process
            shim.env["TSAN_OPTIONS"] += ":report_thread_leaks=0"
        try:
            with loaded(program, tmp_path, sidestep, shim.env) as load:
                load.drive(0, most=LONG)
                _stir(sidestep, load, Hand(sidestep, 0), lambda hand: hand.promoted_again >= 10)
                assert faults_of_whole(load.enough(WITHIN_S)) == []
        finally:
            shim.check()  # a report is also why a program ends with a code


def test_orders_to_connections_that_are_being_made(tmp_path: Path) -> None:
    """An order to promote may reach a socket while another thread is in connect(): ThreadSanitizer watches."""
    program = toolchain.build("load-thread", [HERE / "load.c"], ["-D_GNU_SOURCE", *THREAD.flags])
    with Sidestep(promote_after="0") as sidestep:
        shim = SanitizedShim(THREAD, sidestep, tmp_path)
        shim.env["TSAN_OPTIONS"] += ":report_thread_leaks=0"  # the threads of load.c end with their process
        try:
            with loaded(program, tmp_path, sidestep, shim.env) as load:
                driver = load.drive(0, most=100_000)
                while driver.poll() is None and len(load.entries()) < 2000:
                    sidestep.promote(timeout_s=0)
                assert faults_of_whole(load.enough(WITHIN_S)) == []
        finally:
            shim.check()
