"""Checks of completion queues: polled, armed, handed over, shared, overflowing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep.errors import Misuse
from sidestep.rdma.conformance.harness import check
from sidestep.rdma.verbs import AsyncEvent, CompletionQueue, EventKind, QpCapabilities, QpState
from sidestep.rdma.work import Opcode, Status

if TYPE_CHECKING:
    from sidestep.rdma.conformance.harness import Bench


@check("IBTA 11.4.2.1")
def poll_takes_the_oldest(bench: Bench) -> None:
    """`poll` gives up to so many completions, the oldest first, each once, and nothing when there is nothing."""
    active, passive = bench.pair()
    bench.equal(passive.recv_cq.poll(5), [], "an empty queue gives nothing")
    passive.post_recvs(7)
    for index in range(7):
        active.send(index, b"x")
    bench.eventually(lambda: not passive.qp.receives_posted, "all messages arrive")
    bench.dut.run()
    found = [[each.wr_id for each in passive.recv_cq.poll(3)] for _ in range(4)]
    bench.equal(found, [[0, 1, 2], [3, 4, 5], [6], []], "completions are taken in order, so many at a time")


@check("IBTA 11.4.2.2")
def arm_calls_once(bench: Bench) -> None:
    """`arm` makes one call for the next completion: not for those already there, and not for those behind it."""
    active, passive = bench.pair()
    passive.post_recvs(5)
    calls: list[CompletionQueue] = []
    active.send(0, b"before")
    bench.eventually(lambda: passive.qp.receives_posted == 4, "the first message arrives")
    bench.dut.run()
    passive.recv_cq.arm(calls.append)
    bench.dut.run()
    bench.equal(calls, [], "what is already there makes no call")
    active.send(1, b"next")
    active.send(2, b"another")
    bench.eventually(lambda: bool(calls), "the next completion makes a call")
    bench.dut.run()
    bench.equal(calls, [passive.recv_cq], "one `arm` is one call, with the queue")
    passive.recv_cq.arm(calls.append)
    active.send(3, b"next")
    bench.eventually(lambda: len(calls) == 2, "a new `arm` is a new call")
    bench.equal(len(passive.received), 4, "the calls take no completions away")


@check("IBTA 11.4.2.2; RFC 5040 4.1")
def arm_for_solicited_only(bench: Bench) -> None:
    """A queue armed for solicited events is woken by a solicited message or an error, and by nothing else."""
    active, passive = bench.pair()
    passive.post_recvs(5)
    calls: list[CompletionQueue] = []
    passive.recv_cq.arm(calls.append, solicited_only=True)
    active.send(0, b"plain")
    bench.eventually(lambda: passive.qp.receives_posted == 4, "the message arrives")
    bench.dut.run()
    bench.equal(calls, [], "a plain message does not wake it")
    active.send(1, b"wake up", solicited=True)
    bench.eventually(lambda: bool(calls), "a solicited message wakes it")
    passive.recv_cq.arm(calls.append, solicited_only=True)
    passive.qp.modify_to_error()
    bench.eventually(lambda: len(calls) == 2, "an error wakes it")


@check("iWARP verbs draft 8.2.5; IBTA 11.4.2.2")
def arm_for_any_wins(bench: Bench) -> None:
    """A queue armed for any completion stays so when it is armed for solicited ones on top."""
    active, passive = bench.pair()
    passive.post_recv(0, 8)
    calls: list[str] = []
    passive.recv_cq.arm(lambda queue: calls.append("first"))
    passive.recv_cq.arm(lambda queue: calls.append("second"), solicited_only=True)
    active.send(0, b"plain")
    bench.eventually(lambda: bool(calls), "a plain message wakes it")
    bench.dut.run()
    bench.equal(calls, ["second"], "the callback armed last is called, alone")


@check("sidestep.rdma.verbs")
def handler_gets_everything(bench: Bench) -> None:
    """A queue with a handler hands over each completion once, in order, and never from inside a call of the user."""
    active, passive = bench.pair(handled=True)
    passive.post_recvs(20)
    bench.equal(passive.batches, [], "nothing is handed over before something happens")
    for index in range(20):
        active.send(index, b"x")
        bench.equal((active.batches, passive.batches), ([], []), "nobody is called from inside post_send")
    bench.eventually(lambda: len(passive.received) == 20 and len(active.sent) == 20, "all are handed over")
    bench.equal([each.wr_id for each in passive.received], list(range(20)), "in order")
    bench.expect(all(passive.batches) and all(active.batches), "no batch is empty")
    passive.post_recv(99, 8)
    passive.qp.modify_to_error()
    bench.equal(len(passive.received), 20, "nobody is called from inside modify_to_error")
    bench.eventually(lambda: len(passive.received) == 21, "flushes are handed over as well")
    bench.refused(Misuse, lambda: passive.recv_cq.poll(1), "a queue with a handler is not polled")
    bench.refused(Misuse, lambda: passive.recv_cq.arm(lambda queue: None), "and not armed")


@check("IBTA 10.8.6")
def queue_pairs_share_a_queue(bench: Bench) -> None:
    """Completions of several queue pairs in one queue tell whose they are; it lives as long as one of them."""
    first = bench.pair()
    second = bench.pair(bench.side(bench.active, like=first[0]), bench.side(bench.passive, like=first[1]))
    for _, passive in (first, second):
        passive.post_recv(1, 8)
    first[0].send(1, b"from first")
    second[0].send(2, b"second")
    bench.eventually(lambda: not first[1].qp.receives_posted and not second[1].qp.receives_posted, "both arrive")
    bench.dut.run()
    # The first message was too long for its receive: that ends its queue pair and no other.
    told = {each.qp_number: each.status for each in first[1].received}
    wanted = {first[1].qp.number: Status.LOCAL_LENGTH_ERROR, second[1].qp.number: Status.SUCCESS}
    bench.equal(told, wanted, "each completion names its queue pair")
    bench.equal(second[1].qp.state, QpState.RTS, "an error of one queue pair is not one of the other")
    first[1].qp.destroy()
    bench.refused(Misuse, first[1].recv_cq.destroy, "a queue in use is not destroyed")
    second[1].qp.destroy()
    first[1].recv_cq.destroy()


@check("IBTA 10.10.2.3, 11.6.3.1")
def overflow_is_an_error(bench: Bench) -> None:
    """More completions than a queue has room for end it and its queue pairs; those that it had can be taken."""
    passive = bench.side(bench.passive, capacity=3)
    other = bench.pair(service_id=0x1_0001)
    active, passive = bench.pair(passive=passive)
    told: list[AsyncEvent] = []
    bench.passive.on_event = told.append
    passive.post_recvs(5)
    for index in range(3):
        active.send(index, b"x")
    bench.eventually(lambda: passive.qp.receives_posted == 2, "as many as there is room for arrive")
    bench.dut.run()
    bench.equal((told, passive.qp.state), ([], QpState.RTS), "a full queue is no error yet")
    active.send(3, b"one more")
    bench.eventually(lambda: passive.qp.state is QpState.ERROR, "its queue pair is in ERROR")
    bench.dut.run()
    events = [(each.kind, each.source) for each in told]
    bench.equal(events, [(EventKind.CQ_ERROR, passive.recv_cq)], "the device tells which queue it was, once")
    kept = [(each.wr_id, each.status) for each in passive.recv_cq.poll(10)]
    bench.equal(kept, [(index, Status.SUCCESS) for index in range(3)], "what was in the queue is not lost")
    other[1].post_recv(1, 8)
    other[0].send(1, b"fine")
    bench.eventually(lambda: bool(other[1].received), "other queues are not touched")


@check("IBTA 10.8.6")
def one_queue_for_both_directions(bench: Bench) -> None:
    """One completion queue may serve the sends and the receives of a queue pair; the opcode tells which it was."""
    queue = bench.active.create_cq(64)
    domain = bench.active.alloc_pd()
    side = bench.side(bench.active, domain=domain)
    side.qp.destroy()
    side.qp = domain.create_qp(queue, queue, QpCapabilities())
    side.send_cq = side.recv_cq = queue
    active, passive = bench.pair(active=side)
    active.post_recv(1, 8)
    passive.post_recv(2, 8)
    active.send(3, b"ping")
    passive.send(4, b"pong")
    bench.eventually(lambda: len(active.completions()) == 2, "both complete in the one queue")
    told = {(each.wr_id, each.opcode) for each in active.completions()}
    bench.equal(told, {(1, Opcode.RECEIVE), (3, Opcode.SEND)}, "the opcode tells them apart")
