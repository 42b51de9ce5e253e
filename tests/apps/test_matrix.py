"""Twelve echo servers by twelve clients that move much, on a machine with eight busy processes (see matrix.py).

    .venv/bin/pytest tests/apps/test_matrix.py                      the short form, as in CI
    .venv/bin/pytest tests/apps/test_matrix.py -k 'threads-node'    a pair; or server java: -k 'java-'
    .venv/bin/python tests/apps/soak.py --help                      the long form: at random, or one pair again and again
    .venv/bin/python tests/apps/soak.py --server threads --client node --connections 4 --bytes 12000000 --cold --rounds 100

Each pair has a warm exchange by one setting of --promote-after, with 1, 4, 16 or 64 connections that are all promoted before
it begins, and by the other setting a cold one that sends all at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import matrix
import pytest
from matrix import AFTERS, ENDS, SHAPES, Cell, Echo

COLD: Final = (2, 5_000_000)  # connections at once, bytes of each: more than the kernel's buffers hold


@pytest.fixture(scope="module", autouse=True)
def load() -> Iterator[None]:
    """The machine has other things to do."""
    with matrix.busy():
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled programs are."""
    return tmp_path_factory.mktemp("built")


class Row:
    """A server and all that is asked of it; it is replaced where something went wrong."""

    def __init__(self, name: str, after: str, built: Path, workdir: Path) -> None:
        self.name, self.after, self.built, self.workdir = name, after, built, workdir
        self._stack: ExitStack | None = None

    def check(self, client: str, connections: int, size: int, *, warm: bool) -> None:
        argv = matrix.prepare(client, self.built)
        if self._stack is None:
            self._stack = ExitStack()
            self.stage = self._stack.enter_context(matrix.staged(self.workdir, self.after))
            self.server = Echo(self.stage, self.name, matrix.prepare(self.name, self.built))
        seed = ENDS.index(self.name) * 1000 + ENDS.index(client) * 70
        cell = Cell(self.name, client, connections, size, seed, self.after, warm=warm)
        outcome = matrix.exchange(self.stage, self.server, argv, cell, self.workdir / f"{client}-{warm}")
        if outcome.faults:
            self.close()
        assert not outcome.faults, "\n".join([cell.command, outcome.place, *outcome.faults[:8]])

    def close(self) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None


@pytest.fixture(scope="module", params=[(after, server) for after in AFTERS for server in ENDS], ids="-".join)
def row(request: pytest.FixtureRequest, built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Row]:
    """Each server with each setting."""
    after, server = request.param
    made = Row(server, after, built, tmp_path_factory.mktemp(f"{server}-{after}"))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("client", ENDS)
def test_echo(row: Row, client: str) -> None:
    """All that a client sends comes back whole, and then the end."""
    turn = ENDS.index(row.name) + ENDS.index(client) + AFTERS.index(row.after)
    if turn % 2:
        row.check(client, *COLD, warm=False)
    else:
        row.check(client, *SHAPES[turn // 2 % len(SHAPES)], warm=True)
