"""What a peer may try, and what must come of it: memory stays bounded and out of reach, everything ends, in order."""

from __future__ import annotations

import pytest
from raw import CREDIT, RawPeer, Surprise, pipelined, small

from sidestep import limits
from sidestep.errors import Misuse, SidestepError
from sidestep.rdma.work import Status
from sidestep.sdp.connection import SdpCause
from sidestep.sdp.requests import NeedBuffers, SdpEventKind, StreamReceive
from sidestep.sdp.settings import SdpSettings
from sidestep.sdp.states import SdpState
from sidestep.sdp.wire import (
    OOB_PEND,
    OOB_PRES,
    AbortConn,
    ChRcvBuf,
    ChRcvBufAck,
    Data,
    DisConn,
    Mid,
    Mode,
    RdmaRdCompl,
    RdmaWrCompl,
    SendSm,
    SinkAvail,
    SinkCancelAck,
    SrcAvail,
    SrcAvailCancel,
    SuspComm,
    SuspCommAck,
)

SERVICE = 0x1_0000


def established(**settings: object) -> RawPeer:
    return RawPeer(small(**settings)).establish()


def filled(request: StreamReceive) -> bytes:
    return bytes(request.view[: request.filled])


# --- order of the stream ---


def test_a_receive_that_must_be_full_is_filled_before_the_next_is_read_into() -> None:
    """Whatever the strategy thinks of the few bytes that are left of it."""
    peer = established(strategy=lambda: pipelined(read_min=64, sink_min=None), reads_max=8)
    peer.receive_mode(Mode.PIPELINED)
    peer.hold_completions = True
    first = peer.receive(320, waitall=True)
    second = peer.receive(400)
    one, _ = peer.advertise(300, rkey=1)
    two, _ = peer.advertise(300, rkey=2, fill=77)
    peer.say(one)
    peer.say(two)
    peer.hold_completions = False
    peer.run()
    stream = bytes(peer.memory(1) + peer.memory(2))
    if Mid.SEND_SM in peer.mids():
        peer.data(stream[300:500])
        peer.data(stream[500:])
    assert first.done
    assert filled(first) == stream[:320]
    assert filled(second) == stream[320 : 320 + second.filled]


def test_an_urgent_byte_alone_uses_up_a_sink_avail_and_loses_no_receive() -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    first, second = peer.receive(400), peer.receive(400)
    assert peer.mids() == [Mid.SINK_AVAIL] * 2
    peer.data(b"!", flags=OOB_PEND | OOB_PRES)
    assert peer.connection.take_urgent() == ord("!")
    peer.data(b"abc")
    assert first.done
    assert filled(first) == b"abc"
    peer.data(b"def")
    assert second.done
    assert filled(second) == b"def"


def test_an_empty_write_uses_up_a_sink_avail_and_loses_no_receive() -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    first, second = peer.receive(400), peer.receive(400)
    shown = [message.header for message in peer.hear()]
    assert isinstance(shown[1], SinkAvail)
    peer.say(RdmaWrCompl(0))
    assert not first.done
    second.view[:3] = b"abc"  # as the device writes it
    peer.say(RdmaWrCompl(3))
    assert first.done
    assert filled(first) == b"abc"
    assert not second.done
    peer.data(b"def")
    assert filled(second) == b"def"


def test_payload_larger_than_the_receive_shown_keeps_its_place() -> None:
    """The other end may send more than was shown once the private buffers have become larger."""
    peer = established(receive_size=64, receive_count=5, receive_size_max=256)
    peer.receive_mode(Mode.PIPELINED)
    first, second = peer.receive(80), peer.receive(80)
    assert peer.mids() == [Mid.SINK_AVAIL] * 2
    peer.say(ChRcvBuf(256))
    for _ in range(8):
        if any(message.bsdh.mid == Mid.CH_RCV_BUF_ACK for message in peer.data()):
            break
    stream = bytes(range(200))
    heard = peer.data(stream[:120])
    assert filled(first) == stream[:80]
    # what is over stands before all that may come into the second one, which is therefore asked for again
    assert [Mid(message.bsdh.mid) for message in heard] == [Mid.SINK_AVAIL_CANCEL]
    peer.say(SinkCancelAck())
    assert filled(second) == stream[80:120]


