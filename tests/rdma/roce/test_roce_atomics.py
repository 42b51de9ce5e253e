"""Atomic operations and immediate data of the software HCA, packet by packet."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hca_ends import LEFT, RIGHT, HcaEnd
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reliable import Ear, pair, rest

from sidestep.errors import Misuse
from sidestep.rdma.iwarp.device import ATTRIBUTES as IWARP
from sidestep.rdma.roce.datagram import known_address, seal
from sidestep.rdma.roce.numbers import ahead
from sidestep.rdma.roce.packet import Aeth, AtomicAckEth, AtomicEth, Bth, ImmDt, Op, Packet, Reth
from sidestep.rdma.roce.wire import Wire
from sidestep.rdma.soft.qp import check_offered
from sidestep.rdma.verbs import EventKind, MemoryRegion, QpCapabilities, QpState
from sidestep.rdma.work import Access, CompareSwap, FetchAdd, RdmaRead, RdmaWrite, RKey, Send, SendRequest, Status

ATOMIC = Access.LOCAL_WRITE | Access.REMOTE_ATOMIC | Access.REMOTE_READ


def number(view: memoryview) -> int:
    return int.from_bytes(view[:8], sys.byteorder)


def target(end: HcaEnd) -> tuple[MemoryRegion, int]:
    """Zeros, and the address of eight of them that may be operated on."""
    region = end.domain.register(bytearray(32), ATOMIC)
    return region, region.va + (-region.va % 8)


def value(region: MemoryRegion, va: int) -> int:
    return number(region.view[va - region.va :])


def injected(wire: Wire, packet: Packet) -> None:
    wire.inject(LEFT, RIGHT, seal(packet.encode(), known_address(LEFT), known_address(RIGHT)))
    wire.run()


def answers(ear: Ear) -> list[tuple[int, int]]:
    """PSN and number of each."""
    found = [(packet.bth.psn, packet.find(AtomicAckEth)) for to, packet in ear.heard if to == LEFT]
    return [(psn, each.original) for psn, each in found if each is not None]


@pytest.mark.spec("IBTA 9.4.5")
def test_what_is_on_the_wire() -> None:
    wire, active, passive, ear = pair()
    region, va = target(passive)
    sink = active.memory(16)
    active.qp.post_send(FetchAdd(1, (sink.view[:8],), va, region.rkey, add=-1))
    active.qp.post_send(CompareSwap(2, (sink.view[8:],), va, region.rkey, compare=-1, swap=9))
    wire.run()
    asked = [packet for to, packet in ear.heard if to == RIGHT]
    assert [each.bth.opcode for each in asked] == [Op.FETCH_ADD, Op.CMP_SWAP]
    assert [each.find(AtomicEth) for each in asked] == [
        AtomicEth(va, region.rkey, (1 << 64) - 1, 0),
        AtomicEth(va, region.rkey, 9, (1 << 64) - 1),
    ]
    assert ahead(asked[1].bth.psn, asked[0].bth.psn) == 1
    assert answers(ear) == [(asked[0].bth.psn, 0), (asked[1].bth.psn, (1 << 64) - 1)]
    assert (number(sink.view), number(sink.view[8:]), value(region, va)) == (0, (1 << 64) - 1, 9)


@pytest.mark.spec("IBTA 9.7.5.1.6")
@pytest.mark.parametrize("op", [Op.FETCH_ADD, Op.ATOMIC_ACK])
def test_one_that_is_lost_is_carried_out_once(op: Op) -> None:
    wire, active, passive, ear = pair()
    ear.lost = {(op, 1)}
    region, va = target(passive)
    sink = active.memory(8)
    active.qp.post_send(FetchAdd(1, (sink.view,), va, region.rkey, add=5))
    rest(wire)
    assert [each.status for each in active.sent] == [Status.SUCCESS]
    assert (number(sink.view), value(region, va)) == (0, 5)
    assert ear.ops(RIGHT) == [Op.FETCH_ADD] * 2


@pytest.mark.spec("IBTA 9.7.5.1.6")
def test_a_repeated_one_is_answered_by_what_was_kept_or_not_at_all() -> None:
    wire, active, passive, ear = pair(QpCapabilities(initiator_depth=2, responder_resources=2))
    region, va = target(passive)
    sinks = [active.memory(8) for _ in range(3)]
    for sink in sinks:
        active.qp.post_send(FetchAdd(1, (sink.view,), va, region.rkey, add=5))
    wire.run()
    asked = [packet for to, packet in ear.heard if to == RIGHT]
    region.view[va - region.va] = 99
    ear.heard.clear()
    for each in reversed(asked):
        injected(wire, each)
    assert answers(ear) == [(asked[2].bth.psn, 10), (asked[1].bth.psn, 5)]  # the oldest is forgotten
    other = replace(asked[2], extensions=(AtomicEth(va, region.rkey, 6, 0),))
    ear.heard.clear()
    injected(wire, other)
    injected(wire, replace(asked[2], bth=replace(asked[2].bth, opcode=Op.CMP_SWAP)))
    assert answers(ear) == []
    assert region.view[va - region.va] == 99
    assert passive.qp.state is QpState.RTS


@pytest.mark.spec("IBTA 9.7.5.1.2")
def test_an_acknowledgement_that_passes_one_tells_that_its_answer_was_lost() -> None:
    wire, active, passive, ear = pair()
    ear.lost = {(Op.ATOMIC_ACK, 1)}
    region, va = target(passive)
    passive.room(8)
    sink = active.memory(8)
    active.qp.post_send(FetchAdd(1, (sink.view,), va, region.rkey, add=5))
    active.qp.post_send(Send(2, (b"word",)))
    began = wire.now
    wire.run()
    assert wire.now - began < 1e-3  # nobody waited for a timer
    assert [each.wr_id for each in active.sent] == [1, 2]
    assert (value(region, va), len(passive.received)) == (5, 1)


@pytest.mark.spec("IBTA 9.7.3")
def test_answers_keep_the_order_of_reads_and_operations() -> None:
    wire, active, passive, ear = pair()
    region, va = target(passive)
    far = passive.memory(bytes(range(256)) * 4)
    sinks = [active.memory(8), active.memory(1024), active.memory(8)]
    active.qp.post_send(FetchAdd(1, (sinks[0].view,), va, region.rkey, add=1))
    active.qp.post_send(RdmaRead(2, (sinks[1].view,), far.va, far.rkey))
    active.qp.post_send(FetchAdd(3, (sinks[2].view,), va, region.rkey, add=1))
    wire.run()
    assert [each.wr_id for each in active.sent] == [1, 2, 3]
    numbers = [packet.bth.psn for to, packet in ear.heard if to == LEFT]
    assert numbers == sorted(numbers, key=lambda psn: ahead(psn, numbers[0]))
    assert (sinks[1].view == far.view, number(sinks[2].view)) == (True, 1)


@pytest.mark.spec("IBTA 9.7.4.1.5, 9.7.4.1.6")
@pytest.mark.parametrize("what", ["alignment", "key", "bounds", "length", "forbidden"])
def test_what_is_refused(what: str) -> None:
    allowed = Access.REMOTE_READ if what == "forbidden" else None
    wire, _, passive, ear = pair()
    if allowed is not None:
        passive.qp.remote_access = int(allowed)
    region, va = target(passive)
    where = {
        "alignment": AtomicEth(va + 4, region.rkey, 1, 0),
        "key": AtomicEth(va, region.rkey ^ 1, 1, 0),
        "bounds": AtomicEth(va + 32, region.rkey, 1, 0),
    }.get(what, AtomicEth(va, region.rkey, 1, 0))
    assert passive.qp.rc is not None
    bth = Bth(Op.FETCH_ADD, passive.qp.number, passive.qp.rc.expected, ack_req=True)
    injected(wire, Packet(bth, (where,), b"more" if what == "length" else b""))
    (nak,) = [packet.find(Aeth) for to, packet in ear.heard if to == LEFT]
    assert nak is not None
    access = what in ("key", "bounds")
    assert nak.syndrome == (0x62 if access else 0x61)
    assert (passive.qp.state, bytes(region.view)) == (QpState.ERROR, bytes(32))
    kind = EventKind.QP_ACCESS_ERROR if access else EventKind.QP_REQUEST_ERROR
    assert [event.kind for event in passive.events] == [kind]


def test_an_answer_to_what_was_not_asked_is_dropped() -> None:
    wire, active, passive, ear = pair()
    ear.lost = {(Op.SEND_ONLY, 1), (Op.READ_REQUEST, 1)}
    far, sink = passive.memory(8), active.memory(8)
    active.qp.post_send(RdmaRead(1, (sink.view,), far.va, far.rkey))
    wire.run()
    asked = ear.heard[-1][1].bth
    answer = Packet(Bth(Op.ATOMIC_ACK, active.qp.number, asked.psn), (Aeth.of(0x1F, 1), AtomicAckEth(7)))
    wire.inject(RIGHT, LEFT, seal(answer.encode(), known_address(RIGHT), known_address(LEFT)))
    wire.run()
    assert (active.sent, bytes(sink.view)) == ([], bytes(8))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 3)), max_size=12), st.integers(0, 1 << 30))
def test_a_rough_link_and_a_plain_number_agree(asked: list[tuple[bool, int, int]], seed: int) -> None:
    wire, active, passive, _ = pair()
    wire.rng.seed(seed)
    wire.faults = replace(wire.faults, lose=None, loss=0.1, duplicate=0.1, late=0.1)
    region, va = target(passive)
    sinks = [active.memory(8) for _ in asked]
    expected, now = [], 0
    for (swaps, one, two), sink in zip(asked, sinks, strict=True):
        expected.append(now)
        request: SendRequest = FetchAdd(1, (sink.view,), va, region.rkey, add=one)
        if swaps:
            request = CompareSwap(1, (sink.view,), va, region.rkey, compare=one, swap=two)
            now = two if now == one else now
        else:
            now += one
        active.qp.post_send(request)
    rest(wire, 100.0)
    assert [each.ok for each in active.sent] == [True] * len(asked)
    assert ([number(sink.view) for sink in sinks], value(region, va)) == (expected, now)


# ---- immediate data ----


@pytest.mark.spec("IBTA 9.2.6, 9.2.3")
@pytest.mark.parametrize("size", [0, 100, 600])
def test_immediate_data_is_in_the_last_packet(size: int) -> None:
    wire, active, passive, ear = pair()
    far, near = passive.memory(600), active.memory(bytes(range(200)) * 3)
    for index in range(2):
        passive.room(600, index)
    active.qp.post_send(Send(1, (near.view[:size],), immediate=b"send", solicited=True))
    active.qp.post_send(RdmaWrite(2, (near.view[:size],), far.va, far.rkey, immediate=b"writ", solicited=True))
    wire.run()
    told = [(each.byte_len, each.immediate, each.solicited) for each in passive.received]
    assert told == [(size, b"send", True), (size, b"writ", True)]
    packets = [packet for to, packet in ear.heard if to == RIGHT]
    carry = [packet for packet in packets if packet.find(ImmDt) is not None]
    ops = (Op.SEND_LAST_IMM, Op.WRITE_LAST_IMM) if size > 256 else (Op.SEND_ONLY_IMM, Op.WRITE_ONLY_IMM)
    assert tuple(packet.bth.opcode for packet in carry) == ops
    assert (carry[1].find(Reth) is not None) == (size <= 256)
    assert bytes(far.view[:size]) == bytes(near.view[:size])


@pytest.mark.spec("IBTA 9.7.5.2.8")
def test_a_write_with_immediate_data_waits_for_a_receive() -> None:
    wire, active, passive, _ = pair()
    far = passive.memory(8)
    active.qp.post_send(RdmaWrite(1, (b"bytes",), far.va, far.rkey, immediate=b"imm!"))
    wire.run()
    assert (active.sent, bytes(far.view[:5])) == ([], bytes(5))
    assert passive.device.counters()["nak_sent{receiver_not_ready}"] == 1
    passive.room(8)
    rest(wire, 1.0)
    assert [each.ok for each in active.sent] == [True]
    assert (bytes(far.view[:5]), passive.received[0].immediate) == (b"bytes", b"imm!")


# ---- what is not offered, or is none ----


@pytest.mark.parametrize(
    "request_",
    [
        Send(1, (b"x",), immediate=b"123"),
        RdmaWrite(1, (b"x",), 0, RKey(1), immediate=b"12345"),
        Send(1, (b"x",), immediate=b"1234", invalidate=RKey(1)),
        FetchAdd(1, (memoryview(bytearray(4)),), 0, RKey(1), add=1),
        CompareSwap(1, (memoryview(bytearray(8)), memoryview(bytearray(8))), 0, RKey(1), compare=1, swap=1),
    ],
)
def test_what_is_none_is_misuse(request_: SendRequest) -> None:
    _, active, _, _ = pair()
    with pytest.raises(Misuse):
        active.qp.post_send(request_)


@pytest.mark.parametrize(
    "request_",
    [
        Send(1, (b"x",), immediate=b"1234"),
        RdmaWrite(1, (b"x",), 0, RKey(1), immediate=b"1234"),
        FetchAdd(1, (memoryview(bytearray(8)),), 0, RKey(1), add=1),
        CompareSwap(1, (memoryview(bytearray(8)),), 0, RKey(1), compare=1, swap=1),
    ],
)
def test_iwarp_offers_none_of_it(request_: SendRequest) -> None:
    with pytest.raises(Misuse):
        check_offered(request_, IWARP)


def test_a_region_for_atomic_operations_is_writable_here() -> None:
    _, active, _, _ = pair()
    with pytest.raises(Misuse):
        active.domain.register(bytearray(8), Access.REMOTE_ATOMIC)
