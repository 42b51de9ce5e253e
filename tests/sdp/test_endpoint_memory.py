"""Where bytes lie: nothing is copied in Python, what a device wants registered is, and everything is given back."""

from __future__ import annotations

from functools import partial

import pytest
from common import digest, pattern
from endpoint_world import (
    CHECKING,
    LEFT,
    LENIENT,
    RIGHT,
    End,
    Range,
    Watch,
    World,
    done,
    join,
    pipelined,
    qp_of,
    read_zcopy,
)

from sidestep import limits
from sidestep.errors import LimitReached, Unavailable
from sidestep.rdma.loopback import Faults, Kind
from sidestep.rdma.pools import MessagePool
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.rdma.work import Access
from sidestep.sdp.buffers import PoolBuffer, PrivateBuffers
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import SdpEventKind, StreamEvent, StreamReceive, StreamSend
from sidestep.sdp.settings import SdpSettings
from sidestep.sdp.strategy import Strategy, bcopy_only
from sidestep.sdp.wire import Mid, Mode

ATTRIBUTES = pytest.mark.parametrize("attributes", [LENIENT, CHECKING], ids=["lenient", "checking"])


def finish(world: World, left: End, right: End) -> None:
    left.to.close()
    right.to.close()
    world.assert_nothing_left()


def carry(world: World, left: End, right: End, data: bytearray, room: bytearray) -> None:
    """All that one buffer holds goes to the other."""
    receive = right.to.receive(memoryview(room), waitall=True)
    send = left.to.send(memoryview(data))
    assert world.fabric.run_until(done(send, receive))
    assert digest(room) == digest(data)


def forget(*ends: End) -> None:
    """Drops what a test itself holds of the requests."""
    for end in ends:
        end.told.clear()


# --- zero copy, by address ---


@ATTRIBUTES
def test_bcopy_gathers_from_the_users_buffer(attributes: DeviceAttributes) -> None:
    watch = Watch()
    world = World(attributes=attributes, watch=watch, settings=SdpSettings(strategy=bcopy_only))
    left, right = join(world)
    data = bytearray(pattern(200_000))
    room = bytearray(len(data))
    carry(world, left, right, data, room)
    user = Range.of(data)
    payload = [
        (mid, views) for kind, source, views, mid in watch.gathered if kind is Kind.SEND and source == LEFT and views
    ]
    assert len(payload) >= 7  # of 32 KiB each
    for mid, views in payload:
        assert mid is Mid.DATA
        assert len(views) == 1
        assert user.holds(views[0])
    assert sum(views[0].length for _, views in payload) == len(data)
    assert watch.count(Kind.READ_REQUEST) == watch.count(Kind.WRITE) == 0
    del payload
    finish(world, left, right)


@ATTRIBUTES
def test_read_zcopy_goes_from_buffer_to_buffer(attributes: DeviceAttributes) -> None:
    watch = Watch()
    world = World(attributes=attributes, watch=watch, settings=SdpSettings(strategy=read_zcopy))
    left, right = join(world)
    data = bytearray(pattern(500_000))
    room = bytearray(len(data))
    carry(world, left, right, data, room)
    shown = [views[0] for kind, source, views, _ in watch.gathered if kind is Kind.READ_RESPONSE and source == LEFT]
    assert sum(each.length for each in shown) == len(data) - 64  # the rest came with the SrcAvail
    assert all(Range.of(data).holds(each) for each in shown)
    placed = [
        (source, to)
        for kind, device, source, to in watch.placed_ranges
        if kind is Kind.READ_RESPONSE and device == RIGHT
    ]
    assert all(Range.of(room).holds(to) for _, to in placed)
    del shown, placed
    finish(world, left, right)


@ATTRIBUTES
def test_write_zcopy_goes_from_buffer_to_buffer(attributes: DeviceAttributes) -> None:
    watch = Watch()
    world = World(attributes=attributes, watch=watch, settings=SdpSettings(strategy=pipelined))
    left, right = join(world)
    data = [bytearray(pattern(100_000, seed)) for seed in range(6)]
    rooms = [bytearray(100_000) for _ in data]
    left.to.connection.want_send_mode(Mode.PIPELINED, world.fabric.now)
    left.to.run()
    receives = [right.to.receive(memoryview(room)) for room in rooms]
    world.fabric.run()
    sends = [left.to.send(memoryview(each)) for each in data]
    assert world.fabric.run_until(done(*sends, *receives))
    assert [digest(room) for room in rooms] == [digest(each) for each in data]
    assert left.to.connection.send_mode is Mode.PIPELINED
    placed = [
        (source, to) for kind, device, source, to in watch.placed_ranges if kind is Kind.WRITE and device == RIGHT
    ]
    assert sum(to.length for _, to in placed) == 600_000
    for source, to in placed:
        assert any(Range.of(room).holds(to) for room in rooms)
        assert any(Range.of(each).holds(source) for each in data)
    assert Mid.RDMA_WR_COMPL in watch.mids(LEFT)
    del placed
    finish(world, left, right)


