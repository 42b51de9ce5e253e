"""Another program takes a connection up: the provider between hears its doorbell, and wakes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from channel_app import PAGE, App
from remote_world import World, reset

from sidestep import limits
from sidestep.native import _channel
from sidestep.native.layout import Knows
from sidestep.provider import memory
from sidestep.provider.carry.hub import NewDoorbell

PROOF = 0x1234567890 << 24


@pytest.fixture(params=[False, True], ids=["python", "engine"])
def world(closing: ExitStack, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(closing, engines=(request.param, request.param))
    yield made
    assert not made.one.faults + made.two.faults


class Next:
    """The program after `app`, at its end of the same channel, with a doorbell of its own."""

    def __init__(self, app: App, count: int = 1) -> None:
        self.app = app
        self.count = count
        self.name = os.urandom(16)
        self.doorbell = _channel.doorbell_make()
        self.page = memory.sealed_memfd("sidestep-doorbells", PAGE)

    def close(self) -> None:
        os.close(self.doorbell)
        os.close(self.page)

    def bell(self, *, proof: int = PROOF, alone: bool = False) -> NewDoorbell:
        """What it says of itself, with what proves it in the channel."""
        self.app.end.publish("doorbell_nonce", PROOF | self.count)
        number = int.from_bytes(os.pread(self.app.segment, 4, self.app.at("hint", remote=True)), "little")
        return NewDoorbell(number, proof | self.count, alone, self.name, 0, (self.doorbell, self.page))

    def take_up(self) -> None:
        """Its doorbell is the one that names the channel from now on."""
        self.app.page, self.page = self.page, self.app.page
        self.app.named = 0


@pytest.fixture
def after(closing: ExitStack) -> Callable[..., Next]:
    """Makes the program after an application."""

    def made(app: App, count: int = 1) -> Next:
        then = Next(app, count)
        closing.callback(then.close)
        return then

    return made


def test_what_it_names_by_its_own_doorbell_is_heard(world: World, after: Callable[..., Next]) -> None:
    a, b, _, _ = world.pair()
    then = after(a)
    world.one.hub.handle_new_doorbell(then.bell())
    assert a.word("doorbell_nonce_seen") == PROOF | 1
    then.take_up()
    a.send(b"x" * 100)
    world.rest()
    assert b.receive() == b"x" * 100


def test_before_that_it_is_not(world: World, after: Callable[..., Next]) -> None:
    a, b, _, _ = world.pair()
    then = after(a)
    then.take_up()
    a.send(b"x" * 100)
    world.rest()
    assert b.receive() == b""
    then.take_up()
    world.one.hub.handle_new_doorbell(then.bell())
    world.rest()
    assert b.receive() == b"x" * 100


def test_the_program_before_is_heard_until_another_is_alone(world: World, after: Callable[..., Next]) -> None:
    """It may have forked first."""
    a, b, _, _ = world.pair()
    then = after(a)
    world.one.hub.handle_new_doorbell(then.bell())
    a.send(b"x")
    world.rest()
    assert b.receive() == b"x"
    world.one.hub.handle_new_doorbell(after(a, 2).bell(alone=True))
    world.rest()
    a.send(b"y")
    world.rest()
    assert b.receive() == b""
    assert a.word("doorbell_nonce_seen") == PROOF | 2


def test_who_was_alone_before_another_came_ends_no_doorbell(world: World, after: Callable[..., Next]) -> None:
    """Its word may be overtaken by that of a program which it has started since."""
    a, b, _, _ = world.pair()
    late, then = after(a, 1).bell(alone=True), after(a, 2)
    world.one.hub.handle_new_doorbell(then.bell())
    world.one.hub.handle_new_doorbell(late)
    then.take_up()
    a.send(b"x")
    world.rest()
    assert b.receive() == b"x"


def test_a_stranger_proves_nothing(world: World, after: Callable[..., Next]) -> None:
    a, _, _, _ = world.pair()
    then = after(a)
    world.one.hub.handle_new_doorbell(then.bell(proof=PROOF ^ 1 << 24))
    a.end.publish("doorbell_nonce", 5)  # no proof at all
    world.one.hub.handle_new_doorbell(NewDoorbell(1, 5, True, then.name, 0, (then.doorbell, then.page)))
    assert a.word("doorbell_nonce_seen") == 0
    assert not reset(a)


def test_one_that_cannot_be_heard_is_reset(world: World, after: Callable[..., Next]) -> None:
    """What such a program does would not be noticed."""
    a, b, _, _ = world.pair()
    for count in range(1, limits.RELAY_DOORBELLS_MAX):
        assert bool(a.word("knows") & Knows.DOORBELLS) == (count < limits.RELAY_DOORBELLS_MAX // 2)
        world.one.hub.handle_new_doorbell(after(a, count).bell())
    world.rest()
    assert not reset(a)
    world.one.hub.handle_new_doorbell(after(a, limits.RELAY_DOORBELLS_MAX).bell())
    world.rest()
    assert reset(a)
    assert reset(b)
    assert world.one.counters.get("relay_reset", "doorbell") == 1
