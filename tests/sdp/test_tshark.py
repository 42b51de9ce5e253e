"""Wireshark's dissector as a referee: it sees in our captures what we say that we have written.

Flaws of its versions up to 4.0 (docs/wire/sdp.md §25) are kept out of the comparison: the single flags are read from
the wrong byte, extended headers other than Hello are opaque, an empty Data is called malformed, and the zero private
data of RTU, DREQ and DREP is taken for a Hello. Hence two passes, and only frames with Sends and with REQ and REP.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from captures import ACCEPTING, CONNECTING, END, SETUP, WHOLE, V, decoded, messages, written
from core_talk import Several, talk
from dissector import numbers, shown
from fabric_capture import FabricCapture
from pcap_file import PcapFile

from sidestep.observe.capture.events import What
from sidestep.rdma.loopback import Recorder
from sidestep.rdma.roce.connection import RecordKind, RoceEnds, RoceRecord
from sidestep.sdp.wire import Mid, decode

pytestmark = [pytest.mark.slow, pytest.mark.app]
BSDH = [f"infiniband_sdp.bsdh.{name}" for name in ("mid", "flags", "bufs", "len", "mseq", "mseqack")]
BTH = [f"infiniband.bth.{name}" for name in ("opcode", "destqp", "psn", "padcnt", "se", "a")]


def sends_only(*fields: str) -> str:
    """A filter for packets of reliable connections."""
    return " && ".join(["infiniband.bth.opcode <= 0x04", *fields])


def test_every_message_is_seen_as_it_was_written(tmp_path: Path) -> None:
    """V01 to V46: base headers, sequence numbers, padding, and who they go to."""
    ends = RoceEnds()
    rows = numbers(shown(written(WHOLE), tmp_path, ["frame.number", *BSDH, *BTH], sends_only()))
    sent = [(number, record) for number, record in enumerate(WHOLE, 1) if record.kind is RecordKind.SEND]
    counts = {side: ends.starting_psn[side.other.value] for side in (CONNECTING, ACCEPTING)}
    expected = []
    for number, record in sent:
        bsdh = decode(memoryview(record.data)).bsdh
        qp = ends.qpn[record.side.other.value]
        expected.append((number, *bsdh, 0x04, qp, counts[record.side], -len(record.data) % 4, 0, 1))
        counts[record.side] += 1
    assert rows == expected
    assert {bsdh[1] for bsdh in rows} >= {mid for mid in Mid if mid > Mid.HELLO_ACK}


def test_request_and_reply(tmp_path: Path) -> None:
    """Service ID, numbers and private data."""
    capture = written([*SETUP, RoceRecord(0, ACCEPTING, RecordKind.SEND, V["V04"].message), *END])
    hello = [f"infiniband_sdp.hh.{name}" for name in ("majv", "minv", "ipv", "cap", "maxadverts", "extmaxadverts")]
    hello += [f"infiniband_sdp.hh.{name}" for name in ("desremrcvsz", "localrcvsz", "localport")]
    request = ["infiniband.cm.req.serviceid", "infiniband.cm.req.localqpn", "infiniband.cm.req.startpsn"]
    found = shown(capture, tmp_path, [*request, *BSDH, *hello], "infiniband.cm.req")
    assert numbers(found) == [
        (0x11389, 0x111, 0x100, *decode(V["V01"].view).bsdh, 2, 2, 4, 0, 16, 0, 16400, 8208, 40000)
    ]
    addresses = [f"infiniband_sdp.hh.{name}" for name in ("src_ip", "dst_ip")]
    assert shown(capture, tmp_path, addresses, "infiniband.cm.req") == [["::10.0.0.1", "::10.0.0.2"]]
    gids = [f"infiniband.cm.req.prim_{name}_ipv4" for name in ("localgid", "remotegid")]
    assert shown(capture, tmp_path, gids, "infiniband.cm.req") == [["10.0.0.1", "10.0.0.2"]]
    reply = ["infiniband.cm.rep.localqpn", "infiniband.cm.rep.startpsn"]
    found = shown(capture, tmp_path, [*reply, *BSDH], "infiniband.cm.rep")
    assert numbers(found) == [(0x222, 0x200, *decode(V["V02"].view).bsdh)]


def test_refused(tmp_path: Path) -> None:
    capture = written([SETUP[0], RoceRecord(0, ACCEPTING, RecordKind.REJ)])
    fields = ["infiniband.cm.rej.reason", "infiniband.cm.rej.msgrej"]
    assert numbers(shown(capture, tmp_path, fields, "infiniband.cm.rej.reason")) == [(28, 0)]


def test_several_packets_reads_and_writes(tmp_path: Path) -> None:
    records = [
        *SETUP,
        RoceRecord(0, CONNECTING, RecordKind.SEND, V["V46"].message + bytes(700), solicited=True),
        RoceRecord(0, CONNECTING, RecordKind.WRITE, bytes(300), rkey=0xAB, va=0x123456789A),
        RoceRecord(0, CONNECTING, RecordKind.READ_REQUEST, rkey=0xCD, va=0x42, length=514),
        RoceRecord(0, ACCEPTING, RecordKind.READ_RESPONSE, bytes(514)),
        RoceRecord(0, CONNECTING, RecordKind.SEND, V["V03"].message, invalidate=0x77),
        RoceRecord(0, ACCEPTING, RecordKind.REFUSAL, syndrome=0x62),
    ]
    fields = [*BTH, "infiniband.reth.va", "infiniband.reth.r_key", "infiniband.reth.dmalen"]
    capture = written(records, RoceEnds(mtu_code=1))
    none = (-1, -1, -1)
    assert numbers(shown(capture, tmp_path, fields, "infiniband.bth.opcode < 0x60")) == [
        (0x00, 0x222, 0x200, 0, 0, 0, *none), (0x01, 0x222, 0x201, 0, 0, 0, *none),
        (0x02, 0x222, 0x202, 3, 1, 1, *none),
        (0x06, 0x222, 0x203, 0, 0, 0, 0x123456789A, 0xAB, 300), (0x08, 0x222, 0x204, 0, 0, 1, *none),
        (0x0C, 0x222, 0x205, 0, 0, 1, 0x42, 0xCD, 514),
        (0x0D, 0x111, 0x205, 0, 0, 0, *none), (0x0E, 0x111, 0x206, 0, 0, 0, *none),
        (0x0F, 0x111, 0x207, 2, 0, 0, *none),
        (0x17, 0x222, 0x208, 1, 0, 1, *none), (0x11, 0x111, 0x208, 0, 0, 0, *none),
    ]  # fmt: skip
    syndrome = ["infiniband.aeth.syndrome.opcode", "infiniband.aeth.syndrome.error_code"]
    refused = shown(capture, tmp_path, syndrome, "infiniband.bth.opcode == 0x11")
    assert numbers(refused) == [(3, 2)]


def test_a_conversation_of_the_core(tmp_path: Path) -> None:
    """What the fabric carried is what the dissector and our own decoder see, message by message."""
    recorder, stream = Recorder(), io.BytesIO()
    talk(Several(recorder, FabricCapture(PcapFile(stream), mtu_code=5, start_s=1000.0)))
    capture = stream.getvalue()
    sent = [event for event in decoded(capture) if event.what is What.SDP][2:]
    whole = [event for event in sent if len(event.message) <= 4096]  # in one packet: it puts nothing together
    assert len(whole) > 20
    rows = numbers(shown(capture, tmp_path, ["frame.number", *BSDH], "infiniband.bth.opcode == 0x04"))
    assert rows == [(event.frame, *decode(memoryview(event.message)).bsdh) for event in whole]
    assert messages(sent) == messages(whole)
