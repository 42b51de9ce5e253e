"""The engine over devices of the kernel: whoever has a queue pair, each byte comes once, and what is done is let go of.

The devices are played: see `fake_device`.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import pytest
from channel_app import App
from channel_app import Stream as PlainStream
from fake_device import RECEIVED_RDMA_WITH_IMM, WITH_IMM, FakeVerbs, fake_verbs
from remote_world import World, all_of, reset, settle
from selection import rotate

from sidestep import limits
from sidestep.errors import LimitReached
from sidestep.provider.carry.lending import Lending
from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.rdma.address import buffer_address
from sidestep.rdma.kernel.memory import KernelDomain
from sidestep.rdma.kernel.qp import KernelQueuePair
from sidestep.rdma.verbs import EventKind
from sidestep.rdma.work import Status
from sidestep.remote.link import SdpLink

BOTH: Final = (True, True)
ENGINES: Final = {"engines": BOTH, "engine-python": (True, False), "python-engine": (False, True)}
SIZES: Final = (1, 17, 100, 190, 221, 4000, 5000, 30_000, 65_536)
RETRIES: Final = int(Status.RETRY_EXCEEDED)
HOT_RING: Final = 256 << 10  # several messages of the largest size


@pytest.fixture
def device() -> Iterator[FakeVerbs]:
    """Its knobs."""
    found = fake_verbs()
    yield found
    found.hold()


def qp_of(end: RemoteRelay) -> KernelQueuePair:
    link = end.link
    assert isinstance(link, SdpLink)
    assert isinstance(link.stream.qp, KernelQueuePair)
    return link.stream.qp


def lent(world: World) -> tuple[App, App, RemoteRelay, RemoteRelay]:
    """A connection that engines have at both ends."""
    a, b, one, two = world.pair()
    lenders = world.one.hub.lending, world.two.hub.lending
    world.turns(lambda: all(lender and end in lender for lender, end in zip(lenders, (one, two), strict=True)))
    return a, b, one, two


def why(world: World, end: RemoteRelay) -> dict[str, int]:
    lender = world.one.hub.lending
    assert lender is not None
    found = lender.details(end)["given_back"]
    assert isinstance(found, dict)
    return found


def slots_in_use(*ends: RemoteRelay) -> int:
    slabs = [end.domain.send_slab() for end in map(qp_of, ends)]
    return sum(limits.VERBS_ENGINE_SLAB // (16 << 10) - slab.free for slab in slabs)


def goes_on_by_tcp(world: World, apps: tuple[App, App], sent: tuple[int, int]) -> None:
    """Both ends have lost the link, and of what each has sent every byte has come, or stands where it was sent from."""
    world.turns(lambda: bool(world.one.lost and world.two.lost))
    (one,), (two,) = world.one.lost, world.two.lost
    assert isinstance(one, RemoteRelay)
    assert isinstance(two, RemoteRelay)
    settle(one, two)
    world.rest()
    a, b = apps
    assert not reset(a) | reset(b)
    all_of(a, b, sent[0])
    all_of(b, a, sent[1])
    assert not world.one.faults + world.two.faults


class Stream(PlainStream):
    """One that tells where there is room."""

    def receive(self) -> None:
        super().receive()
        self.receiver.hint()


@pytest.mark.parametrize("engines", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("ring", [4096, 65536], ids=str)
@pytest.mark.parametrize("seed", rotate(range(8), ci=4))
def test_each_byte_arrives_whoever_carries_it(
    closing: ExitStack, device: FakeVerbs, engines: tuple[bool, bool], ring: int, seed: int
) -> None:
    """Connections change hands at any moment, with messages and acknowledgements under way."""
    dice = random.Random(seed)
    world = World(closing, engines=engines, wire="verbs")
    a, b, *ends = world.pair(rings=(ring, ring))
    streams = Stream(a, b, dice), Stream(b, a, dice)
    for _ in range(500):
        stream = dice.choice(streams)
        if dice.random() < 0.5:
            stream.send(dice.choice(SIZES))
        else:
            stream.receive()
        if dice.random() < 0.1:
            dice.choice(ends).reclaim()
        if dice.random() < 0.2:
            device.hold(deliveries=dice.random() < 0.3, acknowledgements=dice.random() < 0.5)
        for _ in range(dice.choice((0, 1, 3))):
            world.turn()
    device.hold()
    while any(stream.got < len(stream.sent) for stream in streams):
        world.turn()
        for stream in streams:
            stream.receive()
    for end in ends:
        end.reclaim()
    world.rest()
    if engines[0]:
        assert world.one.counters.get("engine_lent") > 1
    flows = [end.link.stream.connection._flow for end in ends]  # type: ignore[attr-defined]
    assert [flows[0].tx_mseq, flows[1].tx_mseq] == [flows[1].rx_mseq, flows[0].rx_mseq]
    assert [len(qp_of(end).receives) for end in ends] == [flow.posted for flow in flows]
    assert not slots_in_use(*ends)
    assert not world.one.faults + world.two.faults


@pytest.mark.usefixtures("device")
def test_a_queue_pair_that_was_joined_in_advance_is_lent_like_any(closing: ExitStack) -> None:
    world = World(closing, engines=BOTH, wire="verbs")
    pools = [host.keep_joined() for host in (world.one, world.two)]
    dice = random.Random(1)
    for count in range(1, 4):
        a, b, *ends = lent(world)
        for stream in (Stream(a, b, dice), Stream(b, a, dice)):
            stream.send(3000)
            while stream.got < len(stream.sent):
                world.turn()
                stream.receive()
        assert world.one.counters.get("pooled_queue_pair", "taken") == count - 1
        world.turns(lambda: [each.size for each in pools] == [count] * 2)  # noqa: B023
        for end in ends:
            end.reclaim()
    assert not world.one.faults + world.two.faults


def test_what_is_not_acknowledged_keeps_its_memory(closing: ExitStack, device: FakeVerbs) -> None:
    """Also when Python has the queue pair again: it is not sent from once more before it is done."""
    world = World(closing, engines=BOTH, wire="verbs")
    a, b, one, two = lent(world)
    device.hold(deliveries=True)
    a.send(b"1" * 3000)
    world.rest()
    assert slots_in_use(one) == 1
    one.reclaim()
    world.rest()
    assert slots_in_use(one) == 1
    lender = world.one.hub.lending
    assert lender is not None
    for _ in range(20):
        world.one.pass_time(0.01)
        world.turn()
    assert one not in lender  # what it has sent has to be done first
    device.hold()
    world.rest()
    assert b.receive() == b"1" * 3000
    assert not slots_in_use(one, two)
    world.turns(lambda: one in lender)


def test_short_of_slots_they_take_turns(closing: ExitStack, device: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several connections on one device, whose memory holds one message of the largest size."""
    monkeypatch.setattr(limits, "VERBS_ENGINE_SLAB", 64 << 10)
    world = World(closing, engines=BOTH, wire="verbs")
    dice = random.Random(1)
    pairs = [world.pair(rings=(65536, 65536)) for _ in range(4)]
    streams = [Stream(*apps, dice) for a, b, *_ in pairs for apps in ((a, b), (b, a))]
    for turn in range(300):
        device.hold(acknowledgements=turn % 3 == 0)
        for stream in streams:
            stream.send(3000)
            stream.receive()
        world.turn()
    device.hold()
    while any(stream.got < len(stream.sent) for stream in streams):
        world.turn()
        for stream in streams:
            stream.receive()
    assert min(len(stream.sent) for stream in streams) > 100_000
    world.rest()
    assert not slots_in_use(*(end for *_, one, two in pairs for end in (one, two)))
    assert not world.one.faults + world.two.faults


