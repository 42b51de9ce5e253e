"""Streams of the provider's own channels against an application that follows no rules, or only some.

Both applications are played by `ShimClient` and a mapping of their segments; the protocol is one that the test holds in
its hands, in a provider that runs in this very thread.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import select
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from channel_app import RING, App
from remote_world import HubWorld, all_of, close, go_back, recall, reset, shut

from sidestep import limits
from sidestep.errors import Misuse, Unavailable
from sidestep.native import _channel
from sidestep.native.layout import Acked, Back, Notice
from sidestep.provider import memory
from sidestep.provider.carry.local_relay import open_relay
from sidestep.switch.stream import Stream


@dataclass
class Taken:
    """A protocol's view of a stream: copies to the other one, `pace` bytes a call."""

    stream: Stream
    other: Taken | None = None
    pace: int = RING
    calls: int = 0
    ended: bool = False
    on_call: Callable[[], None] = field(default=lambda: None)

    def change(self) -> None:
        self.calls += 1
        self.on_call()
        assert self.other is not None
        self.move(self.other.stream)
        self.other.move(self.stream)

    def move(self, to: Stream) -> None:
        for piece in self.stream.readable()[:1]:
            for room in to.writable()[:1]:
                count = min(len(piece), len(room), self.pace)
                room[:count] = piece[:count]
                to.commit(count)
                self.stream.consume(count)
        if self.stream.ended and not self.ended:
            self.ended = True
            to.end()


class World(HubWorld):
    """A hub, and pairs of applications through it."""

    def __init__(self, stack: ExitStack, relays_max: int = 8) -> None:
        super().__init__(stack, relays_max)
        self.stack = stack

    def pair(self, *, promoted: bool = True, kind: type[Taken] = Taken) -> tuple[App, App, Taken, Taken]:
        apps = App(0), App(1)
        for app in apps:
            self.stack.callback(app.close)
        streams = open_relay(self.hub, apps[0].given(), apps[1].given(), protocol="test", on_drop=self._on_drop)
        a, b = kind(streams[0]), kind(streams[1])
        a.other, b.other = b, a
        for taken in (a, b):
            taken.stream.on_change = taken.change
        if promoted:
            for words in ({"attached": 1}, {"rx_ready": 1}, {"tx_switch_offset": 7, "tx_switched": 1}):
                for app in apps:
                    app.send_control(**words)
                self.turns()
            assert [app.word("tx_switch_offset") for app in apps] == [7, 7]
        return *apps, a, b

    def turns(self, most: int = 1000) -> int:
        """Turns of the loop until nothing is left to do; how many."""
        for count in range(most):
            if not self.hub.about_to_wait():
                return count
            self.hub.handle_turn()
        return most


@pytest.fixture
def world(closing: ExitStack) -> World:
    return World(closing)


def test_the_first_hint_of_a_doorbell_read_before_it_is_written(world: World) -> None:
    a, b, _, _ = world.pair(promoted=False)
    world.turns()
    for app in (a, b):
        app.end.publish("attached", 1)
        app.begin_hint()
    world.turns()
    assert (a.word("attached"), b.word("attached")) == (1, 1)


def test_bytes_both_ways_in_any_portions(world: World) -> None:
    a, b, taken, _ = world.pair()
    dice = random.Random(5)
    for sender, receiver in ((a, b), (b, a)):
        data, sent, got = dice.randbytes(100_000), 0, b""
        while len(got) < len(data):
            sent += sender.send(data[sent : sent + dice.randrange(1, 6000)])
            taken.pace = dice.randrange(1, 3000)
            world.turns()
            got += receiver.receive()
        assert got == data
    assert not world.faults


def test_an_idle_pair_asks_for_no_turn(world: World) -> None:
    _, _, a, b = world.pair()
    world.turns()
    before = a.calls, b.calls
    assert not world.hub.about_to_wait()
    world.hub.handle_turn()
    assert (a.calls, b.calls) == before


def test_one_busy_stream_takes_turns_with_others(world: World) -> None:
    busy_a, _, busy, _ = world.pair()
    quiet_a, quiet_b, quiet, _ = world.pair()
    busy.pace = 1
    busy_a.send(bytes(RING))
    world.hub.about_to_wait()
    world.hub.handle_turn()
    quiet_a.send(b"short")
    calls = busy.calls
    for _ in range(3):
        world.hub.about_to_wait()
        world.hub.handle_turn()
    assert quiet_b.receive() == b"short"
    assert busy.calls - calls == 3  # it goes on, once a turn
    assert quiet.calls


