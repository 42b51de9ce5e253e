"""The message codec, over real socket pairs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.native import layout
from sidestep.native.layout import Rpc
from sidestep.provider import rpc
from sidestep.provider.rpc import Descriptors, Message

_ID = st.binary(min_size=16, max_size=16)
_U16, _U32, _U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))

messages = st.builds(
    Message, type=st.sampled_from(Rpc), token=_U64, reason=_U32, flags=_U32, local_addr=_ID, remote_addr=_ID,
    local_port=_U16, remote_port=_U16, pid=_U32, cookie=_U64, netns_cookie=_U64, ring_size=st.tuples(_U32, _U32),
    doorbell_index=_U32, promote_after_calls=_U32, promote_after_bytes=_U64, doorbell_page_id=_ID, arena_id=_ID,
    segment_id=_ID, version=st.sampled_from(layout.LAYOUTS), protocol=_U32, error=_U32, wait_ms=_U32, turns=_U32,
)  # fmt: skip


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield pair
    for end in pair:
        end.close()


def open_count() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@given(messages)
def test_a_message_comes_back_as_it_was_encoded(message: Message) -> None:
    assert Message.decode(message.encode()) == message


@given(st.binary(max_size=400))
def test_decoding_noise_raises_nothing_but_a_violation(noise: bytes) -> None:
    with pytest.raises(PeerViolation):
        Message.decode(noise)


@given(messages, st.integers(0, layout.RPC_MSG_SIZE - 1), st.integers(1, 255))
def test_a_corrupt_message_is_refused_or_still_a_message(message: Message, at: int, flip: int) -> None:
    data = bytearray(message.encode())
    data[at] ^= flip
    try:
        found = Message.decode(bytes(data))
    except PeerViolation:
        return
    assert found.encode() == bytes(data)


def test_fields_of_the_message_are_those_of_the_record() -> None:
    fields = {name for name, _, _ in layout.RECORDS["rpc_msg"]} - {"magic"}
    assert set(Message._fields) == fields


def test_descriptors_arrive_close_on_exec(ends: tuple[socket.socket, socket.socket]) -> None:
    with open(os.devnull, "rb") as null:
        rpc.send(ends[0], Message(type=Rpc.CLAIM, token=5), [null.fileno()] * 2)
    packet = rpc.receive(ends[1])
    assert packet is not None
    assert packet.message.token == 5
    with packet.descriptors as descriptors:
        assert len(descriptors) == 2
        assert not any(os.get_inheritable(number) for number in descriptors.numbers)


@pytest.mark.parametrize(
    "data",
    [
        b"short",
        Message(type=Rpc.HELLO).encode() + b"stray",
        Message(type=Rpc.CONTROL).encode() + bytes(limits.CONTROL_PIECE_MAX + 1),
    ],
    ids=["short", "stray bytes", "too long"],
)
def test_descriptors_of_a_bad_packet_are_closed(ends: tuple[socket.socket, socket.socket], data: bytes) -> None:
    before = open_count()
    with open(os.devnull, "rb") as null:
        socket.send_fds(ends[0], [data], [null.fileno()])
    with pytest.raises(PeerViolation):
        rpc.receive(ends[1])
    assert open_count() == before


@pytest.mark.parametrize("count", [limits.FDS_PER_MESSAGE + 1, 200])
def test_a_flood_of_descriptors_is_a_violation_and_leaves_none(
    ends: tuple[socket.socket, socket.socket], count: int
) -> None:
    before = open_count()
    with open(os.devnull, "rb") as null:
        socket.send_fds(ends[0], [Message(type=Rpc.OFFER).encode()], [null.fileno()] * count)
    with pytest.raises(PeerViolation):
        rpc.receive(ends[1])
    assert open_count() == before


def test_the_end_of_a_connection_is_none(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].close()
    assert rpc.receive(ends[1]) is None


def test_a_full_peer_is_told_at_once(ends: tuple[socket.socket, socket.socket]) -> None:
    def fill() -> None:
        while True:
            rpc.send(ends[0], Message(type=Rpc.WELCOME))

    with pytest.raises(BlockingIOError):
        fill()


def test_taken_descriptors_survive_their_first_owner() -> None:
    with Descriptors([os.open(os.devnull, os.O_RDONLY)]) as first:
        second = first.take()
    os.fstat(second[0])
    number = second[0]
    second.close()
    second.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
