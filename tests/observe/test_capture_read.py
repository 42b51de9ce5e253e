"""Captures read: every container, every link, what is lost, sent again or cut off, and files that are damaged."""

from __future__ import annotations

import io
import os
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import BinaryIO, cast

import pytest
from captures import (
    ACCEPTING,
    CONNECTING,
    CONVERSATION,
    END,
    SETUP,
    WHOLE,
    V,
    block,
    cooked,
    cooked_2,
    decoded,
    erf,
    frames_of,
    gzipped,
    infiniband,
    loopback,
    messages,
    partly,
    pcap,
    pcapng,
    raw_ip,
    roce_v1,
    sends,
    simple_pcapng,
    texts,
    with_vlan,
    written,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep import limits
from sidestep.errors import Misuse, Unavailable
from sidestep.observe.capture.decode import Decoder
from sidestep.observe.capture.events import What
from sidestep.observe.capture.files import is_capture, read_frames
from sidestep.rdma.roce.connection import RecordKind, RoceEnds, RoceRecord
from sidestep.sdp.hello import service_id

FRAMES = frames_of(written(WHOLE))
EXPECTED = messages(decoded(written(WHOLE)))
LONG = V["V46"].message[:4] + struct.pack(">I", 2017) + V["V46"].message[8:16] + bytes(2001)


# ---- containers ----


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("magic", [0xA1B2C3D4, 0xA1B23C4D, 0xA1B2CD34])
def test_classic(order: str, magic: int) -> None:
    events = decoded(pcap(FRAMES, order=order, magic=magic))
    assert messages(events) == EXPECTED
    step = 1 if magic == 0xA1B23C4D else 1000
    assert {event.time_ns for event in events} == {10**12 + (event.frame - 1) * step for event in events}


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("resolution", [6, 9, 0x80 | 20])
def test_next_generation(order: str, resolution: int) -> None:
    events = decoded(pcapng([(1, frame) for frame in FRAMES], order=order, resolution=resolution))
    assert messages(events) == EXPECTED
    off_by = [event.time_ns - 10**12 - (event.frame - 1) * 1000 for event in events]
    assert max(map(abs, off_by)) < (1 if resolution < 128 else 1000)


def test_simple_packets_have_no_time() -> None:
    events = decoded(simple_pcapng(FRAMES))
    assert messages(events) == EXPECTED
    assert {event.time_ns for event in events} == {0}


def test_compressed() -> None:
    assert messages(decoded(gzipped(pcap(FRAMES)))) == EXPECTED
    assert messages(decoded(gzipped(pcapng([(1, frame) for frame in FRAMES])))) == EXPECTED


def pcapng_of(order: str, interface: bytes, *packets: bytes) -> bytes:
    """One interface, of nanoseconds, with these options before; packets are bodies of Enhanced Packet Blocks."""
    out = block(order, 0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1))
    resolution = option(order, 9, b"\x09") + option(order, 0)
    out += block(order, 1, struct.pack(order + "HHI", 1, 0, 0) + interface + resolution)
    return out + b"".join(block(order, 6, packet) for packet in packets)


def option(order: str, code: int, value: bytes = b"") -> bytes:
    return struct.pack(order + "HH", code, len(value)) + value + bytes(-len(value) % 4)


def packet_of(order: str, ticks: int, frame: bytes, options: bytes = b"") -> bytes:
    head = struct.pack(order + "IIIII", 0, ticks >> 32, ticks & 0xFFFF_FFFF, len(frame), len(frame))
    return head + frame + bytes(-len(frame) % 4) + options