@ATTRIBUTES
def test_the_answer_to_a_transaction_is_written_where_it_was_asked_for(attributes: DeviceAttributes) -> None:
    watch = Watch()
    strategy = partial(Strategy, bcopy_max=1024, read_min=0, sink_min=0)
    settings = SdpSettings(strategy=strategy, receive_count=5, receive_size=1024)
    world = World(attributes=attributes, watch=watch, settings=settings)
    left, right = join(world)
    right.to.connection.want_send_mode(Mode.PIPELINED, world.fabric.now)
    right.to.run()
    world.fabric.run()
    assert left.to.connection.receive_mode is Mode.PIPELINED
    fillings = 0
    while left.to.connection.writable:  # so that neither the offer of room nor the question can go before the other
        left.to.send(memoryview(b"fill"))
        world.fabric.run()
        fillings += 1
    answer, room = bytearray(pattern(300_000)), bytearray(300_000)
    receive = left.to.receive(memoryview(room))
    left.to.send(memoryview(b"what?"))
    world.fabric.run()
    heard = bytearray(4 * fillings + 5)
    request = right.to.receive(memoryview(heard), waitall=True)
    assert world.fabric.run_until(done(request))
    assert bytes(heard) == b"fill" * fillings + b"what?"
    right.to.send(memoryview(answer))
    assert world.fabric.run_until(done(receive))
    offers = [
        size for size, sent in zip(watch.sizes, watch.gathered, strict=True) if sent[1:4:2] == (LEFT, Mid.SINK_AVAIL)
    ]
    assert offers == [36 + len(b"what?")]
    written = [
        (source, to) for kind, device, source, to in watch.placed_ranges if kind is Kind.WRITE and device == LEFT
    ]
    assert written
    assert all(Range.of(answer).holds(source) and Range.of(room).holds(to) for source, to in written)
    assert digest(room) == digest(answer)
    finish(world, left, right)


# --- when memory is the user's again ---


@pytest.mark.parametrize("strategy", [read_zcopy, pipelined])
def test_memory_is_out_of_reach_before_the_user_is_told(strategy: type[Strategy]) -> None:
    world = World(settings=SdpSettings(strategy=strategy))
    left, right = join(world)
    regions = [stack.domain.regions for stack in world.stacks]  # type: ignore[attr-defined]
    left_over: list[int] = []

    def watch_ends(end: End, at: int) -> None:
        def tell(stream: SdpStream, event: StreamEvent) -> None:
            if isinstance(event, StreamSend | StreamReceive):
                left_over.append(sum(region.length == 100_000 for region in regions[at]))
            end.tell(stream, event)

        end.to.tell = tell

    watch_ends(left, 0)
    watch_ends(right, 1)
    data, room = bytearray(pattern(100_000)), bytearray(100_000)
    if strategy is pipelined:
        left.to.connection.want_send_mode(Mode.PIPELINED, world.fabric.now)
        left.to.run()
    receive = right.to.receive(memoryview(room), waitall=strategy is read_zcopy)
    world.fabric.run()
    send = left.to.send(memoryview(data))
    assert world.fabric.run_until(done(send, receive))
    assert left_over == [0, 0]
    assert digest(room) == digest(data)
    finish(world, left, right)
    forget(left, right)
    del send, receive
    data.append(1)  # nobody holds on to it
    room.append(1)


def test_regions_may_be_kept_for_the_next_time() -> None:
    world = World(settings=SdpSettings(strategy=read_zcopy), keep_registered=True)
    left, right = join(world)
    data, room = bytearray(pattern(100_000)), bytearray(100_000)
    for _ in range(3):
        receive = right.to.receive(memoryview(room), waitall=True)
        send = left.to.send(memoryview(data))
        assert world.fabric.run_until(done(send, receive))
    pool = world.stacks[0].regions
    assert (pool.misses, pool.hits, pool.regions) == (1, 2, 1)
    finish(world, left, right)


