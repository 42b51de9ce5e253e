"""Corners of the endpoint and its faces: what a peer can pile up, and what is kept of connections that are over."""

from __future__ import annotations

from functools import partial

import pytest
from common import pattern
from endpoint_world import (
    LENIENT,
    PORT,
    RIGHT,
    End,
    World,
    addresses,
    create_connection,
    create_server,
    done,
    join,
    read_zcopy,
    socket_on,
    take,
)

from sidestep.api.sockets import MSG_DONTWAIT, MSG_OOB
from sidestep.errors import PeerViolation
from sidestep.rdma.verbs import DeviceAttributes, QueuePair
from sidestep.rdma.work import RKey, Send, SendRequest
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent
from sidestep.sdp.settings import SdpSettings
from sidestep.sdp.stack import stack_on
from sidestep.sdp.strategy import bcopy_only
from sidestep.sdp.wire import Mode

# --- what a peer can pile up ---


def test_what_waits_to_be_accepted_is_told_each_thing_once() -> None:
    """The other end may go on as it likes before anybody accepts; memory for what it does is bounded."""
    world = World()
    listening = world.right.listen(None, PORT, backlog=4)
    left = End()
    left.stream = world.stacks[0].connect(RIGHT, addresses(), left.tell)
    assert world.fabric.run_until(lambda: listening.waiting == 1)
    for _ in range(200):
        for mode in (Mode.PIPELINED, Mode.COMBINED):
            left.to.connection.want_send_mode(mode, world.fabric.now)
            left.to.send(memoryview(b"!"), urgent=True)
            world.settle()
    told: list[StreamEvent] = []
    stream = listening.accept(lambda stream, event: told.append(event))
    assert stream is not None
    kinds = [event.kind for event in told if isinstance(event, SdpEvent)]
    assert {SdpEventKind.ESTABLISHED, SdpEventKind.URGENT} <= set(kinds)
    assert len(kinds) == len(set(kinds))
    listening.close()
    stream.abort()
    left.to.abort()
    world.assert_nothing_left()


# --- time ---


def test_connections_that_are_over_are_not_kept_for_their_deadlines() -> None:
    """A closed one had a deadline that never comes; it must not be remembered until then."""
    world = World(settings=SdpSettings(keepalive_s=7200.0))
    stack = world.stacks[0]
    for _ in range(200):
        left, right = join(world)
        left.to.close()
        right.to.close()
        assert world.fabric.run_until(lambda: not stack.streams)
    assert len(stack._deadlines) < 100
    world.assert_nothing_left()


def test_one_timer_serves_a_stack() -> None:
    """Deadlines that come sooner and go again leave no timers behind that fire for nothing."""
    world = World(settings=SdpSettings(keepalive_s=1.0, advert_answer_s=0.01))
    left, right = join(world)
    fired = 0
    stack = world.stacks[0]
    handle = stack.handle_timeouts

    def counted() -> None:
        nonlocal fired
        fired += 1
        handle()

    stack.handle_timeouts = counted  # type: ignore[method-assign]
    for _ in range(50):
        send = left.to.send(memoryview(bytes(100_000)))  # advertised: to be answered soon
        left.to.cancel(send)
        assert world.fabric.run_until(lambda send=send: send.done)  # type: ignore[misc]
    fired = 0
    world.fabric.run_until(world.fabric.now + 10.0)
    assert fired <= 12
    for end in (left, right):
        end.to.abort()
    world.assert_nothing_left()


# --- what is given back ---


def test_listeners_that_are_closed_are_forgotten() -> None:
    world = World()
    for port in range(1, 500):
        world.right.listen(None, port, backlog=1).close()
    assert len(world.stacks[1]._listeners) < 100
    world.assert_nothing_left()


def test_who_gets_no_queue_pair_waits_for_no_buffers() -> None:
    """A request is refused because the device has no more queue pairs, while private buffers have run out as well."""
    size, count = 4096, 16
    world = World(
        attributes=DeviceAttributes(checks_local_memory=False, queue_pairs_max=1),
        settings=SdpSettings(receive_size=size, receive_count=count),
        private_bytes_max=size * count,
    )
    left, right = join(world)
    buffers = world.stacks[1].buffers
    other = world.fabric.device("other", LENIENT)
    stack = stack_on(world.fabric, other)
    world.right.listen(None, PORT, backlog=4)
    third = End()
    third.stream = stack.connect(RIGHT, addresses(40001), third.tell)
    assert world.fabric.run_until(lambda: third.got(SdpEventKind.CLOSED))
    assert buffers.waiting == 0
    for end in (left, right):
        end.to.abort()
    stack.close()
    world.assert_nothing_left()


# --- the blocking face ---


def test_a_connection_that_was_over_before_it_was_accepted_is_not_waited_for() -> None:
    world = World()
    listener = create_server(world.right, world.driver, (RIGHT, PORT))
    client = create_connection(world.left, world.driver, (RIGHT, PORT))
    world.settle()
    client.set_linger(0)
    client.close()
    world.settle()
    accepted, _ = listener.accept()
    accepted.set_linger(60.0)
    before = world.fabric.now
    accepted.close()
    assert world.fabric.now == before
    listener.close()
    world.assert_nothing_left()


