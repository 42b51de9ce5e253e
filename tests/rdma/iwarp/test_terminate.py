"""Terminate as bytes, as words, and as the answer to each thing that may be wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from iwarp_vectors import frames
from mpa_oracle import Deframer

from sidestep.errors import Misuse, PeerViolation
from sidestep.rdma.iwarp import terminate
from sidestep.rdma.iwarp.ddp import RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.mpa import fpdu
from sidestep.rdma.iwarp.terminate import (
    CODE_TEXT,
    Code,
    Condition,
    Includes,
    Layer,
    Terminate,
    code_text,
    terminate_text,
)

F = frames()


def ulpdu(name: str) -> bytes:
    """The segment of a frame."""
    (payload,) = Deframer(markers=False).feed(F[name])
    return payload


SEND_100 = Segment(RdmapOp.SEND, True, bytes(100), msn=9).encode()
READ_T18 = ReadRequest(0x3C4D, 0x1000, 32, 0x1A2B, 0x7F0012340000)
T18_HEADER = ulpdu("T18")[:18]

# Name: the message, what it says, and how an end comes to send it.
VECTORS: dict[str, tuple[Terminate, str, Callable[[], Terminate]]] = {
    "T22": (
        Terminate(Code.MPA_CRC),
        "MPA, error of the start-up or the stream: CRC error (2/0/02)",
        lambda: Terminate.about(Condition.CRC, ulpdu("T11")),
    ),
    "T23": (
        Terminate(Code.MPA_START_RTR),
        "MPA, error of the start-up or the stream: no matching RTR (2/0/07)",
        lambda: Terminate.about(Condition.START_RTR),
    ),
    "T24": (
        Terminate(Code.RDMAP_CATASTROPHIC),
        "RDMAP, local catastrophic error: no more is told (0/0/00)",
        lambda: Terminate.about(Condition.USER),
    ),
    "T25": (
        Terminate(Code.DDP_BOUNDS, 22, ulpdu("T16")[:14]),
        "DDP, tagged buffer error: base or bounds violation (1/1/01), about a WRITE",
        lambda: Terminate.about(Condition.TAGGED_BOUNDS, ulpdu("T16")),
    ),
    "T26": (
        Terminate(Code.DDP_NO_BUFFER, 118, SEND_100[:18]),
        "DDP, untagged buffer error: no buffer for this MSN (1/2/02), about a SEND",
        lambda: Terminate.about(Condition.NO_RECEIVE, memoryview(SEND_100)),
    ),
    "T27a": (
        Terminate(Code.RDMAP_BOUNDS, 46, T18_HEADER, READ_T18),
        "RDMAP, remote protection error: base or bounds violation (0/1/01), about a READ_REQUEST",
        lambda: Terminate.about(Condition.READ_BOUNDS, ulpdu("T18")),
    ),
    "T27b": (
        Terminate(Code.RDMAP_RIGHTS, 46, T18_HEADER, ReadRequest(0x3C4D, 0x1014, 12, 0x1A2B, 0x7F0012340014)),
        "RDMAP, remote protection error: access rights violation (0/1/02), about a READ_REQUEST",
        lambda: Terminate.about(Condition.READ_RIGHTS, ulpdu("T18"), answered=20),
    ),
    "T27c": (
        Terminate(Code.RDMAP_PROTECTION_INVALIDATE, 23, ulpdu("T12")[:18]),
        "RDMAP, remote protection error: STag cannot be invalidated (0/1/09), about a SEND_INV",
        lambda: Terminate.about(Condition.INVALIDATE_OTHER_STREAM, ulpdu("T12")),
    ),
}


@pytest.mark.spec("RFC 5040 4.8")
@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name: str) -> None:
    message, said, made = VECTORS[name]
    segment = Segment.decode(ulpdu(name))
    assert message.segment == segment
    assert fpdu(message.segment.encode(), 0) == F[name]
    assert Terminate.decode(segment.payload) == Terminate.decode(memoryview(segment.payload)) == message
    assert made() == message
    assert message.text == terminate_text(segment.payload) == f"Terminate: {said}"


def test_every_terminate_of_the_page_is_here() -> None:
    found = {name for name in F if "T08" <= name < "T28" and ulpdu(name)[1] & 0xF == RdmapOp.TERMINATE}
    assert found == set(VECTORS)


# ---- codes ----

PAGE = """
0/0/00
0/1/00 0/1/01 0/1/02 0/1/03 0/1/04 0/1/09 0/1/FF
0/2/05 0/2/06 0/2/07 0/2/08 0/2/09 0/2/FF
1/0/00
1/1/00 1/1/01 1/1/02 1/1/03 1/1/04
1/2/01 1/2/02 1/2/03 1/2/04 1/2/05 1/2/06
2/0/01 2/0/02 2/0/03 2/0/04 2/0/05 2/0/06 2/0/07
"""


def test_all_registered_codes_are_known() -> None:
    """RFC 5040 4.8, 5041 7.2, 5044 8, 6581 8, as IANA has them (RFC 6580)."""
    assert [f"{code >> 12}/{code >> 8 & 0xF}/{code & 0xFF:02X}" for code in Code] == PAGE.split()
    assert set(CODE_TEXT) == set(Code)
    for code in Code:
        assert code_text(code).startswith(f"{Layer(code >> 12).name}, ")


@settings(deadline=None)
@given(st.integers(0, 0xFFFF))
def test_any_code_has_words(code: int) -> None:
    said = code_text(code)
    assert ("unknown code" in said) == (code not in set(Code))
    assert said.endswith(f"({code >> 12}/{code >> 8 & 0xF}/{code & 0xFF:02X})")


def test_unknown_codes() -> None:
    assert code_text(0x3104) == "layer 3, error type 1: unknown code (3/1/04)"
    assert code_text(0x00FF) == "RDMAP, local catastrophic error: unknown code (0/0/FF)"  # siw sends it


# ---- conditions ----


def test_every_condition_has_an_answer() -> None:
    assert len({condition.value for condition in Condition}) == len(Condition)


@pytest.mark.spec("RFC 5040 4.8, figure 10")
@pytest.mark.parametrize("condition", Condition)
def test_headers_go_with_the_codes_that_have_them(condition: Condition) -> None:
    """None with MPA's and with local errors; the read header only where a Read Request was refused."""
    code, includes = condition.code, condition.includes
    layer, kind = code >> 12, code >> 8 & 0xF
    if layer == Layer.MPA or (layer, kind) == (Layer.RDMAP, 0):
        assert includes is Includes.NOTHING
    elif layer == Layer.DDP:
        assert includes is Includes.DDP
    elif kind == 1:
        assert includes is (Includes.READ if condition.name.startswith("READ_") else Includes.DDP)
    else:
        assert includes is not Includes.READ