# --- requests that end ---


def test_a_send_cancelled_half_way_ends() -> None:
    peer = established(send_queue=32)
    peer.credit = 4
    peer.data()
    send = peer.send(bytes(100_000), bcopy_only=True)
    assert 0 < send.offset < send.length
    peer.connection.cancel_send(send, peer.now)
    peer.run()
    assert send.done
    assert send.passed == send.offset


def test_a_cancelled_send_stops_even_if_its_advertisement_was_read_meanwhile() -> None:
    peer = established(strategy=lambda: pipelined(advert_max=100))
    peer.send_mode(Mode.PIPELINED)
    peer.connection.want_send_mode(Mode.PIPELINED, peer.now)
    peer.credit = 1
    send = peer.send(bytes(1000))
    peer.hear()
    peer.credit = 1
    peer.data()
    read = send.passed + sum(advert.length for advert in peer.connection._source.adverts)
    peer.connection.cancel_send(send, peer.now)
    peer.run()
    peer.credit = CREDIT
    for advert in list(peer.connection._source.adverts):
        peer.credit = 1
        peer.say(RdmaRdCompl(advert.length))
    peer.credit = CREDIT
    peer.data()
    assert send.done
    assert send.passed == read


def test_memory_comes_back_after_the_message_that_carried_its_first_bytes_has_completed() -> None:
    """RdmaRdCompl may overtake the completion of the SrcAvail, whose payload is the user's memory."""
    peer = established()
    peer.hold_completions = True
    send = peer.send(bytes(500))
    assert peer.mids() == [Mid.SRC_AVAIL]
    peer.say(RdmaRdCompl(500 - 8))
    assert not send.done
    peer.complete()
    assert send.done


# --- both ends ask at once ---


def test_a_request_that_was_disregarded_can_be_made_again() -> None:
    """Both ask for other buffers: the connecting end answers, and may then ask once more (SDP (A4) ChRcvBuf)."""
    peer = RawPeer(small()).establish(accepting=False)
    before = peer.connection.remote_size
    peer.connection.resize_remote(4096, peer.now)
    peer.run()
    assert peer.mids() == [Mid.CH_RCV_BUF]
    heard = peer.say(ChRcvBuf(128), ack=0)  # it had not seen ours, and disregards it
    assert [Mid(message.bsdh.mid) for message in heard] == [Mid.CH_RCV_BUF_ACK]
    assert SdpEventKind.RESIZED in peer.kinds()
    assert peer.connection.remote_size == before
    peer.connection.resize_remote(4096, peer.now)
    peer.run()
    peer.say(ChRcvBufAck(4096))
    assert peer.connection.remote_size == 4096


def test_a_request_that_was_seen_is_not_made_again() -> None:
    peer = RawPeer(small()).establish(accepting=False)
    peer.connection.resize_remote(4096, peer.now)
    peer.run()
    peer.hear()
    heard = peer.say(ChRcvBuf(128))  # acknowledges ours, so it will be answered
    assert [Mid(message.bsdh.mid) for message in heard] == [Mid.CH_RCV_BUF_ACK]


def test_a_second_request_that_is_misuse_does_not_spoil_the_first() -> None:
    peer = RawPeer(small()).establish()
    before = peer.connection.remote_size
    peer.connection.resize_remote(1000, peer.now)
    peer.run()
    with pytest.raises(Misuse):
        peer.connection.resize_remote(500, peer.now)
    peer.say(ChRcvBufAck(before))
    assert peer.connection.error is None
    assert peer.connection.remote_size == before