def test_the_end_is_told_behind_the_last_byte(world: World) -> None:
    a, b, taken, _ = world.pair()
    taken.pace = 10
    a.send(bytes(1000))
    a.send_control(shut_wr=1)
    b.end.publish("hint", 0)
    b.poke(f"side[{1 - b.provider_side}].fin_seen", 1)  # its FIN overtakes the bytes
    seen = []
    while world.hub.about_to_wait():
        world.hub.handle_turn()
        seen.append((b.end.avail, b.word("tx_fin")))
    assert len(seen) > 50
    assert all(there == 1000 for there, told in seen if told)
    assert (b.end.avail, b.word("tx_fin"), b.word("tx_fin_at"), b.word("shut_wr")) == (1000, 1, 1000, 1)
    assert not b.word("notice")


@pytest.fixture
def _no_automatic_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_automatic_collection")
def test_the_memory_of_what_has_ended_is_given_back(world: World) -> None:
    """A connection's parts refer to each other, and it may be long until Python looks for that by itself."""
    app, *_ = world.pair()
    ended = list(map(weakref.ref, world.hub))
    for one in list(world.hub):
        world.hub.drop(one)
    world.turns()
    del app, _, one
    world.pass_time(limits.RELAY_TIDY_S)
    assert [one() for one in ended] == [None, None]


def test_a_protocol_that_fails_loses_nothing(world: World) -> None:
    a, b, taken, other = world.pair()

    def fail() -> None:
        raise ValueError("a protocol's fault")

    taken.pace = 100
    a.send(bytes(range(200)))
    world.hub.about_to_wait()
    world.hub.handle_turn()
    other.on_call = taken.on_call = fail
    a.send(bytes(range(100)))
    world.turns()
    assert b.receive() == bytes(range(200)) + bytes(range(100))
    assert world.faults
    assert (taken.stream.lost, other.stream.lost) == (True, True)
    assert all(app.word("notice") & Notice.DEMOTE for app in (a, b))
    assert (a.word("rx_frozen"), b.word("tx_back_at")) == (300, 300)  # what follows goes by TCP
    assert taken.stream.writable() == () == taken.stream.readable()


def test_what_a_protocol_had_taken_is_carried_without_it(world: World) -> None:
    a, b, taken, _ = world.pair()

    def take_and_fail() -> None:
        if taken.stream.readable():
            taken.stream.consume(60)
            raise ValueError("a protocol's fault")

    taken.on_call = take_and_fail
    a.send(bytes(range(100)))
    world.turns()
    assert b.receive() == bytes(range(100))


def test_a_protocol_may_carry_bytes_between_two_turns(world: World) -> None:
    a, b, taken, other = world.pair()
    for one in (taken, other):
        one.stream.on_change = lambda: None
    a.send(bytes(RING))
    world.turns()
    taken.move(other.stream)  # as from a timer
    world.turns()
    asked = _channel.HEADER_WORDS[f"producer[{b.provider_side}].want_space"][0]
    assert int.from_bytes(os.pread(b.segment, 4, asked), "little") == 1  # else nobody would tell us that it has read
    b.receive()
    world.turns()
    assert a.end.space == RING


def test_a_protocol_that_ends_too_early_is_left(world: World) -> None:
    a, b, taken, other = world.pair()
    other.stream.end()
    a.send(b"not yet")
    world.turns()
    assert taken.stream.lost
    all_of(a, b, 7)
    assert not b.word("tx_fin")


def test_there_is_a_bound(closing: ExitStack) -> None:
    world = World(closing, relays_max=1)
    world.pair()
    with pytest.raises(Unavailable, match="1 connections already go through"):
        world.pair()


def test_who_never_attaches_is_dropped(world: World) -> None:
    a, _, taken, _ = world.pair(promoted=False)
    a.send_control(attached=1)
    world.turns()
    world.pass_time(60)
    world.turns()
    assert world.counters.get("relay_dropped", "not_attached") == 1
    assert taken.stream.lost
    assert a.word("notice") == Notice.OVER


def test_a_shortage_of_descriptors_passes(closing: ExitStack) -> None:
    hub = World(closing).hub
    hub.close()
    free = os.dup(0)
    os.close(free)
    bounds = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, bounds[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            hub.descriptors()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, bounds)
    for fd in hub.descriptors():
        os.fstat(fd)


def test_an_application_that_takes_bytes_back_is_reset(world: World) -> None:
    a, b, _, _ = world.pair()
    a.send(b"x" * 100)
    world.turns()
    a.poke(f"producer[{1 - a.provider_side}].tail", 50)
    world.turns()
    assert world.counters.get("relay_reset", "violation") == 1
    assert not world.faults
    assert b.word("notice") & Notice.RESET


