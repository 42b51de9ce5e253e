"""Unreliable datagrams of the software HCA: what is on the wire, what is dropped and counted, and whoever may send."""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from random import Random
from typing import Any

import pytest
from dissector import shown
from hca_ends import LEFT, RIGHT, connected
from hypothesis import given, settings
from hypothesis import strategies as st
from pcap_file import PcapFile

from sidestep import limits
from sidestep.errors import LimitReached, PeerViolation
from sidestep.rdma import grh
from sidestep.rdma.frames import Side, ethernet_header, network_header
from sidestep.rdma.roce.datagram import known_address, seal, udp_header
from sidestep.rdma.roce.device import ATTRIBUTES
from sidestep.rdma.roce.packet import (
    EXTENSIONS,
    ICRC_LEN,
    PSN_MASK,
    UDP_PORT,
    Bth,
    Deth,
    Extension,
    ImmDt,
    Op,
    Packet,
)
from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.wire import Wire, WireDevice
from sidestep.rdma.verbs import DeviceAttributes, QpCapabilities, QpState, QueuePair
from sidestep.rdma.work import GRH_LEN, Access, Completion, Receive, Status, UdSend

QKEY = 0x1234_5678
V4 = "10.0.0.1", "10.0.0.2"
V6 = LEFT, RIGHT
GUARD = 64


@dataclass
class Ends:
    """A queue pair for datagrams on each of two devices; `seen` is what was on the wire, and whom it was for."""

    wire: Wire
    left: WireDevice
    right: WireDevice
    sender: QueuePair
    receiver: QueuePair
    sent: list[Completion]
    got: list[Completion]
    seen: list[tuple[str, bytes]] = field(default_factory=list)

    def post(self, size: int = 256) -> memoryview:
        memory = memoryview(bytearray(GRH_LEN + size))
        self.receiver.domain.register(memory, Access.LOCAL_WRITE)
        self.receiver.post_recv(Receive(len(self.got), (memory,)))
        return memory

    def send(self, content: bytes, **fields: Any) -> None:
        given: dict[str, Any] = {
            "ah": self.sender.domain.create_ah(self.right.address), "remote_qpn": self.receiver.number,
            "remote_qkey": QKEY,
        }  # fmt: skip
        memory = self.sender.domain.register(content or b"x", Access.LOCAL_READ).view[: len(content)]
        self.sender.post_send(UdSend(wr_id=1, gather=(memory,), **given | fields))
        self.wire.run()

    def inject(self, raw: bytes, source: str | None = None) -> None:
        """Somebody sends a packet that the right one's device is to look at."""
        source = source or self.left.address
        self.wire.inject(source, self.right.address, seal(raw, known_address(source), self.right.ip))
        self.wire.run()

    def dropped(self) -> dict[str, int]:
        prefix = "packet_dropped{"
        counters = self.right.counters().items()
        return {name[len(prefix) : -1]: count for name, count in counters if name.startswith(prefix)}


def ends(
    addresses: tuple[str, str] = V6, settings: RoceSettings | None = None, attributes: DeviceAttributes = ATTRIBUTES
) -> Ends:
    wire = Wire(Random(1))
    devices = left, right = [wire.device(each, settings, attributes) for each in addresses]
    done: list[list[Completion]] = [[], []]
    pairs: list[QueuePair] = []
    for device, completions in zip(devices, done, strict=True):
        queue = device.create_cq(64, completions.extend)
        pairs.append(device.alloc_pd().create_ud_qp(queue, queue, QKEY, QpCapabilities(max_recv_wr=256)))
    found = Ends(wire, left, right, pairs[0], pairs[1], done[0], done[1])

    def see(target: str, payload: bytes) -> bool:
        found.seen.append((target, payload))
        return False

    wire.faults.lose = see
    return found


def datagram(ends: Ends, payload: bytes = b"word", **fields: Any) -> Packet:
    given: dict[str, Any] = {"opcode": Op.UD_SEND_ONLY, "dest_qp": ends.receiver.number, "psn": 0} | fields
    return Packet(Bth(pad=-len(payload) % 4, **given), (Deth(QKEY, 99),), payload)