def test_a_cut_gives_memory_back_when_the_queue_pair_is_flushed() -> None:
    world = World(settings=SdpSettings(strategy=read_zcopy))
    left, right = join(world)
    data = bytearray(pattern(2_000_000))
    room = bytearray(64 << 10)
    send = left.to.send(memoryview(data))
    receive = right.to.receive(memoryview(room))
    assert world.fabric.run_until(done(receive))
    world.fabric.cut(qp_of(left))
    right.to.receive(memoryview(room))
    left.to.abort()
    assert left.got(SdpEventKind.BROKEN)
    assert world.fabric.run_until(lambda: left.got(SdpEventKind.CLOSED))
    assert send.done
    assert send.error is not None
    assert left.told.index(send) > left.kinds().index(SdpEventKind.BROKEN)
    assert world.fabric.run_until(lambda: right.got(SdpEventKind.CLOSED))
    finish(world, left, right)
    forget(left, right)
    del send, receive
    data.append(1)
    room.append(1)


# --- devices that want local memory registered ---


@pytest.mark.parametrize("kind", [bytearray, bytes])
def test_small_sends_from_a_checking_device(kind: type[bytes]) -> None:
    watch = Watch()
    world = World(attributes=CHECKING, watch=watch)
    left, right = join(world)
    data = kind(b"a few bytes")
    room = bytearray(100)
    receive = right.to.receive(memoryview(room))
    send = left.to.send(memoryview(data))
    assert world.fabric.run_until(done(send, receive))
    assert room[: receive.filled] == data
    registrations = world.stacks[0].regions.misses
    assert registrations == (0 if kind is bytes else 1)  # what is immutable and small goes inline
    finish(world, left, right)


def test_memory_that_is_registered_for_good_is_not_registered_again() -> None:
    world = World(attributes=CHECKING)
    left, right = join(world)
    ring = bytearray(pattern(256 << 10))
    room = bytearray(len(ring))
    region = world.stacks[0].register(ring)
    landing = world.stacks[1].register(room)
    receive = right.to.receive(memoryview(room), waitall=True)
    with memoryview(ring) as whole:
        sends = [left.to.send(whole[at : at + (32 << 10)]) for at in range(0, len(ring), 32 << 10)]
        assert world.fabric.run_until(done(receive, *sends))
        del sends
    assert digest(room) == digest(ring)
    assert world.stacks[0].regions.misses == world.stacks[1].regions.misses == 0
    world.stacks[0].deregister(region)
    world.stacks[1].deregister(landing)
    finish(world, left, right)


def test_rdma_into_memory_that_is_registered_for_good() -> None:
    world = World(attributes=CHECKING, settings=SdpSettings(strategy=read_zcopy))
    left, right = join(world)
    data, room = bytearray(pattern(100_000)), bytearray(100_000)
    landing = world.stacks[1].register(room)
    carry(world, left, right, data, room)
    assert world.stacks[1].regions.misses == 0
    assert world.stacks[0].regions.misses == 1  # what the other end reads has a key of its own
    world.stacks[1].deregister(landing)
    finish(world, left, right)


def test_a_cut_gives_spare_buffers_back() -> None:
    faults = Faults()
    world = World(attributes=CHECKING, faults=faults, settings=SdpSettings(strategy=bcopy_only))
    left, right = join(world)
    faults.fail_registrations_next = 1 << 30
    spares = world.stacks[0].spares
    assert spares is not None
    send = left.to.send(memoryview(bytearray(100_000)))
    assert world.fabric.run_until(lambda: spares.available < spares.count)
    world.fabric.cut(qp_of(left))
    left.to.abort()
    assert world.fabric.run_until(done(send))
    assert spares.available == spares.count
    faults.fail_registrations_next = 0
    right.to.abort()
    finish(world, left, right)


