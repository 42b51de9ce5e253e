"""SDP over iWARP out of TCP: any cutting, order and repetition of segments tells the same."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from itertools import pairwise

import pytest
from captures import ACCEPTING, CONNECTING, CONVERSATION, V, decoded, messages, pcap, pcapng, side_of, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from tcp_talk import TcpTalk

from sidestep import limits
from sidestep.observe.capture import layers
from sidestep.observe.capture.events import Event, What
from sidestep.observe.capture.tcp import Direction
from sidestep.rdma.frames import Side
from sidestep.rdma.iwarp.ddp import QUEUE_READ, QUEUE_TERMINATE, RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.mpa import fpdu
from sidestep.rdma.iwarp.startup.frame import MpaRole, StartFrame

HELLO, HELLO_ACK = V["V51"].message, V["V52"].message
LONG = struct.pack(">BBHIII", 0xFF, 0, 8, 3016, 1, 0) + bytes(index & 0xFF for index in range(3000))
EXPECTED = [HELLO, HELLO_ACK, *(vector.message for vector in CONVERSATION)]


@dataclass
class Stream:
    """Both directions of a connection, as pieces in the order in which they are sent."""

    markers: tuple[bool, bool]  # in what each side sends
    pieces: list[tuple[Side, bytes]]
    position: list[int]
    msn: list[int]

    @classmethod
    def begun(
        cls,
        markers: tuple[bool, bool] = (False, False),
        *,
        enhanced: bool = False,
        rejected: bool = False,
        crc: bool = True,
    ) -> Stream:
        """With its Request and its Reply."""
        extra = bytes(4) if enhanced else b""
        revision = 2 if enhanced else 1
        # Each frame asks for markers in what its sender receives.
        request = StartFrame(MpaRole.REQUEST, extra + HELLO, markers[1], crc, False, enhanced, revision)
        reply = StartFrame(MpaRole.REPLY, extra + HELLO_ACK, markers[0], crc, rejected, enhanced, revision)
        return cls(markers, [(CONNECTING, request.encode()), (ACCEPTING, reply.encode())], [0, 0], [0, 0])

    def segment(self, side: Side, segment: Segment, *, crc: bool = True) -> None:
        """One frame."""
        frame = fpdu(segment.encode(), self.position[side.value], markers=self.markers[side.value], crc=crc)
        self.position[side.value] += len(frame)
        self.pieces.append((side, frame))

    def send(self, side: Side, message: bytes, *, op: RdmapOp = RdmapOp.SEND, stag: int = 0, most: int = 1440) -> None:
        """A Send in as many segments as it takes."""
        self.msn[side.value] += 1
        for start in range(0, max(1, len(message)), most):
            piece = message[start : start + most]
            last = start + most >= len(message)
            self.segment(side, Segment(op, last, piece, stag, msn=self.msn[side.value], mo=start), crc=False)

    def frames(self, *, opened: bool = True, ports: tuple[int, int] = (40000, 5001)) -> list[bytes]:
        """As segments of TCP, one a piece."""
        talk = TcpTalk(ports)
        if opened:
            talk.open()
        for side, piece in self.pieces:
            talk.send(side, piece)
        return talk.frames


def conversation(markers: tuple[bool, bool] = (False, False), *, enhanced: bool = False) -> Stream:
    """That of the page, and a message of several segments."""
    stream = Stream.begun(markers, enhanced=enhanced)
    for vector in CONVERSATION:
        stream.send(side_of(vector), vector.message)
    return stream


def both_ways(events: Sequence[Event]) -> dict[Side, list[bytes]]:
    """The messages of each direction."""
    return {side: messages(event for event in events if event.side is side) for side in Side}


@pytest.mark.parametrize("markers", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("enhanced", [False, True])
def test_the_conversation(markers: tuple[bool, bool], enhanced: bool) -> None:
    events = decoded(pcap(conversation(markers, enhanced=enhanced).frames()))
    assert messages(events) == EXPECTED
    assert [event.side for event in events if event.what is What.SDP][2:] == [side_of(one) for one in CONVERSATION]
    assert {event.connection for event in events} == {1}
    assert {str(event.wire) for event in events} == {"iWARP"}
    ends = {(event.source, event.destination) for event in events if event.side is CONNECTING}
    assert ends == {("10.0.0.1:40000", "10.0.0.2:5001")}
    said = ["no markers", "markers"]
    assert texts(events, What.CM) == [
        f"MPA {name}: revision {1 + enhanced}, {said[wanted]}, CRC"
        for name, wanted in (("Request", markers[1]), ("Reply", markers[0]))
    ]


@pytest.mark.parametrize("markers", [False, True])
def test_messages_of_several_segments(markers: bool) -> None:
    stream = Stream.begun((markers, markers))
    stream.send(CONNECTING, LONG, op=RdmapOp.SEND_SE)
    stream.send(ACCEPTING, LONG, op=RdmapOp.SEND_SE_INV, stag=0x77, most=500)
    stream.send(CONNECTING, CONVERSATION[0].message, op=RdmapOp.SEND_INV, stag=0x78)
    events = [event for event in decoded(pcap(stream.frames())) if event.what is What.SDP][2:]
    assert [event.message for event in events] == [LONG, LONG, CONVERSATION[0].message]
    assert [event.solicited for event in events] == [True, True, False]
    assert [event.note for event in events] == ["", "invalidates STag 0x00000077", "invalidates STag 0x00000078"]


def test_hello_in_the_stream_as_the_draft_has_it() -> None:
    stream = Stream((False, False), [(CONNECTING, HELLO)], [0, 0], [0, 0])
    stream.send(ACCEPTING, HELLO_ACK, op=RdmapOp.SEND_SE)
    for vector in CONVERSATION:
        stream.send(side_of(vector), vector.message)
    events = decoded(pcap(stream.frames()))
    assert messages(events) == EXPECTED
    assert texts(events, What.CM) == []


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans(), st.booleans())
def test_any_segments_tell_the_same(data: st.DataObject, ours: bool, theirs: bool) -> None:
    """Cut anywhere, each direction shuffled a little, with repetitions; directions stay in step at the start."""
    talk = TcpTalk()
    talk.open()
    stream = conversation((ours, theirs))
    for index, (side, piece) in enumerate(stream.pieces):
        if index < 2:
            talk.send(side, piece)
    flows = {side: b"".join(piece for who, piece in stream.pieces[2:] if who is side) for side in Side}
    made = []
    for side, flow in flows.items():
        cuts = sorted({0, len(flow), *data.draw(st.lists(st.integers(0, len(flow)), max_size=20))})
        base = talk.sent[side.value]
        for start, end in pairwise(cuts):
            back = data.draw(st.integers(0, min(start, 30)))  # overlaps what went before
            made.append(talk.segment(side, flow[start - back : end], at=base + start - back))
    made += data.draw(st.lists(st.sampled_from(made), max_size=6))
    shuffled = data.draw(st.permutations(made))
    events = decoded(pcap([*talk.frames, *shuffled]))
    expected = {side: [one.message for one in CONVERSATION if side_of(one) is side] for side in Side}
    assert both_ways(events) == {
        CONNECTING: [HELLO, *expected[CONNECTING]],
        ACCEPTING: [HELLO_ACK, *expected[ACCEPTING]],
    }
    assert texts(events, What.TRANSPORT) == []


def test_the_reply_may_be_captured_late() -> None:
    frames = conversation().frames()
    late = [*frames[:4], *frames[5:8], frames[4], *frames[8:]]
    found = both_ways(decoded(pcap(late)))
    assert found == both_ways(decoded(pcap(frames)))


def test_what_came_before_the_reply_is_read_with_it() -> None:
    frames = conversation().frames()
    up_to_reply = [*frames[:4], frames[5], frames[4]]
    assert messages(decoded(pcap(up_to_reply))) == [HELLO, HELLO_ACK, CONVERSATION[0].message]


def test_a_shorter_repetition_takes_nothing_away() -> None:
    """Behind a gap, the same bytes again, but fewer of them; and bytes that were read long ago."""
    talk = TcpTalk()
    talk.open()
    stream = conversation()
    for side, piece in stream.pieces[:2]:
        talk.send(side, piece)
    flow = b"".join(piece for who, piece in stream.pieces[2:] if who is CONNECTING)
    base = talk.sent[CONNECTING.value]
    parts = [(10, len(flow)), (10, 20), (10, 12), (0, 10), (0, 5), (3, 9)]
    talk.frames += [talk.segment(CONNECTING, flow[start:end], at=base + start) for start, end in parts]
    expected = [HELLO, *(one.message for one in CONVERSATION if side_of(one) is CONNECTING)]
    assert both_ways(decoded(pcap(talk.frames)))[CONNECTING] == expected


def test_bytes_that_are_missing_are_told() -> None:
    frames = conversation().frames()
    lost = next(index for index, frame in enumerate(frames[6:], 6) if frame[26:30] == b"\x0a\0\0\1")
    events = decoded(pcap(frames[:lost] + frames[lost + 1 :]))
    size = len(frames[lost]) - 54
    assert texts(events, What.TRANSPORT) == [
        f"{size} bytes of TCP are not in the capture: what lies behind them cannot be read"
    ]
    assert len(both_ways(events)[ACCEPTING]) == len(both_ways(decoded(pcap(frames)))[ACCEPTING])


def test_too_much_behind_a_gap_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CAPTURE_AHEAD_MAX", 200)
    frames = conversation().frames()
    events = decoded(pcap(frames[:6] + frames[7:]))
    assert texts(events, What.TRANSPORT) == [
        "bytes of TCP are not in the capture: what lies behind them cannot be read"
    ]


def test_what_waits_costs_more_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture of small segments behind a gap must not take a multiple of the bound, nor time for each of them."""
    monkeypatch.setattr(limits, "CAPTURE_AHEAD_MAX", 1 << 16)
    direction, end = Direction(), IPv4Address("10.0.0.1")
    least = limits.CAPTURE_AHEAD_MAX // 256
    for index in range(4 * least):
        sequence = 1000 + 2 * index
        direction.feed(layers.Segment(end, 1, end, 2, sequence, not index, False, memoryview(b"x")))
        if direction.lost:
            break
    assert least < index < 4 * least - 1


