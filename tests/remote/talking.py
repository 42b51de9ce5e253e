"""Servers and clients on hosts, and what is expected of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO

from hosts import Host

TALKERS = [sys.executable, str(Path(__file__).with_name("talkers.py"))]
PORT = 7000


def serving(host: Host, address: str | None = None) -> subprocess.Popen[str]:
    """An echo server that listens."""
    server = host.popen([*TALKERS, "serve", address or host.address, str(PORT)], stdout=subprocess.PIPE, text=True)
    assert line(server) == "listens"
    return server


def talking(
    host: Host, address: str, seconds: float = 2, size: int = 3000, pause_s: float = 0.001
) -> subprocess.Popen[str]:
    """A client whose first message has come back."""
    argv = [*TALKERS, "talk", address, str(PORT), str(seconds), str(size), str(pause_s)]
    client = host.popen(argv, stdout=subprocess.PIPE, text=True)
    assert line(client) == "talks"
    return client


def line(program: subprocess.Popen[str]) -> str:
    """What it says next."""
    output: IO[str] | None = program.stdout
    assert output is not None
    return output.readline().strip()


def promoted(*hosts: Host, ends: int = 1) -> None:
    """Waits until so many ends of each host are on their rings both ways."""
    for host in hosts:
        host.sidestep.wait_for(lambda found: sum(each.promoted for each in found) >= ends)


def ends_well(client: subprocess.Popen[str], more_than: int = 0) -> None:
    """Every byte was right, and the end came behind them."""
    said = line(client)
    assert said.startswith("right: "), said
    assert int(said.split()[1]) > more_than
    assert line(client) == "the end came"
    assert client.wait(10) == 0
