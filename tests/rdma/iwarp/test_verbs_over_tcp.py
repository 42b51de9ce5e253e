"""What the verbs promise, where TCP and the loop could break it: messages in pieces, every phase, both families."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import pytest
from iwarp_dut import IwarpUnderTest
from iwarp_victim import LeapingLoop, Victim, descriptors
from loop_dut import WAIT_S, addresses
from raw_iwarp import Depths, frame, request

from sidestep.errors import LimitReached, Misuse
from sidestep.loop import Loop
from sidestep.rdma.cm import ConnectionRequest, Disconnected, Established, Unreachable
from sidestep.rdma.conformance import Bench
from sidestep.rdma.conformance.harness import Side
from sidestep.rdma.iwarp.ddp import RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.device import IwarpDevice, IwarpSettings
from sidestep.rdma.iwarp.sender import CHUNK
from sidestep.rdma.iwarp.startup.terms import MpaSettings
from sidestep.rdma.verbs import Device, MemoryRegion, QpCapabilities, QpState, QueuePair
from sidestep.rdma.work import Access, RdmaRead, RdmaWrite, Receive, Send, Status

OPEN = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
STARTUP = MpaSettings(peer_to_peer=True)
BIG = 64 * CHUNK  # more than the kernel holds for a connection


@pytest.fixture
def bench() -> Iterator[Bench]:
    dut = IwarpUnderTest(IwarpSettings(startup=STARTUP))
    yield Bench(dut)
    dut.close()


def filled(size: int, seed: int) -> bytearray:
    """Content that is nowhere the same."""
    return bytearray(Random(seed).randbytes(size))


# ---- long messages ----


@pytest.mark.slow
@pytest.mark.parametrize("markers", [False, True])
def test_long_messages_both_ways_at_once(markers: bool) -> None:
    """64 MiB each way, written, and 16 MiB each way, read and sent; the kernel holds a few of them."""
    dut = IwarpUnderTest(IwarpSettings(startup=replace(STARTUP, markers=markers)))
    bench = Bench(dut)
    ends = bench.pair()
    written, read, sent = 64 << 20, 16 << 20, 16 << 20
    checks: list[tuple[bytearray, bytearray]] = []
    targets = [side.domain.register(bytearray(written), OPEN) for side in ends]
    buffers: list[list[bytearray]] = []
    for seed, (side, peer_target) in enumerate(zip(ends, reversed(targets), strict=True)):
        source, sink, message, room = filled(written, seed), bytearray(read), filled(sent, 2 + seed), bytearray(sent)
        views = [side.domain.register(each, OPEN).view for each in (source, sink, message, room)]
        side.qp.post_recv(Receive(1, (views[3],)))
        side.qp.post_send(RdmaWrite(2, (views[0],), peer_target.va, peer_target.rkey))
        side.qp.post_send(RdmaRead(3, (views[1],), peer_target.va, peer_target.rkey))
        side.qp.post_send(Send(4, (views[2],), fence=True))
        buffers.append([source, sink, message, room])
    until(dut.loop, lambda: all(len(side.completions()) == 4 for side in ends))
    for side, own, other, target in zip(ends, buffers, reversed(buffers), reversed(targets), strict=True):
        bench.all_ok(side, "64 MiB both ways")
        assert [each.wr_id for each in side.sent] == [2, 3, 4]
        checks += [(own[1], own[0][:read]), (other[3], own[2])]
        assert target.view == memoryview(own[0])
    assert all(found == wanted for found, wanted in checks)
    dut.close()


def until(loop: Loop, condition: Callable[[], bool]) -> None:
    assert loop.run_until(condition, 2 * WAIT_S)


@pytest.mark.spec("RFC 5042 6.2.2")
@pytest.mark.parametrize("which", ["send", "write", "receive", "target", "source", "sink"])
def test_memory_taken_back_amid_a_long_message(bench: Bench, which: str) -> None:
    """From then on it is its owner's: not a byte of it changes or is sent, and both ends have an error."""
    asks, asked = bench.pair()
    near = asks.domain.register(filled(BIG, 1), OPEN)
    far = asked.domain.register(bytearray(BIG), OPEN)
    if which in ("send", "receive"):
        asked.qp.post_recv(Receive(1, (far.view,)))
        asks.qp.post_send(Send(2, (near.view,)))
    elif which in ("write", "target"):
        asks.qp.post_send(RdmaWrite(2, (near.view,), far.va, far.rkey))
    else:
        far.view[:] = near.view
        near.view[:] = bytes(BIG)
        asks.qp.post_send(RdmaRead(2, (near.view,), far.va, far.rkey))
    gets = near if which in ("source", "sink") else far
    loop = bench.dut.loop  # type: ignore[attr-defined]
    until(loop, lambda: any(gets.view[CHUNK : CHUNK + 64]))
    assert not any(gets.view[-4:]), "too fast to be caught half-way"
    taken = {"send": near, "write": near, "receive": far, "target": far, "source": far, "sink": near}[which]
    taken.deregister()
    before = bytes(taken.view)
    if taken is not gets:
        taken.view[:] = b"\xff" * BIG  # must not arrive
    until(loop, lambda: asks.qp.state is asked.qp.state is QpState.ERROR)
    bench.dut.run()
    if taken is gets:
        assert bytes(taken.view) == before
    else:
        assert b"\xff" * 64 not in bytes(gets.view)
    statuses = [each.status for each in asks.completions() + asked.completions()]
    assert Status.SUCCESS not in [each.status for each in asked.completions()]
    if which in ("send", "write"):
        assert statuses[0] is Status.LOCAL_PROTECTION_ERROR
    if which == "receive":
        assert [each.status for each in asked.completions()] == [Status.LOCAL_PROTECTION_ERROR]


