"""Sockets that move to another process: the stream goes on elsewhere, without a byte lost or doubled."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from ipaddress import IPv4Address

import pytest
from common import digest, pattern
from endpoint_world import (
    CHECKING,
    LEFT,
    LENIENT,
    RIGHT,
    End,
    World,
    assert_empty,
    done,
    join,
    pipelined,
    read_zcopy,
    take,
)

from sidestep.errors import Misuse
from sidestep.rdma.cm import ConnectionRequest
from sidestep.rdma.loopback import LoopbackDevice
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.sdp.connection import SdpCause
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent, StreamReceive, Suspended
from sidestep.sdp.settings import Addresses, SdpSettings
from sidestep.sdp.stack import Stack, stack_on
from sidestep.sdp.strategy import bcopy_only

NEW_PORT = 6001


class MovingWorld(World):
    """Two hosts; at the right one there is a second process, with a stack of its own on the same device."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.new = stack_on(self.fabric, self.devices[1], self.stacks[1].settings)
        self.new_left = stack_on(self.fabric, self.devices[0], self.stacks[0].settings)

    def assert_nothing_left(self) -> None:
        """Also of the new processes."""
        self.settle()
        for stack in (self.new, self.new_left):
            assert stack.streams == {}
            assert stack.buffers.lent == 0
            stack.close()
        super().assert_nothing_left()


class Arrival:
    """The new place: it answers who has come when it has what the old place hands over, whichever is first."""

    def __init__(self, stack: Stack, end: End, port: int = NEW_PORT) -> None:
        self._stack, self._end, self._port = stack, end, port
        self._suspended: Suspended | None = None
        self._request: ConnectionRequest | None = None
        self._listener = stack.take_requests(port, self._asked, backlog=1)

    def take_over(self, left: End) -> None:
        self._suspended = left.to.connection.suspended
        assert self._suspended is not None
        self._go_on()

    def close(self) -> None:
        self._listener.close()
        if self._request is not None:
            self._request.reject()

    def _asked(self, request: ConnectionRequest) -> None:
        self._request = request
        self._go_on()

    def _go_on(self) -> None:
        if self._request is None or self._suspended is None:
            return
        self._listener.close()
        settings = replace(self._stack.settings, receive_size=self._suspended.receive_size)
        self._stack.serve(self._request, partial(take, self._end), self._port, settings, self._suspended)


def move_right(world: MovingWorld, right: End, *, late: bool = False) -> End:
    """The right end's socket goes to the new process."""
    new = End()
    arrival = Arrival(world.new, new)
    right.to.suspend(NEW_PORT)
    assert world.fabric.run_until(partial(right.got, SdpEventKind.SUSPENDED))
    if late:  # the other end is here before the old process has said what there was
        world.fabric.run()
        assert new.stream is None
    arrival.take_over(right)
    assert world.fabric.run_until(partial(new.got, SdpEventKind.ESTABLISHED))
    return new


def close_all(world: MovingWorld, *ends: End) -> None:
    for end in ends:
        end.to.close()
    world.assert_nothing_left()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("attributes", [LENIENT, CHECKING], ids=["lenient", "checking"])
def test_the_stream_goes_on_elsewhere(late: bool, attributes: DeviceAttributes) -> None:
    world = MovingWorld(attributes=attributes, settings=SdpSettings(receive_size=4096))
    left, right = join(world)
    left.to.send(memoryview(b"unread"))
    world.fabric.run()
    world.new.settings = SdpSettings(receive_size=8192)  # which is not what the other end knows
    new = move_right(world, right, late=late)
    assert left.kinds().count(SdpEventKind.ESTABLISHED) == 2
    assert SdpEventKind.RESUMING in left.kinds()
    assert left.to.connection.addresses == Addresses(IPv4Address(LEFT), 40000, IPv4Address(RIGHT), NEW_PORT)
    named = new.to.connection.addresses
    assert named is not None
    assert (str(named.remote), named.remote_port) == (LEFT, 40000)
    assert new.to.connection.local_size == right.to.connection.local_size
    room = bytearray(100)
    receive = new.to.receive(memoryview(room))
    assert bytes(room[: receive.filled]) == b"unread"
    data, there = pattern(300_000), bytearray(300_000)
    for sender, reader in ((left, new), (new, left)):
        got = reader.to.receive(memoryview(there), waitall=True)
        sender.to.send(memoryview(data))
        assert world.fabric.run_until(done(got))
        assert digest(there) == digest(data)
    assert world.fabric.run_until(partial(right.got, SdpEventKind.CLOSED))
    assert right.to.connection.error is None
    close_all(world, left, new)


