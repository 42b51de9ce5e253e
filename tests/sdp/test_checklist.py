"""A checklist for SDP, item by item, against the real core (docs/wire/sdp.md §29).

1. Every message against §24; wrong Len, short headers, stray payload.
2. Hello: MajV, MaxAdverts 0, Bufs 2, IPV 5, Len refused; MinV 7 accepted.
3. Credits 2, 1, 0; both peers at 1 recover.
4. MSeq wraps, also for credit and cancels.
5. Combined: payloads 1, 63, 64, most; partial RdmaRdCompl, SendSm; too much aborts.
6. Pipelined: SendSm for the first of several.
7. The 4 legal and all illegal ModeChanges.
8. Stale SinkAvails: 0 to 2 Data crossing 1 to 3; wrap; ND = PND at rest.
9. SinkAvail crossing SrcAvail; stale in front; cancel pending.
10. SrcAvailCancel: nothing, unprocessed, mid-read, read, two; MSeqAck held.
11. SinkAvailCancel: nothing, unprocessed, half-written, half-written and another.
12. Transaction with fresh and stale advert.
13. Pipelined to Combined with late SinkAvails, and back.
14. Both send SrcAvail, nobody receives.
15. Urgent: early, together, far, behind a SrcAvail, two, inline.
16. Resize up, down, refused, both; SinkAvail test; no repetition.
17. Half-close, crossing DisConn, AbortConn, bare DREQ, unread data, linger 0.
18. SuspComm; both at once.
19. MSG_WAITALL, MSG_PEEK.
20. Both ends send SO_SNDBUF + SO_RCVBUF bytes, then receive.

`ELSEWHERE` names the files that hold the items, or the parts of them, that are not here. A peer written by hand
(`RawPeer`) says what a real one would not, or at a moment that it would not choose; two real ends (`Pair`) show that
both sides agree.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from raw import CREDIT, End, Pair, RawPeer, Remote, moved_to, pipelined, small

from sidestep.errors import Misuse, Unavailable
from sidestep.rdma.cm import REJECT_CONSUMER
from sidestep.rdma.work import RdmaRead
from sidestep.sdp.connection import SdpCause
from sidestep.sdp.header import MASK
from sidestep.sdp.requests import Connect, Disconnect, Reject, SdpEvent, SdpEventKind, StreamReceive
from sidestep.sdp.settings import SdpSettings
from sidestep.sdp.states import SdpState
from sidestep.sdp.wire import (
    OOB_PEND,
    OOB_PRES,
    AbortConn,
    ChRcvBuf,
    ChRcvBufAck,
    Decoded,
    DisConn,
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
)

ELSEWHERE = {
    1: ["test_vectors.py", "test_wire.py"],
    2: ["test_hello.py"],
    7: ["test_illegal.py"],
    8: ["test_replay.py"],
    17: ["test_illegal.py"],
    18: ["test_attacks.py"],
}
HERE_ITEMS: set[int] = set()
F = TypeVar("F", bound=Callable[..., None])


def item(number: int) -> Callable[[F], F]:
    """Marks a test as one of an item of the list."""
    HERE_ITEMS.add(number)

    def mark(test: F) -> F:
        marked: F = pytest.mark.spec(f"docs/wire/sdp.md §29 item {number}")(test)
        return marked

    return mark


def test_every_item_is_covered() -> None:
    assert HERE_ITEMS | set(ELSEWHERE) == set(range(1, 21))
    assert all((Path(__file__).parent / name).exists() for names in ELSEWHERE.values() for name in names)


def established(**settings: object) -> RawPeer:
    return RawPeer(small(**settings)).establish()


def kinds(messages: list[Decoded]) -> list[Mid]:
    return [Mid(message.bsdh.mid) for message in messages]


def filled(receive: StreamReceive) -> bytes:
    return bytes(receive.view[: receive.filled])


def stream(length: int, start: int = 0) -> bytes:
    """Bytes that tell where they stand."""
    return bytes((index * 7 + index // 256) % 251 for index in range(start, start + length))


def paired(**settings: object) -> Pair:
    return Pair(small(**settings), small(**settings)).establish()


# --- 2: introductions ---


@item(2)
@pytest.mark.parametrize(
    ("offset", "value"),
    [(16, b"\x12"), (16, b"\x32"), (19, b"\0"), (2, b"\0\2"), (17, b"\x50"), (24, struct.pack(">I", 36))],
    ids=["major 1", "major 3", "MaxAdverts 0", "Bufs 2", "IP version 5", "buffers of 36"],
)
def test_a_bad_hello_is_refused(offset: int, value: bytes) -> None:
    peer = RawPeer(small())
    hello = bytearray(peer.hello())
    hello[offset : offset + len(value)] = value
    assert not peer.connection.accept(bytes(hello), None, peer.now)
    peer.run()
    assert [order.reason for order in peer.ordered(Reject)] == [REJECT_CONSUMER]
    assert peer.connection.state is SdpState.CLOSED
    assert peer.connection.cause is SdpCause.VIOLATION


@item(2)
@pytest.mark.parametrize("change", [lambda hello: hello[:91], lambda hello: hello[:7] + b"\x5d" + hello[8:]])
def test_a_hello_of_another_length_is_refused(change: Callable[[bytes], bytes]) -> None:
    peer = RawPeer(small())
    assert not peer.connection.accept(change(peer.hello()), None, peer.now)
    peer.run()
    assert peer.ordered(Reject)


@item(2)
def test_a_minor_that_differs_is_no_reason() -> None:
    peer = RawPeer(small())
    hello = bytearray(peer.hello())
    hello[16] = 0x27
    assert peer.connection.accept(bytes(hello), None, peer.now)
    assert peer.connection.version == (2, 2)


@item(2)
@pytest.mark.parametrize(("offset", "value"), [(16, b"\x12"), (19, b"\0"), (2, b"\0\2"), (20, struct.pack(">I", 36))])
def test_a_bad_hello_ack_ends_the_attempt(offset: int, value: bytes) -> None:
    peer = RawPeer(small()).connect()
    ack = bytearray(peer.hello_ack())
    ack[offset : offset + len(value)] = value
    assert not peer.connection.judge_reply(bytes(ack))
    peer.connection.handle_refused(REJECT_CONSUMER, peer.now)
    peer.run()
    assert peer.connection.state is SdpState.CLOSED
    assert peer.connection.cause is SdpCause.VIOLATION


# --- 3: credits ---


@item(3)
def test_with_two_credits_only_what_has_no_payload_goes() -> None:
    peer = established()
    peer.credit = 2
    peer.data()
    send = peer.send(b"payload", bcopy_only=True)
    assert peer.mids() == []
    peer.connection.want_send_mode(Mode.PIPELINED, peer.now)
    peer.run()
    assert peer.mids() == [Mid.MODE_CHANGE]
    assert not send.done
    peer.credit = 3
    peer.data()
    assert not send.done  # a peer with so many buffers is asked for four: docs/internals/sdp.md
    peer.credit = 4
    peer.data()
    assert send.done


@item(3)
def test_with_one_credit_only_what_brings_credit_goes() -> None:
    peer = established(receive_count=5)
    peer.credit = 1
    for _ in range(5):
        peer.data(b"x")  # all our buffers are full: nothing new can be offered
    peer.connection.want_send_mode(Mode.PIPELINED, peer.now)
    peer.run()
    assert peer.mids() == []
    assert peer.read(1) == b"x"  # one is free again
    assert peer.mids() == [Mid.MODE_CHANGE]


@item(3)
def test_without_credit_nothing_goes() -> None:
    peer = established(receive_count=5)
    peer.credit = 0
    for _ in range(5):
        peer.data(b"x")
    peer.connection.want_send_mode(Mode.PIPELINED, peer.now)
    peer.connection.shutdown_write(peer.now)
    for _ in range(5):
        assert peer.read(1) == b"x"
    peer.wait(10)
    assert peer.mids() == []


@item(3)
@pytest.mark.parametrize("count", [5, 6, 8, 16])
def test_both_ends_drained_recover(count: int) -> None:
    """Each end sends until it can send no more while nobody reads; then both read everything."""
    pair = paired(receive_count=count)
    data = stream(4000)
    sends = [end.send(data, bcopy_only=True) for end in (pair.left, pair.right)]
    pair.run()
    assert not any(send.done for send in sends)
    assert all(end.connection.credit < 4 for end in (pair.left, pair.right))
    for _ in range(100):
        for end in (pair.left, pair.right):
            end.told.clear()
            while chunk := end.read(100):
                assert data.startswith(chunk) or chunk in data
            pair.run()
        pair.wait(0.1)
    assert all(send.done for send in sends)
    before = pair.messages
    pair.wait(60)
    assert pair.messages == before  # and then they are quiet


# --- 4: wrap ---


def _near_the_wrap(peer: RawPeer, before: int) -> None:
    """Both ends have exchanged nearly 2**32 messages."""
    number = (1 << 32) - before
    flow = peer.connection._flow
    flow.tx_mseq = flow.rx_mseq = flow.peer_ack = flow.last_ack_sent = number
    peer.tx_mseq = peer.rx_mseq = peer.told_ack = number
    peer.connection._sink.nd = peer.connection._source.pnd = number


@item(4)
@pytest.mark.parametrize("before", range(1, 9))
def test_sequence_numbers_wrap(before: int) -> None:
    """Credits, answers and withdrawals are compared across the wrap."""
    peer = established()
    _near_the_wrap(peer, before)
    for _ in range(4):
        peer.data(b"x")
        assert peer.read() == b"x"
        send = peer.send(b"y", bcopy_only=True)
        assert send.done
        assert peer.connection.credit == CREDIT - 1
        peer.hear()
        peer.data()
    header, payload = peer.advertise(300, 8)
    peer.say(header, payload)
    assert kinds(peer.say(SrcAvailCancel())) == [Mid.SEND_SM]
    assert peer.read() == payload
    peer.hear()
    send = peer.send(stream(500))
    assert peer.mids() == [Mid.SRC_AVAIL]
    peer.say(RdmaRdCompl(100))
    peer.connection.cancel_send(send, peer.now)
    peer.run()
    assert peer.mids() == [Mid.SRC_AVAIL_CANCEL]
    peer.say(SendSm())
    assert send.done
    assert send.passed == 108
    assert peer.connection.error is None
    assert peer.tx_mseq < 100


@item(4)
def test_a_send_sm_that_crosses_a_withdrawal_at_the_wrap_is_an_ordinary_one() -> None:
    peer = established()
    _near_the_wrap(peer, 1)
    peer.send_mode(Mode.PIPELINED)
    for _ in range(2):
        peer.send(stream(200))
    assert peer.mids() == [Mid.SRC_AVAIL] * 2
    peer.wait(1.5)  # no answer: withdrawn
    assert peer.mids() == [Mid.SRC_AVAIL_CANCEL]
    cancel = peer.rx_mseq
    peer.say(SendSm(), ack=cancel - 1)
    assert peer.connection._source.cancel_mseq is not None
    peer.say(SendSm())
    assert peer.connection._source.cancel_mseq is None


# --- 5: Combined ---


@item(5)
@pytest.mark.parametrize("payload", [1, 63, 64, 256 - 32])
def test_payload_of_a_src_avail_is_not_lost_and_not_doubled(payload: int) -> None:
    peer = established()
    header, first = peer.advertise(1000, payload)
    receive = peer.receive(1000, waitall=True)
    heard = peer.say(header, first)
    assert filled(receive) == bytes(peer.memory(0xA1))
    assert kinds(heard) == [Mid.RDMA_RD_COMPL]
    told = heard[0].header
    assert isinstance(told, RdmaRdCompl)
    assert told.length == 1000 - payload  # what came as payload never counts


@item(5)
@pytest.mark.parametrize("payload", [1, 63, 64, 10_000])
def test_a_src_avail_carries_what_it_should(payload: int) -> None:
    peer = RawPeer(small(strategy=lambda: pipelined(payload=payload))).establish(size=500)
    peer.send(stream(1000))
    (message,) = peer.hear()
    assert isinstance(message.header, SrcAvail)
    assert message.header.length == 1000
    assert bytes(message.payload) == stream(min(payload, 500 - 32))


@item(5)
def test_partial_reports_and_then_a_refusal() -> None:
    peer = established(strategy=lambda: pipelined(payload=8))
    data = stream(1000)
    send = peer.send(data)
    peer.hear()
    for length in (100, 200, 300):
        peer.say(RdmaRdCompl(length))
    assert send.passed == 608
    assert not send.done
    rest = b"".join(bytes(message.payload) for message in peer.say(SendSm()))
    assert rest == data[608:]
    assert send.done


@item(5)
def test_reading_in_parts_and_then_refusing() -> None:
    """The sink's side of it: three receives read, a peek asks for the rest by Bcopy."""
    peer = established()
    header, payload = peer.advertise(1000, 8)
    peer.say(header, payload)
    assert peer.read(8) == payload
    for _ in range(3):
        peer.receive(100)
    told = [message.header.length for message in peer.hear() if isinstance(message.header, RdmaRdCompl)]
    assert told == [100, 100, 100]
    assert not peer.connection.peek(peer.now)
    peer.run()
    assert peer.mids() == [Mid.SEND_SM]
    rest = bytes(peer.memory(0xA1)[308:])
    for at in range(0, len(rest), 200):
        peer.data(rest[at : at + 200])
    assert peer.read() == rest


