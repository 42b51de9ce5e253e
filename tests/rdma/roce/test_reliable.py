"""What a reliable connection does about loss, waiting and repetition, packet by packet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hca_ends import LEFT, RIGHT, HcaEnd, connected

from sidestep.rdma.roce.datagram import known_address, seal
from sidestep.rdma.roce.numbers import after, ahead, timeout_s
from sidestep.rdma.roce.packet import Aeth, Bth, ImmDt, Op, Packet, Reth
from sidestep.rdma.roce.qp import RoceQueuePair
from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.wire import Wire
from sidestep.rdma.verbs import EventKind, QpCapabilities, QpState
from sidestep.rdma.work import RdmaRead, RdmaWrite, RKey, Send, Status

SMALL = RoceSettings(mtu=256, window=8)
MTU = 256


class Ear:
    """Hears all that goes over a wire, and loses what it is told to."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.heard: list[tuple[str, Packet]] = []
        self.lost: set[tuple[Op, int]] = set()  # the first of that opcode with that number among its kind
        self._seen: dict[Op, int] = {}
        wire.faults.lose = self.hear

    def hear(self, target: str, payload: bytes) -> bool:
        packet = Packet.decode(memoryview(payload)[:-4])
        self.heard.append((target, packet))
        op = packet.bth.opcode
        number = self._seen[op] = self._seen.get(op, 0) + 1
        return (op, number) in self.lost

    def ops(self, target: str) -> list[Op]:
        return [packet.bth.opcode for to, packet in self.heard if to == target]


def pair(capabilities: QpCapabilities | None = None) -> tuple[Wire, HcaEnd, HcaEnd, Ear]:
    wire, active, passive = connected(settings=SMALL, capabilities=capabilities)
    return wire, active, passive, Ear(wire)


def rest(wire: Wire, seconds: float = 10.0) -> None:
    until = wire.now + seconds
    while wire.step(until):
        pass


# ---- numbers ----


def test_numbers_are_on_a_circle() -> None:
    assert after(0xFF_FFFF, 1) == 0
    assert after(0, -1) == 0xFF_FFFF
    assert ahead(2, 0xFF_FFFE) == 4
    assert ahead(0xFF_FFFE, 2) == -4
    assert ahead(1 << 23, 0) == -(1 << 23)


def test_times() -> None:
    assert timeout_s(14) == pytest.approx(0.0671, rel=1e-3)


@pytest.mark.spec("IBTA 9.7.5.2.8")
@pytest.mark.parametrize(("code", "wait_s"), [(0, 0.65536), (1, 1e-5), (24, 0.04096), (31, 0.49152)])
def test_a_requester_waits_as_long_as_it_is_asked_to(code: int, wait_s: float) -> None:
    wire, active, _, ear = pair()
    ear.lost = {(Op.SEND_ONLY, 1)}
    active.qp.post_send(Send(1, (b"word",)))
    wire.run()
    nak = Packet(Bth(Op.ACK, active.qp.number, ear.heard[0][1].bth.psn), (Aeth.of(0x20 | code, 0),))
    inject(wire, RIGHT, LEFT, nak)
    wire.run()
    assert active.qp.deadline == pytest.approx(wire.now + wait_s, abs=1e-9)


# ---- what goes out ----


@pytest.mark.spec("IBTA 9.7.2")
def test_a_long_message_is_cut_at_the_mtu() -> None:
    wire, active, passive, ear = pair()
    passive.room(1000)
    active.qp.post_send(Send(1, (active.memory(bytes(600)).view,), solicited=True))
    wire.run()
    packets = [packet for target, packet in ear.heard if target == RIGHT]
    assert [each.bth.opcode for each in packets] == [Op.SEND_FIRST, Op.SEND_MIDDLE, Op.SEND_LAST]
    assert [len(each.payload) for each in packets] == [256, 256, 88]
    assert [each.bth.solicited for each in packets] == [False, False, True]
    assert [each.bth.ack_req for each in packets] == [False, False, True]
    assert [ahead(each.bth.psn, packets[0].bth.psn) for each in packets] == [0, 1, 2]
    assert ear.ops(LEFT) == [Op.ACK]


