"""Checks of how a queue pair ends: misuse, bounds, errors, and the flush of everything posted."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.cm import Disconnected
from sidestep.rdma.conformance.harness import ALL, WRITE, Violation, check
from sidestep.rdma.conformance.needs import ACKNOWLEDGED
from sidestep.rdma.verbs import EventKind, QpCapabilities, QpState
from sidestep.rdma.work import (
    Access,
    BindWindow,
    LocalInvalidate,
    Opcode,
    RdmaRead,
    RdmaWrite,
    Receive,
    RKey,
    Send,
    Status,
)

if TYPE_CHECKING:
    from sidestep.rdma.conformance.harness import Bench

_SMALL = QpCapabilities(max_send_wr=4, max_recv_wr=4, initiator_depth=1, responder_resources=1)


@check("IBTA 10.3.1, table 91")
def sending_needs_a_connection(bench: Bench) -> None:
    """Before RTS nothing is sent, but receives are taken; after `destroy` nothing is taken at all."""
    side = bench.side(bench.active)
    bench.equal(side.qp.state, QpState.INIT, "a new queue pair is in INIT")
    bench.refused(Misuse, lambda: side.qp.post_send(Send(1, (b"early",))), "nothing is sent in INIT")
    side.post_recv(1, 8)
    bench.equal(side.qp.receives_posted, 1, "a receive is taken in INIT")
    side.qp.destroy()
    side.qp.destroy()
    bench.equal(side.qp.state, QpState.RESET, "a destroyed queue pair is in RESET")
    bench.refused(Misuse, lambda: side.qp.post_send(Send(1, (b"late",))), "nothing is sent after destroy")
    bench.refused(Misuse, lambda: side.post_recv(1, 8), "no receive is taken after destroy")


@check("IBTA 10.8.1")
def queues_have_bounds(bench: Bench) -> None:
    """A full queue refuses at the call, keeps what it has, and takes more once something is done."""
    active, passive = bench.pair(capabilities=_SMALL)
    passive.post_recvs(4)
    bench.refused(LimitReached, lambda: passive.post_recv(4, 8), "the receive queue has a bound")
    bench.equal(passive.qp.receives_posted, 4, "what was refused is not posted")
    for index in range(4):
        active.send(index, b"quiet", signaled=False)
    bench.refused(LimitReached, lambda: active.send(4, b"too much"), "the send queue has a bound")
    bench.eventually(lambda: len(passive.received) == 4, "what was posted before is sent")
    bench.equal([each.byte_len for each in passive.received], [5] * 4, "and nothing else")
    passive.post_recv(5, 8)
    bench.equal(passive.qp.receives_posted, 1, "there is room for receives again")


@check("IBTA 10.7.3")
def entries_have_bounds(bench: Bench) -> None:
    """More entries than a device takes are refused at the call, and the queue pair lives on."""
    active, passive = bench.pair()
    attributes = active.device.attributes
    near, far = active.memory(64), passive.memory(64, ALL)

    def entries(count: int) -> tuple[memoryview, ...]:
        return tuple(near.view[index % 64 : index % 64 + 1] for index in range(count))

    many = entries(attributes.gather_max + 1)
    bench.refused(Misuse, lambda: active.qp.post_send(Send(1, many)), "a Send has so many entries at most")
    write = RdmaWrite(1, many, far.va, far.rkey)
    bench.refused(Misuse, lambda: active.qp.post_send(write), "a Write has so many entries at most")
    read = RdmaRead(1, entries(attributes.read_scatter_max + 1), far.va, far.rkey)
    bench.refused(Misuse, lambda: active.qp.post_send(read), "a Read has so many entries at most")
    receive = Receive(1, entries(attributes.scatter_max + 1))
    bench.refused(Misuse, lambda: active.qp.post_recv(receive), "a receive has so many entries at most")
    room = passive.post_recv(1, 64)
    active.qp.post_send(Send(2, entries(attributes.gather_max)))
    bench.eventually(lambda: bool(passive.received), "as many as it takes are sent")
    bench.equal((passive.received[0].byte_len, len(room.view)), (attributes.gather_max, 64), "all of them")


@check("IBTA 10.2.4")
def capabilities_have_bounds(bench: Bench) -> None:
    """More than a device's attributes offer is refused when the queue is made; so is a queue of another device."""
    attributes = bench.active.attributes
    for too_much in (
        QpCapabilities(max_send_wr=attributes.work_requests_max + 1),
        QpCapabilities(max_recv_wr=attributes.work_requests_max + 1),
        QpCapabilities(initiator_depth=attributes.read_depth_max + 1),
        QpCapabilities(responder_resources=attributes.read_depth_max + 1),
    ):
        bench.refused(Misuse, lambda caps=too_much: bench.side(bench.active, caps), "capabilities have bounds")  # type: ignore[misc]
    for capacity in (0, attributes.completions_max + 1):
        bench.refused(Misuse, lambda size=capacity: bench.active.create_cq(size), "a completion queue has bounds")  # type: ignore[misc]
    foreign = bench.passive.create_cq(8)
    own = bench.active.create_cq(8)
    domain = bench.active.alloc_pd()
    bench.refused(Misuse, lambda: domain.create_qp(own, foreign), "completion queues belong to their device")