# ---- accounting ----


def test_unsignaled_requests_hold_the_queue_until_a_signaled_one_is_done(bench: Bench) -> None:
    asks, asked = bench.pair(capabilities=QpCapabilities(max_send_wr=4))
    for number in range(8):
        asked.qp.post_recv(Receive(number, ()))
    for number in range(3):
        asks.send(number, b"", signaled=False)
    bench.dut.run()
    assert asks.sent == []
    asks.send(3, b"")
    with pytest.raises(LimitReached):
        asks.send(4, b"")
    bench.dut.run()
    assert [each.wr_id for each in asks.sent] == [3]
    for number in range(4, 8):
        asks.send(number, b"", signaled=number == 7)
    bench.dut.run()
    assert [each.wr_id for each in asks.sent] == [3, 7]


# ---- the end, in every phase ----

PHASES = ["asked", "accepted", "idle", "half-way", "receiving", "answering", "leaving", "failed"]


@pytest.mark.parametrize("act", ["destroy", "disconnect", "error", "close"])
@pytest.mark.parametrize("phase", PHASES)
def test_an_end_in_every_phase(phase: str, act: str) -> None:
    """Nothing completes after `destroy`, memory is let go, and nothing is left in the loop or open."""
    used = descriptors()
    buffers, kept = end_of(phase, act)
    if descriptors() > used:  # a leak leaks each time; what other threads open and close meanwhile does not
        used = descriptors()
        end_of(phase, act)
        assert descriptors() <= used
    gc.collect()
    for each in buffers:
        each.append(0)  # BufferError if something still refers to it
    assert all(qp.state is QpState.RESET for qp in kept)