@item(5)
def test_more_than_was_advertised_cannot_be_acknowledged() -> None:
    peer = established()
    peer.send(stream(1000))
    peer.say(RdmaRdCompl(900))
    peer.say(RdmaRdCompl(93))
    peer.broken_by("read_excess")


@item(5)
@pytest.mark.parametrize("mode", [Mode.COMBINED, Mode.PIPELINED])
def test_one_advertisement_after_the_other(mode: Mode) -> None:
    """More than MaxAdverts in all, each read and reported before the next."""
    peer = established(max_adverts=2)
    peer.receive_mode(mode)
    for number in range(5):
        header, payload = peer.advertise(300, 8 if mode is Mode.COMBINED else 0, fill=number)
        receive = peer.receive(300, waitall=True)
        assert kinds(peer.say(header, payload))[-1] is Mid.RDMA_RD_COMPL
        assert filled(receive) == bytes(peer.memory(0xA1))
    assert peer.connection.error is None


# --- 6: Pipelined ---


@item(6)
def test_a_refusal_of_the_first_keeps_the_others() -> None:
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    data = [stream(300, start) for start in (0, 300, 600)]
    sends = [peer.send(part) for part in data]
    assert peer.mids() == [Mid.SRC_AVAIL] * 3
    heard = peer.say(SendSm())
    assert kinds(heard) == [Mid.DATA]
    assert bytes(heard[0].payload) == data[0]
    assert [send.done for send in sends] == [True, False, False]
    peer.say(RdmaRdCompl(300))
    peer.say(RdmaRdCompl(300))
    assert all(send.done for send in sends)