def test_what_cannot_be_registered_goes_through_spare_buffers() -> None:
    faults = Faults()
    watch = Watch()
    world = World(attributes=CHECKING, faults=faults, watch=watch)
    left, right = join(world)
    faults.fail_registrations_next = 1 << 30
    data = bytearray(pattern(1_000_000))
    room = bytearray(len(data))
    carry(world, left, right, data, room)
    spares = world.stacks[0].spares
    assert spares is not None
    memory = Range.of(spares.region.view)
    payload = [views[0] for kind, source, views, mid in watch.gathered if mid is Mid.DATA and source == LEFT and views]
    assert payload
    assert all(memory.holds(each) for each in payload)
    assert spares.available == spares.count
    assert watch.count(Kind.READ_REQUEST) == 0  # what was on offer was refused: it could not be read into
    faults.fail_registrations_next = 0
    del payload
    finish(world, left, right)


@pytest.mark.parametrize("failing", range(1, 6))
def test_registrations_that_fail_now_and_then_lose_nothing(failing: int) -> None:
    faults = Faults()
    world = World(attributes=CHECKING, faults=faults, settings=SdpSettings(strategy=pipelined), seed=failing)
    left, right = join(world)
    faults.fail_registration = failing / 6
    data = [bytearray(pattern(70_000 + seed, seed)) for seed in range(8)]
    room = bytearray(sum(map(len, data)))
    sends = [left.to.send(memoryview(each)) for each in data]
    view, filled = memoryview(room), 0
    while filled < len(room):
        receive = right.to.receive(view[filled:])
        assert world.fabric.run_until(done(receive))
        filled += receive.filled
    assert world.fabric.run_until(done(*sends))
    assert digest(room) == digest(b"".join(data))
    del view, receive
    finish(world, left, right)


def test_a_slow_registration_holds_only_what_is_behind_it() -> None:
    world = World(attributes=CHECKING, settings=SdpSettings(strategy=bcopy_only))
    world.fabric.timing = type(world.fabric.timing)(registration_s=(0.5, 0.5))
    left, right = join(world)
    slow, fast = bytearray(b"s" * 1000), b"at once"
    room = bytearray(2000)
    receive = right.to.receive(memoryview(room), waitall=True)
    first = left.to.send(memoryview(slow))
    second = left.to.send(memoryview(fast))
    other_way = right.to.send(memoryview(b"other way"))
    got = bytearray(20)
    back = left.to.receive(memoryview(got))
    assert world.fabric.run_until(done(back, other_way))
    assert world.fabric.now < 0.1
    assert not first.done
    assert not second.done
    assert world.fabric.run_until(done(first, second))
    left.to.shutdown_write()
    assert world.fabric.run_until(done(receive))
    assert bytes(room[: receive.filled]) == slow + fast
    finish(world, left, right)


def test_a_connection_that_ends_while_registering_gives_it_back() -> None:
    world = World(attributes=CHECKING)
    world.fabric.timing = type(world.fabric.timing)(registration_s=(0.5, 0.5))
    left, right = join(world)
    data = [bytearray(1000), bytearray(200_000)]
    sends = [left.to.send(memoryview(each)) for each in data]
    room = bytearray(1000)
    right.to.receive(memoryview(room))
    world.fabric.run_until(world.fabric.now + 0.01)
    left.to.abort()
    assert world.fabric.run_until(done(*sends))
    assert all(each.error is not None for each in sends)
    finish(world, left, right)
    forget(left, right)
    del sends
    for each in data:
        each.append(1)


def test_spare_buffers_are_waited_for_in_turn() -> None:
    faults = Faults()
    world = World(attributes=CHECKING, faults=faults, settings=SdpSettings(strategy=bcopy_only, receive_count=256))
    left, right = join(world)
    faults.fail_registrations_next = 1 << 30
    spares = world.stacks[0].spares
    assert spares is not None
    taken = [spares.take() for _ in range(spares.count - 1)]
    data = [bytearray(pattern(30_000, seed)) for seed in range(20)]
    sends = [left.to.send(memoryview(each)) for each in data]
    room = bytearray(600_000)
    receive = right.to.receive(memoryview(room), waitall=True)
    assert world.fabric.run_until(done(receive, *sends))
    assert digest(room) == digest(b"".join(data))
    for element in taken:
        assert element is not None
        spares.put(element)
    faults.fail_registrations_next = 0
    finish(world, left, right)


def test_a_read_into_memory_for_rnics_that_want_remote_write() -> None:
    attributes = DeviceAttributes(checks_local_memory=True, read_sink_remote_write=True)
    world = World(attributes=attributes, settings=SdpSettings(strategy=read_zcopy))
    left, right = join(world)
    data, room = bytearray(pattern(300_000)), bytearray(300_000)
    carry(world, left, right, data, room)
    finish(world, left, right)