def fill(eventfd: int) -> None:
    """Brings it to its highest count."""
    os.set_blocking(eventfd, False)
    for bit in reversed(range(64)):
        with suppress(BlockingIOError):
            os.eventfd_write(eventfd, 1 << bit)


def test_a_doorbell_that_would_block_is_rung_all_the_same(closing: ExitStack) -> None:
    full, empty, at_once = App(0), App(1), App(0)
    for app in (full, empty, at_once):
        closing.callback(app.close)
    fill(full.doorbell)
    os.close(empty.doorbell)
    empty.doorbell = os.eventfd(0)
    os.close(at_once.doorbell)
    at_once.doorbell = os.eventfd(5)  # whoever reads it takes all
    for generation in (1, 2):
        for app, rung in ((full, True), (empty, False), (at_once, generation == 1)):
            os.set_blocking(app.doorbell, True)
            doorbell = _channel.RemoteDoorbell(app.doorbell, app.page, 0)
            os.pwrite(app.page, (generation << 16 | 1).to_bytes(8, "little"), 0)
            assert doorbell.ring() == rung
            doorbell.close()


@pytest.mark.parametrize("blocking", [False, True])
def test_a_ring_cannot_be_taken_away(closing: ExitStack, blocking: bool) -> None:
    doorbell = _channel.Doorbell()
    closing.callback(doorbell.close)
    waits = closing.enter_context(select.epoll())
    waits.register(doorbell.wait_fd, select.EPOLLIN)
    stranger = os.dup(doorbell.fd)
    closing.callback(os.close, stranger)
    for filled in (False, True):
        if filled:
            fill(stranger)
        os.set_blocking(stranger, blocking)
        doorbell.acknowledge()
        assert waits.poll(0) == []
        assert _channel.doorbell_ring(stranger)
        if filled:
            fill(stranger)
            os.set_blocking(stranger, blocking)
        for _ in range(100):
            os.eventfd_read(stranger)
        assert waits.poll(0) == [(doorbell.wait_fd, select.EPOLLIN)]
        doorbell.acknowledge()
        assert waits.poll(0) == []


def test_a_doorbell_without_hints_is_refused(world: World, closing: ExitStack) -> None:
    apps = App(0), App(1)
    for app in apps:
        closing.callback(app.close)
    os.close(apps[1].page)
    apps[1].page = memory.sealed_memfd("sidestep-doorbells", 4096)
    with pytest.raises(Unavailable, match="cannot name"):
        open_relay(world.hub, apps[0].given(), apps[1].given(), protocol="test", on_drop=lambda: None)
    assert len(world.hub) == 0


@pytest.mark.parametrize("seed", range(60))
def test_any_words_harm_nobody_else(world: World, seed: int) -> None:
    dice = random.Random(seed)
    a, b, _, _ = world.pair()
    innocent_a, innocent_b, _, _ = world.pair()
    names = [name for name in _channel.HEADER_WORDS if dice.random() < 0.3] or ["producer[0].tail"]
    total, got = b"", b""
    for _ in range(60):
        app = dice.choice((a, b))
        if dice.random() < 0.5:
            app.poke(dice.choice(names), dice.choice((0, 1, 5, 1 << 31, (1 << 64) - 1, dice.getrandbits(64))))
        else:
            try:
                app.send(bytes(dice.randrange(1, 5000)))
                app.receive()
            except ConnectionResetError:
                app.hint()  # its own view has become impossible as well
        part = dice.randbytes(dice.randrange(1, 500))
        total += part[: innocent_a.send(part)]
        world.turns(200)
        got += innocent_b.receive()
    world.turns()
    assert got + innocent_b.receive() == total
    assert not world.faults


@pytest.fixture
def _no_leaks() -> Iterator[None]:
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


@pytest.mark.usefixtures("_no_leaks")
def test_descriptors_are_given_back() -> None:
    with ExitStack() as stack:
        world = World(stack)
        for _ in range(5):
            world.pair()
        world.hub.close()
        assert world.dropped == 5


def test_views_outlive_the_channel(world: World) -> None:
    a, _, taken, _ = world.pair()
    taken.stream.on_change = lambda: None
    a.send(b"kept")
    world.turns()
    (view,) = taken.stream.readable()
    world.hub.close()
    assert bytes(view) == b"kept"  # the mapping stays as long as somebody looks at it


# ---- leaving ----