@item(6)
def test_what_was_refused_comes_before_what_is_read() -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    for key in (1, 2):
        header, _ = peer.advertise(300, rkey=key, fill=key)
        peer.say(header)
    peer.connection.peek(peer.now)
    peer.run()
    assert peer.mids() == [Mid.SEND_SM]
    first = peer.receive(300, waitall=True)
    second = peer.receive(300, waitall=True)
    assert not [work for work in peer.outstanding if isinstance(work.work, RdmaRead)]
    assert peer.mids() == []  # no RdmaRdCompl before those bytes
    peer.data(bytes(peer.memory(1)[:200]))
    assert peer.mids() == []
    assert kinds(peer.data(bytes(peer.memory(1)[200:]))) == [Mid.RDMA_RD_COMPL]
    assert filled(first) == bytes(peer.memory(1))
    assert filled(second) == bytes(peer.memory(2))


@item(6)
def test_more_than_was_refused_belongs_to_what_is_advertised() -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    for key in (1, 2):
        header, _ = peer.advertise(100, rkey=key)
        peer.say(header)
    peer.connection.peek(peer.now)
    peer.run()
    peer.data(bytes(101))
    peer.broken_by("payload_amid_advert")


# --- 7: modes ---


@item(7)
def test_the_four_transitions() -> None:
    pair = paired(strategy=lambda: pipelined(pipelined=False))
    left, right = pair.left, pair.right
    for mode in (Mode.PIPELINED, Mode.COMBINED, Mode.BUFFERED):
        left.connection.want_send_mode(mode, left.now)
        left.run()
        pair.run()
        assert left.connection.send_mode is mode
        assert right.connection.receive_mode is mode
        right.connection._flow.send_update()  # whatever it says acknowledges the change
        right.run()
        pair.run()
    right.connection.want_combined(right.now)
    right.run()
    pair.run()
    assert left.connection.send_mode is right.connection.receive_mode is Mode.COMBINED


@item(7)
def test_buffered_and_pipelined_are_two_steps_apart() -> None:
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    peer.connection.want_send_mode(Mode.BUFFERED, peer.now)
    peer.run()
    (change,) = peer.hear()
    assert change.header == ModeChange(False, Mode.COMBINED)
    (change,) = peer.data()
    assert change.header == ModeChange(False, Mode.BUFFERED)


@item(7)
@pytest.mark.parametrize("mode", list(Mode))
def test_who_names_the_present_mode_is_cut_off(mode: Mode) -> None:
    peer = established()
    peer.receive_mode(mode)
    peer.say(ModeChange(False, mode))
    peer.broken_by("mode_transition")


# --- 8: stale SinkAvails ---


class SinkByHand:
    """The receive half of a Pipelined direction as docs/wire/sdp.md §12.1 has it, to hold against the source's."""

    def __init__(self, peer: RawPeer, start: int = 0) -> None:
        self.peer = peer
        self.nd = start
        self.shown = 0
        self.unseen: list[Decoded] = []

    def show(self) -> SinkAvail:
        """A SinkAvail of which the source does not know yet."""
        self.shown += 1
        return self.peer.show(40000, nd=self.nd)

    def hear(self, messages: list[Decoded]) -> None:
        """What the source has sent arrives."""
        for message in messages:
            if message.bsdh.mid == Mid.RDMA_WR_COMPL:
                assert self.shown > 0
                self.shown -= 1
            elif message.payload:
                if self.shown:
                    self.shown -= 1
                else:
                    self.nd = (self.nd + 1) & MASK


@item(8)
@pytest.mark.parametrize("start", [0, MASK - 1, MASK])
@pytest.mark.parametrize("shown", [1, 2, 3])
@pytest.mark.parametrize("crossing", [0, 1, 2])
def test_stale_sink_avails_are_told_from_valid_ones(crossing: int, shown: int, start: int) -> None:
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    peer.connection._source.pnd = start
    sink = SinkByHand(peer, start)
    adverts = [sink.show() for _ in range(shown)]
    for _ in range(crossing):
        peer.send(b"crossing", bcopy_only=True)
    said = peer.hear()
    for advert in adverts:
        peer.say(advert)
    valid = len(peer.connection._source.sinks)
    assert valid == max(0, shown - crossing)
    sink.hear(said)
    assert sink.shown == valid
    assert sink.nd == peer.connection._source.pnd  # all is quiet: both ends agree
    peer.send(stream(1000))
    sink.hear(peer.hear())
    assert sink.nd == peer.connection._source.pnd
    assert len(peer.connection._source.sinks) == sink.shown


