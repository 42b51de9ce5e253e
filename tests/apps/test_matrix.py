"""Servers and clients that nobody here wrote, or only a page of, move much on a machine with eight busy processes.

    .venv/bin/pytest tests/apps/test_matrix.py                      the short form
    .venv/bin/pytest tests/apps/test_matrix.py --set=ci --row=7     each server with four clients, as in CI
    .venv/bin/pytest tests/apps/test_matrix.py -k 'libevent-node'   a pair; `-k default-java-`: all that ask one server
    make soak SOAK_MINUTES=60                                       the long form: at random
    .venv/bin/python tests/apps/soak.py --server libevent --client node --connections 2 --bytes 5000000 --rounds 100

Echo servers and clients in many languages or libraries, each with each (matrix.py): a warm exchange by one setting
of --promote-after, with 1, 4, 16 or 64 connections that are all promoted before it begins, and by the other setting a
cold one that sends all at once. Chains of HTTP servers (web.py): downloads and uploads through two keep-alive
proxies.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import matrix
import pytest
import web
from foreign_programs import loader_missing
from matrix import AFTERS, ENDS, SHAPES, Cell, Echo, Server
from selection import at_least, rotate
from stage import Stage

pytestmark = pytest.mark.timeout(400)  # each wait has its own, shorter end

SOAK: Final = Path(__file__).with_name("soak.py")
WORKERS: Final = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
COLD: Final = (2, 12_000_000)  # connections at once, bytes of each: more than the kernel's buffers hold
COLD_ENOUGH: Final = 40  # cold exchanges, of which some have to be promoted in their midst; OFTEN has as many in a row
PLAIN: Final = ("threads", "asyncio", "libevent", "static")  # ends that need no more than every run has
OFTEN: Final = (  # server, client, connections, bytes of each, warm, rounds: bytes were lost here, or never told of
    ("libevent", "node", 2, 5_000_000, False, 40),
    ("threads", "node", 4, 12_000_000, False, 10),
    ("libevent", "erlang", 64, 150_000, True, 5),
)
CHAINS: Final = (
    "nginx/nginx",
    "nginx-unbuffered/nginx",
    "nginx-foreign/nginx-foreign",
    "nginx/haproxy/nginx",
    "haproxy/nginx/nginx",
    "nginx-unbuffered/nginx/apache",
    "haproxy/haproxy/nginx",
    "haproxy/apache/nginx",
    "apache/nginx-unbuffered/nginx",
    "nginx/apache/haproxy/apache",
    *(() if loader_missing() else ("caddy/nginx", "nginx/caddy/caddy/nginx")),
)


@pytest.fixture(scope="module", autouse=True)
def cold_ones(load: None) -> Iterator[None]:
    """Some of them have to be promoted."""
    yield
    assert Row.cold < COLD_ENOUGH or Row.cold_moved, "no cold exchange was promoted"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled programs are, for all workers of a run."""
    if WORKERS == 1:
        return tmp_path_factory.mktemp("built")
    place = tmp_path_factory.getbasetemp().parent / "built"
    place.mkdir(exist_ok=True)
    return place


class Row:
    """A server and all that is asked of it; after a fault it is another one."""

    cold = cold_moved = 0  # of all rows: cold exchanges, and the ends of their connections that moved to a ring

    def __init__(self, name: str, after: str, workdir: Path, start: Callable[[Stage], Server]) -> None:
        self.name, self.after, self.workdir, self._start = name, after, workdir, start
        self._stack = ExitStack()
        self._server: tuple[Stage, Server] | None = None
        self._count = 0

    def check(self, client: str, argv: list[str], connections: int, size: int, *, warm: bool) -> None:
        if self._server is None:
            stage = self._stack.enter_context(matrix.staged(self.workdir, self.after))
            server = self._start(stage)
            self._stack.callback(server.close)
            self._server = stage, server
        self._count += 1
        cell = Cell(self.name, client, connections, size, 100 * self._count, self.after, warm=warm)
        outcome = matrix.exchange(*self._server, argv, cell, self.workdir / f"{self._count}-{client}")
        if not warm:
            Row.cold += 1
            Row.cold_moved += sum(outcome.promoted)
        if outcome.faults:
            self.close()
        assert not outcome.faults, "\n".join([cell.command, outcome.place, *outcome.faults[:8]])

    def close(self) -> None:
        self._server = None
        self._stack.close()