@pytest.mark.spec("IBTA 9.7.5.1.2")
def test_acknowledgements_are_coalesced() -> None:
    """What is there when the answer leaves is answered once."""
    wire, active, passive, ear = pair()
    taken = []
    for number in range(6):
        passive.room(8, number)
        active.qp.post_send(Send(number, (b"word",)))
    while (datagram := active.device.poll_datagram(wire.now)) is not None:
        taken.append(bytes(datagram.payload))
    for payload in taken:
        passive.device.handle_datagram(LEFT, 4791, payload, wire.now)
    passive.device.pump(wire.now)
    wire.run()
    assert ear.ops(LEFT) == [Op.ACK]
    assert [each.wr_id for each in active.sent] == list(range(6))


def test_a_read_is_asked_for_in_parts_of_the_window() -> None:
    wire, active, passive, ear = pair()
    far, sink = passive.memory(bytes(range(256)) * 10), active.memory(2560)
    active.qp.post_send(RdmaRead(1, (sink.view,), far.va, far.rkey))
    wire.run()
    asked = [packet.find(Reth) for target, packet in ear.heard if target == RIGHT]
    assert [each.length for each in asked if each] == [1024, 1024, 512]
    assert sink.view == far.view


# ---- what is lost ----


@pytest.mark.spec("IBTA 9.7.4.1.2")
@pytest.mark.parametrize("middle", [True, False])
def test_a_packet_that_is_lost_is_asked_for_once(middle: bool) -> None:
    wire, active, passive, ear = pair()
    ear.lost = {(Op.SEND_MIDDLE if middle else Op.SEND_FIRST, 1)}
    room = passive.room(2000)
    active.qp.post_send(Send(1, (active.memory(bytes(range(250)) * 6).view,)))
    began = wire.now
    wire.run()
    assert wire.now - began < 1e-3  # nobody waited for a timer
    naks = [packet.find(Aeth) for target, packet in ear.heard if target == LEFT]
    assert [each.syndrome for each in naks if each] == [0x60, 0x1F]
    assert bytes(room.view[:1500]) == bytes(range(250)) * 6


@pytest.mark.spec("IBTA 9.7.6.1.3")
@pytest.mark.parametrize("op", [Op.SEND_LAST, Op.ACK])
def test_what_nobody_tells_is_lost_after_a_while(op: Op) -> None:
    wire, active, passive, ear = pair()
    ear.lost = {(op, 1)}
    passive.room(2000)
    active.qp.post_send(Send(1, (active.memory(600).view,)))
    wire.run()
    assert active.sent == []
    rest(wire)
    assert ([each.ok for each in active.sent], len(passive.received)) == ([True], 1)
    assert active.qp.details()["resent"] == 1


@pytest.mark.spec("IBTA 9.7.5.1.6")
@pytest.mark.parametrize(
    "op", [Op.READ_REQUEST, Op.READ_RESPONSE_FIRST, Op.READ_RESPONSE_MIDDLE, Op.READ_RESPONSE_LAST]
)
def test_a_read_goes_on_from_what_is_missing(op: Op) -> None:
    wire, active, passive, ear = pair()
    ear.lost = {(op, 1)}
    far, sink = passive.memory(bytes(range(256)) * 4), active.memory(1024)
    active.qp.post_send(RdmaRead(1, (sink.view,), far.va, far.rkey))
    rest(wire)
    assert [each.ok for each in active.sent] == [True]
    assert sink.view == far.view
    asked = [found for target, packet in ear.heard if target == RIGHT and (found := packet.find(Reth))]
    skipped = {Op.READ_RESPONSE_MIDDLE: 1, Op.READ_RESPONSE_LAST: 3}.get(op, 0)
    assert (asked[-1].va - far.va, asked[-1].length) == (skipped * MTU, 1024 - skipped * MTU)


@pytest.mark.spec("IBTA 9.7.5.1.6")
def test_a_repeated_read_asks_for_a_part_of_one_request() -> None:
    """Linux's rxe answers nothing else."""
    wire, active, passive, ear = pair()
    ear.lost = {(Op.READ_RESPONSE_MIDDLE, 1)}
    far, sink = passive.memory(bytes(range(256)) * 10), active.memory(2560)
    active.qp.post_send(RdmaRead(1, (sink.view,), far.va, far.rkey))
    rest(wire)
    assert sink.view == far.view
    found = [reth for target, packet in ear.heard if target == RIGHT and (reth := packet.find(Reth))]
    asked = [(reth.va - far.va, reth.va - far.va + reth.length) for reth in found]
    assert asked[:2] == [(0, 1024), (1024, 2048)]
    assert asked[2] == (MTU, 1024)
    assert asked[3:] == [(1024, 2048), (2048, 2560)]