@pytest.mark.parametrize("condition", Condition)
@pytest.mark.parametrize("name", ["T11", "T16", "T18", "T19a"])
def test_what_is_included(condition: Condition, name: str) -> None:
    """The whole length, the header of the segment's kind, and what a Read Request asked for."""
    code, includes = condition.code, condition.includes
    segment = ulpdu(name)
    made = Terminate.about(condition, segment)
    assert made.code == code
    size = 14 if segment[0] & 0x80 else 18
    expected = (None, b"") if includes is Includes.NOTHING else (len(segment), segment[:size])
    assert (made.segment_len, made.ddp_header) == expected
    assert (made.read is not None) == (includes is Includes.READ and name == "T18")
    assert Terminate.decode(made.encode()) == made
    assert Terminate.about(condition) == Terminate(code)


@pytest.mark.parametrize("size", range(18))
def test_a_segment_without_its_whole_header(size: int) -> None:
    """Nothing of it is included."""
    for name in ("T11", "T16"):
        whole = name == "T16" and size >= 14
        made = Terminate.about(Condition.SEGMENT_SIZE, ulpdu(name)[:size])
        assert made == Terminate(Code.DDP_CATASTROPHIC, *((size, ulpdu(name)[:14]) if whole else ()))


def test_a_read_into_the_end_of_the_address_space() -> None:
    """Where the reader wants it is its own matter; the arithmetic must not break on it."""
    asked = ReadRequest(1, (1 << 64) - 4, 32, 2, 0)
    segment = Segment(RdmapOp.READ_REQUEST, True, asked.encode(), queue=1, msn=1).encode()
    made = Terminate.about(Condition.READ_STAG, segment, answered=20)
    assert made.read == ReadRequest(1, 16, 12, 2, 20)
    assert Terminate.decode(made.encode()) == made


# ---- what others send ----


def test_siw_sets_r_for_sends() -> None:
    """It says that there is a read header, and there is none."""
    sent = bytearray(Terminate.about(Condition.INVALIDATE_OTHER_STREAM, ulpdu("T12")).encode())
    sent[2] |= 0x20
    assert Terminate.decode(bytes(sent)) == VECTORS["T27c"][0]


def test_what_is_left_out_may_be_zeros() -> None:
    """As the verbs draft has it; with the flags set or not."""
    for flags in (b"\0\0", b"\xe0\0"):
        found = Terminate.decode(b"\x20\x02" + flags + bytes(48))
        assert found.code == Code.MPA_CRC
        assert "CRC error" in found.text
    assert Terminate.decode(b"\x20\x02\0\0" + bytes(48)) == Terminate(Code.MPA_CRC)


def test_reserved_bits_mean_nothing() -> None:
    """But for three, by which siw on a little-endian machine is known (test_siw_manners)."""
    assert Terminate.decode(b"\x20\x02\x18\xff") == Terminate(Code.MPA_CRC)


