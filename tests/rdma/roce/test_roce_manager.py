"""The connection manager of the software HCA: what is said in which case, message by message."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hca_ends import LEFT, RIGHT, SERVICE, HcaEnd, ask, connected, ends
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.errors import Misuse, PeerViolation
from sidestep.rdma.cm import CmKind, CmState, ConnectionRequest, Disconnected, Rejected, Unreachable
from sidestep.rdma.roce import ip_cm
from sidestep.rdma.roce.datagram import known_address, seal
from sidestep.rdma.roce.mad import Apr, CmMad, Drep, Dreq, Lap, Mad, Mra, Rej, Rep, Req, Rtu, gid
from sidestep.rdma.roce.manager import REJECT_GID, REJECT_MTU, REJECT_STALE, REJECT_TRANSPORT
from sidestep.rdma.roce.packet import QKEY_GSI, QP_GSI, Bth, Deth, Op, Packet
from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.wire import Wire
from sidestep.rdma.soft.handshake import TRANSITIONS

OTHER = "fd00::3"  # whoever is there by hand


class Ear:
    """Hears all messages of connection managers, and loses what it is told to."""

    def __init__(self, wire: Wire) -> None:
        self.heard: list[tuple[str, Mad]] = []
        self.lost: list[type[CmMad]] = []
        wire.faults.lose = self.hear

    def hear(self, target: str, payload: bytes) -> bool:
        packet = Packet.decode(memoryview(payload)[:-4])
        try:
            mad = Mad.decode(packet.payload)
        except PeerViolation:
            return False
        self.heard.append((target, mad))
        if type(mad.message) in self.lost:
            self.lost.remove(type(mad.message))
            return True
        return False

    def to(self, target: str) -> list[CmMad]:
        return [mad.message for to, mad in self.heard if to == target]


def say(wire: Wire, message: CmMad, *, source: str = OTHER, target: str = RIGHT, transaction_id: int = 7) -> None:
    """A message, put on the wire by hand."""
    packet = Packet(Bth(Op.UD_SEND_ONLY, QP_GSI, 1), (Deth(QKEY_GSI, QP_GSI),), Mad(transaction_id, message).encode())
    wire.inject(source, target, seal(packet.encode(), known_address(source), known_address(target)))


def request(**changes: object) -> Req:
    fields: dict[str, object] = {
        "local_comm_id": 0x77, "service_id": SERVICE, "qpn": 0x99, "starting_psn": 5, "ca_guid": 3, "cm_retries": 3,
        "local_gid": gid(known_address(OTHER)), "remote_gid": gid(known_address(RIGHT)),
    }  # fmt: skip
    return Req(**(fields | changes))  # type: ignore[arg-type]


def asked(seed: int = 1) -> tuple[Wire, HcaEnd, HcaEnd, Ear]:
    wire = Wire(Random(seed))
    active, passive = ends(wire)
    return wire, active, passive, Ear(wire)


def rest(wire: Wire, seconds: float = 60.0) -> None:
    until = wire.now + seconds
    while wire.step(until):
        pass
    wire.now = until


# ---- the handshake ----


@pytest.mark.spec("IBTA 12.7.22, 12.9.7")
def test_the_handshake() -> None:
    wire, active, passive, ear = asked()
    ask(active)
    wire.run()
    assert [type(each) for each in ear.to(RIGHT)] == [Req, Rtu]
    assert [type(each) for each in ear.to(LEFT)] == [Rep]
    req, rep = ear.to(RIGHT)[0], ear.to(LEFT)[0]
    assert isinstance(req, Req)
    assert isinstance(rep, Rep)
    assert active.qp.path is not None
    assert passive.qp.path is not None
    # Who sends the number is who gets packets that begin with it.
    assert (active.qp.path.send_psn, active.qp.path.receive_psn) == (rep.starting_psn, req.starting_psn)
    assert (passive.qp.path.send_psn, passive.qp.path.receive_psn) == (req.starting_psn, rep.starting_psn)
    assert (active.qp.path.remote_qp, passive.qp.path.remote_qp) == (passive.qp.number, active.qp.number)
    assert len({mad.transaction_id for _, mad in ear.heard}) == 1


@pytest.mark.parametrize("lost", [[Req], [Rep], [Rtu], [Req, Rep, Rtu], [Req, Req, Rep, Rep, Rtu, Rtu]])
def test_any_message_may_be_lost(lost: list[type[CmMad]]) -> None:
    wire, active, passive, ear = asked()
    ear.lost = list(lost)
    ask(active)
    rest(wire)
    assert (active.kinds, passive.kinds) == (["Established"], ["Established"])


@pytest.mark.parametrize("lost", [[Dreq], [Drep], [Dreq, Drep, Drep]])
def test_an_end_may_be_lost(lost: list[type[CmMad]]) -> None:
    wire, active, passive = connected()
    ear = Ear(wire)
    ear.lost = list(lost)
    assert active.connection is not None
    active.connection.disconnect()
    rest(wire)
    assert [each for each in active.told if isinstance(each, Disconnected)] == [Disconnected(by_remote=False)]
    assert [each for each in passive.told if isinstance(each, Disconnected)] == [Disconnected(by_remote=True)]


def test_nobody_is_there() -> None:
    wire, active, _, ear = asked()
    active.connection = active.device.cm.connect(OTHER, SERVICE, active.qp, b"", active.on_cm)
    rest(wire)
    assert active.told == [Unreachable()]
    assert len(ear.to(OTHER)) == 1 + RoceSettings().cm_retries


@pytest.mark.spec("IBTA 12.6.6")
def test_patience_is_asked_for_and_given_once() -> None:
    wire, active, passive, ear = asked()
    requests: list[ConnectionRequest] = []
    passive.device.cm.listen(9, requests.append)
    active.connection = active.device.cm.connect(RIGHT, 9, active.qp, b"", active.on_cm)
    rest(wire, 2.0)
    assert [type(each) for each in ear.to(LEFT)] == [Mra]
    requests[0].accept(passive.qp, b"", passive.on_cm)
    rest(wire)
    assert len(requests) == 1
    assert (active.kinds, passive.kinds) == (["Established"], ["Established"])
    # A peer that asks for patience again and again does not get it.
    side = HcaEnd.of(active.device)
    side.connection = active.device.cm.connect(OTHER, SERVICE, side.qp, b"", side.on_cm)
    wire.run()
    req = ear.to(OTHER)[-1]
    assert isinstance(req, Req)
    for _ in range(40):
        say(wire, Mra(5, req.local_comm_id, 0, 31), target=LEFT)
        rest(wire, 5.0)
    assert side.told == [Unreachable()]


def test_an_attempt_that_is_withdrawn() -> None:
    wire, active, passive, ear = asked()
    requests: list[ConnectionRequest] = []
    listener = passive.device.cm.listen(9, requests.append)
    active.connection = active.device.cm.connect(RIGHT, 9, active.qp, b"", active.on_cm)
    wire.run()
    active.connection.disconnect()
    wire.run()
    rej = ear.to(RIGHT)[-1]
    assert isinstance(rej, Rej)
    assert (rej.reason, rej.ari_guid, listener.pending) == (4, active.device.guid, 0)


def test_the_user_ends_it_while_he_is_asked_about_the_reply() -> None:
    wire, active, passive, _ = asked()

    def says_yes(_reply: bytes) -> bool:
        assert active.connection is not None
        active.connection.disconnect()
        return True

    active.connection = active.device.cm.connect(
        RIGHT, SERVICE, active.qp, b"", active.on_cm, check_reply=says_yes
    )  # fmt: skip
    rest(wire)
    assert active.told == []
    assert [each.reason for each in passive.told if isinstance(each, Rejected)] == [4]
    assert not active.device.cm.connections


# ---- what is checked before a user sees it ----


@pytest.mark.spec("IBTA 12.6.7.2")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"service_id": 1}, 8),
        ({"local_gid": gid(known_address(LEFT))}, REJECT_GID),
        ({"remote_gid": bytes(16)}, REJECT_GID),
        ({"mtu_code": 5}, REJECT_MTU),
        ({"mtu_code": 0}, REJECT_MTU),
        ({"transport": 1}, REJECT_TRANSPORT),
        ({"extended_transport": 1}, REJECT_TRANSPORT),
        ({"service_id": ip_cm.TCP_SERVICE + 1, "private_data": b"\x10"}, 28),
        ({"service_id": ip_cm.TCP_SERVICE + 1, "private_data": b"\0\x40"}, 8),
    ],
)
def test_requests_that_cannot_be(changes: dict[str, object], reason: int) -> None:
    wire, _, passive, ear = asked()
    for _ in range(2):  # the answer may have been lost
        say(wire, request(**changes))
        wire.run()
    rejections = ear.to(OTHER)
    assert [each.reason for each in rejections if isinstance(each, Rej)] == [reason] * 2
    assert passive.told == []
    assert passive.connection is None


def test_a_peer_that_has_started_anew() -> None:
    """Its old connection ends, and the next request is accepted."""
    wire, active, passive, ear = asked()
    say(wire, request())
    wire.run()
    rep = ear.to(OTHER)[0]
    assert isinstance(rep, Rep)
    say(wire, Rtu(0x77, rep.local_comm_id))
    wire.run()
    assert passive.kinds == ["Established"]
    say(wire, request(local_comm_id=0x78), transaction_id=8)
    wire.run()
    told = [each.reason for each in ear.to(OTHER) if isinstance(each, Rej)]
    assert told == [REJECT_STALE]
    dreq = ear.to(OTHER)[-1] if isinstance(ear.to(OTHER)[-1], Dreq) else ear.to(OTHER)[-2]
    assert isinstance(dreq, Dreq)
    say(wire, Drep(0x77, rep.local_comm_id))
    rest(wire, 1.0)
    assert passive.kinds == ["Established", "Disconnected", "TimewaitExit"]
    del active


@pytest.mark.spec("IBTA 12.8")
def test_alternate_paths_are_not_supported() -> None:
    wire, active, passive = connected()
    ear = Ear(wire)
    assert active.connection is not None
    assert passive.connection is not None
    say(wire, Lap(active.connection.local_id, passive.connection.local_id), source=LEFT)
    say(wire, Lap(1, 2), source=LEFT)
    wire.run()
    assert sorted(each.status for each in ear.to(LEFT) if isinstance(each, Apr)) == [1, 2]
    assert (active.kinds, passive.kinds) == (["Established"], ["Established"])


@pytest.mark.spec("IBTA 12.6.9")
def test_a_disconnect_names_the_queue_pair() -> None:
    wire, active, passive = connected()
    assert active.connection is not None
    assert passive.connection is not None
    ids = active.connection.local_id, passive.connection.local_id
    say(wire, Dreq(*ids, passive.qp.number ^ 1), source=LEFT)
    wire.run()
    assert passive.kinds == ["Established"]
    say(wire, Dreq(*ids, passive.qp.number), source=OTHER)  # somebody else
    wire.run()
    assert passive.kinds == ["Established"]
    ear = Ear(wire)
    say(wire, Dreq(*ids, passive.qp.number), source=LEFT, transaction_id=99)
    wire.run()
    assert [(type(mad.message), mad.transaction_id) for _, mad in ear.heard][-1] == (Drep, 99)
    assert "Disconnected" in passive.kinds


def test_strangers_come_to_rest() -> None:
    """IBTA 12.9.8.3: a REP that nobody waits for is rejected, a DREQ is agreed to, anything else is silence."""
    wire, _, _, ear = asked()
    for message in (Rep(5, 6, 7, 8), Dreq(5, 6, 7), Rtu(5, 6), Drep(5, 6), Rej(5, 6, 28), Mra(5, 6), Apr(5, 6)):
        say(wire, message)
    wire.run()
    answers = sorted(type(each).__name__ for each in ear.to(OTHER))
    assert answers == ["Drep", "Rej"]


# ---- addresses of rdma_cm ----


def test_the_header_of_rdma_cm() -> None:
    wire, active, passive, ear = asked()
    requests: list[ConnectionRequest] = []
    service = ip_cm.TCP_SERVICE + 7174
    passive.device.cm.listen(service, requests.append)
    connect = active.device.cm.connect
    with pytest.raises(Misuse):
        connect(RIGHT, service, active.qp, bytes(57), active.on_cm)
    connect(RIGHT, service, active.qp, b"hello", active.on_cm)
    wire.run()
    assert requests[0].private_data == b"hello".ljust(56, b"\0")
    req = ear.to(RIGHT)[0]
    assert req.private_data[:2] == b"\0\x60"
    assert req.private_data[4:36] == known_address(LEFT).packed + known_address(RIGHT).packed


@pytest.mark.parametrize("address", ["localhost", "", "10.0.0.1"])
def test_addresses_that_cannot_be(address: str) -> None:
    wire, active, _, _ = asked()
    with pytest.raises(Misuse):
        active.device.cm.connect(address, 1, active.qp, b"", active.on_cm)
    with pytest.raises(Misuse):
        wire.device("nowhere")


# ---- whatever comes ----

_messages = st.sampled_from([Req, Rep, Rtu, Rej, Dreq, Drep, Mra, Lap, Apr])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    state=st.sampled_from(["asked", "accepted", "established", "leaving", "over"]),
    said=st.lists(st.tuples(_messages, st.integers(0, 2), st.integers(0, 2), st.booleans(), st.integers(0, 31))),
)
def test_any_message_in_any_state(state: str, said: list[tuple[type[CmMad], int, int, bool, int]]) -> None:
    """No exception, and in the end each side was told what may be told."""
    wire, active, passive, ear = asked()
    if state == "accepted":
        ear.lost = [Rtu, Rtu, Rtu]
    ask(active)
    if state != "asked":
        rest(wire, 0.01)
    assert active.connection is not None
    if state in ("leaving", "over"):
        ear.lost = [Dreq] if state == "leaving" else []
        active.connection.disconnect()
        rest(wire, 0.01 if state == "leaving" else 0.2)
    ids = [0, active.connection.local_id, passive.connection.local_id if passive.connection is not None else 5]
    for kind, local, remote, from_left, number in said:
        target = RIGHT if from_left else LEFT
        message = _made(kind, ids[local], ids[remote], number, active.qp.number if not from_left else passive.qp.number)
        say(wire, message, source=LEFT if from_left else RIGHT, target=target)
        rest(wire, 1e-5)
    rest(wire, 200.0)
    for end in (active, passive):
        kinds = end.kinds
        assert kinds in (
            [], ["Rejected"], ["Unreachable"], ["Established"], ["Established", "Disconnected", "TimewaitExit"],
        )  # fmt: skip
    assert not active.device.cm.requests


def _made(kind: type[CmMad], local: int, remote: int, number: int, qpn: int) -> CmMad:
    if kind is Req:
        gids = {"local_gid": gid(known_address(LEFT)), "remote_gid": gid(known_address(RIGHT))}
        return replace(request(**gids), local_comm_id=local, qpn=number)
    if kind is Rep:
        return Rep(local, remote, number, number)
    if kind is Dreq:
        return Dreq(local, remote, qpn)
    if kind is Rej:
        return Rej(local, remote, number)
    return kind(local, remote)  # type: ignore[call-arg]


def test_messages_that_are_none() -> None:
    wire, _, passive, _ = asked()
    good = Mad(1, request()).encode()
    for payload, qkey in ((good, 5), (good[:-4], QKEY_GSI), (b"\2" + good[1:], QKEY_GSI), (bytes(256), QKEY_GSI)):
        packet = Packet(Bth(Op.UD_SEND_ONLY, QP_GSI, 1), (Deth(qkey, QP_GSI),), payload)
        wire.inject(OTHER, RIGHT, seal(packet.encode(), known_address(OTHER), known_address(RIGHT)))
    not_datagram = Packet(Bth(Op.SEND_ONLY, QP_GSI, 1), (), good)
    wire.inject(OTHER, RIGHT, seal(not_datagram.encode(), known_address(OTHER), known_address(RIGHT)))
    wire.run()
    dropped = {name for name in passive.device.counters() if name.startswith("mad_dropped")}
    assert "mad_dropped{not_general_services}" in dropped
    assert "mad_dropped{mad_length}" in dropped
    assert "mad_dropped{mad_class}" in dropped


def test_the_table_is_whole() -> None:
    """What is not in it is for nobody."""
    open_states = set(CmState) - {CmState.CLOSED, CmState.JOINED}  # which the control link alone knows
    assert {state for state, _ in TRANSITIONS} == open_states
    assert {kind for _, kind in TRANSITIONS} == set(CmKind) - {CmKind.REQ}


def test_an_address_may_be_written_in_many_ways() -> None:
    wire, active, passive, _ = asked()
    active.connection = active.device.cm.connect("FD00:0::0002", SERVICE, active.qp, b"", active.on_cm)
    wire.run()
    assert (active.kinds, passive.kinds) == (["Established"], ["Established"])
    assert active.connection.remote_address == RIGHT


def test_a_refused_reply_is_refused_again_with_the_same_reason() -> None:
    wire, active, passive, ear = asked()
    ear.lost = [Rej, Rej]
    active.connection = active.device.cm.connect(
        RIGHT, SERVICE, active.qp, b"", active.on_cm, check_reply=lambda reply: False
    )
    rest(wire)
    assert [each.reason for each in active.told + passive.told if isinstance(each, Rejected)] == [28, 28]