def test_both_move_at_once_the_connecting_end_answers() -> None:
    peer = RawPeer(small()).establish(accepting=False)
    peer.hold_disconnect = True
    peer.connection.suspend(6001, peer.now)
    peer.run()
    assert peer.mids() == [Mid.SUSP_COMM]
    assert [Mid(message.bsdh.mid) for message in peer.say(SuspComm(SERVICE | 6002), ack=0)] == [Mid.SUSP_COMM_ACK]
    assert peer.connection.state is SdpState.RESUMING


def test_both_move_at_once_the_accepting_end_waits_for_its_answer() -> None:
    peer = established()
    peer.connection.suspend(6001, peer.now)
    peer.run()
    assert peer.mids() == [Mid.SUSP_COMM]
    assert peer.say(SuspComm(SERVICE | 6002), ack=0) == []
    peer.say(SuspCommAck())
    assert peer.connection.state is SdpState.SUSPENDED


# --- moving, and everything that can go wrong then ---


def test_a_message_after_susp_comm_ends_the_connection_whatever_completes_then() -> None:
    peer = established()
    peer.hold_completions = peer.hold_disconnect = True
    peer.say(SuspComm(SERVICE | 6002))
    peer.data()  # credit may follow, the stream may not
    assert peer.connection.error is None
    peer.data(b"late")
    peer.complete()
    assert peer.connection.state is SdpState.ABORTING
    peer.hold_disconnect = False
    peer.run()
    peer.broken_by("suspend_amid")


def test_an_abort_while_the_answer_to_susp_comm_is_on_its_way() -> None:
    peer = established()
    peer.hold_completions = peer.hold_disconnect = True
    peer.say(SuspComm(SERVICE | 6002))
    peer.connection.abort(peer.now)
    peer.run()
    peer.complete()
    peer.hold_disconnect = False
    peer.run()
    assert peer.connection.state is SdpState.CLOSED


@pytest.mark.parametrize("how", ["time", "abort", "close"])
def test_a_connection_that_never_resumes_ends(how: str) -> None:
    peer = established()
    receive = peer.receive(10)
    peer.say(SuspComm(SERVICE | 6002))
    assert peer.connection.state is SdpState.RESUMING
    send = peer.send(b"waits")
    if how == "abort":
        peer.connection.abort(peer.now)
    elif how == "close":
        peer.connection.close(peer.now)
    peer.run()
    peer.wait(1000)
    peer.is_in(SdpState.CLOSED)
    assert receive.done
    assert send.done
    assert send.error is not None


@pytest.mark.parametrize("how", ["time", "abort", "close"])
def test_a_connection_that_has_moved_ends_though_the_peer_stays(how: str) -> None:
    peer = established()
    peer.connection.suspend(6001, peer.now)
    peer.run()
    peer.say(SuspCommAck())
    assert peer.connection.state is SdpState.SUSPENDED
    if how == "abort":
        peer.connection.abort(peer.now)
    elif how == "close":
        peer.connection.close(peer.now)
    peer.run()
    peer.wait(1000)
    peer.is_in(SdpState.CLOSED)


def test_nothing_can_be_sent_where_it_would_never_go() -> None:
    peer = established()
    peer.connection.suspend(6001, peer.now)
    peer.run()
    peer.say(SuspCommAck())
    with pytest.raises(SidestepError):
        peer.connection.send(memoryview(b"lost"), peer.now)


def test_a_confirmed_move_is_one_though_the_peer_disconnects_before_everything_completed() -> None:
    peer = established()
    peer.hold_completions = True
    sent = peer.send(b"delivered", bcopy_only=True)
    peer.connection.suspend(6001, peer.now)
    peer.run()
    assert peer.mids() == [Mid.DATA, Mid.SUSP_COMM]
    peer.say(SuspCommAck())
    peer.disconnected()
    assert SdpEventKind.SUSPENDED in peer.kinds()
    assert peer.connection.error is None
    assert sent.done
    assert sent.error is None