@pytest.mark.spec("IBTA 9.7.5.1.6")
def test_a_read_that_comes_again_late_does_no_harm() -> None:
    """Its memory may be the other end's no more."""
    wire, active, passive, ear = pair()
    far, sink = passive.memory(b"far away"), active.memory(8)
    active.qp.post_send(RdmaRead(1, (sink.view,), far.va, far.rkey))
    wire.run()
    (asked,) = [packet for target, packet in ear.heard if target == RIGHT and packet.find(Reth)]
    far.deregister()
    ear.heard.clear()
    wire.inject(LEFT, RIGHT, seal(asked.encode(), known_address(LEFT), known_address(RIGHT)))
    wire.run()
    assert [packet for target, packet in ear.heard if target == LEFT] == []
    assert passive.qp.state is QpState.RTS


@pytest.mark.spec("IBTA 9.7.5.1.2")
def test_an_acknowledgement_that_passes_a_read_tells_that_its_answer_was_lost() -> None:
    wire, active, passive, ear = pair()
    ear.lost = {(Op.READ_RESPONSE_ONLY, 1)}
    far, sink = passive.memory(b"far away"), active.memory(8)
    passive.room(8)
    active.qp.post_send(RdmaRead(1, (sink.view,), far.va, far.rkey))
    active.qp.post_send(Send(2, (b"word",)))
    began = wire.now
    wire.run()
    assert wire.now - began < 1e-3
    assert [(each.wr_id, each.ok) for each in active.sent] == [(1, True), (2, True)]
    assert len(passive.received) == 1  # what was carried out is not carried out again


def test_retries_have_an_end() -> None:
    wire, active, passive, _ = pair()
    wire.faults.lose = lambda target, payload: True
    active.qp.post_send(Send(1, (b"word",)))
    active.qp.post_send(Send(2, (b"word",), signaled=False))
    began = wire.now
    assert wire.run_until(lambda: len(active.sent) == 2)
    assert [each.status for each in active.sent] == [Status.RETRY_EXCEEDED, Status.FLUSHED]
    assert active.qp.details()["resent"] == SMALL.retry_count
    assert 70 < (wire.now - began) / timeout_s(SMALL.ack_timeout_code) < 90  # 1, 2, 4, 8, and 16 four times
    assert passive.qp.state is QpState.RTS


# ---- no receive ----


@pytest.mark.spec("IBTA 9.7.5.2.8")
def test_who_has_no_receive_is_asked_again() -> None:
    wire, active, passive, ear = pair()
    for number in range(3):
        active.qp.post_send(Send(number, (b"word",)))
    began = wire.now
    wire.run()
    passive.room(8), passive.room(8), passive.room(8)
    rest(wire)
    assert [each.ok for each in active.sent] == [True] * 3
    assert wire.now - began >= 0.04096  # as SMALL.rnr_timer_code says
    naks = [found.syndrome for target, packet in ear.heard if target == LEFT and (found := packet.find(Aeth))]
    assert naks[0] == 0x20 | SMALL.rnr_timer_code
    assert 0x60 not in naks  # what was behind it is no gap


def test_a_nak_behind_an_rnr_nak_does_not_end_the_wait() -> None:
    """Linux's rxe sends one."""
    wire, active, passive, ear = pair()
    active.qp.post_send(Send(1, (b"word",)))
    wire.run()
    sent = len(ear.ops(RIGHT))
    psn = ear.heard[0][1].bth.psn
    inject(wire, RIGHT, LEFT, Packet(Bth(Op.ACK, active.qp.number, psn), (Aeth.of(0x60, 0),)))
    wire.run()
    assert len(ear.ops(RIGHT)) == sent
    passive.room(8)
    rest(wire)
    assert [each.ok for each in active.sent] == [True]


# ---- refusals ----


def test_the_last_word_is_repeated() -> None:
    wire, active, passive, ear = pair()
    ear.lost = {(Op.ACK, 1)}
    memory = passive.memory(8)
    active.qp.post_send(RdmaWrite(1, (b"EVIL",), memory.va - 1, memory.rkey))
    rest(wire)
    assert [each.status for each in active.sent] == [Status.REMOTE_ACCESS_ERROR]
    assert [each.kind for each in passive.events] == [EventKind.QP_ACCESS_ERROR]


