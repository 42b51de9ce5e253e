"""Bytes, ends, resets and urgent bytes through a pump, between a real TCP connection and SDP over software RNICs."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest
from common import pattern
from hypothesis import given, settings
from hypothesis import strategies as st
from pump_world import World

from sidestep import limits
from sidestep.errors import Misuse
from sidestep.remote.inbound import BY_CARRIER
from sidestep.remote.pump import Pump
from sidestep.sdp.settings import Carrier

CARRIERS = list(Carrier)


@pytest.fixture(params=[(carrier, active) for carrier in CARRIERS for active in (False, True)],
                ids=lambda value: f"{value[0].value}-{'connects' if value[1] else 'accepts'}")  # fmt: skip
def world(request: pytest.FixtureRequest, closing: ExitStack) -> World:
    carrier, active = request.param
    return World(closing, carrier=carrier, active=active)


@pytest.mark.parametrize("where", ["_read", "_received", "_write", "_sent"])
def test_a_fault_stays_with_its_connection(world: World, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Others share the loop and what tells streams: an exception must not get there."""
    assert world.pump is not None
    world.sdp.send(b"1")
    world.until(lambda: bytes(world.tcp.received) == b"1")

    def fail(*_: object) -> None:
        raise ZeroDivisionError(where)

    monkeypatch.setattr(world.pump, where, fail)
    world.sdp.send(b"2")
    world.tcp.send(b"2")
    world.until(lambda: world.pump is not None and world.pump.over and world.sdp.closed)
    assert f"ZeroDivisionError: {where}" in world.pump.why


def assert_nothing_left(world: World) -> None:
    assert world.pump is not None
    world.until(lambda: world.pump is not None and world.pump.over and world.sdp.closed)
    assert (world.overs, world.pieces.taken, world.pump.held) == ([world.pump], 0, 0)
    assert world.near.stack.streams == {}
    assert world.near.stack.buffers.lent == 0


def test_bytes_both_ways_in_random_pieces_and_both_half_closes(world: World) -> None:
    chance = random.Random(5)
    sent = {"tcp": b"", "sdp": b""}
    for number in range(60):
        data = pattern(chance.choice([1, 17, 1000, 20_000, 300_000]), number)
        if chance.random() < 0.5:
            world.tcp.send(data)
            sent["tcp"] += data
        else:
            world.sdp.send(data)
            sent["sdp"] += data
        for _ in range(chance.randrange(4)):
            world.turn(0)
    world.tcp.shut()
    world.until(lambda: world.sdp.ended)
    assert bytes(world.sdp.received) == sent["tcp"]
    world.sdp.send(last := pattern(5000, 99))  # the other direction goes on
    assert world.sdp.stream is not None
    world.sdp.stream.shutdown_write()
    world.until(lambda: world.tcp.ended)
    assert bytes(world.tcp.received) == sent["sdp"] + last
    assert world.pump is not None
    assert (world.pump.to_sdp, world.pump.to_tcp) == (len(sent["tcp"]), len(sent["sdp"] + last))
    assert world.pump.why == ""
    assert not world.sdp.reset
    assert_nothing_left(world)


def test_the_sdp_end_ends_first(world: World) -> None:
    assert world.sdp.stream is not None
    world.sdp.send(b"question")
    world.sdp.stream.shutdown_write()
    world.until(lambda: world.tcp.ended)
    assert bytes(world.tcp.received) == b"question"
    world.tcp.send(answer := pattern(400_000, 1))
    world.until(lambda: len(world.sdp.received) == len(answer))
    assert not world.sdp.ended
    world.tcp.sock.close()
    world.tcp.ended = True
    world.until(lambda: world.sdp.ended)
    assert bytes(world.sdp.received) == answer
    assert not world.sdp.reset
    assert_nothing_left(world)


def test_a_reader_that_does_not_read_stops_the_tcp_end(closing: ExitStack) -> None:
    world = World(closing, buffers=1 << 16)
    world.sdp.reading = False
    world.tcp.send(data := pattern(16 << 20, 2))
    world.rest()
    assert world.pump is not None
    assert world.pump.held <= limits.PUMP_PIECES_MAX
    assert world.pump.to_sdp < 4 << 20
    assert len(world.tcp.unsent) > 8 << 20
    world.sdp.reading = True
    world.sdp.read()
    world.until(lambda: len(world.sdp.received) == len(data))
    assert bytes(world.sdp.received) == data


def test_a_reader_that_does_not_read_stops_the_sdp_end(closing: ExitStack) -> None:
    world = World(closing, buffers=1 << 16)
    world.tcp.reading = False
    data = pattern(16 << 20, 3)
    for start in range(0, len(data), 1 << 18):
        world.sdp.send(data[start : start + (1 << 18)])
    world.rest()
    assert world.pump is not None
    assert world.pump.held <= limits.PUMP_PIECES_MAX
    assert world.pump.to_tcp < 4 << 20
    assert world.sdp.unsent > 8
    world.tcp.reading = True
    world.until(lambda: len(world.tcp.received) == len(data))
    assert bytes(world.tcp.received) == data