def test_a_confirmed_move_is_one_though_the_peer_is_gone_and_its_disconnect_was_lost() -> None:
    """What is not acknowledged then is what it had no reason to wait for; `tests/simulate/show.py 13389`."""
    peer = established()
    peer.hold_completions = True
    sent = peer.send(b"delivered", bcopy_only=True)
    peer.connection.suspend(6001, peer.now)
    peer.run()
    peer.say(SuspCommAck())
    peer.complete(1, Status.RETRY_EXCEEDED)
    assert SdpEventKind.SUSPENDED in peer.kinds()
    assert peer.connection.error is None
    assert sent.done
    assert sent.error is None
    peer.disconnected()
    peer.is_in(SdpState.CLOSED)


def test_credit_goes_on_until_a_move_is_confirmed() -> None:
    """The answer may lack it (docs/internals/sdp.md, the model)."""
    peer = established()
    for _ in range(5):
        peer.data(b"x")
    peer.connection.suspend(6001, peer.now)
    peer.run()
    assert peer.mids()[-1] is Mid.SUSP_COMM
    peer.data()
    while peer.read(1):
        pass
    assert set(peer.mids()) == {Mid.DATA}


def test_what_was_not_read_goes_on_without_its_private_buffers() -> None:
    peer = established()
    peer.data(b"one ")
    peer.data(b"two ")
    peer.say(SuspComm(SERVICE | 6002))
    assert peer.connection.state is SdpState.RESUMING
    assert peer.read(4) == b"one "
    peer.resume()
    peer.is_in(SdpState.ESTABLISHED)
    assert len(peer.posted) == peer.buffers == peer.settings.receive_count
    peer.data(b"three")
    assert peer.read() == b"two three"


# --- the transport ---


def test_an_end_that_does_not_arrive_ends_the_connection() -> None:
    """Both have said DisConn; ours is never acknowledged."""
    peer = established()
    peer.hold_completions = True
    peer.connection.shutdown_write(peer.now)
    peer.run()
    peer.say(DisConn())
    assert peer.connection.state is SdpState.TIME_WAIT
    peer.complete(status=Status.RETRY_EXCEEDED)
    peer.is_in(SdpState.CLOSED)


def test_an_answer_of_nothing_buys_no_time() -> None:
    """RdmaRdCompl of no bytes, again and again, does not keep the user's memory for ever."""
    peer = established(advert_answer_s=1.0, cancel_answer_s=5.0)
    send = peer.send(bytes(500))
    for _ in range(20):
        peer.wait(0.9)
        if peer.connection.error is None:
            peer.say(RdmaRdCompl(0))
    assert send.done


def test_memory_that_wraps_around_is_not_touched() -> None:
    peer = established()
    peer.receive(400)
    peer.say(SrcAvail(300, 1, (1 << 64) - 8), bytes(8))
    peer.broken_by("address")
    peer = established()
    peer.send_mode(Mode.PIPELINED)
    peer.say(SinkAvail(40000, 1, (1 << 64) - 39999, 0))
    peer.broken_by("address")


def test_a_buffer_that_was_cut_is_not_given_back_while_it_is_posted() -> None:
    peer = established()
    peer.say(ChRcvBuf(64))
    peer.say(RdmaRdCompl(1))
    peer.broken_by("read_unasked")


def test_messages_that_come_before_the_hello_ack_are_not_lost() -> None:
    """Completions and the words of the connection manager come by different ways."""
    peer = RawPeer(small()).connect()
    peer.data(b"early ")
    peer.data(b"bird")
    peer.connection.handle_accepted(peer.hello_ack(), peer.now)
    peer.run()
    assert peer.read() == b"early bird"


def test_messages_before_a_hello_ack_that_never_comes_cost_nothing() -> None:
    peer = RawPeer(small()).connect()
    peer.data(b"early")
    peer.connection.handle_unreachable(peer.now)
    peer.run()
    peer.disconnected()
    assert peer.buffers == 0
    assert peer.connection.cause is SdpCause.TIMEOUT


def test_bytes_that_are_given_back_come_before_what_a_receive_shown_may_get() -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    receive = peer.receive(400)
    assert peer.mids() == [Mid.SINK_AVAIL]
    peer.connection.put_back(b"back", peer.now)
    peer.run()
    assert peer.mids() == [Mid.SINK_AVAIL_CANCEL]
    peer.say(SinkCancelAck())
    assert filled(receive) == b"back"


