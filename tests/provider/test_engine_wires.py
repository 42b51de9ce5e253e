"""The engine over other wires than iWARP: one trace by Python alone, and by engines at one end or both, ends alike.

Over the software HCA, and over devices of the kernel, which are played (`fake_device`).
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from ipaddress import IPv4Address

import pytest
from channel_app import App
from test_engine_differential import ENGINES, Run, Trace, trace

from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.sdp.settings import Addresses


class Direct:
    """Nobody is between."""

    def pump(self) -> bool:
        return False


class DirectRun(Run):
    """A link that leads from one host to the other."""

    def _connect(self, stack: ExitStack, dice: random.Random | None) -> None:
        del dice
        world, rings = self.world, self.trace.rings
        self.between = Direct()  # type: ignore[assignment]
        self.apps = App(0, rings[0]), App(1, rings[1])
        for app in self.apps:
            stack.callback(app.close)
        taken: list[RemoteRelay] = []
        listener = world.two.stack.listen(
            0, lambda stream: taken.append(world.two.take(self.apps[1], world.two.link(stream)))
        )
        one, two = (IPv4Address(host.device.address) for host in (world.one, world.two))
        addresses = Addresses(one, 1, two, listener.service_id & 0xFFFF)
        self._promote(world.one.stack.connect(str(two), addresses, lambda *_: None), listener, taken)

    def check(self) -> None:
        assert not self.world.one.faults + self.world.two.faults
        for direction in self.directions:
            assert direction.read == direction.written[: len(direction.read)]


class RoceRun(DirectRun):
    wire = "roce"


class VerbsRun(DirectRun):
    wire = "verbs"


def played(kind: type[DirectRun], told: Trace, engines: tuple[bool, bool]) -> DirectRun:
    with ExitStack() as stack:
        run = kind(stack, told, engines)
        run.play()
        run.check()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("engines", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [RoceRun, VerbsRun], ids=lambda kind: kind.wire)
def test_engines_leave_what_python_leaves(kind: type[DirectRun], seed: int, engines: tuple[bool, bool]) -> None:
    told = trace(seed, 80)
    alone, run = played(kind, told, (False, False)), played(kind, told, engines)
    for own, other in zip(run.directions, alone.directions, strict=True):
        if own.recalled is None and other.recalled is None:
            assert own.read == other.read
    for at, (state, reference) in enumerate(zip(run.states, alone.states, strict=True)):
        assert state == reference, f"seed {told.seed}, {engines}, state {at} of {len(run.states)}"
    assert Counter(trap.reason.name for trap in run.traps).total() > 0
    assert any(trap.record["messages_sent"] + trap.record["messages_received"] for trap in run.traps)
