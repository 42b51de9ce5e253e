"""A conversation of the real core, captured: the capture says what the fabric has carried."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
from captures import decoded, messages, texts
from core_talk import Several, talk
from fabric_capture import FabricCapture
from pcap_file import PcapFile

from sidestep.observe.capture.events import Event, What
from sidestep.rdma.loopback import Kind, Recorder
from sidestep.rdma.loopback.settings import CmKind
from sidestep.sdp.wire import Mid, decode


@dataclass
class Talk:
    """What was carried, and the capture of it."""

    recorder: Recorder
    capture: bytes
    events: list[Event]


@pytest.fixture(scope="module", params=[1, 3, 5], ids=["MTU 256", "MTU 1024", "MTU 4096"])
def captured(request: pytest.FixtureRequest) -> Talk:
    recorder, stream = Recorder(), io.BytesIO()
    talk(Several(recorder, FabricCapture(PcapFile(stream), mtu_code=request.param, start_s=1000.0)))
    return Talk(recorder, stream.getvalue(), decoded(stream.getvalue()))


def test_every_message_is_there_in_order(captured: Talk) -> None:
    sent = [b"".join(one.payload) for one in captured.recorder.qp_messages if one.kind is Kind.SEND]
    assert messages(captured.events)[2:] == sent
    solicited = [one.solicited for one in captured.recorder.qp_messages if one.kind is Kind.SEND]
    assert [event.solicited for event in captured.events if event.what is What.SDP][2:] == solicited
    assert all(event.connection == 1 for event in captured.events)
    mids = {decode(memoryview(message)).bsdh.mid for message in messages(captured.events)}
    assert {Mid.DATA, Mid.SRC_AVAIL, Mid.RDMA_RD_COMPL, Mid.MODE_CHANGE, Mid.SINK_AVAIL, Mid.RDMA_WR_COMPL} <= mids
    assert {Mid.DIS_CONN, Mid.HELLO, Mid.HELLO_ACK} <= mids


def test_what_is_written_and_read_by_rdma_is_there(captured: Talk) -> None:
    names = {"RDMA Write": Kind.WRITE, "RDMA Read Request": Kind.READ_REQUEST, "RDMA Read Response": Kind.READ_RESPONSE}
    lines = texts(captured.events, What.RDMA)
    for name, kind in names.items():
        carried = [one for one in captured.recorder.qp_messages if one.kind is kind]
        sizes = [int(line.split(": ")[1].split()[0]) for line in lines if line.startswith(f"{name}:")]
        assert sizes == [one.length for one in carried]
        assert carried


def test_nothing_beneath_is_amiss(captured: Talk) -> None:
    assert texts(captured.events, What.TRANSPORT) == []
    carried = [f"CM {CmKind(one.kind).name}" for one in captured.recorder.cm_messages]
    assert [line.split(":")[0] for line in texts(captured.events, What.CM)] == carried


def test_the_numbers_of_packets_go_round() -> None:
    """They have 24 bits: after some thousand connections the first ones are used again."""
    earlier, stream = FabricCapture(PcapFile(io.BytesIO())), io.BytesIO()
    talk(earlier)
    known = next(iter(earlier._by_comm_id.values()))
    capture = FabricCapture(PcapFile(stream))
    capture._by_comm_id = {("others", number): known for number in range(4096)}
    talk(capture)
    events = decoded(stream.getvalue())
    assert len(messages(events)) > 2
    assert texts(events, What.TRANSPORT) == []