@pytest.mark.spec("IBTA 9.8.3")
@pytest.mark.parametrize("content", [b"", b"a", b"four", b"of no round length"])
def test_what_is_on_the_wire(content: bytes) -> None:
    both = ends()
    both.send(content, solicited=True)
    both.send(content, immediate=b"\xde\xad\xbe\xef")
    one, other = (Packet.decode(memoryview(payload)[:-ICRC_LEN]) for _, payload in both.seen)
    assert one.extensions == (Deth(QKEY, both.sender.number),)
    assert other.extensions == (Deth(QKEY, both.sender.number), ImmDt(b"\xde\xad\xbe\xef"))
    assert (one.bth.opcode, other.bth.opcode) == (0x64, 0x65)
    assert (one.bth.solicited, other.bth.solicited) == (True, False)
    assert not one.bth.ack_req
    assert other.bth.psn == one.bth.psn + 1 & PSN_MASK
    assert {one.bth.dest_qp, other.bth.dest_qp} == {both.receiver.number}
    assert bytes(one.payload) == bytes(other.payload) == content
    assert [target for target, _ in both.seen] == [both.right.address] * 2
    assert len(both.seen[0][1]) == 12 + 8 + len(content) + -len(content) % 4 + ICRC_LEN


@pytest.mark.spec("IBTA 11.4.1.2, A17")
@pytest.mark.parametrize("addresses", [V4, V6])
def test_the_header_in_front_is_that_of_the_packet(addresses: tuple[str, str]) -> None:
    both = ends(addresses)
    memory = both.post()
    both.send(b"hello", immediate=b"imm!")
    (completion,) = both.got
    assert (completion.byte_len, completion.source_qpn) == (GRH_LEN + 5, both.sender.number)
    one, other = (ip_address(each) for each in addresses)
    header = network_header(one, other, 17, 8 + len(both.seen[0][1]))
    assert bytes(memory[:GRH_LEN]) == header.rjust(GRH_LEN, b"\0")
    assert grh.source_of(memory) == addresses[0]


@pytest.mark.spec("IBTA A17")
def test_the_header_of_others_is_read() -> None:
    v4 = network_header(ip_address("10.1.2.3"), ip_address("10.0.0.2"), 17, 99, 0x718C)
    v6 = network_header(ip_address("2001:db8::7"), ip_address("2001:db8::8"), 27, 99)
    mapped = network_header(ip_address("::ffff:10.1.2.3"), ip_address("::ffff:10.0.0.2"), 27, 99)
    assert grh.source_of(bytes(20) + v4) == "10.1.2.3"
    assert grh.source_of(b"\x60" * 20 + v4) == "10.1.2.3", "what is in front means nothing"
    assert grh.source_of(v6) == "2001:db8::7"
    looks_like_v4 = network_header(ip_address("2001:db8::4500:7"), ip_address("2001:db8::8"), 17, 99)
    assert looks_like_v4[20] == 0x45
    assert grh.source_of(looks_like_v4) == "2001:db8::4500:7"
    assert grh.source_of(mapped) == "10.1.2.3"
    assert grh.source_of(bytes(20) + v4[:10] + bytes(2) + v4[12:]) == "10.1.2.3", "rxe, within a host"
    for nothing in (bytes(40), b"\x44" * 40, b"", v4, bytes(20) + b"\x65" + v4[1:]):
        with pytest.raises(PeerViolation):
            grh.source_of(nothing)


@given(st.binary(max_size=60))
def test_any_header_is_an_address_or_none(data: bytes) -> None:
    with suppress(PeerViolation):
        ip_address(grh.source_of(data))


def test_what_is_dropped_is_counted() -> None:
    both = ends(settings=RoceSettings(mtu=256))
    both.inject(datagram(both).encode())
    assert both.dropped() == {"no_receive": 1}
    memory = both.post(8)
    both.inject(datagram(both, b"nine byte").encode())
    both.inject(datagram(both, bytes(260)).encode())
    both.inject(_other_key(both))
    both.inject(Packet(Bth(Op.SEND_ONLY, both.receiver.number, 0), (), b"word").encode())
    both.inject(datagram(both, dest_qp=both.receiver.number ^ 1).encode())
    assert both.dropped() == {
        "no_receive": 1, "receive": 1, "length": 1, "qkey": 1, "transport": 1, "no_queue_pair": 1
    }  # fmt: skip
    assert (both.got, both.receiver.receives_posted) == ([], 1)
    assert not any(memory)
    both.receiver.modify_to_error()
    both.inject(datagram(both).encode())
    assert both.dropped()["state"] == 1


def _other_key(both: Ends) -> bytes:
    packet = datagram(both)
    return Packet(packet.bth, (Deth(QKEY + 1, 99),), packet.payload).encode()


