"""Random programs on the software HCA against a plain model, on wires that lose, double, delay and damage."""

from __future__ import annotations

from random import Random

import pytest
from hca_ends import connected
from hypothesis import given, settings
from hypothesis import strategies as st
from random_verbs import Step, Talker, play, programs

from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.wire import Wire, WireFaults
from sidestep.rdma.verbs import QpCapabilities

SIZE = 1300  # five packets and a piece
_point = st.sampled_from([0, 1, 255, 256, 257, 512, 1024, SIZE - 1, SIZE]) | st.integers(0, SIZE)
_chance = st.sampled_from([0.0, 0.02, 0.1])
_faults = st.builds(WireFaults, loss=_chance, duplicate=_chance, late=_chance, damage=st.sampled_from([0.0, 0.02]))
_settings = RoceSettings(mtu=256, window=8, retry_count=7)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(steps=programs(_point), seed=st.integers(0, 1000), faults=_faults)
def test_programs_do_what_the_model_says(steps: list[Step], seed: int, faults: WireFaults) -> None:
    capabilities = QpCapabilities(initiator_depth=2, responder_resources=2)
    wire, active, passive = connected(seed, faults, capabilities, _settings)
    play(active, passive, steps, SIZE, lambda: wire.run_until(lambda: False, limit_s=60.0))


@pytest.mark.parametrize("seed", range(40))
def test_faults_keep_the_rules(seed: int) -> None:
    """Whatever goes wrong: completions come once and in order, what is received is what was sent, all comes to rest."""
    rng = Random(seed)
    faults = WireFaults(loss=rng.choice((0.02, 0.2)), duplicate=0.05, late=0.05, damage=0.02)
    wire, active, passive = connected(seed, faults, settings=_settings)
    talkers = [Talker(end, rng, 70) for end in (active, passive)]
    if rng.random() < 0.2:
        faults.lose = lambda target, payload: wire.now > 1e-3  # the wire is cut
    for _ in range(30):
        rng.choice(talkers).act()
        _pass(wire, rng.uniform(0, 2e-5))
    _pass(wire, 1000.0)
    for talker, other in (talkers, talkers[::-1]):
        talker.has_kept_the_rules(other)


def _pass(wire: Wire, seconds: float) -> None:
    until = wire.now + seconds
    while wire.step(until):
        pass
    wire.now = until