def test_an_urgent_byte_is_the_last_one_though_not_all_fit() -> None:
    """Without waiting a part is sent; its last byte is not the one that was meant."""
    world = World(settings=SdpSettings(receive_size=256, receive_count=8, strategy=bcopy_only))
    listener = create_server(world.right, world.driver, (RIGHT, PORT))
    client = create_connection(world.left, world.driver, (RIGHT, PORT))
    server, _ = listener.accept()
    data = bytes(range(1, 256)) * 20
    left = memoryview(data)
    received = b""
    while len(left):
        left = left[client.send(left, MSG_OOB | MSG_DONTWAIT) :]
        world.settle()
        received += server.recv(10_000)
        world.settle()
    assert received == data[:-1]
    room = bytearray(1)
    assert server.recv_into(room, 1, MSG_OOB) == 1
    assert bytes(room) == data[-1:]
    for each in (client, server, listener):
        each.close()
    world.assert_nothing_left()


def test_who_drives_the_device_is_told_of_every_order() -> None:
    """An attempt that is given up, and connections that nobody accepted, leave at once."""
    kicks = 0

    def kick() -> None:
        nonlocal kicks
        kicks += 1

    world = World(kick=kick)
    client = socket_on(world.left, world.driver)
    client.settimeout(1.0)
    kicks = 0
    with pytest.raises(TimeoutError):
        client.connect(("10.0.0.9", PORT))
    assert kicks == 2  # the attempt, and its end
    client.close()
    listener = create_server(world.right, world.driver, (RIGHT, PORT))
    kicks = 0
    listener.close()
    assert kicks == 1
    world.assert_nothing_left()


# --- what one connection does to another ---


class Voiding:
    """A queue pair whose Sends void a key of the other end."""

    def __init__(self, qp: QueuePair, rkey: RKey) -> None:
        self._qp, self._rkey = qp, rkey
        self.post_recv = qp.post_recv

    def post_send(self, request: SendRequest) -> None:
        if isinstance(request, Send):
            request.invalidate = self._rkey
        self._qp.post_send(request)


def two_pairs() -> tuple[World, list[tuple[End, End]]]:
    """Two connections of the same two stacks, whose large sends go by Read Zcopy."""
    world = World(settings=SdpSettings(strategy=read_zcopy))
    pairs = [(End(), End()) for _ in range(2)]
    for number, (left, right) in enumerate(pairs):
        listener = world.stacks[1].listen(PORT, partial(take, right))
        left.stream = world.stacks[0].connect(RIGHT, addresses(40000 + number), left.tell)
        assert world.fabric.run_until(partial(right.got, SdpEventKind.ESTABLISHED))
        listener.close()
    return world, pairs


@pytest.mark.spec("RFC 5040 5.3; draft-pinkerton-iwarp-sdp: RdmaRdCompl by Send with Invalidate")
def test_who_voids_the_key_that_it_was_shown_voids_no_other() -> None:
    """One buffer goes to two other ends by Read Zcopy; the first voids its key, as it may."""
    world, pairs = two_pairs()
    data = pattern(100_000)
    shared = memoryview(data)
    sends = [left.to.send(shared) for left, _ in pairs]
    assert world.fabric.run_until(lambda: all(right.to.connection.readable for _, right in pairs))
    keys = [left.to.connection._source.adverts[0].send.region for left, _ in pairs]
    assert keys[0] is not None
    first = pairs[0][1].to
    assert first.qp is not None
    first._poster = Voiding(first.qp, keys[0].rkey)  # type: ignore[assignment]
    rooms = [bytearray(len(data)) for _ in pairs]
    for (_, right), room, send in zip(pairs, rooms, sends, strict=True):
        right.to.receive(memoryview(room), waitall=True)
        assert world.fabric.run_until(done(send))
    for left, right in pairs:
        assert left.to.connection.error is None
        assert right.to.connection.error is None
    assert rooms == [data, data]
    for left, right in pairs:
        left.to.abort()
        right.to.abort()
    world.assert_nothing_left()


@pytest.mark.spec("docs/wire/sdp.md §23.1: the receiver checks that the STag is the advertised one")
def test_who_voids_a_key_that_it_was_not_shown_is_cut_off() -> None:
    """Keys of one device are one space: that of another connection may be guessed."""
    world, pairs = two_pairs()
    pairs[0][0].to.send(memoryview(pattern(100_000)))
    assert world.fabric.run_until(lambda: pairs[0][1].to.connection.readable)
    region = pairs[0][0].to.connection._source.adverts[0].send.region
    assert region is not None
    hostile = pairs[1][1].to
    assert hostile.qp is not None
    hostile._poster = Voiding(hostile.qp, region.rkey)  # type: ignore[assignment]
    hostile.send(memoryview(b"!"))
    assert world.fabric.run_until(lambda: pairs[1][0].got(SdpEventKind.CLOSED))
    error = pairs[1][0].to.connection.error
    assert isinstance(error, PeerViolation)
    assert error.rule == "invalidated"
    for left, right in pairs:
        left.to.abort()
        right.to.abort()
    world.assert_nothing_left()
