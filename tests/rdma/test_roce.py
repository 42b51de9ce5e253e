"""InfiniBand packets and management datagrams, against packets that other programs have agreed on."""

from __future__ import annotations

import re
from functools import cache
from ipaddress import IPv4Address, ip_address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sdp_vectors import vectors

from sidestep.errors import Misuse, PeerViolation
from sidestep.rdma.roce import mad, packet
from sidestep.rdma.roce.mad import Dreq, Mad, Rej, Rep, Req, address_of, gid
from sidestep.rdma.roce.packet import (
    Aeth,
    AtomicAckEth,
    AtomicEth,
    Bth,
    Deth,
    Ieth,
    ImmDt,
    Op,
    Packet,
    Reth,
    icrc,
    nak_text,
)

V = vectors()


@cache
def packets() -> dict[str, bytes]:
    """By name, from the IP header on."""
    text = (Path(__file__).parent / "data" / "roce-packets.txt").read_text()
    blocks = re.findall(r"(?m)^(V\d+) .*\n((?:[0-9a-f]+\n)+)", text)
    return {name: bytes.fromhex(hexadecimal) for name, hexadecimal in blocks}


def transport(whole: bytes) -> bytes:
    """From the base transport header to the end of the padding."""
    return whole[48 if whole[0] >> 4 == 6 else 28 : -packet.ICRC_LEN]


NAMES = [f"V{number}" for number in range(1, 25)]


def test_all_packets_are_here() -> None:
    assert list(packets()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_checksums(name: str) -> None:
    whole = packets()[name]
    assert icrc(whole[:-4]) == whole[-4:]


@pytest.mark.parametrize(
    "hexadecimal",
    [
        "45c2003c718c4000401191610a0011010a001201000012b7002800008100ffff40000118"
        "000000000000000000000000000000000000000082fd002a",
        "45010040047840004011b4d5c0a80007c0a80007c00012b7002caca22460ffff000000d3"
        "00cf17104630818be28935d90e9a95505401be885e50000078f353f3",
    ],
    ids=["an adapter's", "another program's"],
)
def test_checksums_of_others(hexadecimal: str) -> None:
    whole = bytes.fromhex(hexadecimal)
    assert icrc(whole[:-4]) == whole[-4:]


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name: str) -> None:
    whole = transport(packets()[name])
    found = Packet.decode(memoryview(whole))
    assert found.encode() == whole


