"""Wireshark's dissector as a referee of the start-up and of Terminate.

Flaws of its versions up to 4.0 are kept out of the comparison: it takes S for a reserved bit and the enhanced data for
private data, expects markers in both directions if either frame asks for them, and cuts the header of an untagged
segment in a Terminate of RDMAP's protection.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from dissector import numbers, shown, told
from iwarp_vectors import frames
from mpa_oracle import Deframer
from pcap_file import PcapFile
from start_talk import accepting, rejecting, talk
from tcp_talk import TcpTalk

from sidestep.rdma.frames import Side
from sidestep.rdma.iwarp.ddp import RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.mpa import fpdu
from sidestep.rdma.iwarp.startup.frame import Rtr, StartFrame
from sidestep.rdma.iwarp.startup.terms import MpaSettings
from sidestep.rdma.iwarp.terminate import Condition, Includes, Layer, Terminate

pytestmark = [pytest.mark.slow, pytest.mark.app]
F = frames()
READ = Segment(
    RdmapOp.READ_REQUEST, True, ReadRequest(0x3C4D, 0x1000, 32, 0x1A2B, 0x7000).encode(), queue=1, msn=1
).encode()  # fmt: skip
WRITE = Segment(RdmapOp.WRITE, True, b"12345678", 0x1A2B, 0x7000).encode()


def capture(*connections: list[bytes]) -> bytes:
    """A capture of connections: of each the Request, the Reply, and what the initiator sends then."""
    stream, count = io.BytesIO(), 0
    file = PcapFile(stream)
    for number, frames_of_one in enumerate(connections):
        tcp = TcpTalk((40000 + number, 5001))
        tcp.open()
        for index, frame in enumerate(frames_of_one):
            tcp.send(Side.ACCEPTING if index == 1 else Side.CONNECTING, frame)
        for frame in tcp.frames:
            file.write(1000 + count / 1000, frame)
            count += 1
    return stream.getvalue()


def checksums(capture_: bytes, folder: Path) -> list[str]:
    """What it says of every one."""
    return re.findall(r"CRC check: 0x[0-9a-f]{8} \((\w+) CRC32", told(capture_, folder, "iwarp_mpa"))


def test_requests_and_replies(tmp_path: Path) -> None:
    """Every flag, revision and length is seen as it was meant."""
    sent = []
    for revision, markers, crc, accepts in product((1, 2), (False, True), (False, True), (False, True)):
        one = MpaSettings(revision=revision, enhanced=revision == 2, markers=markers, crc=crc)
        answer = (accepting if accepts else rejecting)(b"no" * revision)
        sent.append(talk(one, replace(one, markers=not markers), answer, b"hello").wire)
    sent.append(talk(MpaSettings(peer_to_peer=True), MpaSettings()).wire[:2])
    fields = [f"iwarp_mpa.{name}" for name in ("marker_flag", "crc_flag", "rej_flag", "rev", "res", "pdlength")]
    found = shown(capture(*sent), tmp_path, [*fields, "iwarp_mpa.privatedata"], "iwarp_mpa.req || iwarp_mpa.rep")
    expected = []
    for frame_bytes in (frame for pair in sent for frame in pair):
        frame, _ = StartFrame.decode(frame_bytes) or pytest.fail("it is no frame")
        flags = (frame.markers, frame.crc, frame.rejected, frame.revision, frame.enhanced << 4, len(frame.private_data))
        expected.append((*map(int, flags), frame.private_data.hex()))
    assert [(*numbers([row[:-1]])[0], row[-1]) for row in found] == expected


@pytest.mark.parametrize("markers", [False, True])
def test_ready_to_receive(tmp_path: Path, markers: bool) -> None:
    sent = [
        talk(
            MpaSettings(peer_to_peer=True, rtr=rtr, markers=markers), MpaSettings(rtr=rtr, markers=markers)
        ).wire
        for rtr in Rtr
    ]  # fmt: skip
    whole = capture(*sent)
    fields = ["iwarp_rdma.opcode", "iwarp_ddp.last_flag", "iwarp_mpa.ulpdulength", "iwarp_rdma.rdmardsz"]
    assert numbers(shown(whole, tmp_path, fields, "iwarp_ddp_rdmap")) == [
        {Rtr.SEND: (3, 1, 18, -1), Rtr.WRITE: (0, 1, 14, -1), Rtr.READ: (1, 1, 46, 0)}[rtr] for rtr in Rtr
    ]
    assert checksums(whole, tmp_path) == ["Good"] * len(Rtr)


def test_an_initiator_that_terminates(tmp_path: Path) -> None:
    """With the markers and the checksum that the two frames have asked for."""
    sent = []
    for markers in (False, True):
        one = MpaSettings(peer_to_peer=True, rtr=Rtr.SEND, markers=markers)
        sent.append(talk(one, MpaSettings(markers=markers)).wire)
        assert len(sent[-1]) == 3
    whole = capture(*sent)
    fields = [f"iwarp_rdma.{name}" for name in ("term_layer", "term_etype_llp", "term_errcode_llp")]
    assert numbers(shown(whole, tmp_path, fields, "iwarp_ddp_rdmap")) == [(2, 0, 7), (2, 0, 7)]
    assert checksums(whole, tmp_path) == ["Good", "Good"]


def test_the_answer_to_every_condition(tmp_path: Path) -> None:
    """Layer, type, code, flags, length and header; a write to a wrong place is the example of a tagged segment."""
    start = talk(MpaSettings(), MpaSettings()).wire
    messages = [
        Terminate.about(condition, WRITE if condition.name.startswith("TAGGED") else READ) for condition in Condition
    ]
    whole = capture([*start, *(fpdu(message.segment.encode(), 0) for message in messages)])
    kinds = [f"iwarp_rdma.term_etype_{name}" for name in ("rdma", "ddp", "llp")]
    codes = [f"iwarp_rdma.term_errcode_{name}" for name in ("rdma", "ddp_tagged", "ddp_untagged", "llp")]
    codes += ["iwarp_rdma.term_errcode"]  # where it knows none: of local errors of DDP and RDMAP
    flags = ["iwarp_rdma.term_hdrct_m", "iwarp_rdma.hdrct_d", "iwarp_rdma.hdrct_r"]
    columns = ["iwarp_rdma.term_layer", *kinds, *codes, *flags]
    rows = numbers(shown(whole, tmp_path, columns, "iwarp_rdma.terminate"))
    assert len(rows) == len(Condition)
    for condition, row in zip(Condition, rows, strict=True):
        code, includes = condition.code, condition.includes
        layer, kinds_seen, codes_seen = Layer(row[0]), set(row[1:4]) - {-1}, set(row[4:9]) - {-1}
        assert (layer, kinds_seen, codes_seen) == (code >> 12, {code >> 8 & 0xF}, {code & 0xFF}), condition
        headers = includes is not Includes.NOTHING
        assert row[9:] == (headers, headers, includes is Includes.READ), condition
    lengths = shown(whole, tmp_path, ["iwarp_rdma.term_ddp_seg_len", "iwarp_rdma.term_ddp_h"], "iwarp_rdma.terminate")
    for message, (length, header) in zip(messages, lengths, strict=True):
        assert length == ("" if message.segment_len is None else f"{message.segment_len:04x}")
        assert message.ddp_header.hex().startswith(header)
    assert checksums(whole, tmp_path) == ["Good"] * len(Condition)


def test_a_damaged_message_is_seen(tmp_path: Path) -> None:
    """The referee looks."""
    whole = capture([F["T01"], F["T02"], F["T22"], F["T22"][:-1] + b"\0"])
    assert checksums(whole, tmp_path) == ["Good", "Bad"]
    (payload,) = Deframer(markers=False).feed(F["T22"])
    assert Terminate.decode(payload[18:]).text.endswith("(2/0/02)")
