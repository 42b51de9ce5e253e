"""Captures of the software RNIC: Wireshark's dissector and our own deframer say what is in them."""

from __future__ import annotations

import errno
import io
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from dissector import numbers, shown, told
from hypothesis import given, settings
from hypothesis import strategies as st
from iwarp_pair import IwarpPair
from mpa_oracle import Deframer

from sidestep.errors import Unavailable
from sidestep.native._framing import FPDU_MAX
from sidestep.observe.capture.cutter import Cutter
from sidestep.observe.capture.files import read_frames
from sidestep.observe.capture.frame import CapturedFrame
from sidestep.observe.capture.segments import SegmentWriter, capture
from sidestep.rdma.iwarp.ddp import RdmapOp, Segment
from sidestep.rdma.iwarp.mpa import fpdu
from sidestep.rdma.iwarp.qp import IwarpQueuePair
from sidestep.rdma.iwarp.startup.frame import MpaRole, StartFrame
from sidestep.rdma.iwarp.tap import Seen, SeenKind, WireEnds
from sidestep.rdma.work import RdmaRead, RdmaWrite, Send

HEADERS = 14 + 20 + 20  # bytes of Ethernet, IPv4 and TCP
Make = Callable[..., IwarpPair]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[IwarpPair] = []

    def pair(**options: Any) -> IwarpPair:
        made.append(IwarpPair(**options))
        return made[-1]

    yield pair
    for one in made:
        one.close()


def every_operation(pair: IwarpPair, size: int) -> None:
    """One of each that a user can ask for, from the active end; the last one is refused, and ends the stream."""
    active, passive = pair.active, pair.passive
    source = bytearray(Random(size).randbytes(size))
    active.region(source)
    target = passive.region(bytearray(size))
    payload = memoryview(source)
    pair.do(active, Send(1, (payload,)), arrives=passive)
    pair.do(active, Send(2, (payload,), solicited=True), arrives=passive)
    for solicited in (False, True):
        given_away = passive.region(bytearray(8))
        pair.do(active, Send(3, (payload,), solicited=solicited, invalidate=given_away.rkey), arrives=passive)
    pair.do(active, RdmaWrite(4, (payload,), target.va, target.rkey))
    pair.do(active, RdmaRead(5, (payload,), target.va, target.rkey))
    refused = RdmaWrite(6, (payload[:8],), target.va + size, target.rkey)
    active.qp.post_send(refused)
    pair.until(lambda: "terminate_received{0x1101}" in active.device.counters())
    pair.until(lambda: not active.device.taps.wires and not passive.device.taps.wires)


def streams(data: bytes) -> dict[bool, bytes]:
    """What each direction says, by whether it begins with the Request; sequence numbers have to fit."""
    found = dict.fromkeys((True, False), b"")
    active_port = None
    for frame in frames_of(data):
        segment = frame.data[34:]
        port, sequence, flags = int.from_bytes(segment[:2]), int.from_bytes(segment[4:8]), segment[13]
        active_port = active_port or port
        outbound = port == active_port
        payload = segment[20:]
        if payload:
            assert sequence == 1 + len(found[outbound])
            found[outbound] += payload
        assert flags
    return found


def frames_of(data: bytes) -> list[CapturedFrame]:
    return list(read_frames(io.BytesIO(data), "capture"))


def segments_of(data: bytes, *, markers: bool) -> dict[bool, list[Segment]]:
    """The DDP segments of each direction, their checksums and markers checked."""
    result = {}
    for outbound, stream in streams(data).items():
        start = StartFrame.decode(stream)
        assert start is not None
        assert start[0].role is (MpaRole.REQUEST if outbound else MpaRole.REPLY)
        deframer = Deframer(markers=markers, check=True)
        result[outbound] = [Segment.decode(payload) for payload in deframer.feed(stream[start[1] :])]
        assert not deframer.pending
    return result


