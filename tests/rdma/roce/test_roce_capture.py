"""Captures of the software HCA: the packets as they were, and Wireshark's dissector knows what they are."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from random import Random

import pytest
from common import pattern
from dissector import numbers, shown
from endpoint_world import End, addresses, done, eager, take
from hca_ends import LEFT, RIGHT, SERVICE, HcaEnd, ask, connected, ends
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.observe.capture.conversation import ConversationWriter
from sidestep.observe.capture.files import read_frames
from sidestep.observe.capture.segments import SegmentWriter, capture
from sidestep.rdma.cm import CmState
from sidestep.rdma.control import decode, encode
from sidestep.rdma.frames import network_header
from sidestep.rdma.iwarp.tap import Seen, SeenKind
from sidestep.rdma.roce.datagram import identification_of, seal, udp_header
from sidestep.rdma.roce.packet import ICRC_LEN, Bth, Op, Packet, icrc
from sidestep.rdma.roce.tap import Joined
from sidestep.rdma.roce.wire import Wire, WireFaults
from sidestep.rdma.verbs import Beginning
from sidestep.rdma.work import RdmaRead, RdmaWrite, Send
from sidestep.sdp.requests import SdpEventKind
from sidestep.sdp.settings import Carrier, SdpSettings
from sidestep.sdp.stack import Stack

HEADERS = 14 + 40 + 8  # bytes of Ethernet, IPv6 and UDP
REQ, REJ, REP, RTU, DREQ, DREP = 0x10, 0x12, 0x13, 0x14, 0x15, 0x16


def packets_of(file: io.BytesIO) -> list[Packet]:
    """All that is captured; every checksum is right."""
    found = []
    for frame in read_frames(io.BytesIO(file.getvalue()), "capture"):
        network = frame.data[14:]
        assert icrc(network[:-ICRC_LEN]) == network[-ICRC_LEN:]
        found.append(Packet.decode(memoryview(frame.data)[HEADERS:-ICRC_LEN]))
    return found


def attributes_of(file: io.BytesIO) -> list[int]:
    """Which messages of the connection manager there are."""
    return [
        int.from_bytes(bytes(each.payload[16:18])) for each in packets_of(file) if each.bth.opcode is Op.UD_SEND_ONLY
    ]


def data_ops(file: io.BytesIO) -> list[Op]:
    return [each.bth.opcode for each in packets_of(file) if each.bth.opcode is not Op.UD_SEND_ONLY]


def work(wire: Wire, active: HcaEnd, passive: HcaEnd) -> None:
    passive.room(3000)
    far, near = passive.memory(bytes(3000)), active.memory(pattern(3000, 1))
    active.qp.post_send(Send(1, (near.view,), solicited=True))
    active.qp.post_send(RdmaRead(2, (near.view[:100],), far.va, far.rkey))
    active.qp.post_send(RdmaWrite(3, (near.view[:100],), far.va, far.rkey))
    wire.run()
    assert [each.ok for each in active.sent] == [True] * 3


def end(wire: Wire, *both: HcaEnd) -> None:
    assert both[0].connection is not None
    both[0].connection.disconnect()
    wire.run_until(lambda: all(each.kinds[-1:] == ["TimewaitExit"] for each in both), limit_s=10)


def test_a_connection_from_its_first_word_to_its_last() -> None:
    wire = Wire(Random(1))
    active, passive = ends(wire)
    file, other = io.BytesIO(), io.BytesIO()
    with capture(active.device, file) as writer, capture(passive.device, other):
        ask(active)
        wire.run()
        work(wire, active, passive)
        end(wire, active, passive)
        assert writer.connections == 1
    assert attributes_of(file) == attributes_of(other) == [REQ, REP, RTU, DREQ, DREP]
    ops = data_ops(file)
    assert sorted(ops) == sorted(data_ops(other))  # each packet at its time at that end
    assert ops[0] is Op.SEND_FIRST
    assert {Op.WRITE_ONLY, Op.READ_REQUEST, Op.READ_RESPONSE_ONLY, Op.ACK} <= set(ops)
    assert not active.device.taps.wires
    assert not passive.device.taps.wires


def test_one_that_began_before_has_its_handshake() -> None:
    wire, active, passive = connected()
    work(wire, active, passive)
    for each in (active, passive):
        file = io.BytesIO()
        with capture(each.device, file):
            active.done.clear()
            work(wire, active, passive)
        assert attributes_of(file) == [REQ, REP, RTU]
        assert Op.SEND_FIRST in data_ops(file)
        assert b"began before the capture" in file.getvalue()


@pytest.mark.parametrize("who", ["active", "passive"])
def test_an_attempt_that_is_rejected(who: str) -> None:
    wire = Wire(Random(1))
    active, passive = ends(wire)
    file = io.BytesIO()
    with capture((active if who == "active" else passive).device, file):
        active.device.cm.connect(RIGHT, SERVICE + 1, active.qp, b"", lambda _, event: active.told.append(event))
        wire.run()
    assert active.kinds == ["Rejected"]
    assert attributes_of(file) == [REQ, REJ]
    assert not active.device.taps.wires
    assert not passive.device.taps.wires


def test_packets_that_are_sent_again_are_there_twice() -> None:
    left = [1]  # Sends to lose
    op = bytes([Op.SEND_ONLY])

    def lose(target: str, payload: bytes) -> bool:
        if target == RIGHT and payload[:1] == op and left[0]:
            left[0] -= 1
            return True
        return False

    wire, active, passive = connected(faults=WireFaults(lose=lose))
    file = io.BytesIO()
    with capture(active.device, file):
        passive.room(8)
        active.qp.post_send(Send(1, (b"word",)))
        wire.run_until(lambda: bool(active.sent), limit_s=10)
    sends = [each for each in packets_of(file) if each.bth.opcode is Op.SEND_ONLY]
    assert [each.bth.psn for each in sends] == [sends[0].bth.psn] * 2
    details = active.qp.details()
    assert (details["packets_resent"], details["resent"]) == (1, 1)
    assert active.device.counters()["packets_resent"] == 1


def test_a_connection_that_others_have_joined_is_introduced() -> None:
    wire = Wire(Random(1))
    active, passive = ends(wire)
    told = [active.qp.endpoint(RIGHT), passive.qp.endpoint(LEFT)]
    for each, remote in ((active, told[1]), (passive, told[0])):
        each.qp.join(remote, _Owner(), initiator_depth=4, responder_resources=4)
        assert not each.device.taps.wires, "joined in advance, perhaps for ever: there is nothing to see"
        each.qp.tell_beginning(Beginning(each is active, SERVICE, b"asks", b"says yes"))
        each.qp.ready_to_send()
    for each in (active, passive):
        active.done.clear()
        file = io.BytesIO()
        with capture(each.device, file):
            work(wire, active, passive)
        assert attributes_of(file) == [REQ, REP, RTU]
        assert b"are made up" in file.getvalue()
        first = packets_of(file)[:2]
        assert [bytes(each.payload[24 + offset :][:8]) for each, offset in zip(first, (140, 36), strict=True)] == [
            b"asks\0\0\0\0",
            b"says yes",
        ]
    active.qp.destroy()
    assert not active.device.taps.wires


class _Owner:
    remote_address = ""
    state = CmState.ESTABLISHED

    def communication_established(self) -> None: ...
    def lost(self) -> None: ...


def test_a_connection_elsewhere_is_left_out() -> None:
    wire, active, passive = connected()
    for place, wanted in (((RIGHT, SERVICE & 0xFFFF), True), (("fd00::7", None), False), ((RIGHT, 9), False)):
        file = io.BytesIO()
        writer = SegmentWriter(file, places=[place])
        told: list[bool] = []
        tap = lambda seen, writer=writer, told=told: told.append(writer.see("", seen))  # noqa: E731
        active.device.taps.add(tap)
        active.done.clear()
        work(wire, active, passive)
        active.device.taps.remove(tap)
        writer.close()
        assert bool(writer.frames) is wanted
        assert (False in told) is not wanted


# ---- what is told to other processes ----


@given(
    st.builds(
        Joined, st.integers(0, (1 << 64) - 1), st.binary(max_size=512), st.binary(max_size=512),
        st.tuples(st.integers(0, 1 << 24), st.integers(0, 1 << 24)),
        st.tuples(st.integers(0, 1 << 24), st.integers(0, 1 << 24)), st.integers(256, 4096),
    )
)  # fmt: skip
def test_what_joined_two_queue_pairs_reads_back(joined: Joined) -> None:
    assert Joined.decode(joined.encode()) == joined


def test_an_introduction_passes_to_another_process() -> None:
    _, active, _ = connected()
    seen: list[Seen] = []
    active.device.taps.add(seen.append)
    assert [each.what for each in seen] == [SeenKind.OPENED] + [SeenKind.PACKET] * 3
    assert [decode(encode(each)) for each in seen] == seen
    assert seen[0].ends is not None
    assert seen[0].ends.local == (LEFT, active.qp.number)


# ---- the identification of IPv4 ----


@settings(deadline=None)
@given(st.integers(0, 0xFFFF), st.binary(max_size=64).map(lambda data: data + bytes(-len(data) % 4)))
def test_the_identification_is_found(identification: int, data: bytes) -> None:
    source, destination = ip_address("192.0.2.1"), ip_address("192.0.2.2")
    transport = Packet(Bth(Op.SEND_ONLY, 17, 5), (), data).encode()
    udp = udp_header(0xC123, len(transport) + ICRC_LEN)
    head = network_header(source, destination, 17, len(udp) + len(transport) + ICRC_LEN, identification)
    payload = transport + icrc(head + udp + transport)
    assert identification_of(payload, source, destination, 0xC123) == identification
    assert identification_of(seal(transport, source, destination), source, destination, 4791) == 0


# ---- the referee ----


@pytest.mark.slow
@pytest.mark.app
@pytest.mark.spec("InfiniBand A4 SDP")
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("writer_of", [SegmentWriter, ConversationWriter])
def test_the_dissector_sees_sdp(tmp_path: Path, before: bool, writer_of: Callable[[io.BytesIO], SegmentWriter]) -> None:
    """Ethernet, IP, UDP, InfiniBand's reliable connection, SDP; with packets of it lost on the way."""
    wire = Wire(Random(5), WireFaults(loss=0.01))
    settings_ = SdpSettings(strategy=eager, carrier=Carrier.INFINIBAND)
    stacks = [Stack(wire.device(address), lambda: wire.now, settings_) for address in ("10.0.0.1", "10.0.0.2")]
    left, right = End(), End()
    listener = stacks[1].listen(5001, partial(take, right))
    file = io.BytesIO()
    writer = writer_of(file)
    device = stacks[0].device
    assert device.taps is not None
    see = partial(writer.see, "")
    if not before:
        device.taps.add(see)
    left.stream = stacks[0].connect("10.0.0.2", addresses(), left.tell)
    established = SdpEventKind.ESTABLISHED
    assert wire.run_until(lambda: left.got(established) and right.got(established))
    listener.close()
    if before:
        device.taps.add(see)
    room = bytearray(60_000)
    receive = right.to.receive(memoryview(room), waitall=True)
    left.to.send(memoryview(pattern(60_000, 1)))
    assert wire.run_until(done(receive))
    device.taps.remove(see)
    writer.close()
    data = file.getvalue()
    layers = {row[0] for row in shown(data, tmp_path, ["frame.protocols"], "infiniband_sdp")}
    assert all(each.startswith("eth:ethertype:ip:udp:infiniband") for each in layers)
    assert {int(port) for (port,) in shown(data, tmp_path, ["udp.dstport"])} == {4791}
    fields = ["infiniband.bth.opcode", "infiniband_sdp.bsdh.mid"]
    rows = numbers(shown(data, tmp_path, fields, "infiniband_sdp"))
    assert {mid for _, mid in rows} >= {0x00, 0x01, 0xFF}
    assert shown(data, tmp_path, ["frame.number"], "infiniband.bth.opcode == 0x11")
    for stack in stacks:
        stack.close()
