"""Two real cores joined by hand, so that what crosses is chosen: corners that random conversations seldom come to."""

from __future__ import annotations

import pytest
from raw import CREDIT, End, Pair, RawPeer, moved_to, pipelined, small

from sidestep.sdp.requests import Accept, Connect, SdpEventKind, StreamReceive
from sidestep.sdp.settings import Carrier, SdpSettings
from sidestep.sdp.states import SdpState
from sidestep.sdp.wire import OOB_PEND, OOB_PRES, Data, IwarpHello, Mid, Mode, SuspComm, decode, encode, service_id


def stream(length: int, start: int = 0) -> bytes:
    """Bytes that tell their place."""
    return bytes((start + index) % 251 for index in range(length))


def in_mode(pair: Pair, mode: Mode) -> None:
    """The direction from left to right, and both ends at rest."""
    pair.left.connection.want_send_mode(mode, pair.left.now)
    pair.left.run()
    pair.right.send(b"!", bcopy_only=True)  # what acknowledges an earlier change, before which there is no other
    pair.run()
    assert pair.left.connection.send_mode is pair.right.connection.receive_mode is mode


# --- SinkAvails that cross payload, and a change to Combined behind it (§11.4) ---


@pytest.mark.spec("docs/wire/sdp.md §11.4, §12.1")
@pytest.mark.parametrize("advertised", [False, True], ids=["", "and a SrcAvail"])
@pytest.mark.parametrize("shown", [1, 2, 3])
@pytest.mark.parametrize("crossing", [0, 1, 2, 3])
def test_sink_avails_cross_payload_and_the_end_of_pipelined_mode(crossing: int, shown: int, advertised: bool) -> None:
    settings = small(strategy=lambda: pipelined(pipelined=False))
    pair = Pair(settings, settings).establish()
    in_mode(pair, Mode.PIPELINED)
    left, right = pair.left, pair.right
    receives = [right.receive(400) for _ in range(shown)]
    assert [decode(memoryview(message)).bsdh.mid for message in right.outbox] == [Mid.SINK_AVAIL] * shown
    sent = bytearray()
    for index in range(crossing):
        sent += stream(10 + index, index)
        left.send(stream(10 + index, index), bcopy_only=True)
    if advertised:
        sent += stream(500, 7)
        left.send(stream(500, 7))
    left.connection.want_send_mode(Mode.COMBINED, left.now)
    left.run()
    assert left.connection.send_mode is Mode.COMBINED
    while right.outbox:  # all of these were sent before anything of the left end has arrived
        pair.step(right)
    pair.run()
    source, sink = left.connection._source, right.connection._sink
    assert source.pnd == sink.nd
    assert not source.sinks
    assert not sink.shown
    for each in receives:
        right.connection.cancel_receive(each, right.now)
    right.run()
    while right.read(1000):
        pair.run()
    ended = [told for told in right.told if isinstance(told, StreamReceive)]
    assert b"".join(bytes(each.view[: each.filled]) for each in ended) == bytes(sent)
    in_mode(pair, Mode.PIPELINED)  # and the counters still tell a valid SinkAvail
    last = right.receive(400)
    pair.run()
    assert len(source.sinks) == len(sink.shown) == 1
    left.send(stream(300, 3))
    pair.run()
    assert bytes(last.view[: last.filled]) == stream(300, 3)
    assert source.pnd == sink.nd


# --- urgent data ---


@pytest.mark.spec("docs/wire/sdp.md §13")
def test_an_urgent_byte_is_announced_however_much_is_queued_behind_it() -> None:
    """OOB_PEND goes with the urgent byte at the latest; what follows does not put it off."""
    peer = RawPeer(SdpSettings())
    peer.accept()
    peer.send(b"!", urgent=True)
    peer.send(bytes(100_000), bcopy_only=True)
    peer.connection.handle_established(peer.now)
    peer.run()
    first = peer.hear()[0]
    assert first.bsdh.flags == OOB_PEND | OOB_PRES
    assert bytes(first.payload) == b"!"


@pytest.mark.spec("docs/wire/sdp.md §13, §15")
def test_an_urgent_byte_that_moves_is_pending_once() -> None:
    """The new process announces it anew; the announcement of the old one comes to nothing."""
    settings = small(strategy=lambda: pipelined(sink_min=None, pipelined=False))
    pair = Pair(settings, settings).establish()
    old, stayer = pair.left, pair.right
    old.send(stream(500))  # nobody reads: the urgent byte has to wait, and is announced meanwhile
    old.send(b"!", urgent=True)
    pair.run()
    assert stayer.connection.urgent_pending
    old.connection.suspend(6001, old.now)
    old.run()
    pair.run()
    moved = moved_to(pair, old, settings)
    moved.run()
    received = b""
    for _ in range(5):
        received += stayer.read(1000)
        moved.run()
    assert received == stream(500)
    assert stayer.connection.take_urgent() == ord("!")
    assert not stayer.connection.urgent_pending


# --- advertisements ---


@pytest.mark.spec("docs/wire/sdp.md §10.2, crossing SrcAvails")
def test_both_advertise_and_the_only_receive_takes_what_was_refused() -> None:
    """No receive is left for the second advertisement, and our own waits as well: it is refused without a timeout."""
    peer = RawPeer(small(strategy=lambda: pipelined(sink_min=None))).establish()
    peer.receive_mode(Mode.PIPELINED)
    peer.send(stream(500))
    peer.hear()
    for rkey in (0xA1, 0xA2):
        header, _ = peer.advertise(200, rkey=rkey, va=rkey << 20)
        peer.say(header)
    peer.credit = CREDIT
    peer.receive(200)
    heard = [Mid(message.bsdh.mid) for message in peer.data(stream(200))]
    assert Mid.SEND_SM in heard