@pytest.mark.parametrize("order", ["<", ">"])
def test_times_of_today_are_exact(order: str) -> None:
    """A float has 53 bits, and these need 61."""
    times = [1_800_000_000_123_456_789 + index for index in range(5)]
    shifted = [packet_of(order, ticks - 1_000_000_000 * 10**9, b"frame") for ticks in times]
    offset = option(order, 14, struct.pack(order + "q", 1_000_000_000))
    for capture in (pcapng_of(order, offset, *shifted), pcapng_of(order, b"", *[
        packet_of(order, ticks, b"frame") for ticks in times
    ])):  # fmt: skip
        assert [frame.time_ns for frame in read_frames(io.BytesIO(capture), "x")] == times


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("interface", "packet"),
    [
        ([(5, bytes(15) + b"\1\x40")], []),  # an IPv6 address with the length of its prefix
        ([(2, b"eth0"), (2, b"eth0")], []),  # a name may stand there once only; files have it twice nevertheless
        ([(0x8001, b"a"), (0x8001, b"b")], [(0x8001, b"c"), (0x8001, b"d")]),  # of others, for their own use
        ([(1, b"caf\xe9")], [(1, b"caf\xe9")]),  # a comment that ought to be UTF-8
        ([], [(2, b"\1")]),  # flags that are too short
    ],
    ids=["IPv6", "twice", "unknown", "Latin-1", "flags"],
)
def test_options_that_nobody_asks_for(
    order: str, interface: list[tuple[int, bytes]], packet: list[tuple[int, bytes]]
) -> None:
    """They are no reason to show nothing."""
    here, there = (b"".join(option(order, *one) for one in options) for options in (interface, packet))
    packets = [packet_of(order, 10**12, frame, there + option(order, 0)) for frame in FRAMES]
    assert messages(decoded(pcapng_of(order, here, *packets))) == EXPECTED


def test_a_pipe_is_read() -> None:
    """Which cannot say where it is, nor go back."""
    whole = pcapng([(1, frame) for frame in FRAMES])
    for capture in (whole, gzipped(whole)):
        reading, writing = os.pipe()
        with open(writing, "wb") as stream:
            stream.write(capture)
        with open(reading, "rb") as stream:
            assert messages(Decoder(stream, "pipe").events()) == EXPECTED


class Endless:
    """A compressed capture of frames of noise that never ends."""

    def __init__(self, start: bytes, frame: Callable[[bytes], bytes]) -> None:
        self._generator = random.Random(1)
        self._frame = frame
        self._packing = zlib.compressobj(wbits=31)
        self._packed = self._packing.compress(start)
        self.given = 0

    def read(self, size: int) -> bytes:
        assert size >= 0
        while len(self._packed) < size:
            self._packed += self._packing.compress(self._frame(self._generator.randbytes(1000)))
        piece, self._packed = self._packed[:size], self._packed[size:]
        self.given += len(piece)
        return piece


@pytest.mark.parametrize(
    ("start", "frame"),
    [
        (pcap([]), lambda data: pcap([data])[24:]),
        (pcapng_of("<", b""), lambda data: block("<", 6, packet_of("<", 1, data))),
    ],
    ids=["pcap", "pcapng"],
)
def test_what_is_compressed_is_unpacked_as_it_is_read(start: bytes, frame: Callable[[bytes], bytes]) -> None:
    stream = Endless(start, frame)
    frames = read_frames(cast(BinaryIO, stream), "x")
    for number in range(1, 2001):
        assert next(frames).number == number
        assert stream.given < number * 1100 + (1 << 19)  # zlib keeps some, and so does the file


def test_what_is_unpacked_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pcap(FRAMES)
    monkeypatch.setattr(limits, "CAPTURE_UNPACKED_MAX", len(whole))
    assert messages(decoded(gzipped(whole))) == EXPECTED
    monkeypatch.setattr(limits, "CAPTURE_UNPACKED_MAX", len(whole) - 1)
    events, error = partly(gzipped(whole))
    assert messages(events) == EXPECTED[: len(messages(events))]
    assert {event.frame for event in events} == set(range(1, len(FRAMES)))
    assert isinstance(error, Unavailable)
    assert error.message == f"test.pcap has more than {len(whole) - 1} bytes in it"


def test_compressed_files_that_end_at_a_frame_are_told() -> None:
    """What is unpacked looks whole: the end of the packed file is missing, wrong, or followed by what is not packed."""
    packed = gzipped(pcap(FRAMES))
    wrong = packed[:-8] + bytes(8)
    for damaged in (packed[:-8], packed[:-1], wrong, packed + b"and so on"):
        events, error = partly(damaged)
        assert messages(events) == EXPECTED
        assert isinstance(error, Unavailable)
        assert error.message.startswith("test.pcap cannot be unpacked to its end: ")
    assert messages(decoded(packed + bytes(100))) == EXPECTED
    assert messages(decoded(gzipped(pcap(FRAMES[:9])) + gzipped(pcap(FRAMES)[24:][len(pcap(FRAMES[:9])) - 24 :]))) == (
        EXPECTED
    )


