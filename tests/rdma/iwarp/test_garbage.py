"""Whatever bytes come: no exception, nothing written where nothing may be, and an end that is one of the known ones."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from iwarp_victim import OPEN, RTR, Victim
from raw_iwarp import Depths, frame, request
from wire_end import GUARD, WireEnd

from sidestep.loop import Loop
from sidestep.rdma.iwarp.ddp import RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.receiver import Receiver
from sidestep.rdma.iwarp.tcp import Tcp
from sidestep.rdma.verbs import EventKind, QpState
from sidestep.rdma.work import Access, RdmaRead, Receive, RKey, Send

ROOM = 32


@st.composite
def streams(draw: st.DrawFn, stag: int, va: int, sink: int) -> bytes:
    """Frames that could be good, with fields from near the border of what is, and then perhaps bits turned over."""
    made = bytearray()
    msn = {0: 1, 1: 1, 2: 1}
    for op in draw(st.lists(st.sampled_from(RdmapOp), max_size=8)):
        queue = {RdmapOp.READ_REQUEST: 1, RdmapOp.TERMINATE: 2}.get(op, 0)
        payload = bytes(draw(st.integers(0, ROOM + 2)))
        if op is RdmapOp.READ_REQUEST and draw(st.integers(0, 3)):
            length = draw(st.sampled_from([0, 1, 8, 2**32 - 1]))
            payload = ReadRequest(7, 0, length, stag, va + draw(st.integers(-1, 1))).encode()
        key = draw(st.sampled_from([stag, sink, 0, 0xFFFFFFFF]))
        offset = draw(st.sampled_from([va, va - 1, va + 1, 0, 2**64 - 1]))
        last = draw(st.integers(0, 4)) > 0
        mo = draw(st.sampled_from([0, 0, 0, 1, 2**32 - 1]))
        made += frame(Segment(op, last, payload, key, offset, queue, msn[queue], mo))
        msn[queue] += last
    for place in draw(st.lists(st.integers(0, len(made) - 1), max_size=3)) if made else ():
        made[place] ^= draw(st.integers(1, 255))
    return bytes(made)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans())
def test_a_receiver_takes_any_stream(data: st.DataObject, random: bool) -> None:
    end = WireEnd()
    region = end.region(ROOM)
    end.post_recv(1, ROOM)
    sink = end.region(8)
    end.sender.requests.append(RdmaRead(1, (sink.view,), 1, RKey(1)))
    end.sender.requests.append(Send(2, ()))
    end.taken()
    made = data.draw(st.binary(max_size=300) if random else streams(region.rkey, region.va, end.qp.sink_stag))
    for piece in data.draw(st.just([made]) | st.just([made[at : at + 7] for at in range(0, len(made), 7)])):
        end.feed(piece)
        end.taken()
    kinds = {each[0] for each in end.told}
    assert kinds <= {"heard", "asked", "received", "read done", "completed", "terminated", "answer failed"}
    assert all(not any(each[:GUARD]) and not any(each[-GUARD:]) for each in end.buffers)
    end.close()


@pytest.fixture
def victim(monkeypatch: pytest.MonkeyPatch) -> Iterator[Victim]:
    """A fault of ours is not contained, but ends the test."""
    monkeypatch.setattr(Tcp, "run", lambda tcp, call: call())
    victim = Victim()
    yield victim
    victim.close()


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), started=st.booleans())
def test_a_device_takes_any_stream(victim: Victim, data: st.DataObject, started: bool) -> None:
    """Before and after the start-up; then the peer goes."""
    sock = victim.peer(begins=False).socket if started else victim.connect()
    with sock:
        if started:
            side = victim.side
            region = victim.region(OPEN)
            side.qp.post_recv(Receive(1, (side.memory(ROOM).view,)))
            made = bytearray(frame(RTR)) + data.draw(streams(region.rkey, region.va, victim.qp.sink_stag))
        else:
            made = bytearray(request(Depths(2, 2, peer_to_peer=True, rtr_write=True), b"hello").encode())
            for place in data.draw(st.lists(st.integers(0, len(made) - 1), max_size=4)):
                made[place] ^= data.draw(st.integers(1, 255))
            made += data.draw(st.binary(max_size=40))
        with suppress(ConnectionError):
            sock.sendall(made)
        victim.dut.run()
    manager = victim.device.cm
    victim.until(lambda: not manager.half_open and len(manager.device.streams) == 1)
    for side in victim.sides:
        victim.until(lambda: side.qp.state is QpState.ERROR)  # noqa: B023
        side.qp.destroy()
    victim.sides.clear()
    assert len(manager.connections) == 1
    assert all(each[:GUARD] == each[-GUARD:] == b"G" * GUARD for each in victim.buffers)


# ---- faults of ours ----


def test_a_fault_of_ours_ends_one_connection(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    victim = Victim()
    attacker = victim.peer()
    broken = victim.qp.stream
    assert broken is not None
    take = Receiver.take

    def fails(receiver: Receiver, *what: object) -> object:
        if receiver is broken.receiver:
            raise KeyError("a slip")
        return take(receiver, *what)  # type: ignore[arg-type]

    monkeypatch.setattr(Receiver, "take", fails)
    with caplog.at_level(logging.ERROR):
        attacker.send(RTR)
        victim.until(lambda: bool(victim.side.events))
    assert [(each.kind, "KeyError" in each.why) for each in victim.side.events] == [(EventKind.QP_FATAL, True)]
    assert "a slip" in caplog.text
    assert victim.side.qp.state is QpState.ERROR
    victim.close()


# ---- the loop ----


def test_a_descriptor_that_is_taken_over_is_not_ready_for_what_the_old_one_was() -> None:
    """One handler closes the socket of another, and opens one that gets its number."""
    loop = Loop()
    pairs = [socket.socketpair() for _ in range(2)]
    heard: list[str] = []
    called: list[int] = []
    made: list[socket.socket] = []

    def replace_other(other: socket.socket) -> Callable[[int], None]:
        def handler(events: int) -> None:
            called.append(events)
            if made:
                return
            number = other.fileno()
            loop.forget(number)
            other.close()
            fresh = socket.socketpair()
            made.extend(fresh)
            assert number in (each.fileno() for each in fresh)
            for each in fresh:
                loop.watch(each.fileno(), 1, lambda events: heard.append("fresh"))

        return handler

    loop.watch(pairs[0][0].fileno(), 1, replace_other(pairs[1][0]))
    loop.watch(pairs[1][0].fileno(), 1, replace_other(pairs[0][0]))
    for _, far in pairs:
        far.send(b"x")
    loop.turn(1.0)
    assert (len(called), heard) == (1, [])
    for each in [*made, *(side for pair in pairs for side in pair)]:
        each.close()
    loop.close()


def test_cancelled_timers_do_not_pile_up() -> None:
    loop = Loop()
    kept = [loop.call_later(1000.0 + number, list) for number in range(10)]
    for _ in range(10_000):
        loop.call_later(500.0, list).cancel()
    assert loop.timers_held < 200
    for each in kept:
        each.cancel()
    assert loop.idle
    loop.close()


def test_a_call_that_fails_does_not_lose_the_next_ones() -> None:
    loop = Loop()
    told: list[int] = []

    def fails() -> None:
        raise ZeroDivisionError

    loop.soon(fails)
    loop.soon(lambda: told.append(1))
    with pytest.raises(ZeroDivisionError):
        loop.turn(0)
    loop.turn(0)
    assert told == [1]
    loop.close()


def test_rights_of_local_memory_are_not_the_other_ends() -> None:
    """The receive of a Send and the sink of a Read have keys that a peer may guess: they open nothing."""
    end = WireEnd()
    receive = end.post_recv(1, ROOM)
    sink = end.region(8, Access.LOCAL_WRITE)
    end.sender.requests.append(RdmaRead(1, (sink.view,), 1, RKey(1)))
    end.taken()
    fault = end.feed(Segment(RdmapOp.WRITE, True, b"x", receive.rkey, receive.va))
    assert fault is not None
    assert not any(receive.view)
    end.close()