ACTIVE = [
    RdmapOp.WRITE, RdmapOp.SEND, RdmapOp.SEND_SE, RdmapOp.SEND_INV, RdmapOp.SEND_SE_INV, RdmapOp.WRITE,
    RdmapOp.READ_REQUEST, RdmapOp.WRITE,
]  # fmt: skip
PASSIVE = [RdmapOp.READ_RESPONSE, RdmapOp.TERMINATE]


def taken(make: Make, size: int, *, markers: bool) -> bytes:
    """A capture of everything."""
    pair = make(markers=markers, size=size)
    file = io.BytesIO()
    with capture(pair.active.device, file):
        pair.connect()
        every_operation(pair, size)
    return file.getvalue()


@pytest.mark.spec("RFC 5044 4.4")
@pytest.mark.parametrize("markers", [False, True], ids=["plain", "markers"])
@pytest.mark.parametrize("size", [7, 100_000])
def test_every_operation_is_there_with_its_checksum(make: Make, size: int, markers: bool) -> None:
    found = segments_of(taken(make, size, markers=markers), markers=markers)
    for outbound, expected in ((True, ACTIVE), (False, PASSIVE)):
        assert [one.op for one in found[outbound] if one.last] == expected
    assert sum(len(one.payload) for one in found[True] if one.op in (RdmapOp.SEND, RdmapOp.SEND_SE)) == 2 * size


@pytest.mark.slow
@pytest.mark.app
def test_the_dissector_sees_every_operation(make: Make, tmp_path: Path) -> None:
    data = taken(make, 1000, markers=False)
    assert shown(data, tmp_path, ["iwarp_mpa.req", "iwarp_mpa.rep"], "iwarp_mpa.req || iwarp_mpa.rep") != []
    rows = numbers(shown(data, tmp_path, ["iwarp_rdma.opcode"], "iwarp_rdma"))
    assert sorted(code for (code,) in rows) == sorted([*ACTIVE, *PASSIVE])
    text = told(data, tmp_path, "iwarp_mpa")
    assert text.count("Good CRC32") == len(rows)
    assert "Bad CRC32" not in text
    checked = ["-o", "tcp.check_checksum:TRUE", "-o", "ip.check_checksum:TRUE"]
    wrong = shown(data, tmp_path, ["frame.number"], "tcp.checksum.status != 1 || ip.checksum.status != 1", *checked)
    assert wrong == []
    assert shown(data, tmp_path, ["frame.number"], "_ws.malformed || tcp.analysis.flags") == []


@pytest.mark.slow
@pytest.mark.app
def test_the_dissector_finds_its_way_by_markers(make: Make, tmp_path: Path) -> None:
    """Its version 4.0 cannot read all frames that have several (docs/wire/iwarp.md 11): these it can."""
    data = taken(make, 7, markers=True)
    rows = numbers(shown(data, tmp_path, ["iwarp_rdma.opcode"], "iwarp_rdma"))
    assert sorted(code for (code,) in rows) == sorted([*ACTIVE, *PASSIVE])
    text = told(data, tmp_path, "iwarp_mpa")
    assert text.count("Good CRC32") == len(rows)
    assert "Bad CRC32" not in text