def test_interfaces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    half = len(FRAMES) // 2
    mixed = [(1, frame) for frame in FRAMES[:half]] + [(113, cooked(frame)) for frame in FRAMES[half:]]
    monkeypatch.setattr(limits, "CAPTURE_INTERFACES_MAX", 2)
    assert messages(decoded(pcapng(mixed) * 2))[: len(EXPECTED)] == EXPECTED  # of one section
    monkeypatch.setattr(limits, "CAPTURE_INTERFACES_MAX", 1)
    with pytest.raises(Unavailable, match="frame 1: a section with more than 1 interfaces"):
        decoded(pcapng(mixed))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("length", [0, 11, 13, 1 << 24, (1 << 32) - 4])
def test_no_more_is_read_than_a_frame_may_have(order: str, length: int) -> None:
    """Whatever a block says, that of a section or another."""

    class Asked(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size is not None
            assert 0 <= size <= limits.CAPTURE_FRAME_MAX
            return super().read(size)

    said = struct.pack(order + "I", length)
    section = b"\x0a\x0d\x0d\x0a" + said + struct.pack(order + "I", 0x1A2B3C4D)
    for capture in (section, pcapng_of(order, b"") + struct.pack(order + "I", 6) + said + bytes(100)):
        with pytest.raises(Unavailable, match=r"x, frame 1: (a block with|the file ends|the two lengths)"):
            list(read_frames(Asked(capture), "x"))


def test_what_is_no_capture_is_misuse() -> None:
    for wrong in (b"", b"abc", b"MZ\x90\0 and so on"):
        assert not is_capture(wrong)
        with pytest.raises(Misuse, match=r"test\.pcap is no capture"):
            decoded(wrong)
    with pytest.raises(Unavailable, match="cannot be unpacked"):
        decoded(b"\x1f\x8b and so on")


# ---- links ----

LINKS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "Ethernet": (1, lambda frame: frame),
    "Ethernet, padded": (1, lambda frame: frame + bytes(9)),
    "VLAN": (1, with_vlan),
    "raw IP": (101, raw_ip),
    "raw IP, BSD": (12, raw_ip),
    "IPv4": (228, raw_ip),
    "loopback": (0, loopback),
    "cooked": (113, cooked),
    "cooked 2": (276, cooked_2),
    "RoCEv1": (1, roce_v1),
    "InfiniBand": (247, infiniband),
    "InfiniBand, routed": (247, lambda frame: infiniband(frame, routed=True)),
    "ERF": (197, erf),
    "ERF with extensions": (197, lambda frame: erf(frame, extensions=2)),
    "ERF of Ethernet": (197, lambda frame: erf(frame, 2)),
}


@pytest.mark.parametrize("link", LINKS)
def test_links(link: str) -> None:
    number, wrap = LINKS[link]
    events = decoded(pcap([wrap(frame) for frame in FRAMES], number))
    assert messages(events) == EXPECTED
    assert texts(events, What.TRANSPORT) == []
    assert not any(event.note for event in events)
    wire = {"RoCEv1": "RoCEv1"}.get(link, "InfiniBand" if "InfiniBand" in link or link.startswith("ERF ") else "RoCEv2")
    if not link.startswith("ERF"):
        assert {str(event.wire) for event in events} == {wire}


def test_several_links_in_one_file() -> None:
    half = len(FRAMES) // 2
    mixed = [(1, frame) for frame in FRAMES[:half]] + [(113, cooked(frame)) for frame in FRAMES[half:]]
    assert messages(decoded(pcapng(mixed))) == EXPECTED


def test_other_traffic_is_left_out() -> None:
    udp = bytearray(FRAMES[3])
    udp[14 + 22 : 14 + 24] = (53).to_bytes(2)
    fragment = bytearray(FRAMES[3])
    fragment[14 + 6] = 0x20
    arp = FRAMES[3][:12] + b"\x08\x06" + bytes(40)
    others = [bytes(udp), bytes(fragment), arp, b"", b"x", bytes(60), b"\xff" * 60]
    assert decoded(pcap(others)) == []
    mixed = [frame for pair in zip(FRAMES, others * 10, strict=False) for frame in pair]
    assert messages(decoded(pcap(mixed))) == EXPECTED