@pytest.mark.parametrize("strategy", [bcopy_only, read_zcopy, pipelined])
@pytest.mark.parametrize("attributes", [LENIENT, CHECKING], ids=["lenient", "checking"])
@pytest.mark.parametrize("reading", [0, 3])
def test_bytes_on_their_way_arrive_once(strategy: object, attributes: DeviceAttributes, reading: int) -> None:
    """Both ends are sending, and partly being read, when one of them moves."""
    settings = SdpSettings(strategy=strategy, receive_count=8, receive_size=2048)  # type: ignore[arg-type]
    world = MovingWorld(attributes=attributes, settings=settings)
    left, right = join(world)
    here = [bytearray(pattern(30_000, seed)) for seed in range(6)]
    there = [bytearray(pattern(25_000, 10 + seed)) for seed in range(6)]
    sends = [left.to.send(memoryview(each)) for each in here]
    moved = [right.to.send(memoryview(each)) for each in there]
    rooms: dict[str, list[tuple[bytearray, StreamReceive]]] = {"left": [], "right": []}
    for _ in range(reading):
        for end, name in ((left, "left"), (right, "right")):
            room = bytearray(9_000)
            rooms[name].append((room, end.to.receive(memoryview(room))))
    for _ in range(40):
        world.fabric.step()
    new = move_right(world, right)

    def got(name: str) -> bytes:
        return b"".join(bytes(room[: receive.filled]) for room, receive in rooms[name])

    for end, name, total in ((new, "right", 180_000), (left, "left", 150_000)):
        outstanding = [receive for _, receive in rooms[name] if not receive.done]
        assert world.fabric.run_until(done(*outstanding))
        while len(got(name)) < total:
            room = bytearray(50_000)
            receive = end.to.receive(memoryview(room))
            rooms[name].append((room, receive))
            assert world.fabric.run_until(done(receive))
    assert digest(got("right")) == digest(b"".join(here))
    assert digest(got("left")) == digest(b"".join(there))
    assert world.fabric.run_until(done(*sends, *moved))
    assert [request.error for request in (*sends, *moved)] == [None] * 12
    close_all(world, left, new)


def test_the_new_place_is_not_there() -> None:
    world = MovingWorld()
    left, right = join(world)
    right.to.suspend(NEW_PORT)
    room = bytearray(10)
    receive = left.to.receive(memoryview(room))
    assert world.fabric.run_until(partial(left.got, SdpEventKind.CLOSED))
    assert left.to.connection.cause is SdpCause.RESET
    assert receive.error is not None
    assert world.fabric.run_until(partial(right.got, SdpEventKind.CLOSED))
    close_all(world, left, right)


def test_the_new_place_waits_no_longer() -> None:
    world = MovingWorld()
    left, right = join(world)
    arrival = Arrival(world.new, End())
    right.to.suspend(NEW_PORT)
    world.fabric.run()
    arrival.close()
    assert world.fabric.run_until(partial(left.got, SdpEventKind.CLOSED))
    assert left.to.connection.cause is SdpCause.RESET
    close_all(world, left, right)


def test_the_old_place_goes_by_itself() -> None:
    """The other end should disconnect; if it does not, the old process does."""
    world = MovingWorld()
    left, right = join(world)
    new = move_right(world, right)
    right.to.close()
    assert world.fabric.run_until(partial(right.got, SdpEventKind.CLOSED))
    right.to.abort()
    close_all(world, left, new)


