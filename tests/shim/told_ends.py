"""Programs that have one end of a connection and do, a step at a time, what they are told (programs/told.py)."""

from __future__ import annotations

import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from typing import Any

from sidestep.testing import Connection, Sidestep

TOLD = Path(__file__).parent / "programs" / "told.py"


class End:
    """A program that has one end of the connection and does what it is told."""

    def __init__(self, stage: Sidestep, log: Path | None = None, **settings: str) -> None:
        pipe, env = subprocess.PIPE, stage.env(SIDESTEP_LOG=str(log) if log else None, **settings)
        self._program: Any = stage.popen([sys.executable, TOLD], stdin=pipe, stdout=pipe, text=True, env=env)

    @property
    def pid(self) -> int:
        """Of the program."""
        pid: int = self._program.pid
        return pid

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

    def kill(self) -> None:
        """Ends it; its connections with it."""
        self._program.kill()
        self._program.wait()


def join(a: End, b: End, name: str = "s") -> None:
    """Makes a connection from one to the other."""
    a.ask(f"connect({b.ask(f'serve({name!r})')}, {name!r})")
    b.ask(f"accept({name!r})")


def promote(stage: Sidestep, a: End, b: End, name: str = "s", *, count: int = 2) -> None:
    """Sends to and fro until so many ends are promoted."""

    def talk(found: list[Connection]) -> bool:
        for one, other in ((a, b), (b, a)):
            one.ask(f"{name}.sendall(b'x')")
            assert other.ask(f"{name}.recv(1)") == b"x"
        return sum(c.promoted for c in found) == count

    stage.wait_for(talk)