# ---- connections ----


def test_connections_of_others_are_left_out() -> None:
    """A service ID of the RDMA connection manager's TCP ports: its queue pairs are not SDP's, whatever they carry."""
    request = bytearray(FRAMES[0])
    at = request.index(bytes.fromhex("0000000000011389"))
    request[at + 5] = 0x06
    request[at + 4] = 0x01
    assert decoded(pcap([bytes(request), *FRAMES[1:]])) == []


def test_two_connections_at_a_time() -> None:
    other = RoceEnds(service_id=service_id(80), qpn=(0x333, 0x444), comm_id=(1, 2), transaction_id=9)
    frames = [frame for pair in zip(FRAMES, frames_of(written(WHOLE, other)), strict=True) for frame in pair]
    events = decoded(pcap(frames))
    for number in (1, 2):
        assert messages(event for event in events if event.connection == number) == EXPECTED
    assert {event.destination for event in events if event.side is CONNECTING} == {"10.0.0.2:5001", "10.0.0.2:80"}


def test_a_queue_pair_that_is_used_again() -> None:
    again = RoceEnds(comm_id=(7, 8), transaction_id=9)
    events = decoded(pcap([*FRAMES, *frames_of(written(WHOLE, again))]))
    assert messages(events) == EXPECTED * 2
    assert {event.connection for event in events} == {1, 2}


def test_refused() -> None:
    events = decoded(written([SETUP[0], RoceRecord(0, ACCEPTING, RecordKind.REJ, reason=8)]))
    assert texts(events, What.CM)[1:] == ["CM REJ: reason 8, invalid service ID"]
    assert events[-1].side is ACCEPTING


def test_a_capture_that_began_too_late() -> None:
    """Without a REQ the REP tells; without both, the form of a message."""
    without_req = decoded(pcap(FRAMES[1:]))
    assert messages(without_req) == EXPECTED[1:]
    assert [event.note for event in without_req if event.side is CONNECTING and event.what is What.SDP] == [""] * sum(
        record.kind is RecordKind.SEND and record.side is CONNECTING for record in WHOLE
    )
    without_both = decoded(pcap(FRAMES[3:]))
    assert messages(without_both) == EXPECTED[2:]
    assert {event.note for event in without_both if event.what is What.SDP} == {
        "taken for SDP by its form: no CM REQ was seen"
    }
    assert without_both[0].connection is None


def test_what_does_not_look_like_sdp_is_not_taken_for_it() -> None:
    records = [RoceRecord(0, CONNECTING, RecordKind.SEND, bytes([index]) * 40) for index in range(12)]
    assert decoded(written([*records, *sends(CONVERSATION[:1])])) == []


# ---- what happens to packets ----


def test_sent_again_is_told_and_left_out() -> None:
    frames = [*FRAMES[:5], FRAMES[4], FRAMES[3], *FRAMES[5:]]
    events = decoded(pcap(frames))
    assert messages(events) == EXPECTED
    assert texts(events, What.TRANSPORT) == [
        "sent again: Send only, PSN 0x000100",
        "sent again: Send only, PSN 0x000200",
    ]


def test_datagrams_sent_again() -> None:
    frames = [FRAMES[0], FRAMES[0], FRAMES[1], FRAMES[1], *FRAMES[2:]]
    events = decoded(pcap(frames))
    assert messages(events) == EXPECTED
    assert [text[:13] for text in texts(events, What.TRANSPORT)] == ["again: CM REQ", "again: CM REP"]
    assert {event.connection for event in events} == {1}