def middle(make: Make, size: int) -> bytes:
    """A capture that begins and ends while messages go both ways."""
    pair = make(size=size)
    pair.connect()
    active, passive = pair.active, pair.passive
    source, back = bytearray(size), bytearray(size)
    active.region(source)
    passive.region(back)
    done = 0

    def go_on() -> None:
        nonlocal done
        for end, other, buffer in ((active, passive, source), (passive, active, back)):
            region = other.region(bytearray(size))
            for _ in range(16):
                end.qp.post_send(RdmaWrite(done, (memoryview(buffer),), region.va, region.rkey))
        done += 16

    go_on()
    assert isinstance(active.qp, IwarpQueuePair)
    stream = active.qp.stream
    assert stream is not None
    # Both directions are within an FPDU.
    pair.until(lambda: len(active.completions) > 2 and stream.sent_len()[1] > 0 and stream.received_len()[1] != b"")
    file = io.BytesIO()
    with capture(active.device, file):
        pair.until(lambda: len(active.completions) > done - 4 and len(passive.completions) > done - 4)
        pair.until(lambda: len(active.completions) == len(passive.completions) == done)
        region = passive.region(bytearray(size))
        pair.do(active, RdmaRead(9, (memoryview(source),), region.va, region.rkey))
    go_on()  # nobody looks on any more
    pair.until(lambda: len(active.completions) == 2 * 16 + 1)
    pair.disconnect()
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.app
def test_a_capture_that_begins_in_the_middle(make: Make, tmp_path: Path) -> None:
    data = middle(make, 700_000)
    comments = [row[0] for row in shown(data, tmp_path, ["frame.comment"], "frame.comment")]
    assert "began before the capture" in comments[0]
    assert any("bytes before this are not in the capture" in comment for comment in comments)
    fpdus = len(shown(data, tmp_path, ["frame.number"], "iwarp_rdma"))
    assert fpdus > 2
    payloads = len(shown(data, tmp_path, ["frame.number"], "tcp.len > 0"))
    assert payloads == fpdus + 2, "Request and Reply besides"
    text = told(data, tmp_path, "iwarp_mpa")
    assert text.count("Good CRC32") == fpdus
    assert "Bad CRC32" not in text


def test_two_captures_see_the_same(make: Make) -> None:
    pair = make()
    first, second = io.BytesIO(), io.BytesIO()
    with capture(pair.active.device, first), capture(pair.passive.device, second):
        pair.connect()
        every_operation(pair, 300)
    assert segments_of(first.getvalue(), markers=False) == segments_of(second.getvalue(), markers=False)


def test_nobody_is_left_behind(make: Make) -> None:
    """Without a capture bytes go the fast way, and nothing is kept of them."""
    pair = make()
    pair.connect()
    wires = [*pair.active.device.taps.wires, *pair.passive.device.taps.wires]
    assert [wire.live for wire in wires] == [False, False]
    with capture(pair.active.device, io.BytesIO()):
        assert [wire.live for wire in wires] == [True, False]
    assert [wire.live for wire in wires] == [False, False]
    pair.disconnect()


def test_a_full_disk_disturbs_no_connection(make: Make) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            if self.tell() > 400:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)  # type: ignore[arg-type]

    pair = make()
    taking = capture(pair.active.device, Full())
    taking.__enter__()
    pair.connect()
    every_operation(pair, 1000)
    with pytest.raises(Unavailable, match="No space left"):
        taking.__exit__(None, None, None)


def test_frames_have_times_and_directions(make: Make) -> None:
    data = taken(make, 7, markers=False)
    times = [frame.time_ns for frame in frames_of(data)]
    assert times == sorted(times)
    assert times[-1] > 1_600_000_000 * 10**9


# ---- cutting ----


def request_and_reply(markers: bool) -> tuple[bytes, bytes]:
    return StartFrame(MpaRole.REQUEST, b"x", markers=markers).encode(), StartFrame(
        MpaRole.REPLY, markers=markers
    ).encode()


@given(st.data(), st.booleans())
@settings(max_examples=60)
def test_any_pieces_are_cut_at_frames(data: st.DataObject, markers: bool) -> None:
    payloads = data.draw(st.lists(st.binary(max_size=1500), max_size=6))
    request, reply = request_and_reply(markers)
    stream, ends = request, [len(request)]
    for payload in payloads:
        stream += fpdu(payload, len(stream) - len(request), markers=markers)
        ends.append(len(stream))
    other = StartFrame.decode(reply)
    assert other is not None
    cutter, pieces, at = Cutter(begins_late=False), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 700))
        pieces += cutter.feed(Seen(SeenKind.BYTES, 1, 0, offset=at, data=stream[at : at + size]), other[0])
        at += size
    assert [piece.offset + len(piece.data) for piece in pieces] == ends
    assert b"".join(piece.data for piece in pieces) == stream
    assert not cutter.pending