def test_it_goes_on_when_all_that_waited_is_taken_at_once(closing: ExitStack) -> None:
    world = World(closing, buffers=1 << 20)
    world.tcp.reading = False
    data = pattern(16 << 20, 3)
    for start in range(0, len(data), 1 << 18):
        world.sdp.send(data[start : start + (1 << 18)])
    world.rest()
    world.tcp.reading = True
    while world.tcp.move():
        """All that the kernel has."""
    world.until(lambda: len(world.tcp.received) == len(data))
    assert bytes(world.tcp.received) == data


def test_all_that_came_before_the_end_is_written_though_the_stream_is_over(closing: ExitStack) -> None:
    """Both ends have ended, SDP is taken down, and TCP's reader has not read yet."""
    world = World(closing, buffers=1 << 16)
    world.tcp.reading = False
    world.tcp.shut()
    data = pattern(600_000, 4)
    world.sdp.send(data)
    assert world.sdp.stream is not None
    world.sdp.stream.shutdown_write()
    world.rest()
    world.tcp.reading = True
    world.until(lambda: world.tcp.ended)
    assert bytes(world.tcp.received) == data
    assert_nothing_left(world)


def test_a_reset_of_tcp_resets_the_stream(world: World) -> None:
    world.sdp.send(b"x" * 100_000)
    world.tcp.send(b"y" * 1000)
    world.rest()
    world.tcp.abort()
    world.until(lambda: world.sdp.closed)
    assert world.sdp.reset
    assert not world.sdp.ended
    assert_nothing_left(world)
    assert world.pump is not None
    assert world.pump.why.startswith("TCP: ")


def test_a_reset_of_tcp_is_seen_while_nothing_is_read(closing: ExitStack) -> None:
    world = World(closing, buffers=1 << 16)
    world.sdp.reading = False
    world.tcp.send(pattern(8 << 20, 2))
    world.rest()
    world.tcp.abort()
    world.until(lambda: world.sdp.closed)
    assert world.sdp.reset
    assert_nothing_left(world)


def test_a_reset_of_the_stream_resets_tcp(world: World) -> None:
    world.tcp.send(b"x" * 100_000)
    world.sdp.send(b"y" * 1000)
    world.rest()
    assert world.sdp.stream is not None
    world.sdp.stream.abort()
    world.until(lambda: world.tcp.reset)
    assert not world.tcp.ended
    assert_nothing_left(world)
    assert world.pump is not None
    assert world.pump.why.startswith("SDP: ")


def test_a_close_with_unread_bytes_is_a_reset_at_the_other_end(world: World) -> None:
    world.sdp.reading = False
    world.tcp.send(b"nobody reads this")
    world.rest()
    assert world.sdp.stream is not None
    world.sdp.stream.close()
    world.until(lambda: world.tcp.reset)
    assert_nothing_left(world)


def test_urgent_bytes_keep_their_place(closing: ExitStack) -> None:
    world = World(closing)
    for _ in range(3):
        world.tcp.send(b"before")
        world.rest()
        world.tcp.sock.send(b"!", 1)  # MSG_OOB
        world.rest()
        world.tcp.send(b"after")
        world.rest()
        world.sdp.send(b"BEFORE")
        world.sdp.send(b"?", urgent=True)
        world.rest()
        world.sdp.send(b"AFTER")
        world.rest()
    assert bytes(world.sdp.received) == b"before!after" * 3
    assert world.sdp.marks == [6, 18, 30]
    assert bytes(world.tcp.received) == b"BEFORE?AFTER" * 3
    assert world.tcp.marks == [6, 18, 30]


def test_an_urgent_byte_behind_bytes_that_wait_keeps_its_place(closing: ExitStack) -> None:
    world = World(closing, buffers=1 << 16)
    world.tcp.reading = world.sdp.reading = False
    data = pattern(300_000, 6)
    world.sdp.send(data)
    world.sdp.send(b"?", urgent=True)
    world.sdp.send(b"end")
    world.tcp.send(data)
    while world.tcp.unsent:
        world.turn()
    world.tcp.sock.send(b"!", 1)
    world.tcp.send(b"end")
    world.rest()
    world.tcp.reading = world.sdp.reading = True
    world.sdp.read()
    world.until(lambda: len(world.sdp.received) == len(world.tcp.received) == len(data) + 4)
    assert (bytes(world.sdp.received), world.sdp.marks) == (data + b"!end", [len(data)])
    assert (bytes(world.tcp.received), world.tcp.marks) == (data + b"?end", [len(data)])


def test_nothing_is_held_and_nothing_happens_while_it_idles(world: World) -> None:
    world.tcp.send(b"a")
    world.sdp.send(b"b")
    world.until(lambda: bool(world.sdp.received and world.tcp.received))
    world.rest()
    assert world.pump is not None
    assert (world.pump.held, world.pieces.taken) == (0, 0)
    assert not world.loop.turn(0)