# --- private buffers ---


class Taker:
    """Somebody who wants private buffers."""

    def __init__(self) -> None:
        self.loans: list[PoolBuffer] = []
        self.parts: list[int] = []
        self.error: Exception | None = None

    def give(self, found: list[PoolBuffer] | Exception) -> None:
        if isinstance(found, Exception):
            self.error = found
        else:
            self.loans += found
            self.parts.append(len(found))


def make_pool(bytes_max: int, kept: int = 0, faults: Faults | None = None) -> tuple[World, PrivateBuffers]:
    world = World(faults=faults)
    return world, PrivateBuffers(world.stacks[0].domain, bytes_max=bytes_max, kept=kept)


def test_where_nobody_waits_who_asks_for_too_many_gets_none() -> None:
    """Nor do his wishes take from who comes next, nor are the buffers of one user lent to another."""
    world = World()
    pool = PrivateBuffers(world.stacks[0].domain, bytes_max=10 * 100, waits=False)
    first, second, third, other = Taker(), Taker(), Taker(), Taker()
    pool.ask(6, 100, first.give, 1)
    pool.ask(6, 100, second.give, 1)
    assert isinstance(second.error, LimitReached)
    for loan in second.loans:  # as a stream does
        pool.put(loan)
    assert (pool.bytes, pool.lent, pool.waiting) == (600, 6, 0)
    pool.ask(4, 100, third.give, 1)
    assert len(third.loans) == 4
    pool.put(first.loans.pop())
    pool.ask(1, 100, other.give, 2)
    assert isinstance(other.error, LimitReached)
    pool.ask(1, 100, first.give, 1)
    assert len(first.loans) == 6
    for loan in first.loans + third.loans:
        pool.put(loan)
    assert (pool.bytes, pool.lent, pool.waiting) == (0, 0, 0)


def test_buffers_are_given_late_and_in_parts_the_oldest_first() -> None:
    _, pool = make_pool(10 * 100)
    first, second, third = Taker(), Taker(), Taker()
    pool.ask(6, 100, first.give)
    pool.ask(6, 100, second.give)
    pool.ask(2, 100, third.give)
    assert (len(first.loans), len(second.loans), len(third.loans)) == (6, 4, 0)
    assert pool.waiting == 2
    for loan in first.loans[:3]:
        pool.put(loan)
    assert (len(second.loans), second.parts) == (6, [4, 1, 1])
    assert len(third.loans) == 1
    for loan in first.loans[3:]:
        pool.put(loan)
    assert len(third.loans) == 2
    for taker in (second, third):
        for loan in taker.loans:
            pool.put(loan)
    assert (pool.bytes, pool.lent, pool.waiting) == (0, 0, 0)


def test_room_of_another_size_is_waited_for() -> None:
    _, pool = make_pool(1000)
    small, large = Taker(), Taker()
    pool.ask(10, 100, small.give)
    pool.ask(2, 300, large.give)
    assert large.loans == []
    for loan in small.loans:
        pool.put(loan)
    assert len(large.loans) == 2
    for loan in large.loans:
        pool.put(loan)
    assert pool.bytes == 0


def test_buffers_that_can_never_be_had_are_refused() -> None:
    _, pool = make_pool(1000)
    taker = Taker()
    pool.ask(1, 2000, taker.give)
    assert taker.error is not None


def test_a_registration_that_fails_is_an_error_unless_others_hold_some() -> None:
    faults = Faults()
    _, pool = make_pool(10_000, faults=faults)
    first, second = Taker(), Taker()
    pool.ask(3, 100, first.give)
    faults.fail_registrations_next = 1
    pool.ask(2, 100, second.give)
    assert (second.error, second.loans) == (None, [])
    pool.put(first.loans.pop())
    assert second.parts == [1, 1]  # what came back, and a slab: it was worth another try
    for loan in [*first.loans, *second.loans]:
        pool.put(loan)
    second.loans.clear()
    faults.fail_registrations_next = 1
    third = Taker()
    pool.close()
    _, pool = make_pool(10_000, faults=faults)
    pool.ask(2, 100, third.give)
    assert isinstance(third.error, Unavailable)