# --- growth ---

FLOOD = 2000


def _flood(peer: RawPeer, *messages: object, payload: bytes = b"", flags: int = 0, bufs: int = 0) -> None:
    """Says these over and over, without ever granting credit."""
    for _ in range(FLOOD):
        for message in messages:
            if peer.connection.error is not None:
                return
            body = payload if isinstance(message, Data) else b""
            peer.say(message, body, flags=flags, bufs=bufs)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(200, 128), (256,), tuple(range(255, 37, -1))])
def test_requests_for_other_buffers_do_not_pile_up(sizes: tuple[int, ...]) -> None:
    peer = established()
    _flood(peer, *map(ChRcvBuf, sizes))
    peer.broken_by("resize_second")


def test_a_request_cannot_ask_for_all_memory() -> None:
    peer = established()
    peer.say(ChRcvBuf(1 << 31))
    assert sum(order.count * order.size for order in peer.ordered(NeedBuffers)[1:]) <= 8 << 20


def test_withdrawals_do_not_pile_up() -> None:
    peer = established(strategy=lambda: pipelined(sink_min=None))
    peer.receive_mode(Mode.PIPELINED)
    header, _ = peer.advertise(300)
    _flood(peer, header, SrcAvailCancel())
    peer.broken_by("src_avail_cancelling")


def test_reads_that_cannot_be_reported_do_not_pile_up() -> None:
    peer = established(strategy=lambda: pipelined(sink_min=None))
    peer.receive_mode(Mode.PIPELINED)
    header, _ = peer.advertise(300)
    for _ in range(FLOOD):
        if peer.connection.error is None:
            peer.receive(300)
            peer.say(header, bufs=0)
    peer.broken_by("adverts")


def test_urgent_bytes_do_not_pile_up() -> None:
    """What comes with them holds its private buffer until it is read."""
    peer = established()
    with pytest.raises(Surprise, match="no receive is posted"):
        _flood(peer, Data(), payload=b"x!", flags=OOB_PEND | OOB_PRES, bufs=CREDIT)


def test_of_urgent_bytes_with_nothing_between_the_last_one_counts() -> None:
    """They hold no private buffer: nobody is told to read, so what is to be read later must have room."""
    peer = established()
    _flood(peer, Data(), payload=b"!", flags=OOB_PEND | OOB_PRES, bufs=CREDIT)
    assert peer.connection.error is None
    assert len(peer.connection._sink.ready) == 1


def test_announcements_do_not_pile_up() -> None:
    peer = established()
    _flood(peer, Data(), flags=OOB_PEND, bufs=CREDIT)
    assert peer.connection.error is None


# --- urgent bytes ---


def test_an_urgent_byte_alone_makes_nothing_readable() -> None:
    """Who is told that there is something to read and finds nothing would wait for ever."""
    peer = established()
    peer.data(b"!", flags=OOB_PEND | OOB_PRES)
    assert peer.kinds() == [SdpEventKind.URGENT]
    assert not peer.connection.readable
    assert peer.connection.available == 0


def test_an_urgent_byte_in_the_stream_is_readable_and_can_be_peeked_at() -> None:
    peer = established(urgent_inline=True)
    peer.data(b"ab!", flags=OOB_PEND | OOB_PRES)
    assert peer.connection.available == 3
    assert peer.connection.take_urgent() is None
    assert peer.read(2) == b"ab"
    assert peer.connection.at_mark
    assert peer.connection.readable
    assert bytes(peer.connection.peek(peer.now)) == b"!"
    assert peer.connection.available == 1
    assert peer.read() == b"!"
    assert peer.connection.available == 0


def test_an_urgent_byte_that_was_not_announced_is_told() -> None:
    peer = established()
    peer.data(b"!", flags=OOB_PRES)
    assert SdpEventKind.URGENT in peer.kinds()
    assert peer.connection.take_urgent() == ord("!")