def test_reads_writes_and_complaints() -> None:
    stream = Stream.begun()
    read = ReadRequest(1, 2, 700, 0xAA, 0x1000)
    stream.segment(ACCEPTING, Segment(RdmapOp.READ_REQUEST, True, read.encode(), queue=QUEUE_READ, msn=1))
    stream.segment(CONNECTING, Segment(RdmapOp.READ_RESPONSE, False, bytes(500), 1, 2))
    stream.segment(CONNECTING, Segment(RdmapOp.READ_RESPONSE, True, bytes(200), 1, 502))
    stream.segment(CONNECTING, Segment(RdmapOp.WRITE, True, bytes(8), 0xBB, 0x2000))
    stream.segment(CONNECTING, Segment(RdmapOp.WRITE, True, b"", 0, 0))
    stream.segment(ACCEPTING, Segment(RdmapOp.TERMINATE, True, bytes.fromhex("11010000"), queue=QUEUE_TERMINATE, msn=1))
    events = decoded(pcap(stream.frames()))
    assert texts(events, What.RDMA) == [
        "RDMA Read Request: 700 bytes from STag 0x000000aa, TO 0x1000",
        "RDMA Read Response: 700 bytes, the last at STag 0x00000001, TO 0x1f6",
        "RDMA Write: 8 bytes, the last at STag 0x000000bb, TO 0x2000",
        "RDMA Write of 0 bytes",
    ]
    assert texts(events, What.TRANSPORT) == ["Terminate: DDP, tagged buffer error: base or bounds violation (1/1/01)"]


