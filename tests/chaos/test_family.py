"""Connections whose process is killed while others of its family live on, and connections that are idle."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from selection import rotate

from sidestep.observe.connections import Connection
from sidestep.testing import Sidestep

SLEEPS = ["recv", "poll", "select", "epoll"]

_PREFORK = """
import os, signal, socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
def work():
    while True:
        one, _ = listener.accept()
        while data := one.recv(65536):
            one.sendall(data)
        one.close()
while True:
    worker = os.fork()
    if not worker:
        work()
    os.waitpid(worker, 0)
"""

_CALLS = """
import socket, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print(one.getsockname()[1], flush=True)
while True:
    one.sendall(b"x" * 64)
    if not one.recv(64, socket.MSG_WAITALL):
        break
"""

_IDLE = """
import select, socket, sys
how, port = sys.argv[1], int(sys.argv[2])
if port:
    one = socket.create_connection(("127.0.0.1", port))
else:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    one, _ = listener.accept()
if how == "epoll":
    waiting = select.epoll()
    waiting.register(one, select.EPOLLIN)
elif how == "poll":
    waiting = select.poll()
    waiting.register(one, select.POLLIN)
def wait():
    if how == "select":
        select.select([one], [], [])
    elif how != "recv":
        waiting.poll()
def take(count):
    while count:
        wait()
        count -= len(one.recv(count))
while not port or not select.select([sys.stdin], [], [], 0)[0]:
    if port:
        one.sendall(b"x" * 10000)
    take(10000)
    if not port:
        one.sendall(b"x" * 10000)
print("idle", flush=True)
take(1)
"""


def _line(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def _is_promoted(remote_port: str, found: list[Connection]) -> bool:
    return any(c.promoted and c.remote.endswith(f":{remote_port}") for c in found)


def test_slots_of_killed_workers_are_freed(sidestep: Sidestep) -> None:
    """A server's workers are killed with their connections, again and again: what is known of them does not pile up."""
    server = sidestep.popen([sys.executable, "-c", _PREFORK], stdout=subprocess.PIPE, text=True, start_new_session=True)
    port = _line(server)
    killed, freed = 0, False
    try:
        # they are looked for once a second, by whoever of the family accepts the next connection
        while not freed:
            client = sidestep.popen([sys.executable, "-c", _CALLS, port], stdout=subprocess.PIPE, text=True)
            ours = _line(client)
            found = sidestep.wait_for(functools.partial(_is_promoted, ours))
            freed = sum(c.role == "passive" for c in found) <= killed
            os.kill(next(c.pid for c in found if c.remote.endswith(f":{ours}")), signal.SIGKILL)
            client.kill()
            client.wait()
            killed += 1
    finally:
        os.killpg(server.pid, signal.SIGKILL)


def _ring_pages_kib(pid: int) -> int:
    """Memory of channel segments that is mapped and resident."""
    kib, ring = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ring = "sidestep-channel" in line
        elif ring and line.startswith("Rss:"):
            kib += int(line.split()[1])
    return kib


def _idle_ends(sidestep: Sidestep, how: str) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """A server and its client that are promoted, have talked, and sleep from now on."""

    def start(port: str) -> subprocess.Popen[str]:
        return sidestep.popen(
            [sys.executable, "-c", _IDLE, how, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    server = start("0")
    client = start(_line(server))
    sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
    assert client.stdin is not None
    client.stdin.write("enough\n")
    client.stdin.flush()
    assert _line(client) == "idle"
    return server, client


@pytest.mark.parametrize("how", rotate(SLEEPS, ci=2))
def test_idle_rings_give_their_pages_back(sidestep: Sidestep, how: str) -> None:
    ends = _idle_ends(sidestep, how)
    assert min(_ring_pages_kib(one.pid) for one in ends) > 16
    sidestep.wait_for(lambda _: max(_ring_pages_kib(one.pid) for one in ends) <= 16)


@pytest.mark.parametrize("how", rotate(SLEEPS, 1, ci=2))
def test_idle_connections_follow_orders(sidestep: Sidestep, how: str) -> None:
    """Both programs sleep for as long as nothing comes, and make no call: they hear of the orders all the same."""
    ends = _idle_ends(sidestep, how)
    for round_ in range(2):
        # while there are pages to be given back sleeps end every second; then they have no end
        sidestep.wait_for(lambda _: max(_ring_pages_kib(one.pid) for one in ends) <= 16)
        one_end = sidestep.connections()[round_].local

        def chosen(found: Connection, local: str = one_end) -> bool:
            return found.local == local

        (demoted,) = sidestep.demote(chosen)
        assert (demoted.result, demoted.connection.reason) == ("tcp", "DEMOTED")
        sidestep.wait_for(lambda found: all(c.tx.path == c.rx.path == "tcp" for c in found))
        (promoted,) = sidestep.promote(chosen)
        assert promoted.result == "promoted"
        sidestep.wait_for(lambda found: all(c.promoted for c in found))
