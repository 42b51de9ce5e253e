"""Checks of shared receive queues: whose messages take what, what is told, and what the end of one user leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.conformance.harness import ALL, LOCAL, Side, check
from sidestep.rdma.conformance.needs import SHARED_QUEUES
from sidestep.rdma.verbs import AsyncEvent, EventKind, QpState
from sidestep.rdma.work import Receive, Send, Status

if TYPE_CHECKING:
    from sidestep.rdma.conformance.harness import Bench
    from sidestep.rdma.verbs import MemoryRegion, ProtectionDomain, SharedReceiveQueue


class _Shared:
    """A shared receive queue of the passive device, and pairs that use it."""

    def __init__(self, bench: Bench, max_wr: int = 64) -> None:
        self.bench = bench
        self.events: list[AsyncEvent] = []
        self.domain: ProtectionDomain = bench.passive.alloc_pd()
        self.srq: SharedReceiveQueue = self.domain.create_srq(max_wr, on_event=self.events.append)
        self.rooms: dict[int, MemoryRegion] = {}

    def pair(self, domain: ProtectionDomain | None = None) -> tuple[Side, Side]:
        return self.bench.pair(passive=self.bench.side(self.bench.passive, domain=domain or self.domain, srq=self.srq))

    def post(self, wr_id: int, size: int = 16) -> MemoryRegion:
        room = self.domain.register(bytearray(size), LOCAL)
        self.srq.post_recv(Receive(wr_id, (room.view,)))
        self.rooms[wr_id] = room
        return room

    def kinds(self) -> list[EventKind]:
        self.bench.dut.run()
        return [each.kind for each in self.events]


@check("iWARP verbs draft 6.3.5", needs=(SHARED_QUEUES,))
def shared_receives_serve_all(bench: Bench) -> None:
    """Messages of several queue pairs take receives of one queue, each once, and complete in order."""
    shared = _Shared(bench)
    pairs = [shared.pair() for _ in range(3)]
    for wr_id in range(30):
        shared.post(wr_id)
    bench.equal(shared.srq.receives_posted, 30, "receives are posted to the shared queue")
    for index in range(10):
        for number, (active, _) in enumerate(pairs):
            active.send(index, b"%d from %d" % (index, number))
    bench.eventually(lambda: all(len(passive.received) == 10 for _, passive in pairs), "all messages arrive")
    used = []
    for number, (_, passive) in enumerate(pairs):
        bench.all_ok(passive, "all receives succeed")
        used += [each.wr_id for each in passive.received]
        found = [bytes(shared.rooms[each.wr_id].view[: each.byte_len]) for each in passive.received]
        wanted = [b"%d from %d" % (index, number) for index in range(10)]
        bench.equal(found, wanted, "the completions of a queue pair keep the order of its messages")
        numbers = {each.qp_number for each in passive.received}
        bench.equal(numbers, {passive.qp.number}, "and name it")
    bench.equal(sorted(used), list(range(30)), "each receive is used once")
    bench.equal(shared.srq.receives_posted, 0, "none is left")


@check("iWARP verbs draft 6.3", needs=(SHARED_QUEUES,))
def shared_receives_are_used_in_order(bench: Bench) -> None:
    """Messages that come one after the other take the receives in the order of posting, on whichever queue pair."""
    shared = _Shared(bench)
    pairs = [shared.pair() for _ in range(2)]
    for wr_id in range(6):
        shared.post(wr_id)
    for index in range(6):
        active, passive = pairs[index % 2]
        active.send(index, b"x")
        bench.eventually(lambda wanted=index // 2 + 1, side=passive: len(side.received) == wanted, "it arrives")  # type: ignore[misc]
        bench.equal(passive.received[-1].wr_id, index, "the oldest receive is taken")


@check("iWARP verbs draft 6.3", needs=(SHARED_QUEUES,))
def sharing_queue_pair_has_no_receives_of_its_own(bench: Bench) -> None:
    """Receives are not posted to a queue pair that has a shared queue, nor counted there."""
    shared = _Shared(bench)
    active, passive = shared.pair()
    shared.post(1)
    bench.equal((passive.qp.srq, active.qp.srq), (shared.srq, None), "a queue pair tells where its receives come from")
    bench.refused(Misuse, lambda: passive.post_recv(2, 8), "a receive of its own is refused")
    bench.equal((passive.qp.receives_posted, shared.srq.receives_posted), (0, 1), "it has none")
    active.post_recv(3, 8)
    passive.send(4, b"other way")
    bench.eventually(lambda: bool(passive.sent), "the other way is as ever")


@check("IBTA 10.8.1; iWARP verbs draft 6.3", needs=(SHARED_QUEUES,))
def shared_queue_has_bounds(bench: Bench) -> None:
    """A full shared queue refuses at the call and takes more once a message took one; so do entries and sizes."""
    shared = _Shared(bench, max_wr=4)
    active, passive = shared.pair()
    for wr_id in range(4):
        shared.post(wr_id)
    bench.refused(LimitReached, lambda: shared.post(4), "the queue has a bound")
    bench.equal((shared.srq.max_wr, shared.srq.receives_posted), (4, 4), "what was refused is not posted")
    active.send(1, b"x")
    bench.eventually(lambda: bool(passive.received), "a message arrives")
    room = shared.domain.register(bytearray(8), LOCAL)
    attributes = bench.passive.attributes
    many = tuple(room.view[:0] for _ in range(attributes.scatter_max + 1))
    bench.refused(Misuse, lambda: shared.srq.post_recv(Receive(5, many)), "a receive has so many entries at most")
    shared.post(6)
    for size in (0, attributes.work_requests_max + 1):
        bench.refused(Misuse, lambda size=size: shared.domain.create_srq(size), "a queue has so many receives")  # type: ignore[misc]
    queue, domain = bench.active.create_cq(8), bench.active.alloc_pd()
    bench.refused(
        Misuse, lambda: domain.create_qp(queue, queue, srq=shared.srq), "a shared queue belongs to its device"
    )


@check("iWARP verbs draft 6.3; ibv_modify_srq(3)", needs=(SHARED_QUEUES,))
def low_shared_queue_is_told_once(bench: Bench) -> None:
    """A shared queue that was armed tells once that fewer receives than the limit are left, until it is armed again."""
    shared = _Shared(bench)
    active, passive = shared.pair()
    for wr_id in range(8):
        shared.post(wr_id)
    active.send(0, b"x")
    bench.eventually(lambda: len(passive.received) == 1, "the first message arrives")
    bench.equal(shared.kinds(), [], "a queue that was not armed tells nothing")
    shared.srq.arm(6)
    bench.equal(shared.kinds(), [], "seven left are not fewer than six")
    for index in range(2):
        bench.equal(shared.kinds(), [], "nor are six")
        active.send(index, b"x")
        bench.eventually(lambda wanted=index + 2: len(passive.received) == wanted, "messages arrive")  # type: ignore[misc]
    told = [(EventKind.SRQ_LIMIT_REACHED, shared.srq)]
    bench.dut.run()
    bench.equal([(each.kind, each.source) for each in shared.events], told, "five are, and the event names the queue")
    active.send(3, b"x")
    bench.eventually(lambda: len(passive.received) == 4, "a message arrives")
    bench.equal(len(shared.kinds()), 1, "it is told once")
    shared.srq.arm(4)
    active.send(4, b"x")
    bench.eventually(lambda: len(shared.events) == 2, "armed again it tells again")


@check("sidestep.rdma.verbs", needs=(SHARED_QUEUES,))
def shared_queue_that_is_low_already_tells_at_once(bench: Bench) -> None:
    """Arming a queue that has fewer receives than the limit is told, never from inside the call; 0 asks for nothing."""
    shared = _Shared(bench, max_wr=8)
    shared.post(1)
    shared.srq.arm(2)
    bench.equal(shared.events, [], "nobody is called from inside the call")
    bench.equal(shared.kinds(), [EventKind.SRQ_LIMIT_REACHED], "it is told")
    active, passive = shared.pair()
    shared.srq.arm(1)
    shared.srq.arm(0)
    active.send(1, b"x")
    bench.eventually(lambda: bool(passive.received), "the last receive is taken")
    bench.equal(len(shared.kinds()), 1, "what was taken back is not told")
    for limit in (-1, 9):
        bench.refused(Misuse, lambda limit=limit: shared.srq.arm(limit), "the limit is one of this queue")  # type: ignore[misc]


@check("iWARP verbs draft 6.2.4, 6.3.6", needs=(SHARED_QUEUES,))
def error_leaves_shared_receives(bench: Bench) -> None:
    """A queue pair in error flushes no shared receive, tells that it takes no more, and the others go on."""
    shared = _Shared(bench)
    (_, failing), (active, passive) = shared.pair(), shared.pair()
    for wr_id in range(3):
        shared.post(wr_id)
    failing.qp.modify_to_error()
    bench.dut.run()
    bench.equal((failing.received, shared.srq.receives_posted), ([], 3), "no receive is flushed")
    told = [(each.kind, each.source) for each in failing.events]
    bench.equal(told, [(EventKind.QP_LAST_WQE_REACHED, failing.qp)], "it is told that it takes no more")
    bench.refused(Misuse, shared.srq.destroy, "a queue pair in error still uses the queue")
    active.send(1, b"goes on")
    bench.eventually(lambda: bool(passive.received), "messages of others arrive")
    bench.equal(bytes(shared.rooms[0].view[:7]), b"goes on", "in the oldest receive")
    failing.qp.destroy()
    bench.equal(shared.srq.receives_posted, 2, "nor does its end take any")


@check("IBTA 9.7.4.1.6; iWARP verbs draft 6.3.6", needs=(SHARED_QUEUES,))
def message_too_long_takes_one_shared_receive(bench: Bench) -> None:
    """A message too long for the receive it takes ends its own queue pair; that receive alone is used up."""
    shared = _Shared(bench)
    (asks, asked), (active, passive) = shared.pair(), shared.pair()
    room = shared.post(1, 4)
    shared.post(2, 16)
    asks.send(1, b"too long")
    bench.eventually(lambda: asked.qp.state is QpState.ERROR, "the queue pair is in ERROR")
    statuses = [(each.wr_id, each.status) for each in asked.received]
    bench.equal(statuses, [(1, Status.LOCAL_LENGTH_ERROR)], "the receive tells it")
    bench.equal((bytes(room.view), shared.srq.receives_posted), (bytes(4), 1), "nothing is placed, one receive is left")
    active.send(1, b"too long?")
    bench.eventually(lambda: bool(passive.received), "a message of another queue pair arrives")
    bench.equal((passive.received[0].wr_id, passive.received[0].ok), (2, True), "in what was left")


@check("IBTA 9.7.5.2.8; RFC 5041 7.1; iWARP verbs draft 13.2", needs=(SHARED_QUEUES,))
def message_without_a_shared_receive_is_not_lost(bench: Bench) -> None:
    """A message that finds a shared queue empty ends in an error, or waits for a receive; it does not vanish."""
    shared = _Shared(bench)
    active, passive = shared.pair()
    active.send(1, b"unexpected", signaled=False)
    bench.dut.run()
    if QpState.ERROR in (active.qp.state, passive.qp.state):
        bench.is_refused(active, passive, 1, Status.RNR_RETRY_EXCEEDED, None, "no receive posted")
        bench.equal(passive.received, [], "and takes nothing")
        return
    room = shared.post(1)
    bench.eventually(lambda: bool(passive.received), "it arrives when there is a receive")
    bench.equal(bytes(room.view[:10]), b"unexpected", "whole")


@check("iWARP verbs draft 6.1", needs=(SHARED_QUEUES,))
def shared_queue_in_use_stays(bench: Bench) -> None:
    """A shared queue is destroyed after its queue pairs and before its domain; what is posted never completes."""
    shared = _Shared(bench)
    pairs = [shared.pair() for _ in range(2)]
    shared.post(1).deregister()
    for _, passive in pairs:
        bench.refused(Misuse, shared.srq.destroy, "a shared queue in use is not destroyed")
        passive.qp.destroy()
    bench.refused(Misuse, shared.domain.deallocate, "a domain with a shared queue is in use")
    shared.srq.destroy()
    shared.srq.destroy()
    bench.dut.run()
    bench.equal([passive.received for _, passive in pairs], [[], []], "nothing completes")
    bench.refused(Misuse, lambda: shared.srq.post_recv(Receive(1, ())), "a destroyed queue takes nothing")
    queue = bench.passive.create_cq(8)
    bench.refused(Misuse, lambda: shared.domain.create_qp(queue, queue, srq=shared.srq), "and serves nobody")
    shared.domain.deallocate()


@check("iWARP verbs draft 6.3, 7.8", needs=(SHARED_QUEUES,))
def shared_receives_lie_in_their_own_domain(bench: Bench) -> None:
    """A shared receive lies in the domain of its queue; keys are those of the queue pair's domain all the same."""
    shared = _Shared(bench)
    other = bench.passive.alloc_pd()
    sides = active, passive = shared.pair(other)
    room = shared.post(1)
    kept = shared.domain.register(bytearray(8), ALL)
    opened = other.register(bytearray(8), ALL)
    voided = bench.passive.attributes.regions_voided
    active.qp.post_send(Send(1, (b"across",), invalidate=opened.rkey if voided else None))
    bench.eventually(lambda: bool(passive.received), "the message arrives")
    bench.all_ok(passive, "memory of the shared queue's domain is good")
    bench.equal((bytes(room.view[:6]), opened.valid), (b"across", not voided), "it is filled, and the key voided")
    bench.write_refused(kept, sides, kept.va, kept.rkey, "a key of the shared queue's domain")
    if bench.passive.attributes.checks_local_memory:
        active, passive = shared.pair(other)
        memory = other.register(bytearray(16), LOCAL)
        shared.srq.post_recv(Receive(2, (memory.view,)))
        active.send(1, b"astray")
        bench.eventually(lambda: bool(passive.received), "the receive completes")
        bench.equal(passive.received[0].status, Status.LOCAL_PROTECTION_ERROR, "memory of the queue pair's is not")
        bench.equal(bytes(memory.view), bytes(16), "nothing is placed")