def test_what_is_lost_is_told() -> None:
    """Behind a loss nobody knows where frames begin: bytes are written as they come."""
    file = io.BytesIO()
    writer = SegmentWriter(file)
    ends = WireEnds(("127.0.0.1", 1000), ("127.0.0.1", 2000), True, "iwarp", False)
    writer.see("a", Seen(SeenKind.OPENED, 1, 10**18, ends=ends))
    request, reply = request_and_reply(False)
    writer.see("a", Seen(SeenKind.BYTES, 1, 10**18, True, 0, 0, request))
    writer.see("a", Seen(SeenKind.BYTES, 1, 10**18, False, 0, len(request), reply))
    writer.see("a", Seen(SeenKind.LOST, 0, 10**18, offset=3))
    writer.see("a", Seen(SeenKind.BYTES, 1, 10**18, True, 5000, 0, b"whatever"))
    writer.close()
    data = file.getvalue()
    assert writer.dropped == 3
    assert len(frames_of(data)) == 6
    assert b"3 pieces before this were lost" in data
    assert b"bytes before this are not in the capture" in data
    assert frames_of(data)[-1].data[HEADERS:] == b"whatever"


def test_both_ends_in_one_capture_are_one_connection() -> None:
    writer = SegmentWriter(io.BytesIO())
    here, there = ("127.0.0.1", 1000), ("127.0.0.1", 2000)
    writer.see("a", Seen(SeenKind.OPENED, 1, 10**18, ends=WireEnds(here, there, True, "iwarp", False)))
    writer.see("b", Seen(SeenKind.OPENED, 1, 10**18, ends=WireEnds(there, here, False, "iwarp", False)))
    assert writer.connections == 1
    writer.see("b", Seen(SeenKind.RESET, 1, 10**18))
    assert writer.frames == 3
    writer.see("a", Seen(SeenKind.RESET, 1, 10**18))
    writer.see("b", Seen(SeenKind.OPENED, 2, 10**18, ends=WireEnds(there, here, False, "iwarp", False)))
    assert writer.connections == 2


@given(st.data())
@settings(max_examples=40)
def test_behind_a_loss_the_next_frame_is_found(data: st.DataObject) -> None:
    """By its checksum, whatever the bytes before it are: pieces of one are no frames."""
    request, reply = request_and_reply(False)
    frames = [
        fpdu(Segment(RdmapOp.WRITE, True, data.draw(st.binary(max_size=300)), 7, 9).encode(), 0) for _ in range(6)
    ]
    stream, ends = request + b"".join(frames), [len(request)]
    for frame in frames:
        ends.append(ends[-1] + len(frame))
    lost = data.draw(st.integers(ends[0], ends[3] - 1)), data.draw(st.integers(ends[1], ends[4] - 1))
    begin, end = min(lost), max(lost) + 1
    other = StartFrame.decode(reply)
    assert other is not None
    cutter, pieces = Cutter(begins_late=False), []
    for first, last in ((0, begin), (end, len(stream))):
        at = first
        while at < last:
            size = min(data.draw(st.integers(1, 700)), last - at)
            pieces += cutter.feed(Seen(SeenKind.BYTES, 1, 0, offset=at, data=stream[at : at + size]), other[0])
            at += size
    whole = [piece.offset for piece in pieces if piece.whole]
    expected = [0, *(at for at, until in itertools.pairwise(ends) if until <= begin or at >= end)]
    assert whole == expected
    assert sum(piece.missing for piece in pieces) == end - begin
    assert sum(len(piece.data) for piece in pieces) == len(stream) - (end - begin)


def test_what_never_becomes_a_frame_is_not_kept() -> None:
    request, reply = request_and_reply(False)
    other = StartFrame.decode(reply)
    assert other is not None
    cutter = Cutter(begins_late=False)
    cutter.feed(Seen(SeenKind.BYTES, 1, 0, data=request), other[0])
    dice, at = Random(1), 100_000
    for _ in range(40):
        data = dice.randbytes(10_000)
        cutter.feed(Seen(SeenKind.BYTES, 1, 0, offset=at, data=data), other[0])
        at += len(data)
        assert len(cutter._pending) <= 2 * FPDU_MAX