EXPECTED = {
    "V4": Packet(
        Bth(Op.SEND_ONLY, 0x12, 0xFEDCBA, ack_req=True, solicited=True, pad=3),
        payload=bytes.fromhex("ff000008000000150000000100000000") + b"hello",
    ),
    "V5": Packet(Bth(Op.ACK, 0x11, 0xFEDCBA), (Aeth.of(0x1F, 1),)),
    "V9": Packet(
        Bth(Op.WRITE_ONLY, 0x12, 0xFEDCBD, ack_req=True, pad=2), (Reth(0x7F0012345678, 0x1A2B, 10),), b"0123456789"
    ),
    "V10": Packet(Bth(Op.READ_REQUEST, 0x12, 0xFEDCBE, ack_req=True), (Reth(0x7F0012345000, 0x1A2B, 16),)),
    "V13": Packet(
        Bth(Op.WRITE_ONLY_IMM, 0x12, 0xFEDCBF, ack_req=True),
        (Reth(0x7F0012345678, 0x1A2B, 4), ImmDt(b"\xde\xad\xbe\xef")),
        b"wxyz",
    ),
    "V14": Packet(Bth(Op.SEND_ONLY_INV, 0x12, 0xFEDCC0, ack_req=True), (Ieth(0x1A2B),), b"invalid8"),
    "V15": Packet(Bth(Op.FETCH_ADD, 0x12, 0xFEDCC1, ack_req=True), (AtomicEth(0x7F0012345000, 0x1A2B, 1, 0),)),
    "V16": Packet(Bth(Op.ATOMIC_ACK, 0x11, 0xFEDCC1), (Aeth.of(0x1F, 7), AtomicAckEth(41))),
    "V22": Packet(Bth(Op.CNP, 0x11, 0, migrated=False, becn=True), payload=bytes(16)),
    "V24": Packet(Bth(Op.SEND_ONLY, 0x12, 1, ack_req=True, pad=1), payload=b"hello world"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_they_say(name: str) -> None:
    found = Packet.decode(memoryview(transport(packets()[name])))
    assert (found.bth, found.extensions) == (EXPECTED[name].bth, EXPECTED[name].extensions)
    assert bytes(found.payload) == EXPECTED[name].payload


def test_complaints() -> None:
    told = {}
    for name in ("V5", "V8", "V12"):
        found = Packet.decode(memoryview(transport(packets()[name]))).find(Aeth)
        assert found is not None
        told[name] = nak_text(found.syndrome)
    assert told == {"V5": None, "V8": "RNR NAK, timer code 12", "V12": "NAK: PSN sequence error"}
    assert nak_text(0x7F) == "NAK: syndrome 0x7f"


@given(st.binary(max_size=64))
def test_garbage_is_refused_or_read(whole: bytes) -> None:
    try:
        found = Packet.decode(memoryview(whole))
    except PeerViolation as refused:
        found = None
        rule = refused.rule
    if found is None:
        assert rule in packet.RULES
    else:
        assert len(found.payload) + found.bth.pad <= len(whole) - Bth.LENGTH


@pytest.mark.parametrize("name", NAMES)
def test_cut_short(name: str) -> None:
    whole = transport(packets()[name])
    headers = len(whole) - len(Packet.decode(memoryview(whole)).payload) - Bth.decode(memoryview(whole)).pad
    for size in range(headers):
        with pytest.raises(PeerViolation, match="holds its base header"):
            Packet.decode(memoryview(whole)[:size])


def test_what_can_not_be_sent() -> None:
    send = Bth(Op.SEND_ONLY, 1, 0)
    for wrong in (
        Packet(send, payload=b"abc"),
        Packet(send, (Ieth(1),)),
        Packet(Bth(Op.READ_REQUEST, 1, 0)),
        Packet(Bth(Op.SEND_ONLY_INV, 1, 0), (Ieth(1 << 32),)),
        Packet(Bth(Op.SEND_ONLY, 1 << 33, 0)),
    ):
        with pytest.raises(Misuse):
            wrong.encode()


# ---- management datagrams ----


def test_the_request_of_the_page() -> None:
    """docs/wire/sdp.md V61, field by field and back."""
    found = Mad.decode(V["V61"].message)
    assert found == Mad(
        0x1122334455667788,
        Req(
            local_comm_id=0xC0C0C0C0, service_id=0x11389, ca_guid=0x0002C90300000001, qpn=0x111, starting_psn=0x100,
            local_gid=gid(IPv4Address("10.0.0.1")), remote_gid=gid(IPv4Address("10.0.0.2")), cm_retries=7,
            private_data=V["V01"].message,
        ),
    )  # fmt: skip
    assert found.encode() == V["V61"].message


def test_the_reject_of_the_page() -> None:
    found = Mad.decode(V["V62"].message)
    assert isinstance(found.message, Rej)
    assert (found.message.reason, found.message.rejected) == (28, 0)
    assert found.encode() == V["V62"].message


@pytest.mark.parametrize("name", ["V1", "V2", "V3", "V17", "V18", "V19", "V20", "V21"])
def test_datagrams_there_and_back(name: str) -> None:
    found = Packet.decode(memoryview(transport(packets()[name])))
    assert found.extensions == (Deth(packet.QKEY_GSI, packet.QP_GSI),)
    datagram = Mad.decode(found.payload)
    assert datagram.encode() == found.payload


def test_what_datagrams_say() -> None:
    told = {name: Mad.decode(transport(packets()[name])[20:]).message for name in ("V1", "V2", "V17", "V20")}
    req, rep, dreq, rej = told["V1"], told["V2"], told["V17"], told["V20"]
    assert isinstance(req, Req)
    assert (req.local_comm_id, req.service_id, req.qpn, req.starting_psn) == (0x11223344, 0x11389, 0x11, 0x0ABCDE)
    assert (req.mtu_code, req.rnr_retry, req.cm_retries, req.ack_timeout) == (1, 7, 15, 17)
    assert address_of(req.local_gid) == ip_address("192.0.2.1")
    assert isinstance(rep, Rep)
    assert (rep.local_comm_id, rep.remote_comm_id, rep.qpn) == (0x55667788, 0x11223344, 0x12)
    assert (rep.starting_psn, rep.ack_delay, rep.rnr_retry) == (0xFEDCBA, 15, 7)
    assert dreq == Dreq(0x11223344, 0x55667788, 0x12, bytes(220))
    assert isinstance(rej, Rej)
    assert (rej.reason, rej.private_data[:2]) == (28, b"no")


@given(st.binary(min_size=256, max_size=256), st.sampled_from([*mad.MESSAGES]))
def test_any_datagram_is_read(body: bytes, attribute: int) -> None:
    whole = bytes.fromhex("01070203") + body[4:16] + attribute.to_bytes(2) + bytes(6) + body[24:]
    again = Mad.decode(Mad.decode(whole).encode())
    assert again == Mad.decode(whole)


def test_datagrams_of_others_are_refused() -> None:
    good = V["V61"].message
    for rule, wrong in (
        ("mad_length", good[:-1]), ("mad_class", b"\1\3" + good[2:]), ("mad_attribute", good[:17] + b"\x17" + good[18:])
    ):  # fmt: skip
        with pytest.raises(PeerViolation) as caught:
            Mad.decode(wrong)
        assert caught.value.rule == rule
        assert caught.value.rule in mad.RULES


def test_private_data_that_does_not_fit() -> None:
    with pytest.raises(Misuse):
        Mad(1, Rep(1, 2, 3, 4, bytes(197))).encode()
    with pytest.raises(Misuse):
        Mad(1, Rep(1, 2, 1 << 24, 4)).encode()