def test_missing_packets_are_told() -> None:
    records = [*SETUP, RoceRecord(0, CONNECTING, RecordKind.SEND, LONG), *sends(CONVERSATION[:1])]
    frames = frames_of(written(records, RoceEnds(mtu_code=1)))
    first = 3
    assert len(frames) == first + 9
    whole = decoded(pcap(frames))
    assert messages(whole)[2:] == [LONG, CONVERSATION[0].message]
    for lost in range(first, first + 8):
        events = decoded(pcap(frames[:lost] + frames[lost + 1 :]))
        assert messages(events)[2:] == [CONVERSATION[0].message]
        told = texts(events, What.TRANSPORT)
        assert told[0].startswith("one packet before it is not in the capture")
        assert len(told) == (2 if lost < first + 7 else 1)
    lost_two = decoded(pcap(frames[:5] + frames[7:]))
    assert texts(lost_two, What.TRANSPORT)[0].startswith("2 packets before it are not")


def test_a_read_takes_as_many_numbers_as_its_answer() -> None:
    records = [
        *SETUP,
        RoceRecord(0, CONNECTING, RecordKind.READ_REQUEST, length=1000, rkey=1, va=2),
        RoceRecord(0, CONNECTING, RecordKind.READ_REQUEST, length=0),
        RoceRecord(0, CONNECTING, RecordKind.SEND, CONVERSATION[0].message),
        RoceRecord(0, ACCEPTING, RecordKind.READ_RESPONSE, bytes(1000)),
        RoceRecord(0, ACCEPTING, RecordKind.READ_RESPONSE, b""),
        RoceRecord(0, CONNECTING, RecordKind.WRITE, b""),
    ]
    for begin in (0, 3):  # with the path MTU of the REQ, and without
        events = decoded(pcap(frames_of(written(records, RoceEnds(mtu_code=1)))[begin:]))
        assert texts(events, What.TRANSPORT) == []
    assert texts(decoded(written(records, RoceEnds(mtu_code=1))), What.RDMA) == [
        "RDMA Read Request: 1000 bytes from VA 0x2, RKey 0x00000001",
        "RDMA Read Request: 0 bytes from VA 0x0, RKey 0x00000000",
        "RDMA Read Response: 1000 bytes in 4 packets",
        "RDMA Read Response: 0 bytes in 1 packet",
        "RDMA Write of 0 bytes: is the other end alive?",
    ]


LARGE = 60_000  # bytes of a packet, as in captures of iWARP's conversations: no code of a path MTU states it
READ = RoceRecord(0, CONNECTING, RecordKind.READ_REQUEST, length=4 * LARGE + 1, rkey=1, va=2)
ANSWER = RoceRecord(0, ACCEPTING, RecordKind.READ_RESPONSE, bytes(READ.length))
AFTER = sends([CONVERSATION[0], CONVERSATION[0]])


@pytest.mark.spec("InfiniBand 9.7.2")
@pytest.mark.parametrize("order", [[READ, ANSWER, *AFTER], [READ, *AFTER, ANSWER]], ids=["answered", "not yet"])
@pytest.mark.parametrize("packet_max", [256, 1024, 4096, LARGE])
@pytest.mark.parametrize("mtu_code", [1, 5])
def test_the_packets_tell_how_many_numbers_a_read_takes(
    order: list[RoceRecord], packet_max: int, mtu_code: int
) -> None:
    """Not the path MTU of the REQ: packets are larger or smaller, and before the answer nobody can know."""
    ends = RoceEnds(mtu_code=mtu_code, packet_max=packet_max)
    frames = frames_of(written([*SETUP, *order, READ, *AFTER], ends))
    for begin in (0, 3):  # with REQ and REP, and without
        events = decoded(pcap(frames[begin:]))
        assert texts(events, What.TRANSPORT) == []
        assert messages(events)[-4:] == [CONVERSATION[0].message] * 4


@pytest.mark.parametrize("answered", [False, True])
def test_what_is_sent_again_behind_a_read_is_told(answered: bool) -> None:
    ends = RoceEnds(mtu_code=5, packet_max=LARGE)
    frames = frames_of(written([*SETUP, READ, *([ANSWER] if answered else []), *AFTER], ends))
    read, first, last = frames[3], *frames[-2:]
    events = decoded(pcap([*frames[:4], read, *frames[4:], read, first, last]))
    assert messages(events)[2:] == [CONVERSATION[0].message] * 2
    assert texts(events, What.TRANSPORT) == [
        "sent again: Read request, PSN 0x000200",
        "sent again: Read request, PSN 0x000200",
        "sent again: Send only, PSN 0x000205",
        "sent again: Send only, PSN 0x000206",
    ]


