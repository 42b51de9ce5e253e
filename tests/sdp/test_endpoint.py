"""Streams on a stack: how connections come to be, how they end, and that nothing of them is left."""

from __future__ import annotations

from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from random import Random

import pytest
from common import digest, pattern
from endpoint_world import (
    CHECKING,
    LEFT,
    LENIENT,
    PORT,
    RIGHT,
    End,
    World,
    addresses,
    assert_empty,
    done,
    join,
    pipelined,
    qp_of,
    read_zcopy,
    take,
)

from sidestep.errors import LimitReached, Misuse, PeerViolation, Unavailable
from sidestep.rdma.loopback import CmKind, Fabric, Faults, Timing
from sidestep.rdma.verbs import AsyncEvent, DeviceAttributes, EventKind
from sidestep.rdma.work import RdmaRead, RKey, Status
from sidestep.sdp.connection import SdpCause
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.hello import Hello, HelloAck
from sidestep.sdp.listening import Listening
from sidestep.sdp.private_data import fitted, match_address, whole
from sidestep.sdp.requests import SdpEventKind, StreamEvent
from sidestep.sdp.settings import Addresses, Carrier, SdpSettings
from sidestep.sdp.stack import Stack, stack_on
from sidestep.sdp.strategy import bcopy_only
from sidestep.sdp.wire import encode


def finish(world: World, *ends: End) -> None:
    for end in ends:
        end.to.close()
    world.assert_nothing_left()


def is_over(*ends: End) -> bool:
    return all(end.got(SdpEventKind.CLOSED) for end in ends)


# --- listening ---


def test_listeners_of_one_port_are_told_apart_by_what_hello_asks_for() -> None:
    world = World()
    found: list[tuple[str, str]] = []

    def ready(name: str, listening: list[Listening]) -> None:
        stream = listening[0].accept(lambda stream, event: None)
        assert stream is not None
        assert stream.connection.addresses is not None
        found.append((name, str(stream.connection.addresses.local)))
        stream.close()

    stack = world.stacks[1]
    listeners: list[Listening] = []
    for name in ("", "192.168.0.1", "192.168.0.2", "fd00::1"):
        holder: list[Listening] = []
        address = ip_address(name) if name else None
        holder.append(Listening(stack, PORT, address=address, backlog=5, ready=partial(ready, name, holder)))
        listeners += holder
    for asked in ("192.168.0.2", "192.168.0.1", "10.9.9.9", "fd00::1", "fd00::2", "192.168.0.1"):
        remote = ip_address(asked)
        source = IPv4Address("10.0.0.1") if remote.version == 4 else IPv6Address("fd00::9")
        end = End()
        end.stream = world.stacks[0].connect(RIGHT, Addresses(source, 40000, remote, PORT), end.tell)
        assert world.fabric.run_until(partial(end.got, SdpEventKind.ESTABLISHED))
        end.to.close()
        world.settle()
    expected = ["192.168.0.2", "192.168.0.1", "", "fd00::1", "", "192.168.0.1"]
    assert [name for name, _ in found] == expected
    assert [local for _, local in found] == [
        "192.168.0.2",
        "192.168.0.1",
        "10.9.9.9",
        "fd00::1",
        "fd00::2",
        "192.168.0.1",
    ]
    with pytest.raises(Misuse):
        Listening(stack, PORT, address=ip_address("192.168.0.1"), backlog=1)
    for listening in listeners:
        listening.close()
    world.assert_nothing_left()


def test_a_match_compares_the_whole_address_and_the_family() -> None:
    def hello(dst: str, src: str = "10.0.0.1") -> bytes:
        there, here = ip_address(dst), ip_address(src)
        return encode(Hello(1, 100, 100, 7, here, there, ip_version=there.version), bufs=3, mseq=0, mseq_ack=0)

    match = match_address(IPv4Address("10.0.0.2"))
    assert match.matches(hello("10.0.0.2"))
    assert not match.matches(hello("10.0.0.3"))
    assert not match.matches(hello("11.0.0.2"))
    assert not match.matches(hello("::a00:2", "::a00:1"))  # the same bytes, of the other family