def test_refused() -> None:
    stream = Stream.begun(rejected=True)
    stream.pieces.append((ACCEPTING, b"what comes after it is the program's own"))
    events = decoded(pcap(stream.frames()))
    assert texts(events, What.CM)[1] == "MPA Reply: revision 1, no markers, CRC, rejected"
    assert texts(events, What.TRANSPORT) == []


def test_a_stream_that_is_no_longer_one_of_frames() -> None:
    stream = Stream.begun()
    stream.send(CONNECTING, CONVERSATION[0].message)
    stream.pieces.append((CONNECTING, b"\0\x20" + b"\xff" * 60))
    stream.send(ACCEPTING, CONVERSATION[1].message)
    events = decoded(pcap(stream.frames()))
    assert messages(events)[2:] == [CONVERSATION[0].message, CONVERSATION[1].message]
    (told,) = texts(events, What.TRANSPORT)
    assert told.startswith("no more can be read this way: DDP version 3, RDMAP version 3")


def test_other_tcp_is_left_out() -> None:
    talk = TcpTalk((50000, 80))
    talk.open()
    talk.send(CONNECTING, b"GET / HTTP/1.1\r\n\r\n")
    talk.send(ACCEPTING, b"HTTP/1.1 200 OK\r\n\r\n")
    others = StartFrame(MpaRole.REQUEST, b"not a Hello").encode()
    more = TcpTalk((50001, 81))
    more.open()
    more.send(CONNECTING, others)
    late = conversation().frames(opened=False)[1:]  # without the Request
    banner = TcpTalk((50002, 82))
    banner.send(ACCEPTING, b"220 ready")
    banner.send(CONNECTING, b"QUIT")
    assert decoded(pcap([*talk.frames, *more.frames, *late, *banner.frames])) == []


def test_a_capture_without_the_three_first_segments() -> None:
    assert messages(decoded(pcap(conversation().frames(opened=False)))) == EXPECTED


def test_the_same_ports_again() -> None:
    frames = conversation().frames()
    events = decoded(pcap([*frames, *frames]))
    assert messages(events) == EXPECTED * 2
    assert {event.connection for event in events} == {1, 2}


def test_over_other_links() -> None:
    frames = conversation((True, True)).frames()
    padded = [frame + bytes(max(0, 60 - len(frame))) for frame in frames]
    assert messages(decoded(pcap(padded))) == EXPECTED
    assert messages(decoded(pcapng([(101, frame[14:]) for frame in frames]))) == EXPECTED