def test_no_queue_pair_for_the_new_connection() -> None:
    world = MovingWorld()
    left, right = join(world)

    def tell(stream: SdpStream, event: StreamEvent) -> None:
        left.tell(stream, event)
        if isinstance(event, SdpEvent) and event.kind is SdpEventKind.RESUMING:
            world.devices[0].attributes = replace(world.devices[0].attributes, queue_pairs_max=0)

    left.to.tell = tell
    right.to.suspend(NEW_PORT)
    assert world.fabric.run_until(partial(left.got, SdpEventKind.CLOSED))
    assert left.to.connection.cause is SdpCause.RESOURCES
    assert world.fabric.run_until(partial(right.got, SdpEventKind.CLOSED))
    close_all(world, left, right)


def test_who_may_move() -> None:
    world = MovingWorld()
    left, right = join(world)
    left.to.shutdown_write()
    world.fabric.run()
    with pytest.raises(Misuse):
        left.to.suspend(NEW_PORT)
    close_all(world, left, right)


def test_the_other_end_closes_its_direction_meanwhile() -> None:
    world = MovingWorld()
    left, right = join(world)
    new = End()
    arrival = Arrival(world.new, new)
    right.to.suspend(NEW_PORT)
    left.to.send(memoryview(b"last"))
    left.to.shutdown_write()
    assert world.fabric.run_until(partial(right.got, SdpEventKind.SUSPENDED))
    arrival.take_over(right)
    assert world.fabric.run_until(partial(new.got, SdpEventKind.END_OF_STREAM))
    room = bytearray(10)
    receive = new.to.receive(memoryview(room))
    assert bytes(room[: receive.filled]) == b"last"
    new.to.shutdown_write()
    assert world.fabric.run_until(partial(left.got, SdpEventKind.CLOSED))
    assert left.to.connection.error is None
    close_all(world, left, new)


def test_both_ends_move_at_once() -> None:
    """The connecting end answers, and repeats its own wish in the new connection."""
    world = MovingWorld()
    left, right = join(world)
    left.to.send(memoryview(b"from the left"))
    right.to.send(memoryview(b"from the right"))
    new_right, new_left = End(), End()
    to_right = Arrival(world.new, new_right)
    to_left = Arrival(world.new_left, new_left, 7001)
    left.to.suspend(7001)
    right.to.suspend(NEW_PORT)
    assert world.fabric.run_until(partial(right.got, SdpEventKind.SUSPENDED))
    assert not left.got(SdpEventKind.SUSPENDED)
    to_right.take_over(right)
    assert world.fabric.run_until(partial(left.got, SdpEventKind.SUSPENDED))
    to_left.take_over(left)
    assert world.fabric.run_until(
        lambda: new_left.got(SdpEventKind.ESTABLISHED) and new_right.kinds().count(SdpEventKind.ESTABLISHED) == 2
    )
    for end, expected in ((new_left, b"from the right"), (new_right, b"from the left")):
        room = bytearray(100)
        receive = end.to.receive(memoryview(room))
        assert world.fabric.run_until(done(receive))
        assert bytes(room[: receive.filled]) == expected
    assert world.fabric.run_until(lambda: left.got(SdpEventKind.CLOSED) and right.got(SdpEventKind.CLOSED))
    close_all(world, new_left, new_right)


def test_a_connection_moves_to_another_device() -> None:
    world = World()
    device = world.fabric.device("10.0.0.3", CHECKING)
    stack = stack_on(world.fabric, device)
    left, right = join(world)
    new = End()
    arrival = Arrival(stack, new)
    data = bytearray(pattern(200_000))
    send = right.to.send(memoryview(data))
    right.to.suspend(NEW_PORT)
    assert world.fabric.run_until(partial(right.got, SdpEventKind.SUSPENDED))
    assert not send.done
    assert len(world.devices[1].keys) > 0
    arrival.take_over(right)
    left.to.address = "10.0.0.3"
    assert world.fabric.run_until(partial(new.got, SdpEventKind.ESTABLISHED))
    room = bytearray(200_000)
    receive = left.to.receive(memoryview(room), waitall=True)
    assert world.fabric.run_until(done(receive, send))
    assert digest(room) == digest(data)
    new.to.close()
    left.to.close()
    world.assert_nothing_left()
    stack.close()
    assert isinstance(device, LoopbackDevice)
    assert_empty(device)