def test_what_is_missing_behind_a_read_is_told() -> None:
    """As soon as packets show how large they are."""
    ends = RoceEnds(mtu_code=5, packet_max=LARGE)
    frames = frames_of(written([*SETUP, READ, ANSWER, *AFTER], ends))
    events = decoded(pcap([*frames[:-2], frames[-1]]))
    assert texts(events, What.TRANSPORT) == ["one packet before it is not in the capture: Send only, PSN 0x000206"]
    small = [replace(READ, length=1000), replace(ANSWER, data=bytes(1000))]
    frames = frames_of(written([*SETUP, *small, *AFTER], ends))
    events = decoded(pcap([*frames[:-2], frames[-1]]))  # an answer in one packet shows enough
    assert texts(events, What.TRANSPORT) == ["one packet before it is not in the capture: Send only, PSN 0x000202"]


def test_refusals_are_told() -> None:
    syndromes = {0x2C: "RNR NAK, timer code 12", 0x60: "NAK: PSN sequence error", 0x62: "NAK: remote access error"}
    records = [RoceRecord(0, ACCEPTING, RecordKind.REFUSAL, syndrome=syndrome) for syndrome in (*syndromes, 0x1F)]
    events = decoded(written([*SETUP, *sends(CONVERSATION[:1]), *records]))
    assert texts(events, What.TRANSPORT) == [f"{text}, PSN 0x000200" for text in syndromes.values()]


def test_a_wrong_checksum_is_noted() -> None:
    damaged = bytearray(FRAMES[3])
    damaged[-6] ^= 1
    events = decoded(pcap([*FRAMES[:3], bytes(damaged), *FRAMES[4:]]))
    assert [event.note for event in events if event.frame == 4] == ["its checksum is wrong"]
    assert not any(event.note for event in events if event.frame != 4)


# ---- cut frames ----


@pytest.mark.parametrize("cut", [54, 60, 70, 75, 90])
def test_frames_that_the_capture_has_cut(cut: int) -> None:
    """What is there is shown, and how much is not."""
    frames = frames_of(written(sends(CONVERSATION)))
    events = decoded(pcap(FRAMES[:3], 1) + pcap(frames, cut=cut)[24:])
    found = [event for event in events if event.what is What.SDP][2:]
    assert [event.message for event in found] == [one.message[: max(0, cut - 54)] for one in CONVERSATION]
    for event, vector in zip(found, CONVERSATION, strict=True):
        assert event.missing == len(vector.message) - len(event.message)
        assert "broken" not in event.line()
        if event.missing:
            assert f"{event.missing} byte" in event.line()
            assert event.as_json()["missing"] == event.missing


def test_a_cut_packet_within_a_message() -> None:
    frames = frames_of(written([*SETUP, RoceRecord(0, CONNECTING, RecordKind.SEND, LONG)], RoceEnds(mtu_code=1)))
    cut = pcap(frames[:3]) + pcap([*frames[3:5]])[24:] + pcap([frames[5]], cut=100)[24:] + pcap(frames[6:])[24:]
    (event,) = [event for event in decoded(cut) if event.what is What.SDP][2:]
    assert event.message == LONG[: 2 * 256 + 46]
    assert event.missing == len(LONG) - len(event.message)
    assert texts([event], What.SDP)[0].endswith(f"{event.missing} bytes more were not captured")


# ---- damaged files ----


@pytest.mark.parametrize(
    "make", [pcap, lambda frames: pcapng([(1, frame) for frame in frames])], ids=["pcap", "pcapng"]
)
def test_a_file_that_ends_too_early(make: Callable[[list[bytes]], bytes]) -> None:
    """All of it that is there is shown; then the error names file and frame. At a boundary nothing is amiss."""
    frames = FRAMES[:8]
    whole = make(frames)
    boundaries = {len(make(frames[:count])) for count in range(9)}
    boundaries.add(whole.index(frames[0]) - (16 if make is pcap else 28))  # in front of the first frame
    counts = []
    for size in [*range(4, 400), *range(400, len(whole), 7), len(whole)]:
        events, error = partly(whole[:size])
        counts.append(len({event.frame for event in events}))
        if size in boundaries:
            assert error is None, size
        elif size > min(boundaries):
            assert isinstance(error, Unavailable), size
            assert error.message.startswith("test.pcap, frame "), error.message
            assert error.remedy
    assert all(later >= earlier for earlier, later in pairwise(counts))
    assert counts[-1] == 8