@check("IBTA 10.3.1, 10.8.5.3")
def error_flushes_everything(bench: Bench) -> None:
    """A queue pair that is moved to ERROR flushes all its requests and receives, in order, each once."""
    active, passive = bench.pair()
    rooms = [active.post_recv(index, 8) for index in range(5)]
    passive.qp.modify_to_error()
    for index in range(5):
        active.send(10 + index, b"unheard", signaled=index % 2 == 0)
    active.qp.modify_to_error()
    active.qp.modify_to_error()
    bench.dut.run()
    bench.equal(active.qp.state, QpState.ERROR, "the queue pair is in ERROR")
    flushed = [(10 + index, Status.FLUSHED) for index in range(5)]
    sent = [(each.wr_id, each.status) for each in active.sent]
    if active.device.attributes.acknowledged:
        bench.equal(sent, flushed, "requests are flushed, signaled or not")
    else:
        left = [each for each in sent if each[1] is not Status.SUCCESS]
        bench.equal(left, flushed[len(flushed) - len(left) :], "what was not sent is flushed")
    got = [(each.wr_id, each.status) for each in active.received]
    bench.equal(got, [(index, Status.FLUSHED) for index in range(5)], "receives are flushed")
    bench.equal(active.qp.receives_posted, 0, "nothing is left")
    bench.expect(all(bytes(room.view) == bytes(8) for room in rooms), "flushed receives are not touched")


@check("IBTA 10.3.1, table 91")
def posting_in_error_is_flushed(bench: Bench) -> None:
    """What is posted in ERROR completes as flushed, whatever it is, and says what it was."""
    active, passive = bench.pair()
    far = passive.memory(8, ALL)
    active.qp.modify_to_error()
    active.post_recv(1, 8)
    active.send(2, b"late", signaled=False)
    active.qp.post_send(RdmaWrite(3, (), far.va, far.rkey))
    active.qp.post_send(RdmaRead(4, (), far.va, far.rkey))
    kinds = [Opcode.RECEIVE, Opcode.SEND, Opcode.RDMA_WRITE, Opcode.RDMA_READ, Opcode.LOCAL_INVALIDATE]
    if active.device.attributes.windows_max:
        window, region = active.domain.alloc_window(), active.memory(8, ALL | Access.WINDOW_BIND)
        active.qp.post_send(BindWindow(wr_id=6, window=window, region=region, access=Access.REMOTE_READ, length=8))
        kinds.append(Opcode.BIND_WINDOW)
    active.qp.post_send(LocalInvalidate(5, far.rkey))
    bench.eventually(lambda: len(active.completions()) == len(kinds), "each completes")
    told = sorted((each.wr_id, each.status, each.opcode) for each in active.completions())
    wanted = [(index + 1, Status.FLUSHED, kind) for index, kind in enumerate(kinds)]
    bench.equal(told, wanted, "each is flushed")


