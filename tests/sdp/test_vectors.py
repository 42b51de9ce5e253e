"""Every message of docs/wire/sdp-vectors.toml: decoded as the file says, encoded again to the same bytes."""

from __future__ import annotations

import pytest
from sdp_vectors import Vector, between, vectors

from sidestep.sdp.header import add, diff
from sidestep.sdp.wire import BSDH_LEN, Bsdh, Mid, decode, encode

SDP = between("V01", "V52")
CONVERSATION = between("V01", "V35")


def test_the_file_was_read() -> None:
    names = [f"V{number:02}" for number in (*range(1, 36), *range(41, 47), *range(51, 55), 61, 62)]
    assert list(vectors()) == names


@pytest.mark.parametrize("vector", SDP, ids=lambda vector: vector.name)
def test_it_is_what_the_file_says_and_comes_back(vector: Vector) -> None:
    bsdh, header, payload = decode(vector.view)
    title = type(header).__name__.removeprefix("Iwarp")
    assert title in vector.title
    if vector.name < "V51":  # the file has each field in decimal
        numbers = {"Bufs": bsdh.bufs, "Len": bsdh.length, "MSeq": bsdh.mseq, "MSeqAck": bsdh.mseq_ack}
        assert numbers == vector.base
    head = encode(
        header, flags=bsdh.flags, bufs=bsdh.bufs, mseq=bsdh.mseq, mseq_ack=bsdh.mseq_ack, payload_len=len(payload)
    )
    assert head + payload == vector.message
    assert len(head) == BSDH_LEN + header.LENGTH
    assert bsdh.encode() == vector.message[:BSDH_LEN]


def test_the_conversation_keeps_its_numbers() -> None:
    """MSeq counts up, MSeqAck names what was received, and credit is what the file says (SDP (A4) credits)."""
    sent = {"C": 0, "A": 0}  # MSeq last sent
    heard = {"C": 0, "A": 0}  # MSeq last received
    told = {"C": (0, 0), "A": (0, 0)}  # Bufs and MSeqAck of the last message received
    under_way: list[tuple[str, Bsdh]] = []  # what has not arrived yet, and where to
    for vector in CONVERSATION:
        bsdh, _, payload = decode(vector.view)
        here = vector.sender
        if bsdh.mid not in (Mid.HELLO, Mid.HELLO_ACK):
            bufs, acknowledged = told[here]
            credit = bufs - diff(sent[here], acknowledged)
            assert (bsdh.mseq, bsdh.mseq_ack) == (add(sent[here], 1), heard[here]), vector.name
            assert credit == vector.credit, vector.name
            assert credit >= (3 if payload else 2)
        sent[here] = bsdh.mseq
        under_way.append(("A" if here == "C" else "C", bsdh))
        if vector.name != "V17":  # it arrives after V18 was sent
            for there, arrived in under_way:
                heard[there] = arrived.mseq
                told[there] = (arrived.bufs, arrived.mseq_ack)
            under_way.clear()
    assert sent == {"C": 17, "A": 16}