def end_of(phase: str, act: str) -> tuple[list[bytearray], list[QueuePair]]:
    """The memory that was used, and who used it: a user may keep a queue pair that he has destroyed."""
    dut = IwarpUnderTest(IwarpSettings(startup=STARTUP), loop=LeapingLoop())
    bench = Bench(dut)
    asks, asked = bench.side(dut.active), bench.side(dut.passive)
    buffers = [bytearray(BIG) for _ in range(3)]
    if phase in ("asked", "accepted"):
        listener = bench.listen(asked)
        bench.connect(asks)
        if phase == "accepted":
            until(dut.loop, lambda: asked.connection is not None)
        del listener
    else:
        bench.pair(asks, asked)
        near, far = (side.domain.register(each, OPEN) for side, each in zip((asks, asked), buffers, strict=False))
        begin(phase, asks, asked, near, far, dut.loop)
        near.deregister()
        far.deregister()
        del near, far
    asks.qp.post_recv(Receive(9, (asks.domain.register(buffers[2], OPEN).view,)))
    before = len(asks.completions())
    act_on(act, asks, dut)
    if act != "destroy":
        dut.run()
        before = len(asks.completions())
    for _ in range(3):
        assert isinstance(dut.loop, LeapingLoop)
        dut.loop.leapt_s += 30
        dut.run()
    assert len(asks.completions()) == before
    assert asks.qp.state in (QpState.ERROR, QpState.RESET)
    asks.qp.destroy()
    asked.qp.destroy()
    for side in (asks, asked):
        for region in list(getattr(side.domain, "regions", ())):
            region.deregister()
    dut.close()
    for device in (dut.active, dut.passive):
        assert isinstance(device, IwarpDevice)
        assert not [*device.streams, *device.cm.connections]
        assert len(device.keys) == 0
    dut.loop.notices.clear()
    assert dut.loop.idle
    return buffers, [asks.qp, asked.qp]


def begin(phase: str, asks: Side, asked: Side, near: MemoryRegion, far: MemoryRegion, loop: Loop) -> None:
    """Brings a connection that is made into a phase."""
    if phase == "half-way":
        asks.qp.post_send(RdmaWrite(1, (near.view,), far.va, far.rkey))
        loop.turn(0)
    elif phase == "receiving":
        asks.qp.post_recv(Receive(1, (near.view,)))
        asked.qp.post_send(Send(1, (far.view,)))
        loop.turn(0)
        loop.turn(0)
    elif phase == "answering":
        asked.qp.post_send(RdmaRead(1, (far.view,), near.va, near.rkey))
        loop.turn(0)
        loop.turn(0)
    elif phase == "leaving":
        assert asks.connection is not None
        asks.connection.disconnect()
    elif phase == "failed":
        asked.qp.post_send(RdmaWrite(1, (far.view[:8],), near.va - 1, near.rkey))
        loop.turn(0)
        loop.turn(0)


def act_on(act: str, side: Side, dut: IwarpUnderTest) -> None:
    if act == "destroy":
        side.qp.destroy()
    elif act == "error":
        side.qp.modify_to_error()
    elif act == "close":
        dut.active.close()
    else:
        assert side.connection is not None
        side.connection.disconnect()


def test_the_user_ends_it_while_he_is_asked_about_the_reply(bench: Bench) -> None:
    for act in ("destroy", "disconnect"):
        asks, asked = bench.side(bench.active), bench.side(bench.passive)
        listener = bench.listen(asked)

        def says_yes(reply: bytes, act: str = act, asks: Side = asks) -> bool:
            assert asks.connection is not None
            asks.qp.destroy() if act == "destroy" else asks.connection.disconnect()
            return True

        bench.connect(asks, check_reply=says_yes)
        bench.eventually(lambda: asked.qp.state is QpState.ERROR, act)  # noqa: B023
        listener.close()
        bench.dut.run()
        assert Established() not in asks.cm_events
        assert asks.qp.state is (QpState.RESET if act == "destroy" else QpState.ERROR)


def test_an_address_that_is_none(bench: Bench) -> None:
    side = bench.side(bench.active)
    with pytest.raises(Misuse):
        bench.connect(side, address="localhost")
    assert side.qp.state is QpState.INIT
    bench.pair(side)


@pytest.mark.parametrize("address", ["localhost", "", "127.0.0.1:5001"])
def test_a_device_without_an_address(address: str) -> None:
    before = descriptors()
    with pytest.raises(Misuse):
        IwarpDevice(address)
    assert descriptors() == before


def test_an_interface_that_there_is_not(bench: Bench) -> None:
    """The address is one, and nothing of the attempt is left: sockets are counted when the bench is closed."""
    side = bench.side(bench.active)
    bench.connect(side, address="fe80::1%nosuch0")
    bench.eventually(lambda: side.cm_events == [Unreachable()], "it is told")
    assert side.qp.state is QpState.ERROR
    assert isinstance(bench.active, IwarpDevice)
    assert not bench.active.cm.connections


# ---- addresses, loops, threads ----


