"""Whatever a peer says, in whatever order, and whatever the user does meanwhile: the connection goes on or ends by the book.

What must never happen is looked at by `raw` at each step: an exception, a queue without bound, a work request outside
what was advertised, memory that comes back too early or is still reachable, a request told twice or never.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw import RawPeer, Remote, Surprise, pipelined, small

from sidestep.errors import SidestepError
from sidestep.rdma.work import Access, Status
from sidestep.sdp.requests import StreamReceive, StreamSend
from sidestep.sdp.states import State
from sidestep.sdp.wire import (
    MESSAGES,
    ChRcvBuf,
    ChRcvBufAck,
    Data,
    Header,
    Mid,
    Mode,
    ModeChange,
    RdmaRdCompl,
    RdmaWrCompl,
    SinkAvail,
    SrcAvail,
    SuspComm,
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


# --- what may be said ---

lengths = st.one_of(
    st.integers(0, 600), st.sampled_from([1, 8, 255, 256, 257, 32767, 32768, 40000, 1 << 31, (1 << 31) + 1, (1 << 32) - 1])
)
addresses = st.sampled_from([0, 1, VA, (1 << 64) - 300, (1 << 64) - 1])
keys = st.sampled_from(KEYS)
counters = st.one_of(st.integers(0, 3), st.sampled_from([(1 << 32) - 1, 1 << 31]))
headers: st.SearchStrategy[Header] = st.one_of(
    st.just(Data()),
    st.just(Data()),
    st.builds(SrcAvail, st.integers(1, 600), keys, st.just(VA)),
    st.builds(SinkAvail, st.integers(32768, 40000), keys, st.just(VA), counters),
    st.builds(SrcAvail, lengths, keys, addresses),
    st.builds(SinkAvail, lengths, keys, addresses, counters),
    st.builds(RdmaRdCompl, lengths),
    st.builds(RdmaWrCompl, lengths),
    st.builds(ModeChange, st.booleans(), st.sampled_from(Mode)),
    st.builds(ModeChange, st.just(False), st.sampled_from(Mode)),
    st.builds(ChRcvBuf, lengths),
    st.builds(ChRcvBufAck, lengths),
    st.builds(SuspComm, st.sampled_from([0x1_138A, 0x1_0000, 0, 80])),
    st.sampled_from([MESSAGES[mid]() for mid in (2, 3, 4, 4, 8, 9, 10, 10, 14)]),
)
Step = Callable[[RawPeer], None]


def _user(action: Callable[[RawPeer], object]) -> Step:
    """Something that the user may not be allowed to do."""

    def step(peer: RawPeer) -> None:
        try:
            action(peer)
        except SidestepError:
            pass
        peer.run()

    return step


def _say(header: Header, size: int, flags: int, bufs: int, ack_back: int, skip: int) -> Step:
    def step(peer: RawPeer) -> None:
        if not peer.posted or peer.gone:
            return
        size_max = len(peer.posted[0].scatter[0]) - 16 - header.LENGTH
        if isinstance(peer.remote, Ledger):
            peer.remote.note(header)
        ack = max(peer.told_ack, peer.rx_mseq - ack_back) if ack_back < 9 else peer.rx_mseq + 1
        message = peer.message(header, bytes(max(0, min(size, size_max))), flags=flags, bufs=bufs, ack=ack)
        if skip:
            message = message[:8] + struct.pack(">I", peer.tx_mseq + skip) + message[12:]
        if len(message) <= len(peer.posted[0].scatter[0]):
            peer.deliver(message)

    return step


def _complete(count: int, status: Status) -> Step:
    def step(peer: RawPeer) -> None:
        if not peer.gone:
            peer.complete(count, status)

    return step


def _registered(fail: bool) -> Step:
    def step(peer: RawPeer) -> None:
        if peer.registrations:
            peer.register(fail=fail)

    return step


def _receive_failed(status: Status) -> Step:
    def step(peer: RawPeer) -> None:
        if peer.posted and not peer.gone:
            peer.connection.handle_receive_failed(peer.posted.popleft(), status, peer.now)
            peer.run()

    return step


def _disconnected(peer: RawPeer) -> None:
    if not peer.gone:
        peer.disconnected()


def _resume(peer: RawPeer) -> None:
    if peer.connection.state is State.RESUMING and peer.gone:
        peer.resume()


def _cancel(index: int) -> Step:
    def step(peer: RawPeer) -> None:
        if peer.requests:
            request = peer.requests[index % len(peer.requests)]
            if isinstance(request, StreamSend):
                peer.connection.cancel_send(request, peer.now)
            else:
                assert isinstance(request, StreamReceive)
                peer.connection.cancel_receive(request, peer.now)
            peer.run()

    return step


said = st.builds(
    _say,
    headers,
    st.sampled_from([0, 0, 1, 1, 8, 100, 240]),
    st.sampled_from([0, 0, 0, 0, 1, 2, 3, 4, 7, 0xF8]),
    st.sampled_from([64, 64, 64, 64, 8, 3, 2, 1, 0, 0xFFFF]),
    st.sampled_from([0, 0, 0, 0, 1, 2, 3]),
    st.just(0),
)
said_badly = st.builds(
    _say, headers, st.just(1), st.integers(0, 255), st.integers(0, 0xFFFF), st.just(9), st.sampled_from([0, 1, 1 << 31])
)
sizes = st.sampled_from([1, 8, 100, 250, 300, 600, 1000, 70_000])
used = st.one_of(
    st.builds(
        lambda size, urgent, bcopy: _user(lambda peer: peer.send(bytes(size), urgent=urgent, bcopy_only=bcopy)),
        sizes,
        st.sampled_from([False, False, False, True]),
        st.booleans(),
    ),
    st.builds(
        lambda size, waitall: _user(lambda peer: peer.receive(size, waitall=waitall)),
        sizes,
        st.sampled_from([False, False, True]),
    ),
    st.builds(_cancel, st.integers(0, 3)),
    st.builds(
        lambda mode: _user(lambda peer: peer.connection.want_send_mode(mode, peer.now)), st.sampled_from(list(Mode))
    ),
    st.just(_user(lambda peer: peer.connection.want_combined(peer.now))),
    st.builds(
        lambda size: _user(lambda peer: peer.connection.resize_remote(size, peer.now)),
        st.sampled_from([40, 300, 4096, 65536]),
    ),
    st.just(_user(lambda peer: peer.connection.peek(peer.now))),
    st.just(_user(lambda peer: peer.connection.take_urgent())),
)
ended = st.one_of(
    st.just(_user(lambda peer: peer.connection.shutdown_write(peer.now))),
    st.just(_user(lambda peer: peer.connection.shutdown_read(peer.now))),
    st.just(_user(lambda peer: peer.connection.suspend(6001, peer.now))),
    st.builds(
        lambda linger: _user(lambda peer: peer.connection.close(peer.now, linger)), st.sampled_from([None, 0, 5.0])
    ),
    st.just(_user(lambda peer: peer.connection.abort(peer.now))),
    st.just(_disconnected),
    st.just(_resume),
    st.builds(_receive_failed, st.sampled_from([Status.LOCAL_LENGTH_ERROR, Status.FLUSHED])),
    st.builds(_complete, st.integers(1, 9), st.sampled_from([Status.FLUSHED, Status.RETRY_EXCEEDED])),
)
moved = st.one_of(
    st.builds(_complete, st.integers(1, 9), st.just(Status.SUCCESS)),
    st.builds(_registered, st.sampled_from([False, False, True])),
    st.builds(lambda seconds: lambda peer: peer.wait(seconds), st.sampled_from([0.01, 0.1, 1.1, 70.0])),
)
steps = st.lists(st.one_of(said, said, said, used, used, moved, ended, said_badly), max_size=30)
setups = st.fixed_dictionaries(
    {
        "accepting": st.booleans(),
        "adverts": st.sampled_from([1, 2, 16]),
        "completions": st.booleans(),
        "registrations": st.booleans(),
        "disconnect": st.booleans(),
        "inline": st.booleans(),
        "send": st.sampled_from(Mode),
        "receive": st.sampled_from(Mode),
    }
)


def _finish(peer: RawPeer) -> None:
    """Whatever was held back comes; whoever is left is given up: then nothing may be left."""
    connection = peer.connection
    peer.hold_completions = peer.hold_registrations = peer.hold_disconnect = False
    peer.run()
    connection.abort(peer.now)
    peer.run()
    peer.wait(1000)
    if connection.state is not State.CLOSED and not peer.gone:
        peer.disconnected()  # that much the connection manager does by itself
    assert connection.state is State.CLOSED
    moved_on = connection.suspended.unsent if connection.suspended is not None else ()
    assert not [request for request in peer.requests if request not in moved_on]
    assert not any(memory.live for memory in peer.regions.values())
    assert connection.next_deadline() is None


def _converse(setup: dict[str, object], script: list[Step]) -> None:
    peer = RawPeer(
        replace(small(receive_size=BUFFER, receive_count=8, strategy=pipelined), urgent_inline=bool(setup["inline"]))
    )
    peer.remote = Ledger()
    peer.lenient = True  # its words are judged by the sober scenes; here the peer's own may not be worth judging
    peer.establish(accepting=bool(setup["accepting"]), adverts=int(str(setup["adverts"])))
    for mode, change in ((setup["send"], peer.send_mode), (setup["receive"], peer.receive_mode)):
        assert isinstance(mode, Mode)
        change(mode)
    peer.hold_completions = bool(setup["completions"])
    peer.hold_registrations = bool(setup["registrations"])
    peer.hold_disconnect = bool(setup["disconnect"])
    for step in script:
        step(peer)
    _finish(peer)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setups, steps)
def test_nothing_that_is_said_or_done_breaks_it(setup: dict[str, object], script: list[Step]) -> None:
    _converse(setup, script)


@pytest.mark.slow
@settings(max_examples=4000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(setups, steps)
def test_nothing_that_is_said_or_done_breaks_it_at_length(setup: dict[str, object], script: list[Step]) -> None:
    _converse(setup, script)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=BUFFER), max_size=4))
def test_garbage_is_contained(messages: list[bytes]) -> None:
    peer = RawPeer(small(receive_size=BUFFER)).establish()
    peer.receive(100)
    for message in messages:
        if peer.posted and not peer.gone:
            peer.deliver(message)
    _finish(peer)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(Mid)), st.binary(max_size=BUFFER - 16))
def test_garbage_behind_a_good_base_header_is_contained(mid: Mid, body: bytes) -> None:
    peer = RawPeer(small(receive_size=BUFFER)).establish()
    peer.remote = None
    peer.deliver(struct.pack(">BBHIII", mid, 0, 8, 16 + len(body), 1, 0) + body)
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
    peer.connection._events.append(send)
    with pytest.raises(Surprise, match="uses it"):
        peer.run()
