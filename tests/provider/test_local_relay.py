"""Both ends of a connection at one provider, against an application that follows no rules, or only some.

Both applications are played word by word. The protocol is one that the test holds in its hands: a queue each way, in a
provider that runs in this very thread.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from channel_app import RING, App
from queue_link import QueueLink, joined
from remote_world import HubWorld, all_of, close, go_back, recall, reset, shut

from sidestep import limits
from sidestep.errors import Unavailable
from sidestep.native import _channel
from sidestep.native.layout import Acked, Back, Notice
from sidestep.provider import memory
from sidestep.provider.carry.local_relay import enter


class World(HubWorld):
    """A hub, and pairs of applications through it."""

    def __init__(self, stack: ExitStack, relays_max: int = 8) -> None:
        super().__init__(stack, relays_max)
        self.stack = stack
        self.calls: list[Callable[[], object]] = []  # of links, in the next turn

    def pair(self, *, promoted: bool = True) -> tuple[App, App, QueueLink, QueueLink]:
        apps = App(0), App(1)
        for app in apps:
            self.stack.callback(app.close)
        links = QueueLink(self.calls_later), QueueLink(self.calls_later)
        ends = apps[0].given(), apps[1].given()
        joined(enter(self.hub, ends, links, protocol="test", on_drop=self._on_drop), links)
        if promoted:
            for words in ({"attached": 1}, {"rx_ready": 1}, {"tx_switch_offset": 7, "tx_switched": 1}):
                for app in apps:
                    app.send_control(**words)
                self.turns()
            assert [app.word("tx_switch_offset") for app in apps] == [7, 7]
        return *apps, *links

    def calls_later(self, call: Callable[[], object]) -> None:
        self.calls.append(call)

    def turn(self) -> bool:
        """A turn of the loop, and then of the links; whether there was anything to do."""
        busy = self.hub.about_to_wait() or bool(self.calls)
        self.hub.handle_turn()
        calls, self.calls = self.calls, []
        for call in calls:
            self.hub_loop.call(call)
        return busy

    def turns(self, most: int = 1000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            if not self.turn():
                return


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
    a, b, *links = world.pair()
    dice = random.Random(5)
    for sender, receiver, link in ((a, b, links[0]), (b, a, links[1])):
        data, sent, got = dice.randbytes(100_000), 0, b""
        while len(got) < len(data):
            sent += sender.send(data[sent : sent + dice.randrange(1, 6000)])
            link.pace = dice.randrange(1, 3000)
            world.turns()
            got += receiver.receive()
        assert got == data
    assert not world.faults


def test_an_idle_pair_asks_for_no_turn(world: World) -> None:
    world.pair()
    world.turns()
    assert not world.turn()
    assert not world.turn()


def test_one_busy_pair_takes_turns_with_others(world: World) -> None:
    busy_a, busy_b, busy, _ = world.pair()
    quiet_a, quiet_b, _, _ = world.pair()
    busy.pace = 1
    busy_a.send(bytes(RING))
    world.turn()
    quiet_a.send(b"short")
    before = busy_b.end.avail
    for _ in range(3):
        world.turn()
    assert quiet_b.receive() == b"short"
    assert busy_b.end.avail - before == 3  # it goes on, once a turn


def test_the_end_is_told_behind_the_last_byte(world: World) -> None:
    a, b, link, _ = world.pair()
    link.pace = 10
    a.send(bytes(1000))
    a.send_control(shut_wr=1)
    b.end.publish("hint", 0)
    b.poke(f"side[{1 - b.provider_side}].fin_seen", 1)  # its FIN overtakes the bytes
    seen = []
    while world.turn():
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
    app, *links = world.pair()
    ended = list(map(weakref.ref, world.hub))
    for one in list(world.hub):
        world.hub.drop(one)
    world.turns()
    del app, links, one
    world.pass_time(limits.RELAY_TIDY_S)
    assert [one() for one in ended] == [None, None]


def test_a_protocol_that_fails_loses_nothing(world: World) -> None:
    a, b, link, other = world.pair()
    link.pace = 100
    a.send(bytes(range(200)))
    world.turn()
    link.later = other.later = lambda _call: None
    world.turns()
    a.send(bytes(range(100)))
    world.hub.cut_off("test")
    world.turns()
    assert b.receive() == bytes(range(200)) + bytes(range(100))
    assert all(app.word("notice") & Notice.DEMOTE for app in (a, b))
    assert (a.word("rx_frozen"), b.word("tx_back_at")) == (300, 300)  # what follows goes by TCP
    assert not reset(a) | reset(b)
    assert (len(world.hub), world.counters.get("relay_left")) == (0, 1)


@pytest.mark.parametrize("how", [shut, close], ids=["shut", "closed"])
def test_a_protocol_that_fails_loses_nothing_of_an_end_that_has_gone(
    world: World, how: Callable[[App], object]
) -> None:
    """Nobody sends it again."""
    a, b, link, _ = world.pair()
    link.later = lambda _call: None
    a.send(bytes(range(200)))
    how(a)
    world.turns()
    world.hub.cut_off("test")
    assert b.receive() == bytes(range(200))
    assert b.word("tx_back_at") == 200  # the end comes by TCP
    assert not reset(a) | reset(b)


@pytest.mark.parametrize("seed", range(100))
def test_a_protocol_that_fails_while_words_are_under_way(world: World, seed: int) -> None:
    """Promotion, return, recall and end: none of them needs the words that it has swallowed."""
    dice = random.Random(seed)
    a, b, *links = world.pair(promoted=False)
    ways = Checked(a, b, dice), Checked(b, a, dice)
    for words in ({"attached": 1}, {"rx_ready": 1}, {"tx_switch_offset": 7, "tx_switched": 1}):
        for app in (a, b):
            if "tx_switched" not in words or app.word("rx_ready"):
                app.send_control(**words)
        for link in links:
            if dice.random() < 0.2:
                link.later = lambda _call: None
        world.turns()
    for way in ways:
        if way.sender.word("rx_ready"):
            deeds: list[Callable[[], object]] = [way.send, way.read, partial(way.end, go_back), partial(way.end, shut)]
            for deed in dice.sample(deeds, 2):
                deed()
    for link in links:
        if dice.random() < 0.5:
            link.later = lambda _call: None
    world.turns()
    if dice.random() < 0.3:
        world.hub.leave("test")
        world.turns(dice.randrange(4))
    world.hub.cut_off("test")
    world.turns()
    assert (len(world.hub), world.hub.finishing, world.faults) == (0, {}, [])
    assert not reset(a) | reset(b)
    for way in ways:
        way.check()


@pytest.mark.parametrize("what", ["send", "send_control"])
def test_a_link_that_raises_is_called_no_more(world: World, what: str) -> None:
    a, b, link, _ = world.pair()
    a.send(b"first")
    world.turns()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    setattr(link, what, fail)
    a.send(b", second")
    go_back(a)
    world.turns()
    assert [type(fault) for fault in world.faults] == [ZeroDivisionError]
    assert b.receive() == b"first, second"
    assert (len(world.hub), world.hub.finishing) == (0, {})
    assert not reset(a) | reset(b)


def test_only_the_protocol_that_fails_is_cut_off(world: World) -> None:
    a, b, _, _ = world.pair()
    world.hub.cut_off("another")
    a.send(b"goes on")
    world.turns()
    assert b.receive() == b"goes on"


def test_counts_that_are_impossible_when_a_protocol_fails(world: World) -> None:
    a, b, link, _ = world.pair()
    link.later = lambda _call: None
    a.send(bytes(100))
    world.turns()
    a.poke(f"producer[{1 - a.provider_side}].tail", 50)
    world.hub.cut_off("test")
    assert reset(a)
    assert reset(b)
    assert len(world.hub) == 0


def test_a_protocol_may_carry_bytes_between_two_turns(world: World) -> None:
    a, b, link, _ = world.pair()
    link.later = lambda _call: None
    a.send(bytes(RING))
    world.turns()
    link.deliver()  # as from a timer
    world.turns()
    asked = _channel.HEADER_WORDS[f"producer[{b.provider_side}].want_space"][0]
    assert int.from_bytes(os.pread(b.segment, 4, asked), "little") == 1  # else nobody would tell us that it has read
    b.receive()
    world.turns()
    assert a.end.space == RING


def test_there_is_a_bound(closing: ExitStack) -> None:
    world = World(closing, relays_max=1)
    world.pair()
    with pytest.raises(Unavailable, match="1 connections already go through"):
        world.pair()


def test_who_never_attaches_is_dropped(world: World) -> None:
    a, *_ = world.pair(promoted=False)
    a.send_control(attached=1)
    world.turns()
    world.pass_time(60)
    world.turns()
    assert world.counters.get("relay_dropped", "not_attached") == 1
    assert len(world.hub) == 0
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
    assert not world.counters.get("relay_reset", "far")
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
    ends, links = (apps[0].given(), apps[1].given()), (QueueLink(), QueueLink())
    with pytest.raises(Unavailable, match="cannot name"):
        enter(world.hub, ends, links, protocol="test", on_drop=lambda: None)
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
    a, _, link, _ = world.pair()
    link.later = lambda _call: None
    a.send(b"kept")
    world.turns()
    _, view = link.queue[-1]
    world.hub.close()
    assert isinstance(view, memoryview)
    assert bytes(view) == b"kept"  # the mapping stays as long as somebody looks at it


# ---- leaving ----


def in_the_midst(world: World, count: int, pace: int) -> tuple[App, App, QueueLink]:
    """So many bytes are sent, and the protocol has moved some of them."""
    a, b, link, _ = world.pair()
    link.pace = pace
    a.send(bytes(range(256)) * (count // 256) + bytes(count % 256))
    for _ in range(3):
        world.turn()
    assert 0 < b.end.avail < count
    return a, b, link


def test_who_leaves_needs_no_call_of_an_application(world: World) -> None:
    a, b, _ = in_the_midst(world, RING, 100)
    b.send(bytes(10))
    world.hub.leave()
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
    world.turn()
    assert (b.word("tx_fin"), b.word("tx_back")) == (0, 0)
    world.hub.leave()
    world.turns()
    assert (b.end.avail, b.word("tx_back_at" if how is go_back else "tx_fin_at")) == (1000, 1000)
    assert not reset(a) | reset(b)


def test_a_recall_ends_what_the_protocol_has(world: World) -> None:
    a, b, link = in_the_midst(world, 1000, 10)
    b.end.read(5)
    assert recall(b) == 5
    world.turns()
    assert (a.word("rx_frozen"), a.word("notice")) == (5, Notice.RECALL | Notice.DEMOTE)
    assert b.word("acked") & Acked.REQUEST
    assert not link.queue
    assert a.end.unread >= 995


@pytest.mark.parametrize("killed", [False, True])
def test_a_recall_of_what_will_not_be_sent_again_is_a_reset(world: World, killed: bool) -> None:
    a, b, _ = in_the_midst(world, 1000, 10)
    if killed:
        a.connected = False
        b.poke(f"side[{1 - b.provider_side}].fin_seen", 1)
    else:
        shut(a)
    world.turn()
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


@pytest.mark.parametrize("seed", range(200))
def test_no_byte_is_lost_whatever_ends_when(world: World, seed: int) -> None:
    dice = random.Random(seed)
    a, b, *links = world.pair()
    ways = Checked(a, b, dice), Checked(b, a, dice)
    for _ in range(dice.randrange(5, 60)):
        for link in links:
            link.pace = dice.randrange(1, 2000)
        for way in ways:
            dice.choice((way.send, way.send, way.read, lambda: None))()
            if dice.random() < 0.03:
                way.end(dice.choice((go_back, shut)))
        for _ in range(dice.randrange(4)):
            world.turn()
    going = dice.randrange(5)
    if going == 1:
        world.hub.leave()
    elif going == 2:
        world.hub.leave("test")
    elif going == 3:
        world.hub.cut_off("test")
    for way in ways:  # it may be in the midst of things, and have heard of nothing yet
        for deed in (way.read, way.send, partial(way.end, dice.choice((go_back, shut)))):
            if dice.random() < 0.5:
                deed()
    for _ in range(30):
        for link in links:
            link.pace = 1 + 3 * dice.randrange(1000)
        for way in ways:
            way.got += way.receiver.receive()
        world.turns()
    if going == 4:
        world.hub.leave()
        world.turns()
    assert world.hub.settled() or not going
    assert not reset(a) | reset(b)
    for way in ways:
        way.check()
        assert way.receiver.word("tx_fin") or way.receiver.word("tx_back") or way.got == way.sent
    assert not world.faults


def test_who_is_left_alone_is_told(world: World) -> None:
    a, b, _ = in_the_midst(world, 1000, 10)
    world.hub.drop(next(iter(world.hub)))
    world.turns()
    assert len(world.hub) == 0
    assert world.counters.get("relay_reset", "link_lost") == 1
    assert reset(a) | reset(b)


def test_a_direction_that_never_began_has_an_end(world: World) -> None:
    a, b, _, _ = world.pair(promoted=False)
    for words in ({"attached": 1}, {"rx_ready": 1}):
        for app in (a, b):
            app.send_control(**words)
        world.turns()
    shut(a)
    world.turns()
    assert (b.word("tx_fin"), b.word("tx_fin_at")) == (1, 0)


def test_bytes_do_not_come_before_the_other_end_knows_the_offset(world: World) -> None:
    a, b, _, _ = world.pair(promoted=False)
    for words in ({"attached": 1}, {"rx_ready": 1}):
        for app in (a, b):
            app.send_control(**words)
        world.turns()
    a.send(b"early")
    a.send_control(tx_switch_offset=7, tx_switched=1)
    while world.turn():
        assert b.word("tx_switched") or not b.end.avail
    assert b.receive() == b"early"
