"""A connection that is given to another program (SCM_RIGHTS) goes on there by its ring."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import needed
import pytest
from common import PATIENCE_S, eventually

from sidestep.testing import Connection, Sidestep

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).resolve().parent / "programs" / "given.py"
WORDS = 300  # that a client sends to the taker, and compares
NOBODY = 65534
COUNTS = {"many": 5, "cut": 2}
_CLIENT = """
import os, select, socket, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def talk(word):
    one.sendall(word)
    assert one.recv(64, socket.MSG_WAITALL) == word
while not select.select([sys.stdin], [], [], 0)[0]:
    talk(b"a" * 64)
sys.stdin.readline()
talk(b"b" * 64)
sys.stdin.readline()
for _ in range(int(sys.argv[2])):
    talk(os.urandom(64))
print("talked", flush=True)
sys.stdin.readline()
one.shutdown(socket.SHUT_WR)
print(one.recv(1), flush=True)
"""


class Given:
    """A giver, a taker, and clients whose connections are promoted and then given away."""

    def __init__(self, sidestep: Sidestep, how: str, place: Path, *before: str) -> None:
        self._sidestep = sidestep
        self.taker = None if how == "self" else self._start(PROGRAM, "taker", how, place / "way", before=before)
        if self.taker is not None:
            assert line(self.taker) == "listens"
        self.giver = self._start(PROGRAM, "giver", how, place / "way")
        port = line(self.giver)
        self.clients = [self._start("-c", _CLIENT, port, WORDS) for _ in range(COUNTS.get(how, 1))]
        sidestep.wait_for(lambda found: sum(c.promoted for c in found) == 2 * len(self.clients))
        for client in self.clients:
            tell(client)

    def _start(self, *argv: object, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return self._sidestep.popen([*before, sys.executable, *map(str, argv)], stdin=pipe, stdout=pipe, text=True)

    def servers(self) -> list[Connection]:
        """The ends that were accepted."""
        return [found for found in self._sidestep.connections() if found.role == "passive"]

    def ends_well(self) -> None:
        for program in (*self.clients, self.giver, self.taker):
            if program is not None:
                if program.returncode is None:
                    program.communicate("\n" * 3, timeout=PATIENCE_S)
                assert program.returncode == 0


def line(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def tell(program: subprocess.Popen[str]) -> None:
    assert program.stdin is not None
    program.stdin.write("go\n")
    program.stdin.flush()


@pytest.mark.parametrize("how", ["alone", "kept", "peek", "peeked", "twice", "many", "back", "self"])
def test_it_goes_on_by_ring(sidestep: Sidestep, how: str, tmp_path: Path) -> None:
    given = Given(sidestep, how, tmp_path)
    if given.taker is not None:
        assert line(given.taker) == f"{2 if how == 'twice' else COUNTS.get(how, 1)} whole"
    before = {found.remote: found.rx.ring_msgs for found in given.servers()}
    for client in given.clients:
        tell(client)
        assert line(client) == "talked"
    after = given.servers()
    assert len(after) == len(given.clients)
    assert [(f.promoted, f.rx.ring_msgs - before[f.remote] >= WORDS) for f in after] == [(True, True)] * len(after)
    if how == "kept":
        given.giver.communicate("\n", timeout=PATIENCE_S)
    for client in given.clients:
        tell(client)
        assert line(client) == "b''"
    given.ends_well()


_NEW = """
import os, select, socket, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
one.sendall(b"b" * 64)
assert one.recv(64, socket.MSG_WAITALL) == b"b" * 64
while not select.select([sys.stdin], [], [], 0)[0]:
    word = os.urandom(64)
    one.sendall(word)
    assert one.recv(64, socket.MSG_WAITALL) == word
"""


def test_what_is_not_promoted_yet_is_promoted_there(sidestep: Sidestep, tmp_path: Path) -> None:
    """The taker knows what TCP has carried, as each server does that hands new connections to workers."""
    pipe, way = subprocess.PIPE, str(tmp_path / "way")
    with sidestep.popen([sys.executable, PROGRAM, "taker", "alone", way], stdin=pipe, stdout=pipe, text=True) as taker:
        assert line(taker) == "listens"
        giver = sidestep.popen([sys.executable, PROGRAM, "giver", "alone", way], stdin=pipe, stdout=pipe, text=True)
        client = sidestep.popen([sys.executable, "-c", _NEW, line(giver)], stdin=pipe, text=True)
        assert line(taker) == "1 whole"
        sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
        for program in (client, taker, giver):
            program.communicate("\n", timeout=PATIENCE_S)
            assert program.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a program of another user's")
def test_another_user_gets_it_by_tcp(sidestep: Sidestep) -> None:
    """That user's program has the shim, but no arena of ours is for it."""
    before = (needed.program("setpriv"), f"--reuid={NOBODY}", "--clear-groups")
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o777)
        given = Given(sidestep, "alone", Path(place), *before)
        assert given.taker is not None
        assert line(given.taker) == "1 whole"
        (client,) = given.clients
        tell(client)
        assert line(client) == "talked"
        (end,) = (found for found in sidestep.connections() if found.role == "active")
        assert not end.promoted
        assert end.rx.tcp_msgs >= WORDS
        tell(client)
        assert line(client) == "b''"
        given.ends_well()


def test_what_has_no_room_ends_as_over_tcp(sidestep: Sidestep, tmp_path: Path) -> None:
    """The kernel closes what it cannot deliver."""
    given = Given(sidestep, "cut", tmp_path)
    assert given.taker is not None
    assert line(given.taker) == "1 cut"
    eventually(lambda: len(given.servers()) == 1)
    for client in given.clients:
        tell(client)
    assert sorted(line(client) for client in given.clients) == ["", "talked"]


def test_a_command_finds_it_when_the_giver_has_ended(sidestep: Sidestep, tmp_path: Path) -> None:
    given = Given(sidestep, "alone", tmp_path)
    assert given.taker is not None
    assert line(given.taker) == "1 whole"
    (client,) = given.clients
    given.giver.communicate("\n", timeout=PATIENCE_S)
    assert [found.promoted for found in given.servers()] == [True]
    with ThreadPoolExecutor() as pool:
        order = pool.submit(sidestep.demote, lambda c: c.role == "passive")
        eventually(lambda: [found.reason for found in given.servers()] == ["DEMOTED"])
        tell(client)
        assert line(client) == "talked"
        assert [outcome.done for outcome in order.result(PATIENCE_S)] == [True]
    assert [found.promoted for found in given.servers()] == [False]
    tell(client)
    assert line(client) == "b''"
    given.ends_well()