@pytest.mark.spec("IBTA 9.6.1")
def test_a_datagram_does_nothing_to_a_connection() -> None:
    wire, active, passive = connected()
    packet = Packet(Bth(Op.UD_SEND_ONLY, passive.qp.number, 0), (Deth(0, 99),), b"word")
    wire.inject(LEFT, RIGHT, seal(packet.encode(), known_address(LEFT), known_address(RIGHT)))
    wire.run()
    assert passive.device.counters()["packet_dropped{transport}"] == 1
    assert (active.qp.state, passive.qp.state) == (QpState.RTS, QpState.RTS)


@pytest.mark.spec("IBTA 9.3.3")
def test_the_reserved_byte_of_the_header_is_not_looked_at() -> None:
    both = ends()
    both.post()
    packet = datagram(both)
    both.inject(Packet(packet.bth, (Deth(QKEY, 0xFF00_0063),), packet.payload).encode())
    assert both.got[0].source_qpn == 99


def test_address_handles_have_a_bound() -> None:
    both = ends(attributes=DeviceAttributes(address_handles_max=2))
    domain = both.sender.domain
    handles = [domain.create_ah(both.right.address) for _ in range(2)]
    assert both.left.counters()["address_handles"] == 2
    with pytest.raises(LimitReached):
        domain.create_ah(both.right.address)
    handles[0].destroy()
    domain.create_ah(both.right.address)
    both.left.close()
    assert both.left.counters()["address_handles"] == 0


@pytest.mark.parametrize("address", ["::ffff:10.0.0.2", "10.0.0.2"])
def test_an_address_may_be_written_otherwise(address: str) -> None:
    both = ends(V4)
    memory = both.post()
    both.send(b"there", ah=both.sender.domain.create_ah(address))
    assert bytes(memory[GRH_LEN : GRH_LEN + 5]) == b"there"


def test_what_is_shown_of_a_queue_pair() -> None:
    both = ends()
    both.post()
    both.send(b"one")
    both.send(b"lost")
    for device, sent, received in ((both.left, 2, 0), (both.right, 0, 1)):
        (shown_,) = device.queue_pairs()
        assert (shown_["type"], shown_["state"]) == ("UD", "RTS")
        assert (shown_["packets_sent"], shown_["packets_received"]) == (sent, received)
    assert both.right.counters()["packets_received"] == 1
    assert both.dropped() == {"no_receive": 1}


def test_a_flood_costs_no_more_than_the_receives() -> None:
    both = ends()
    rooms = [both.post(8) for _ in range(4)]
    raw = datagram(both).encode()
    for _ in range(2000):
        both.right.handle_datagram(both.left.address, UDP_PORT, seal(raw, both.left.ip, both.right.ip), 0.0)
    both.wire.run()
    assert len(both.got) == len(rooms)
    assert both.dropped() == {"no_receive": 1996}


def test_who_sends_much_leaves_room_for_others() -> None:
    """Queue pairs take turns, those of connections too."""
    both = ends()
    queue = both.left.create_cq(1024)
    other = both.left.alloc_pd().create_ud_qp(queue, queue, QKEY)
    ah = [qp.domain.create_ah(both.right.address) for qp in (both.sender, other)]
    for qp, handle in zip((both.sender, other), ah, strict=True):
        for number in range(100):
            qp.post_send(
                UdSend(wr_id=number, gather=(b"x",), ah=handle, remote_qpn=both.receiver.number, remote_qkey=QKEY)
            )
    both.wire.run()
    sources = [Packet.decode(memoryview(payload)[:-ICRC_LEN]).find(Deth) for _, payload in both.seen]
    first = [each.source_qp for each in sources[: 2 * limits.ROCE_TURN_PACKETS] if each is not None]
    assert {first.count(qp.number) for qp in (both.sender, other)} == {limits.ROCE_TURN_PACKETS}
    assert len(sources) == 200


def test_memory_that_is_gone_ends_the_sender_alone() -> None:
    both = ends()
    memory = memoryview(bytearray(8))
    both.sender.domain.register(memory, Access.LOCAL_READ)
    ah = both.sender.domain.create_ah(both.right.address)
    request = UdSend(wr_id=1, gather=(memory[:4],), ah=ah, remote_qpn=both.receiver.number, remote_qkey=QKEY)
    both.sender.post_send(request)
    request.gather[0].release()  # type: ignore[union-attr]
    both.wire.run()
    assert both.sender.state is QpState.ERROR
    assert both.receiver.state is QpState.RTS
    assert [each.status for each in both.sent] == [Status.FLUSHED], "what the fault was about is told, too"