def test_no_read_header_behind_a_tagged_one() -> None:
    sent = bytearray(VECTORS["T25"][0].encode() + bytes(28))
    sent[2] |= 0x20
    assert Terminate.decode(bytes(sent)) == VECTORS["T25"][0]


def test_without_r_there_is_no_read_header() -> None:
    sent = bytearray(VECTORS["T27a"][0].encode())
    sent[2] &= 0xDF
    assert Terminate.decode(bytes(sent)) == Terminate(Code.RDMAP_BOUNDS, 46, T18_HEADER)


def test_without_m_the_length_means_nothing() -> None:
    sent = bytearray(VECTORS["T25"][0].encode())
    sent[2] &= 0x7F
    assert Terminate.decode(bytes(sent)) == Terminate(Code.DDP_BOUNDS, None, ulpdu("T16")[:14])


@pytest.mark.parametrize("name", VECTORS)
def test_messages_that_end_early(name: str) -> None:
    """As far as something is whole it is taken."""
    message = VECTORS[name][0]
    payload = message.encode()
    for size in range(len(payload)):
        if size < 4:
            with pytest.raises(PeerViolation) as caught:
                Terminate.decode(payload[:size])
            assert caught.value.rule in terminate.RULES
            assert terminate_text(payload[:size]) == "Terminate without a reason"
            continue
        found = Terminate.decode(payload[:size])
        whole_header = size >= 6 + len(message.ddp_header)
        expected = Terminate(message.code, message.segment_len, message.ddp_header)
        assert found == (expected if whole_header else Terminate(message.code))


def test_a_header_that_is_none() -> None:
    """Its bytes are kept, and the words say so."""
    header = b"\x42" + bytes(17)
    message = Terminate(Code.DDP_UNTAGGED_VERSION, 30, header)
    assert Terminate.decode(message.encode()) == message
    assert message.text.endswith("(1/2/06), about a segment that is none")


def test_what_does_not_hold_together() -> None:
    tagged, untagged = ulpdu("T16")[:14], ulpdu("T18")[:18]
    for wrong in (
        Terminate(Code.DDP_BOUNDS, 22), Terminate(Code.DDP_BOUNDS, 22, tagged + b"\0"),
        Terminate(Code.DDP_BOUNDS, 22, untagged[:14]), Terminate(Code.RDMAP_BOUNDS, 46, b"", READ_T18),
        Terminate(Code.RDMAP_BOUNDS, 46, tagged, READ_T18), Terminate(0x10000), Terminate(-1),
        Terminate(Code.DDP_BOUNDS, 0x10000, tagged),
    ):  # fmt: skip
        with pytest.raises(Misuse):
            wrong.encode()


def _mirrored(code: int) -> int:
    return code & 0xFF | (code & 0xF00) << 4 | code >> 12 << 8


U32, U64 = st.integers(0, 0xFFFF_FFFF), st.integers(0, 0xFFFF_FFFF_FFFF_FFFF)
READS = st.builds(ReadRequest, U32, U64, U32, U32, U64)
LENGTHS = st.none() | st.integers(0, 0xFFFF)
# A code that only siw's order of bits makes sense of is read in that order.
CODES = st.sampled_from(Code) | st.integers(0, 0xFFFF).filter(lambda code: _mirrored(code) not in CODE_TEXT)
TAGGED = st.binary(min_size=13, max_size=13).map(lambda rest: b"\xc1" + rest)
UNTAGGED = st.binary(min_size=17, max_size=17).map(lambda rest: b"\x41" + rest)
MESSAGES = (
    st.builds(Terminate, CODES)
    | st.builds(Terminate, CODES, LENGTHS, TAGGED)
    | st.builds(Terminate, CODES, LENGTHS, UNTAGGED, st.none() | READS)
)


@settings(deadline=None)
@given(MESSAGES, st.binary(max_size=40))
def test_round_trip(message: Terminate, behind: bytes) -> None:
    """Also with more behind it, unless that makes up a header that is not there."""
    payload = message.encode()
    assert Terminate.decode(payload) == message
    assert Segment.decode(message.segment.encode()).payload == payload
    assert len(payload) in (4, 20, 24, 52)
    if payload[2] & 0x40:
        assert Terminate.decode(payload + behind) == message


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_garbage_is_read_or_refused(payload: bytes) -> None:
    assert terminate_text(payload)
    try:
        found = Terminate.decode(payload)
    except PeerViolation:
        assert len(payload) < 4
        return
    if found.code in CODE_TEXT:  # one that is not could be taken for a mirrored one
        assert Terminate.decode(found.encode()) == found
    first = payload[0]
    assert found.code in (int.from_bytes(payload[:2]), (first << 4 & 0xF0 | first >> 4) << 8 | payload[1])
