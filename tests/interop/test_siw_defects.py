"""What the kernel's siw answers to a peer that does wrong; `siw_answers.py` prints it.

siw leaves a Terminate out if its sending side happens to be busy: a test that misses one asks again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import pytest
from defects import DEFECTS, DEPTH, READ_LEN, SINK_ADDRESS, SINK_STAG, Defect
from lab_guest import ROOT, Lab
from raw_iwarp import Depths, Ended, RawPeer, frame, request
from siw_answers import CLOSES, SILENT, TAKEN, answer_of_siw, table
from siw_consumer import SiwConsumer

from sidestep.rdma.iwarp.ddp import RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.startup.frame import MpaRole

_TRIES: Final = 6  # in each of which a Terminate is left out in 3 of 100 cases


@pytest.fixture(scope="module")
def shared() -> list[SiwConsumer]:
    """The consumer that waits for the next test."""
    return []


@pytest.fixture
def consumer(lab: Lab, shared: list[SiwConsumer], request: pytest.FixtureRequest) -> Iterator[SiwConsumer]:
    """The consumer in the guest; after a test that fails, the next one gets a new one."""
    mine = shared.pop() if shared else SiwConsumer(lab)
    failed = request.session.testsfailed
    yield mine
    if request.session.testsfailed > failed:
        mine.close()
    else:
        shared.append(mine)


def _outcome(consumer: SiwConsumer, defect: Defect) -> str:
    """What siw does about it, on a new connection."""
    reads = [[SINK_ADDRESS, SINK_STAG, READ_LEN]] if defect.reads else []
    expected = answer_of_siw(defect)
    with consumer.connection(receives=defect.receives, reads=reads) as (peer, memory):
        if reads:
            peer.expect(RdmapOp.READ_REQUEST)
        defect.commit(peer, memory)
        if expected == TAKEN:
            place = memory["both"]
            again = ReadRequest(SINK_STAG + 1, SINK_ADDRESS, READ_LEN, place.stag, place.address)
            peer.send_message(RdmapOp.READ_REQUEST, again.encode())
            while peer.expect(RdmapOp.READ_RESPONSE)[0].stag != again.sink_stag:
                pass  # the answer to the defect, if it was a Read Request
        if expected in (TAKEN, SILENT):
            peer.finish()
            return expected
        return str(peer.terminated() or CLOSES)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_siw_answers(consumer: SiwConsumer, defect: Defect) -> None:
    outcomes: list[str] = []
    while len(outcomes) < _TRIES and (not outcomes or outcomes[-1] == CLOSES != answer_of_siw(defect)):
        outcomes.append(_outcome(consumer, defect))
    assert outcomes[-1] == answer_of_siw(defect), outcomes


def test_the_document_says_how_many_and_the_table_has_each() -> None:
    document = (ROOT / "docs/internals/devices.md").read_text(encoding="utf-8")
    assert f"each of {len(DEFECTS)} defects" in document
    assert len(table().splitlines()) == 2 + len(DEFECTS)


def test_what_siw_lets_through(consumer: SiwConsumer) -> None:
    """Reading without the right, and a Write without bytes; and a checksum is looked at after the bytes are placed."""
    with consumer.connection(receives=1) as (peer, memory):
        place = memory["writable"]
        peer.send_message(RdmapOp.WRITE, b"not for you", place.stag, place.address)
        asked = ReadRequest(SINK_STAG, SINK_ADDRESS, 11, place.stag, place.address)
        assert peer.read_remote(asked) == b"not for you"
        peer.send(Segment(RdmapOp.WRITE, last=True, stag=0x1234, offset=2**64 - 1))
        place = memory["both"]
        peer.send(Segment(RdmapOp.WRITE, True, b"damaged", place.stag, place.address), crc_flip=1)
        peer.terminated()
    report = consumer.report()
    assert bytes.fromhex(report["memory"]["both"]).startswith(b"damaged")


_START: Final = request(Depths(DEPTH, DEPTH))
_KEY: Final = len(MpaRole.REQUEST.value)


@pytest.mark.spec("RFC 5044 7.1")
@pytest.mark.parametrize(
    ("sent", "rejected"),
    [
        pytest.param(replace(_START, role=MpaRole.REPLY).encode(), False, id="the key of a Reply"),
        pytest.param(b"X" + _START.encode()[1:], False, id="another key"),
        pytest.param(replace(_START, revision=3).encode(), False, id="revision 3"),
        pytest.param(replace(_START, private_data=bytes(300)).encode(), False, id="300 bytes of private data"),
        pytest.param(_START.encode()[:_KEY] + b"\x50\x02\xff\xff" + bytes(4), False, id="65,535 bytes of private data"),
        pytest.param(
            _START.encode() + frame(Segment(RdmapOp.SEND, True, msn=1)), False, id="a frame behind the Request"
        ),
        pytest.param(replace(_START, markers=True).encode(), True, id="markers"),
        pytest.param(replace(_START, private_data=b"").encode(), True, id="no depths in spite of S"),
    ],
)
def test_siw_refuses_a_start(lab: Lab, consumer: SiwConsumer, sent: bytes, rejected: bool) -> None:
    with RawPeer(consumer.dial(), timeout_s=90) as peer:  # siw has taken half a minute to close
        peer.socket.sendall(sent)
        if rejected:
            reply = peer.read_start(MpaRole.REPLY)
            assert (reply.rejected, reply.markers, reply.upper_data) == (True, False, b"")
        with pytest.raises(Ended) as end:
            peer.read()
        assert end.value.left == 0
