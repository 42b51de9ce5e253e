"""Pings over RDMA between two ends of ours; tests/interop has rping at the other end."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback_ends import SERVICE

from sidestep.errors import Misuse
from sidestep.rdma.loopback import Fabric
from sidestep.rdma.ping import Advertisement, PingClient, PingServer, text_of


@given(st.integers(0, 10**6), st.integers(2, 300))
def test_texts(number: int, size: int) -> None:
    text = text_of(number, size)
    assert len(text) == size
    assert text.index(0) == size - 1
    assert f"rdma-ping-{number}: ".encode().startswith(text[: min(size - 1, len(f"rdma-ping-{number}: "))])


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_advertisements(va: int, rkey: int, length: int) -> None:
    told = Advertisement(va, rkey, length)
    assert Advertisement.decode(told.encode()) == told
    assert Advertisement.decode(told.encode() + b"\0") is None


@pytest.mark.parametrize("size", [2, 64, 100_000])
def test_rounds(size: int) -> None:
    fabric = Fabric(Random(1))
    here, there = fabric.device("here"), fabric.device("there")
    texts: list[bytes] = []
    server = PingServer(there, SERVICE, on_text=texts.append)
    clients = [PingClient(here, there.address, server.service_id, rounds=rounds, size=size) for rounds in (1, 5)]
    fabric.run()
    assert [(client.ended, client.error, client.rounds_done) for client in clients] == [(True, "", 1), (True, "", 5)]
    assert (server.clients, server.rounds_done) == (0, 6)
    assert sorted(texts) == sorted(text_of(number, size) for number in (0, *range(5)))
    for client in clients:
        client.close()
    server.reap()
    assert (server.rounds_done, server.errors) == (6, [])
    server.close()


def test_a_text_that_is_too_long() -> None:
    fabric = Fabric(Random(1))
    here, there = fabric.device("here"), fabric.device("there")
    server = PingServer(there, SERVICE, size_max=99)
    client = PingClient(here, there.address, SERVICE, size=100)
    fabric.run()
    assert (client.ended, client.rounds_done) == (True, 0)
    server.reap()
    assert server.errors == ["a text of 100 bytes; 99 have room"]


def test_nobody_answers() -> None:
    fabric = Fabric(Random(1))
    here, there = fabric.device("here"), fabric.device("there")
    client = PingClient(here, there.address, SERVICE)
    fabric.run()
    assert client.error == "the other end said no (8)"
    with pytest.raises(Misuse):
        PingClient(here, there.address, SERVICE, size=1)
