"""A connection with another host goes on by its ring in the next program: the provider between learns its doorbell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import toolchain
from common import PATIENCE_S
from hosts import Host, Make
from talking import line, promoted

from sidestep.observe import connections
from sidestep.testing import Connection

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parents[1] / "shim/programs"
REQUEST = 50_000  # bytes, of half_close.c
EACH = 50  # words to each program, of chain.c
TIMES = 10


def _started(host: Host, name: str, *words: str, **environ: str) -> subprocess.Popen[str]:
    program = toolchain.build(name.replace("_", "-"), [PROGRAMS / f"{name}.c"], ["-D_GNU_SOURCE"])
    env = host.sidestep.env(**environ)
    return host.popen([program, *words], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _played(one: Host, other: Host, name: str, how: str, *words: str, **changes: str) -> list[str]:
    """What the server on `other` and its client on `one` print after they were promoted."""
    with (
        _started(other, name, how, *words, AT=other.address) as server,
        _started(one, name, "client", *words, other.address, line(server), **changes) as client,
    ):
        promoted(one, other)
        told = client.communicate("go", timeout=PATIENCE_S)[0] + server.communicate(timeout=PATIENCE_S)[0]
    assert (client.returncode, server.returncode) == (0, 0)
    return str(told).splitlines()


def _server(host: Host) -> Connection:
    """Its end, as it was when it ended."""
    (ended,) = connections.ended(host.sidestep.socket)
    return ended.connection


@pytest.mark.parametrize("then", ["SHUT", "CLOSE"])
@pytest.mark.parametrize("how", ["executed", "executed-and-closed", "passed", "passed-and-closed"])
def test_a_request_whose_sender_has_ended_is_read_whole(two: tuple[Host, Host], how: str, then: str) -> None:
    """By the next program: nobody could send it again."""
    one, other = two
    assert _played(one, other, "half_close", how, **{then: "1"}) == [f"{REQUEST} bytes, then the end"]
    assert not sum(host.counter("relay_reset") for host in two)


@pytest.mark.parametrize("how", ["exec", "fork", "two"])
@pytest.mark.parametrize("workers", [0, 1])
def test_it_goes_on_by_ring(make_hosts: Make, how: str, workers: int) -> None:
    """Words are under way at each exec, every byte is compared, and nothing goes back to TCP for it."""
    one, other = make_hosts(2, workers=workers)
    assert _played(one, other, "chain", how, str(TIMES)) == [f"client: {TIMES * EACH} whole", "server: 0, the end"]
    ended = _server(other)
    assert ended.promoted
    assert ended.rx.ring_msgs > 0.8 * TIMES * EACH
    assert ended.tx.ring_msgs > 0.8 * TIMES * EACH