@pytest.mark.parametrize(("wildcard", "served"), [("0.0.0.0", "10.0.0.2"), ("::", "fd00::2")])
def test_a_wildcard_serves_its_family_only(wildcard: str, served: str) -> None:
    world = World()
    listening = Listening(world.stacks[1], PORT, address=ip_address(wildcard), backlog=5)
    for name in ("10.0.0.2", "fd00::2"):
        remote = ip_address(name)
        source = IPv4Address("10.0.0.1") if remote.version == 4 else IPv6Address("fd00::9")
        end = End()
        end.stream = world.stacks[0].connect(RIGHT, Addresses(source, 40000, remote, PORT), end.tell)
        world.fabric.run()
        assert end.got(SdpEventKind.ESTABLISHED) == (name == served)
        assert (end.to.connection.cause is SdpCause.REFUSED) == (name != served)
    listening.close()
    world.assert_nothing_left()


def test_the_backlog_refuses_who_comes_too_many() -> None:
    world = World()
    woken: list[int] = []
    listening = Listening(world.stacks[1], PORT, backlog=2, ready=lambda: woken.append(1))
    ends = [End() for _ in range(4)]
    for index, end in enumerate(ends):
        end.stream = world.stacks[0].connect(RIGHT, addresses(40000 + index), end.tell)
    world.settle()
    assert sum(end.got(SdpEventKind.ESTABLISHED) for end in ends) == 2
    refused = [end for end in ends if not end.got(SdpEventKind.ESTABLISHED)]
    assert [end.to.connection.cause for end in refused] == [SdpCause.REFUSED] * 2
    assert (listening.waiting, listening.refused, len(woken)) == (2, 2, 2)
    accepted = listening.accept(lambda stream, event: None)
    assert accepted is not None
    fifth = End()
    fifth.stream = world.stacks[0].connect(RIGHT, addresses(40009), fifth.tell)
    assert world.fabric.run_until(partial(fifth.got, SdpEventKind.ESTABLISHED))
    listening.close()
    world.settle()
    broken = [end for end in (*ends, fifth) if end.to.connection.cause is SdpCause.RESET]
    assert len(broken) == 2  # nobody had accepted these
    accepted.close()
    for end in ends:
        end.to.close()
    world.assert_nothing_left()


def test_what_happens_before_accept_is_told_afterwards() -> None:
    world = World()
    listening = Listening(world.stacks[1], PORT, backlog=2)
    left, right = End(), End()
    left.stream = world.stacks[0].connect(RIGHT, addresses(), left.tell)
    assert world.fabric.run_until(partial(left.got, SdpEventKind.ESTABLISHED))
    left.to.send(memoryview(b"early"))
    left.to.shutdown_write()
    world.fabric.run()
    assert listening.accept(right.tell) is not None
    assert right.kinds()[0] is SdpEventKind.ESTABLISHED
    assert {SdpEventKind.READABLE, SdpEventKind.END_OF_STREAM} <= set(right.kinds())
    assert listening.accept(right.tell) is None
    stream = next(iter(world.stacks[1].streams.values()))
    right.stream = stream
    room = bytearray(10)
    receive = stream.receive(memoryview(room))
    assert bytes(room[: receive.filled]) == b"early"
    listening.close()
    finish(world, left, right)


def test_the_peer_is_who_its_hello_says() -> None:
    world = World()
    right = End()
    world.stacks[1].listen(PORT, partial(take, right))
    left = End()
    named = Addresses(IPv4Address("203.0.113.9"), 12345, IPv4Address("203.0.113.1"), PORT)
    left.stream = world.stacks[0].connect(RIGHT, named, left.tell)
    assert world.fabric.run_until(lambda: left.got(SdpEventKind.ESTABLISHED) and right.got(SdpEventKind.ESTABLISHED))
    found = right.to.connection.addresses
    assert found == Addresses(named.remote, PORT, named.local, 12345)
    finish(world, left, right)


