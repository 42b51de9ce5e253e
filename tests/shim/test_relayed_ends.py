"""Two programs with a provider between them that stops, or stands still: what it does to the calls of either end."""

from __future__ import annotations

import signal
import subprocess
import sys
from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relay_example import relayed
from sidestep.testing import Connection, Sidestep

pytestmark = pytest.mark.slow

TOLD = Path(__file__).parent / "programs" / "told.py"


class End:
    """A program that has one end of the connection and does what it is told."""

    def __init__(self, stage: Sidestep) -> None:
        pipe = subprocess.PIPE
        self._program: Any = stage.popen([sys.executable, TOLD], stdin=pipe, stdout=pipe, text=True)

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
