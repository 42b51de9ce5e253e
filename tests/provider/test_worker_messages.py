"""What a provider and its workers say to each other, and the line that it goes over."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.loop import Loop
from sidestep.provider import rpc
from sidestep.provider.rpc import Descriptors
from sidestep.provider.workers import messages
from sidestep.provider.workers.ipc import IpcChannel
from sidestep.provider.workers.messages import KINDS, PACKET_MAX, Record, decode

_OF_CODE = {"Q": st.integers(0, 2**64 - 1), "I": st.integers(0, 2**32 - 1), "H": st.integers(0, 2**16 - 1),
            "B": st.integers(0, 255), "?": st.booleans(), "16s": st.binary(min_size=16, max_size=16)}  # fmt: skip


def records(kind: type[Record]) -> st.SearchStrategy[Record]:
    """Any record of a kind."""
    layout = kind.LAYOUT.format.lstrip("=").replace("16s", "s")
    parts: list[st.SearchStrategy[Any]] = [_OF_CODE["16s" if code == "s" else code] for code in layout]
    if kind.TEXT:
        parts.append(st.binary(max_size=100))
    return st.builds(kind, *parts)


every = st.sampled_from(list(KINDS.values())).flatmap(records)


@given(every)
def test_each_record_comes_back(record: Record) -> None:
    packet = record.encode()
    assert len(packet) <= PACKET_MAX
    assert decode(packet, record.FDS) == record
    assert type(decode(packet, record.FDS)) is type(record)


@given(st.binary(max_size=200), st.integers(0, 4))
def test_nonsense_is_a_violation(packet: bytes, fds_count: int) -> None:
    try:
        record = decode(packet, fds_count)
    except PeerViolation:
        return
    assert record.encode() == packet or any(isinstance(getattr(record, each.name), bool) for each in fields(record))


@given(every, st.data())
def test_of_another_length_or_with_other_descriptors_it_is_a_violation(record: Record, data: st.DataObject) -> None:
    packet = record.encode()
    fixed = 1 + record.LAYOUT.size
    with pytest.raises(PeerViolation):
        decode(packet[: data.draw(st.integers(0, fixed - 1))], record.FDS)
    with pytest.raises(PeerViolation):
        decode(packet, record.FDS + 1)
    if not record.TEXT:
        with pytest.raises(PeerViolation):
            decode(packet + b"\0", record.FDS)


class Pair:
    """Two ends of a line in one loop."""

    def __init__(self) -> None:
        self.now = 0.0
        self.loop = Loop(clock=lambda: self.now)
        self.heard: list[Record] = []
        self.pipes: list[int] = []
        self.ended: list[str] = []
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.other_sock = other
        self.one = IpcChannel(one, self.loop, lambda _record, _fds: None, self.ended.append)
        self.other = IpcChannel(other, self.loop, self._hear, self.ended.append)

    def _hear(self, record: Record, descriptors: Descriptors) -> None:
        self.heard.append(record)
        self.pipes += descriptors.take().numbers

    def turn(self) -> None:
        """What is ready or due happens."""
        self.loop.turn(0)
        self.now += limits.WORKER_QUEUE_LOOK_S
        self.loop.run([])


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.one.close()
    made.other.close()
    for fd in made.pipes:
        os.close(fd)
    made.loop.close()


def test_what_the_kernel_does_not_take_waits_in_order_with_its_descriptors(pair: Pair) -> None:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    sent: list[Record] = []
    for number in range(1200):  # more than fits into any socket's buffer
        record: Record = messages.Tell(bytes([number % 251]) * 2000)
        if number % 400 == 399:
            record = messages.Ready(number.to_bytes(16, "big"))
        sent.append(record)
        pair.one.send(record, (reader, reader, writer) if isinstance(record, messages.Ready) else ())
    os.close(reader)
    os.close(writer)
    assert not pair.heard
    while len(pair.heard) < len(sent) and pair.now < 10:
        pair.turn()
    assert pair.heard == sent
    assert len(pair.pipes) == 9
    assert os.write(pair.pipes[2], b"x") == 1
    assert os.read(pair.pipes[0], 1) == b"x"


def test_who_takes_nothing_is_left(pair: Pair) -> None:
    while pair.one.open:
        pair.one.send(messages.Tell(b"x" * 2000))
    assert not pair.ended  # who sends is not told in the midst of it
    pair.turn()
    assert "it takes no more messages" in pair.ended


def test_a_violation_ends_the_line_once(pair: Pair) -> None:
    kinds: list[type[Record]] = []

    def refuse(record: Record, _: Descriptors) -> None:
        kinds.append(type(record))
        raise PeerViolation("not now", rule="malformed")

    sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ipc = IpcChannel(sock, pair.loop, refuse, pair.ended.append)
    with theirs:
        for _ in range(2):
            rpc.send_bytes(theirs, messages.Leave().encode())
        pair.turn()
        pair.turn()
    assert kinds == [messages.Leave]
    assert not ipc.open
    assert [why.partition(" [")[0] for why in pair.ended] == ["not now"]


@pytest.mark.parametrize("packet", [b"\xff", b"\0", messages.Gone(1).encode()[:-1], b"x" * (PACKET_MAX + 1)])
def test_nonsense_ends_the_line(pair: Pair, packet: bytes) -> None:
    sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ipc = IpcChannel(sock, pair.loop, pair._hear, pair.ended.append)
    with theirs:
        rpc.send_bytes(theirs, packet)
        pair.turn()
        pair.turn()
    assert not ipc.open
    assert len(pair.ended) == 1
    assert not pair.heard