@pytest.mark.parametrize("size", [65_536, 70_000, 100_000, 131_072, 200_000])
def test_the_announcement_is_not_too_early(size: int) -> None:
    """At most 65 535 bytes between OOB_PEND and the byte, those of the same message included (SDP (A4) OOB)."""
    peer = RawPeer().establish()
    peer.send(bytes(size), urgent=True)
    messages = peer.hear()
    index = next(number for number, message in enumerate(messages) if message.bsdh.flags & OOB_PEND)
    assert sum(len(message.payload) for message in messages[index:]) - 1 <= 65_535
    assert sum(message.bsdh.flags & OOB_PEND > 0 for message in messages) == 1


def test_the_announcement_rides_on_whatever_goes_first() -> None:
    """On an answer, too; and on a SrcAvail only if what that advertises does not put the byte too far ahead."""
    peer = established()
    header, payload = peer.advertise(300, 8)
    peer.say(header, payload, bufs=0)
    peer.receive(300, waitall=True)  # its report has no credit to go
    peer.send(b"!", urgent=True)
    assert peer.mids() == []
    heard = peer.data()
    assert [(Mid(one.bsdh.mid), one.bsdh.flags & 3) for one in heard] == [
        (Mid.RDMA_RD_COMPL, OOB_PEND),
        (Mid.DATA, OOB_PRES),
    ]


def test_an_announcement_does_not_ride_on_what_puts_the_byte_too_far_ahead() -> None:
    peer = RawPeer(SdpSettings(strategy=lambda: pipelined(payload=8, pipelined=False))).establish()
    peer.connection.send(memoryview(bytes(65_530)), peer.now)
    peer.connection.send(memoryview(b"12345678!"), peer.now, urgent=True)
    peer.run()
    advert, update = peer.hear()
    assert (advert.bsdh.mid, advert.bsdh.flags & OOB_PEND) == (Mid.SRC_AVAIL, 0)  # 65 538 bytes, with those it shows
    assert (update.bsdh.mid, update.bsdh.flags & OOB_PEND, len(update.payload)) == (Mid.DATA, OOB_PEND, 0)


def test_an_urgent_byte_goes_in_a_small_message_however_large_buffers_are() -> None:
    """A message of more than 65 535 bytes could not announce the byte that it ends in."""
    peer = RawPeer().establish(size=1 << 20)
    peer.send(bytes(300_000), urgent=True)
    first, last = peer.hear()
    assert len(first.payload) + len(last.payload) == 300_000
    assert len(last.payload) <= 65_535
    assert (first.bsdh.flags, last.bsdh.flags) == (0, OOB_PEND | OOB_PRES)


# --- the send queue ---


def _together(peer: RawPeer, *sizes: int, urgent: int = -1) -> list[int]:
    """Bytes of the messages that carry sends which are queued at once."""
    for number, size in enumerate(sizes):
        peer.requests.append(peer.connection.send(memoryview(bytes(size)), peer.now, urgent=number == urgent))
    peer.run()
    assert not peer.requests
    return [len(message.payload) for message in peer.hear()]


def test_small_sends_share_a_message_as_far_as_it_goes() -> None:
    peer = RawPeer(SdpSettings(strategy=lambda: pipelined(bcopy_max=90))).establish(size=116)
    assert _together(peer, 10, 20, 30) == [60]
    assert _together(peer, 50, 50, 1) == [100, 1]
    assert _together(peer, 50, 51) == [50, 51]
    assert _together(peer, *[1] * 40) == [15, 15, 10]  # pieces of memory in one message: SDP_GATHER_MAX
    assert _together(peer, 10, 10, 10, urgent=1) == [10, 10, 10]
    assert limits.SDP_GATHER_MAX == 15


def test_a_large_send_does_not_share_a_message() -> None:
    peer = RawPeer(SdpSettings(strategy=lambda: pipelined(bcopy_max=30, pipelined=False, payload=8))).establish()
    small_one, large = (
        peer.connection.send(memoryview(bytes(10)), 0.0),
        peer.connection.send(memoryview(bytes(31)), 0.0),
    )
    peer.requests += [small_one, large]
    peer.run()
    assert peer.mids() == [Mid.DATA, Mid.SRC_AVAIL]


