"""Credit that is asked for: how long an end waits before it says something only to be told of more."""

from __future__ import annotations

import pytest
from raw import RawPeer, small

PAUSE_S = 0.1  # no less than `probe_s`, for the end that was asked as well
SIZE = 256  # bytes of the peer's private buffers
ROUNDS = 12


@pytest.mark.spec("docs/wire/sdp.md §9.4: who has two credits left need not be told of more")
def test_the_pause_does_not_grow_while_bytes_go() -> None:
    peer = RawPeer(small(), credit=3).establish(size=SIZE)
    peer.send(bytes(ROUNDS * (SIZE - 16)), bcopy_only=True)
    assert [len(message.payload) for message in peer.hear()] == [SIZE - 16]
    for _ in range(ROUNDS - 1):
        peer.wait(PAUSE_S)
        assert [len(message.payload) for message in peer.hear()] == [0]  # one credit is left: now it must be told
        assert [len(message.payload) for message in peer.data()] == [SIZE - 16]
    assert not peer.requests


def test_the_pause_grows_while_nothing_comes_of_it() -> None:
    peer = RawPeer(small(), credit=3).establish(size=SIZE)
    peer.send(bytes(3 * SIZE), bcopy_only=True)
    peer.hear()
    said = 0
    for _ in range(100):
        peer.wait(PAUSE_S)
        said += len(peer.hear())
        peer.data(bufs=2)  # never enough for payload
    assert said <= 40  # answers of its own to what the peer says among them
