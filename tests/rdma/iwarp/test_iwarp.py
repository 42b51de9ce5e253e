"""MPA, DDP and RDMAP as bytes, against frames that other programs have agreed on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from iwarp_vectors import frames
from mpa_oracle import Deframer

from sidestep.errors import Misuse, PeerViolation
from sidestep.rdma.iwarp import ddp
from sidestep.rdma.iwarp.ddp import RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.mpa import crc32c, fpdu
from sidestep.rdma.iwarp.startup import frame as start_frame
from sidestep.rdma.iwarp.startup.frame import MpaRole, StartFrame

F = frames()
PLAIN = [name for name in F if "T08" <= name < "T28"]  # without markers


# ---- checksum ----


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0), (b"\0", 0x527D5351), (b"a", 0xC1D04330), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E), (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)  # fmt: skip
def test_checksum(data: bytes, expected: int) -> None:
    """RFC 3720 B.4 and others."""
    assert crc32c(data) == expected


@given(st.binary(max_size=80), st.integers(0, 80))
def test_checksum_in_pieces(data: bytes, cut: int) -> None:
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)
    assert crc32c(data + crc32c(data).to_bytes(4, "little")) == 0x48674BC7


# ---- start-up ----

STARTS = {
    "T01": StartFrame(MpaRole.REQUEST),
    "T02": StartFrame(MpaRole.REPLY),
    "T03": StartFrame(MpaRole.REQUEST, b"hello-pd", markers=True),
    "T04": StartFrame(MpaRole.REPLY, b"busy", rejected=True),
    "T05": StartFrame(MpaRole.REQUEST, bytes.fromhex("8010c008") + b"app1", enhanced=True, revision=2),
    "T06": StartFrame(MpaRole.REPLY, bytes.fromhex("80088010"), enhanced=True, revision=2),
    "T07": StartFrame(MpaRole.REQUEST, bytes.fromhex("00010001"), crc=False, enhanced=True, revision=2),
}


@pytest.mark.parametrize("name", STARTS)
def test_start_frames(name: str) -> None:
    assert StartFrame.decode(F[name] + b"more") == (STARTS[name], len(F[name]))
    assert STARTS[name].encode() == F[name]
    for size in range(len(F[name])):
        assert StartFrame.decode(F[name][:size]) is None


def test_private_data_of_the_user() -> None:
    assert STARTS["T03"].upper_data == b"hello-pd"
    assert STARTS["T05"].upper_data == b"app1"
    assert STARTS["T07"].upper_data == b""


def test_what_does_not_begin_with_a_key() -> None:
    for rule, wrong in (
        ("mpa_key", b"GET / HTTP/1.1"),
        ("mpa_key", b"MPA ID Reg"),
        ("mpa_private_data", F["T01"][:18] + b"\2\1"),
    ):
        with pytest.raises(PeerViolation) as caught:
            StartFrame.decode(wrong)
        assert caught.value.rule == rule
        assert rule in start_frame.RULES
    with pytest.raises(Misuse):
        StartFrame(MpaRole.REPLY, bytes(513)).encode()


# ---- frames ----


@pytest.mark.parametrize("name", PLAIN)
def test_frames_without_markers(name: str) -> None:
    (payload,) = Deframer(markers=False).feed(F[name])
    assert fpdu(payload, 0, crc=name != "T21") == F[name]
    assert Segment.decode(payload).encode() == payload


def test_frames_with_markers() -> None:
    """A direction made of whole frames, one behind the other, as the vectors place them."""
    cases = {"T28": 0, "T29": 0x1EC, "T30": 0, "T31n": 520, "T32b": 480, "T32c": 512, "T33": 0}
    for name, position in cases.items():
        payload = payload_at(F[name], position)
        assert fpdu(payload, position, markers=True) == F[name], name
        found = Deframer(markers=True)
        list(found.feed(filler(position)))
        assert list(found.feed(F[name])) == [payload]
    (long,) = Deframer(markers=True).feed(F["T30"])
    assert Segment.decode(long).payload == bytes(index & 0xFF for index in range(522))


def payload_at(frame: bytes, position: int) -> bytes:
    """By position arithmetic alone, without the code under test."""
    kept = bytes(byte for offset, byte in enumerate(frame) if (position + offset) % 512 >= 4)
    return kept[2 : 2 + int.from_bytes(kept[:2])]


def filler(position: int) -> bytes:
    """Frames of zeros up to a position, as the vectors describe those in front."""
    if not position:
        return b""
    sizes = {0x1EC: 464, 520: 487, 480: 452, 512: 452}
    payload = bytes(index & 0xFF for index in range(487)) if position == 520 else bytes(sizes[position])
    first = fpdu(Segment(RdmapOp.SEND, True, payload, msn=1).encode(), 0, markers=True)
    return first + (F["T32b"] if position == 512 else b"")


def test_the_frames_in_front_have_the_checksums_told() -> None:
    told = {0x1EC: "a01ee4fd", 520: "b8e7d1de", 480: "038ba04b"}
    for position, checksum in told.items():
        assert filler(position)[-4:].hex() == checksum
        assert len(filler(position)) == position


@given(st.lists(st.binary(max_size=1200), max_size=8), st.booleans(), st.data())
def test_any_pieces_give_the_same_frames(payloads: list[bytes], markers: bool, data: st.DataObject) -> None:
    stream = bytearray()
    for payload in payloads:
        stream += fpdu(payload, len(stream), markers=markers, crc=False)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    deframer = Deframer(markers=markers)
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += list(deframer.feed(memoryview(stream)[start:end]))
    assert found == payloads
    assert deframer.pending == 0


# ---- segments ----

SEGMENTS = {
    "T08": Segment(RdmapOp.WRITE, True, stag=1),
    "T11": Segment(RdmapOp.SEND, True, b"Hello, iWARP", msn=1),
    "T12": Segment(RdmapOp.SEND_INV, True, b"inval", 0x1A2B, msn=2),
    "T13": Segment(RdmapOp.SEND_SE, True, b"SE!", msn=3),
    "T15a": Segment(RdmapOp.SEND, False, bytes(range(16)), msn=5),
    "T15b": Segment(RdmapOp.SEND, True, bytes(range(16, 23)), msn=5, mo=16),
    "T16": Segment(RdmapOp.WRITE, True, bytes.fromhex("deadbeefcafef00d"), 0x1A2B, 0x7F0012345678),
    "T19b": Segment(RdmapOp.READ_RESPONSE, True, b"UVWXYZ012345", 0x3C4D, 0x1014),
    "T21": Segment(RdmapOp.SEND, True, b"no-crc", msn=1),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_what_segments_say(name: str) -> None:
    (payload,) = Deframer(markers=False).feed(F[name])
    assert Segment.decode(payload) == SEGMENTS[name]


def test_a_read_request() -> None:
    (payload,) = Deframer(markers=False).feed(F["T18"])
    segment = Segment.decode(payload)
    assert (segment.op, segment.queue, segment.msn) == (RdmapOp.READ_REQUEST, 1, 1)
    read = ReadRequest.decode(segment.payload)
    assert read == ReadRequest(0x3C4D, 0x1000, 32, 0x1A2B, 0x7F0012340000)
    assert read.encode() == segment.payload


@given(st.binary(max_size=40))
def test_garbage_is_refused_or_read(whole: bytes) -> None:
    try:
        segment = Segment.decode(whole)
    except PeerViolation:
        return
    again = segment.encode()
    assert (again[0] | 0x3C, again[1] | 0x30, again[2:]) == (whole[0] | 0x3C, whole[1] | 0x30, whole[2:])


def test_rules() -> None:
    good = SEGMENTS["T11"].encode()
    for rule, wrong in (
        ("ddp_short", good[:1]), ("ddp_short", good[:17]), ("ddp_version", b"\x42" + good[1:]),
        ("ddp_version", good[:1] + b"\x03" + good[2:]), ("rdmap_opcode", good[:1] + b"\x48" + good[2:]),
        ("rdmap_opcode", b"\xc1" + good[1:]),
    ):  # fmt: skip
        with pytest.raises(PeerViolation) as caught:
            Segment.decode(wrong)
        assert caught.value.rule == rule
        assert rule in ddp.RULES
    with pytest.raises(PeerViolation):
        ReadRequest.decode(bytes(27))
    with pytest.raises(Misuse):
        Segment(RdmapOp.SEND, True, msn=1 << 32).encode()
