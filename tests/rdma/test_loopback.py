"""The loopback device beyond the common suite: time, order, faults, and what an observer sees."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from loopback_ends import SERVICE, End, connect, connected, ends
from verbs_end import ALL

from sidestep.errors import LimitReached, Misuse, SidestepError, Unavailable
from sidestep.rdma.address import buffer_address
from sidestep.rdma.cm import REJECT_CONSUMER, CmState, Disconnected, Rejected, Unreachable
from sidestep.rdma.loopback import (
    NO_DELAY,
    CmKind,
    CmMessage,
    Fabric,
    Faults,
    Kind,
    Recorder,
    Timing,
)
from sidestep.rdma.loopback.manager import TRANSITIONS
from sidestep.rdma.soft.queues import HandledQueue
from sidestep.rdma.verbs import DeviceAttributes, EventKind, MemoryRegion, QpState
from sidestep.rdma.work import Access, Completion, Opcode, RdmaRead, RdmaWrite, Receive, Send, Status

SEEDS = range(20)


def say(end: End, wr_id: int, text: bytes = b"hello", *, fence: bool = False) -> None:
    end.qp.post_send(Send(wr_id, (end.memory(text).view,), fence=fence))


# Time.


def trace(seed: int) -> list[str]:
    recorder = Recorder()
    fabric = Fabric(Random(seed), observer=recorder)
    active, passive = connected(fabric)
    far = passive.memory(64)
    for index in range(8):
        passive.room(wr_id=index)
        sink = active.memory(8)
        active.qp.post_send(RdmaRead(100 + index, (sink.view,), far.va, far.rkey))
        say(active, index)
    active.disconnect()
    fabric.run_until(10.0)
    seen = repr((recorder.qp_messages, recorder.cm_messages))
    return [seen, repr((active.done, passive.done, active.told, passive.told))]


def test_a_seed_gives_one_run() -> None:
    assert trace(7) == trace(7)
    assert trace(7) != trace(8)


def test_run_rests_before_timers() -> None:
    fabric = Fabric(Random(1))
    rung: list[float] = []
    fabric.call_later(5.0, lambda: rung.append(fabric.now))
    cancelled = fabric.call_at(6.0, lambda: rung.append(-1.0))
    connected(fabric)
    assert (rung, fabric.idle) == ([], True)
    cancelled.cancel()
    cancelled.cancel()
    assert not fabric.run_until(lambda: len(rung) > 1)
    assert rung == [5.0]
    assert not fabric.step()
    assert fabric.run_until(9.0)
    assert fabric.now == 9.0
    fabric.call_at(3.0, lambda: rung.append(fabric.now))  # past: as soon as possible
    assert fabric.run_until(lambda: len(rung) == 2)
    assert rung == [5.0, 9.0]


def test_run_until_keeps_its_limit() -> None:
    fabric = Fabric(Random(1))

    def again() -> None:
        fabric.call_later(1.0, again)

    again()
    assert not fabric.run_until(lambda: False, limit_s=50.0)
    assert fabric.now <= 50.0


def test_two_ends_that_never_rest_are_found() -> None:
    fabric = Fabric(Random(1), run_limit=500)
    active, passive = connected(fabric)

    def on_batch(end: End, batch: list[Completion]) -> None:
        if any(each.opcode is Opcode.RECEIVE for each in batch):
            end.room()
            say(end, 1)

    for end in (active, passive):
        end.room()
        queue = end.qp.recv_cq
        assert isinstance(queue, HandledQueue)
        queue.handler = partial(on_batch, end)
    say(active, 1)
    with pytest.raises(LimitReached, match="no rest"):
        fabric.run()
    with pytest.raises(LimitReached, match="no rest"):
        fabric.run_until(lambda: False)


def test_bandwidth_takes_time_by_size() -> None:
    fabric = Fabric(Random(1), timing=Timing(wire_s=(0, 0), read_s=(0, 0), cm_s=(0, 0), bandwidth=1e6))
    active, passive = connected(fabric)
    begun = fabric.now
    rooms = [passive.room(50_000, index) for index in range(4)]
    near = active.memory(50_000)
    for index in range(4):
        active.qp.post_send(Send(index, (near.view,)))
    fabric.run()
    assert len(passive.received) == len(rooms)
    assert 0.2 < fabric.now - begun < 0.202  # 200 000 bytes and a few headers at a megabyte a second


# Order.


def orders(seed: int, *, fence: bool) -> tuple[bool, bool]:
    """Whether a Send arrived before the bytes of the Read posted before it, and whether those came at all."""
    fabric = Fabric(Random(seed), timing=Timing(wire_s=(1e-6, 50e-6), read_s=(0, 1e-6)))
    active, passive = connected(fabric)
    far, sink = passive.memory(b"bytes"), active.memory(5)
    passive.room()
    active.qp.post_send(RdmaRead(1, (sink.view,), far.va, far.rkey))
    say(active, 2, fence=fence)
    fabric.run_until(lambda: bool(passive.received))
    overtaken = bytes(sink.view) != b"bytes"
    fabric.run()
    assert [each.wr_id for each in active.sent] == [1, 2]  # completions are in order all the same
    return overtaken, bytes(sink.view) == b"bytes"


def test_a_send_may_overtake_the_bytes_of_a_read() -> None:
    seen = {orders(seed, fence=False) for seed in SEEDS}
    assert seen == {(True, True), (False, True)}
    assert {orders(seed, fence=True) for seed in SEEDS} == {(False, True)}


@pytest.mark.parametrize("seed", range(5))
def test_answers_leave_in_the_order_of_requests(seed: int) -> None:
    recorder = Recorder()
    fabric = Fabric(Random(seed), observer=recorder)
    active, passive = connected(fabric)
    far, sink = passive.memory(64), active.memory(64)
    for index in range(20):
        passive.room(wr_id=index)
        if index % 3:
            say(active, index)
        else:
            active.qp.post_send(RdmaRead(index, (sink.view[:index],), far.va, far.rkey))
    fabric.run()
    answers = [each for each in recorder.qp_messages if each.kind in (Kind.READ_RESPONSE, Kind.ACK)]
    wanted = [(Kind.ACK, 0) if index % 3 else (Kind.READ_RESPONSE, index) for index in range(20)]
    assert [(each.kind, each.length) for each in answers] == wanted


def test_a_message_may_overtake_the_last_word() -> None:
    kinds = set()
    for seed in SEEDS:
        fabric = Fabric(Random(seed), timing=Timing(wire_s=(1e-6, 50e-6), cm_s=(1e-6, 50e-6)))
        active, passive = ends(fabric)
        passive.room()
        connect(active, passive)
        fabric.run_until(lambda end=active: end.qp.state is QpState.RTS)  # type: ignore[misc]
        say(active, 1)
        fabric.run()
        assert len(passive.received) == 1
        kinds.add(tuple(event.kind for event in passive.events))
    assert kinds == {(), (EventKind.COMMUNICATION_ESTABLISHED,)}


def test_disconnect_may_overtake_data() -> None:
    arrived = set()
    for seed in SEEDS:
        fabric = Fabric(Random(seed), timing=Timing(wire_s=(1e-6, 50e-6), cm_s=(1e-6, 50e-6)))
        active, passive = connected(fabric)
        passive.room()
        say(active, 1)
        fabric.run_until(fabric.now + 20e-6)
        passive.disconnect()
        fabric.run()
        sent = active.sent[0].status
        got = passive.received[0].status
        assert not (sent is Status.SUCCESS and got is not Status.SUCCESS)  # what was acknowledged has arrived
        arrived.add((sent, got))
    assert (Status.FLUSHED, Status.FLUSHED) in arrived
    assert (Status.FLUSHED, Status.SUCCESS) in arrived  # delivered, and the sender never knows
    assert (Status.SUCCESS, Status.SUCCESS) in arrived


# Memory.


def test_keys_and_addresses_are_repeatable_and_odd() -> None:
    def story() -> list[tuple[int, int]]:
        domain = Fabric(Random(1)).device("a").alloc_pd()
        found = []
        for _ in range(3):
            region = domain.register(bytearray(100), ALL)
            found.append((region.va, int(region.rkey)))
            other = domain.register(bytearray(5000), ALL)
            found.append((other.va, int(other.rkey)))
            region.deregister()
        return found

    first = story()
    assert first == story()
    assert len({va for va, _ in first}) == len({key for _, key in first}) == 6
    assert any(va % 4096 for va, _ in first)
    assert len({key >> 8 for _, key in first}) == 6  # a freed index is not used again
    assert all(0 < key < 1 << 32 for _, key in first)


def test_a_region_pins_its_buffer() -> None:
    domain = Fabric(Random(1)).device("a").alloc_pd()
    memory = bytearray(8)
    region = domain.register(memory, ALL)
    with pytest.raises(BufferError):
        memory.append(1)
    region.deregister()


def test_local_memory_is_not_checked_where_the_device_does_not() -> None:
    fabric = Fabric(Random(1))
    attributes = DeviceAttributes(checks_local_memory=False)
    left, right = End.of(fabric.device("l", attributes)), End.of(fabric.device("r", attributes))
    right.device.cm.listen(SERVICE, lambda request: request.accept(right.qp, b"", lambda *_: None))
    connect(left, right)
    fabric.run()
    room = bytearray(8)
    right.qp.post_recv(Receive(1, (memoryview(room),)))
    left.qp.post_send(Send(1, (memoryview(bytearray(b"loose")),)))
    fabric.run()
    assert bytes(room) == b"loose\0\0\0"


def test_a_receive_of_impossible_memory_is_an_error_at_both_ends() -> None:
    fabric = Fabric(Random(1))
    active, passive = connected(fabric)
    memory = bytearray(8)
    passive.domain.register(memory, ALL)
    passive.qp.post_recv(Receive(1, (memoryview(memory).toreadonly(),)))
    say(active, 1)
    fabric.run()
    assert passive.received[0].status is Status.LOCAL_PROTECTION_ERROR
    assert active.sent[0].status is Status.REMOTE_OPERATION_ERROR


# Faults.


def test_a_request_fails_as_told() -> None:
    faults = Faults(error_by_wr_id={2: Status.REMOTE_OPERATION_ERROR})
    fabric = Fabric(Random(1), faults=faults)
    active, passive = connected(fabric)
    for index in range(3):
        passive.room(wr_id=index)
        say(active, index + 1)
    fabric.run()
    assert [each.status for each in active.sent] == [Status.SUCCESS, Status.REMOTE_OPERATION_ERROR, Status.FLUSHED]
    assert [each.ok for each in passive.received] == [True]
    assert (faults.error_by_wr_id, passive.qp.state) == ({}, QpState.RTS)


def test_requests_fail_by_chance() -> None:
    faults = Faults(complete_with_error=0.2, error_statuses=(Status.FATAL,))
    fabric = Fabric(Random(3), faults=faults)
    active, passive = connected(fabric)
    for index in range(50):
        passive.room(wr_id=index)
        say(active, index)
    fabric.run()
    statuses = [each.status for each in active.sent]
    assert len(statuses) == 50
    good = statuses.index(Status.FATAL)
    assert statuses == [Status.SUCCESS] * good + [Status.FATAL] + [Status.FLUSHED] * (49 - good)
    assert len([each for each in passive.received if each.ok]) == good


def test_a_cut_is_found_by_who_sends() -> None:
    fabric = Fabric(Random(1))
    active, passive = connected(fabric)
    passive.room()
    fabric.cut(active.qp)
    begun = fabric.now
    say(active, 1)
    say(active, 2)
    fabric.run()
    assert active.sent == []
    fabric.run_until(1000.0)
    assert [each.status for each in active.sent] == [Status.RETRY_EXCEEDED, Status.FLUSHED]
    assert (passive.done, passive.qp.state, passive.events) == ([], QpState.RTS, [])  # who only waits never knows
    active.disconnect()  # its DREQ is lost as well
    fabric.run_until(2000.0)
    assert active.told[1] == Disconnected(by_remote=False, confirmed=False)
    assert passive.kinds == ["Established"]
    assert begun < 1.0


def test_a_cut_takes_what_is_on_its_way() -> None:
    seen = set()
    for seed in SEEDS:
        fabric = Fabric(Random(seed), timing=Timing(wire_s=(1e-6, 10e-6)))
        active, passive = connected(fabric)
        passive.room()
        fabric.call_later(8e-6, lambda fabric=fabric, qp=active.qp: fabric.cut(qp))  # type: ignore[misc]
        say(active, 1)
        fabric.run_until(1000.0)
        seen.add((active.sent[0].status, bool(passive.received)))
    lost = Status.RETRY_EXCEEDED
    assert seen == {(lost, False), (lost, True), (Status.SUCCESS, True)}


def test_a_reset_is_told_to_both_ends() -> None:
    fabric = Fabric(Random(1))
    active, passive = connected(fabric)
    for end in (active, passive):
        end.room()
    fabric.reset(passive.qp)
    fabric.run()
    for end in (active, passive):
        assert [event.kind for event in end.events] == [EventKind.QP_FATAL]
        assert [each.status for each in end.received] == [Status.FLUSHED]
        assert end.told[1] == Disconnected(by_remote=True, confirmed=False)
    fabric.run_until(10.0)
    assert active.kinds == passive.kinds == ["Established", "Disconnected", "TimewaitExit"]


def test_a_connection_is_lost_by_chance() -> None:
    fabric = Fabric(Random(5), faults=Faults(lose_connection=0.05))
    active, passive = connected(fabric)
    for index in range(100):
        passive.room(wr_id=index)
        say(active, index)
        fabric.run()
    fabric.run_until(1000.0)
    statuses = [each.status for each in active.sent]
    good = statuses.index(Status.RETRY_EXCEEDED)
    assert len(statuses) == 100
    assert 0 < good < 99
    assert statuses[:good] == [Status.SUCCESS] * good
    assert good <= len(passive.received)  # an acknowledgement may be what was lost


def test_a_dead_device_is_silent() -> None:
    fabric = Fabric(Random(1))
    active, passive = connected(fabric)
    passive.room()
    told: list[EventKind] = []
    passive.device.on_event = lambda event: told.append(event.kind)
    fabric.fail(passive.device)
    say(active, 1)
    fabric.run_until(1000.0)
    assert told == [EventKind.DEVICE_FATAL]
    assert [each.status for each in passive.received] == [Status.FLUSHED]
    assert [each.status for each in active.sent] == [Status.RETRY_EXCEEDED]


def test_an_unplugged_device_is_silent_until_plugged() -> None:
    fabric = Fabric(Random(1))
    active, passive = connected(fabric)
    told: list[EventKind] = []
    passive.device.on_event = lambda event: told.append(event.kind)
    fabric.unplug(passive.device)
    fabric.unplug(passive.device)
    passive.room()
    say(active, 1)
    fabric.run_until(1000.0)
    assert [each.status for each in active.sent] == [Status.RETRY_EXCEEDED]
    fabric.plug(passive.device)
    again, other = End.of(active.device), End.of(passive.device)
    passive.device.cm.listen(77, lambda request: request.accept(other.qp, b"", lambda *_: None))
    again.device.cm.connect(passive.device.address, 77, again.qp, b"", lambda _, event: again.told.append(event))
    fabric.run()
    assert again.kinds == ["Established"]
    assert told == [EventKind.PORT_ERROR, EventKind.PORT_ACTIVE]


@pytest.mark.parametrize("kind", [CmKind.REQ, CmKind.REP, CmKind.RTU, CmKind.DREQ, CmKind.DREP])
def test_a_lost_message_is_made_up_for(
    kind: CmKind,
) -> None:
    recorder = Recorder()
    faults = Faults(lose_cm_next={kind: 2})
    fabric = Fabric(Random(1), faults=faults, observer=recorder)
    active, passive = ends(fabric)
    connect(active, passive)
    fabric.run_until(1000.0)
    active.disconnect()
    fabric.run_until(2000.0)
    assert active.kinds == passive.kinds == ["Established", "Disconnected", "TimewaitExit"]
    assert active.told[1] == Disconnected(by_remote=False)
    assert faults.lose_cm_next == {kind: 0}
    assert [message.kind for message in recorder.cm_messages].count(kind) >= 3
    assert not active.device.cm.connections
    assert not passive.device.cm.by_remote


def test_a_lost_rejection_is_made_up_for() -> None:
    fabric = Fabric(Random(1), faults=Faults(lose_cm_next={CmKind.REJ: 2}))
    active, passive = ends(fabric)
    asked: list[int] = []
    passive.device.cm.listen(5, lambda request: [asked.append(1), request.reject()])  # type: ignore[func-returns-value]
    active.device.cm.connect(passive.device.address, 5, active.qp, b"", lambda _, event: active.told.append(event))
    fabric.run_until(1000.0)
    assert isinstance(active.told[0], Rejected)
    assert (active.told[0].reason, len(asked)) == (REJECT_CONSUMER, 3)


@pytest.mark.parametrize(
    ("kind", "active_told", "passive_told"),
    [
        (CmKind.REQ, ["Unreachable"], []),
        (CmKind.REP, ["Unreachable"], ["Unreachable"]),
        (CmKind.RTU, ["Established"], ["Unreachable"]),
    ],
)
def test_what_is_always_lost_ends_the_attempt(
    kind: CmKind,
    active_told: list[str],
    passive_told: list[str],
) -> None:
    fabric = Fabric(Random(1), faults=Faults(lose_cm_next={kind: 1000}))
    active, passive = ends(fabric)
    connect(active, passive)
    fabric.run_until(1000.0)
    assert (active.kinds, passive.kinds) == (active_told, passive_told)
    if active_told == ["Established"]:
        active.disconnect()  # the other end knows of nothing, and says so
        fabric.run_until(2000.0)
        assert active.told[1] == Disconnected(by_remote=False)
    else:
        assert active.told == [Unreachable()]


def test_disconnects_that_are_always_lost_end_as_well() -> None:
    fabric = Fabric(Random(1), faults=Faults(lose_cm_next={CmKind.DREQ: 1000}))
    active, passive = connected(fabric)
    active.disconnect()
    fabric.run_until(1000.0)
    assert active.told[1:] == [Disconnected(by_remote=False, confirmed=False), active.told[2]]
    assert active.kinds[2:] == ["TimewaitExit"]
    assert passive.kinds == ["Established"]


@pytest.mark.parametrize("seed", range(30))
def test_a_lossy_manager_comes_to_rest(seed: int) -> None:
    fabric = Fabric(Random(seed), faults=Faults(lose_cm=0.4))
    pairs = [ends(fabric) for _ in range(3)]
    for active, passive in pairs:
        connect(active, passive)
    fabric.run_until(200.0)
    for active, passive in pairs:
        for end in (active, passive):
            if end.connection is not None and fabric.rng.random() < 0.8:
                end.disconnect()
    fabric.run_until(1000.0)
    established = ["Established", "Disconnected", "TimewaitExit"]
    for active, passive in pairs:
        for end in (active, passive):
            assert end.kinds in ([], established[:1], established, ["Unreachable"], ["Rejected"])


def test_registrations_fail_and_take_time() -> None:
    faults = Faults(fail_registrations_next=2)
    fabric = Fabric(Random(1), faults=faults, timing=Timing(registration_s=(0.5, 0.5)))
    domain = fabric.device("a").alloc_pd()
    got: list[MemoryRegion | SidestepError] = []
    with pytest.raises(Unavailable):
        domain.register(bytearray(8), ALL)
    for _ in range(2):
        domain.register_later(bytearray(8), ALL, got.append)
    with pytest.raises(Misuse):
        domain.register_later(b"constant", ALL, got.append)
    assert fabric.run_until(lambda: len(got) == 2)
    assert fabric.now == 0.5
    assert isinstance(got[0], Unavailable)
    assert isinstance(got[1], MemoryRegion)
    faults.fail_registration = 1.0
    with pytest.raises(Unavailable):
        domain.register(bytearray(8), ALL)


# Observers.


def test_an_observer_proves_that_nothing_is_copied_twice() -> None:
    recorder = Recorder()
    fabric = Fabric(Random(1), observer=recorder)
    active, passive = connected(fabric)
    source, target, sink = active.memory(b"s" * 100), passive.memory(200), active.memory(50)
    head = b"header"
    passive.qp.post_recv(Receive(1, (target.view[:10], target.view[20:60])))
    active.qp.post_send(Send(1, (head, source.view[30:50]), solicited=True))
    active.qp.post_send(RdmaWrite(2, (source.view[:40],), target.va + 100, target.rkey))
    active.qp.post_send(RdmaRead(3, (sink.view[5:25],), target.va + 100, target.rkey, fence=True))
    fabric.run()
    placed = [(each.kind, each.source_address, each.target_address, each.length) for each in recorder.placements]
    near, far = buffer_address(source.view), buffer_address(target.view)
    assert placed[:4] == [
        (Kind.SEND, buffer_address(head), far, 6),
        (Kind.SEND, near + 30, far + 6, 4),
        (Kind.SEND, near + 34, far + 20, 16),
        (Kind.WRITE, near, far + 100, 40),
    ]
    kind, _, address, length = placed[4]
    assert (kind, address, length, len(placed)) == (Kind.READ_RESPONSE, buffer_address(sink.view) + 5, 20, 5)


def test_an_observer_sees_the_wire() -> None:
    recorder = Recorder()
    fabric = Fabric(Random(1), observer=recorder)
    active, passive = connected(fabric)
    target, sink = passive.memory(b"." * 8), active.memory(8)
    passive.room()
    key = target.rkey
    active.qp.post_send(RdmaWrite(1, (b"written",), target.va, key))
    active.qp.post_send(RdmaRead(2, (sink.view,), target.va, key))
    active.qp.post_send(Send(3, (b"sent",), solicited=True, invalidate=key, fence=True))
    active.disconnect  # noqa: B018 - the connection is kept until the end
    fabric.run()
    active.disconnect()
    fabric.run()
    seen = [(each.kind, each.source_qp, each.payload, each.length) for each in recorder.qp_messages]
    here, there = active.qp.number, passive.qp.number
    requests = [entry for entry in seen if entry[0] is not Kind.ACK]
    assert requests == [
        (Kind.WRITE, here, (b"written",), 7),
        (Kind.READ_REQUEST, here, (), 8),
        (Kind.READ_RESPONSE, there, (b"written.",), 8),
        (Kind.SEND, here, (b"sent",), 4),
    ]
    acks = [each for each in recorder.qp_messages if each.kind is Kind.ACK]
    assert [(each.source_qp, each.status) for each in acks] == [(there, Status.SUCCESS)] * 2
    write = recorder.qp_messages[0]
    assert (write.remote_va, write.rkey) == (target.va, key)
    assert (write.source, write.target, write.target_qp) == ("device0", "device1", there)
    send = next(each for each in recorder.qp_messages if each.kind is Kind.SEND)
    assert (send.solicited, send.invalidate) == (True, key)
    kinds = [each.kind for each in recorder.cm_messages]
    assert kinds == [CmKind.REQ, CmKind.REP, CmKind.RTU, CmKind.DREQ, CmKind.DREP]
    req, rep = recorder.cm_messages[:2]
    assert (req.service_id, req.qp_number, len(req.private_data)) == (SERVICE, here, 92)
    assert (rep.local_id, rep.remote_id, rep.qp_number, len(rep.private_data)) == (2, req.local_id, there, 196)
    times = [each.at for each in recorder.qp_messages]
    assert times == sorted(times)


def test_a_refusal_is_on_the_wire() -> None:
    recorder = Recorder()
    fabric = Fabric(Random(1), observer=recorder)
    active, passive = connected(fabric)
    target = passive.memory(8, Access.LOCAL_WRITE)
    active.qp.post_send(RdmaWrite(1, (b"x",), target.va, target.rkey))
    fabric.run()
    assert [each.status for each in recorder.qp_messages] == [None, Status.REMOTE_ACCESS_ERROR]
    assert recorder.placements == []


# The connection manager's table.

_OF_OTHERS = (CmState.CLOSED, CmState.JOINED)  # nothing comes any more; it joins none in advance


@pytest.mark.parametrize("kind", [kind for kind in CmKind if kind is not CmKind.REQ])
@pytest.mark.parametrize("state", [state for state in CmState if state not in _OF_OTHERS])
def test_any_message_in_any_state(state: CmState, kind: CmKind) -> None:
    """A pair that is in the table or not: nothing breaks, and the fabric comes to rest."""
    lost = {CmKind.RTU: 3} if state is CmState.REPLY_SENT else {}
    fabric = Fabric(Random(1), timing=NO_DELAY, faults=Faults(lose_cm_next=lost))
    active, passive = ends(fabric)
    connect(active, passive)
    if state is not CmState.REQUEST_SENT:
        fabric.run()
    assert active.connection is not None
    connection, end = active.connection, active
    if state is CmState.REPLY_SENT:
        assert passive.connection is not None
        connection, end = passive.connection, passive
    if state in (CmState.DISCONNECT_SENT, CmState.TIMEWAIT):
        active.disconnect()
    if state is CmState.TIMEWAIT:
        fabric.run()
    assert connection.state is state
    other = connection.remote_address
    remote_id = connection.remote_id or 99
    end.device.cm.receive(
        CmMessage(
            at=0.0,
            kind=kind,
            source=other,
            target=end.device.name,
            local_id=remote_id,
            remote_id=connection.local_id,
            qp_number=passive.qp.number,
        )
    )
    if (state, kind) not in TRANSITIONS:
        assert connection.state is state
    fabric.run_until(1000.0)
    assert end.kinds.count("Established") <= 1
    assert end.kinds.count("Disconnected") <= 1


def test_a_message_from_elsewhere_is_not_of_the_connection() -> None:
    fabric = Fabric(Random(1))
    active, passive = connected(fabric)
    fabric.device("stranger")
    assert active.connection is not None
    forged = CmMessage(
        at=0.0,
        kind=CmKind.DREQ,
        source="stranger",
        target=active.device.name,
        local_id=active.connection.remote_id,
        remote_id=active.connection.local_id,
    )
    active.device.cm.receive(forged)
    fabric.run()
    assert active.connection.state is CmState.ESTABLISHED
    assert passive.kinds == ["Established"]