def test_slabs_are_kept_if_wanted() -> None:
    world, pool = make_pool(10_000, kept=1000)
    taker = Taker()
    pool.ask(10, 100, taker.give)
    for loan in taker.loans:
        pool.put(loan)
    assert pool.bytes == 1000
    domain = world.stacks[0].domain
    regions = set(domain.regions)  # type: ignore[attr-defined]
    again = Taker()
    pool.ask(10, 100, again.give)
    assert set(domain.regions) == regions  # type: ignore[attr-defined]
    for loan in again.loans:
        pool.put(loan)
    more = Taker()
    pool.ask(1, 9_500, more.give)  # what is kept makes room
    assert len(more.loans) == 1
    pool.close()
    assert not domain.regions  # type: ignore[attr-defined]


def test_who_waits_is_told_when_the_pool_closes() -> None:
    _, pool = make_pool(100)
    first, second = Taker(), Taker()
    pool.ask(1, 100, first.give)
    pool.ask(1, 100, second.give)
    pool.close()
    assert isinstance(second.error, Unavailable)
    pool.put(first.loans[0])  # harmless


def test_a_connection_waits_for_private_buffers() -> None:
    settings = SdpSettings(receive_count=16, receive_size=1024)
    world = World(settings=settings, private_bytes_max=16 * 1024)
    left, right = join(world)
    second = End()
    from endpoint_world import PORT, addresses, take

    other = End()
    listener = world.stacks[1].listen(PORT, lambda stream: take(other, stream))
    second.stream = world.stacks[0].connect(RIGHT, addresses(40001), second.tell)
    world.fabric.run()
    assert second.told == []
    assert world.stacks[0].buffers.waiting == 1
    left.to.close()
    right.to.close()
    assert world.fabric.run_until(lambda: second.got(SdpEventKind.ESTABLISHED))
    listener.close()
    finish(world, second, other)


def test_who_gives_up_while_waiting_for_buffers_gets_none() -> None:
    settings = SdpSettings(receive_count=16, receive_size=1024)
    world = World(settings=settings, private_bytes_max=24 * 1024)
    left, right = join(world)
    from endpoint_world import addresses

    second = End()
    second.stream = world.stacks[0].connect(RIGHT, addresses(40001), second.tell)
    world.fabric.run()
    assert world.stacks[0].buffers.lent == 24
    second.to.abort()
    assert world.fabric.run_until(lambda: world.stacks[0].buffers.lent == 16)
    assert second.got(SdpEventKind.CLOSED)
    finish(world, left, right)


def test_unread_bytes_hold_their_buffers_until_they_are_read_or_dropped() -> None:
    world = World()
    left, right = join(world)
    left.to.send(memoryview(b"x" * 1000))
    left.to.shutdown_write()
    right.to.shutdown_write()
    assert world.fabric.run_until(lambda: right.got(SdpEventKind.CLOSED) and left.got(SdpEventKind.CLOSED))
    assert world.stacks[1].buffers.lent == 1
    room = bytearray(2000)
    receive = right.to.receive(memoryview(room))
    assert (receive.done, receive.filled) == (True, 1000)
    assert world.stacks[1].buffers.lent == 0
    world.assert_nothing_left()


def test_spare_buffers_hold_a_whole_message() -> None:
    world = World(attributes=CHECKING, settings=SdpSettings(receive_size=1 << 20))
    left, right = join(world)
    spares = world.stacks[0].spares
    assert isinstance(spares, MessagePool)
    assert left.to.connection.remote_size == 1 << 20
    assert left.to.connection._source.payload_max + 16 == spares.size == limits.SDP_CHECKED_MESSAGE_MAX
    finish(world, left, right)


def test_a_region_that_lasts_is_found_by_range_and_rights() -> None:
    world = World(attributes=CHECKING)
    stack = world.stacks[0]
    memory = bytearray(1000)
    with memoryview(memory)[100:200] as part:
        region = stack.register(part, Access.LOCAL_READ)
    with memoryview(memory) as whole:
        assert stack.permanent.covers(whole[100:200], Access.LOCAL_READ)
        assert stack.permanent.covers(whole[150:160], Access.LOCAL_READ)
        assert not stack.permanent.covers(whole[150:160], Access.LOCAL_WRITE)
        assert not stack.permanent.covers(whole[99:160], Access.LOCAL_READ)
        assert not stack.permanent.covers(whole[150:201], Access.LOCAL_READ)
        assert not stack.permanent.covers(memoryview(bytearray(10)), Access.LOCAL_READ)
    stack.deregister(region)
    assert not stack.permanent.covers(memoryview(memory)[100:200], Access.LOCAL_READ)