def test_over_iwarp_the_peer_is_who_the_transport_says() -> None:
    world = World(settings=SdpSettings(carrier=Carrier.IWARP))
    left, right = join(world)
    found = right.to.connection.addresses
    assert found is not None
    assert (str(found.remote), found.local_port) == (LEFT, PORT)
    with pytest.raises(Unavailable):
        Listening(world.stacks[1], PORT, address=ip_address(RIGHT), backlog=1)
    finish(world, left, right)


# --- what a device must have ---


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("carrier", list(Carrier))
def test_private_data_may_be_just_enough(padded: bool, carrier: Carrier) -> None:
    attributes = DeviceAttributes(
        request_private_data_max=68, reply_private_data_max=28, private_data_padded=padded, checks_local_memory=False
    )
    world = World(attributes=attributes, settings=SdpSettings(carrier=carrier))
    left, right = join(world)
    room = bytearray(10)
    receive = right.to.receive(memoryview(room))
    left.to.send(memoryview(b"hello"))
    assert world.fabric.run_until(done(receive))
    finish(world, left, right)


@pytest.mark.parametrize(("request_max", "reply_max"), [(67, 196), (92, 23)])
def test_too_little_private_data_is_told_at_once(request_max: int, reply_max: int) -> None:
    attributes = DeviceAttributes(request_private_data_max=request_max, reply_private_data_max=reply_max)
    world = World(attributes=attributes)
    with pytest.raises(Unavailable):
        world.stacks[0].connect(RIGHT, addresses(), End().tell)
    with pytest.raises(Unavailable):
        world.stacks[1].listen(PORT, lambda stream: None)
    world.assert_nothing_left()


def test_private_data_is_cut_and_made_whole() -> None:
    here = IPv4Address("10.0.0.1")
    hello = encode(Hello(1, 100, 100, 7, here, here), bufs=3, mseq=0, mseq_ack=0)
    ack = encode(HelloAck(1, 100), bufs=3, mseq=0, mseq_ack=0)
    for message, least in ((hello, 68), (ack, 24)):
        assert whole(fitted(message, least)) == message
        assert whole(message.ljust(300, b"\0")) == message
        assert whole(message + b"\0\1") == message + b"\0\1"  # something is behind it: no such message
    with pytest.raises(Unavailable):
        fitted(hello, 60)
    assert whole(b"short") == b"short"
    nonsense = bytes(4) + (1 << 30).to_bytes(4, "big") + bytes(8)
    assert whole(nonsense) == nonsense


@pytest.mark.parametrize("attributes", [DeviceAttributes(gather_max=15), DeviceAttributes(inline_max=35)])
def test_a_device_that_cannot_carry_sdp_is_refused(attributes: DeviceAttributes) -> None:
    device = Fabric(Random(1)).device("small", attributes)
    with pytest.raises(Unavailable):
        Stack(device, lambda: 0.0)
    assert device.domains == []


def test_settings_are_suited_to_the_device() -> None:
    attributes = DeviceAttributes(work_requests_max=64, read_depth_max=2)
    world = World(attributes=attributes)
    left, right = join(world)
    assert qp_of(left).capabilities.initiator_depth == 2
    assert qp_of(left).capabilities.max_send_wr == 64
    assert qp_of(left).capabilities.max_recv_wr == 64
    room = bytearray(1_000_000)
    data = pattern(len(room))
    receive = right.to.receive(memoryview(room), waitall=True)
    left.to.send(memoryview(data))
    assert world.fabric.run_until(done(receive))
    assert digest(room) == digest(data)
    finish(world, left, right)