def in_the_midst(world: World, count: int, pace: int) -> tuple[App, App, Taken]:
    """So many bytes are sent, and the protocol has moved some of them."""
    a, b, taken, _ = world.pair()
    taken.pace = pace
    a.send(bytes(range(256)) * (count // 256) + bytes(count % 256))
    for _ in range(3):
        world.hub.about_to_wait()
        world.hub.handle_turn()
    assert 0 < b.end.avail < count
    return a, b, taken


def test_who_leaves_needs_no_call_of_an_application(world: World) -> None:
    a, b, _ = in_the_midst(world, RING, 100)
    b.send(bytes(10))
    world.hub.leave()
    assert b.end.avail == RING  # at once, and so nothing is to be sent again
    world.turns()
    assert world.hub.settled()
    all_of(a, b, RING)
    all_of(b, a, 10)
    assert not reset(a) | reset(b)
    assert world.counters.get("relay_left") == 1


def test_nobody_is_invited_any_more_by_who_leaves(world: World) -> None:
    a, b, _, _ = world.pair(promoted=False)
    for app in (a, b):
        app.send_control(attached=1)
    b.send_control(rx_ready=1)
    world.turns()
    assert (b.word("acked"), a.word("rx_ready")) == (Acked.READY | Acked.SPACER, 1)
    world.hub.leave()
    a.send_control(rx_ready=1)  # too late
    world.turns()
    assert world.hub.settled()
    assert (b.word("tx_back"), b.word("tx_back_at"), b.word("rx_ready")) == (1 << 2 | Back.BACK, 0, 0)
    assert a.end.decide(True, Back.BACK) == Back.RECALLED  # what it was about to write goes by TCP as well
    assert all(app.word("notice") & Notice.OVER for app in (a, b))


@pytest.mark.parametrize("how", [go_back, shut, close], ids=["back", "shut", "closed"])
def test_an_end_waits_for_bytes_that_the_protocol_has_and_leaves(world: World, how: Callable[[App], object]) -> None:
    """Nobody sends them again."""
    a, b, _ = in_the_midst(world, 1000, 100)
    how(a)
    world.hub.about_to_wait()
    world.hub.handle_turn()
    assert (b.word("tx_fin"), b.word("tx_back")) == (0, 0)
    world.hub.leave()
    world.turns()
    assert (b.end.avail, b.word("tx_back_at" if how is go_back else "tx_fin_at")) == (1000, 1000)
    assert not reset(a) | reset(b)


def test_bytes_that_were_consumed_and_not_committed_are_no_end(world: World) -> None:
    a, b, taken, other = world.pair()
    taken.on_call = other.on_call = lambda: taken.stream.consume(sum(map(len, taken.stream.readable())))
    a.send(b"swallowed")
    shut(a)
    world.turns()
    assert reset(b)
    assert not b.word("tx_fin")


def test_a_recall_ends_what_the_protocol_has(world: World) -> None:
    a, b, taken = in_the_midst(world, 1000, 10)
    b.end.read(5)
    assert recall(b) == 5
    world.turns()
    assert (a.word("rx_frozen"), a.word("notice")) == (5, Notice.RECALL | Notice.DEMOTE)
    assert b.word("acked") & Acked.REQUEST
    assert (taken.ended, taken.stream.readable()) == (True, ())
    assert a.end.unread >= 995


@pytest.mark.parametrize("killed", [False, True])
def test_a_recall_of_what_will_not_be_sent_again_is_a_reset(world: World, killed: bool) -> None:
    a, b, _ = in_the_midst(world, 1000, 10)
    if killed:
        a.connected = False
        b.poke(f"side[{1 - b.provider_side}].fin_seen", 1)
    else:
        shut(a)
    world.hub.about_to_wait()
    world.hub.handle_turn()
    b.end.publish("rx_frozen", 0)
    b.end.decide(False, Back.RECALLED)
    b.send_control(notice=Notice.RECALL | Notice.DEMOTE)
    world.turns()
    assert reset(b)
    assert not b.word("tx_fin")


@dataclass
class Checked:
    """One direction, of which each byte is looked at."""

    sender: App
    receiver: App
    dice: random.Random
    sent: bytes = b""
    got: bytes = b""
    over: bool = False  # the sender sends no more by ring

    def send(self) -> None:
        if not (self.over or self.sender.word("notice") & Notice.RECALL):
            data = self.dice.randbytes(self.dice.randrange(1, 3000))
            self.sent += data[: self.sender.send(data)]

    def read(self) -> None:
        self.got += self.receiver.end.read(self.dice.randrange(1, 3000))
        self.receiver.hint()

    def end(self, how: Callable[[App], object]) -> None:
        if not (self.over or self.sender.word("notice") & Notice.RECALL):
            self.over = True
            how(self.sender)

    def check(self) -> None:
        """What has come is what was sent, and what has not is sent again, or the end of nothing was told."""
        there = self.got + self.receiver.end.read()
        assert self.sent.startswith(there)
        if self.receiver.word("tx_fin") or self.receiver.word("tx_back") == 1 << 2 | Back.BACK:
            if self.sender.word("notice") & Notice.RECALL:
                assert self.sender.word("rx_frozen") == len(there)
                assert self.sender.end.unread >= len(self.sent) - len(there)
            else:
                assert there == self.sent


class Holding(Taken):
    """Consumes long before it commits."""

    held = b""

    def move(self, to: Stream) -> None:
        for piece in self.stream.readable()[:1]:
            part = piece[: self.pace]
            self.held += part
            self.stream.consume(len(part))
        if self.pace % 3:  # the next time is early enough
            for room in to.writable()[:1]:
                part = memoryview(self.held)[: min(len(room), self.pace)]
                room[: len(part)] = part
                to.commit(len(part))
                self.held = self.held[len(part) :]
        if self.stream.ended and not (self.held or self.ended):
            self.ended = True
            to.end()


@pytest.mark.parametrize("kind", [Taken, Holding])
@pytest.mark.parametrize("seed", range(100))
def test_no_byte_is_lost_whatever_ends_when(world: World, seed: int, kind: type[Taken]) -> None:
    dice = random.Random(seed)
    a, b, taken, other = world.pair(kind=kind)
    ways = Checked(a, b, dice), Checked(b, a, dice)
    for _ in range(dice.randrange(5, 60)):
        taken.pace, other.pace = dice.randrange(1, 2000), dice.randrange(1, 2000)
        for way in ways:
            dice.choice((way.send, way.send, way.read, lambda: None))()
            if dice.random() < 0.03:
                way.end(dice.choice((go_back, shut)))
        for _ in range(dice.randrange(4)):
            world.hub.about_to_wait()
            world.hub.handle_turn()

    def fail() -> None:
        raise ZeroDivisionError

    going = dice.randrange(5)
    if going == 1:
        world.hub.leave()
    elif going == 2:
        taken.stream.close()
    elif going == 3:
        taken.on_call = fail
    for way in ways:  # it may be in the midst of things, and have heard of nothing yet
        for deed in (way.read, way.send, partial(way.end, dice.choice((go_back, shut)))):
            if dice.random() < 0.5:
                deed()
    for _ in range(30):
        for one in (taken, other):
            one.pace = 1 + 3 * dice.randrange(1000)
        for way in ways:
            way.got += way.receiver.receive()
        world.turns()
    if going == 4:
        world.hub.leave()
        world.turns()
    assert world.hub.settled() or going in (0, 2, 3)  # not if it had nothing to leave, or was not called
    assert not reset(a) | reset(b)
    for way in ways:
        way.check()
        assert way.receiver.word("tx_fin") or way.receiver.word("tx_back") or way.got == way.sent
    assert all(isinstance(fault, ZeroDivisionError) for fault in world.faults)


def test_who_is_left_alone_is_told(world: World) -> None:
    a, b, _ = in_the_midst(world, 1000, 10)
    world.hub.drop(next(iter(world.hub)))
    world.turns()
    assert len(world.hub) == 0
    assert world.counters.get("relay_reset", "link_lost") == 1
    assert reset(a) | reset(b)


def test_a_direction_that_never_began_has_room_for_its_end(world: World) -> None:
    """A protocol that waits for room before it asks whether there is more hears of the end."""
    a, b, taken, other = world.pair(promoted=False)
    for words in ({"attached": 1}, {"rx_ready": 1}):
        for app in (a, b):
            app.send_control(**words)
        world.turns()
    assert taken.stream.writable()
    assert other.stream.writable()
    with pytest.raises(Misuse):
        taken.stream.commit(1)
    shut(a)
    world.turns()
    assert (b.word("tx_fin"), b.word("tx_fin_at")) == (1, 0)


def test_bytes_are_not_moved_before_the_other_end_knows_the_offset(world: World) -> None:
    """Whenever the protocol looks, as from a timer."""
    a, b, taken, other = world.pair(promoted=False)
    for words in ({"attached": 1}, {"rx_ready": 1}):
        for app in (a, b):
            app.send_control(**words)
        world.turns()
    a.send(b"early")
    a.send_control(tx_switch_offset=7, tx_switched=1)
    while world.hub.about_to_wait():
        taken.move(other.stream)
        assert b.word("tx_switched") or not b.end.avail
        world.hub.handle_turn()
    assert b.receive() == b"early"