@item(8)
@pytest.mark.parametrize("crossing", [0, 1, 2])
@pytest.mark.parametrize("shown", [1, 2, 3])
def test_payload_that_crosses_uses_up_the_oldest_receive_shown(shown: int, crossing: int) -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    receives = [peer.receive(400) for _ in range(shown)]
    adverts = [message.header for message in peer.hear()]
    assert [advert.non_discards for advert in adverts if isinstance(advert, SinkAvail)] == [0] * shown
    for index in range(crossing):
        peer.data(b"x" * (index + 1))
    assert [receive.filled for receive in receives] == [index + 1 if index < crossing else 0 for index in range(shown)]
    assert peer.connection._sink.nd == max(0, crossing - shown)


# --- 9: SinkAvail and SrcAvail cross ---


@item(9)
def test_a_sink_avail_that_crosses_a_src_avail_wins() -> None:
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    data = stream(500)
    send = peer.send(data)
    assert peer.mids() == [Mid.SRC_AVAIL]
    heard = peer.say(peer.show(40000, nd=peer.connection._source.pnd))
    assert kinds(heard) == [Mid.RDMA_WR_COMPL]
    assert bytes(peer.memory(0xB1)[:500]) == data
    assert send.done


@item(9)
def test_a_stale_sink_avail_leaves_the_src_avail_valid() -> None:
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    stale = peer.show(40000, nd=0)
    peer.send(b"crossing", bcopy_only=True)
    send = peer.send(stream(500))
    assert peer.mids() == [Mid.DATA, Mid.SRC_AVAIL]
    assert peer.say(stale) == []
    assert not send.done
    peer.say(RdmaRdCompl(500))
    assert send.done


@item(9)
def test_a_stale_sink_avail_in_front_of_a_valid_one() -> None:
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    adverts = [peer.show(40000, nd=0) for _ in range(2)]
    peer.send(b"crossing", bcopy_only=True)
    send = peer.send(stream(500))
    peer.hear()
    peer.say(adverts[0])
    assert kinds(peer.say(adverts[1])) == [Mid.RDMA_WR_COMPL]
    assert send.done


@item(9)
def test_a_valid_sink_avail_completes_a_withdrawal() -> None:
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    send = peer.send(stream(500))
    peer.connection.cancel_send(send, peer.now)
    peer.run()
    assert peer.mids() == [Mid.SRC_AVAIL, Mid.SRC_AVAIL_CANCEL]
    peer.say(peer.show(40000, nd=peer.connection._source.pnd))
    assert send.done
    assert send.passed == 0
    later = peer.send(stream(300))
    assert later.done  # written: the advertisement is still there


@item(9)
def test_a_src_avail_that_meets_a_receive_shown_is_ignored() -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    receive = peer.receive(400)
    assert peer.mids() == [Mid.SINK_AVAIL]
    header, _ = peer.advertise(300)
    assert peer.say(header) == []
    receive.view[:5] = b"write"
    peer.say(RdmaWrCompl(5))
    assert filled(receive) == b"write"
    assert isinstance(peer.remote, Remote)
    assert not peer.remote.touched


# --- 10: withdrawing SrcAvails ---


@item(10)
def test_nothing_to_withdraw() -> None:
    peer = established()
    assert peer.say(SrcAvailCancel()) == []
    assert peer.connection.error is None


@item(10)
@pytest.mark.parametrize("count", [1, 2])
def test_withdrawn_before_anybody_reads(count: int) -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    for key in range(count):
        header, _ = peer.advertise(300, rkey=key)
        peer.say(header)
    heard = peer.say(SrcAvailCancel())
    assert kinds(heard) == [Mid.SEND_SM]  # exactly one, whatever there was
    assert heard[0].bsdh.mseq_ack == peer.tx_mseq  # at or after the withdrawal: so it completes it
    assert not peer.connection.readable


@item(10)
@pytest.mark.parametrize("rest", [0, 100], ids=["wholly", "partly"])
def test_withdrawn_while_it_is_read(rest: int) -> None:
    peer = established()
    peer.hold_completions = True
    header, payload = peer.advertise(300, 8)
    receive = peer.receive(300 - rest, waitall=True)
    peer.say(header, payload)
    cancel = peer.tx_mseq + 1
    assert peer.say(SrcAvailCancel()) == []
    for _ in range(3):
        peer.data()
    peer.connection._flow.send_update()
    peer.run()
    assert peer.hear()[-1].bsdh.mseq_ack == cancel - 1  # held below it
    peer.complete()
    heard = peer.hear()
    assert kinds(heard) == [Mid.RDMA_RD_COMPL] + ([Mid.SEND_SM] if rest else [])
    assert heard[0].header == RdmaRdCompl(300 - rest - 8)
    assert heard[-1].bsdh.mseq_ack == peer.tx_mseq
    assert receive.done


@item(10)
def test_withdrawn_after_all_of_it_was_read() -> None:
    peer = established()
    header, payload = peer.advertise(300, 8)
    peer.receive(300, waitall=True)
    assert kinds(peer.say(header, payload)) == [Mid.RDMA_RD_COMPL]
    assert peer.say(SrcAvailCancel()) == []


@item(10)
def test_withdrawn_while_the_first_of_two_is_read() -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    peer.hold_completions = True
    peer.receive(250)
    for key in (1, 2):
        header, _ = peer.advertise(300, rkey=key)
        peer.say(header)
    peer.say(SrcAvailCancel())
    peer.complete()
    heard = peer.hear()
    assert [message.header for message in heard] == [RdmaRdCompl(250), SendSm()]
    assert isinstance(peer.remote, Remote)
    assert len(peer.remote.touched) == 1


@item(10)
def test_withdrawn_while_the_refusal_waits_for_credit() -> None:
    """It is the same message: one, and it completes the withdrawal."""
    peer = established()
    peer.credit = 0
    header, payload = peer.advertise(300, 8)
    peer.say(header, payload)
    assert peer.read() == payload
    peer.connection.peek(peer.now)
    peer.run()
    assert peer.say(SrcAvailCancel()) == []
    peer.credit = CREDIT
    heard = peer.data()
    assert kinds(heard) == [Mid.SEND_SM]
    assert heard[0].bsdh.mseq_ack >= peer.tx_mseq - 1
    peer.data(b"goes on")  # nothing is due any more
    assert peer.read() == b"goes on"


@item(10)
def test_withdrawn_after_the_refusal_has_gone() -> None:
    """It was withdrawn with the rest; the other end knows of the refusal, and no other message follows."""
    peer = established()
    header, payload = peer.advertise(300, 8)
    peer.say(header, payload)
    assert peer.read() == payload
    peer.connection.peek(peer.now)
    peer.run()
    assert peer.mids() == [Mid.SEND_SM]
    assert peer.say(SrcAvailCancel()) == []
    peer.receive_mode(Mode.PIPELINED)
    peer.receive(400)
    assert peer.mids() == [Mid.SINK_AVAIL]  # as nothing is due