def test_no_queue_pair_is_left() -> None:
    world = World(attributes=DeviceAttributes(queue_pairs_max=1, checks_local_memory=False))
    left, right = join(world)
    with pytest.raises(LimitReached):
        world.stacks[0].connect(RIGHT, addresses(40001), End().tell)
    third = world.fabric.device("10.0.0.3", LENIENT)
    stack = stack_on(world.fabric, third)
    world.stacks[1].listen(PORT, lambda stream: pytest.fail("nobody is to be asked"))
    end = End()
    end.stream = stack.connect(RIGHT, addresses(40002), end.tell)
    assert world.fabric.run_until(partial(is_over, end))
    assert end.to.connection.cause is SdpCause.REFUSED
    stack.close()
    finish(world, left, right)


def test_no_private_buffers_can_be_registered() -> None:
    faults = Faults()
    world = World(faults=faults)
    world.stacks[1].listen(PORT, partial(take, End()))
    faults.fail_registrations_next = 1
    left = End()
    left.stream = world.stacks[0].connect(RIGHT, addresses(), left.tell)
    assert left.got(SdpEventKind.CLOSED)
    assert left.to.connection.cause is SdpCause.RESOURCES
    again, refused = End(), End()
    world.stacks[1].listen(PORT + 1, partial(take, refused))
    again.stream = world.stacks[0].connect(RIGHT, addresses(40001, PORT + 1), again.tell)
    faults.fail_registrations_next = 1
    assert world.fabric.run_until(partial(is_over, again))
    assert again.to.connection.cause is SdpCause.REFUSED
    assert refused.to.connection.cause is SdpCause.RESOURCES
    world.assert_nothing_left()


# --- giving up while connecting ---


@pytest.mark.parametrize("steps", range(14))
@pytest.mark.parametrize("who", ["left", "right"])
def test_an_attempt_can_be_given_up_at_any_time(steps: int, who: str) -> None:
    world = World(seed=steps)
    left, right = End(), End()
    world.stacks[1].listen(PORT, partial(take, right))
    left.stream = world.stacks[0].connect(RIGHT, addresses(), left.tell)
    for _ in range(steps):
        world.fabric.step()
    giver = left if who == "left" else right
    given_up = giver.stream is not None
    if given_up:
        giver.to.abort()
    world.settle()
    if given_up:
        assert left.got(SdpEventKind.CLOSED)
        assert right.stream is None or right.got(SdpEventKind.CLOSED)
        assert giver.to.connection.cause is SdpCause.ABORTED
    finish(world, *(end for end in (left, right) if end.stream is not None))


def test_nobody_answers() -> None:
    world = World()
    end = End()
    end.stream = world.stacks[0].connect("nowhere", addresses(), end.tell)
    assert world.fabric.run_until(partial(is_over, end))
    assert end.to.connection.cause is SdpCause.TIMEOUT
    assert world.fabric.now > 30
    world.assert_nothing_left()


def test_nobody_listens() -> None:
    world = World()
    end = End()
    end.stream = world.stacks[0].connect(RIGHT, addresses(), end.tell)
    assert world.fabric.run_until(partial(is_over, end))
    assert end.to.connection.cause is SdpCause.REFUSED
    world.assert_nothing_left()


@pytest.mark.parametrize("kind", list(CmKind))
def test_any_message_of_the_connection_manager_may_be_lost(kind: CmKind) -> None:
    faults = Faults(lose_cm_next={kind: 1})
    world = World(faults=faults)
    left, right = join(world)
    room = bytearray(5)
    receive = right.to.receive(memoryview(room), waitall=True)
    left.to.send(memoryview(b"hello"))
    assert world.fabric.run_until(done(receive))
    finish(world, left, right)


# --- ends ---