@pytest.mark.parametrize("addresses", [V4, V6])
def test_wireshark_knows_them(addresses: tuple[str, str], tmp_path: Path) -> None:
    both = ends(addresses)
    for content in (b"abcd", b"abc", b"Z" * 300):  # it looks for a protocol in those without bytes, and finds none
        both.send(content)
        both.send(content, immediate=b"\1\2\3\4")
    file = io.BytesIO()
    capture = PcapFile(file)
    one, other = (ip_address(each) for each in addresses)
    for number, (_, payload) in enumerate(both.seen):
        udp = udp_header(UDP_PORT, len(payload)) + payload
        network = network_header(one, other, 17, len(udp))
        capture.write(number, ethernet_header(Side.CONNECTING, one.version) + network + udp)
    fields = ["infiniband.bth.opcode", "infiniband.deth.q_key", "infiniband.deth.srcqp", "infiniband.immdt"]
    rows = shown(file.getvalue(), tmp_path, fields)
    assert len(rows) == 6
    for at, (opcode, qkey, source, immediate) in enumerate(rows):
        assert (int(opcode, 0), int(qkey, 0), int(source, 0)) == (0x64 + at % 2, QKEY, both.sender.number)
        assert bool(immediate) == bool(at % 2)
    assert shown(file.getvalue(), tmp_path, ["frame.number"], "_ws.malformed") == []


def _any_packet(draw: st.DrawFn, both: Ends) -> bytes:
    op = draw(st.sampled_from([Op.UD_SEND_ONLY, Op.UD_SEND_ONLY, Op.UD_SEND_ONLY_IMM, *Op]))
    size = draw(st.sampled_from([0, 1, 3, 4, 10, 255, 256, 257, 300]))
    qkey = draw(st.sampled_from([QKEY, QKEY, QKEY, 0, QKEY | 1 << 31, 2**32 - 1]))
    headers: tuple[Extension, ...] = tuple(
        Deth(qkey, draw(st.integers(0, 2**32 - 1)))
        if kind is Deth
        else ImmDt(b"abcd") if kind is ImmDt else kind(*(0 for _ in kind.__slots__))
        for kind in EXTENSIONS.get(op, ())
    )  # fmt: skip
    number = draw(st.sampled_from([both.receiver.number] * 4 + [both.receiver.number ^ 1, 0, 1, 0xFF_FFFF]))
    bth = Bth(op, number, draw(st.integers(0, PSN_MASK)), draw(st.booleans()), draw(st.booleans()), -size % 4)
    raw = bytearray(Packet(bth, headers, b"\xee" * size).encode())
    for at in draw(st.lists(st.integers(0, len(raw) - 1), max_size=2)) if draw(st.integers(0, 5)) == 0 else ():
        raw[at] ^= draw(st.integers(1, 255))
    return bytes(raw)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_queue_pair_takes_any_packet(data: st.DataObject) -> None:
    """Nothing is written beside a receive, each is used once, and the queue pair goes on."""
    both = ends(data.draw(st.sampled_from([V4, V6])), RoceSettings(mtu=256))
    buffers = [bytearray(300 + 2 * GUARD) for _ in range(3)]
    for number, (buffer, size) in enumerate(zip(buffers, (300, GRH_LEN + 4, 20), strict=True)):
        view = memoryview(buffer)
        both.receiver.domain.register(buffer, Access.LOCAL_WRITE)
        both.receiver.post_recv(Receive(number, (view[GUARD : GUARD + 7], view[GUARD + 7 : GUARD + size])))
    made = st.composite(_any_packet)
    strangers = [both.left.address, "10.0.0.9" if both.right.ip.version == 4 else "fd00::9"]
    for _ in range(data.draw(st.integers(1, 12))):
        both.inject(data.draw(made(both)), data.draw(st.sampled_from(strangers)))
        assert both.receiver.state is QpState.RTS
    for buffer, size in zip(buffers, (300, GRH_LEN + 4, 20), strict=True):
        assert not any(buffer[:GUARD])
        assert not any(buffer[GUARD + size :])
    ids = [each.wr_id for each in both.got]
    assert ids == sorted(set(ids))
    assert {each.status for each in both.got} <= {Status.SUCCESS}
    assert len(ids) + both.receiver.receives_posted == 3
