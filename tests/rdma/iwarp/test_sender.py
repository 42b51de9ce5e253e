"""The sending half of a stream: fences, depths, order of completion, and memory that is taken back meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from mpa_oracle import Deframer
from raw_iwarp import Terminate
from wire_end import WireEnd

from sidestep.rdma.iwarp.ddp import RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.receiver import Fault
from sidestep.rdma.iwarp.sender import CHUNK
from sidestep.rdma.work import LocalInvalidate, RdmaRead, RdmaWrite, RKey, Send, SendRequest, Status

LONG = 3 * CHUNK


@pytest.fixture
def end() -> Iterator[WireEnd]:
    end = WireEnd()
    yield end
    end.close()


def sent(made: bytes) -> list[Segment]:
    return [Segment.decode(each) for each in Deframer(markers=False).feed(made)]


def ops(made: bytes) -> list[RdmapOp]:
    """Of the messages, each by its last segment."""
    return [each.op for each in sent(made) if each.last]


def post(end: WireEnd, *requests: SendRequest) -> None:
    end.sender.requests.extend(requests)


def read(end: WireEnd, wr_id: int, size: int = 8, *, fence: bool = False) -> RdmaRead:
    return RdmaRead(wr_id, (end.region(size + 1).view[:size],), 1, RKey(1), fence=fence)


def answer(end: WireEnd, size: int, at: int = 0) -> None:
    """To the oldest of our Reads."""
    assert end.feed(Segment(RdmapOp.READ_RESPONSE, True, bytes(size), end.qp.sink_stag, at)) is None


def completed(end: WireEnd) -> list[object]:
    return [each[1] for each in end.told if each[0] == "completed"]


def asked(end: WireEnd, stag: int, va: int, length: int, msn: int = 1) -> None:
    """A Read Request of the other end."""
    wanted = ReadRequest(0x77, 2**64 - 100, length, stag, va)
    assert end.feed(Segment(RdmapOp.READ_REQUEST, True, wanted.encode(), queue=1, msn=msn)) is None


@pytest.mark.spec("RFC 5040 5.5, rule 15")
def test_requests_complete_in_the_order_of_posting(end: WireEnd) -> None:
    post(end, Send(1, ()), read(end, 2), RdmaWrite(3, (), 1, RKey(1)), read(end, 4, 0), Send(5, ()))
    assert ops(end.taken()) == [
        RdmapOp.SEND, RdmapOp.READ_REQUEST, RdmapOp.WRITE, RdmapOp.READ_REQUEST, RdmapOp.SEND,
    ]  # fmt: skip
    assert completed(end) == [1]
    answer(end, 8)
    assert completed(end) == [1, 2, 3]
    answer(end, 0, 8)
    assert completed(end) == [1, 2, 3, 4, 5]


@pytest.mark.spec("verbs draft for iWARP 6.5")
def test_nothing_overtakes_a_read_that_waits_for_its_turn(end: WireEnd) -> None:
    post(end, read(end, 1), read(end, 2), read(end, 3), Send(4, ()))
    assert ops(end.taken()) == [RdmapOp.READ_REQUEST] * 2
    answer(end, 8)
    assert ops(end.taken()) == [RdmapOp.READ_REQUEST, RdmapOp.SEND]


@pytest.mark.spec("verbs draft for iWARP 8.2.2.2")
@pytest.mark.parametrize("kind", ["send", "write", "read"])
def test_a_fence_waits_for_reads(end: WireEnd, kind: str) -> None:
    fenced: dict[str, SendRequest] = {
        "send": Send(2, (), fence=True), "write": RdmaWrite(2, (), 1, RKey(1), fence=True),
        "read": read(end, 2, fence=True),
    }  # fmt: skip
    post(end, read(end, 1), fenced[kind], Send(3, ()))
    assert ops(end.taken()) == [RdmapOp.READ_REQUEST]
    answer(end, 8)
    assert len(ops(end.taken())) == 2


@pytest.mark.spec("verbs draft for iWARP 8.2.2.2")
@pytest.mark.parametrize("fence", [True, False])
def test_an_invalidation_has_its_place_in_the_queue_and_waits_for_all_if_fenced(end: WireEnd, fence: bool) -> None:
    region, other = end.region(8), end.region(8)
    post(end, Send(1, (region.view,)), LocalInvalidate(2, region.rkey, fence=fence), Send(3, (other.view,)))
    end.sender.pump()
    assert region.valid is fence
    assert [each.op for each in sent(end.taken())] == [RdmapOp.SEND] * 2
    assert not region.valid
    assert completed(end) == [1, 2, 3]
    late = end.region(8)
    post(end, LocalInvalidate(4, late.rkey), Send(5, (late.view,)), Send(6, ()))
    assert end.taken() == b""
    assert end.told[-1] == ("failed", 5, Status.LOCAL_PROTECTION_ERROR)


def test_a_fenced_invalidation_waits_for_a_read(end: WireEnd) -> None:
    request = read(end, 1)
    region = end.region(8)
    post(end, request, LocalInvalidate(2, region.rkey, fence=True))
    end.taken()
    assert region.valid
    answer(end, 8)
    end.taken()
    assert not region.valid


def test_nothing_passes_a_request_that_failed_though_the_other_end_begins_to_speak(end: WireEnd) -> None:
    """Its first message sets the queue free, but not one that stands still for another reason."""
    gone = end.region(8)
    gone.deregister()
    post(end, read(end, 1), Send(2, (gone.view,)), Send(3, ()))
    assert ops(end.taken()) == [RdmapOp.READ_REQUEST]
    assert end.feed(Segment(RdmapOp.READ_RESPONSE, False, b"1234", end.qp.sink_stag, 0)) is None
    assert ("heard",) in end.told
    assert end.taken() == b""
    answer(end, 4, 4)
    assert end.told[-2:] == [("completed", 1, 8), ("failed", 2, Status.LOCAL_PROTECTION_ERROR)]


@pytest.mark.parametrize("kind", ["send", "write"])
def test_memory_taken_back_amid_a_message_is_read_no_more(end: WireEnd, kind: str) -> None:
    """What was framed goes out as it was; the rest does not, and the request fails."""
    region = end.region(LONG)
    region.view[:] = b"x" * LONG
    message: SendRequest = Send(1, (region.view,)) if kind == "send" else RdmaWrite(1, (region.view,), 0, RKey(1))
    post(end, message, Send(2, ()))
    end.sender.pump()
    region.deregister()
    end.outbound.own()
    region.view[:] = b"y" * LONG
    made = end.taken()
    assert end.told == [("failed", 1, Status.LOCAL_PROTECTION_ERROR)]
    segments = sent(made)
    assert not any(each.last for each in segments)
    assert set(b"".join(each.payload for each in segments)) == {ord("x")}


@pytest.mark.spec("RFC 5040 4.8")
@pytest.mark.parametrize("done", [0, 1, 2])
def test_an_answer_that_fails_half_way_tells_the_rest(end: WireEnd, done: int) -> None:
    """Where it was to go may wrap around: that is nobody's check but the reader's."""
    region = end.region(LONG)
    asked(end, region.rkey, region.va, LONG)
    made = b""
    for _ in range(done):
        end.sender.pump()
        made += end.outbound.take(1 << 30)
        end.sender.written()
        if len(made) >= done * CHUNK:
            break
    sent_len = sum(len(each.payload) for each in sent(made))
    region.deregister()
    assert end.taken() == b""
    ((_, fault),) = [each for each in end.told if each[0] == "answer failed"]
    assert isinstance(fault, Fault)
    terminate = Terminate.decode(fault.message.encode())
    assert str(terminate) == "0/1/00"
    rest = ReadRequest.decode(terminate.rdmap_header)
    assert rest == ReadRequest(
        0x77, (2**64 - 100 + sent_len) % 2**64, LONG - sent_len, region.rkey, region.va + sent_len
    )  # fmt: skip
    assert bool(sent_len) is bool(done)
    assert (terminate.segment_len, terminate.ddp_header[1]) == (46, 0x41)


@pytest.mark.spec("RFC 5042 6.4.3.3")
def test_answers_wait_unmade_until_the_transport_takes_them(end: WireEnd) -> None:
    """A Read Request of 46 bytes asks for up to 4 GiB: little of it is ever in memory."""
    end.sender.resources = 100
    region = end.region(LONG)
    for msn in range(1, 101):
        asked(end, region.rkey, region.va, LONG, msn)
    end.sender.pump()
    assert end.outbound.waiting <= 1 << 20
    assert sum(len(each.payload) for each in sent(end.taken())) == 100 * LONG


def test_requests_and_answers_take_turns(end: WireEnd) -> None:
    region = end.region(8)
    post(end, *(Send(number, ()) for number in range(3)))
    asked(end, region.rkey, region.va, 8)
    asked(end, region.rkey, region.va, 8, 2)
    assert ops(end.taken()) == [
        RdmapOp.SEND, RdmapOp.READ_RESPONSE, RdmapOp.SEND, RdmapOp.READ_RESPONSE, RdmapOp.SEND,
    ]  # fmt: skip


def test_entries_across_the_borders_of_segments_and_nothing_at_all(end: WireEnd) -> None:
    sizes = [0, 1, 1381, 1382, 1383, 0, 5000, 3, 0]
    regions = [end.region(size or 1) for size in sizes]
    for number, region in enumerate(regions):
        region.view[:] = bytes([number]) * len(region.view)
    gather = tuple(region.view[:size] for region, size in zip(regions, sizes, strict=True))
    post(end, Send(1, gather), RdmaWrite(2, gather, 7, RKey(5)), Send(3, (gather[0], gather[5])))
    segments = sent(end.taken())
    whole = b"".join(bytes(each) for each in gather)
    assert b"".join(each.payload for each in segments if each.msn == 1) == whole
    assert b"".join(each.payload for each in segments if each.op is RdmapOp.WRITE) == whole
    assert segments[-1] == replace(segments[-1], payload=b"", last=True, msn=2)
    assert completed(end) == [1, 2, 3]