@pytest.mark.parametrize("first", ["left", "right"])
def test_half_close(first: str) -> None:
    world = World()
    left, right = join(world)
    one, other = (left, right) if first == "left" else (right, left)
    one.to.send(memoryview(b"last words"))
    one.to.shutdown_write()
    heard = bytearray(100)
    receive = other.to.receive(memoryview(heard), waitall=True)
    assert world.fabric.run_until(done(receive))
    assert bytes(heard[: receive.filled]) == b"last words"
    assert other.got(SdpEventKind.END_OF_STREAM)
    assert not is_over(one)
    data, room = pattern(300_000), bytearray(300_000)
    back = one.to.receive(memoryview(room), waitall=True)
    other.to.send(memoryview(data))
    assert world.fabric.run_until(done(back))
    assert digest(room) == digest(data)
    other.to.shutdown_write()
    assert world.fabric.run_until(partial(is_over, left, right))
    assert left.to.connection.error is None
    assert right.to.connection.error is None
    world.assert_nothing_left()


@pytest.mark.parametrize("strategy", [read_zcopy, pipelined])
@pytest.mark.parametrize("attributes", [LENIENT, CHECKING], ids=["lenient", "checking"])
def test_a_connection_cut_in_the_middle(strategy: object, attributes: DeviceAttributes) -> None:
    settings = SdpSettings(strategy=strategy, keepalive_s=10.0)  # type: ignore[arg-type]
    world = World(settings=settings, attributes=attributes)
    left, right = join(world)
    data = [bytearray(pattern(100_000, seed)) for seed in range(10)]
    rooms = [bytearray(60_000) for _ in range(8)]
    sends = [left.to.send(memoryview(each)) for each in data]
    receives = [right.to.receive(memoryview(room)) for room in rooms]
    assert world.fabric.run_until(done(receives[2]))
    world.fabric.cut(qp_of(left))
    assert world.fabric.run_until(partial(is_over, left, right))
    assert done(*sends, *receives)()
    assert left.to.connection.error is not None
    assert right.to.connection.error is not None
    stream = b"".join(data)
    offset = 0
    for receive, room in zip(receives, rooms, strict=True):
        assert bytes(room[: receive.filled]) == stream[offset : offset + receive.filled]
        offset += receive.filled
    finish(world, left, right)


def test_a_connection_that_is_reset_beneath() -> None:
    world = World()
    left, right = join(world)
    room = bytearray(10)
    receive = right.to.receive(memoryview(room))
    world.fabric.reset(qp_of(left))
    assert world.fabric.run_until(partial(is_over, left, right))
    assert {left.to.connection.cause, right.to.connection.cause} <= {SdpCause.TRANSPORT, SdpCause.RESET}
    assert receive.error is not None
    finish(world, left, right)


def test_rdma_that_is_not_allowed_is_a_violation() -> None:
    world = World()
    left, right = join(world)
    room = bytearray(10)
    qp_of(left).post_send(RdmaRead(1 << 40, (memoryview(room),), 0x1234, RKey(0xBAD)))
    assert world.fabric.run_until(partial(is_over, left, right))
    assert right.to.connection.cause is SdpCause.VIOLATION
    assert isinstance(right.to.connection.error, PeerViolation)
    assert right.to.connection.error.rule == "rdma_access"
    assert left.to.connection.cause is SdpCause.TRANSPORT
    finish(world, left, right)


def test_a_device_that_dies_takes_its_connections_along() -> None:
    world = World()
    told: list[AsyncEvent] = []
    ends = [End() for _ in range(3)]
    others: list[SdpStream] = []

    def accepted(stream: SdpStream) -> None:
        stream.tell = lambda stream, event: None
        others.append(stream)

    world.stacks[1].listen(PORT, accepted)
    for index, end in enumerate(ends):
        end.stream = world.stacks[0].connect(RIGHT, addresses(40000 + index), end.tell)
    assert world.fabric.run_until(lambda: all(end.got(SdpEventKind.ESTABLISHED) for end in ends))
    data = bytearray(pattern(500_000))
    send = ends[0].to.send(memoryview(data))
    room = bytearray(10)
    receive = ends[1].to.receive(memoryview(room))
    world.fabric.fail(world.devices[0])
    assert world.fabric.run_until(partial(is_over, *ends))
    assert [end.to.connection.cause for end in ends] == [SdpCause.TRANSPORT] * 3
    assert send.done
    assert receive.done
    assert world.stacks[0].streams == {}
    assert world.stacks[0].buffers.lent == 0
    for stream in others:
        stream.close()
    assert told == []
    world.assert_nothing_left()


