"""Checks of what not every device offers: immediate data, and operations on a number in the other end's memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sidestep.rdma.conformance.harness import READ, WRITE, check
from sidestep.rdma.conformance.needs import ATOMICS, IMMEDIATE
from sidestep.rdma.verbs import QpCapabilities
from sidestep.rdma.work import ATOMIC_LEN, Access, CompareSwap, FetchAdd, Opcode, RdmaRead, RdmaWrite, Send, Status

if TYPE_CHECKING:
    from sidestep.rdma.conformance.harness import Bench, Side
    from sidestep.rdma.verbs import MemoryRegion

ATOMIC = Access.LOCAL_WRITE | Access.REMOTE_ATOMIC


def _number(view: memoryview) -> int:
    return int.from_bytes(view[:ATOMIC_LEN], sys.byteorder)


def _target(side: Side, number: int, access: Access = ATOMIC) -> tuple[MemoryRegion, int]:
    """A region with a number at an address that is a multiple of 8, and where in the region that is."""
    region = side.memory(bytes(4 * ATOMIC_LEN), access)
    offset = -region.va % ATOMIC_LEN + ATOMIC_LEN
    region.view[offset : offset + ATOMIC_LEN] = number.to_bytes(ATOMIC_LEN, sys.byteorder)
    return region, offset


@check("IBTA 9.4.1, 9.2.6", needs=(IMMEDIATE,))
def send_tells_immediate_data(bench: Bench) -> None:
    """Immediate data of a Send arrives beside the message, and only with that one."""
    active, passive = bench.pair()
    passive.post_recvs(3)
    active.qp.post_send(Send(1, (b"word",), immediate=b"\1\2\3\4"))
    active.qp.post_send(Send(2, (), immediate=b"zero"))
    active.send(3, b"none")
    bench.eventually(lambda: len(passive.received) == 3, "the messages arrive")
    told = [(each.byte_len, each.immediate) for each in passive.received]
    bench.equal(told, [(4, b"\1\2\3\4"), (0, b"zero"), (4, None)], "each tells its own")


@check("IBTA 9.4.3, 9.2.6", needs=(IMMEDIATE,))
def write_with_immediate_takes_a_receive(bench: Bench) -> None:
    """An RDMA Write with immediate data completes a receive once its bytes are placed, and does not touch its room."""
    active, passive = bench.pair()
    target = passive.memory(b"." * 8, WRITE)
    room = passive.post_recv(7, 8)
    active.qp.post_send(RdmaWrite(1, (b"bytes",), target.va + 1, target.rkey, immediate=b"imm!"))
    bench.eventually(lambda: bool(passive.received and active.sent), "both ends are told")
    got = passive.received[0]
    bench.equal((got.wr_id, got.byte_len, got.immediate), (7, 5, b"imm!"), "the receive tells length and data")
    bench.equal((bytes(target.view), bytes(room.view)), (b".bytes..", bytes(8)), "the bytes are in the region alone")
    bench.equal((active.sent[0].opcode, passive.qp.receives_posted), (Opcode.RDMA_WRITE, 0), "one receive is used")


@check("IBTA 9.4.5", needs=(ATOMICS,))
def compare_swap_changes_what_is_equal(bench: Bench) -> None:
    """Compare and swap changes the number if it is the one that was named, and brings the one before either way."""
    active, passive = bench.pair()
    target, offset = _target(passive, 7)
    sink = active.memory(bytes(2 * ATOMIC_LEN))
    va = target.va + offset
    active.qp.post_send(CompareSwap(1, (sink.view[:ATOMIC_LEN],), va, target.rkey, compare=8, swap=1))
    active.qp.post_send(CompareSwap(2, (sink.view[ATOMIC_LEN:],), va, target.rkey, compare=7, swap=1 << 63 | 5))
    bench.eventually(lambda: len(active.sent) == 2, "both complete")
    told = [(each.wr_id, each.status, each.opcode, each.byte_len) for each in active.sent]
    success = Status.SUCCESS, Opcode.COMPARE_SWAP, ATOMIC_LEN
    bench.equal(told, [(1, *success), (2, *success)], "completions tell what they are of")
    bench.equal((_number(sink.view), _number(sink.view[ATOMIC_LEN:])), (7, 7), "the number before comes back")
    bench.equal(_number(target.view[offset:]), 1 << 63 | 5, "only the one that was equal has changed it")
    rest = bytes(target.view[:offset]) + bytes(target.view[offset + ATOMIC_LEN :])
    bench.equal(rest, bytes(len(rest)), "nothing beside it is touched")
    bench.equal(passive.completions(), [], "the other end is not told")


@check("IBTA 9.4.5", needs=(ATOMICS,))
def fetch_add_adds(bench: Bench) -> None:
    """Fetch and add adds modulo 2^64, each once, in the order of posting, however many are posted."""
    active, passive = bench.pair(capabilities=QpCapabilities(initiator_depth=2, responder_resources=2))
    first, count = (1 << 64) - 3, 20
    target, offset = _target(passive, first)
    sink = active.memory(bytes(count * ATOMIC_LEN))
    for index in range(count):
        part = sink.view[index * ATOMIC_LEN : (index + 1) * ATOMIC_LEN]
        active.qp.post_send(FetchAdd(index, (part,), target.va + offset, target.rkey, add=index))
    bench.eventually(lambda: len(active.sent) == count, "all complete")
    bench.equal({(each.status, each.opcode) for each in active.sent}, {(Status.SUCCESS, Opcode.FETCH_ADD)}, "all well")
    found = [_number(sink.view[index * ATOMIC_LEN :]) for index in range(count)]
    wanted = [(first + index * (index - 1) // 2) % (1 << 64) for index in range(count)]
    bench.equal(found, wanted, "each sees those before it")
    bench.equal(_number(target.view[offset:]), (first + count * (count - 1) // 2) % (1 << 64), "the sum is right")


@check("IBTA 9.5, 9.7.3", needs=(ATOMICS,))
def fence_waits_for_atomics(bench: Bench) -> None:
    """A fenced request begins when the atomic operations before it are complete."""
    active, passive = bench.pair()
    target, offset = _target(passive, 41, ATOMIC | READ)
    sink = active.memory(bytes(2 * ATOMIC_LEN))
    va = target.va + offset
    active.qp.post_send(FetchAdd(1, (sink.view[:ATOMIC_LEN],), va, target.rkey, add=1))
    active.qp.post_send(RdmaRead(2, (sink.view[ATOMIC_LEN:],), va, target.rkey, fence=True))
    bench.eventually(lambda: len(active.sent) == 2, "both complete")
    bench.equal((_number(sink.view), _number(sink.view[ATOMIC_LEN:])), (41, 42), "the Read sees the sum")


@check("IBTA 9.7.4.1.5, 10.6.3.1", needs=(ATOMICS,))
def atomics_need_their_right(bench: Bench) -> None:
    """An atomic operation on a region that is open to Reads and Writes only is refused, and changes nothing."""
    active, passive = bench.pair()
    target, offset = _target(passive, 7, READ | WRITE)
    sink = active.memory(bytes(ATOMIC_LEN))
    active.qp.post_send(FetchAdd(1, (sink.view,), target.va + offset, target.rkey, add=1))
    bench.eventually(lambda: bool(active.sent), "it is answered")
    bench.equal(active.sent[0].status, Status.REMOTE_ACCESS_ERROR, "it is refused")
    bench.equal((_number(target.view[offset:]), _number(sink.view)), (7, 0), "nothing has changed")


@check("IBTA 9.4.5", needs=(ATOMICS,))
def atomics_need_alignment(bench: Bench) -> None:
    """An atomic operation at an address that is no multiple of 8 is refused, and changes nothing."""
    active, passive = bench.pair()
    target, offset = _target(passive, 7)
    sink = active.memory(bytes(ATOMIC_LEN))
    active.qp.post_send(CompareSwap(1, (sink.view,), target.va + offset + 4, target.rkey, compare=0, swap=9))
    bench.eventually(lambda: bool(active.sent), "it is answered")
    bench.equal(active.sent[0].status, Status.REMOTE_INVALID_REQUEST, "it is refused")
    bench.equal((_number(target.view[offset:]), _number(sink.view)), (7, 0), "nothing has changed")
