"""Whatever packets come: no exception, nothing written where nothing may be, and bounded memory."""

from __future__ import annotations

import pytest
from hca_ends import LEFT, RIGHT, connected
from hypothesis import given, settings
from hypothesis import strategies as st
from test_roce_manager import request, say

from sidestep import limits
from sidestep.rdma.roce.datagram import known_address, seal
from sidestep.rdma.roce.numbers import after
from sidestep.rdma.roce.packet import EXTENSIONS, Aeth, Bth, Extension, Ieth, ImmDt, Op, Packet, Reth
from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.verbs import QpCapabilities, QpState
from sidestep.rdma.work import Access, RdmaRead, Receive, Send

GUARD = 64
ANSWERS_MAX = 64  # native/wire/rc_qp.h::QP_ANSWERS_MAX
ROOM = 600
ALL = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
_settings = RoceSettings(mtu=256, window=8)
_rc = st.sampled_from([op for op in Op if op < 0x20])


class Victim:
    """An end with memory that is open in its middle only, something posted, and something under way."""

    def __init__(self, seed: int) -> None:
        capabilities = QpCapabilities(initiator_depth=2, responder_resources=2)
        self.wire, self.peer, self.end = connected(seed, capabilities=capabilities, settings=_settings)
        self.buffers = [bytearray(ROOM + 2 * GUARD) for _ in range(4)]
        views = [memoryview(each)[GUARD:-GUARD] for each in self.buffers]
        self.open, room, other, sink = (self.end.domain.register(view, ALL) for view in views)
        self.end.qp.post_recv(Receive(1, (room.view,)))
        self.end.qp.post_recv(Receive(2, (other.view[:10], other.view[20:40])))
        far = self.peer.memory(ROOM)
        self.wire.faults.lose = lambda target, payload: target == LEFT  # the peer is played by hand from here on
        self.end.qp.post_send(Send(3, (self.open.view,)))
        self.end.qp.post_send(RdmaRead(4, (sink.view,), far.va, far.rkey))
        self.wire.run()

    def say(self, raw: bytes) -> None:
        self.wire.inject(LEFT, RIGHT, seal(raw, known_address(LEFT), known_address(RIGHT)))
        self.wire.run()

    def check(self) -> None:
        for each in self.buffers:
            assert not any(each[:GUARD])
            assert not any(each[-GUARD:])
        assert self.end.qp.rc is not None
        assert self.end.qp.rc.answers_len <= ANSWERS_MAX
        assert self.end.qp.state in (QpState.RTS, QpState.ERROR)
        ids = [each.wr_id for each in self.end.received]
        assert ids == sorted(set(ids))


def packets(draw: st.DrawFn, victim: Victim) -> bytes:
    """One that could be good, with fields from near the border of what is, and perhaps bits turned over."""
    path = victim.peer.qp.path
    own = victim.end.qp.path
    assert path is not None
    assert own is not None
    op = draw(_rc)
    size = draw(st.sampled_from([0, 1, 3, 4, 255, 256, 257, 600]))
    near = draw(st.integers(-3, 6))
    answers = op in (Op.ACK, Op.ATOMIC_ACK) or "RESPONSE" in op.name
    psn = after(own.send_psn if answers else path.send_psn, near)
    va = victim.open.va + draw(st.sampled_from([0, 0, 0, -1, 1, ROOM - 1, ROOM, -victim.open.va, 2**64 - 1]))
    key = draw(st.sampled_from([victim.open.rkey, victim.open.rkey, victim.open.rkey ^ 1, 0, 2**32 - 1]))
    length = draw(st.sampled_from([size, size, 0, ROOM, ROOM + 1, 512, 2**31, 2**32 - 1]))
    headers: tuple[Extension, ...] = tuple(
        {
            Reth: Reth(va % 2**64, key, length),
            Aeth: Aeth.of(draw(st.sampled_from([0x1F, 0, 0x20, 0x2C, 0x60, 0x61, 0x62, 0x63, 0x7F, 0x40, 0xFF])), 3),
            ImmDt: ImmDt(b"abcd"),
            Ieth: Ieth(key),
        }.get(kind)
        or kind(*(0 for _ in kind.__slots__))
        for kind in EXTENSIONS.get(op, ())
    )
    bth = Bth(op, victim.end.qp.number, psn, draw(st.booleans()), draw(st.booleans()), -size % 4)
    raw = bytearray(Packet(bth, headers, b"\xee" * size).encode())
    for at in draw(st.lists(st.integers(0, len(raw) - 1), max_size=2)) if draw(st.integers(0, 9)) == 0 else ():
        raw[at] ^= draw(st.integers(1, 255))
    return bytes(raw)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_device_takes_any_packet(data: st.DataObject) -> None:
    victim = Victim(data.draw(st.integers(0, 5)))
    made = st.composite(packets)
    for _ in range(data.draw(st.integers(1, 25))):
        victim.say(data.draw(made(victim)))
        victim.check()
    until = victim.wire.now + 60.0  # more than all retries take
    while victim.wire.step(until):
        pass
    victim.check()
    assert victim.end.qp.state is QpState.ERROR or not victim.end.qp.sends_outstanding


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=12, max_size=80), st.booleans())
def test_a_device_takes_any_datagram(payload: bytes, sealed: bool) -> None:
    wire, active, passive = connected()
    payload = seal(payload, known_address(LEFT), known_address(RIGHT)) if sealed else payload
    passive.device.handle_datagram(LEFT, 4791, payload, wire.now)
    wire.run()
    assert (active.kinds, passive.kinds) == (["Established"], ["Established"])


def test_a_flood_of_gaps_and_repetitions_costs_little() -> None:
    victim = Victim(1)
    path = victim.peer.qp.path
    assert path is not None
    number = victim.end.qp.number
    for step in range(3000):
        psn = after(path.send_psn, 100 + step if step % 2 else -step)
        packet = Packet(Bth(Op.SEND_ONLY, number, psn, ack_req=True), (), b"word")
        raw = seal(packet.encode(), known_address(LEFT), known_address(RIGHT))
        victim.end.device.handle_datagram(LEFT, 4791, raw, victim.wire.now)  # and nothing may leave meanwhile
    assert victim.end.qp.rc is not None
    assert victim.end.qp.rc.answers_len <= 3
    victim.check()


def test_reads_of_a_greedy_peer_are_bounded() -> None:
    """Who asks for more than the depth that was agreed loses the oldest answers."""
    victim = Victim(2)
    path = victim.peer.qp.path
    assert path is not None
    for step in range(200):
        read = Packet(
            Bth(Op.READ_REQUEST, victim.end.qp.number, after(path.send_psn, 3 * step)),
            (Reth(victim.open.va, victim.open.rkey, ROOM),),
        )
        raw = seal(read.encode(), known_address(LEFT), known_address(RIGHT))
        victim.end.device.handle_datagram(LEFT, 4791, raw, victim.wire.now)
    assert victim.end.qp.rc is not None
    assert victim.end.qp.rc.answers_len == 2


def test_connection_requests_of_a_stranger_are_bounded() -> None:
    wire, _, passive = connected()
    passive.device.cm.listen(77, lambda _: None, backlog=8)
    for number in range(1, 3000):
        say(wire, request(local_comm_id=number, service_id=77, qpn=number), transaction_id=number)
        wire.run()
    manager = passive.device.cm
    assert len(manager.requests) == 8
    assert len(manager._over) <= limits.ROCE_ANSWERED_MAX