def test_events_of_the_device_still_reach_who_had_them() -> None:
    fabric = Fabric(Random(1))
    device = fabric.device("one", LENIENT)
    told: list[EventKind] = []
    device.on_event = lambda event: told.append(event.kind)
    stack = Stack(device, lambda: fabric.now)
    fabric.unplug(device)
    fabric.run()
    assert told == [EventKind.PORT_ERROR]
    stack.close()
    fabric.plug(device)
    fabric.run()
    assert told == [EventKind.PORT_ERROR, EventKind.PORT_ACTIVE]


def test_a_stack_that_is_closed_gives_everything_back_at_once() -> None:
    world = World(attributes=CHECKING)
    left, right = join(world)
    data, room = bytearray(pattern(500_000)), bytearray(1000)
    sends = [left.to.send(memoryview(data)) for _ in range(3)]
    receives = [right.to.receive(memoryview(room))]
    for _ in range(5):
        world.fabric.step()
    waiting = End()
    waiting.stream = world.stacks[0].connect("nowhere", addresses(40001), waiting.tell)
    Listening(world.stacks[1], PORT + 1, backlog=3)
    for stack in world.stacks:
        stack.close()
    assert world.fabric.queue_pairs == {}
    for stack, device in zip(world.stacks, world.devices, strict=True):
        assert len(device.keys) <= 1  # a registration that is under way comes to its end
        assert stack.spares is not None
        assert not stack.spares.region.valid
        assert not list(device.cm.listeners)
    assert is_over(left, right, waiting)
    assert done(*sends, *receives)()
    world.settle()
    for device in world.devices:
        assert_empty(device)


def test_a_device_that_is_not_waited_for() -> None:
    world = World()
    left, right = join(world)
    left.to.abort()
    left.to.lose_device()
    assert is_over(left)
    assert world.stacks[0].buffers.lent == 0
    assert world.stacks[0].streams == {}
    world.settle()
    assert is_over(right)
    finish(world, left, right)


def test_completions_with_errors_end_the_connection() -> None:
    for status in (Status.REMOTE_OPERATION_ERROR, Status.RETRY_EXCEEDED, Status.FATAL):
        faults = Faults()
        world = World(faults=faults)
        left, right = join(world)
        faults.error_by_wr_id[left.to.connection._flow.next_wr_id] = status
        send = left.to.send(memoryview(b"never"))
        assert world.fabric.run_until(partial(is_over, left, right))
        assert send.error is left.to.connection.error is not None
        assert left.to.connection.cause is SdpCause.TRANSPORT
        assert right.to.connection.cause is SdpCause.RESET
        finish(world, left, right)


def test_an_error_while_both_ends_are_closing() -> None:
    """The last completion fails: the transport connection is taken down all the same."""
    faults = Faults()
    world = World(faults=faults)
    left, right = join(world)
    left.to.shutdown_write()
    world.fabric.run()
    faults.error_by_wr_id[right.to.connection._flow.next_wr_id] = Status.RETRY_EXCEEDED
    right.to.shutdown_write()
    world.settle()
    assert is_over(left, right)
    world.assert_nothing_left()


def test_calls_after_the_queue_pair_broke_lose_no_memory() -> None:
    world = World(settings=SdpSettings(receive_count=8))
    left, right = join(world)
    for _ in range(4):
        left.to.send(memoryview(b"x" * 100))
    world.fabric.run()
    qp_of(right).modify_to_error()  # nobody has told the connection yet
    room = bytearray(1000)
    receive = right.to.receive(memoryview(room), waitall=True)
    send = right.to.send(memoryview(b"too late"))
    world.settle()
    assert is_over(left, right)
    assert (receive.filled, receive.done, send.done) == (400, True, True)
    finish(world, left, right)


