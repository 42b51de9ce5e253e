"""Every message in every state, mode and form: what is legal is taken, what is not ends the connection by the book.

What is expected is computed from the tables of `states`, not written down a second time; the situations that need a
mechanism at work are one scene for each rule, and every rule that there is has one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from raw import CREDIT, HERE, PORT, THERE, RawPeer, pipelined, small
from sdp_vectors import vectors

from sidestep.errors import PeerViolation
from sidestep.rdma.cm import REJECT_CONSUMER
from sidestep.rdma.work import RKey, Status
from sidestep.sdp import header, hello, states
from sidestep.sdp.connection import SdpCause
from sidestep.sdp.requests import Reject, SdpEvent, SdpEventKind
from sidestep.sdp.settings import Addresses, Carrier
from sidestep.sdp.states import MODE_CHANGES, MODES, NO_PAYLOAD, OPEN, Master, SdpState, forbidden
from sidestep.sdp.wire import (
    BSDH,
    MESSAGES,
    AbortConn,
    ChRcvBuf,
    ChRcvBufAck,
    Data,
    DisConn,
    Header,
    HelloAck,
    Mid,
    Mode,
    ModeChange,
    RdmaRdCompl,
    RdmaWrCompl,
    SendSm,
    SinkAvail,
    SinkAvailCancel,
    SinkCancelAck,
    SrcAvail,
    SrcAvailCancel,
    SuspComm,
    SuspCommAck,
)

ADDRESSES = Addresses(HERE, PORT, THERE, 40000)
STARVED = 2  # a credit with which no payload goes: whatever the user sends stays queued

# --- every state ---


def _established(peer: RawPeer) -> None:
    peer.establish()


def _request_sent(peer: RawPeer) -> None:
    peer.connect()


def _reply_sent(peer: RawPeer) -> None:
    peer.accept()


def _fin_wait(peer: RawPeer) -> None:
    peer.establish()
    peer.connection.shutdown_write(peer.now)
    peer.run()


def _close_wait(peer: RawPeer) -> None:
    peer.establish()
    peer.say(DisConn())


def _last_ack(peer: RawPeer) -> None:
    _close_wait(peer)
    peer.connection.shutdown_write(peer.now)
    peer.run()


def _time_wait(peer: RawPeer) -> None:
    peer.hold_disconnect = True
    _fin_wait(peer)
    peer.say(DisConn())


def _aborting(peer: RawPeer) -> None:
    peer.hold_disconnect = True
    peer.establish()
    peer.connection.abort(peer.now)
    peer.run()


def _resuming(peer: RawPeer) -> None:
    peer.hold_disconnect = True
    peer.establish()
    peer.say(SuspComm(0x1_0000 | 5002))


def _suspended(peer: RawPeer) -> None:
    peer.establish()
    peer.connection.suspend(5002, peer.now)
    peer.run()
    peer.say(SuspCommAck())


def _closed(peer: RawPeer) -> None:
    peer.hold_disconnect = True
    _time_wait(peer)
    late = peer.posted.pop()
    peer.buffers -= 1
    peer.disconnected()
    peer.buffers += 1
    peer.posted.append(late)  # a message that came before the end is told after it


REACH: dict[SdpState, Callable[[RawPeer], None]] = {
    SdpState.CLOSED: _closed,
    SdpState.REQ_SENT: _request_sent,
    SdpState.REP_SENT: _reply_sent,
    SdpState.ESTABLISHED: _established,
    SdpState.FIN_WAIT: _fin_wait,
    SdpState.CLOSE_WAIT: _close_wait,
    SdpState.LAST_ACK: _last_ack,
    SdpState.TIME_WAIT: _time_wait,
    SdpState.ABORTING: _aborting,
    SdpState.RESUMING: _resuming,
    SdpState.SUSPENDED: _suspended,
}


def test_every_state_can_be_reached() -> None:
    assert set(REACH) == set(SdpState)
    for state, reach in REACH.items():
        peer = RawPeer(small())
        reach(peer)
        assert peer.connection.state is state


# --- every message ---

MODE_CHANGE_BYTES = (0x00, 0x10, 0x20, 0x90)  # those that a message may hold; the state decides which are legal
GOOD: dict[Mid, Header] = {
    Mid.HELLO: MESSAGES[Mid.HELLO].decode(memoryview(RawPeer(small()).hello())),
    Mid.HELLO_ACK: HelloAck(16, 4096),
    Mid.DIS_CONN: DisConn(),
    Mid.ABORT_CONN: AbortConn(),
    Mid.SEND_SM: SendSm(),
    Mid.RDMA_WR_COMPL: RdmaWrCompl(200),
    Mid.RDMA_RD_COMPL: RdmaRdCompl(200),
    Mid.SRC_AVAIL_CANCEL: SrcAvailCancel(),
    Mid.SINK_AVAIL_CANCEL: SinkAvailCancel(),
    Mid.SINK_CANCEL_ACK: SinkCancelAck(),
    Mid.CH_RCV_BUF: ChRcvBuf(256),
    Mid.CH_RCV_BUF_ACK: ChRcvBufAck(256),
    Mid.SUSP_COMM: SuspComm(0x1_0000 | 5002),
    Mid.SUSP_COMM_ACK: SuspCommAck(),
    Mid.SINK_AVAIL: SinkAvail(40000, 0xB1, 0x9F0000, 0),
    Mid.SRC_AVAIL: SrcAvail(300, 0xA1, 0x7F0000),
    Mid.DATA: Data(),
}


def forms(mid: Mid) -> Iterator[Header]:
    """The messages of that identifier that differ in what they are allowed."""
    if mid is Mid.MODE_CHANGE:
        for value in MODE_CHANGE_BYTES:
            yield ModeChange(value >> 7 == 1, Mode(value >> 4 & 3))
    else:
        yield GOOD[mid]


def broken_rule(state: SdpState, message: Header, payload: bytes, send: Mode, receive: Mode) -> str | None:
    """The rule that the message breaks, from the tables; in a connection where no mechanism is at work."""
    mid = message.MID
    if payload and mid in (Mid.HELLO, Mid.HELLO_ACK):
        return "hello_length"
    if payload and not message.PAYLOAD:
        return "stray_payload"
    rule = forbidden(state, mid, len(payload))
    if rule is not None:
        return rule
    match message:
        case AbortConn():
            return None if state in NO_PAYLOAD else "abort_early"
        case SrcAvail():
            if MODES[receive].src_avails == 0:
                return "src_avail_mode"
            return None if MODES[receive].src_avail_payload == bool(payload) else "src_avail_payload"
        case SinkAvail():
            return None if MODES[send].sink_avails else "sink_avail_mode"
        case ModeChange(to_send_half, mode):
            master = MODE_CHANGES.get((send if to_send_half else receive, mode))
            return None if master is (Master.SINK if to_send_half else Master.SOURCE) else "mode_transition"
        case RdmaRdCompl():
            return "read_unasked"
        case RdmaWrCompl():
            return "write_unasked"
        case ChRcvBufAck():
            return "resize_unasked"
        case SuspCommAck():
            return "suspend_unasked"
    return None


def _with_requests(peer: RawPeer) -> None:
    """Whatever the user may have waiting in this state waits, to see that it ends."""
    connection = peer.connection
    if connection.state in (SdpState.ESTABLISHED, SdpState.FIN_WAIT):
        peer.receive(500, waitall=True)
        peer.receive(10, waitall=True)
    if connection.state in (SdpState.ESTABLISHED, SdpState.CLOSE_WAIT):
        peer.credit = STARVED
        peer.data()
        if connection.state is SdpState.ESTABLISHED:  # as many as do not fit, and one that waits for its turn
            peer.hold_registrations = True
        peer.send(b"x" * 200)
        peer.send(b"y")
    peer.hear()
    peer.kinds()


def _into(state: SdpState, send: Mode, receive: Mode) -> RawPeer | None:
    """A peer of a connection in that state and those modes; None if there is no such thing."""
    peer = RawPeer(small(strategy=lambda: pipelined(pipelined=False)))
    if state not in OPEN:
        if (send, receive) != (Mode.COMBINED, Mode.COMBINED):
            return None
        REACH[state](peer)
        return peer
    peer.establish()
    peer.send_mode(send)
    peer.receive_mode(receive)
    if state in NO_PAYLOAD:
        peer.say(DisConn())
    if state in (SdpState.FIN_WAIT, SdpState.LAST_ACK):
        peer.connection.shutdown_write(peer.now)
        peer.run()
    assert peer.connection.state is state
    return peer


@pytest.mark.spec("SDP (A4) states and error handling; docs/wire/sdp.md §4, §11.2, §16, §19")
@pytest.mark.parametrize("mid", list(Mid), ids=lambda mid: mid.name.lower())
@pytest.mark.parametrize("state", list(SdpState), ids=lambda state: state.name.lower())
def test_every_message_in_every_state(state: SdpState, mid: Mid) -> None:
    for send, receive, payload, waiting in product(Mode, Mode, (b"", b"p"), (False, True)):
        peer = _into(state, send, receive)
        if peer is None or (waiting and (payload or state not in OPEN)):
            continue
        for message in forms(mid):
            peer = _into(state, send, receive)
            assert peer is not None
            if waiting:
                _with_requests(peer)
            judged_in = SdpState.ESTABLISHED if state is SdpState.REQ_SENT else state  # there it waits for the HelloAck
            _judge(peer, state, message, payload, broken_rule(judged_in, message, payload, send, receive))


def _judge(peer: RawPeer, state: SdpState, message: Header, payload: bytes, rule: str | None) -> None:
    connection = peer.connection
    if state is SdpState.REQ_SENT:
        orders = len(peer.orders)
        peer.say(message, payload)
        assert connection.state is state
        assert len(peer.orders) == orders
        connection.handle_accepted(peer.hello_ack(), peer.now)
        peer.run()
        heard = peer.hear()
    elif state not in OPEN and state is not SdpState.REP_SENT:
        told, orders, posted = len(peer.told), len(peer.orders), len(peer.posted)
        peer.say(message, payload)
        assert connection.state is state
        assert (len(peer.told), len(peer.orders)) == (told, orders + 1)  # its buffer comes back, and that is all
        assert len(peer.posted) == posted - 1
        assert not peer.hear()
        return
    else:
        peer.hear()
        peer.advertise(300)
        peer.show(40000)
        heard = peer.say(message, payload)
    if rule is None:
        if isinstance(message, AbortConn):
            assert connection.cause is SdpCause.RESET
            peer.ended(connection.error)
            return
        assert connection.error is None, (state, message, connection.error)
        return
    peer.broken_by(rule)
    said = [Mid(one.bsdh.mid) for one in heard]
    assert said == ([Mid.ABORT_CONN] if state in (SdpState.FIN_WAIT, SdpState.LAST_ACK) else [])


# --- a scene for every rule ---


def established(**settings: object) -> RawPeer:
    return RawPeer(small(**settings)).establish()


def _raw(peer: RawPeer, message: bytes) -> None:
    peer.deliver(message)


def _bsdh(peer: RawPeer, mid: int, length: int, body: bytes = b"") -> None:
    peer.tx_mseq += 1
    _raw(peer, BSDH.pack(mid, 0, CREDIT, length, peer.tx_mseq, peer.rx_mseq) + body)


def _advertised(receive: Mode = Mode.COMBINED, count: int = 1, **settings: object) -> RawPeer:
    """The other end has advertised, and nobody reads."""
    peer = established(**settings)
    peer.receive_mode(receive)
    for index in range(count):
        header, payload = peer.advertise(300, 8 if receive is Mode.COMBINED else 0, rkey=0xA1 + index)
        peer.say(header, payload)
    return peer


def _advertising(length: int = 500) -> RawPeer:
    """The connection has advertised."""
    peer = established()
    peer.send(b"a" * length)
    assert peer.mids() == [Mid.SRC_AVAIL]
    return peer


def _showing(*lengths: int) -> RawPeer:
    """The connection has shown receives of these lengths."""
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    for length in lengths or (400,):
        peer.receive(length)
    assert peer.mids() == [Mid.SINK_AVAIL] * (len(lengths) or 1)
    return peer


def _withdrawn() -> RawPeer:
    """The other end withdraws while an RDMA Read runs."""
    peer = established()
    peer.hold_completions = True
    header, payload = peer.advertise(300, 8)
    peer.receive(400, waitall=True)
    peer.say(header, payload)
    peer.say(SrcAvailCancel())
    return peer


def short_message() -> RawPeer:
    peer = established()
    _raw(peer, b"\xff" * 15)
    return peer


def length() -> RawPeer:
    peer = established()
    _bsdh(peer, Mid.DATA, 18, b"a")
    return peer


def unknown_mid() -> RawPeer:
    peer = established()
    _bsdh(peer, 0x40, 16)
    return peer


def short_header() -> RawPeer:
    peer = established()
    _bsdh(peer, Mid.SINK_AVAIL, 20, bytes(4))
    return peer


def stray_payload() -> RawPeer:
    peer = established()
    peer.say(SendSm(), b"a")
    return peer


def hello_length() -> RawPeer:
    peer = established()
    _bsdh(peer, Mid.HELLO, 20, bytes(4))
    return peer


def mode_change_code() -> RawPeer:
    peer = established()
    _bsdh(peer, Mid.MODE_CHANGE, 20, b"\x30\0\0\0")
    return peer


def src_avail_length() -> RawPeer:
    peer = established()
    peer.say(SrcAvail(8, 1, 1), bytes(8))
    return peer


def sink_avail_length() -> RawPeer:
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    peer.say(SinkAvail(0, 1, 1, 0))
    return peer


def address() -> RawPeer:
    peer = established()
    peer.say(SrcAvail(300, 1, (1 << 64) - 299), bytes(8))
    return peer


def rdma_length() -> RawPeer:
    peer = established()
    peer.say(RdmaWrCompl((1 << 31) + 1))
    return peer


def buffer_size() -> RawPeer:
    peer = established()
    peer.connection.resize_remote(64, peer.now)
    peer.run()
    peer.say(ChRcvBufAck(36))
    return peer


def suspend_service_id() -> RawPeer:
    peer = established()
    peer.say(SuspComm(5001))
    return peer


def hello_late() -> RawPeer:
    peer = established()
    peer.say(HelloAck(1, 4096))
    return peer


def second_end() -> RawPeer:
    peer = established()
    peer.say(DisConn())
    peer.say(DisConn())
    return peer


def payload_after_end() -> RawPeer:
    peer = established()
    peer.say(DisConn())
    peer.data(b"a")
    return peer


def suspend_late() -> RawPeer:
    peer = established()
    _last_ack_of(peer)
    peer.say(SuspComm(0x1_0000 | 5002))
    return peer


def _last_ack_of(peer: RawPeer) -> None:
    peer.say(DisConn())
    peer.connection.shutdown_write(peer.now)
    peer.run()


def abort_early() -> RawPeer:
    peer = established()
    peer.say(AbortConn())
    return peer


def message_size() -> RawPeer:
    peer = established()
    buffer = peer.posted.popleft()
    peer.connection.handle_receive_failed(buffer, Status.LOCAL_LENGTH_ERROR, peer.now)
    peer.run()
    return peer


def sequence() -> RawPeer:
    peer = established()
    peer.say(Data(), b"a", mseq=2)
    return peer


def acknowledgement() -> RawPeer:
    peer = established()
    peer.say(Data(), b"a", ack=1)
    return peer


def acknowledgement_back() -> RawPeer:
    peer = established()
    peer.send(b"abc", bcopy_only=True)
    peer.say(Data())
    peer.say(Data(), ack=0)
    return peer


def payload_closed() -> RawPeer:
    peer = established()
    peer.connection.close(peer.now)
    peer.run()
    peer.data(b"a")
    return peer


def payload_amid_advert() -> RawPeer:
    peer = _advertised()
    peer.data(b"a")
    return peer


def src_avail_mode() -> RawPeer:
    peer = established()
    peer.receive_mode(Mode.BUFFERED)
    peer.say(SrcAvail(300, 1, 1), b"a")
    return peer


def src_avail_payload() -> RawPeer:
    peer = established()
    peer.say(SrcAvail(300, 1, 1))
    return peer


def src_avail_second() -> RawPeer:
    peer = _advertised()
    header, payload = peer.advertise(300, 8, rkey=0xA2)
    peer.say(header, payload)
    return peer


def src_avail_cancelling() -> RawPeer:
    peer = _withdrawn()
    header, payload = peer.advertise(300, 8, rkey=0xA2)
    peer.hold_completions = False
    peer.outstanding.clear()  # the read never completes, as far as this message can know
    peer.say(header, payload)
    return peer


def cancel_second() -> RawPeer:
    peer = _withdrawn()
    peer.say(SrcAvailCancel())
    peer.hold_completions = False
    peer.run()
    return peer


def read_unasked() -> RawPeer:
    peer = established()
    peer.say(RdmaRdCompl(1))
    return peer


def read_early() -> RawPeer:
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    peer.send(bytes(500))
    peer.send(bytes(500))
    assert peer.mids() == [Mid.SRC_AVAIL] * 2
    peer.credit = STARVED
    peer.say(SendSm())
    peer.say(RdmaRdCompl(1))
    return peer


def read_excess() -> RawPeer:
    peer = _advertising(500)
    peer.say(RdmaRdCompl(500 - 8 + 1))
    return peer


def sink_avail_mode() -> RawPeer:
    peer = established()
    peer.say(SinkAvail(40000, 1, 1, 0))
    return peer


def sink_avail_small() -> RawPeer:
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    peer.say(SinkAvail(32784 - 17, 1, 1, 0))
    return peer


def sink_avail_cancelling() -> RawPeer:
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    peer.say(SinkAvail(40000, 1, 1, 0))
    peer.say(SinkAvailCancel(), bufs=0)  # the answer cannot go
    peer.say(SinkAvail(40000, 1, 1, 0))
    return peer


def write_unasked() -> RawPeer:
    peer = established()
    peer.say(RdmaWrCompl(1))
    return peer


def write_excess() -> RawPeer:
    peer = _showing(400)
    peer.say(RdmaWrCompl(401))
    return peer


def adverts() -> RawPeer:
    return _advertised(Mode.PIPELINED, 3, max_adverts=2)


def adverts_shown() -> RawPeer:
    peer = established(max_adverts=2)
    peer.send_mode(Mode.PIPELINED)
    for _ in range(3):
        peer.say(SinkAvail(40000, 1, 1, 0))
    return peer


def mode_transition() -> RawPeer:
    peer = established()
    peer.say(ModeChange(False, Mode.COMBINED))
    return peer


def end_amid_advert() -> RawPeer:
    peer = _advertised()
    peer.say(DisConn())
    return peer


def resize_unasked() -> RawPeer:
    peer = established()
    peer.say(ChRcvBufAck(4096))
    return peer


def resize_second() -> RawPeer:
    peer = established()
    peer.say(ChRcvBuf(512))  # an increase: confirmed when the old buffers are gone
    peer.say(ChRcvBuf(512))
    return peer


def resize_range() -> RawPeer:
    peer = established()
    peer.connection.resize_remote(1000, peer.now)
    peer.run()
    peer.say(ChRcvBufAck(1000 - 17))
    return peer


def suspend_unasked() -> RawPeer:
    peer = established()
    peer.say(SuspCommAck())
    return peer


def suspend_amid() -> RawPeer:
    peer = established()
    peer.credit = STARVED
    peer.data()
    peer.say(SuspComm(0x1_0000 | 5002), bufs=0)  # the answer cannot go
    peer.say(SendSm())
    return peer


def invalidated() -> RawPeer:
    """As the endpoint says it: the key of what was advertised may be voided, and no other."""
    peer = _advertising()
    (region,) = [memory for memory in peer.regions.values() if memory.live]
    shown = next(key for key, memory in peer.regions.items() if memory is region)
    peer.connection.handle_invalidated(RKey(shown), peer.now)
    assert peer.connection.error is None
    peer.connection.handle_invalidated(RKey(shown + 1), peer.now)
    peer.data()
    return peer


def rdma_access() -> RawPeer:
    """As the endpoint says it, when the device has told of it."""
    peer = established()
    fault = PeerViolation("RDMA that is not allowed", rule="rdma_access")
    peer.connection.handle_failure(fault, SdpCause.VIOLATION, peer.now)
    peer.run()
    return peer


# What a Hello that breaks the rule looks like: its kind of transport, and which bytes of a good one are others.
HELLOS: dict[str, tuple[Carrier, int, bytes]] = {
    "hello_wrong_message": (Carrier.INFINIBAND, 0, b"\x02"),
    "hello_version": (Carrier.INFINIBAND, 16, b"\x32"),
    "hello_max_adverts": (Carrier.INFINIBAND, 19, b"\0"),
    "hello_ip_version": (Carrier.INFINIBAND, 17, b"\x50"),
    "hello_buffer_size": (Carrier.INFINIBAND, 24, b"\0\0\0\x24"),
    "hello_bufs": (Carrier.INFINIBAND, 2, b"\0\2"),
    "hello_read_depth": (Carrier.IWARP, 30, b"\0\0"),
}

# Rule -> scenes that break it; each gives the peer whose connection has ended for that.
SCENES: dict[str, list[Callable[[], RawPeer]]] = {
    rule: [scene]
    for rule, scene in globals().items()
    if rule in states.RULES or (rule in header.RULES and callable(scene))
}
SCENES["acknowledgement"].append(acknowledgement_back)
SCENES["adverts"].append(adverts_shown)
TABLES = (header.RULES, hello.RULES, states.RULES)
ALL_RULES = {rule for table in TABLES for rule in table}


def test_there_is_a_scene_for_every_rule() -> None:
    assert set(SCENES) | set(HELLOS) == ALL_RULES
    assert sum(map(len, TABLES)) == len(ALL_RULES)


def test_every_rule_that_is_named_is_in_a_table() -> None:
    sources = "".join(path.read_text() for path in Path(states.__file__).parent.glob("*.py"))
    named = set(re.findall(r'rule="(\w+)"', sources))
    assert named
    assert named <= ALL_RULES


@pytest.mark.parametrize("rule", sorted(HELLOS))
def test_who_introduces_itself_badly_is_refused(rule: str) -> None:
    carrier, offset, value = HELLOS[rule]
    peer = RawPeer(small(carrier=carrier))
    good = peer.hello() if carrier is Carrier.INFINIBAND else vectors()["V51"].message
    assert RawPeer(small(carrier=carrier)).connection.accept(good, ADDRESSES, peer.now)
    changed = good[:offset] + value + good[offset + len(value) :]
    if rule == "hello_wrong_message":  # a message, but none that a connection begins with
        changed = BSDH.pack(Mid.SEND_SM, 0, 8, 16, 0, 0)
    assert not peer.connection.accept(changed, ADDRESSES, peer.now)
    peer.run()
    error = peer.connection.error
    assert isinstance(error, PeerViolation)
    assert error.rule == rule
    assert [order.reason for order in peer.ordered(Reject)] == [REJECT_CONSUMER]
    assert [event.kind for event in peer.told if isinstance(event, SdpEvent)] == [
        SdpEventKind.BROKEN,
        SdpEventKind.CLOSED,
    ]


@pytest.mark.parametrize("rule", sorted(SCENES))
def test_who_breaks_it_is_cut_off(rule: str) -> None:
    for scene in SCENES[rule]:
        scene().broken_by(rule)