# --- 11: withdrawing SinkAvails ---


@item(11)
def test_a_source_that_was_shown_nothing_ignores_it() -> None:
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    assert peer.say(SinkAvailCancel()) == []


@item(11)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_source_drops_what_it_was_shown_and_says_so_once(count: int) -> None:
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    for _ in range(count):
        peer.say(peer.show(40000))
    assert kinds(peer.say(SinkAvailCancel())) == [Mid.SINK_CANCEL_ACK]
    peer.send(stream(300))
    assert peer.mids() == [Mid.SRC_AVAIL]


@item(11)
def test_a_write_and_its_report_leave_nothing_to_acknowledge() -> None:
    """This source posts them together: an advertisement is never half used when the withdrawal comes."""
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    peer.say(peer.show(40000))
    peer.send(stream(300))
    assert peer.mids() == [Mid.RDMA_WR_COMPL]
    assert peer.say(SinkAvailCancel()) == []
    peer.say(peer.show(40000))
    peer.say(peer.show(40000, rkey=0xB2))
    peer.send(stream(300))
    peer.hear()
    assert kinds(peer.say(SinkAvailCancel())) == [Mid.SINK_CANCEL_ACK]


@item(11)
@pytest.mark.parametrize("answer", ["ack", "write", "write and ack", "payload", "end"])
def test_a_sink_gets_its_receives_back(answer: str) -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    receives = [peer.receive(400) for _ in range(2 if answer == "write and ack" else 1)]
    peer.hear()
    for receive in receives:
        peer.connection.cancel_receive(receive, peer.now)
    peer.run()
    assert peer.mids() == [Mid.SINK_AVAIL_CANCEL]
    assert not any(receive.done for receive in receives)  # the other end may write still
    if answer.startswith("write"):
        receives[0].view[:4] = b"half"
        peer.say(RdmaWrCompl(4))
        assert filled(receives[0]) == b"half"
    if answer.endswith("ack"):
        peer.say(SinkCancelAck())
    if answer == "payload":
        peer.data(b"half")
        assert filled(receives[0]) == b"half"
    if answer == "end":
        peer.say(DisConn())
    assert all(receive.done for receive in receives)
    assert peer.connection.error is None


@item(11)
def test_a_withdrawal_that_has_not_gone_need_not_go() -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    receives = [peer.receive(400), peer.receive(400)]
    peer.credit = 0
    peer.data()
    peer.hear()
    for receive in receives:
        peer.connection.cancel_receive(receive, peer.now)
    peer.run()
    assert peer.mids() == []
    for receive in receives:
        receive.view[:1] = b"x"
        peer.say(RdmaWrCompl(1))
        assert filled(receive) == b"x"
    peer.credit = CREDIT
    assert Mid.SINK_AVAIL_CANCEL not in kinds(peer.data())
    later = peer.receive(400)
    assert peer.mids() == [Mid.SINK_AVAIL]
    peer.data(b"y")
    assert filled(later) == b"y"


@item(11)
def test_an_acknowledgement_that_nobody_waits_for_means_nothing() -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    receive = peer.receive(400)
    peer.say(SinkCancelAck())
    assert not receive.done
    assert peer.connection.error is None


# --- 12: Transactions ---


@item(12)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "stale"])
def test_a_transaction_delivers_its_payload_in_any_case(fresh: bool) -> None:
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    advert = peer.show(40000)
    if not fresh:
        peer.send(b"crossing", bcopy_only=True)
        peer.hear()
    request = peer.receive(100)
    peer.say(advert, b"READ 7\n")
    assert filled(request) == b"READ 7\n"
    assert peer.connection._sink.nd == 1
    peer.send(stream(500))
    assert peer.mids() == ([Mid.RDMA_WR_COMPL] if fresh else [Mid.SRC_AVAIL])


@item(12)
def test_a_transaction_between_two_real_ends() -> None:
    pair = paired()
    left, right = pair.left, pair.right
    right.connection.want_send_mode(Mode.PIPELINED, right.now)
    right.run()
    pair.run()
    left.hold_registrations = True
    answer = left.receive(1000)
    left.register(run=False)
    left.hold_registrations = False
    left.send(b"request", bcopy_only=True)
    message = pair.step(left)
    assert message is not None
    assert message[0] == Mid.SINK_AVAIL
    assert right.read() == b"request"
    right.send(stream(800))
    pair.run()
    assert filled(answer) == stream(800)
    assert left.connection._sink.nd == right.connection._source.pnd
    assert right.connection._sink.nd == left.connection._source.pnd


# --- 13: Pipelined to Combined, and late SinkAvails ---


@item(13)
@pytest.mark.parametrize("late", [1, 2, 3])
@pytest.mark.parametrize("crossing", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1])
def test_late_sink_avails_leave_the_counters_equal(late: int, crossing: int, after: int) -> None:
    peer = established(strategy=lambda: pipelined(pipelined=False))
    peer.send_mode(Mode.PIPELINED)
    sink = SinkByHand(peer)
    adverts = [sink.show() for _ in range(late)]
    seen = peer.rx_mseq
    for _ in range(crossing):
        peer.send(b"crossing", bcopy_only=True)
    peer.connection.want_send_mode(Mode.COMBINED, peer.now)
    peer.run()
    for _ in range(after):
        peer.send(b"after", bcopy_only=True)
    said = peer.hear()
    for advert in adverts:  # each was sent before any of that arrived
        peer.say(advert, ack=seen)
    for message in said:
        if message.bsdh.mid == Mid.MODE_CHANGE:
            sink.shown = 0
        else:
            sink.hear([message])
    assert peer.connection.send_mode is Mode.COMBINED
    assert not peer.connection._source.sinks
    assert sink.nd == peer.connection._source.pnd
    peer.data()
    peer.send_mode(Mode.PIPELINED)
    peer.say(sink.show())
    assert len(peer.connection._source.sinks) == 1  # valid: the counters agree


@item(13)
def test_what_a_late_sink_avail_has_voided_is_advertised_anew() -> None:
    """The sink has dropped what was advertised before the change, and only that (docs/internals/sdp.md, the model)."""
    peer = established(strategy=lambda: pipelined(pipelined=False, payload=8))
    peer.send_mode(Mode.PIPELINED)
    late = peer.show(40000)
    send = peer.send(stream(500))
    peer.connection.want_send_mode(Mode.COMBINED, peer.now)
    peer.run()
    assert peer.mids() == [Mid.SRC_AVAIL, Mid.MODE_CHANGE]
    heard = peer.say(late, ack=peer.rx_mseq - 2)
    assert kinds(heard) == [Mid.SRC_AVAIL]
    assert bytes(heard[0].payload) == stream(8)  # as Combined wants it
    peer.say(RdmaRdCompl(492))
    assert send.done