# --- RDMA Reads over iWARP ---


@pytest.mark.spec("draft-pinkerton-iwarp-sdp; docs/wire/sdp.md §23.3 rule 3")
@pytest.mark.parametrize("depth", [1, 2, 9])
def test_no_more_rdma_reads_than_the_other_end_serves(depth: int) -> None:
    settings = small(carrier=Carrier.IWARP, reads_max=4, strategy=lambda: pipelined(sink_min=None))
    peer = RawPeer(settings)
    hello = IwarpHello(16, 32784, 32784, loc_ord=depth, loc_ird=depth)
    assert peer.connection.accept(encode(hello, bufs=CREDIT, mseq=0, mseq_ack=0), None, peer.now)
    peer.run()
    peer.connection.handle_established(peer.now)
    peer.run()
    peer.receive_mode(Mode.PIPELINED)
    peer.hold_completions = True
    for number in range(6):
        header, _ = peer.advertise(100, rkey=number + 1, va=(number + 1) << 20)
        peer.say(header)
    for _ in range(6):
        peer.receive(100)
    assert peer.connection._sink.reads == min(depth, 4)


# --- the end ---


@pytest.mark.spec("docs/wire/sdp.md §15, §16.1")
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_who_moves_and_then_never_closes_is_reset(when: str) -> None:
    """The time that close() allows is not started anew, nor forgotten, because the other end's socket moves."""
    peer = RawPeer(small(close_s=60.0)).establish()
    if when == "before":
        peer.connection.close(peer.now)
        peer.run()
    peer.say(SuspComm(service_id(6001)))
    peer.disconnected()
    peer.is_in(SdpState.RESUMING)
    if when == "meanwhile":
        peer.connection.close(peer.now)
        peer.run()
    peer.resume()
    peer.say(Data())
    peer.is_in(SdpState.FIN_WAIT)
    peer.wait(61)
    assert peer.connection.error is not None
    peer.is_in(SdpState.CLOSED)
    assert SdpEventKind.CLOSED in peer.kinds()


@pytest.mark.spec("docs/wire/sdp.md §15, §16.1")
def test_who_closes_and_is_never_answered_by_the_new_place_gives_up() -> None:
    peer = RawPeer(small(close_s=60.0)).establish()
    peer.connection.close(peer.now)
    peer.run()
    peer.say(SuspComm(service_id(6001)))
    peer.disconnected()
    peer.renew()
    peer.connection.resume(peer.now)
    peer.run()
    peer.is_in(SdpState.REQ_SENT)
    peer.wait(61)
    assert SdpEventKind.CLOSED in peer.kinds()


@pytest.mark.spec("docs/wire/sdp.md §15, §16.1")
@pytest.mark.parametrize("who", ["the one that moves", "the other one"])
def test_close_while_a_stream_moves_loses_nothing(who: str) -> None:
    """To the program it is still the connection that it had: what it has sent arrives."""
    settings = small()
    pair = Pair(settings, settings).establish()
    old, stayer = pair.left, pair.right
    old.connection.suspend(6001, old.now)
    old.run()
    pair.run()
    suspended = old.connection.suspended
    assert suspended is not None
    fresh = End(settings)
    fresh.connection.take_over(suspended)
    moved = Pair(settings, settings)
    moved.left, moved.right = stayer, fresh
    stayer.renew()
    stayer.outbox.clear()
    stayer.connection.resume(stayer.now)
    stayer.run()
    stayer.is_in(SdpState.REQ_SENT)
    hello = stayer.ordered(Connect)[-1].private_data
    assert fresh.connection.accept(hello, None, fresh.now)
    fresh.run()
    fresh.is_in(SdpState.REP_SENT)
    closes, reads = (fresh, stayer) if who == "the one that moves" else (stayer, fresh)
    send = closes.send(b"the last word", bcopy_only=True)
    closes.connection.close(closes.now)
    closes.run()
    stayer.connection.handle_accepted(fresh.ordered(Accept)[-1].private_data, stayer.now)
    stayer.run()
    fresh.connection.handle_established(fresh.now)
    fresh.run()
    moved.run()
    assert reads.read() == b"the last word"
    assert send.error is None
    reads.connection.close(reads.now)
    reads.run()
    moved.wait(5)
    assert closes.connection.error is reads.connection.error is None
    closes.is_in(SdpState.CLOSED)
    reads.is_in(SdpState.CLOSED)


@pytest.mark.spec("docs/wire/sdp.md §15")
def test_an_answer_that_never_completes_has_come() -> None:
    """The end that moves has SuspCommAck and leaves; the acknowledgement, which would complete it, is lost."""
    peer = RawPeer(small()).establish()
    peer.hold_completions = True
    send = peer.send(b"a word", bcopy_only=True)
    assert Mid.SUSP_COMM_ACK in [message.bsdh.mid for message in peer.say(SuspComm(service_id(6001)))]
    peer.disconnected()
    peer.is_in(SdpState.RESUMING)
    assert send.done
    assert send.error is None
    peer.hold_completions = False
    peer.resume()
    peer.say(Data())
    peer.is_in(SdpState.ESTABLISHED)


def test_what_is_over_has_no_timer_of_the_same_moment() -> None:
    """Two timers are due at once, and the first ends the connection."""
    peer = RawPeer(small(keepalive_s=30.0, suspend_s=60.0)).establish()
    peer.say(SuspComm(service_id(6001)))
    peer.disconnected()
    peer.is_in(SdpState.RESUMING)
    peer.wait(31)
    peer.now += 100.0
    peer.connection.handle_timeout(peer.now)
    peer.run()
    peer.is_in(SdpState.CLOSED)
    assert peer.connection.next_deadline() is None