@pytest.mark.parametrize(
    ("opcode", "flags", "byte_len"),
    [(RECEIVED_RDMA_WITH_IMM, WITH_IMM, 32), (128, WITH_IMM, 32), (128, 8, 32), (128, 0, 1 << 30), (0, 0, 32)],
    ids=["write with immediate", "immediate", "invalidate", "too long", "no receive"],
)
def test_a_strange_completion_is_left_to_python(
    closing: ExitStack, device: FakeVerbs, opcode: int, flags: int, byte_len: int
) -> None:
    """Which finds no message there, and ends the link."""
    world = World(closing, engines=BOTH, wire="verbs")
    a, b, one, _ = lent(world)
    sent = a.send(b"x" * 3000)
    world.rest()
    device.receive(qp_of(one).number, opcode=opcode, flags=flags, byte_len=byte_len)
    world.turns(lambda: bool(why(world, one)))
    assert why(world, one) == {"message": 1}
    goes_on_by_tcp(world, (a, b), (sent, 0))


@pytest.mark.parametrize("what", ["lost", "flushed", "post_send", "post_recv", "poll_cq"])
@pytest.mark.parametrize("held", [False, True], ids=["", "under way"])
def test_what_fails_ends_the_link_with_everything_counted(
    closing: ExitStack, device: FakeVerbs, what: str, held: bool
) -> None:
    world = World(closing, engines=BOTH, wire="verbs")
    a, b, one, _ = lent(world)
    sent = a.send(b"1" * 1000)
    world.rest()
    device.hold(deliveries=held)
    sent += a.send(b"2" * 1000)
    world.rest()
    if what == "lost":
        device.break_off(qp_of(one).number)
    elif what == "flushed":
        device.receive(qp_of(one).number, status=5)
    else:
        device.fail(what, errno.EIO)
    a.hint()
    sent += a.send(b"3" * 1000)
    world.turn()
    device.hold()
    goes_on_by_tcp(world, (a, b), (sent, b.send(b"4" * 1000)))
    assert b.receive() == (b"1" * 1000 + b"2" * 1000 + b"3" * 1000)[: b.end.received]


