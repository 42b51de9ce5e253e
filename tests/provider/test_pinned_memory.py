"""What devices of the kernel pin of a provider's memory: little for each connection, and no more than is allowed.

The devices are played: see `fake_device`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from mmap import PAGESIZE
from typing import Final

import pytest
from fake_device import FakeVerbs, fake_verbs
from remote_world import World

MIB: Final = 1 << 20
THOUSAND_MAX: Final = 64 * MIB  # bytes that a thousand connections may pin at one end
FEW, MORE = 4, 24


@pytest.fixture
def device() -> Iterator[FakeVerbs]:
    """Its knobs."""
    found = fake_verbs()
    yield found
    found.hold()


def used(world: World) -> None:
    """One more connection, over which bytes have gone both ways, in Python and by engines if there are any."""
    a, b, one, two = world.pair()
    for _ in range(2):
        for sender, receiver in ((a, b), (b, a)):
            sender.send(b"x" * 3000)
            world.turns(lambda receiver=receiver: receiver.end.avail == 3000)  # type: ignore[misc]
            assert receiver.receive() == b"x" * 3000
            receiver.hint()
        world.rest()
        one.reclaim()
        two.reclaim()


@pytest.mark.slow
@pytest.mark.parametrize("engine", [True, False])
def test_a_thousand_connections_pin_little(closing: ExitStack, device: FakeVerbs, *, engine: bool) -> None:
    """Each as many pages as the next, beside what all of a device share."""
    before = device.count("pages")
    world = World(closing, engines=(engine, engine), wire="verbs", relays_max=MORE)
    pinned = []
    for connections in (FEW, MORE - FEW):
        for _ in range(connections):
            used(world)
        pinned.append((device.count("pages") - before) // 2)  # two providers
    each = (pinned[1] - pinned[0]) / (MORE - FEW)
    assert (pinned[1] + (1000 - MORE) * each) * PAGESIZE <= THOUSAND_MAX
    assert not world.one.faults + world.two.faults