@check("IBTA 10.8.5.3, 11.6.2", needs=(ACKNOWLEDGED,))
def failure_flushes_what_is_behind_it(bench: Bench) -> None:
    """Requests before the one that fails succeed, it tells why, those behind are flushed and have no effect."""
    active, passive = bench.pair()
    far = passive.memory(b"." * 8, ALL)
    for index in range(6):
        passive.post_recv(100 + index, 8)
    active.send(1, b"good")
    active.send(2, b"good")
    active.qp.post_send(RdmaWrite(3, (b"EVIL",), far.va, RKey(far.rkey ^ 0x100), signaled=False))
    active.send(4, b"behind")
    active.qp.post_send(RdmaWrite(5, (b"EVIL",), far.va, far.rkey))
    active.post_recv(6, 8)
    bench.eventually(lambda: len(active.completions()) >= 6, "all complete")
    bench.dut.run()
    good, bad, flushed = Status.SUCCESS, Status.REMOTE_ACCESS_ERROR, Status.FLUSHED
    sent = [(each.wr_id, each.status) for each in active.sent]
    wanted = [(1, good), (2, good), (3, bad), (4, flushed), (5, flushed)]
    bench.equal(sent, wanted, "success, then the error although unsignaled, then flushes")
    bench.equal([each.status for each in active.received], [flushed], "receives are flushed as well")
    got = [(each.wr_id, each.status) for each in passive.received]
    wanted = [(100, good), (101, good)] + [(102 + index, flushed) for index in range(4)]
    bench.equal(got, wanted, "the other end has what came before, and flushes the rest")
    bench.equal(bytes(far.view), b"." * 8, "nothing behind the failure is carried out")
    if passive.device.attributes.access_errors_reported:
        bench.equal([each.kind for each in passive.events], [EventKind.QP_ACCESS_ERROR], "it is told why it ended")
    bench.equal(active.events, [], "what a completion tells is not told as an event as well")


@check("IBTA 9.7.4.1.6; RFC 5041 7.1")
def message_too_long_is_an_error(bench: Bench) -> None:
    """A message longer than its receive is an error at both ends, and not cut off."""
    active, passive = bench.pair()
    room = passive.post_recv(1, 8)
    behind = passive.post_recv(2, 64)
    word = active.memory(b"byte")
    active.qp.post_send(Send(1, (b"nine ", word.view)))  # the first entry alone would fit
    bench.eventually(lambda: len(passive.received) == 2, "the receives complete")
    statuses = [(each.wr_id, each.status) for each in passive.received]
    bench.equal(statuses, [(1, Status.LOCAL_LENGTH_ERROR), (2, Status.FLUSHED)], "the receive tells it")
    bench.is_refused(active, passive, 1, Status.REMOTE_INVALID_REQUEST, None, "a message too long")
    bench.equal((bytes(room.view), bytes(behind.view)), (bytes(8), bytes(64)), "nothing is placed")


@check("IBTA 9.7.5.2.8; RFC 5041 7.1")
def message_without_a_receive_is_not_lost(bench: Bench) -> None:
    """A message for which no receive is posted ends in an error that the sender sees; it does not vanish."""
    active, passive = bench.pair()
    active.send(1, b"unexpected", signaled=False)
    bench.is_refused(active, passive, 1, Status.RNR_RETRY_EXCEEDED, None, "no receive posted")