@pytest.mark.parametrize("sends", [1, 40])
def test_a_device_that_takes_nothing_from_python_leaves_tcp_behind(
    closing: ExitStack, device: FakeVerbs, sends: int
) -> None:
    world = World(closing, engines=(False, False), wire="verbs")
    a, b, *_ = world.pair(rings=(HOT_RING, HOT_RING))
    world.rest()
    device.fail("post_send", errno.EIO)
    sent = sum(a.send(b"1" * 1000) for _ in range(sends))
    world.turn()
    goes_on_by_tcp(world, (a, b), (sent, 0))


def test_a_device_that_goes_takes_its_connections_back(closing: ExitStack, device: FakeVerbs) -> None:
    world = World(closing, engines=BOTH, wire="verbs")
    a, b, *_ = lent(world)
    sent = a.send(b"x" * 3000), b.send(b"y" * 100)
    world.rest()
    device.event(int(EventKind.DEVICE_FATAL))
    goes_on_by_tcp(world, (a, b), sent)
    assert world.one.counters.get("engine_given_back", "asked") == 1


@pytest.mark.parametrize("kind", [EventKind.QP_FATAL, EventKind.QP_ACCESS_ERROR], ids=lambda kind: kind.name)
def test_an_event_of_a_queue_pair_that_is_lent(closing: ExitStack, device: FakeVerbs, kind: EventKind) -> None:
    world = World(closing, engines=BOTH, wire="verbs")
    a, b, one, _ = lent(world)
    sent = a.send(b"x" * 3000), b.send(b"y" * 100)
    world.rest()
    device.event(int(kind), qp_of(one).number)
    goes_on_by_tcp(world, (a, b), sent)
    assert world.one.counters.get("engine_given_back", "asked") == 1


def test_rings_that_little_goes_out_from_are_not_pinned(closing: ExitStack, device: FakeVerbs) -> None:
    world = World(closing, engines=BOTH, wire="verbs")
    before = device.count("registered")
    lent(world)
    each = limits.REMOTE_RECEIVES * limits.REMOTE_RECEIVE_SIZE
    assert device.count("registered") - before <= 2 * (each + limits.VERBS_ENGINE_SLAB)


