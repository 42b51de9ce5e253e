"""The codec: every message there and back, and nothing but `PeerViolation` for what is none."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sdp_vectors import Vector, between, vectors
from strategies import HEADERS, U8, U16, U32, messages

from sidestep.errors import Misuse, PeerViolation
from sidestep.sdp import wire
from sidestep.sdp.wire import MESSAGES, RULES, Data, Header, Mid, Mode, decode, encode

V = vectors()


def rule_of(message: bytes) -> str:
    """The rule that the message breaks."""
    with pytest.raises(PeerViolation) as caught:
        decode(memoryview(message))
    assert RULES[caught.value.rule] in caught.value.message
    return caught.value.rule


def outcome(message: bytes) -> wire.Decoded | str:
    """What it says, or the rule that it breaks."""
    try:
        return decode(memoryview(message))
    except PeerViolation as refused:
        return refused.rule


def message(mid: int, rest: bytes = b"", *, flags: int = 0) -> bytes:
    """A message with a true length."""
    return struct.pack(">BBHIII", mid, flags, 8, 16 + len(rest), 1, 0) + rest


def reencoded(decoded: wire.Decoded) -> bytes:
    """Made anew from its parts."""
    bsdh, header, payload = decoded
    numbers = {"bufs": bsdh.bufs, "mseq": bsdh.mseq, "mseq_ack": bsdh.mseq_ack}
    return encode(header, flags=bsdh.flags, payload_len=len(payload), **numbers) + payload


def test_every_message_has_a_strategy_and_a_table_entry() -> None:
    assert set(HEADERS) == {*MESSAGES.values(), wire.IwarpHello, wire.IwarpHelloAck}
    assert set(MESSAGES) == set(Mid)
    for mid, record in MESSAGES.items():
        assert mid == record.MID


@given(messages())
def test_there_and_back(made: tuple[Header, bytes, bytes]) -> None:
    header, payload, whole = made
    decoded = decode(memoryview(whole))
    assert (decoded.header, bytes(decoded.payload)) == (header, payload)
    assert type(decoded.header) is type(header)
    assert reencoded(decoded) == whole


@pytest.mark.parametrize("header", [*HEADERS], ids=lambda record: record.__name__)
def test_the_size_is_the_one_that_is_declared(header: type[Header]) -> None:
    sizes = {"Hello": 92, "HelloAck": 196, "IwarpHello": 32, "IwarpHelloAck": 28}
    for vector in between("V01", "V52"):
        decoded = decode(vector.view)
        if type(decoded.header) is header:
            assert len(header.encode(decoded.header)) == header.LENGTH
            assert sizes.get(header.__name__, 16 + header.LENGTH) == 16 + header.LENGTH
            return
    raise AssertionError(f"the vectors lack {header.__name__}")


# Bytes that are not looked at, by offset in the message (docs/wire/sdp.md §5, §6); and the low bits of ModeChange.
UNUSED = {
    wire.Hello: [18, 30, 31, 64, 65, *range(68, 92)],
    wire.HelloAck: [17, 18, *range(24, 196)],
    wire.IwarpHello: [17],
    wire.IwarpHelloAck: [17],
    wire.ModeChange: [17, 18, 19],
}


def significant(whole: bytes, header: Header) -> bytes:
    """The message with 0 where nothing is looked at."""
    kept = bytearray(whole)
    for offset in UNUSED.get(type(header), ()):
        kept[offset] = 0
    if isinstance(header, wire.ModeChange):
        kept[16] &= 0xF0
    if isinstance(header, wire.Hello) and isinstance(header.src_ip, IPv4Address):
        kept[32:44] = kept[48:60] = bytes(12)
    return bytes(kept)


def garbage() -> st.SearchStrategy[bytes]:
    """Bytes of which some have a true length and a known identifier, so that they get past the first checks."""
    mids = st.one_of(U8, st.sampled_from(list(Mid)).map(int))
    shaped = st.builds(message, mids, st.binary(max_size=64), flags=U8)
    sized = st.sampled_from([(0, 76), (0, 16), (1, 180), (1, 12)]).flatmap(
        lambda form: st.builds(message, st.just(form[0]), st.binary(min_size=form[1], max_size=form[1]))
    )
    return st.one_of(st.binary(max_size=48), shaped, sized)


@given(garbage())
def test_garbage_is_refused_or_means_what_it_says(whole: bytes) -> None:
    found = outcome(whole)
    if isinstance(found, str):
        assert found in RULES
    else:
        assert reencoded(found) == significant(whole, found.header)


@pytest.mark.parametrize("vector", between("V01", "V52"), ids=lambda vector: vector.name)
def test_cut_at_any_byte_it_is_refused(vector: Vector) -> None:
    whole = vector.message
    for size in range(len(whole)):
        assert rule_of(whole[:size]) == ("short_message" if size < 16 else "length")
        if size >= 16:  # with a length that is true again
            cut = whole[:4] + struct.pack(">I", size) + whole[8:size]
            _, header, _ = decode(memoryview(whole))
            if (header.MID, size) in ((0, 32), (1, 28)):
                assert isinstance(outcome(cut), wire.Decoded)  # it is iWARP's form now
            elif header.MID <= Mid.HELLO_ACK:
                assert rule_of(cut) == "hello_length"
            elif size < 16 + header.LENGTH:
                assert rule_of(cut) == "short_header"
            else:
                assert reencoded(decode(memoryview(cut))) == cut


@pytest.mark.parametrize("vector", between("V01", "V52"), ids=lambda vector: vector.name)
def test_a_flipped_bit_is_refused_or_told(vector: Vector) -> None:
    whole = vector.message
    before = decode(memoryview(whole))
    for index in range(min(len(whole), 96) * 8):
        flipped = bytearray(whole)
        flipped[index // 8] ^= 1 << index % 8
        after = outcome(bytes(flipped))
        if isinstance(after, str):
            continue
        assert reencoded(after) == significant(bytes(flipped), after.header)
        assert (after == before) == (significant(bytes(flipped), before.header) == whole)


# ---- one test for each rule ----

BROKEN = {
    "short_message": [b"", bytes(15), V["V05"].message[:15]],
    "length": [V["V05"].message + b"x", V["V03"].message[:-1], struct.pack(">BBHIII", 255, 0, 0, 0, 0, 0)],
    "unknown_mid": [message(0x0F), message(0x3F), message(0x40), message(0x7F), message(0x80), message(0xFC)],
    "short_header": [message(mid, bytes(3)) for mid in (5, 6, 7, 11, 12)]
    + [message(0x0D, bytes(7)), message(0xFD, bytes(19)), message(0xFE, bytes(15))],
    "stray_payload": [message(mid, b"x") for mid in (2, 3, 4, 8, 9, 10, 14)] + [message(5, b"\0\0\0\1x")],
    "hello_length": [message(0, bytes(size)) for size in (0, 12, 15, 17, 52, 75, 77, 180)]
    + [message(1, bytes(size)) for size in (0, 11, 13, 16, 76, 179, 181, 188)],
    "mode_change_code": [message(7, bytes([code, 0, 0, 0])) for code in (0x30, 0x70, 0x80, 0xA0, 0xB0, 0xF0)],
    "src_avail_length": [message(0xFE, struct.pack(">IIQ", length, 1, 0)) for length in (0, 0x8000_0001, 0xFFFF_FFFF)]
    + [message(0xFE, struct.pack(">IIQ", 3, 1, 0) + payload) for payload in (b"abc", b"abcd")],
    "sink_avail_length": [message(0xFD, struct.pack(">IIQI", length, 1, 0, 0)) for length in (0, 0x8000_0001)],
    "address": [
        message(0xFE, struct.pack(">IIQ", 300, 1, (1 << 64) - 299)),
        message(0xFD, struct.pack(">IIQI", 1 << 31, 1, (1 << 64) - (1 << 31) + 1, 0)),
    ],
    "rdma_length": [message(mid, struct.pack(">I", 0x8000_0001)) for mid in (5, 6)],
    "buffer_size": [message(12, struct.pack(">I", size)) for size in (0, 36, 0x8000_0001)],
    "suspend_service_id": [
        message(13, struct.pack(">Q", service)) for service in (0, 0x1_0000, 80, 0x1060050, 1 << 63)
    ],
}


@pytest.mark.parametrize(("rule", "whole"), [(rule, whole) for rule in BROKEN for whole in BROKEN[rule]])
def test_each_rule_has_its_name(rule: str, whole: bytes) -> None:
    assert rule_of(whole) == rule


def test_every_rule_is_tried() -> None:
    assert BROKEN.keys() == RULES.keys()


def test_what_lies_at_the_edge_is_taken() -> None:
    for whole in (
        message(0xFE, struct.pack(">IIQ", 1, 0, 0)),
        message(0xFE, struct.pack(">IIQ", 300, 0, (1 << 64) - 300)),
        message(0xFE, struct.pack(">IIQ", 1 << 31, 0, 0) + b"payload"),
        message(0xFE, struct.pack(">IIQ", 4, 0, 0) + b"abc"),
        message(0xFD, struct.pack(">IIQI", 1 << 31, 0, 0, 0)),
        message(5, struct.pack(">I", 0)),
        message(6, struct.pack(">I", 1 << 31)),
        message(12, struct.pack(">I", 37)),
        message(11, struct.pack(">I", 0)),
    ):
        decode(memoryview(whole))


def test_reserved_bits_are_not_looked_at() -> None:
    """docs/wire/sdp.md §3 and §19: reserved flags and header bits are ignored."""
    assert decode(memoryview(message(7, b"\x9f\xff\xff\xff"))).header == wire.ModeChange(True, Mode.COMBINED)
    assert decode(memoryview(message(2, flags=0xFF))).bsdh.flags == 0xFF
    hello = bytearray(V["V01"].message)
    for offset in UNUSED[wire.Hello]:
        hello[offset] = 0xFF
    assert decode(memoryview(hello)).header == decode(V["V01"].view).header


def test_payload_is_a_view_of_the_message() -> None:
    whole = bytearray(V["V06"].message)
    payload = decode(memoryview(whole)).payload
    whole[-1] ^= 0xFF
    assert payload[-1] == whole[-1]


# ---- what is never sent ----


@pytest.mark.parametrize(
    ("header", "payload_len"),
    [
        (wire.DisConn(), 1),
        (wire.RdmaWrCompl(0x8000_0001), 0),
        (wire.ModeChange(True, Mode.PIPELINED), 0),
        (wire.SrcAvail(16, 0, 0), 16),
        (wire.SinkAvail(0, 0, 0, 0), 0),
        (wire.ChRcvBufAck(36), 0),
        (wire.SuspComm(80), 0),
        (wire.SrcAvail(16, 1 << 32, 0), 0),
        (wire.SrcAvail(16, 0, -1), 0),
    ],
)
def test_what_can_never_be_said_is_misuse(header: Header, payload_len: int) -> None:
    with pytest.raises(Misuse):
        encode(header, bufs=0, mseq=0, mseq_ack=0, payload_len=payload_len)


@given(U16, U32, U32)
def test_numbers_that_do_not_fit_are_misuse(bufs: int, mseq: int, mseq_ack: int) -> None:
    encode(Data(), bufs=bufs, mseq=mseq, mseq_ack=mseq_ack)
    for wrong in ({"bufs": bufs + 65536}, {"mseq": mseq + (1 << 32)}, {"mseq_ack": -1 - mseq_ack}, {"flags": 256}):
        with pytest.raises(Misuse):
            encode(Data(), **{"bufs": bufs, "mseq": mseq, "mseq_ack": mseq_ack, **wrong})


# ---- solicited events ----

SOLICITED = {
    "AbortConn", "SuspComm", "SuspCommAck", "SendSm", "SrcAvailCancel", "SinkAvailCancel", "SinkCancelAck",
    "RdmaRdCompl", "RdmaWrCompl", "IwarpHelloAck",
}  # fmt: skip


@pytest.mark.parametrize("record", [*HEADERS], ids=lambda record: record.__name__)
def test_who_wakes_the_other_end(record: type[Header]) -> None:
    """docs/wire/sdp.md §17."""
    assert (record.__name__ in SOLICITED) == record.SOLICITED
    for flags in (wire.OOB_PRES, wire.OOB_PEND, wire.OOB_PRES | wire.OOB_PEND):
        assert wire.solicited(Data(), flags)
    assert not wire.solicited(Data(), 0)
    assert not wire.solicited(wire.DisConn(), wire.REQ_PIPE)