def chat(loops: tuple[Loop, ...], active: IwarpDevice, passive: IwarpDevice, drive: Callable[..., None]) -> None:
    """A connection, and a word each way."""
    sides: list[Side] = []

    class Ends:
        """The harness makes the sides; who drives them is told by `drive`."""

        def __init__(self) -> None:
            self.nowhere: str | None = None
            self.active: Device = active
            self.passive: Device = passive

        def run(self) -> None:
            """Not used."""

        def run_until(self, condition: Callable[[], bool]) -> bool:
            drive(condition)
            return True

        def close(self) -> None:
            """Not used."""

    bench = Bench(Ends())
    asks, asked = bench.side(active), bench.side(passive)
    sides += [asks, asked]
    room = asked.post_recv(1, 8)

    def on_request(request: ConnectionRequest) -> None:
        asked.connection = request.accept(asked.qp, b"", asked.on_cm)

    listener = passive.cm.listen(0, on_request)
    bench.connect(asks, service_id=listener.service_id, address=passive.address)
    drive(lambda: bool(asks.cm_events) and bool(asked.cm_events))
    asks.send(2, b"a word")
    drive(lambda: bool(asked.received))
    assert bytes(room.view[:6]) == b"a word"
    assert asks.connection is not None
    asks.connection.disconnect()
    drive(lambda: any(isinstance(each, Disconnected) for each in asked.cm_events))
    listener.close()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on the loopback interface")
def test_ipv6() -> None:
    loop = Loop()
    active, passive = IwarpDevice("::1", loop), IwarpDevice("::1", loop)
    chat((loop,), active, passive, lambda condition: until(loop, condition))
    active.close()
    passive.close()
    assert loop.next_in_s in (None, 0.0)
    loop.close()


def test_two_loops_in_two_threads() -> None:
    """Each device is driven by its own thread, under a lock of its own; what is asked of one is asked under it."""
    one, two, _ = addresses()
    active, passive = IwarpDevice(one), IwarpDevice(two)
    stop = threading.Event()
    lock = threading.Lock()

    def drive_passive() -> None:
        while not stop.is_set():
            with lock:
                passive.loop.turn(0)
            stop.wait(0.001)

    thread = threading.Thread(target=drive_passive)
    thread.start()

    def drive(condition: Callable[[], bool]) -> None:
        def locked() -> bool:
            with lock:
                return condition()

        until_s = active.loop.now + WAIT_S
        while not locked():
            assert active.loop.now < until_s
            active.loop.turn(0.001)  # the other loop does not wake this one

    try:
        chat((active.loop, passive.loop), active, passive, drive)
    finally:
        stop.set()
        thread.join()
        active.close()
        passive.close()


def test_a_device_is_closed_with_everything_busy() -> None:
    """Also from within a call to its user."""
    victim = Victim()
    region = None
    for _ in range(3):
        peer = victim.peer()
        region = victim.side.domain.register(filled(BIG, 3), OPEN)
        asked = ReadRequest(7, 0, BIG, region.rkey, region.va)
        peer.send(Segment(RdmapOp.READ_REQUEST, True, asked.encode(), queue=1, msn=1))
    sockets = [victim.connect() for _ in range(3)]
    victim.accepts = False
    undecided = victim.connect()
    undecided.sendall(request(Depths(1, 1)).encode())
    victim.until(lambda: len(victim.requests) == 4 and len(victim.device.cm.half_open) == 3)
    long = victim.near.memory(filled(BIG, 4)).view
    victim.near.qp.post_send(RdmaWrite(1, (long,), victim.shared.va, victim.shared.rkey))
    victim.loop.notices.append(victim.device.close)
    victim.dut.run()
    manager = victim.device.cm
    assert not [*manager.device.streams, *manager.connections, *manager.half_open, *manager.requests]
    assert len(victim.device.keys) == 0
    victim.until(lambda: victim.near.qp.state is QpState.ERROR)
    for each in [*sockets, undecided, *(peer.socket for peer in victim.peers)]:
        each.close()
    victim.dut.close()
    victim.loop.notices.clear()
    assert victim.loop.idle
    assert descriptors() == victim.descriptors
    assert frame(Segment(RdmapOp.SEND, True))
