"""MPA start-up: frames that siw and others send, what breaks a rule, every timer, every state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from iwarp_vectors import frames
from mpa_oracle import Deframer
from start_talk import RTR_SEGMENTS, accepting, drained, pieces, rejecting, talk

from sidestep import limits
from sidestep.errors import Misuse, PeerViolation
from sidestep.rdma.iwarp.ddp import Segment
from sidestep.rdma.iwarp.mpa import fpdu
from sidestep.rdma.iwarp.startup import frame as start_frame
from sidestep.rdma.iwarp.startup import negotiation as startup
from sidestep.rdma.iwarp.startup.frame import NO_RTR, Enhanced, MpaRole, Rtr, StartFrame
from sidestep.rdma.iwarp.startup.negotiation import Initiator, Responder
from sidestep.rdma.iwarp.startup.terms import (
    OVER,
    TRANSITIONS,
    Agreed,
    Asked,
    Failed,
    MpaCause,
    MpaEvent,
    MpaSettings,
    MpaState,
    MpaStimulus,
    ReadDepths,
    Refused,
)
from sidestep.rdma.iwarp.terminate import Code, Terminate, told_by

F = frames()
E = TypeVar("E", bound=MpaEvent)
PLAIN = MpaSettings(revision=1, enhanced=False)
PEERS = MpaSettings(peer_to_peer=True)
T05 = replace(PEERS, depths=ReadDepths(ird=16, ord=8))


def only(events: list[MpaEvent], kind: type[E]) -> E:
    """The single event, which is of this kind."""
    (event,) = events
    assert isinstance(event, kind)
    return event


def request(frame: StartFrame, asked: MpaSettings | None = None) -> tuple[Responder, list[MpaEvent]]:
    """A responder that has got it, and what it said."""
    responder = Responder(asked or MpaSettings(), now=0.0)
    responder.handle_bytes(frame.encode(), now=0.0)
    return responder, drained(responder)


def reply(frame: StartFrame | bytes, asking: MpaSettings | None = None) -> tuple[Initiator, list[MpaEvent]]:
    """An initiator that has got it, and what it said."""
    initiator = Initiator(asking or MpaSettings(), now=0.0)
    assert initiator.poll_send()
    initiator.handle_bytes(frame if isinstance(frame, bytes) else frame.encode())
    return initiator, drained(initiator)


def enhanced(
    role: MpaRole, told: Enhanced, private_data: bytes = b"", *, crc: bool = True, rejected: bool = False
) -> StartFrame:
    """A frame of revision 2 with S."""
    return StartFrame(role, told.encode() + private_data, False, crc, rejected, True, 2)


# ---- frames that were agreed on ----


@pytest.mark.spec("RFC 5044 7.1.1")
def test_revision_1() -> None:
    """T01 and T02; T03 asks for markers, T04 rejects."""
    done = talk(PLAIN, MpaSettings())
    assert done.wire == [F["T01"], F["T02"]]
    asking = Initiator(replace(PLAIN, markers=True), b"hello-pd", now=0.0)
    assert asking.poll_send() == F["T03"]
    responder = Responder(MpaSettings(), now=0.0)
    responder.handle_bytes(F["T03"], now=0.0)
    asked = only(drained(responder), Asked)
    assert (asked.revision, asked.private_data, asked.remote_ird, asked.remote_ord) == (1, b"hello-pd", None, None)
    responder.reject(b"busy")
    assert responder.poll_send() == F["T04"]
    asking.handle_bytes(F["T04"])
    assert only(drained(asking), Refused) == Refused(private_data=b"busy", remote_ird=None, remote_ord=None)
    assert (asking.state, responder.state) == (MpaState.REJECTED, MpaState.REJECTED)


@pytest.mark.spec("RFC 6581 9")
def test_revision_2() -> None:
    """T05 and T06, and T08 as the RTR."""
    taking = MpaSettings(rtr=Rtr.WRITE, depths=ReadDepths(ird=8, ord=16))
    done = talk(T05, taking, private_data=b"app1")
    assert done.wire == [F["T05"], F["T06"], F["T08"]]
    agreed = only(done.told, Agreed)
    assert (agreed.ird, agreed.ord, agreed.remote_ird, agreed.remote_ord) == (16, 8, 8, 16)
    assert (agreed.rtr, agreed.peer_to_peer) == (Rtr.WRITE, True)


def test_rtr_messages() -> None:
    """T08, T09 and T20 are what is sent."""
    for name, rtr in (("T08", Rtr.WRITE), ("T09", Rtr.READ), ("T20", Rtr.SEND)):
        (payload,) = Deframer(markers=False).feed(F[name])
        assert Segment.decode(payload) == RTR_SEGMENTS[rtr]
        assert fpdu(RTR_SEGMENTS[rtr].encode(), 0) == F[name]


# ---- what other ends say ----


def test_siw_connects() -> None:
    """T07: its defaults. The Reply switches the checksum on, which it looks for there only."""
    responder = Responder(MpaSettings(), now=0.0)
    responder.handle_bytes(F["T07"], now=0.0)
    asked = only(drained(responder), Asked)
    assert (asked.remote_ird, asked.remote_ord, asked.peer_to_peer) == (1, 1, False)
    responder.accept(b"pd", now=0.0)
    agreed = only(drained(responder), Agreed)
    assert (agreed.crc, agreed.markers_in, agreed.markers_out) == (True, False, False)
    assert (agreed.ird, agreed.ord, agreed.rtr) == (16, 1, NO_RTR)
    assert responder.poll_send() == enhanced(MpaRole.REPLY, Enhanced(16, 1), b"pd").encode()


def test_the_checksum_of_a_request_is_repeated() -> None:
    """Also by an end that does not want it."""
    responder, _ = request(StartFrame(MpaRole.REQUEST), MpaSettings(crc=False))
    responder.accept(now=0.0)
    assert only(drained(responder), Agreed).crc
    assert responder.poll_send() == F["T02"]


@pytest.mark.parametrize("peer_to_peer", [False, True])
def test_siw_answers(peer_to_peer: bool) -> None:
    """It repeats the Request, and in peer-to-peer names one RTR."""
    initiator = Initiator(replace(MpaSettings(), peer_to_peer=peer_to_peer), b"hello", now=0.0)
    asked, _ = StartFrame.decode(initiator.poll_send()) or (None, 0)
    assert asked is not None
    told = Enhanced(16, 16, peer_to_peer, Rtr.WRITE if peer_to_peer else NO_RTR)
    initiator.handle_bytes(replace(asked, role=MpaRole.REPLY, private_data=told.encode() + b"ok").encode())
    agreed = only(drained(initiator), Agreed)
    assert (agreed.revision, agreed.crc, agreed.private_data, agreed.ird, agreed.ord) == (2, True, b"ok", 16, 16)
    assert agreed.rtr == (Rtr.WRITE if peer_to_peer else NO_RTR)


def test_siw_as_a_peer() -> None:
    """It offers Write and Read, and sends the Write if the Reply has both."""
    responder, events = request(enhanced(MpaRole.REQUEST, Enhanced(1, 1, True, Rtr.WRITE | Rtr.READ), crc=False))
    assert only(events, Asked).rtr == Rtr.WRITE | Rtr.READ
    responder.accept(now=0.0)
    assert only(drained(responder), Agreed).rtr == Rtr.WRITE | Rtr.READ
    found = StartFrame.decode(responder.poll_send())
    assert found is not None
    assert found[0].enhanced_data == Enhanced(16, 1, True, Rtr.WRITE | Rtr.READ)


def test_hardware_connects() -> None:
    """Always as a peer, read depths perhaps not negotiated, markers perhaps wanted; the RTR may be a Read."""
    frame = replace(
        enhanced(MpaRole.REQUEST, Enhanced(None, None, True, Rtr.WRITE | Rtr.READ), bytes(508)), markers=True
    )  # fmt: skip
    responder, events = request(frame)
    assert only(events, Asked).private_data == bytes(508)
    responder.accept(now=0.0)
    agreed = only(drained(responder), Agreed)
    assert (agreed.ird, agreed.ord, agreed.markers_out, agreed.markers_in) == (16, 16, True, False)
    found = StartFrame.decode(responder.poll_send())
    assert found is not None
    assert found[0].enhanced_data == Enhanced(None, None, True, Rtr.WRITE | Rtr.READ)


def test_a_read_as_rtr_occupies_a_slot() -> None:
    """Even if the initiator wants to make no others (RFC 6581 9.1); siw as an initiator raises its ORD as well."""
    frame = enhanced(MpaRole.REQUEST, Enhanced(0, 0, True, Rtr.READ))
    responder, _ = request(frame, MpaSettings(depths=ReadDepths(ird=0, ord=0)))
    responder.accept(now=0.0)
    assert only(drained(responder), Agreed).ird == 1
    asking = replace(PEERS, rtr=Rtr.READ, depths=ReadDepths(ird=0, ord=0))
    assert only(talk(asking, MpaSettings(depths=ReadDepths(ird=0, ord=0))).told, Agreed).ord == 1


def test_peer_to_peer_that_was_not_asked_for() -> None:
    """Some hardware always says it in its Reply."""
    _, events = reply(enhanced(MpaRole.REPLY, Enhanced(4, 4, True, Rtr.WRITE)))
    agreed = only(events, Agreed)
    assert (agreed.peer_to_peer, agreed.rtr) == (False, NO_RTR)


def test_frames_that_come_with_the_reply() -> None:
    """siw sends them, against the rule that the initiator is first; none is lost."""
    behind = F["T11"] + F["T12"][:5]
    _, events = reply(enhanced(MpaRole.REPLY, Enhanced(1, 1)).encode() + behind)
    assert only(events, Agreed).leftover == behind


@pytest.mark.parametrize("private_data", [b"", b"\0\1", bytes(4)])
def test_siw_rejects(private_data: bytes) -> None:
    """With S, but not always with what belongs to it."""
    frame = StartFrame(MpaRole.REPLY, private_data, False, True, True, True, 2)
    _, events = reply(frame)
    depth = 0 if len(private_data) == 4 else None
    assert only(events, Refused) == Refused(private_data=b"", remote_ird=depth, remote_ord=depth)


# ---- private data ----


@pytest.mark.parametrize(("asking", "most"), [(PLAIN, 512), (MpaSettings(), 508), (PEERS, 508)])
@pytest.mark.parametrize("decide", [accepting, rejecting])
def test_private_data(asking: MpaSettings, most: int, decide: Callable[[bytes], Callable[[Responder], None]]) -> None:
    """As much as fits goes both ways; one byte more is refused, and changes nothing."""
    there, back = bytes(range(256)) * 2, bytes(reversed(range(256))) * 2
    done = talk(asking, MpaSettings(), decide(back[:most]), there[:most])
    asked = done.heard[0]
    assert isinstance(asked, Asked)
    assert asked.private_data == there[:most]
    outcome = done.told[0]
    assert isinstance(outcome, Agreed | Refused)
    assert outcome.private_data == back[:most]
    with pytest.raises(Misuse):
        Initiator(asking, bytes(most + 1), now=0.0)
    responder, _ = request(StartFrame.decode(done.wire[0])[0])  # type: ignore[index]
    assert responder.private_data_max == most
    with pytest.raises(Misuse):
        decide(bytes(most + 1))(responder)
    decide(b"")(responder)
    assert responder.poll_send()


# ---- what breaks a rule ----

REQUEST_VIOLATIONS = {
    "mpa_key": b"GET / HTTP/1.1\r\n",
    "mpa_role": F["T02"],
    "mpa_private_data": F["T01"][:18] + b"\2\1",
    "mpa_revision": F["T01"][:17] + b"\3\0\0",
    "mpa_early": F["T01"] + b"\0",
    "mpa_enhanced": StartFrame(MpaRole.REQUEST, bytes(3), enhanced=True, revision=2).encode(),
}
REPLY_VIOLATIONS = {
    "mpa_key": b"MPA ID Rex",
    "mpa_role": F["T01"],
    "mpa_private_data": F["T02"][:18] + b"\2\1",
    "mpa_revision": F["T02"][:17] + b"\3\0\0",
    "mpa_enhanced": StartFrame(MpaRole.REPLY, bytes(3), enhanced=True, revision=2).encode(),
}


@pytest.mark.parametrize("size", [1, None])
@pytest.mark.parametrize("rule", REQUEST_VIOLATIONS)
def test_bad_requests(rule: str, size: int | None) -> None:
    """The connection is closed at once, without a word; what still comes is dropped."""
    responder = Responder(MpaSettings(), now=0.0)
    for piece in pieces(REQUEST_VIOLATIONS[rule], size):
        responder.handle_bytes(piece, now=0.0)
    events = drained(responder)
    failed = events[-1]
    assert isinstance(failed, Failed)
    assert (failed.cause, failed.rule, failed.code) == (MpaCause.VIOLATION, rule, Code.MPA_START_FRAME)
    assert not [event for event in events[:-1] if not isinstance(event, Asked)]
    assert (responder.state, responder.poll_send(), responder.next_deadline()) == (MpaState.CLOSED, b"", None)
    responder.handle_bytes(F["T01"], now=1.0)
    responder.handle_closed()
    responder.handle_timeout(now=99.0)
    assert not drained(responder)


@pytest.mark.parametrize("size", [1, None])
@pytest.mark.parametrize("rule", REPLY_VIOLATIONS)
def test_bad_replies(rule: str, size: int | None) -> None:
    initiator = Initiator(MpaSettings(), now=0.0)
    assert initiator.poll_send()
    for piece in pieces(REPLY_VIOLATIONS[rule], size):
        initiator.handle_bytes(piece)
    failed = only(drained(initiator), Failed)
    assert (failed.cause, failed.rule, failed.code) == (MpaCause.VIOLATION, rule, Code.MPA_START_FRAME)
    assert (initiator.state, initiator.poll_send(), initiator.next_deadline()) == (MpaState.CLOSED, b"", None)
    initiator.handle_bytes(F["T02"])
    initiator.handle_closed()
    initiator.handle_timeout(now=99.0)
    assert not drained(initiator)


def test_there_is_a_case_for_every_rule() -> None:
    rules = set(startup.RULES) | set(start_frame.RULES)
    assert set(REQUEST_VIOLATIONS) | set(REPLY_VIOLATIONS) == rules


def test_a_wrong_key_is_seen_early() -> None:
    """With the byte that tells, not with the sixteenth."""
    responder, initiator = Responder(MpaSettings(), now=0.0), Initiator(MpaSettings(), now=0.0)
    responder.handle_bytes(F["T02"][:9], now=0.0)
    initiator.handle_bytes(F["T01"][:9])
    assert not drained(responder) + drained(initiator)
    responder.handle_bytes(F["T02"][9:10], now=0.0)
    initiator.handle_bytes(F["T01"][9:10])
    assert only(drained(responder), Failed).rule == only(drained(initiator), Failed).rule == "mpa_role"


def test_bytes_before_the_reply() -> None:
    """Nothing may follow a Request, not even while our user decides."""
    responder, _ = request(StartFrame(MpaRole.REQUEST))
    responder.handle_bytes(b"", now=0.0)
    responder.handle_bytes(b"\0", now=0.0)
    assert only(drained(responder), Failed).rule == "mpa_early"
    responder.accept(now=0.0)  # too late: it does nothing
    responder.reject()
    assert (responder.poll_send(), drained(responder)) == (b"", [])


@pytest.mark.spec("RFC 5044 C")
def test_an_rdma_consortium_initiator() -> None:
    """Its revision 0 is answered by 1, then the connection is closed."""
    responder, events = request(StartFrame(MpaRole.REQUEST, b"data", markers=True, revision=0))
    assert only(events, Failed).rule == "mpa_revision"
    found = StartFrame.decode(responder.poll_send())
    assert found is not None
    assert (found[0].revision, found[0].rejected, found[0].private_data) == (1, True, b"")


def test_an_rdma_consortium_responder() -> None:
    _, events = reply(StartFrame(MpaRole.REPLY, markers=True, revision=0))
    failed = only(events, Failed)
    assert failed.rule == "mpa_revision"


# ---- ends of different age ----


@pytest.mark.spec("RFC 6581 10")
def test_who_does_not_know_revision_2() -> None:
    """It closes; nothing comes of it."""
    done = talk(PEERS, MpaSettings(revision=1, enhanced=False))
    assert only(done.heard, Failed).rule == "mpa_revision"
    assert only(done.told, Failed).cause is MpaCause.ENDED
    for frame in (StartFrame(MpaRole.REPLY, b"old"), StartFrame(MpaRole.REPLY, revision=2)):
        _, events = reply(frame)
        assert only(events, Failed).rule == "mpa_enhanced"


@pytest.mark.parametrize(("asking", "answer"), [(1, 2), (2, 1), (2, 2)])
def test_revision_2_without_s_is_revision_1(asking: int, answer: int) -> None:
    _, events = reply(StartFrame(MpaRole.REPLY, b"x", revision=answer), MpaSettings(revision=asking, enhanced=False))
    agreed = only(events, Agreed)
    assert (agreed.revision, agreed.private_data, agreed.remote_ird) == (answer, b"x", None)


def test_s_in_revision_1_means_nothing() -> None:
    """It is a reserved bit there."""
    frame = bytearray(F["T03"])
    frame[16] |= 0x1F
    responder = Responder(MpaSettings(), now=0.0)
    responder.handle_bytes(bytes(frame), now=0.0)
    assert only(drained(responder), Asked).private_data == b"hello-pd"
    responder.accept(now=0.0)
    assert responder.poll_send()[16] == 0x40


# ---- how many reads ----


def told_of(asking: MpaSettings) -> Enhanced | None:
    """What a Request says."""
    found = StartFrame.decode(Initiator(asking, now=0.0).poll_send())
    assert found is not None
    return found[0].enhanced_data


def test_depths_that_are_not_negotiated() -> None:
    """0x3FFF: each end keeps its own, whatever the other says (RFC 6581 9.1)."""
    mute = ReadDepths(ird=5, ord=6, ird_announced=False, ord_announced=False)
    assert told_of(MpaSettings(depths=mute)) == Enhanced(None, None)
    done = talk(MpaSettings(depths=mute), MpaSettings(depths=ReadDepths(ird=2, ord=3)))
    assert done.wire[1][20:24] == bytes.fromhex("3fff3fff")
    agreed, (_, heard) = only(done.told, Agreed), done.heard
    assert isinstance(heard, Agreed)
    assert (agreed.ird, agreed.ord, heard.ird, heard.ord) == (5, 6, 2, 3)
    _, events = reply(enhanced(MpaRole.REPLY, Enhanced(128, 128)), MpaSettings(depths=mute))  # siw does not know 0x3FFF
    agreed = only(events, Agreed)
    assert (agreed.ird, agreed.ord, agreed.remote_ird, agreed.remote_ord) == (5, 6, 128, 128)


def test_one_of_two_is_not_negotiated() -> None:
    responder, _ = request(enhanced(MpaRole.REQUEST, Enhanced(None, 20)))
    responder.accept(now=0.0)
    agreed = only(drained(responder), Agreed)
    assert (agreed.ird, agreed.ord) == (20, 16)
    found = StartFrame.decode(responder.poll_send())
    assert found is not None
    assert found[0].enhanced_data == Enhanced(20, None)
    assert told_of(MpaSettings(depths=ReadDepths(ord_announced=False))) == Enhanced(16, None)


def test_a_responder_fits_its_own() -> None:
    """ORD to what is held, IRD to what is wanted, up to its limit."""
    for wanted, own in ((Enhanced(3, 5), (16, 3)), (Enhanced(99, 40), (40, 16)), (Enhanced(0, 9999), (128, 0))):
        responder, _ = request(enhanced(MpaRole.REQUEST, wanted))
        responder.accept(now=0.0)
        agreed = only(drained(responder), Agreed)
        assert (agreed.ird, agreed.ord) == own


def test_an_initiator_fits_its_own() -> None:
    for told, own in ((Enhanced(3, 5), (16, 3)), (Enhanced(99, 40), (40, 16)), (Enhanced(0, 128), (128, 0))):
        _, events = reply(enhanced(MpaRole.REPLY, told))
        agreed = only(events, Agreed)
        assert (agreed.ird, agreed.ord) == own


@pytest.mark.spec("RFC 6581 8")
@pytest.mark.parametrize("markers", [False, True])
def test_more_reads_than_an_initiator_can_hold(markers: bool) -> None:
    """Its only message is a Terminate 2/0/06, framed as agreed."""
    frame = replace(enhanced(MpaRole.REPLY, Enhanced(1, 129)), markers=markers)
    initiator, events = reply(frame)
    failed = only(events, Failed)
    assert (failed.cause, failed.code) == (MpaCause.READS, Code.MPA_START_IRD)
    assert initiator.poll_send() == fpdu(Terminate(Code.MPA_START_IRD).segment.encode(), 0, markers=markers)


def test_fewer_reads_than_an_initiator_needs() -> None:
    done = talk(MpaSettings(depths=ReadDepths(ord_min=4)), MpaSettings(depths=ReadDepths(ird=1, ird_max=3)))
    failed = only(done.told, Failed)
    assert (failed.cause, failed.code) == (MpaCause.READS, Code.MPA_START_CATASTROPHIC)
    assert done.first == [Terminate(Code.MPA_START_CATASTROPHIC).segment]


@pytest.mark.spec("RFC 6581 9.1")
def test_fewer_reads_than_a_responder_needs() -> None:
    """The Reply rejects, and says how many it would be."""
    done = talk(MpaSettings(depths=ReadDepths(ird=2)), MpaSettings(), accepting(b"x", ReadDepths(ord_min=4)))
    assert only(done.told, Refused) == Refused(private_data=b"", remote_ird=16, remote_ord=4)
    failed = done.heard[-1]
    assert isinstance(failed, Failed)
    assert (failed.cause, failed.code) == (MpaCause.READS, Code.MPA_START_IRD)


# ---- ready to receive ----


@pytest.mark.spec("RFC 6581 9.2")
def test_no_common_rtr() -> None:
    """The Reply names what the responder takes; the initiator terminates with T23."""
    done = talk(replace(PEERS, rtr=Rtr.SEND), MpaSettings())
    assert done.wire[1][20:24] == bytes.fromhex("8010c010")
    assert done.wire[2] == F["T23"]
    failed = only(done.told, Failed)
    assert (failed.cause, failed.code) == (MpaCause.NO_RTR, Code.MPA_START_RTR)
    assert [told_by(segment.payload)[1] for segment in done.first] == [
        "Terminate: MPA, error of the start-up or the stream: no matching RTR (2/0/07)"
    ]


@pytest.mark.parametrize(
    "told", [Enhanced(1, 1), Enhanced(1, 1, True), Enhanced(1, 1, False, Rtr.WRITE), Enhanced(0, 1, True, Rtr.READ)]
)
def test_replies_without_a_usable_rtr(told: Enhanced) -> None:
    """Not peer-to-peer; none named; named all the same; a Read, of which no slot is held."""
    initiator, events = reply(enhanced(MpaRole.REPLY, told), PEERS)
    assert only(events, Failed).code == Code.MPA_START_RTR
    assert initiator.poll_send() == F["T23"]


@pytest.mark.parametrize(
    ("named", "sent"), [(Rtr.READ | Rtr.WRITE | Rtr.SEND, Rtr.WRITE), (Rtr.READ | Rtr.SEND, Rtr.READ)]
)
def test_which_rtr_is_sent(named: Rtr, sent: Rtr) -> None:
    asking = replace(PEERS, rtr=Rtr.READ | Rtr.WRITE | Rtr.SEND)
    _, events = reply(enhanced(MpaRole.REPLY, Enhanced(1, 1, True, named)), asking)
    assert only(events, Agreed).rtr == sent


def test_a_terminate_without_a_checksum() -> None:
    """If neither end wanted one."""
    off = MpaSettings(peer_to_peer=True, rtr=Rtr.SEND, crc=False)
    assert talk(off, replace(MpaSettings(), crc=False)).wire[2] == F["T23"][:-4] + bytes(4)


def test_a_reply_names_what_both_can() -> None:
    """And not all that this end could take, though it may."""
    taking = MpaSettings(rtr=Rtr.WRITE | Rtr.READ | Rtr.SEND)
    responder, _ = request(enhanced(MpaRole.REQUEST, Enhanced(1, 1, True, Rtr.WRITE | Rtr.READ)), taking)
    responder.accept(now=0.0)
    assert only(drained(responder), Agreed).rtr == Rtr.WRITE | Rtr.READ
    responder, events = request(enhanced(MpaRole.REQUEST, Enhanced(1, 1, False, Rtr.WRITE)), taking)
    assert only(events, Asked).rtr == NO_RTR  # without A they mean nothing (RFC 6581 9.2)
    responder.accept(now=0.0)
    assert only(drained(responder), Agreed).rtr == NO_RTR
    assert responder.poll_send()[20:24] == bytes.fromhex("00100001")


def test_a_rejection_asks_for_nothing() -> None:
    """It has no M, as there will be no stream."""
    responder, _ = request(StartFrame(MpaRole.REQUEST), MpaSettings(markers=True))
    responder.reject()
    assert responder.poll_send()[16] == 0x60


def test_an_initiator_that_does_not_like_the_reply() -> None:
    """The other end is told, by what revision 2 has for that, or by what RDMAP has."""
    for asking, code in ((MpaSettings(), Code.MPA_START_CATASTROPHIC), (PLAIN, Code.RDMAP_CATASTROPHIC)):
        done = talk(asking, MpaSettings(markers=True))
        done.initiator.abandon("its private data are not good")
        terminate = done.initiator.poll_send()
        assert terminate == fpdu(Terminate(code).segment.encode(), 0, markers=True)
        failed = only(drained(done.initiator), Failed)
        assert (failed.cause, failed.code, failed.text) == (MpaCause.ABANDONED, code, "its private data are not good")
        with pytest.raises(Misuse):
            done.initiator.abandon("again")
    early = Initiator(MpaSettings(), now=0.0)
    early.poll_send()
    early.abandon("there is no more need")
    assert only(drained(early), Failed).cause is MpaCause.ABANDONED
    assert early.poll_send() == b""


# ---- time ----


def waiting(state: MpaState, times: MpaSettings) -> Initiator | Responder:
    """An end in the state, since 100 s."""
    if state is MpaState.WAIT_REPLY:
        initiator = Initiator(times, now=100.0)
        assert initiator.poll_send()
        return initiator
    responder = Responder(times, now=100.0 if state is MpaState.WAIT_REQUEST else 90.0)
    if state is not MpaState.WAIT_REQUEST:
        frame = enhanced(MpaRole.REQUEST, Enhanced(1, 1, times.peer_to_peer, Rtr.WRITE))
        responder.handle_bytes(frame.encode(), now=100.0 if state is MpaState.DECIDING else 95.0)
    if state is MpaState.FULL_RX_ONLY:
        responder.accept(now=100.0)
    responder.poll_send()
    drained(responder)
    return responder


TIMERS = [
    (MpaState.WAIT_REPLY, MpaSettings(), limits.MPA_REPLY_S),
    (MpaState.WAIT_REPLY, MpaSettings(reply_s=2.5), 2.5),
    (MpaState.WAIT_REPLY, MpaSettings(reply_s=None), None),
    (MpaState.WAIT_REQUEST, MpaSettings(), limits.MPA_REQUEST_S),
    (MpaState.WAIT_REQUEST, MpaSettings(request_s=0.5), 0.5),
    (MpaState.WAIT_REQUEST, MpaSettings(request_s=None), None),
    (MpaState.DECIDING, MpaSettings(), limits.MPA_DECISION_S),
    (MpaState.DECIDING, MpaSettings(decision_s=1.5), 1.5),
    (MpaState.DECIDING, MpaSettings(decision_s=None), None),
    (MpaState.FULL_RX_ONLY, PEERS, limits.MPA_RTR_S),
    (MpaState.FULL_RX_ONLY, replace(PEERS, rtr_s=3.0), 3.0),
    (MpaState.FULL_RX_ONLY, replace(PEERS, rtr_s=None, first_fpdu_s=1.0), None),
    (MpaState.FULL_RX_ONLY, MpaSettings(), None),
    (MpaState.FULL_RX_ONLY, MpaSettings(first_fpdu_s=4.0), 4.0),
]


@pytest.mark.parametrize(("state", "times", "after_s"), TIMERS)
def test_timers(state: MpaState, times: MpaSettings, after_s: float | None) -> None:
    end = waiting(state, times)
    assert end.state is state
    if after_s is None:
        assert end.next_deadline() is None
        end.handle_timeout(now=1e9)
        assert end.state is state
        return
    assert end.next_deadline() == 100.0 + after_s
    end.handle_timeout(now=100.0 + after_s - 0.001)
    assert (end.state, drained(end)) == (state, [])
    end.handle_timeout(now=100.0 + after_s)
    failed = only(drained(end), Failed)
    assert (end.state, end.next_deadline()) == (MpaState.CLOSED, None)
    if state is MpaState.DECIDING:  # it is our user who is late: the other end gets its answer
        assert failed.cause is MpaCause.UNDECIDED
        found = StartFrame.decode(end.poll_send())
        assert found is not None
        assert found[0].rejected
        return
    assert (failed.cause, failed.code) == (MpaCause.SILENT, Code.MPA_TCP_LOST)
    assert end.poll_send() == b""


def test_a_slow_request_buys_no_time() -> None:
    """The timer runs from the start, not from the last byte."""
    responder = Responder(MpaSettings(), now=0.0)
    for index, byte in enumerate(F["T03"]):
        responder.handle_timeout(now=index * 0.3)
        responder.handle_bytes(bytes([byte]), now=index * 0.3)
    assert only(drained(responder), Failed).cause is MpaCause.SILENT


def test_siw_still_waits_when_the_user_is_late() -> None:
    assert limits.MPA_DECISION_S < limits.MPA_REPLY_S


@pytest.mark.parametrize(
    "state", [MpaState.WAIT_REPLY, MpaState.WAIT_REQUEST, MpaState.DECIDING, MpaState.FULL_RX_ONLY]
)
def test_the_connection_ends(state: MpaState) -> None:
    for lost in (False, True):
        end = waiting(state, PEERS)
        end.handle_closed(lost=lost)
        failed = only(drained(end), Failed)
        assert (failed.cause, failed.code) == (MpaCause.ENDED, Code.MPA_TCP_LOST)
        assert ("lost" in failed.text) == lost
        assert (end.state, end.next_deadline()) == (MpaState.CLOSED, None)


def test_after_the_start_the_end_is_the_streams() -> None:
    done = talk(PEERS, MpaSettings())
    done.initiator.handle_closed()
    assert (done.initiator.state, drained(done.initiator)) == (MpaState.FULL, [])
    with pytest.raises(Misuse):
        done.initiator.handle_bytes(b"\0")
    with pytest.raises(Misuse):
        done.responder.handle_bytes(b"\0", now=0.0)


# ---- whole ----


def test_what_cannot_be_asked_for() -> None:
    for wrong in (
        {"revision": 3}, {"revision": 0}, {"rtr": NO_RTR}, {"peer_to_peer": True, "enhanced": False},
        {"peer_to_peer": True, "revision": 1},
    ):  # fmt: skip
        with pytest.raises(Misuse):
            MpaSettings(**wrong)
    for depths in (
        {"ird": -1}, {"ird": 129}, {"ird_max": 0x3FFF}, {"ord": 0x3FFF}, {"ord_min": 17},
        {"ord_min": -1},
    ):  # fmt: skip
        with pytest.raises(Misuse):
            ReadDepths(**depths)  # type: ignore[arg-type]
    for told in (Enhanced(-1, 0), Enhanced(0, 0x3FFF)):
        with pytest.raises(Misuse):
            told.encode()


def test_answers_nobody_asked_for() -> None:
    """Before a Request, and a second one."""
    for answer in (accepting(), rejecting()):
        responder = Responder(MpaSettings(), now=0.0)
        with pytest.raises(Misuse):
            answer(responder)
        for first in (accepting(), rejecting()):
            responder, _ = request(StartFrame(MpaRole.REQUEST))
            first(responder)
            with pytest.raises(Misuse):
                answer(responder)


def test_the_table_is_whole() -> None:
    """Every state is reached and left by it, but for those at the end."""
    reached = {MpaState.WAIT_REPLY, MpaState.WAIT_REQUEST, *TRANSITIONS.values()}
    assert reached == set(MpaState)
    assert {state for state, _ in TRANSITIONS} == set(MpaState) - OVER
    assert {stimulus for _, stimulus in TRANSITIONS} == set(MpaStimulus)
    assert all(TRANSITIONS[state, MpaStimulus.FAILURE] is MpaState.CLOSED for state, _ in TRANSITIONS)


DEPTHS = st.none() | st.integers(0, start_frame.DEPTH_MAX)


@settings(deadline=None)
@given(DEPTHS, DEPTHS, st.booleans(), st.sets(st.sampled_from(list(Rtr))), st.binary(max_size=9))
def test_enhanced_data(ird: int | None, ord_: int | None, peers: bool, rtr: set[Rtr], behind: bytes) -> None:
    flags = NO_RTR
    for each in rtr:
        flags |= each
    told = Enhanced(ird, ord_, peers, flags)
    assert len(told.encode()) == 4
    assert Enhanced.decode(told.encode() + behind) == told


@settings(deadline=None)
@given(st.binary(min_size=4, max_size=4))
def test_any_enhanced_data(word: bytes) -> None:
    assert Enhanced.decode(word).encode() == word


@settings(deadline=None)
@given(st.binary(max_size=3))
def test_too_little_enhanced_data(short: bytes) -> None:
    with pytest.raises(PeerViolation):
        Enhanced.decode(short)


@settings(deadline=None)
@given(
    role=st.sampled_from(MpaRole),
    private_data=st.binary(max_size=512),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    revision=st.integers(0, 255),
)
def test_any_frame_is_judged(
    role: MpaRole, private_data: bytes, flags: tuple[bool, bool, bool, bool], revision: int
) -> None:
    """Whatever a whole frame says, each end comes to an end of its own; nothing is raised, nothing is left over."""
    frame = StartFrame(role, private_data, *flags, revision).encode()
    for asking in (PLAIN, MpaSettings(), PEERS):
        initiator = Initiator(asking, now=0.0)
        initiator.poll_send()
        initiator.handle_bytes(frame)
        only(drained(initiator), MpaEvent)  # type: ignore[arg-type]
        assert initiator.state is not MpaState.WAIT_REPLY
    responder = Responder(MpaSettings(), now=0.0)
    responder.handle_bytes(frame, now=0.0)
    (event,) = drained(responder)
    if isinstance(event, Asked):
        responder.accept(now=0.0)
        only(drained(responder), Agreed)
        answer = responder.poll_send()
        found = StartFrame.decode(answer)
        assert found is not None
        assert (found[1], found[0].revision, found[0].enhanced) == (len(answer), revision, flags[3] and revision > 1)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([F["T01"], F["T02"], F["T05"], F["T06"]]) | st.binary(max_size=30), max_size=4), st.data()
)
def test_garbage_is_contained(parts: list[bytes], data: st.DataObject) -> None:
    """Any bytes in any pieces: a violation at the latest when nothing else is possible, never an exception."""
    stream = b"".join(parts)
    size = data.draw(st.integers(1, 40))
    for role in (MpaRole.REQUEST, MpaRole.REPLY):
        responder, initiator = Responder(MpaSettings(), now=0.0), Initiator(PEERS, now=0.0)
        for piece in pieces(stream, size):
            if role is MpaRole.REQUEST:
                responder.handle_bytes(piece, now=0.0)
            elif initiator.state is not MpaState.FULL:
                initiator.handle_bytes(piece)
        assert len(drained(responder)) <= 2
        assert len(drained(initiator)) <= 1


def test_all_flags_of_a_reply() -> None:
    """M and C each way, in all sixteen combinations."""
    for ours, theirs, our_crc, their_crc in product((False, True), repeat=4):
        done = talk(MpaSettings(markers=ours, crc=our_crc), MpaSettings(markers=theirs, crc=their_crc))
        agreed, heard = only(done.told, Agreed), done.heard[-1]
        assert isinstance(heard, Agreed)
        assert (agreed.markers_in, agreed.markers_out, agreed.crc) == (ours, theirs, our_crc or their_crc)
        assert (heard.markers_out, heard.markers_in, heard.crc) == (ours, theirs, our_crc or their_crc)