def test_a_queue_pair_that_fails_says_so_before_the_other_end_does() -> None:
    world = World()
    left, right = join(world)
    qp_of(left).break_off(EventKind.QP_FATAL, "worn out")
    assert world.fabric.run_until(partial(is_over, left, right))
    assert left.to.connection.cause is SdpCause.TRANSPORT
    assert "worn out" in str(left.to.connection.error)
    assert right.to.connection.cause is SdpCause.RESET
    finish(world, left, right)


def test_reads_into_memory_after_close_are_over() -> None:
    world = World(settings=SdpSettings(strategy=pipelined))
    left, right = join(world)
    left.to.connection.want_send_mode(left.to.connection.send_mode.PIPELINED, world.fabric.now)
    left.to.run()
    room = bytearray(100_000)
    receive = right.to.receive(memoryview(room))
    world.fabric.run()
    assert receive.advert  # the other end may write into it
    right.to.close()
    assert world.fabric.run_until(done(receive))
    regions = world.stacks[1].domain.regions  # type: ignore[attr-defined]
    assert not [region for region in regions if region.length == 100_000]
    finish(world, left)


# --- many, and for long ---


def test_many_connections_on_one_stack() -> None:
    count = 50
    world = World(settings=SdpSettings(receive_count=8, receive_size=4096))
    rights: list[End] = []

    def accepted(stream: SdpStream) -> None:
        end = End()
        take(end, stream)
        rights.append(end)

    listener = world.stacks[1].listen(PORT, accepted, backlog=count)
    lefts = [End() for _ in range(count)]
    for index, end in enumerate(lefts):
        end.stream = world.stacks[0].connect(RIGHT, addresses(40000 + index), end.tell)
    assert world.fabric.run_until(lambda: all(end.got(SdpEventKind.ESTABLISHED) for end in (*lefts, *rights)))
    listener.close()
    assert len(rights) == count
    data = {40000 + index: pattern(5000 + 100 * index, index) for index in range(count)}
    rooms: dict[int, bytearray] = {}
    receives = []
    for index, end in enumerate(lefts):
        end.to.send(memoryview(data[40000 + index]))
        end.to.shutdown_write()
    for end in rights:
        named = end.to.connection.addresses
        assert named is not None
        room = rooms[named.remote_port] = bytearray(20_000)
        receives.append(end.to.receive(memoryview(room), waitall=True))
    assert world.fabric.run_until(done(*receives))
    for end, receive in zip(rights, receives, strict=True):
        named = end.to.connection.addresses
        assert named is not None
        expected = data[named.remote_port]
        assert digest(rooms[named.remote_port][: receive.filled]) == digest(expected)
        end.to.shutdown_write()
    assert world.fabric.run_until(partial(is_over, *lefts, *rights))
    assert [end.to.connection.error for end in (*lefts, *rights)] == [None] * (2 * count)
    world.assert_nothing_left()


def test_old_deadlines_do_not_pile_up() -> None:
    world = World(settings=SdpSettings(strategy=read_zcopy))
    left, right = join(world)
    data, room = bytearray(1000), bytearray(1000)
    for _ in range(500):
        receive = right.to.receive(memoryview(room), waitall=True)
        left.to.send(memoryview(data))
        assert world.fabric.run_until(done(receive))
    stack = world.stacks[0]
    assert len(stack._deadlines) < 10
    now = world.fabric.now
    for step in range(1000):  # each is sooner than the one before, which is thereby of the past
        left.to.deadline = now + 1e-3 * (1000 - step) / 2
        stack.arm(left.to, left.to.deadline)
    assert len(stack._deadlines) < 100
    assert stack.next_deadline() == pytest.approx(now + 5e-4)
    left.to.deadline = now + 0.25  # put off
    assert stack.next_deadline() == pytest.approx(now + 0.25)
    left.to.deadline = None
    assert stack.next_deadline() is None
    finish(world, left, right)