class Hot:
    """Connections of which one end sends so much that its ring is pinned, as soon as that is to be."""

    def __init__(self, closing: ExitStack, patch: pytest.MonkeyPatch, device: FakeVerbs) -> None:
        patch.setattr(limits, "VERBS_RING_BYTES", HOT_RING // 2)
        patch.setattr(limits, "VERBS_RING_RETRY_S", 0.0)
        self.world = World(closing, engines=BOTH, wire="verbs")
        self._device = device
        self._dice = random.Random(5)

    def pair(self) -> tuple[Stream, RemoteRelay, RemoteRelay]:
        a, b, one, two = self.world.pair(rings=(HOT_RING, HOT_RING))
        return Stream(a, b, self._dice), one, two

    def carry(self, stream: Stream, size: int) -> None:
        """So many bytes, all of which come."""
        until = len(stream.sent) + size
        while stream.got < until:
            stream.send(min(HOT_RING, until - len(stream.sent)))
            self.world.turn()
            stream.receive()
        self.world.rest()

    def heat(self, stream: Stream, end: RemoteRelay) -> None:
        """Sends until the ring is pinned."""
        for _ in range(50):
            if qp_of(end).details()["ring_pinned"] and end in self.lender:
                return
            self.carry(stream, HOT_RING)
        raise AssertionError("it is not pinned")

    @property
    def lender(self) -> Lending:
        assert self.world.one.hub.lending is not None
        return self.world.one.hub.lending


def rings_pinned(end: RemoteRelay) -> int:
    return qp_of(end).domain.rings.pinned_bytes // HOT_RING


@pytest.fixture
def hot(closing: ExitStack, device: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> Hot:
    return Hot(closing, monkeypatch, device)


def gathered(end: RemoteRelay) -> int:
    return qp_of(end).lending.gathered


def test_a_hot_ring_is_pinned_and_sent_from(hot: Hot, device: FakeVerbs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it rests."""
    before = device.count("registered")
    stream, one, two = hot.pair()
    hot.heat(stream, one)
    assert why(hot.world, one)["hot"] == 1
    assert device.count("registered") > before
    copied, there = gathered(one), len(stream.sent)
    hot.carry(stream, 4 * HOT_RING)
    assert gathered(one) - copied > (len(stream.sent) - there) / 2
    assert qp_of(one).details()["bytes_gathered"] == gathered(one)
    assert not slots_in_use(one, two)
    ring = one.ring.memory
    assert qp_of(one).domain.find(ring, buffer_address(ring)) is None, "Python would not compare"
    held = device.count("registered")
    monkeypatch.setattr(limits, "VERBS_RING_REST_S", 0.01)
    hot.world.turns(lambda: not rings_pinned(one))
    assert device.count("registered") == held - HOT_RING
    hot.carry(stream, HOT_RING)
    assert not hot.world.one.faults + hot.world.two.faults


def test_pages_that_were_given_back_are_not_sent_from(hot: Hot) -> None:
    """It is pinned anew, once so much goes out again."""
    stream, one, _ = hot.pair()
    hot.heat(stream, one)
    for times in range(1, 4):
        before = gathered(one)
        stream.sender.trim()
        hot.carry(stream, HOT_RING // 3)
        assert gathered(one) == before
        hot.world.turns(lambda: one in hot.lender)
        while gathered(one) == before:
            hot.carry(stream, HOT_RING)
        assert why(hot.world, one)["hot"] == 1 + times


def test_who_does_not_count_what_it_gives_back_spoils_what_it_sends(hot: Hot) -> None:
    """Shows that the device is played as one that pins: the check of the stream sees it."""
    stream, one, _ = hot.pair()
    hot.heat(stream, one)
    stream.sender.trim(counted=False)
    with pytest.raises(AssertionError):
        hot.carry(stream, HOT_RING)


@pytest.mark.parametrize("pages", [0, 1, 7], ids=["an older shim", "odd", "killed amid"])
def test_a_ring_whose_pages_are_not_known_is_not_pinned(hot: Hot, pages: int) -> None:
    stream, one, _ = hot.pair()
    stream.sender.poke("producer[0].pages", pages)
    hot.carry(stream, 8 * HOT_RING)
    assert not rings_pinned(one)
    assert "hot" not in why(hot.world, one)


def test_what_is_pinned_is_bounded(hot: Hot, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that has rested longest makes room, and one that has not makes none."""
    monkeypatch.setattr(limits, "VERBS_RINGS_BYTES", 2 * HOT_RING)
    monkeypatch.setattr(limits, "VERBS_RING_REST_S", 1e6)
    monkeypatch.setattr(limits, "VERBS_RING_RETRY_S", 1e6)
    pairs = [hot.pair() for _ in range(3)]
    for stream, one, _ in pairs[:2]:
        hot.heat(stream, one)
    stream, one, _ = pairs[2]
    hot.carry(stream, 8 * HOT_RING)
    assert rings_pinned(one) == 2
    assert not gathered(one)
    hot.carry(stream, 8 * HOT_RING)
    assert why(hot.world, one)["hot"] == 1, "it is not asked again at once"
    lendings = [qp_of(each).lending for _, each, _ in pairs]
    one.reclaim()
    engine = lendings[2]._engine
    assert engine is not None
    engine.cool(0)
    pinned = qp_of(one).domain.rings._pinned
    pinned[lendings[1]].moved_at -= 1e6
    while not gathered(one):
        hot.carry(stream, HOT_RING)
    assert set(pinned) == {lendings[0], lendings[2]}


def test_without_memory_for_it_a_ring_is_copied(hot: Hot, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise LimitReached("RLIMIT_MEMLOCK")

    monkeypatch.setattr(KernelDomain, "pin", no_memory)
    monkeypatch.setattr(limits, "VERBS_RING_RETRY_S", 1e6)
    stream, one, _ = hot.pair()
    hot.carry(stream, 8 * HOT_RING)
    assert why(hot.world, one)["hot"] == 1
    assert not rings_pinned(one)


@pytest.mark.parametrize("how", ["deliveries", "acknowledgements"])
def test_what_the_device_may_still_read_stays_pinned(
    hot: Hot, device: FakeVerbs, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Also when Python has the queue pair again, and the ring has rested."""
    stream, one, two = hot.pair()
    hot.heat(stream, one)
    device.hold(**{how: True})
    before = gathered(one)
    stream.send(HOT_RING // 2)
    hot.world.rest()
    assert gathered(one) > before
    one.reclaim()
    monkeypatch.setattr(limits, "VERBS_RING_REST_S", 0.01)
    for _ in range(10):
        hot.world.turn()
    assert rings_pinned(one)
    device.hold()
    hot.world.turns(lambda: not rings_pinned(one))
    while stream.got < len(stream.sent):
        hot.world.turn()
        stream.receive()
    hot.world.rest()
    assert not slots_in_use(one, two)


@pytest.mark.parametrize("held", [False, True], ids=["", "under way"])
def test_a_link_that_breaks_under_a_hot_ring(hot: Hot, device: FakeVerbs, held: bool) -> None:
    stream, one, _ = hot.pair()
    hot.heat(stream, one)
    rings = qp_of(one).domain.rings
    device.hold(deliveries=held)
    stream.send(HOT_RING // 2)
    hot.world.turn()
    device.break_off(qp_of(one).number)
    stream.send(1000)
    hot.world.turn()
    device.hold()
    goes_on_by_tcp(hot.world, (stream.sender, stream.receiver), (len(stream.sent), 0))
    stream.receive()
    hot.world.turns(lambda: not rings.pinned_bytes)


@pytest.mark.parametrize("seed", rotate(range(6), test=2, ci=3))
def test_each_byte_arrives_from_rings_that_come_and_go(
    closing: ExitStack, device: FakeVerbs, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Pages are given back, rings are pinned and rest, and connections change hands at any moment."""
    monkeypatch.setattr(limits, "VERBS_RING_BYTES", 30_000)
    monkeypatch.setattr(limits, "VERBS_RINGS_BYTES", (1 + seed % 2) * HOT_RING)
    monkeypatch.setattr(limits, "VERBS_RING_RETRY_S", 0.0)
    monkeypatch.setattr(limits, "VERBS_RING_REST_S", 1e6)
    dice = random.Random(seed)
    world = World(closing, engines=BOTH, wire="verbs")
    a, b, *ends = world.pair(rings=(HOT_RING, HOT_RING))
    streams = Stream(a, b, dice), Stream(b, a, dice)
    trims = 0
    for _ in range(600):
        stream = dice.choice(streams)
        if dice.random() < 0.6:
            stream.send(dice.choice((17, 5000, 30_000, HOT_RING)))
        else:
            stream.receive()
        if dice.random() < 0.3 and not stream.sender.end.unread:
            stream.sender.trim()
            trims += 1
        if dice.random() < 0.02:
            dice.choice(ends).reclaim()
        if dice.random() < 0.02:
            rings = qp_of(dice.choice(ends)).domain.rings
            for lending in list(rings._pinned):
                rings._unpin(lending)
        if dice.random() < 0.2:
            device.hold(deliveries=dice.random() < 0.3, acknowledgements=dice.random() < 0.5)
        for host in (world.one, world.two):
            host.pass_time(0.02)  # so that what was given back is lent again
        for _ in range(dice.choice((0, 1, 3))):
            world.turn()
    device.hold()
    while any(stream.got < len(stream.sent) for stream in streams):
        world.turn()
        for stream in streams:
            stream.receive()
    for end in ends:
        end.reclaim()
    world.rest()
    assert trims > 1
    assert sum(map(gathered, ends)) > 0
    assert not slots_in_use(*ends)
    assert not world.one.faults + world.two.faults