def test_payload_fits_into_the_sink_avail_that_it_uses_up() -> None:
    """It offers more than a private buffer of its sender had, but those may have become larger since."""
    peer = RawPeer(small()).establish(size=64)
    peer.send_mode(Mode.PIPELINED)
    peer.say(peer.show(80))
    peer.connection.resize_remote(256, peer.now)
    peer.run()
    peer.say(ChRcvBufAck(256))
    peer.hear()
    peer.send(bytes(200), bcopy_only=True)
    assert [len(message.payload) for message in peer.hear()] == [80, 120]


def test_few_messages_are_signaled() -> None:
    """The last of a send, every so many, and the last that the send queue takes: so it never stalls."""
    peer = RawPeer(SdpSettings(send_queue=128)).establish(size=116)
    peer.hold_completions = True
    peer.send(bytes(60 * 100), bcopy_only=True)
    signaled = [index for index, posted in enumerate(peer.outstanding) if posted.work.signaled]
    assert signaled == [limits.SDP_SIGNAL_EVERY, 59]
    peer.complete()
    assert peer.requests == []


def test_a_short_send_queue_never_stalls() -> None:
    peer = RawPeer(SdpSettings(send_queue=8)).establish(size=116)
    peer.hold_completions = True
    send = peer.send(bytes(60 * 100), bcopy_only=True)
    assert len(peer.outstanding) == 8
    assert peer.outstanding[-1].work.signaled
    peer.hold_completions = False
    for _ in range(20):
        peer.data()
    assert send.done


# --- sends that must not wait for what never comes ---


def test_a_large_send_goes_though_the_peers_advertisement_is_not_read() -> None:
    peer = established()
    header, payload = peer.advertise(300, 8)
    peer.say(header, payload)
    send = peer.send(bytes(500))
    said = peer.mids()
    assert said, "it waits for a reader that may wait for it"
    peer.data()
    assert send.done or Mid.SEND_SM in said


def test_a_large_send_goes_though_every_advertisement_is_a_receive() -> None:
    """The answer is shown to the peer, the question must be sent first."""
    peer = RawPeer(small(strategy=lambda: pipelined(transactions=False))).establish(adverts=2)
    peer.receive_mode(Mode.PIPELINED)
    peer.receive(400)
    peer.receive(400)
    assert peer.mids() == [Mid.SINK_AVAIL] * 2
    send = peer.send(bytes(500))
    assert send.done


def test_what_send_sm_demands_goes_by_data_only() -> None:
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    peer.send_mode(Mode.PIPELINED)
    peer.send(bytes(200))
    peer.send(bytes(200))
    assert peer.mids() == [Mid.SRC_AVAIL] * 2
    peer.credit = 2
    peer.receive(400)
    peer.credit = CREDIT
    heard = [Mid(message.bsdh.mid) for message in peer.say(SendSm())]
    assert Mid.DATA in heard
    payload = [message for message in peer.hear() if message.payload]
    assert all(message.bsdh.mid == Mid.DATA for message in payload)


@pytest.mark.parametrize("reading", [False, True])
def test_an_advertisement_does_not_wait_for_who_has_stopped_reading(reading: bool) -> None:
    peer = established()
    header, payload = peer.advertise(300, 8)
    if reading:
        peer.hold_completions = True
        peer.receive(100, waitall=True)
    peer.say(header, payload)
    peer.connection.shutdown_read(peer.now)
    peer.hold_completions = False
    peer.run()
    assert peer.mids() == [Mid.RDMA_RD_COMPL] * reading + [Mid.SEND_SM]
    peer.data(b"rest")
    peer.broken_by("payload_closed")


# --- time ---