def test_the_clock_is_told_of_the_next_deadline() -> None:
    fabric = Fabric(Random(3), timing=Timing(cm_timeout_s=1000.0))
    told: list[float] = []
    device = fabric.device("one", LENIENT)
    stack = Stack(device, lambda: fabric.now, SdpSettings(keepalive_s=5.0), wake_at=told.append)
    other = Stack(fabric.device("two", LENIENT), lambda: fabric.now)
    end, peer = End(), End()
    other.listen(PORT, partial(take, peer))
    end.stream = stack.connect("two", addresses(), end.tell)
    assert fabric.run_until(partial(end.got, SdpEventKind.ESTABLISHED))
    assert told == [pytest.approx(fabric.now + 5.0, abs=0.01)]
    fabric.run_until(told[0])
    stack.handle_timeouts()
    assert told[1:] == [pytest.approx(10.0, abs=0.01)]
    assert stack.next_deadline() == told[1]
    stack.close()
    other.close()


def test_private_buffers_change_size() -> None:
    settings = SdpSettings(receive_count=32, receive_size=1024, receive_size_max=64 << 10, strategy=bcopy_only)
    world = World(settings=settings)
    left, right = join(world)
    left.to.connection.resize_remote(16384, world.fabric.now)
    left.to.run()
    data, room = pattern(200_000), bytearray(200_000)
    receive = right.to.receive(memoryview(room), waitall=True)
    left.to.send(memoryview(data))
    assert world.fabric.run_until(done(receive))
    assert digest(room) == digest(data)
    assert world.fabric.run_until(partial(left.got, SdpEventKind.RESIZED))
    assert left.to.connection.remote_size == 16384
    world.fabric.run()
    slabs = world.stacks[1].buffers._kinds
    assert list(slabs) == [(None, 16384)]  # the small ones are given back
    finish(world, left, right)


def test_larger_buffers_that_come_in_parts() -> None:
    settings = SdpSettings(receive_count=8, receive_size=1024, receive_size_max=64 << 10, strategy=bcopy_only)
    world = World(settings=settings, private_bytes_max=8 * 1024 + 6 * 4096)
    left, right = join(world)
    taken: list[object] = []
    world.stacks[1].buffers.ask(6, 4096, lambda found: taken.append(found))
    left.to.connection.resize_remote(4096, world.fabric.now)
    left.to.run()
    world.fabric.run()
    assert world.stacks[1].buffers.waiting == 1
    (loans,) = taken
    assert isinstance(loans, list)
    data, room = pattern(50_000), bytearray(50_000)
    receive = right.to.receive(memoryview(room), waitall=True)
    left.to.send(memoryview(data))
    world.fabric.run()
    for loan in loans[:-1]:
        world.stacks[1].buffers.put(loan)
        world.fabric.run()
    assert not left.got(SdpEventKind.RESIZED)
    world.stacks[1].buffers.put(loans[-1])
    assert world.fabric.run_until(done(receive))
    assert digest(room) == digest(data)
    world.settle()
    finish(world, left, right)


def test_an_accepted_stream_needs_somebody_to_tell() -> None:
    world = World()
    world.stacks[1].listen(PORT, lambda stream: None)
    end = End()
    end.stream = world.stacks[0].connect(RIGHT, addresses(), end.tell)
    with pytest.raises(Misuse):
        world.fabric.run()


def test_what_a_user_raises_reaches_who_drives_the_device() -> None:
    world = World()
    left, right = join(world)

    def tell(stream: SdpStream, event: StreamEvent) -> None:
        raise ZeroDivisionError

    right.to.tell = tell
    left.to.send(memoryview(b"boom"))
    with pytest.raises(ZeroDivisionError):
        world.fabric.run()
    right.to.tell = right.tell
    room = bytearray(10)
    receive = right.to.receive(memoryview(room))
    assert (receive.done, receive.filled) == (True, 4)
    finish(world, left, right)
