"""Captures of connections with another host: Wireshark's dissector sees in them the SDP that carried the bytes."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dissector import messages_seen, shown
from hosts import NETWORK, Host, Make
from talking import PYTHON_SDP, TALKERS, line, promoted, running, talks

from sidestep.observe.capture.decode import Decoder
from sidestep.observe.capture.events import What
from sidestep.remote.link import CONTROL
from sidestep.sdp.wire import BSDH_LEN, Mid
from sidestep.settings import RemoteSettings
from sidestep.switch.link import Control

pytestmark = [pytest.mark.slow, pytest.mark.app]
PORT = 7311  # root's captures hear of all providers: no other test has it
ROCE_PORT = 7321  # likewise
PIECE = 5000  # bytes: less than what would be advertised
_MID_AND_LEN = ["infiniband_sdp.bsdh.mid", "infiniband_sdp.bsdh.len"]


def serving(host: Host, port: int = PORT) -> None:
    server = host.popen([*TALKERS, "serve", host.address, str(port)], stdout=subprocess.PIPE, text=True)
    assert line(server) == "listens"


def telling(host: Host, to: Host, size: int, port: int = PORT) -> subprocess.Popen[str]:
    argv = [*TALKERS, "tell", to.address, str(port), str(size), str(PIECE)]
    client = host.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert line(client) == "talks"
    return client


def digest(client: subprocess.Popen[str]) -> str:
    """Has it send, and gives what it says of that."""
    said, _ = client.communicate("go\n", timeout=60)
    sha256, right = said.split()
    assert right == "True"
    return sha256


@contextmanager
def capturing(file: Path, *options: str) -> Iterator[None]:
    """`sidestep capture` while the block runs, from the first frame of what begins there."""
    argv = [sys.executable, "-m", "sidestep", "capture", "-w", str(file), *options]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            # without a CPU it loses pieces, and says so: it has one before others
            os.setpriority(os.PRIO_PROCESS, process.pid, -15)
            said = process.stderr.readline()
            assert said.startswith("capturing from"), said
            yield
        finally:
            process.send_signal(signal.SIGINT)
            told = process.communicate(timeout=60)[1]
    assert "0 pieces dropped" in told


def carried(messages: list[bytes]) -> bytes:
    """What is of programs in the messages of one direction: the words of the link are taken out, from the first on."""
    found, left, begun = b"", b"", False
    for message in messages:
        if message[0] != Mid.DATA:
            continue
        payload = message[BSDH_LEN : int.from_bytes(message[4:8])]  # without InfiniBand's padding
        begun = begun or (payload[1:8] == bytes(7) and payload[0] in set(Control))
        left += payload if begun else b""
    at = 0
    while at < len(left):
        number, count = CONTROL.unpack_from(left, at)
        at += CONTROL.size
        if Control(number) is Control.DATA:
            found += left[at : at + count]
            at += count
    return found


@pytest.mark.spec("InfiniBand A4 SDP")
def test_the_dissector_sees_sdp_and_every_byte(two: tuple[Host, Host], tmp_path: Path) -> None:
    """Of a connection that begins while it is captured, and of one that began before."""
    one, other = two
    serving(other)
    before = telling(one, other, 100_000)
    promoted(one, other)
    file = tmp_path / "x.pcapng"
    with capturing(file, "-i", f"{other.address}:{PORT}"):
        after = telling(one, other, 150_000)
        promoted(one, other, ends=2)
        sent = [(100_000, digest(before)), (150_000, digest(after))]
    data = file.read_bytes()
    assert b"frames are synthetic" in data
    assert data.count(b"began before the capture") == 1

    hello = ["infiniband.cm.req.serviceid", "infiniband.cm.req.localqpn", "infiniband_sdp.bsdh.mid"]
    requests = shown(data, tmp_path, hello, "infiniband.cm.req")
    assert [(int(service, 0), int(mid, 0)) for service, _, mid in requests] == [(0x1_0000 | PORT, Mid.HELLO)] * 2
    replies = shown(data, tmp_path, ["infiniband.cm.rep.localqpn", "infiniband_sdp.bsdh.mid"], "infiniband.cm.rep")
    assert [int(mid, 0) for _, mid in replies] == [Mid.HELLO_ACK] * 2
    assert shown(data, tmp_path, ["frame.number"], "_ws.malformed") == []
    credits_told = shown(data, tmp_path, ["infiniband_sdp.bsdh.bufs"], "infiniband.bth.opcode == 0x04")
    assert len(credits_told) > 100
    assert {int(bufs) for (bufs,) in credits_told} & set(range(1, 100))

    for (_, active_qp, _), (passive_qp, _), (size, expected) in zip(requests, replies, sent, strict=True):
        for qp in (passive_qp, active_qp):  # to the server, and what it echoes
            only = f"infiniband_sdp && infiniband.bth.opcode == 0x04 && infiniband.bth.destqp == {qp}"
            bytes_ = carried(messages_seen(data, tmp_path, "infiniband_sdp", only))
            assert hashlib.sha256(bytes_[-size:]).hexdigest() == expected

    ours = [event for event in Decoder(io.BytesIO(data), "x").events() if event.what is What.SDP]
    assert len(ours) == len(credits_told) + 4


@pytest.mark.spec("InfiniBand A4 SDP")
def test_packets_of_the_software_hca_as_they_were(make_hosts: Make, tmp_path: Path) -> None:
    """The providers have joined the queue pairs; the dissector sees SDP all the same, and no packet is made up."""
    one, other = make_hosts(2, remote=RemoteSettings.parse(NETWORK, transports="roce"))
    serving(other, ROCE_PORT)
    before = telling(one, other, 100_000, ROCE_PORT)
    promoted(one, other)
    file = tmp_path / "x.pcapng"
    with capturing(file, "-i", f"{other.address}:{ROCE_PORT}"):
        after = telling(one, other, 150_000, ROCE_PORT)
        promoted(one, other, ends=2)
        for client in (before, after):
            digest(client)
    data = file.read_bytes()
    assert data.count(b"are made up: these queue pairs") == 2
    assert data.count(b"began before the capture") == 1
    assert {row[0] for row in shown(data, tmp_path, ["udp.dstport"])} == {"4791"}
    requests = shown(data, tmp_path, ["infiniband.cm.req.serviceid", "infiniband_sdp.bsdh.mid"], "infiniband.cm.req")
    assert [(int(service, 0), int(mid, 0)) for service, mid in requests] == [(0x1_0000 | ROCE_PORT, Mid.HELLO)] * 2
    fields = ["frame.protocols", "infiniband.bth.opcode"]
    rows = shown(data, tmp_path, fields, "infiniband_sdp && infiniband.bth.opcode < 0x64")
    assert len(rows) > 50
    assert all(layers.startswith("eth:ethertype:ip:udp:infiniband:infiniband_sdp") for layers, _ in rows)
    assert {int(op, 0) for _, op in rows} <= {0x00, 0x01, 0x02, 0x04}  # Sends
    assert shown(data, tmp_path, ["frame.number"], "infiniband.bth.opcode == 0x11")  # acknowledgements are real
    events = list(Decoder(io.BytesIO(data), "x").events())
    assert not [event.note for event in events if "checksum" in event.note]
    assert len([event for event in events if event.what is What.SDP]) > 100


def test_the_same_as_iwarp(two: tuple[Host, Host], tmp_path: Path) -> None:
    """The port of a program picks the connection there as well."""
    one, other = two
    serving(other)
    first = telling(one, other, 1000)
    promoted(one, other)
    file, elsewhere = tmp_path / "x.pcapng", tmp_path / "y.pcapng"
    with (
        capturing(elsewhere, "-i", f"{other.address}:{PORT + 1}"),
        capturing(file, "-i", f"{other.address}:{PORT}", "--as", "iwarp", "--snaplen", "200"),
    ):
        digest(first)
    data = file.read_bytes()
    assert shown(data, tmp_path, ["frame.number"], "infiniband") == []
    assert shown(data, tmp_path, ["frame.number"], "iwarp_rdma")
    sizes = shown(data, tmp_path, ["frame.cap_len", "frame.len"])
    assert max(int(kept) for kept, _ in sizes) == 200
    assert max(int(whole) for _, whole in sizes) > 1000
    assert shown(elsewhere.read_bytes(), tmp_path, ["frame.number"]) == []


@pytest.mark.spec("InfiniBand A4 SDP")
def test_zero_copy_of_python_programs(make_hosts: Make, tmp_path: Path) -> None:
    """What is advertised, by whom it is read, and the very bytes."""
    one, other = make_hosts(2, remote=None)
    size = 3_000_000
    file = tmp_path / "x.pcapng"
    server = running(other, *PYTHON_SDP, "serve", other.address, str(PORT), says="listens True")
    with server, capturing(file, "-i", f"{other.address}:{PORT}"):
        placed = talks(one, "talk", other.address, port=PORT, sizes=[size])
    data = file.read_bytes()
    assert placed >= size - 100_000  # the last of it may go by Bcopy
    at_once = "infiniband.bth.opcode == 0x04"  # a message in one packet
    seen = [
        (int(mid, 0), int(len_)) for mid, len_ in shown(data, tmp_path, _MID_AND_LEN, f"infiniband_sdp && {at_once}")
    ]
    assert {Mid.SRC_AVAIL, Mid.RDMA_RD_COMPL} <= {mid for mid, _ in seen}
    assert shown(data, tmp_path, ["frame.number"], "infiniband.bth.opcode == 0x00") == []  # none in several
    # The dissector takes a Data message without data for malformed (docs/wire/sdp.md, part 2).
    wrong = shown(data, tmp_path, _MID_AND_LEN, f"_ws.malformed && {at_once}")
    assert {(int(mid, 0), int(len_)) for mid, len_ in wrong} <= {(Mid.DATA, BSDH_LEN)}
    asked = sum(
        int(count) for (count,) in shown(data, tmp_path, ["infiniband.reth.dmalen"], "infiniband.bth.opcode == 0x0c")
    )
    assert asked >= placed
    frames = [int(number) for (number,) in shown(data, tmp_path, ["frame.number"], f"infiniband_sdp && {at_once}")]
    ours = [event.frame for event in Decoder(io.BytesIO(data), "x").events() if event.what is What.SDP]
    assert ours[2:] == frames, "behind the Hellos each message is shown, also that behind a Read"