@pytest.mark.parametrize("compressed", [False, True])
def test_a_compressed_file_that_ends_too_early(compressed: bool) -> None:
    whole = gzipped(pcap(FRAMES)) if compressed else pcap(FRAMES)
    events, error = partly(whole[: len(whole) * 2 // 3])
    assert isinstance(error, Unavailable)
    assert 2 < len(events) < len(FRAMES)


def test_a_frame_of_a_length_that_cannot_be() -> None:
    whole = bytearray(pcap(FRAMES))
    whole[24 + 8 : 24 + 12] = b"\xff\xff\xff\x7f"
    events, error = partly(bytes(whole))
    assert events == []
    assert error is not None
    assert error.message == "test.pcap, frame 1: a frame of 2147483647 bytes cannot be"


@pytest.mark.parametrize(
    ("offset", "value", "told"),
    [
        (4, b"\x05\0\0\0", "a block with -7 bytes in it cannot be"),
        (4, b"\x04\0\0\0", "a block with -8 bytes in it cannot be"),
        (4, b"\0\0\0\x40", "a block with 1073741812 bytes in it cannot be"),
        (4, b"\x20\0\0\0", "the two lengths of a block differ"),
        (8, b"\x09\0\0\0", "interface 9 of 1"),
        (20, b"\0\x10\0\0", "4096 bytes of a frame in a block with 324"),
    ],
)
def test_blocks_that_cannot_be(offset: int, value: bytes, told: str) -> None:
    """In the second frame; the first is shown."""
    whole = bytearray(pcapng([(1, frame) for frame in FRAMES]))
    at = whole.index(FRAMES[1]) - 28 + offset
    whole[at : at + 4] = value
    events, error = partly(bytes(whole))
    assert {event.frame for event in events} == {1}
    assert error is not None
    assert error.message == f"test.pcap, frame 2: {told}"


def test_a_section_of_another_byte_order_behind_the_first() -> None:
    one = pcapng([(1, frame) for frame in FRAMES[:4]])
    other = pcapng([(113, cooked(frame)) for frame in FRAMES[4:]], order=">", resolution=6)
    assert messages(decoded(one + other)) == EXPECTED


@pytest.mark.parametrize(
    "make", [pcap, lambda frames: pcapng([(1, frame) for frame in frames])], ids=["pcap", "pcapng"]
)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=40, deadline=None)
def test_damage_is_never_more_than_an_error_of_ours(make: Callable[[list[bytes]], bytes], seed: int) -> None:
    generator = random.Random(seed)
    whole = bytearray(make(FRAMES[:12]))
    for _ in range(generator.randrange(1, 12)):
        whole[generator.randrange(4, len(whole))] = generator.randrange(256)
    events, error = partly(bytes(whole))
    for event in events:
        assert event.line().isprintable()
    assert error is None or isinstance(error, Misuse | Unavailable)


@pytest.mark.slow
@given(seed=st.integers(0, 1 << 32), link=st.sampled_from(sorted(LINKS)))
@settings(max_examples=60, deadline=None)
def test_damaged_frames_are_read_or_left_out(seed: int, link: str) -> None:
    generator = random.Random(seed)
    number, wrap = LINKS[link]
    frames = [bytearray(wrap(frame)) for frame in FRAMES]
    for _ in range(generator.randrange(1, 30)):
        frame = generator.choice(frames)
        if frame and generator.random() < 0.7:
            frame[generator.randrange(len(frame))] ^= 1 << generator.randrange(8)
        else:
            del frame[generator.randrange(len(frame) + 1) :]
    for event in decoded(pcap([bytes(frame) for frame in frames], number)):
        assert event.line().isprintable()
        event.as_json()


def test_the_end_is_the_end() -> None:
    assert texts(decoded(written([*SETUP, *END])), What.CM)[-2:] == ["CM DREQ: QP 0x222", "CM DREP"]
