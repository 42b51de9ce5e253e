"""Checks of the data path: what a Send, an RDMA Write and an RDMA Read do, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep.rdma.conformance.harness import ALL, READ, WRITE, check
from sidestep.rdma.conformance.needs import READ_SCATTER, SCATTER, SOLICITED, VOIDED_REGIONS
from sidestep.rdma.verbs import QpCapabilities
from sidestep.rdma.work import LocalInvalidate, Opcode, RdmaRead, RdmaWrite, Receive, RKey, Send, Status

if TYPE_CHECKING:
    from sidestep.rdma.conformance.harness import Bench


@check("IBTA 9.7; RFC 5040 5.3")
def send_delivers_its_bytes(bench: Bench) -> None:
    """A Send fills the receive posted for it, with its bytes and no others, and completes at both ends."""
    active, passive = bench.pair()
    room = passive.post_recv(7, 64)
    active.send(3, b"message")
    bench.eventually(lambda: bool(passive.received and active.sent), "both ends are told")
    bench.equal(bytes(room.view), b"message".ljust(64, b"\0"), "the bytes are those that were sent")
    got, sent = passive.received[0], active.sent[0]
    bench.equal(
        (got.wr_id, got.status, got.byte_len), (7, Status.SUCCESS, 7), "the receive tells its id and the length"
    )
    bench.equal((sent.wr_id, sent.status, sent.opcode), (3, Status.SUCCESS, Opcode.SEND), "the Send completes")
    bench.equal((got.qp_number, sent.qp_number), (passive.qp.number, active.qp.number), "completions name their end")
    bench.equal(passive.qp.receives_posted, 0, "the receive is used up")


@check("RFC 5041 5.2")
def empty_send_takes_a_receive(bench: Bench) -> None:
    """A Send without a byte is a message: it takes a receive and completes it with length 0."""
    active, passive = bench.pair()
    room = passive.post_recv(1, 8)
    passive.post_recv(2, 8)
    active.send(1, b"")
    active.send(2, b"after")
    bench.eventually(lambda: len(passive.received) == 2, "both messages arrive")
    bench.equal([(each.wr_id, each.byte_len) for each in passive.received], [(1, 0), (2, 5)], "each takes its receive")
    bench.equal(bytes(room.view), bytes(8), "nothing is written for an empty message")


@check("IBTA 10.7.3")
def gather_is_sent_in_order(bench: Bench) -> None:
    """A message is its gather entries one after the other, inline bytes and registered memory alike."""
    active, passive = bench.pair()
    room = passive.post_recv(1, 64)
    words = active.memory(b"--second-- third--")
    active.qp.post_send(Send(1, (b"first ", words.view[2:8], words.view[:0], words.view[10:16])))
    bench.eventually(lambda: bool(passive.received), "the message arrives")
    bench.equal(bytes(room.view[:18]), b"first second third", "the entries are sent in order")
    bench.equal(passive.received[0].byte_len, 18, "the length is that of all entries")


@check("IBTA 10.7.3", needs=(SCATTER,))
def scatter_is_filled_in_order(bench: Bench) -> None:
    """A message fills the entries of a receive one after the other, and nothing behind its end."""
    active, passive = bench.pair()
    room = passive.memory(b"." * 32)
    passive.qp.post_recv(Receive(1, (room.view[20:24], room.view[0:6], room.view[10:20])))
    active.send(1, b"abcdefghijklm")
    bench.eventually(lambda: bool(passive.received), "the message arrives")
    bench.equal(bytes(room.view), b"efghij....klm.......abcd........", "the entries are filled in order")


@check("IBTA 9.5")
def messages_arrive_in_order(bench: Bench) -> None:
    """Messages of a queue pair arrive in the order of posting, in the receives in the order of posting."""
    active, passive = bench.pair()
    rooms = [passive.post_recv(100 + index, 16) for index in range(40)]
    for index in range(40):
        active.send(index, b"%d" % index * (index % 3 + 1))
    bench.eventually(lambda: len(passive.received) == 40 and len(active.sent) == 40, "all messages arrive")
    bench.equal([each.wr_id for each in passive.received], list(range(100, 140)), "receives are used in order")
    for index, (room, got) in enumerate(zip(rooms, passive.received, strict=True)):
        bench.equal(bytes(room.view[: got.byte_len]), b"%d" % index * (index % 3 + 1), "messages are not swapped")
    bench.equal([each.wr_id for each in active.sent], list(range(40)), "Sends complete in order")


@check("IBTA 9.4.3; RFC 5040 5.1")
def write_places_its_bytes(bench: Bench) -> None:
    """An RDMA Write puts its bytes at the address it names, touches nothing else, and tells nobody there."""
    active, passive = bench.pair()
    target = passive.memory(b"." * 32, WRITE)
    passive.post_recv(1, 8)
    words = active.memory(b"<one><two>")
    write = RdmaWrite(5, (words.view[:5], words.view[5:]), target.va + 7, target.rkey)
    active.qp.post_send(write)
    bench.eventually(lambda: bool(active.sent), "the Write completes")
    bench.dut.run()
    bench.equal(bytes(target.view), b".......<one><two>...............", "the bytes are where they belong")
    bench.equal(active.sent[0].opcode, Opcode.RDMA_WRITE, "the completion says what it is of")
    bench.equal((passive.received, passive.qp.receives_posted), ([], 1), "no receive is used")


@check("IBTA 9.5; RFC 5040 5.5")
def write_comes_before_a_later_send(bench: Bench) -> None:
    """The bytes of a Write are in place when a Send posted behind it is delivered."""
    active, passive = bench.pair()
    target = passive.memory(4 * 30, WRITE)
    passive.post_recvs(30)
    for index in range(30):
        word = active.memory(b"%04d" % index)
        active.qp.post_send(RdmaWrite(index, (word.view,), target.va + 4 * index, target.rkey, signaled=False))
        active.send(index, b"look")
    seen = 0
    while seen < 30:
        bench.eventually(lambda wanted=seen + 1: len(passive.received) >= wanted, "the messages arrive")  # type: ignore[misc]
        for index in range(seen, len(passive.received)):
            found = bytes(target.view[4 * index : 4 * index + 4])
            bench.equal(found, b"%04d" % index, "a Write is placed before the Send behind it")
        seen = len(passive.received)


@check("IBTA 9.4.4; RFC 5040 5.2")
def read_fetches_bytes(bench: Bench) -> None:
    """An RDMA Read brings the bytes at the address it names, and tells nobody there."""
    active, passive = bench.pair()
    source = passive.memory(b"the bytes that are wanted", READ)
    sink = active.memory(b"." * 16)
    active.qp.post_send(RdmaRead(9, (sink.view[2:7],), source.va + 4, source.rkey))
    bench.eventually(lambda: bool(active.sent), "the Read completes")
    got = active.sent[0]
    bench.equal((got.wr_id, got.status, got.opcode, got.byte_len), (9, Status.SUCCESS, Opcode.RDMA_READ, 5), "it tells")
    bench.equal(bytes(sink.view), b"..bytes.........", "the bytes are where they belong, and nothing else is touched")
    bench.equal(passive.completions(), [], "the other end is not told")


@check("IBTA 10.7.3", needs=(READ_SCATTER,))
def read_scatters(bench: Bench) -> None:
    """An RDMA Read fills its entries one after the other."""
    active, passive = bench.pair()
    source = passive.memory(b"0123456789", READ)
    sink = active.memory(b"." * 16)
    active.qp.post_send(RdmaRead(1, (sink.view[8:12], sink.view[0:6]), source.va, source.rkey))
    bench.eventually(lambda: bool(active.sent), "the Read completes")
    bench.equal(bytes(sink.view), b"456789..0123....", "the entries are filled in order")


@check("IBTA 9.4.4")
def reads_beyond_the_depth_wait(bench: Bench) -> None:
    """More RDMA Reads than the agreed depth are queued and all done, in order."""
    active, passive = bench.pair(capabilities=QpCapabilities(initiator_depth=2, responder_resources=2))
    bench.equal(active.qp.initiator_depth, 2, "the depth is agreed")
    source = passive.memory(bytes(range(64)), READ)
    sink = active.memory(64)
    for index in range(16):
        part = sink.view[4 * index : 4 * index + 4]
        active.qp.post_send(RdmaRead(index, (part,), source.va + 4 * index, source.rkey))
    bench.eventually(lambda: len(active.sent) == 16, "all Reads complete")
    bench.all_ok(active, "a Read that had to wait succeeds")
    bench.equal([each.wr_id for each in active.sent], list(range(16)), "Reads complete in order")
    bench.equal(bytes(sink.view), bytes(range(64)), "each brings its own bytes")


@check("iWARP verbs draft 8.2.2; IBTA 9.4.4")
def read_with_a_depth_of_zero_fails(bench: Bench) -> None:
    """Where no RDMA Reads were agreed, one fails and takes nothing."""
    capabilities = QpCapabilities(initiator_depth=4, responder_resources=0)
    active, passive = bench.pair(passive=bench.side(bench.passive, capabilities))
    bench.equal(active.qp.initiator_depth, 0, "what the other end does not take is not agreed")
    source = passive.memory(b"secret", READ)
    sink = active.memory(6)
    active.qp.post_send(RdmaRead(1, (sink.view,), source.va, source.rkey))
    bench.eventually(lambda: bool(active.sent), "the Read completes")
    bench.expect(not active.sent[0].ok, "a Read with a depth of zero fails", active.sent)
    bench.equal(bytes(sink.view), bytes(6), "nothing is read")


@check("IBTA 9.4.4, 10.8.3.3; iWARP verbs draft 8.2.2.2")
def fence_waits_for_reads(bench: Bench) -> None:
    """A fenced Write is not begun before the Reads posted before it are done: they bring what was there before."""
    active, passive = bench.pair()
    target = passive.memory(8, ALL)
    for turn in range(20):
        old, new = b"old%05d" % turn, b"new%05d" % turn
        target.view[:] = old
        sink, word = active.memory(8), active.memory(new)
        active.qp.post_send(RdmaRead(2 * turn, (sink.view,), target.va, target.rkey))
        active.qp.post_send(RdmaWrite(2 * turn + 1, (word.view,), target.va, target.rkey, fence=True))
        bench.eventually(lambda wanted=2 * turn + 2: len(active.sent) == wanted, "both complete")  # type: ignore[misc]
        bench.dut.run()
        bench.equal((bytes(sink.view), bytes(target.view)), (old, new), "the Read comes before the fenced Write")


@check("iWARP verbs draft 8.2.2.2; IBTA 10.8.3.3", needs=(VOIDED_REGIONS,))
def fenced_invalidation_waits(bench: Bench) -> None:
    """A fenced invalidation takes effect when all that was posted before it is done, and before the next begins."""
    active, passive = bench.pair()
    far = passive.memory(b"from far", ALL)
    sink = active.memory(8)
    active.qp.post_send(RdmaRead(1, (sink.view,), far.va, far.rkey))
    active.qp.post_send(LocalInvalidate(2, sink.rkey, fence=True))
    active.qp.post_send(Send(3, (sink.view,)))
    bench.eventually(lambda: len(active.sent) == 3, "all complete")
    bench.equal(
        [each.status for each in active.sent], [Status.SUCCESS, Status.SUCCESS, Status.LOCAL_PROTECTION_ERROR],
        "the Read before it has its memory, the Send behind it has not",
    )  # fmt: skip
    bench.equal(bytes(sink.view), b"from far", "the Read has brought its bytes")


@check("IBTA 10.8.5")
def requests_complete_in_order(bench: Bench) -> None:
    """Completions of a send queue come in the order of posting, whatever the requests are."""
    active, passive = bench.pair()
    far = passive.memory(64, ALL)
    near = active.memory(64)
    passive.post_recvs(8)
    for index in range(0, 24, 3):
        active.qp.post_send(RdmaRead(index, (near.view[:32],), far.va, far.rkey))
        active.qp.post_send(RdmaWrite(index + 1, (near.view[32:],), far.va + 32, far.rkey))
        active.send(index + 2, b"x")
    bench.eventually(lambda: len(active.sent) == 24, "all complete")
    bench.equal([each.wr_id for each in active.sent], list(range(24)), "completions come in the order of posting")
    bench.all_ok(active, "all succeed")


@check("IBTA 10.8.2, 10.8.5")
def unsignaled_requests_are_silent(bench: Bench) -> None:
    """A request that is not signaled makes no completion, and leaves the queue with the next signaled one."""
    active, passive = bench.pair(capabilities=QpCapabilities(max_send_wr=8))
    passive.post_recvs(24)
    for turn in range(3):
        for index in range(7):
            active.send(8 * turn + index, b"quiet", signaled=False)
        active.send(8 * turn + 7, b"told")
        bench.eventually(lambda wanted=turn + 1: len(active.sent) == wanted, "the signaled one completes")  # type: ignore[misc]
    bench.eventually(lambda: len(passive.received) == 24, "all messages arrive")
    bench.equal([each.wr_id for each in active.sent], [7, 15, 23], "only signaled requests complete")
    bench.equal(active.qp.sends_outstanding, 0, "none is left in the queue")


@check("IBTA 9.2.3; RFC 5040 4.1", needs=(SOLICITED,))
def solicited_is_told_to_the_receiver(bench: Bench) -> None:
    """The receiver is told whether the sender asked for an event."""
    active, passive = bench.pair()
    passive.post_recvs(3)
    active.send(0, b"plain")
    active.send(1, b"urgent", solicited=True)
    active.send(2, b"plain")
    bench.eventually(lambda: len(passive.received) == 3, "all messages arrive")
    bench.equal([each.solicited for each in passive.received], [False, True, False], "it is told which one asked")


@check("IBTA 10.8.5")
def completed_memory_is_free(bench: Bench) -> None:
    """Once a request is completed its memory may be used for something else."""
    active, passive = bench.pair()
    target = passive.memory(6, WRITE)
    room = passive.post_recv(1, 8)
    word = active.memory(b"before")
    active.qp.post_send(RdmaWrite(1, (word.view,), target.va, target.rkey))
    active.qp.post_send(Send(2, (word.view,)))
    bench.eventually(lambda: len(active.sent) == 2, "both complete")
    word.view[:] = b"after!"
    bench.eventually(lambda: bool(passive.received), "the message arrives")
    bench.equal((bytes(target.view), bytes(room.view[:6])), (b"before", b"before"), "the bytes are those at posting")


@check("RFC 5041 5.2; IBTA 9.7.4.1.5")
def empty_write_checks_no_key(bench: Bench) -> None:
    """A Write of no bytes succeeds whatever key and address it names, and leaves no trace: a sign of life."""
    active, passive = bench.pair()
    passive.post_recv(1, 8)
    active.qp.post_send(RdmaWrite(1, (), 0xDEAD_BEEF, RKey(0xFFFF_FFFF)))
    active.qp.post_send(RdmaWrite(2, (b"",), 0, RKey(0)))
    bench.eventually(lambda: len(active.sent) == 2, "both complete")
    bench.all_ok(active, "an empty Write succeeds")
    bench.dut.run()
    bench.equal((passive.completions(), passive.events, passive.qp.receives_posted), ([], [], 1), "nobody is told")


@check("IBTA 9.7.2; RFC 5041 5.2")
def long_messages_arrive_whole(bench: Bench) -> None:
    """A message of many packets, Send, Write or Read, arrives as one and unharmed."""
    active, passive = bench.pair()
    size = min(300_001, active.device.attributes.message_max, passive.device.attributes.message_max)
    content = bytes((7 * index + index // 251) % 256 for index in range(size))
    near, sink = active.memory(content), active.memory(size)
    far = passive.memory(size, ALL)
    room = passive.post_recv(1, size + 3)
    active.qp.post_send(Send(1, (near.view[:1000], near.view[1000:])))
    active.qp.post_send(RdmaWrite(2, (near.view,), far.va, far.rkey))
    active.qp.post_send(RdmaRead(3, (sink.view,), far.va, far.rkey, fence=True))
    bench.eventually(lambda: len(active.sent) == 3 and bool(passive.received), "all complete")
    bench.all_ok(active, "all succeed")
    bench.equal(passive.received[0].byte_len, size, "the receive tells the length of the message")
    for what, view in (("Send", room.view[:size]), ("Write", far.view), ("Read", sink.view)):
        bench.expect(view == content, f"a long {what} arrives unharmed")


@check("IBTA 9.5; RFC 5040 5.5")
def both_ways_at_once(bench: Bench) -> None:
    """Long messages that cross each other arrive whole, each side's Sends, Writes and Reads in their order."""
    ends = bench.pair()
    size = min(300_001, *(side.device.attributes.message_max for side in ends))
    contents = [bytes((number + 7 * index + index // 251) % 256 for index in range(size)) for number in (0, 1)]
    targets = [side.memory(size, ALL) for side in ends]
    rooms = [side.post_recv(1, size) for side in ends]
    sinks = [side.memory(size) for side in ends]
    for side, content, target, sink in zip(ends, contents, reversed(targets), sinks, strict=True):
        word = side.memory(content)
        side.qp.post_send(RdmaWrite(2, (word.view,), target.va, target.rkey))
        side.qp.post_send(Send(3, (word.view,)))
        side.qp.post_send(RdmaRead(4, (sink.view,), target.va, target.rkey))
    bench.eventually(lambda: all(len(side.completions()) == 4 for side in ends), "all complete")
    for side, other, target, room, sink, own in zip(
        ends, reversed(contents), targets, rooms, sinks, contents, strict=True
    ):
        bench.all_ok(side, "all succeed")
        bench.equal([each.wr_id for each in side.sent], [2, 3, 4], "requests complete in order")
        for what, view, wanted in (("Write", target.view, other), ("Send", room.view, other), ("Read", sink.view, own)):
            bench.expect(view == wanted, f"a {what} that is crossed by others arrives unharmed")
