"""A conversation written as packets: each one as it would have been on a wire, and read again as it was said."""

from __future__ import annotations

import io
from dataclasses import replace
from ipaddress import ip_address

import pytest
from captures import (
    ACCEPTING,
    CONNECTING,
    CONVERSATION,
    END,
    EXTRAS,
    SETUP,
    WHOLE,
    V,
    decoded,
    frames_of,
    messages,
    sends,
    texts,
    written,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pcap_file import PcapFile, RoceWriter

from sidestep.errors import Misuse
from sidestep.observe.capture.events import What
from sidestep.rdma.frames import Side
from sidestep.rdma.roce.connection import RecordKind, RoceEnds, RoceRecord
from sidestep.rdma.roce.mad import Mad
from sidestep.rdma.roce.packet import READ_RESPONSES, Aeth, Deth, Op, Packet, Reth, icrc
from sidestep.sdp.hello import service_id


def packets(records: list[RoceRecord], ends: RoceEnds | None = None) -> list[tuple[Side, Packet]]:
    """Who sends, and what; the headers around each are judged here."""
    ends = ends or RoceEnds()
    found = []
    for frame in frames_of(written(records, ends)):
        version = 4 if frame[12:14] == b"\x08\x00" else 6
        header = 20 if version == 4 else 40
        network = frame[14:]
        sides = {ends.connecting.packed: CONNECTING, ends.accepting.packed: ACCEPTING}
        addresses = (network[12:16], network[16:20]) if version == 4 else (network[8:24], network[24:40])
        assert sides[addresses[1]] is sides[addresses[0]].other
        assert network[header + 2 : header + 4] == (4791).to_bytes(2)
        assert int.from_bytes(network[header + 4 : header + 6]) == len(network) - header
        if version == 4:
            assert int.from_bytes(network[2:4]) == len(network)
            words = sum(int.from_bytes(network[index : index + 2]) for index in range(0, 20, 2))
            assert words % 0xFFFF == 0  # the header's checksum is right
        else:
            assert int.from_bytes(network[4:6]) == len(network) - header
        assert icrc(network[:-4]) == network[-4:]
        found.append((sides[addresses[0]], Packet.decode(memoryview(network)[header + 8 : -4])))
    return found


def numbers(found: list[tuple[Side, Packet]], side: Side) -> list[int]:
    """Sequence numbers of the requests of a side."""
    answers = {*READ_RESPONSES, Op.ACK, Op.UD_SEND_ONLY}
    return [packet.bth.psn for sender, packet in found if sender is side and packet.bth.opcode not in answers]


def test_the_conversation_as_packets() -> None:
    found = packets(WHOLE)
    assert len(found) == len(WHOLE)
    ends = RoceEnds()
    for (side, packet), record in zip(found, WHOLE, strict=True):
        assert side is record.side
        if record.kind is RecordKind.SEND:
            assert packet.bth.opcode is Op.SEND_ONLY
            assert packet.bth.dest_qp == ends.qpn[side.other.value]
            assert packet.bth.ack_req
            assert packet.bth.pad == -len(record.data) % 4
            assert packet.payload == record.data
        else:
            assert packet.find(Deth) == Deth(0x8001_0000, 1)
            assert Mad.decode(packet.payload).transaction_id == ends.transaction_id
    # Packets to a side begin with the number that it has named, and count on from there.
    for side in Side:
        start = ends.starting_psn[side.other.value]
        assert numbers(found, side) == list(range(start, start + len(numbers(found, side))))


def test_the_request_is_the_one_of_the_page() -> None:
    """docs/wire/sdp.md V61, but for what the page chose otherwise."""
    (_, packet), *_ = packets(WHOLE)
    ours, theirs = Mad.decode(packet.payload), Mad.decode(V["V61"].message)
    chosen = {"ca_guid": 0x0002C90300000001, "cm_retries": 7}
    assert replace(ours.message, **chosen) == theirs.message  # type: ignore[type-var]


@pytest.mark.parametrize("mtu_code", [1, 2, 3, 4, 5])
def test_a_long_message_takes_several_packets(mtu_code: int) -> None:
    mtu = 128 << mtu_code
    for size in (0, 1, mtu - 1, mtu, mtu + 1, 3 * mtu, 3 * mtu + 2):
        data = bytes(index & 0xFF for index in range(size))
        record = RoceRecord(0, CONNECTING, RecordKind.SEND, data, solicited=True)
        found = [packet for _, packet in packets([record], RoceEnds(mtu_code=mtu_code))]
        assert b"".join(bytes(packet.payload) for packet in found) == data
        assert all(len(packet.payload) == mtu for packet in found[:-1])
        ops = [packet.bth.opcode for packet in found]
        if len(found) == 1:
            assert ops == [Op.SEND_ONLY]
        else:
            assert ops == [Op.SEND_FIRST, *[Op.SEND_MIDDLE] * (len(ops) - 2), Op.SEND_LAST]
        assert [packet.bth.solicited for packet in found] == [False] * (len(found) - 1) + [True]
        assert [packet.bth.ack_req for packet in found] == [False] * (len(found) - 1) + [True]
        assert len(found) == max(1, -(-size // mtu))


def test_reads_and_writes() -> None:
    records = [
        RoceRecord(0, CONNECTING, RecordKind.WRITE, bytes(600), rkey=0xAB, va=0x1003),
        RoceRecord(0, CONNECTING, RecordKind.READ_REQUEST, rkey=0xCD, va=0x2000, length=513),
        RoceRecord(0, CONNECTING, RecordKind.READ_REQUEST, rkey=0xCE, va=0x3000, length=4),
        RoceRecord(0, ACCEPTING, RecordKind.READ_RESPONSE, bytes(513)),
        RoceRecord(0, ACCEPTING, RecordKind.READ_RESPONSE, b"four"),
        RoceRecord(0, CONNECTING, RecordKind.SEND, b"x"),
    ]
    found = [packet for _, packet in packets(records, RoceEnds(mtu_code=1))]
    start = RoceEnds().starting_psn[1]
    expected = [
        (Op.WRITE_FIRST, 0), (Op.WRITE_MIDDLE, 1), (Op.WRITE_LAST, 2), (Op.READ_REQUEST, 3), (Op.READ_REQUEST, 6),
        (Op.READ_RESPONSE_FIRST, 3), (Op.READ_RESPONSE_MIDDLE, 4), (Op.READ_RESPONSE_LAST, 5),
        (Op.READ_RESPONSE_ONLY, 6), (Op.SEND_ONLY, 7),
    ]  # fmt: skip
    assert [(packet.bth.opcode, packet.bth.psn - start) for packet in found] == expected
    assert found[0].find(Reth) == Reth(0x1003, 0xAB, 600)
    assert found[3].find(Reth) == Reth(0x2000, 0xCD, 513)
    acknowledged = [packet.find(Aeth) for packet in found[5:9]]
    assert [one.msn if one is not None else None for one in acknowledged] == [2, None, 2, 3]
    assert found[0].bth.pad == 0
    assert found[7].bth.pad == 3


def test_numbers_wrap() -> None:
    ends = RoceEnds(starting_psn=(0, 0xFF_FFFE))
    found = packets([RoceRecord(0, CONNECTING, RecordKind.SEND, b"x")] * 4, ends)
    assert numbers(found, CONNECTING) == [0xFF_FFFE, 0xFF_FFFF, 0, 1]


def test_what_cannot_be_is_misuse() -> None:
    writer = RoceWriter(PcapFile(io.BytesIO()))
    with pytest.raises(Misuse, match="without a request"):
        writer.write(RoceRecord(0, ACCEPTING, RecordKind.READ_RESPONSE, b"x"))
    writer.write(RoceRecord(0, CONNECTING, RecordKind.READ_REQUEST, length=2))
    with pytest.raises(Misuse, match="1 bytes for 2"):
        writer.write(RoceRecord(0, ACCEPTING, RecordKind.READ_RESPONSE, b"x"))
    with pytest.raises(Misuse, match="private data"):
        writer.write(RoceRecord(0, CONNECTING, RecordKind.REQ, bytes(93)))
    with pytest.raises(Misuse, match="IP versions"):
        RoceEnds(connecting=ip_address("::1"))


# ---- read again ----


@pytest.mark.parametrize("mtu_code", [1, 3])
def test_the_conversation_comes_back(mtu_code: int) -> None:
    events = decoded(written(WHOLE, RoceEnds(mtu_code=mtu_code)))
    expected = [V["V01"].message, V["V02"].message, *(one.message for one in [*CONVERSATION, *EXTRAS])]
    assert messages(events) == expected
    assert [event.side for event in events if event.what is What.SDP] == [
        CONNECTING, ACCEPTING, *(record.side for record in WHOLE if record.kind is RecordKind.SEND)
    ]  # fmt: skip
    assert {event.connection for event in events} == {1}
    assert [text.split(":")[0] for text in texts(events, What.CM)] == [
        "CM REQ",
        "CM REP",
        "CM RTU",
        "CM DREQ",
        "CM DREP",
    ]
    ends = {(event.source, event.destination) for event in events if event.side is CONNECTING}
    assert ends == {("10.0.0.1:40000", "10.0.0.2:5001")}
    assert texts(events, What.TRANSPORT) == []


def test_over_ipv6() -> None:
    ends = RoceEnds(ip_address("fe80::1"), ip_address("fe80::2"), service_id(80))
    records = [
        RoceRecord(0, CONNECTING, RecordKind.REQ, V["V41"].message),
        RoceRecord(0, ACCEPTING, RecordKind.REP, V["V42"].message),
        *sends(CONVERSATION),
    ]  # fmt: skip
    assert [side for side, _ in packets(records, ends)] == [record.side for record in records]
    events = decoded(written(records, ends))
    assert messages(events) == [record.data for record in records]
    assert events[0].source == "[fe80::1]:32769"
    assert events[0].destination == "[fe80::2]:80"


@given(
    st.lists(
        st.one_of(
            st.builds(
                RoceRecord, st.just(0.0), st.sampled_from(Side), st.just(RecordKind.SEND), st.binary(max_size=900),
                solicited=st.booleans(), invalidate=st.one_of(st.none(), st.integers(0, 0xFFFF_FFFF)),
            ),
            st.builds(
                RoceRecord, st.just(0.0), st.sampled_from(Side), st.just(RecordKind.WRITE), st.binary(max_size=900),
                va=st.integers(0, 1 << 63), rkey=st.integers(0, 0xFFFF_FFFF),
            ),
            st.builds(
                RoceRecord, st.just(0.0), st.sampled_from(Side), st.just(RecordKind.READ_REQUEST),
                length=st.integers(0, 900),
            ),
        ),
        max_size=12,
    )
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_anything_comes_back(chosen: list[RoceRecord]) -> None:
    """Reads are answered at once or at the end, whichever their length says; the stream of messages is the same."""
    records, late = [*SETUP], list[RoceRecord]()
    for record in chosen:
        records.append(record)
        if record.kind is RecordKind.READ_REQUEST:
            answer = RoceRecord(0, record.side.other, RecordKind.READ_RESPONSE, bytes(record.length))
            (late if record.length % 2 or late else records).append(answer)
    records += late
    events = decoded(written([*records, *END], RoceEnds(mtu_code=1, starting_psn=(0xFF_FFF0, 5))))
    assert messages(events)[2:] == [record.data for record in chosen if record.kind is RecordKind.SEND]
    found = [event for event in events if event.what is What.SDP][2:]
    assert [event.solicited for event in found] == [one.solicited for one in chosen if one.kind is RecordKind.SEND]
    assert [event.note for event in found] == [
        f"invalidates RKey {one.invalidate:#010x}" if one.invalidate is not None else ""
        for one in chosen if one.kind is RecordKind.SEND
    ]  # fmt: skip
    assert len(texts(events, What.RDMA)) == sum(record.kind is not RecordKind.SEND for record in [*chosen]) + sum(
        record.kind is RecordKind.READ_REQUEST for record in chosen
    )
    assert texts(events, What.TRANSPORT) == []