@pytest.mark.least("ci")
@pytest.mark.parametrize(
    ("server", "client", "connections", "size", "warm", "rounds"), OFTEN, ids=[f"{one[0]}+{one[1]}" for one in OFTEN]
)
def test_again_and_again(
    server: str, client: str, connections: int, size: int, warm: bool, rounds: int, built: Path, tmp_path: Path
) -> None:
    """Pairs that failed once in some dozens of rounds."""
    argv = {name: matrix.prepare(name, built) for name in (server, client)}
    row = Row(server, "0", tmp_path, lambda stage: Echo(stage, server, argv[server]))
    try:
        for _ in range(rounds):
            row.check(client, argv[client], connections, size, warm=warm)
    finally:
        row.close()


def test_soak_starts_by_itself(tmp_path: Path) -> None:
    """The long form, without what pytest puts on the path."""
    how = "--warm --rounds 1 --load 0 --connections 2 --bytes 100000 --server threads --client threads"
    argv = [sys.executable, str(SOAK), "--keep", str(tmp_path / "kept"), *how.split()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ends moved to a ring; 0 rounds failed" in done.stdout


@pytest.fixture(scope="module")
def echo(request: pytest.FixtureRequest, built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Row]:
    """An echo server with a setting."""
    after, name = request.param
    argv = matrix.prepare(name, built)
    row = Row(name, after, tmp_path_factory.mktemp(f"{name}-{after}"), lambda stage: Echo(stage, name, argv))
    yield row
    row.close()


def _cells() -> Iterator[object]:
    """Each server with some of the clients; in the smaller sets one of the plain servers with the plain clients."""
    rows = [(after, name) for after in AFTERS for name in ENDS]
    if not at_least("ci"):
        rows = rotate([row for row in rows if row[1] in PLAIN])
    for at, row in enumerate(rows):
        for client in rotate(ENDS, at, ci=4) if at_least("ci") else PLAIN:
            yield pytest.param(row, client, id="-".join((*row, client)))


@pytest.mark.parametrize(("echo", "client"), list(_cells()), indirect=["echo"])
def test_echo(echo: Row, client: str, built: Path) -> None:
    """All that a client sends comes back whole, and then the end."""
    argv = matrix.prepare(client, built)
    turn = ENDS.index(echo.name) + ENDS.index(client) + AFTERS.index(echo.after)
    if turn % 2:
        echo.check(client, argv, *COLD, warm=False)
    else:
        echo.check(client, argv, *SHAPES[turn // 2 % len(SHAPES)], warm=True)


@pytest.fixture(scope="module")
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Row]:
    """A chain, with one of the settings."""
    name = request.param
    after = AFTERS[CHAINS.index(name) % len(AFTERS)]
    row = Row(name, after, tmp_path_factory.mktemp("chain"), lambda stage: web.Chain(stage, name))
    yield row
    row.close()


def _chains() -> Iterator[object]:
    """Some of the chains, for two clients each; in the smaller sets one of nginx alone, for curl or Python."""
    halves = (0, 1) if at_least("ci") else (0,)
    for name in rotate(CHAINS, ci=6) if at_least("ci") else rotate(CHAINS[:2]):
        for half in halves:
            yield pytest.param(name, half, id=f"{name.replace('/', '+')}-{half}")


@pytest.mark.parametrize(("chain", "half"), list(_chains()), indirect=["chain"])
def test_chain(chain: Row, half: int, built: Path) -> None:
    """Files come whole, down and up, for two of the clients."""
    turn = CHAINS.index(chain.name)
    client = web.CLIENTS[(turn + 2 * half) % len(web.CLIENTS)]
    chain.check(client, web.prepare(client, built), *web.SHAPES[(turn + half) % len(web.SHAPES)], warm=True)
