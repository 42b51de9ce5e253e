"""Whatever a peer says in whatever order, and whatever the user does: the connection goes on or ends by the book.

What must never happen is looked at by `raw` at each step: an exception, a queue without bound, a work request outside
what was advertised, memory that comes back too early or is still reachable, a request told twice or never.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw import HERE, PORT, THERE, RawPeer, Remote, Surprise, pipelined, small
from sdp_vectors import vectors

from sidestep.errors import LimitReached, Misuse, PeerViolation, Unavailable
from sidestep.rdma.work import Access, Status
from sidestep.sdp.requests import Reject, StreamSend
from sidestep.sdp.settings import Addresses, Carrier
from sidestep.sdp.states import MODE_CHANGES, MODES, NO_PAYLOAD, Master, SdpState
from sidestep.sdp.strategy import Strategy
from sidestep.sdp.wire import (
    MESSAGES,
    OOB_PEND,
    OOB_PRES,
    AbortConn,
    ChRcvBuf,
    ChRcvBufAck,
    Data,
    DisConn,
    Header,
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
    decode,
)

BUFFER = 256
KEYS = (0xA1, 0xB1)
VA = 0x7F00_0000


class Ledger(Remote):
    """What the peer has advertised, without memory behind it: as much as a message can name."""

    def __init__(self) -> None:
        super().__init__()
        self.offered: list[tuple[int, int, int, Access]] = []  # (key, address, bytes, what for)

    def note(self, header: Header) -> None:
        """Takes in an advertisement."""
        if isinstance(header, SrcAvail):
            self.offered.append((header.rkey, header.va, header.length, Access.REMOTE_READ))
        elif isinstance(header, SinkAvail):
            self.offered.append((header.rkey, header.va, header.length, Access.REMOTE_WRITE))

    def _allowed(self, rkey: int, va: int, length: int, access: Access) -> bool:
        return any(
            rkey == key and allowed is access and start <= va and va + length <= start + size <= 1 << 64
            for key, start, size, allowed in self.offered
        )

    def read(self, rkey: int, va: int, length: int) -> bytes | None:
        return bytes(length) if self._allowed(rkey, va, length, Access.REMOTE_READ) else None

    def write(self, rkey: int, va: int, data: bytes) -> bool:
        return self._allowed(rkey, va, len(data), Access.REMOTE_WRITE)


# --- what is said and done ---

LENGTHS = (0, 1, 8, 36, 37, 255, 256, 257, 600, 4096, 32767, 32768, 40000, 1 << 31, (1 << 31) + 1, (1 << 32) - 1)
ADDRESSES = (0, 1, VA, (1 << 64) - 300, (1 << 64) - 1)


class Stranger:
    """A peer and a user of whom each does mostly what it may, and now and then what it may not; one seed decides."""

    def __init__(self, seed: int, *, honest: float = 0.97) -> None:
        self.rng = rng = Random(seed)
        self.honest = honest
        settings = small(
            receive_size=BUFFER, receive_size_max=1024, receive_count=rng.choice((5, 8, 16)), strategy=self._strategy
        )
        self.peer = peer = RawPeer(replace(settings, urgent_inline=rng.random() < 0.3))
        peer.remote = self.ledger = Ledger()
        peer.lenient = True  # its words are judged by the sober scenes; here the peer's own may not be worth judging
        peer.establish(accepting=rng.random() < 0.5, adverts=rng.choice((1, 2, 16)))
        peer.send_mode(rng.choice(list(Mode)))
        peer.receive_mode(rng.choice(list(Mode)))
        self.log: list[str] = []

    def _strategy(self) -> Strategy:
        rng = self.rng
        return pipelined(
            bcopy_max=rng.choice((0, 64, 1 << 30)),
            read_min=rng.choice((1, 200)),
            sink_min=rng.choice((1, None)),
            payload=rng.choice((1, 8, 200)),
            advert_max=rng.choice((100, 1 << 20)),
            transactions=rng.random() < 0.5,
            pipelined=rng.random() < 0.5,
        )

    def run(self, steps: int) -> None:
        """So many steps, or fewer if the connection ends before."""
        for _ in range(steps):
            self.step()
            if self.peer.connection.state is SdpState.CLOSED and self.peer.gone and self.rng.random() < 0.3:
                return

    def step(self) -> None:
        """One thing happens."""
        rng = self.rng
        kind = rng.choices((self._say, self._use, self._device, self._hold, self._end), (50, 30, 15, 3, 1.2))[0]
        kind()

    # --- the peer ---

    def _say(self) -> None:
        peer, rng = self.peer, self.rng
        if not peer.posted or peer.gone:
            return
        honest = rng.random() < self.honest
        header, size = self._may_say() if honest else (self._any(), rng.choice((0, 0, 1, 100)))
        size *= header.PAYLOAD or rng.random() < 0.1
        self.ledger.note(header)
        size = min(size, len(peer.posted[0].scatter[0]) - 16 - header.LENGTH)
        flags = 0
        if isinstance(header, Data) and size and rng.random() < 0.1:
            flags = OOB_PRES | rng.choice((0, OOB_PEND))
        elif rng.random() < 0.05:
            flags = rng.choice((OOB_PEND, 4, 0xF8))
        bufs = rng.choice((64, 64, 64, 8, 4, 3, 2, 1, 0))
        ack = peer.rx_mseq
        if not honest and rng.random() < 0.3:
            flags, bufs, ack = rng.randrange(256), rng.randrange(1 << 16), ack + rng.choice((-1, 1, 1 << 31))
        message = peer.message(header, bytes(max(0, size)), flags=flags, bufs=bufs, ack=ack)
        if not honest and rng.random() < 0.2:
            bit = rng.randrange(8 * len(message))
            flipped = int.from_bytes(message, "big") ^ 1 << bit
            message = flipped.to_bytes(len(message), "big")
            with suppress(PeerViolation):
                self.ledger.note(decode(memoryview(message)).header)
        self.log.append(f"{header} {size} {flags:#x} {bufs}")
        if len(message) <= len(peer.posted[0].scatter[0]):
            peer.deliver(bytes(message))

    def _any(self) -> Header:
        rng = self.rng
        key, address, length = rng.choice(KEYS), rng.choice(ADDRESSES), rng.choice(LENGTHS)
        return rng.choice(
            [
                SrcAvail(length, key, address),
                SinkAvail(length, key, address, rng.choice((0, 1, (1 << 32) - 1))),
                RdmaRdCompl(length),
                RdmaWrCompl(length),
                ModeChange(rng.random() < 0.5, rng.choice(list(Mode))),
                ChRcvBuf(length),
                ChRcvBufAck(length),
                SuspComm(rng.choice((0x1_138A, 0, 80))),
                *(MESSAGES[mid]() for mid in (2, 3, 4, 8, 9, 10, 14, 255)),
            ]
        )

    def _may_say(self) -> tuple[Header, int]:
        """A message that is legal now, and bytes of payload."""
        rng, connection = self.rng, self.peer.connection
        sink, source, resize = connection._sink, connection._source, connection._resize
        key = rng.choice(KEYS)
        choices: list[tuple[Header, int]] = [(Data(), 0), (SinkAvailCancel(), 0)]
        add = choices.append
        if connection._suspend.answered or connection._suspend.confirmed:
            return Data(), 0
        if source.adverts:
            advert = source.adverts[0]
            left = advert.length - advert.payload - advert.acked
            choices += [(RdmaRdCompl(rng.choice((left, rng.randint(0, left)))), 0)] * 4 + [(SendSm(), 0)] * 2
        if MODES[source.mode].sink_avails and not connection._incoming.cancel_ack_queued():
            count = source.pnd if rng.random() < 0.7 else (source.pnd - 1) & 0xFFFFFFFF
            if connection._halves.adverts_of_peer() < self.peer.settings.max_adverts:
                free = not (sink.adverts or sink.withdrawing or sink.untold or sink.due)
                choices += [(SinkAvail(rng.randint(32784, 40000), key, VA, count), rng.choice((0, 50)) * free)] * 3
        if source.mode is Mode.BUFFERED:
            add((ModeChange(True, Mode.COMBINED), 0))
        if resize.asked is not None:
            size = resize.asked if rng.random() < 0.7 else resize._before
            if resize._request is not None:
                add((ChRcvBufAck(max(37, size)), 0))
        elif rng.random() < 0.2 and not (resize.waits or resize._answering):
            add((ChRcvBuf(rng.choice((64, 200, 300, 800))), 0))
        if connection._suspend.sent and not connection._suspend.confirmed:
            add((SuspCommAck(), 0))
        if sink.cancel_sent:
            choices += [(SinkCancelAck(), 0)] * 4
        if not sink.ended:
            choices += self._of_the_stream()
        elif rng.random() < 0.02 and connection.state in NO_PAYLOAD:
            add((AbortConn(), 0))
        header, size = rng.choice(choices)
        if size and (sink.ended or connection._teardown.reader_closed):
            size = 0
        return header, size

    def _of_the_stream(self) -> list[tuple[Header, int]]:
        rng, connection = self.rng, self.peer.connection
        sink = connection._sink
        key = rng.choice(KEYS)
        found: list[tuple[Header, int]] = []
        if sink.shown:
            length = sink.shown[0].length
            found += [(RdmaWrCompl(rng.choice((length, rng.randint(0, length)))), 0)] * 3
        if sink.due:
            return found + [(Data(), min(sink.due, rng.choice((1, 100, 240))))] * 6
        if sink.adverts or sink.withdrawing or sink.untold:
            if not sink.withdrawing:
                found.append((SrcAvailCancel(), 0))
            several = MODES[sink.mode].src_avails is None and not sink.withdrawing
            if (
                several
                and not connection._teardown.reader_closed
                and connection._halves.adverts_of_peer() < self.peer.settings.max_adverts
            ):
                found += [(SrcAvail(rng.randint(1, 600), key, VA), 0)] * 4
            return found
        found += [(Data(), rng.choice((1, 8, 100, 240)))] * 8
        if MODES[sink.mode].src_avails != 0 and not connection._teardown.reader_closed:
            payload = rng.choice((1, 8, 100)) if MODES[sink.mode].src_avail_payload else 0
            found += [(SrcAvail(payload + rng.randint(1, 600), key, VA), payload)] * 6
        for (before, after), master in MODE_CHANGES.items():
            if before is sink.mode and master is Master.SOURCE:
                found.append((ModeChange(False, after), 0))
        if rng.random() < 0.05:
            found.append((DisConn(), 0))
            if connection.state is SdpState.ESTABLISHED:
                found.append((SuspComm(0x1_138A), 0))
        return found

    # --- the user ---

    def _use(self) -> None:
        """Something that the user may not always do."""
        peer, rng = self.peer, self.rng
        connection, now = peer.connection, peer.now
        size = rng.choice((1, 8, 100, 250, 300, 600, 1000, 5000))
        actions: list[Callable[[], object]] = [
            *[lambda: peer.send(bytes(size), urgent=rng.random() < 0.1, bcopy_only=rng.random() < 0.2)] * 5,
            *[lambda: peer.receive(size, waitall=rng.random() < 0.2)] * 6,
            self._cancel,
            lambda: connection.peek(now),
            lambda: connection.take_urgent(),
        ]
        if rng.random() < 0.2:
            actions += [
                lambda: connection.want_send_mode(rng.choice(list(Mode)), now),
                lambda: connection.want_combined(now),
                lambda: connection.resize_remote(rng.choice((40, 300, 4096, 65536)), now),
            ]
        action = rng.choice(actions)
        self.log.append(f"user {actions.index(action)} {size}")
        with suppress(Misuse, LimitReached, Unavailable, PeerViolation):
            action()
        peer.run()

    def _cancel(self) -> None:
        peer = self.peer
        if not peer.requests:
            return
        request = self.rng.choice(peer.requests)
        if isinstance(request, StreamSend):
            peer.connection.cancel_send(request, peer.now)
        else:
            peer.connection.cancel_receive(request, peer.now)

    def _end(self) -> None:
        """The end of a direction, or of everything; a move; an accident."""
        peer, rng = self.peer, self.rng
        connection, now = peer.connection, peer.now
        actions: list[Callable[[], object]] = [
            lambda: connection.shutdown_write(now),
            lambda: connection.shutdown_write(now),
            lambda: connection.shutdown_write(now),
            lambda: connection.shutdown_read(now),
            lambda: connection.close(now, rng.choice((None, None, 0, 5.0))),
            lambda: connection.suspend(6001, now),
            lambda: connection.suspend(6001, now),
            lambda: connection.abort(now),
            self._accident,
        ]
        action = rng.choice(actions)
        self.log.append(f"end {actions.index(action)}")
        with suppress(Misuse, LimitReached, Unavailable, PeerViolation):
            action()
        peer.run()

    def _accident(self) -> None:
        peer, rng = self.peer, self.rng
        if peer.gone:
            return
        kind = rng.randrange(3)
        if kind == 0 and peer.posted:
            status = rng.choice((Status.LOCAL_LENGTH_ERROR, Status.FLUSHED, Status.FATAL))
            peer.connection.handle_receive_failed(peer.posted.popleft(), status, peer.now)
        elif kind == 1:
            peer.complete(1, rng.choice((Status.RETRY_EXCEEDED, Status.FLUSHED, Status.REMOTE_ACCESS_ERROR)))
        else:
            peer.disconnected()

    # --- the device ---

    def _device(self) -> None:
        peer, rng = self.peer, self.rng
        kind = rng.randrange(4)
        self.log.append(f"device {kind}")
        if kind == 0 and not peer.gone:
            peer.complete(rng.randint(1, 3))
        elif kind == 1 and peer.registrations:
            peer.register(fail=rng.random() < 0.2)
        elif kind == 2:
            peer.wait(rng.choice((0.01, 0.1, 1.1, 1.1, 70.0)))
        elif peer.connection.state is SdpState.RESUMING and peer.gone:
            peer.resume()

    def _hold(self) -> None:
        """From now on the device is slow, or no longer."""
        peer, rng = self.peer, self.rng
        peer.hold_completions = rng.random() < 0.5
        peer.hold_registrations = rng.random() < 0.3
        peer.hold_disconnect = rng.random() < 0.3
        self.log.append(f"hold {peer.hold_completions} {peer.hold_registrations} {peer.hold_disconnect}")
        peer.run()


def _finish(peer: RawPeer) -> None:
    """Whatever was held back comes; whoever is left is given up: then nothing may be left."""
    connection = peer.connection
    peer.hold_completions = peer.hold_registrations = peer.hold_disconnect = False
    peer.run()
    connection.abort(peer.now)
    peer.run()
    peer.wait(1000)
    if connection.state is not SdpState.CLOSED and not peer.gone:
        peer.disconnected()  # that much the connection manager does by itself
    assert connection.state is SdpState.CLOSED
    moved_on = connection.suspended.unsent if connection.suspended is not None else ()
    assert not [request for request in peer.requests if request not in moved_on]
    assert not any(memory.live for memory in peer.regions.values())
    assert connection.next_deadline() is None


def _converse(seed: int, honest: float) -> Stranger:
    stranger = Stranger(seed, honest=honest)
    try:
        stranger.run(100)
        _finish(stranger.peer)
    except BaseException as error:
        error.add_note("\n".join(stranger.log))
        raise
    return stranger


@pytest.mark.parametrize("honest", [1.0, 0.97, 0.6])
def test_nothing_that_is_said_or_done_breaks_it(honest: float) -> None:
    for seed in range(60):
        _converse(seed, honest)


@pytest.mark.slow
@pytest.mark.parametrize("honest", [1.0, 0.97, 0.6])
def test_nothing_that_is_said_or_done_breaks_it_at_length(honest: float) -> None:
    for seed in range(1000):
        _converse(seed, honest)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.binary(max_size=BUFFER), max_size=4))
def test_garbage_is_contained(messages: list[bytes]) -> None:
    peer = RawPeer(small(receive_size=BUFFER)).establish()
    peer.receive(100)
    for message in messages:
        if peer.posted and not peer.gone:
            peer.deliver(message)
    _finish(peer)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(list(Mid)), st.binary(max_size=BUFFER - 16))
def test_garbage_behind_a_good_base_header_is_contained(mid: Mid, body: bytes) -> None:
    peer = RawPeer(small(receive_size=BUFFER)).establish()
    peer.remote = None
    peer.deliver(struct.pack(">BBHIII", mid, 0, 8, 16 + len(body), 1, 0) + body)
    _finish(peer)


def _spoiled(good: bytes, spots: list[tuple[int, int]], length: int) -> bytes:
    data = bytearray(good)
    for at, value in spots:
        data[at % len(data)] = value
    return bytes(data[:length])


spots = st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), max_size=4)
cut = st.one_of(st.just(1000), st.integers(0, 200))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(list(Carrier)), spots, cut)
def test_any_hello_is_taken_or_refused(carrier: Carrier, spoiled: list[tuple[int, int]], length: int) -> None:
    peer = RawPeer(small(carrier=carrier))
    good = peer.hello() if carrier is Carrier.INFINIBAND else vectors()["V51"].message
    taken = peer.connection.accept(_spoiled(good, spoiled, length), Addresses(HERE, PORT, THERE, 0), peer.now)
    peer.lenient = True
    peer.run()
    assert bool(peer.ordered(Reject)) is not taken
    assert (peer.connection.state is SdpState.REP_SENT) is taken
    if taken:
        peer.connection.handle_established(peer.now)
        peer.send(bytes(100), bcopy_only=True)  # in pieces that fit, as far as there is credit
    _finish(peer)


@settings(max_examples=80, deadline=None)
@given(spots, cut)
def test_any_hello_ack_is_taken_or_ends_the_attempt(spoiled: list[tuple[int, int]], length: int) -> None:
    peer = RawPeer(small()).connect()
    peer.lenient = True
    ack = _spoiled(peer.hello_ack(), spoiled, length)
    judged = peer.connection.judge_reply(ack)
    peer.connection.handle_accepted(ack, peer.now)
    peer.run()
    assert (peer.connection.state is SdpState.ESTABLISHED) is judged
    if judged:
        peer.send(bytes(100), bcopy_only=True)
    _finish(peer)


def test_the_judge_sees_what_it_is_there_for() -> None:
    """A write outside of what was offered, and memory that comes back too early, are noticed."""
    ledger = Ledger()
    ledger.note(SrcAvail(100, 1, VA))
    assert ledger.read(1, VA, 100) is not None
    assert ledger.read(1, VA + 1, 100) is None
    assert not ledger.write(1, VA, b"x")
    peer = RawPeer(small()).establish()
    peer.hold_completions = True
    send = peer.send(b"abc", bcopy_only=True)
    send.done = True
    peer.connection.events.append(send)
    with pytest.raises(Surprise, match="uses it"):
        peer.run()
