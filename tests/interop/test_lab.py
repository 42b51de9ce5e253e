"""The lab itself: what the other tests rely on."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_guest import Lab, Unusable, lab_folder
from mpa_oracle import Deframer
from raw_iwarp import Depths, RawPeer, request
from raw_rping import Advertisement, ping

from sidestep.observe.capture.files import read_frames
from sidestep.observe.capture.layers import Segment, dissect
from sidestep.observe.capture.tcp import Direction
from sidestep.rdma.iwarp import ddp
from sidestep.rdma.iwarp.ddp import RdmapOp
from sidestep.rdma.iwarp.startup.frame import StartFrame

_PORT = 7175


def test_without_a_lab_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTEP_LAB", str(tmp_path))
    with pytest.raises(Unusable, match=f"SIDESTEP_LAB names {tmp_path}"):
        lab_folder()


def test_a_command_and_its_limit(lab: Lab) -> None:
    assert lab.run("echo $0; exit 3", check=False).returncode == 3
    assert lab.run(["printf", "%s", "a b"]).stdout == "a b"
    assert lab.run("sleep 60", timeout_s=1, check=False).returncode == 124
    with pytest.raises(AssertionError, match="result 1"):
        lab.run("false")


def test_programs_of_this_machine_reach_the_network(lab: Lab) -> None:
    done = lab.python("-c", f"import socket; socket.create_server(('{lab.host_address}', 0)); print('here')")
    assert done.stdout == "here\n", done.stderr
    with pytest.raises(OSError, match="assign"):
        lab.listener("203.0.113.1")


def test_a_capture_holds_the_conversation(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "rping.pcap"
    lab.serve("rping", f"exec rping -s -a {lab.siw_address} -p {_PORT}", _PORT)
    with lab.capture(file), RawPeer(lab.connect(_PORT)) as peer:
        asked = request(Depths(1, 1))
        peer.ask(asked)
        ping(peer, b"captured" * 7 + b"again.\n\0", Advertisement(1, 2, 64), Advertisement(3, 4, 64))
        peer.finish()
    sent = Direction()
    with file.open("rb") as capture:
        found = bytearray()
        for frame in read_frames(capture, file.name):
            segment = dissect(frame)
            if isinstance(segment, Segment) and segment.destination_port == _PORT:
                found += sent.feed(segment)
    assert not sent.gap
    start = StartFrame.decode(found)
    assert start is not None
    assert start[0] == asked
    payloads = Deframer(markers=False).feed(bytes(found[start[1] :]))
    ops = [ddp.Segment.decode(payload).op for payload in payloads]
    assert ops == [RdmapOp.SEND, RdmapOp.READ_RESPONSE, RdmapOp.SEND]
