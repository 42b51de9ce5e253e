"""Messages in words: nothing is left out, and nothing makes it fail."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sdp_vectors import Vector, between, vectors
from strategies import messages

from sidestep.sdp import dissect, fields
from sidestep.sdp.wire import Header, decode

V = vectors()


@pytest.mark.parametrize("vector", between("V01", "V46"), ids=lambda vector: vector.name)
def test_every_value_of_the_file_is_told(vector: Vector) -> None:
    text = dissect.line(vector.message)
    assert text.startswith(vector.title.split()[0])
    for field in ("MSeq", "MSeqAck", "Bufs"):
        assert f"{field} {vector.base[field]}" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "V01",
            "Hello: MSeq 0, MSeqAck 0, Bufs 8; version 2.2, from 10.0.0.1:40000 to 10.0.0.2, "
            "LocalRcvSz 8208, DesRemRcvSz 16400, MaxAdverts 16",
        ),
        (
            "V06",
            "SrcAvail: MSeq 2, MSeqAck 2, Bufs 8; offers 65536 bytes, RKey 0x00a1b2c3, VA 0x7f1234560000; "
            "16 bytes 000102030405060708090a0b0c0d0e0f",
        ),
        ("V05", "Data: MSeq 2, MSeqAck 1, Bufs 16; no payload, credit only"),
        ("V08", "ModeChange: MSeq 3, MSeqAck 3, Bufs 8; the direction of this message becomes Pipelined"),
        ("V26", 'Data: MSeq 13, MSeqAck 11, Bufs 8, OOB_PRES; 2 bytes "B!"'),
    ],
)
def test_lines(name: str, line: str) -> None:
    assert dissect.line(V[name].message) == line


def test_every_field() -> None:
    assert dissect.lines(V["V06"].message) == [
        "SrcAvail, 48 bytes",
        "    0  MID            fe                SrcAvail",
        "    1  Flags          00                none",
        "    2  Bufs           0008              8",
        "    4  Len            00000030          48 bytes",
        "    8  MSeq           00000002          2",
        "   12  MSeqAck        00000002          2",
        "   16  Len            00010000          65536 bytes",
        "   20  RKey           00a1b2c3",
        "   24  VA             00007f1234560000",
        "   32  payload        000102030405060708090a0b0c0d0e0f  16 bytes",
    ]


def test_a_broken_message_says_what_is_wrong_and_what_is_there() -> None:
    cut = V["V15"].message[:30]
    assert dissect.line(cut) == (
        "SinkAvail: broken (length): Len 43 in a message of 30 bytes: Len is the number of bytes received; "
        "MSeq 7, MSeqAck 6, Bufs 16"
    )
    told = dissect.lines(cut)
    assert "   16  Len            00008000          32768 bytes" in told
    assert "   24  VA             00007fabcd01      2 bytes missing" in told
    assert "   32  NonDiscards                      4 bytes missing" in told
    assert dissect.line(b"\x44" + cut[1:]).startswith("MID 0x44: broken (")
    assert dissect.line(cut[:5]) == (
        "no message: broken (short_message): 5 bytes: a message holds at least the 16 bytes of its base header; "
        "fd00001000"
    )


@given(messages())
def test_fields_are_the_message(made: tuple[Header, bytes, bytes]) -> None:
    header, payload, whole = made
    found = list(fields.fields(whole, type(header)))
    assert b"".join(field.wire for field in found) == whole
    assert (found[-1].name == fields.PAYLOAD) == bool(payload)
    offset = 0
    for field in found:
        assert field.offset == offset
        offset += len(field.wire)


@given(st.binary(max_size=220), st.integers(0, 255), st.booleans())
def test_anything_can_be_told(rest: bytes, mid: int, true_length: bool) -> None:
    whole = bytes([mid]) + rest
    if true_length and len(whole) >= 8:
        whole = whole[:4] + len(whole).to_bytes(4) + whole[8:]
    reading = dissect.read(whole)
    assert all(line.isprintable() for line in [dissect.line(whole), *dissect.lines(whole)])
    told = json.loads(json.dumps(dissect.as_json(reading)))
    assert bytes.fromhex(told["bytes"]) == whole
    if reading.fault is None:
        assert "fault" not in told
        assert decode(memoryview(whole)).bsdh == reading.bsdh
    else:
        assert told["fault"]["rule"] == reading.fault.rule


def test_values_for_programs() -> None:
    told = dissect.as_json(dissect.read(V["V41"].message))
    assert told["header"]["src_ip"] == "fe80::1"
    assert told["header"]["version"] == "1.1"
    assert dissect.as_json(dissect.read(V["V29"].message))["header"] == {"to_send_half": False, "mode": "combined"}
    assert dissect.as_json(dissect.read(V["V25"].message))["flags"] == ["OOB_PEND"]