@check("IBTA 9.7.6.1.3", needs=(ACKNOWLEDGED,))
def silence_becomes_an_error(bench: Bench) -> None:
    """A request that the other end never answers fails after a while, and what is behind it is flushed."""
    active, passive = bench.pair()
    passive.post_recvs(2)
    passive.qp.modify_to_error()
    active.send(1, b"hello?", signaled=False)
    active.send(2, b"hello??")
    bench.eventually(lambda: len(active.sent) == 2, "the requests end")
    statuses = [each.status for each in active.sent]
    bench.equal(statuses, [Status.RETRY_EXCEEDED, Status.FLUSHED], "silence is an error")
    bench.equal(active.qp.state, QpState.ERROR, "the queue pair is in ERROR")
    bench.equal([each.status for each in passive.received], [Status.FLUSHED] * 2, "nothing arrived")


@check("IBTA 12.9.7; RFC 5040 5.4")
def error_and_connection(bench: Bench) -> None:
    """A queue pair in error keeps its connection until a disconnect, or takes it along, as the device declares."""
    active, passive = bench.pair()
    for side in (active, passive):
        side.post_recv(1, 8)
    active.qp.modify_to_error()
    bench.dut.run()
    if not active.device.attributes.error_disconnects:
        told = [len(side.cm_events) for side in (active, passive)]
        bench.equal((told, passive.qp.state), ([1, 1], QpState.RTS), "nobody is told of a disconnect")
        active.disconnect()
    bench.eventually(lambda: len(active.cm_events) > 1 and len(passive.cm_events) > 1, "both ends are told")
    for side in (active, passive):
        bench.expect(isinstance(side.cm_events[1], Disconnected), "both ends are told", side.cm_events)
        bench.equal((side.qp.state, side.qp.receives_posted), (QpState.ERROR, 0), "and in ERROR")
    if active.device.attributes.error_disconnects:
        kinds = [each.kind for each in passive.events]
        bench.equal(kinds, [EventKind.QP_FATAL], "the other end's queue pair says that the connection broke")


@check("IBTA 10.2.4.4")
def destroyed_queue_pair_is_quiet(bench: Bench) -> None:
    """After `destroy` nothing of a queue pair completes and nothing arrives in its memory."""
    active, passive = bench.pair()
    room = passive.post_recv(1, 8)
    active.post_recv(2, 8)
    passive.qp.destroy()
    if active.device.attributes.acknowledged:
        active.send(1, b"anybody?")
    active.qp.destroy()
    bench.dut.run()
    bench.equal((passive.completions(), active.completions()), ([], []), "nothing completes")
    bench.equal(bytes(room.view), bytes(8), "nothing arrives")
    active.domain.create_qp(active.send_cq, active.recv_cq).destroy()
    active.send_cq.destroy()
    active.recv_cq.destroy()


@check("IBTA 10.6.5, 10.2.4.4")
def memory_is_let_go(bench: Bench) -> None:
    """What was used by requests that are over, and is deregistered, is held by nobody: a bytearray can grow again."""
    active, passive = bench.pair()
    buffers = [bytearray(8) for _ in range(4)]
    sent, room, unused, sink = (
        side.domain.register(buffer, WRITE)  # what the sink of an RDMA Read may need
        for side, buffer in zip((active, passive, passive, active), buffers, strict=True)
    )
    far = passive.memory(8, ALL)
    passive.qp.post_recv(Receive(1, (room.view,)))
    passive.qp.post_recv(Receive(2, (unused.view,)))
    active.qp.post_send(Send(3, (sent.view,)))
    active.qp.post_send(RdmaRead(4, (sink.view,), far.va, far.rkey))
    bench.eventually(lambda: len(active.sent) == 2 and len(passive.received) == 1, "what can complete completes")
    passive.qp.destroy()
    for region in (sent, room, unused, sink):
        region.deregister()
    del sent, room, unused, sink, region
    gc.collect()
    for buffer in buffers:
        try:
            buffer.append(0)
        except BufferError as error:
            raise Violation(f"memory that is in use no more is held: {error}") from error
