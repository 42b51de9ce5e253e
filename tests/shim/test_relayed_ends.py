"""Two programs with a provider between them that stops, or stands still: what it does to the calls of either end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relay_example import relayed
from sidestep.testing import Connection, Sidestep

pytestmark = pytest.mark.slow

TOLD = Path(__file__).parent / "programs" / "told.py"


class End:
    """A program that has one end of the connection and does what it is told."""

    def __init__(self, stage: Sidestep, log: Path | None = None) -> None:
        pipe, env = subprocess.PIPE, stage.env(SIDESTEP_LOG=str(log) if log else None)
        self._program: Any = stage.popen([sys.executable, TOLD], stdin=pipe, stdout=pipe, text=True, env=env)

    def tell(self, what: str) -> None:
        """Starts something; `answer` waits for it."""
        self._program.stdin.write(f"{what}\n")
        self._program.stdin.flush()

    def answer(self) -> str:
        """What the last thing told gave."""
        return str(self._program.stdout.readline().strip())

    def ask(self, what: str) -> Any:
        """Tells, and the value; a name of an errno as it is."""
        self.tell(what)
        answer = self.answer()
        return answer if answer.isupper() else literal_eval(answer)


@pytest.fixture
def stage() -> Iterator[Sidestep]:
    """A provider that has only the relay."""
    with relayed(Sidestep(promote_after="0")) as sidestep:
        yield sidestep


@pytest.fixture
def ends(stage: Sidestep) -> tuple[End, End]:
    """Who connects, and who accepts; both directions go through the provider."""
    a, b = End(stage), End(stage)
    a.ask(f"connect({b.ask('serve()')})")
    b.ask("accept()")

    def talk(found: list[Connection]) -> bool:
        for one, other in ((a, b), (b, a)):
            one.ask("s.sendall(b'x')")
            assert other.ask("s.recv(1)") == b"x"
        return sum(c.promoted for c in found) == 2

    stage.wait_for(talk)
    assert stage.status()["counters"]["relay_opened"] == 1
    return a, b


@contextmanager
def standing_still(stage: Sidestep) -> Iterator[None]:
    """The provider is alive, and hands nothing on."""
    pid = stage.provider_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        while Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "T":
            os.sched_yield()
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def unheard(stage: Sidestep, log: Path) -> Iterator[tuple[End, End]]:
    """Who connects has just moved to the ring, and the provider cannot tell the other."""
    a, b = End(stage, log), End(stage)
    a.ask(f"connect({b.ask('serve()')})")
    b.ask("accept()")
    b.ask("s.sendall(b'x')")
    a.ask("s.recv(1)")
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        with standing_still(stage):  # it makes no call at any other time
            a.ask("s.sendall(b'x')")
            if "sends by ring" in log.read_text(encoding="utf-8"):
                yield a, b
                return
        assert b.ask("s.recv(1)") == b"x"
    raise AssertionError("it does not move to the ring")


def test_a_provider_that_stands_still_does_not_reset_a_full_ring(stage: Sidestep, tmp_path: Path) -> None:
    """Who has heard the end goes back to TCP when the ring is full, once the provider can tell the other."""
    with unheard(stage, tmp_path / "log") as (a, b):
        a.ask("s.shutdown(socket.SHUT_RD)")
        sent = a.ask("put_until_full()")
        assert sent > 0
        a.ask("Later.of(lambda: s.sendall(b'f' * 2000000))")
    assert b.ask(f"len(get({1 + sent + 2_000_000}))") == 1 + sent + 2_000_000
    assert a.ask("Later.last.result()") == "None"
    a.ask("s.sendall(b'by TCP')")
    assert b.ask("get(6)") == b"by TCP"
    assert [c.tx.path for c in stage.connections() if c.role == "active"] == ["tcp"]


def test_a_call_that_must_go_by_tcp_waits_for_the_provider_alone(stage: Sidestep, tmp_path: Path) -> None:
    """It can last, but nothing else on the connection is held up, and nothing is reset."""
    with unheard(stage, tmp_path / "log") as (a, b):
        a.ask("Later.of(lambda: s.send(b'!', socket.MSG_OOB))")
        for call in ("s.recv(1, socket.MSG_DONTWAIT)", "s.send(b'y')", "select.select([s], [], [], 0.1)"):
            assert a.ask(f"timed(lambda: {call})") < 1
        assert a.ask("Later.last.waits(1.5)") is True
    assert a.ask("Later.last.result()") == "1"
    a.ask("s.sendall(b'more')")
    assert b.ask("get(6)") == b"xymore"


@pytest.mark.parametrize("way", ["linger", "unread"])
def test_a_reset_does_not_overtake_the_bytes(stage: Sidestep, ends: tuple[End, End], way: str) -> None:
    """What was sent before it is read before it, however long it is with the provider."""
    a, b = ends
    if way == "linger":
        a.ask("s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))")
    else:
        b.ask("s.sendall(b'unread')")
        assert a.ask("len(select.select([s], [], [])[0])") == 1
    with standing_still(stage):
        a.ask("s.sendall(b'a' * 5000)")
        a.ask("s.close()")
        for call in ("s.recv(1, socket.MSG_DONTWAIT)", "s.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)"):
            assert b.ask(call) == "EAGAIN"
        assert b.ask("select.select([s], [], [], 0.1)") == ([], [], [])
        assert b.ask("polled(0.1)") == []
        b.ask("Later.of(lambda: get(5000) == b'a' * 5000)")
        assert b.ask("Later.last.waits(0.1)") is True
    assert b.ask("Later.last.result()") == "True"
    assert b.ask("s.recv(1)") == "ECONNRESET"
    assert b.ask("s.recv(1)") == b""


def test_what_a_stopped_provider_counted_as_unread_is_no_reset(stage: Sidestep, ends: tuple[End, End]) -> None:
    """All has arrived, though its room was never given back: how the other ends is then the kernel's to tell."""
    a, b = ends
    a.ask("s.sendall(b'a' * 5000)")
    a.tell("s.recv(1)")
    b.ask("s.sendall(b'b')")
    assert a.answer() == "b'b'"
    a.tell("s.recv(1)")  # both sit in a call, and hear that they are asked back
    stage.kill_provider(signal.SIGTERM)
    assert b.ask("get(5000)") == b"a" * 5000
    b.ask("s.shutdown(1)")
    assert a.answer() == "b''"
    a.ask("s.sendall(b'and by TCP')")
    a.ask("s.close()")
    assert b.ask("get(100)") == b"and by TCP"


def test_a_program_that_makes_no_call_is_not_waited_for_in_vain(stage: Sidestep, ends: tuple[End, End]) -> None:
    """Where all it sent has arrived, a provider that stops takes nothing with it."""
    a, b = ends
    a.ask("s.sendall(b'a' * 5000)")
    stage.kill_provider(signal.SIGTERM)
    a.ask("s.sendall(b'c' * 3000)")
    assert b.ask("get(8000)") == b"a" * 5000 + b"c" * 3000
    b.ask("s.sendall(b'd' * 3000)")
    assert a.ask("get(3000)") == b"d" * 3000
    a.ask("s.shutdown(1)")
    assert b.ask("s.recv(1)") == b""
