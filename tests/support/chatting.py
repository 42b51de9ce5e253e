"""Real programs that talk over one connection, under sidestep or not, and are looked at while they do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import eventually

from sidestep.testing import Sidestep, free_port

PROGRAM = Path(__file__).parent / "programs" / "chat.py"
Started = subprocess.Popen[Any]


class Chat:
    """A server, and clients that come to it; started by `popen` of a `Sidestep`, or by subprocess.Popen."""

    def __init__(self, closing: ExitStack, popen: Any, *, env: Mapping[str, str] | None = None) -> None:
        self._closing = closing
        self.port = free_port()
        self.server = self._start(popen, "server", env=env)
        expect(self.server, "listening")

    def client(
        self, popen: Any, *words: str, env: Mapping[str, str] | None = None, argv: list[str] | None = None
    ) -> Started:
        """One that has made its first round trips; `argv` instead of the interpreter and the program."""
        client = self._start(popen, "client", *words, env=env, argv=argv)
        expect(client, "talked")
        return client

    def _start(
        self, popen: Any, role: str, *words: str, env: Mapping[str, str] | None, argv: list[str] | None = None
    ) -> Started:
        program: Started = popen(
            [*(argv or [sys.executable, str(PROGRAM)]), role, str(self.port), *words],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._closing.enter_context(ended(program))
        return program


@contextmanager
def ended(program: Started) -> Iterator[Started]:
    """Kills a program at the end, and closes its pipes."""
    with program:
        try:
            yield program
        finally:
            program.kill()


def expect(program: Started, word: str) -> None:
    """Waits for a line that a program prints."""
    assert program.stdout is not None
    assert program.stdout.readline().strip() == word


def talk_on(client: Started) -> None:
    """More round trips."""
    assert client.stdin is not None
    client.stdin.write("\n")
    client.stdin.flush()
    expect(client, "talked")


def promoted_chat(sidestep: Sidestep, closing: ExitStack) -> tuple[Chat, Started]:
    """A server and a client under sidestep whose connection goes by ring in both ends, and has been used since."""
    chat = Chat(closing, sidestep.popen)
    return chat, promoted_client(sidestep, chat)


def promoted_client(sidestep: Sidestep, chat: Chat) -> Started:
    """One whose connection goes by ring in both ends; it talks until it does."""
    client = chat.client(sidestep.popen)

    def both_promoted() -> bool:
        talk_on(client)
        return sum(one.promoted for one in sidestep.connections()) == 2

    eventually(both_promoted)
    talk_on(client)
    return client
