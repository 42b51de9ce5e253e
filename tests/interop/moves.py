"""Bytes that our device and the kernel's move, in both roles, and all of them arrive as they were."""

from __future__ import annotations

from typing import Final

from guest_verbs import Bench, pattern

from sidestep.rdma.verbs import QpCapabilities
from sidestep.rdma.work import RdmaRead, RdmaWrite, Status

COUNT: Final = 64  # messages at a time


def sends(bench: Bench, asks: str, size: int) -> None:
    ours, guest = bench.pair(asks)
    theirs = bench.remote(guest, size)
    guest.call("receive", region=theirs.region, length=size)
    room = ours.room(size)
    ours.send(pattern(1, size))
    assert ours.sent(1) == [Status.SUCCESS]
    assert guest.call("received")["completions"] == [["SUCCESS", size]]
    assert guest.call("holds", region=theirs.region, seed=1, length=size)["holds"]
    guest.call("send", region=bench.remote(guest, size, seed=2).region, length=size)
    (completion,) = ours.received(1)
    assert (completion.status, completion.byte_len) == (Status.SUCCESS, size)
    assert room.view == pattern(2, size)
    assert guest.call("sent")["completions"][0][0] == "SUCCESS"


def writes_and_reads(bench: Bench, asks: str, size: int) -> None:
    ours, guest = bench.pair(asks)
    source, sink = ours.memory(pattern(3, size)), ours.memory(size)
    theirs, empty = bench.remote(guest, size, seed=4), bench.remote(guest, size)
    # by us
    ours.qp.post_send(RdmaRead(0, (sink.view,), theirs.address, theirs.key))
    ours.qp.post_send(RdmaWrite(1, (source.view,), empty.address, empty.key))
    # a Read behind the Write returns when the Write has been placed (RFC 5040 5.5)
    back = ours.memory(size)
    ours.qp.post_send(RdmaRead(2, (back.view,), empty.address, empty.key))
    assert ours.sent(3) == [Status.SUCCESS] * 3
    assert sink.view == pattern(4, size)
    assert back.view == pattern(3, size)
    assert guest.call("holds", region=empty.region, seed=3, length=size)["holds"]
    # by the kernel's
    target, again = ours.memory(size), bench.remote(guest, size)
    guest.call("write", region=theirs.region, length=size, address=target.va, key=target.rkey)
    guest.call("read", region=again.region, length=size, address=source.va, key=source.rkey)
    assert [status for status, _ in guest.call("sent", count=2)["completions"]] == ["SUCCESS"] * 2
    assert guest.call("holds", region=again.region, seed=3, length=size)["holds"]
    assert target.view == pattern(4, size)


def many_at_a_time(bench: Bench, asks: str, *, writes: tuple[bool, bool] = (True, True)) -> None:
    """Sends, Writes and Reads of both ends at once, more Reads than either end holds at a time.

    Args:
        writes: In which halves of ours there are Writes.
    """
    size = 10_000
    ours, guest = bench.pair(asks, QpCapabilities(initiator_depth=4, responder_resources=4))
    rooms = [ours.room(size, number) for number in range(COUNT)]
    theirs, inbox = bench.remote(guest, size, seed=6), bench.remote(guest, size)
    fetched, target = bench.remote(guest, size), bench.remote(guest, size)
    source, sinks = ours.memory(pattern(7, size)), [ours.memory(size) for _ in range(COUNT)]
    written = ours.memory(size)
    guest.call("receive", region=inbox.region, length=size, count=COUNT)
    for verb in ("send", "write", "read"):
        more = {} if verb == "send" else {"address": written.va, "key": written.rkey}
        if verb == "read":
            more = {"address": source.va, "key": source.rkey}
        region = fetched.region if verb == "read" else theirs.region
        guest.ask(verb, region=region, length=size, count=COUNT, **more)
    for part, write in zip((range(COUNT // 2), range(COUNT // 2, COUNT)), writes, strict=True):
        for number in part:
            ours.qp.post_send(RdmaRead(0, (sinks[number].view,), theirs.address, theirs.key))
            ours.send(pattern(7, size))
            if write:
                ours.qp.post_send(RdmaWrite(0, (source.view,), target.address, target.key))
        posted = (2 + write) * len(part)
        assert ours.sent(posted) == [Status.SUCCESS] * posted
    completions = ours.received(COUNT)
    assert [(each.wr_id, each.status, each.byte_len) for each in completions] == [
        (number, Status.SUCCESS, size) for number in range(COUNT)
    ]
    for _ in range(3):
        guest.answer()
    assert {status for status, _ in guest.call("sent", count=3 * COUNT)["completions"]} == {"SUCCESS"}
    assert guest.call("received", count=COUNT)["completions"] == [["SUCCESS", size]] * COUNT
    for filled in (inbox, fetched, target):
        assert guest.call("holds", region=filled.region, seed=7, length=size)["holds"]
    for memory in (written, *rooms, *sinks):
        assert memory.view == pattern(6, size)


def messages_without_bytes(bench: Bench, asks: str) -> None:
    ours, guest = bench.pair(asks)
    theirs = bench.remote(guest, 64, seed=5)
    guest.call("receive", region=theirs.region, length=64, count=2)
    ours.qp.post_send(RdmaWrite(0, (), 1, theirs.key))
    ours.send(b"")
    ours.qp.post_send(RdmaRead(1, (ours.memory(1).view[:0],), theirs.address, theirs.key))
    ours.send(b"x")
    assert ours.sent(4) == [Status.SUCCESS] * 4
    assert guest.call("received", count=2)["completions"] == [["SUCCESS", 0], ["SUCCESS", 1]]