@item(13)
def test_a_receive_that_was_shown_waits_on_in_combined_mode() -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    receive = peer.receive(400)
    assert peer.mids() == [Mid.SINK_AVAIL]
    peer.say(ModeChange(False, Mode.COMBINED))
    peer.say(RdmaWrCompl(1))
    peer.broken_by("write_unasked")
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    receive = peer.receive(400)
    peer.say(ModeChange(False, Mode.COMBINED))
    peer.data(b"by Bcopy")
    assert filled(receive) == b"by Bcopy"
    assert peer.connection._sink.nd == 1  # it did not use up anything


# --- 14: nobody receives ---


@item(14)
@pytest.mark.parametrize("mode", [Mode.COMBINED, Mode.PIPELINED])
def test_both_advertise_and_nobody_receives(mode: Mode) -> None:
    """It is resolved without any timer."""
    pair = paired(receive_count=16)
    data = stream(600)
    for end in (pair.left, pair.right):
        end.connection.want_send_mode(mode, end.now)
        end.run()
    pair.run()
    sends = [end.send(data) for end in (pair.left, pair.right)]
    assert [end.outbox[0][0] for end in (pair.left, pair.right)] == [Mid.SRC_AVAIL] * 2
    pair.run()
    assert all(send.done for send in sends)
    assert pair.left.now == pair.right.now == 100.0
    for end in (pair.left, pair.right):
        assert b"".join(iter(end.read, b"")) == data


@item(14)
def test_who_holds_an_advertisement_does_not_add_its_own() -> None:
    pair = paired(receive_count=16)
    data = stream(600)
    left = pair.left.send(data)
    pair.run()
    right = pair.right.send(data)
    pair.run()
    assert right.done  # by Bcopy
    assert b"".join(iter(pair.left.read, b"")) == data
    received = bytearray()
    while chunk := pair.right.read():
        received += chunk
        pair.run()
    assert received == data
    assert left.done
    assert pair.left.now == 100.0


# --- 15: urgent bytes ---


@item(15)
def test_the_announcement_and_the_byte_in_one_message() -> None:
    peer = established()
    peer.send(b"abc!", urgent=True)
    (message,) = peer.hear()
    assert message.bsdh.flags & (OOB_PEND | OOB_PRES) == OOB_PEND | OOB_PRES
    assert bytes(message.payload) == b"abc!"


@item(15)
def test_the_announcement_comes_early_and_once() -> None:
    peer = established()
    peer.credit = 2
    peer.data()
    peer.send(b"normal", bcopy_only=True)
    peer.send(b"x!", urgent=True)
    assert [message.bsdh.flags for message in peer.hear()] == [OOB_PEND]  # an update carries it: no payload can go
    peer.credit = CREDIT
    assert [message.bsdh.flags for message in peer.data()] == [0, OOB_PRES]


@item(15)
def test_the_announcement_waits_until_the_byte_is_near() -> None:
    peer = RawPeer(SdpSettings()).establish()
    peer.credit = 4
    peer.data()
    peer.send(bytes(200_000), bcopy_only=True)
    peer.send(b"!", urgent=True)
    sent = bytearray()
    announced = None
    for _ in range(30):
        for message in [*peer.hear(), *peer.data()]:
            if message.bsdh.flags & OOB_PEND:
                assert announced is None
                announced = len(sent)
            sent += message.payload
    assert len(sent) == 200_001
    assert announced is not None
    assert len(sent) - 1 - announced <= 65_535


@item(15)
def test_an_urgent_byte_waits_for_a_src_avail_and_is_announced_meanwhile() -> None:
    peer = established()
    peer.send(stream(500))
    peer.hear()
    peer.send(b"!", urgent=True)
    (update,) = peer.hear()
    assert (update.bsdh.flags, len(update.payload)) == (OOB_PEND, 0)
    (byte,) = peer.say(RdmaRdCompl(492))
    assert (byte.bsdh.flags, bytes(byte.payload)) == (OOB_PRES, b"!")


@item(15)
def test_two_urgent_bytes_each_have_their_announcement() -> None:
    pair = paired()
    pair.left.send(b"one!", urgent=True)
    pair.left.send(b"two?", urgent=True)
    pair.run()
    right = pair.right
    assert right.kinds().count(SdpEventKind.URGENT) == 2
    assert not right.connection.urgent_pending
    assert right.read() == b"one"
    assert right.connection.at_mark
    assert right.connection.take_urgent() == ord("?")  # as in TCP, the later one is the urgent one
    assert right.read() == b"two"
    assert right.connection.at_mark


@item(15)
def test_an_urgent_byte_that_stays_in_the_stream() -> None:
    settings = replace(small(), urgent_inline=True)
    pair = Pair(settings, settings).establish()
    pair.left.send(b"one!", urgent=True)
    pair.left.send(b"two", bcopy_only=True)
    pair.run()
    assert pair.right.read() == b"one"
    assert pair.right.connection.at_mark
    assert pair.right.read() == b"!"
    assert pair.right.read() == b"two"
    assert pair.right.connection.take_urgent() is None


@item(15)
@pytest.mark.parametrize("room", [1, 2])
def test_an_urgent_byte_in_the_stream_fills_a_receive_that_must_be_full(room: int) -> None:
    peer = established(urgent_inline=True)
    receive = peer.receive(room, waitall=True)
    peer.data(b"!", flags=OOB_PEND | OOB_PRES)
    assert receive.done is (room == 1)
    peer.data(b"x")
    assert filled(receive) == b"!x"[:room]


@item(15)
def test_a_read_stops_at_the_mark_and_the_byte_is_had_apart() -> None:
    peer = established()
    peer.data(b"AAAA", flags=OOB_PEND)
    assert peer.connection.urgent_pending
    assert peer.connection.take_urgent() is None  # announced, not there
    receive = peer.receive(100, waitall=True)
    peer.data(b"B!", flags=OOB_PRES)
    assert filled(receive) == b"AAAAB"
    assert peer.connection.at_mark
    assert peer.connection.take_urgent() == ord("!")
    assert peer.connection.take_urgent() is None


# --- 16: other private buffers ---


