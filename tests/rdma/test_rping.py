"""rping's protocol between two ends of ours; tests/interop has rping itself at the other end."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback_ends import SERVICE
from rping_client import RpingClient, text_of

from sidestep.errors import Misuse
from sidestep.loop import Loop
from sidestep.rdma.loopback import Fabric
from sidestep.rdma.tools.server import ToolServer


@given(st.integers(0, 10**6), st.integers(2, 300))
def test_texts(number: int, size: int) -> None:
    text = text_of(number, size)
    assert len(text) == size
    assert text.index(0) == size - 1
    prefix = f"rdma-ping-{number}: ".encode()
    assert prefix.startswith(text[: min(size - 1, len(prefix))])


@pytest.mark.parametrize("size", [2, 64, 10_000])
def test_rounds(size: int) -> None:
    fabric = Fabric(Random(1))
    here, there = fabric.device("here"), fabric.device("there")
    log: list[str] = []
    failures: list[str] = []
    loop = Loop()
    server = ToolServer(there, loop, SERVICE, log.append)
    clients = [RpingClient(here, size, rounds, failures.append) for rounds in (1, 5)]
    for client in clients:
        client.connect(there.address, SERVICE)
    fabric.run()
    assert [(client.ended, client.messages) for client in clients] == [(True, 1), (True, 5)]
    assert failures == []
    assert sorted(line.partition(": ")[2] for line in log) == [
        "rping", "rping", "rping has ended, 1 messages", "rping has ended, 5 messages"
    ]  # fmt: skip
    for client in clients:
        client.close()
    server.close()
    loop.close()


def test_nobody_answers() -> None:
    fabric = Fabric(Random(1))
    here, there = fabric.device("here"), fabric.device("there")
    failures: list[str] = []
    client = RpingClient(here, 64, 1, failures.append)
    client.connect(there.address, SERVICE)
    fabric.run()
    assert client.ended
    assert "Rejected(reason=8" in failures[0]
    with pytest.raises(Misuse):
        RpingClient(here, 1, 1, failures.append)
