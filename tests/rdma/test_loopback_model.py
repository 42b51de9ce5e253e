"""Random programs on the loopback device against a plain model: both modes, with and without faults."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback_ends import connected
from random_verbs import Step, Talker, play, programs

from sidestep.rdma.loopback import NO_DELAY, Fabric, Faults, Recorder, Timing
from sidestep.rdma.verbs import DeviceAttributes, QpCapabilities

SIZE = 64


def build(kind: str, seed: int) -> Fabric:
    if kind == "timed":
        return Fabric(Random(seed), timing=Timing(read_s=(0, 1e-4)))
    return Fabric(Random(seed), timing=NO_DELAY, observer=Recorder() if kind == "watched" else None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["timed", "no delay", "watched"])
@settings(max_examples=60, deadline=None)
@given(steps=programs(st.integers(0, SIZE)), seed=st.integers(0, 1000))
def test_programs_do_what_the_model_says(kind: str, steps: list[Step], seed: int) -> None:
    fabric = build(kind, seed)
    active, passive = connected(fabric, QpCapabilities(initiator_depth=2, responder_resources=2))
    play(active, passive, steps, SIZE, fabric.run)


@pytest.mark.parametrize("acknowledged", [True, False], ids=["acknowledged", "unacknowledged"])
@pytest.mark.parametrize("seed", range(30))
def test_faults_keep_the_rules(seed: int, acknowledged: bool) -> None:
    """Whatever goes wrong: completions come once and in order, what is received is what was sent, all comes to rest."""
    rng = Random(seed)
    faults = Faults()
    fabric = Fabric(Random(seed), faults=faults)
    attributes = DeviceAttributes(acknowledged=acknowledged, error_disconnects=not acknowledged)
    active, passive = connected(fabric, attributes=attributes)
    faults.lose_cm = 0.1
    faults.lose_connection = rng.choice((0.0, 0.03))
    faults.complete_with_error = rng.choice((0.0, 0.03))
    talkers = [Talker(end, rng) for end in (active, passive)]
    if rng.random() < 0.2:
        fabric.call_later(rng.uniform(0, 1e-4), lambda: fabric.reset(active.qp))
    for _ in range(30):
        rng.choice(talkers).act()
        fabric.run_until(fabric.now + rng.uniform(0, 2e-5))
    fabric.run_until(fabric.now + 1000.0)
    for talker, other in (talkers, talkers[::-1]):
        talker.has_kept_the_rules(other, acknowledged=acknowledged)
