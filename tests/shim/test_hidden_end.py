"""A duplicate of the socket in the queue of a provider that stands still does not hide the end of the stream."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from common import PATIENCE_S, standing_still

from sidestep.settings import Proof
from sidestep.testing import Sidestep

PROGRAM = Path(__file__).parent / "programs" / "ends.py"
ORDERLY = ("close", "linger", "replaced", "leave", "abort")
SHARED = ("twice", "fork")
RESETS = ("unread", "reset")


@pytest.mark.parametrize("how", [*ORDERLY, *SHARED, *RESETS])
def test_the_peer_hears_the_end_while_the_provider_stands_still(how: str) -> None:
    with told_to_end(how) as (second, _program, _goes_on):
        if how in SHARED:  # the first of two holders has gone; the second still answers, and then it is over
            second.sendall(b"c")
            assert second.recv(1) == b"c"
        if how in RESETS:
            if how == "unread":
                second.sendall(b"d")
            with pytest.raises(ConnectionResetError):
                second.recv(1)
        else:
            assert second.recv(1) == b""


@pytest.mark.parametrize("how", ["passed", "spawned"])
def test_a_socket_that_somebody_else_has_been_given_is_not_ended(how: str) -> None:
    with told_to_end(how) as (second, program, provider_goes_on):
        if how == "passed":
            assert program.stdout is not None
            assert program.stdout.readline() == "ended\n"  # it has closed its own
        second.sendall(b"c")
        assert second.recv(1) == b"c"
        provider_goes_on()  # of the receiver's end nobody else tells
        assert second.recv(1) == b""


@contextmanager
def told_to_end(how: str) -> Iterator[tuple[socket.socket, subprocess.Popen[str], Callable[[], None]]]:
    """The peer of a connection that ends in such a way while the provider stands still; its program; and what wakes it.

    Afterwards the provider is seen to find the duplicate.
    """
    with Sidestep(prove_by=Proof.POSSESSION) as sidestep, socket.create_server(("127.0.0.1", 0)) as server:
        program = started(sidestep, server, how)
        assert program.stdin is not None
        with standing_still(sidestep.provider_pid):
            program.stdin.write("go\n")
            program.stdin.flush()
            with server.accept()[0] as second:
                second.settimeout(PATIENCE_S)
                assert second.recv(1) == b"a"
                second.sendall(b"b")
                yield second, program, lambda: os.kill(sidestep.provider_pid, signal.SIGCONT)
        assert queued_offer_was_read(sidestep)
        program.stdin.close()


def started(sidestep: Sidestep, server: socket.socket, how: str) -> subprocess.Popen[str]:
    """The program, when the provider has had an offer of its first connection and nothing of its second one."""
    argv = [sys.executable, str(PROGRAM), str(server.getsockname()[1]), how]
    program = sidestep.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    with server.accept()[0] as first:
        deadline = time.monotonic() + PATIENCE_S
        while not sidestep.status()["counters"].get("offer_accepted"):
            assert time.monotonic() < deadline
            first.sendall(b"x")
            assert first.recv(1) == b"x"
    assert program.stdout.readline() == "ready\n"
    return program


def queued_offer_was_read(sidestep: Sidestep) -> bool:
    """Whether the provider, once it goes on, finds the message whose duplicate was of a connection that has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        counters = sidestep.status()["counters"]
        if counters.get("offer_refused{NOT_PROVEN}") or counters.get("offer_accepted", 0) >= 2:
            return True
    return False
