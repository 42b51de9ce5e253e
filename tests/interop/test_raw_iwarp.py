"""The iWARP end made by hand, against itself: what it sends is right, and it notices what is not."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from raw_iwarp import PAYLOAD_MAX, Depths, RawPeer, Terminate, depths_of, reply, request

from sidestep.errors import PeerViolation
from sidestep.rdma.iwarp.ddp import QUEUE_TERMINATE, RdmapOp, ReadRequest, Segment

Peers = tuple[RawPeer, RawPeer]
_LONG = bytes(range(256)) * 20
assert len(_LONG) > PAYLOAD_MAX


@pytest.fixture
def peers(tcp_pair: Callable[..., tuple[socket.socket, socket.socket]]) -> Iterator[Peers]:
    """Two ends that have agreed on checksums."""
    connections = tcp_pair()
    with RawPeer(connections[0]) as active, RawPeer(connections[1]) as passive:
        active.socket.sendall(request(Depths(1, 2), b"hello").encode())
        asked = passive.answer(lambda start: reply(Depths(2, 1), b"welcome", crc=False))
        answer = active.read_start(reply(Depths(0, 0)).role)
        assert (depths_of(asked), asked.upper_data) == (Depths(1, 2), b"hello")
        assert (depths_of(answer), answer.upper_data) == (Depths(2, 1), b"welcome")
        active.crc = True
        yield active, passive


@pytest.mark.spec("RFC 6581 9")
@pytest.mark.parametrize(
    ("depths", "encoded"),
    [
        (Depths(16, 8, peer_to_peer=True, rtr_write=True, rtr_read=True), "8010c008"),
        (Depths(8, 16, peer_to_peer=True, rtr_write=True), "80088010"),
        (Depths(0x3FFF, 1, rtr_send=True), "7fff0001"),
    ],
)
def test_depths(depths: Depths, encoded: str) -> None:
    assert depths.encode().hex() == encoded
    assert Depths.decode(bytes.fromhex(encoded)) == depths


def test_messages_of_every_kind(peers: Peers) -> None:
    active, passive = peers
    for op in (RdmapOp.SEND, RdmapOp.SEND_SE_INV, RdmapOp.SEND):
        active.send_message(op, _LONG, stag=7 if op is RdmapOp.SEND_SE_INV else 0)
    active.send_message(RdmapOp.WRITE, _LONG, stag=5, offset=2**63)
    active.send_message(RdmapOp.SEND, b"")
    for op in (RdmapOp.SEND, RdmapOp.SEND_SE_INV, RdmapOp.SEND):
        assert passive.expect(op)[1] == _LONG
    first, payload = passive.expect(RdmapOp.WRITE)
    assert (first.stag, first.offset, payload) == (5, 2**63, _LONG)
    assert passive.expect(RdmapOp.SEND) == (Segment(RdmapOp.SEND, True, b"", msn=4), b"")


def test_a_read(peers: Peers) -> None:
    active, passive = peers
    passive.send_message(RdmapOp.READ_RESPONSE, _LONG, 1, 2)  # the answer may lie ready
    assert active.read_remote(ReadRequest(1, 2, len(_LONG), 3, 4)) == _LONG
    assert passive.expect(RdmapOp.READ_REQUEST)[1] == ReadRequest(1, 2, len(_LONG), 3, 4).encode()


_SEND = Segment(RdmapOp.SEND, last=True, payload=b"twelve bytes", msn=1)
_PART = replace(_SEND, last=False)
_WRITE = Segment(RdmapOp.WRITE, last=False, payload=b"abc", stag=9)


@pytest.mark.parametrize(
    ("segments", "wrong"),
    [
        ([replace(_SEND, msn=2)], "msn=2"),
        ([replace(_SEND, mo=4)], "mo=4"),
        ([replace(_SEND, queue=1)], "queue=1"),
        ([replace(_SEND, stag=1)], "stag=1"),
        ([_PART, replace(_SEND, mo=11)], "mo=11"),
        ([_PART, replace(_SEND, op=RdmapOp.SEND_SE, mo=12)], "within"),
        ([_WRITE, replace(_WRITE, offset=2)], "behind"),
        ([_WRITE, replace(_WRITE, stag=8, offset=3)], "within"),
        ([_WRITE, replace(_WRITE, op=RdmapOp.READ_RESPONSE, offset=3)], "within"),
        ([Segment(RdmapOp.TERMINATE, False, bytes(4), queue=QUEUE_TERMINATE, msn=1)], "TERMINATE"),
    ],
)
def test_a_wrong_segment_is_noticed(peers: Peers, segments: list[Segment], wrong: str) -> None:
    active, passive = peers
    for segment in segments:
        active.send(segment)
    for _ in segments[1:]:
        passive.read()
    with pytest.raises(AssertionError, match=wrong):
        passive.read()


def test_a_wrong_frame_is_noticed(peers: Peers) -> None:
    active, passive = peers
    active.send(_SEND, crc_flip=1)
    with pytest.raises(AssertionError, match="checksum"):
        passive.read()
    active.send(_SEND, control=0x42)
    active.send(_SEND, rdmap=0x83)
    active.send(_SEND, rdmap=0x48)
    active.send(_SEND, keep=17)
    for _ in range(4):
        with pytest.raises(PeerViolation):
            passive.read()


@pytest.mark.spec("RFC 5040 4.8")
def test_a_terminate_is_expected(peers: Peers) -> None:
    active, passive = peers
    header = replace(_SEND, payload=b"", msn=9).encode()
    active.send_message(RdmapOp.TERMINATE, bytes.fromhex("1203c000001e") + header)
    active.socket.shutdown(socket.SHUT_WR)
    assert passive.expect_terminate(1, 2, 3) == Terminate(1, 2, 3, segment_len=30, ddp_header=header)


def test_another_terminate_or_none_fails(peers: Peers) -> None:
    active, passive = peers
    active.send_message(RdmapOp.TERMINATE, bytes.fromhex("20020000"))
    active.socket.shutdown(socket.SHUT_WR)
    with pytest.raises(AssertionError, match="2/0/02"):
        passive.expect_terminate(1, 2, 3)
    with pytest.raises(AssertionError, match="no Terminate"):
        passive.expect_terminate(1, 2, 3)


def test_something_instead_of_the_end_fails(peers: Peers) -> None:
    active, passive = peers
    passive.send_message(RdmapOp.SEND, b"too late")
    with pytest.raises(AssertionError, match="too late"):
        active.finish()


def test_an_orderly_end(peers: Peers) -> None:
    active, passive = peers
    passive.socket.shutdown(socket.SHUT_WR)
    active.finish()
    passive.expect_end()
