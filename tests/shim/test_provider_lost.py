"""What waits with a provider when it is lost: nothing of it is kept."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from socket import create_server
from typing import Any

import pytest

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow
_OFFERED = 6
_CLIENT = """
import os, socket, sys
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
for line in sys.stdin:
    if line == "send\\n":
        for one in connections:
            one.sendall(b"x")
    elif line == "close one\\n":
        connections.pop().close()
    elif line == "close all\\n":
        for one in connections:
            one.close()
    elif line == "introduce\\n":
        os.seteuid(os.geteuid())  # before it may change its user, a process makes itself known
    print("done", flush=True)
"""


class Client:
    """A program with connections of which the other ends are not under sidestep: they are offered, and stay so."""

    def __init__(self, sidestep: Sidestep, port: int) -> None:
        argv = [sys.executable, "-c", _CLIENT, str(port), str(_OFFERED)]
        self.program: subprocess.Popen[Any] = sidestep.popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, what: str) -> None:
        """Returns when it is done."""
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        self.program.stdin.write(f"{what}\n")
        self.program.stdin.flush()
        assert self.program.stdout.readline() == "done\n"

    def tell_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Again and again; the test's time limit ends it."""
        while not condition():
            self.tell(what)

    def sockets(self) -> int:
        """How many it has, that to the provider among them."""
        links = Path(f"/proc/{self.program.pid}/fd").iterdir()
        return sum(str(link.readlink()).startswith("socket:") for link in links)


def test_a_provider_lost_twice_in_a_row_leaves_no_slot_behind(closing: ExitStack) -> None:
    """Neither loss is found by a call that looks for answers: what it left is let go of all the same."""
    listener = closing.enter_context(create_server(("127.0.0.1", 0)))
    sidestep = closing.enter_context(Sidestep(promote_after="0", offer_expiry_s=600))
    client = Client(sidestep, listener.getsockname()[1])
    client.tell_until("send", lambda: sidestep.status()["offers_pending"] == _OFFERED)
    sidestep.kill_provider()
    client.tell("close one")  # taking its offer back finds the provider gone
    assert client.sockets() == _OFFERED - 1

    sidestep.restart_provider()
    client.tell_until("introduce", lambda: sidestep.status()["shims"] == 1)
    sidestep.kill_provider()
    client.tell_until("send", lambda: client.sockets() == _OFFERED - 1)

    sidestep.restart_provider()
    client.tell("close all")
    client.tell_until("introduce", lambda: sidestep.status()["shims"] == 1)
    assert sidestep.connections() == []


_TALKER = """
import socket, sys
if sys.argv[1] == "listen":
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
    while data := sock.recv(1):
        sock.sendall(data)
else:
    sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    for line in sys.stdin:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        print("done", flush=True)
"""


class Pair:
    """Two programs that talk to each other when told, over one connection."""

    def __init__(self, sidestep: Sidestep) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        server: Any = sidestep.popen([sys.executable, "-c", _TALKER, "listen"], **pipes)
        port = server.stdout.readline().strip()
        self.client: Any = sidestep.popen([sys.executable, "-c", _TALKER, port], **pipes)

    def talk_until(self, condition: Callable[[], bool]) -> None:
        """One message each way, again and again; the test's time limit ends it."""
        while not condition():
            self.client.stdin.write("\n")
            self.client.stdin.flush()
            assert self.client.stdout.readline() == "done\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_promoted_connections_come_to_know_the_next_provider(closing: ExitStack, number: signal.Signals) -> None:
    """They need no provider, but who asks a new one about them must hear of them, and be able to move them."""
    sidestep = closing.enter_context(Sidestep(promote_after="0"))
    pair = Pair(sidestep)

    def both_promoted() -> bool:
        return [one.promoted for one in sidestep.connections()] == [True, True]

    pair.talk_until(both_promoted)
    sidestep.kill_provider(number)
    pair.talk_until(lambda: True)
    sidestep.restart_provider()
    pair.talk_until(both_promoted)
    sidestep.demote(timeout_s=0)
    pair.talk_until(lambda: [one.tx.path for one in sidestep.connections()] == ["tcp", "tcp"])