def test_the_end_of_both_directions_is_not_told_over_and_over(closing: ExitStack) -> None:
    """TCP's kernel tells EPOLLHUP all the time once both directions have ended, while bytes wait for SDP."""
    world = World(closing)
    world.sdp.reading = False
    data = pattern(1 << 20, 8)
    assert world.sdp.stream is not None
    world.sdp.stream.shutdown_write()
    world.until(lambda: world.tcp.ended)
    world.tcp.send(data)
    world.tcp.shut()
    world.rest()
    assert not world.tcp.unsent
    assert world.pump is not None
    assert world.pump.to_sdp < len(data)
    world.sdp.reading = True
    world.sdp.read()
    world.until(lambda: world.sdp.ended)
    assert bytes(world.sdp.received) == data
    assert_nothing_left(world)


def test_a_pump_wants_urgent_bytes_in_line(closing: ExitStack) -> None:
    world = World(closing)
    assert world.sdp.stream is not None
    stream = world.sdp.stream
    stream.connection._settings = type(BY_CARRIER[Carrier.IWARP])()
    with pytest.raises(Misuse):
        Pump(world.loop, stream, world.tcp.sock, world.pieces, print)


STEPS = st.one_of(
    st.tuples(st.sampled_from(["tcp send", "sdp send"]), st.integers(1, 200_000)),
    st.tuples(st.sampled_from(["tcp shut", "sdp shut", "tcp reads", "sdp reads"]), st.just(0)),
    st.tuples(st.just("turn"), st.integers(1, 5)),
)


class Script:
    """What two programs do, and what must come of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sent = {"tcp": b"", "sdp": b""}
        self.shut: set[str] = set()

    def do(self, step: str, count: int) -> None:
        world = self.world
        side, _, what = step.partition(" ")
        if step == "turn":
            for _ in range(count):
                world.turn(0)
        elif what == "send" and side not in self.shut:
            data = pattern(count, len(self.sent[side]))
            self.sent[side] += data
            (world.tcp if side == "tcp" else world.sdp).send(data)
        elif what == "shut" and side not in self.shut:
            self.shut.add(side)
            if side == "tcp":
                world.tcp.shut()
            else:
                assert world.sdp.stream is not None
                world.sdp.stream.shutdown_write()
        elif step == "tcp reads":
            world.tcp.reading = not world.tcp.reading
        elif step == "sdp reads":
            world.sdp.reading = not world.sdp.reading
            world.sdp.read()

    def everybody_reads(self, *, sdp: bool = True) -> None:
        self.world.tcp.reading = True
        self.world.sdp.reading = sdp
        if self.world.sdp.stream is not None:
            self.world.sdp.read()


@settings(max_examples=40)
@given(steps=st.lists(STEPS, max_size=25), active=st.booleans())
def test_whatever_they_do_every_byte_arrives_and_both_ends_end(steps: list[tuple[str, int]], active: bool) -> None:
    with ExitStack() as closing:
        world = World(closing, active=active, buffers=1 << 16)
        script = Script(world)
        for step, count in steps:
            script.do(step, count)
        script.everybody_reads()
        for side in ("tcp", "sdp"):
            script.do(f"{side} shut", 0)
        world.until(lambda: world.tcp.ended and world.sdp.ended)
        assert bytes(world.tcp.received) == script.sent["sdp"]
        assert bytes(world.sdp.received) == script.sent["tcp"]
        assert (world.tcp.reset, world.sdp.reset) == (False, False)
        assert_nothing_left(world)


@settings(max_examples=40)
@given(steps=st.lists(STEPS, max_size=15), active=st.booleans(), who=st.sampled_from(["tcp", "sdp", "pump"]))
def test_whatever_they_did_a_reset_ends_all(steps: list[tuple[str, int]], active: bool, who: str) -> None:
    with ExitStack() as closing:
        world = World(closing, active=active, buffers=1 << 16)
        script = Script(world)
        for step, count in steps:
            script.do(step, count)
        assert world.sdp.stream is not None
        assert world.pump is not None
        if who == "tcp":
            world.tcp.abort()
        elif who == "sdp":
            world.sdp.stream.abort()
        else:
            world.pump.abort("wanted")
        script.everybody_reads(sdp=who != "sdp")  # who has ended it itself must not read any more
        if who != "tcp":
            world.until(lambda: world.tcp.reset or world.tcp.ended)
        elif script.shut == {"sdp"} or not script.shut:
            world.until(lambda: world.sdp.closed)
        else:
            script.do("sdp shut", 0)
        assert script.sent["sdp"].startswith(bytes(world.tcp.received))
        assert script.sent["tcp"].startswith(bytes(world.sdp.received))
        world.sdp.reading = False
        world.sdp.stream.close()
        world.tcp.sock.close()
        assert_nothing_left(world)