def test_an_answer_that_is_too_short_is_none() -> None:
    wire, active, passive, ear = pair()
    ear.lost = {(Op.READ_RESPONSE_ONLY, 1)}
    far, sink = passive.memory(8), active.memory(8)
    active.qp.post_send(RdmaRead(1, (sink.view,), far.va, far.rkey))
    wire.run()
    psn = ear.heard[0][1].bth.psn
    short = Packet(Bth(Op.READ_RESPONSE_ONLY, active.qp.number, psn), (Aeth.of(0x1F, 1),), b"word")
    inject(wire, RIGHT, LEFT, short)
    wire.run()
    assert [each.status for each in active.sent] == [Status.BAD_RESPONSE]
    assert not any(sink.view)


# ---- what others may send ----


@pytest.mark.spec("IBTA 9.4.1, 9.4.3")
def test_immediate_data_is_told() -> None:
    wire, active, passive, ear = pair()
    target = passive.memory(8)
    passive.room(8, 1), passive.room(8, 2)
    psn = active.qp.path.send_psn if active.qp.path else 0
    send = Packet(Bth(Op.SEND_ONLY_IMM, passive.qp.number, psn, ack_req=True), (ImmDt(b"abcd"),), b"word")
    write = Packet(
        Bth(Op.WRITE_ONLY_IMM, passive.qp.number, after(psn, 1), ack_req=True),
        (Reth(target.va, target.rkey, 4), ImmDt(b"efgh")),
        b"byte",
    )
    inject(wire, LEFT, RIGHT, send)
    inject(wire, LEFT, RIGHT, write)
    wire.run()
    told = [(each.wr_id, each.byte_len, each.immediate) for each in passive.received]
    assert told == [(1, 4, b"abcd"), (2, 4, b"efgh")]
    assert bytes(target.view) == b"byte\0\0\0\0"
    assert ear.ops(LEFT)[-1] is Op.ACK


@pytest.mark.parametrize("op", [Op.SEND_LAST, Op.SEND_LAST_IMM, Op.WRITE_MIDDLE, Op.WRITE_LAST_IMM])
def test_what_was_not_due_is_refused(op: Op) -> None:
    wire, active, passive, ear = pair()
    psn = active.qp.path.send_psn if active.qp.path else 0
    raw = bytearray(Packet(Bth(Op.SEND_ONLY, passive.qp.number, psn, ack_req=True), (), bytes(28)).encode())
    raw[0] = op
    wire.inject(LEFT, RIGHT, seal(bytes(raw), known_address(LEFT), known_address(RIGHT)))
    wire.run()
    assert [each.kind for each in passive.events] == [EventKind.QP_REQUEST_ERROR]
    assert [found.syndrome for target, packet in ear.heard if target == LEFT and (found := packet.find(Aeth))] == [0x61]


def test_who_is_not_the_other_end_is_not_heard() -> None:
    wire, active, passive, _ = pair()
    passive.room(8)
    psn = active.qp.path.send_psn if active.qp.path else 0
    inject(wire, "fd00::3", RIGHT, Packet(Bth(Op.SEND_ONLY, passive.qp.number, psn), (), b"word"))
    wrong_partition = Packet(Bth(Op.SEND_ONLY, passive.qp.number, psn, pkey=0x8001), (), b"word")
    inject(wire, LEFT, RIGHT, wrong_partition)
    inject(wire, LEFT, RIGHT, replace(wrong_partition, bth=Bth(Op.SEND_ONLY, 5, psn)))
    wire.run()
    assert passive.received == []
    counters = passive.device.counters()
    for reason in ("other_end", "partition", "no_queue_pair"):
        assert counters[f"packet_dropped{{{reason}}}"] == 1


def inject(wire: Wire, source: str, target: str, packet: Packet) -> None:
    wire.inject(source, target, seal(packet.encode(), known_address(source), known_address(target)))


def test_numbers_of_a_user_that_are_too_large() -> None:
    """They are cut to what is on the wire, and refused there."""
    wire, active, passive, _ = pair()
    active.qp.post_send(RdmaWrite(1, (b"word",), 1 << 70, RKey(1 << 40)))
    rest(wire)
    assert [each.status for each in active.sent] == [Status.REMOTE_ACCESS_ERROR]
    assert passive.qp.state is QpState.ERROR


def test_a_fault_of_ours_ends_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, active, _, _ = pair()

    def fails(qp: RoceQueuePair, room: memoryview, most: int, now: float) -> None:
        raise RuntimeError("for once")

    monkeypatch.setattr(RoceQueuePair, "poll_train", fails)
    active.qp.post_send(Send(1, (b"word",)))
    wire.run()
    assert [each.kind for each in active.events] == [EventKind.QP_FATAL]
    assert [each.status for each in active.sent] == [Status.FLUSHED]