@item(16)
def test_a_decrease_is_confirmed_at_once_and_kept_to_at_once() -> None:
    pair = paired(receive_size=512)
    left, right = pair.left, pair.right
    left.connection.resize_remote(100, left.now)
    assert left.connection.remote_size == 100
    left.run()
    left.send(stream(300), bcopy_only=True)
    pair.run()
    assert SdpEventKind.RESIZED in left.kinds()
    assert right.connection.local_size == 100
    assert right.read() == stream(300)
    assert left.connection.error is right.connection.error is None


@item(16)
def test_an_increase_is_confirmed_when_the_old_buffers_are_gone() -> None:
    peer = established(receive_size_max=1024)
    small_ones = len(peer.posted)
    peer.say(ChRcvBuf(1024))
    assert peer.connection.local_size == 256
    for _ in range(small_ones - 1):
        assert Mid.CH_RCV_BUF_ACK not in kinds(peer.data())
    assert Mid.CH_RCV_BUF_ACK in kinds(peer.data())
    assert peer.connection.local_size == 1024
    assert all(len(buffer.scatter[0]) == 1024 for buffer in peer.posted)
    peer.data(stream(1000))
    assert peer.read() == stream(1000)


@item(16)
def test_a_refused_increase_is_not_asked_for_again() -> None:
    peer = established()
    size = peer.connection.remote_size
    peer.connection.resize_remote(size * 2, peer.now)
    peer.run()
    assert peer.mids() == [Mid.CH_RCV_BUF]
    peer.say(ChRcvBufAck(size))
    with pytest.raises(Misuse):
        peer.connection.resize_remote(size * 2, peer.now)
    peer.connection.resize_remote(size // 2, peer.now)  # the other way was not refused


@item(16)
def test_one_request_at_a_time() -> None:
    peer = established()
    peer.connection.resize_remote(4096, peer.now)
    with pytest.raises(Misuse):
        peer.connection.resize_remote(2048, peer.now)


@item(16)
def test_both_ask_at_once() -> None:
    pair = paired(receive_size=512)
    left, right = pair.left, pair.right
    left.connection.resize_remote(200, left.now)
    right.connection.resize_remote(300, right.now)
    left.run()
    right.run()
    pair.run()
    assert left.connection.local_size == right.connection.remote_size == 300  # the connecting end answers
    assert left.connection.remote_size == right.connection.local_size == 512  # the accepting one takes no notice
    assert left.kinds().count(SdpEventKind.RESIZED) == right.kinds().count(SdpEventKind.RESIZED) == 1
    left.connection.resize_remote(200, left.now)
    left.run()
    pair.run()
    assert left.connection.remote_size == right.connection.local_size == 200


@item(16)
def test_a_receive_is_shown_by_the_size_that_the_other_end_knows() -> None:
    peer = established(receive_size_max=1024)
    peer.receive_mode(Mode.PIPELINED)
    peer.say(ChRcvBuf(1024))
    receive = peer.receive(600)
    assert Mid.SINK_AVAIL in peer.mids()  # larger than the old size, which is still in force
    peer.say(RdmaWrCompl(1))
    assert receive.done
    while peer.connection.local_size != 1024:
        peer.data()
    peer.hear()
    unshown = peer.receive(600)
    assert peer.mids() == []
    peer.connection.cancel_receive(unshown, peer.now)
    peer.run()
    peer.receive(1100)
    assert peer.mids() == [Mid.SINK_AVAIL]


# --- 17: ends ---


def told(end: End) -> list[SdpEventKind]:
    return [event.kind for event in end.told if isinstance(event, SdpEvent)]


@item(17)
@pytest.mark.parametrize("first", ["left", "right"])
def test_half_close(first: str) -> None:
    pair = paired()
    one = pair.left if first == "left" else pair.right
    other = pair.other(one)
    one.send(b"last words", bcopy_only=True)
    one.connection.shutdown_write(one.now)
    one.run()
    pair.run()
    assert one.connection.state is SdpState.FIN_WAIT
    assert other.connection.state is SdpState.CLOSE_WAIT
    assert SdpEventKind.WRITE_CLOSED in told(one)
    assert SdpEventKind.END_OF_STREAM in told(other)
    assert other.read() == b"last words"
    assert other.read() == b""
    data = stream(5000)
    other.send(data)
    received = bytearray()
    for _ in range(40):
        pair.run()
        received += one.read(1000)
    assert received == data
    other.connection.shutdown_write(other.now)
    other.run()
    pair.run()
    for end in (one, other):
        assert end.connection.state is SdpState.CLOSED
        assert end.connection.error is None
        assert told(end).count(SdpEventKind.CLOSED) == 1


@item(17)
def test_ends_that_cross() -> None:
    pair = paired()
    for end in (pair.left, pair.right):
        end.connection.shutdown_write(end.now)
        end.run()
    pair.wait(5)
    for end in (pair.left, pair.right):
        assert end.connection.state is SdpState.CLOSED
        assert end.connection.error is None
        assert SdpEventKind.BROKEN not in told(end)


@item(17)
def test_the_second_closer_disconnects_if_the_first_does_not() -> None:
    peer = established()
    peer.say(DisConn())
    peer.connection.close(peer.now)
    peer.run()
    assert peer.mids() == [Mid.DIS_CONN]
    assert not peer.ordered(Disconnect)
    peer.wait(1.0)
    assert len(peer.ordered(Disconnect)) == 1
    assert peer.connection.error is None


@item(17)
def test_a_reset_after_the_end_of_the_stream() -> None:
    peer = established()
    peer.say(DisConn())
    receive = peer.receive(10)
    assert receive.done
    assert receive.filled == 0
    assert receive.error is None
    peer.say(AbortConn())
    assert peer.connection.cause is SdpCause.RESET
    peer.ended(peer.connection.error)


@item(17)
@pytest.mark.parametrize("ended", ["neither", "this", "other"])
def test_a_disconnect_without_an_end_is_a_reset(ended: str) -> None:
    peer = established()
    if ended == "this":
        peer.connection.shutdown_write(peer.now)
    elif ended == "other":
        peer.say(DisConn())
    peer.run()
    receive = peer.receive(10) if ended != "other" else None
    peer.disconnected()
    assert peer.connection.cause is SdpCause.RESET
    if receive is not None:
        assert receive.error is peer.connection.error
    with pytest.raises(Unavailable):
        peer.connection.send(memoryview(b"x"), peer.now)


@item(17)
@pytest.mark.parametrize("unread", ["bytes", "advertisement"])
@pytest.mark.parametrize("shut", [False, True])
def test_close_with_unread_data_is_a_reset(unread: str, shut: bool) -> None:
    peer = established()
    if shut:
        peer.connection.shutdown_write(peer.now)
        peer.run()
    if unread == "bytes":
        peer.data(b"unread")
    else:
        header, payload = peer.advertise(300, 8)
        peer.say(header, payload)
    peer.hear()
    peer.connection.close(peer.now)
    peer.run()
    assert peer.mids() == ([Mid.ABORT_CONN] if shut else [])
    assert len(peer.ordered(Disconnect)) == 1
    assert peer.connection.cause is SdpCause.ABORTED


@item(17)
@pytest.mark.parametrize("shut", [False, True])
def test_linger_0_is_a_reset(shut: bool) -> None:
    peer = established()
    if shut:
        peer.connection.shutdown_write(peer.now)
        peer.run()
    peer.hear()
    peer.connection.close(peer.now, 0)
    peer.run()
    assert peer.mids() == ([Mid.ABORT_CONN] if shut else [])
    assert peer.connection.state is SdpState.CLOSED


@item(17)
def test_close_waits_for_what_is_queued_and_then_gives_up() -> None:
    peer = established()
    peer.credit = 2
    peer.data()
    send = peer.send(b"queued", bcopy_only=True)
    peer.connection.close(peer.now, 5.0)
    peer.run()
    assert not send.done
    peer.wait(5.1)
    assert peer.connection.cause is SdpCause.TIMEOUT
    assert send.error is not None


@item(17)
def test_nothing_is_sent_after_the_end_but_credit_and_answers() -> None:
    peer = established()
    peer.connection.shutdown_write(peer.now)
    peer.run()
    with pytest.raises(Misuse):
        peer.connection.send(memoryview(b"x"), peer.now)
    header, payload = peer.advertise(300, 8)
    peer.receive(300, waitall=True)
    assert kinds(peer.say(header, payload))[-1] is Mid.RDMA_RD_COMPL


# --- 18: moves ---


@item(18)
@pytest.mark.parametrize("mover", ["left", "right"])
def test_a_socket_moves_to_another_process(mover: str) -> None:
    """Unread bytes, unsent bytes and what was advertised go on in the new connection, in order."""
    settings = small(strategy=lambda: pipelined(sink_min=None))
    pair = Pair(settings, settings).establish()
    old = pair.left if mover == "left" else pair.right
    stayer = pair.other(old)
    there, back = stream(700), stream(900, 300)
    stayer.send(there[:50], bcopy_only=True)
    pair.run()
    unsent = old.send(back)
    late = stayer.send(there[50:])
    old.connection.suspend(6001, old.now)
    old.run()
    pair.run()
    assert SdpEventKind.SUSPENDED in told(old)
    assert SdpEventKind.RESUMING in told(stayer)
    assert old.connection.state is SdpState.CLOSED
    moved = moved_to(pair, old, settings)
    assert stayer.ordered(Connect)[-1].service_id == 0x1_0000 | 6001
    received = {moved.left: bytearray(), moved.right: bytearray()}
    for _ in range(20):
        moved.run()
        for end, data in received.items():
            data += end.read(1000)
    assert bytes(received[moved.right]) == there
    assert bytes(received[moved.left]) == back
    assert unsent.done
    assert late.done
    for end in (moved.left, moved.right):
        assert end.connection.send_mode is Mode.COMBINED or end.connection.send_mode is Mode.PIPELINED
        end.connection.shutdown_write(end.now)
        end.run()
    moved.wait(5)
    assert moved.left.connection.error is moved.right.connection.error is None
    assert moved.left.connection.state is moved.right.connection.state is SdpState.CLOSED


@item(18)
def test_both_sockets_move_at_once() -> None:
    """The accepting end's goes first; the connecting end asks again in the new connection."""
    settings = small()
    pair = Pair(settings, settings).establish()
    pair.left.connection.suspend(6001, pair.left.now)
    pair.right.connection.suspend(6002, pair.right.now)
    pair.left.run()
    pair.right.run()
    pair.run()
    assert SdpEventKind.SUSPENDED in told(pair.right)
    assert SdpEventKind.SUSPENDED not in told(pair.left)
    moved = moved_to(pair, pair.right, settings)
    moved.run()
    assert SdpEventKind.SUSPENDED in told(moved.left)
    assert SdpEventKind.RESUMING in told(moved.right)
    again = moved_to(moved, moved.left, settings)
    again.left.send(b"still here", bcopy_only=True)
    again.run()
    assert again.right.read() == b"still here"


# --- 19: MSG_WAITALL and MSG_PEEK ---


@item(19)
def test_a_receive_that_must_be_full_is_never_shown() -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    peer.receive(1000, waitall=True)
    peer.receive(1000)  # behind it: neither
    assert Mid.SINK_AVAIL not in peer.mids()
    peer.wait(5)
    assert Mid.SINK_AVAIL not in peer.mids()


@item(19)
def test_a_peek_at_what_is_only_advertised_asks_for_it_by_bcopy() -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    header, _ = peer.advertise(100)
    peer.say(header)
    assert SdpEventKind.READABLE in peer.kinds()  # without a byte of payload
    assert not peer.connection.peek(peer.now)
    peer.run()
    assert peer.mids() == [Mid.SEND_SM]
    data = bytes(peer.memory(0xA1))
    peer.data(data)
    assert bytes(peer.connection.peek(peer.now)) == data
    assert peer.read() == data


# --- 20: both ends send first, then receive ---


@item(20)
@pytest.mark.parametrize("zcopy", [True, False])
def test_both_ends_send_as_much_as_sockets_buffer_before_they_receive(zcopy: bool) -> None:
    """Sends of SO_SNDBUF + SO_RCVBUF bytes: the first is in the queue, the second in private buffers."""
    count, size = 16, 1024
    settings = small(
        receive_count=count,
        receive_size=size,
        strategy=lambda: pipelined(bcopy_max=0 if zcopy else 1 << 30, sink_min=None),
    )
    pair = Pair(settings, settings).establish()
    receive_buffer = (count - 4) * (size - 16)  # SO_RCVBUF: what is left when the reserve is not counted
    data = stream(2 * receive_buffer)
    sends = {end: [end.send(data[at : at + 500]) for at in range(0, len(data), 500)] for end in (pair.left, pair.right)}
    pair.wait(3)
    received = {end: bytearray() for end in sends}
    for _ in range(400):
        for end, so_far in received.items():
            so_far += end.read(700)
            pair.run()
    pair.wait(3)
    for end in sends:
        received[end] += end.read(1 << 20)
        assert bytes(received[end]) == data[: len(received[end])]
        assert len(received[end]) == len(data)
        assert all(send.done for send in sends[end])