def test_a_sender_without_credit_is_quiet() -> None:
    """Payload that waits for credit costs nothing: timers end when there is nothing they could do."""
    peer = established()
    peer.credit = 2
    peer.data()
    peer.send(b"x", bcopy_only=True)
    peer.wait(10)
    peer.told_bufs = peer.told_bufs
    assert peer.connection.next_deadline() is None


# --- profiles ---


def test_a_peer_that_takes_one_advertisement_is_left_in_combined_mode() -> None:
    """OFED announces MaxAdverts 1 and ignores ModeChange (docs/wire/sdp.md §28)."""
    peer = RawPeer(small()).establish(adverts=1)
    for _ in range(4):
        peer.send(bytes(500))
    assert peer.mids() == [Mid.SRC_AVAIL]
    peer.say(RdmaRdCompl(492), flags=0x4)
    assert Mid.MODE_CHANGE not in peer.mids()
    assert peer.connection.send_mode is Mode.COMBINED


@pytest.mark.parametrize(
    ("asked", "answer", "now", "refused"),
    [
        (65536, 32768, 32768, True),  # OFED keeps its buffers of 32784 bytes, and counts without the base header
        (65536, 65520, 65520, False),
        (65536, 65536, 65536, False),
        (65536, 69632, 69632, False),
        (16384, 16368, 16368, False),
        (16384, 32768, 32768, True),
        (16384, 16384, 16384, False),
        (16384, 20000, 20000, False),
    ],
)
def test_an_answer_may_leave_the_base_header_out(asked: int, answer: int, now: int, refused: bool) -> None:
    peer = established()
    assert peer.connection.remote_size == 32784
    peer.connection.resize_remote(asked, peer.now)
    peer.run()
    peer.say(ChRcvBufAck(answer))
    assert peer.connection.error is None
    assert peer.connection.remote_size == now
    resize = peer.connection._resize
    assert (resize.increase_refused if asked > 32784 else resize.decrease_refused) is refused


@pytest.mark.parametrize(("asked", "answer"), [(65536, 32767), (16384, 16367), (16384, 32785)])
def test_an_answer_may_not_go_the_other_way(asked: int, answer: int) -> None:
    peer = established()
    peer.connection.resize_remote(asked, peer.now)
    peer.run()
    peer.say(ChRcvBufAck(answer))
    peer.broken_by("resize_range")


def test_no_transaction_while_the_other_end_shows_a_buffer() -> None:
    """GEN2 does not know that the payload uses it up, and would take the next write for another buffer (§28)."""
    peer = established()
    peer.receive_mode(Mode.PIPELINED)
    peer.send_mode(Mode.PIPELINED)
    peer.say(peer.show(40000))
    peer.hold_registrations = True
    peer.receive(400)
    peer.register(run=False)
    peer.send(b"request", bcopy_only=True)
    heard = peer.hear()
    assert [Mid(message.bsdh.mid) for message in heard] == [Mid.DATA, Mid.SINK_AVAIL]


def test_buffers_of_a_new_size_are_soon_the_only_ones() -> None:
    """After a decrease they are cut as they are used; after an increase the old ones go, and no buffer is looked at."""
    peer = established(receive_size_max=1024)
    peer.say(ChRcvBuf(100))
    for _ in range(2 * len(peer.posted)):
        peer.data(b"x")
        assert peer.read(1) == b"x"
    assert {len(buffer.scatter[0]) for buffer in peer.posted} == {100}
    peer.say(ChRcvBuf(1000))
    for _ in range(4 * len(peer.posted)):
        peer.data(b"x")
        assert peer.read(1) == b"x"
    assert {len(buffer.scatter[0]) for buffer in peer.posted} == {1000}
    assert len(peer.posted) == peer.buffers == peer.settings.receive_count
    assert not peer.connection._resize.busy
    assert not peer.connection._resize._current


def test_a_reset_is_not_answered_by_a_reset() -> None:
    peer = established()
    peer.say(DisConn())
    peer.connection.shutdown_write(peer.now)
    peer.run()
    peer.hear()
    assert peer.say(AbortConn()) == []
    assert peer.connection.cause is SdpCause.RESET
