"""Servers and clients on hosts, and what is expected of them."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from common import PATIENCE_S
from hosts import Host

from sidestep.testing import Connection

TALKERS = [sys.executable, str(Path(__file__).with_name("talkers.py"))]
PORT = 7000
LISTEN_S: Final = PATIENCE_S
PYTHON_SDP = [sys.executable, str(Path(__file__).with_name("python_sdp.py"))]
SIZES = (1, 40_000, 3_000_000)


def serving(host: Host, address: str | None = None) -> subprocess.Popen[str]:
    """An echo server that listens."""
    server = host.popen([*TALKERS, "serve", address or host.address, str(PORT)], stdout=subprocess.PIPE, text=True)
    assert line(server) == "listens"
    return server


def talking(
    host: Host, address: str, seconds: float = 0, size: int = 3000, pause_s: float = 0.001
) -> subprocess.Popen[str]:
    """A client whose first message has come back; it talks until `ends_well` has told it, and then TALKED_ON messages.

    What is waited for while it talks may take as long as it likes. With `seconds` it talks for so long, whatever comes.
    """
    argv = [*TALKERS, "talk", address, str(PORT), str(seconds), str(size), str(pause_s)]
    client = host.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert line(client) == "talks"
    return client


def line(program: subprocess.Popen[str]) -> str:
    """What it says next."""
    output: IO[str] | None = program.stdout
    assert output is not None
    return output.readline().strip()


@contextmanager
def running(host: Host, *argv: str | Path, says: str) -> Iterator[subprocess.Popen[str]]:
    """A program on a host, without the shim, that has said its first word."""
    with host.namespace.inside():
        program = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    with program:
        try:
            assert line(program) == says
            yield program
        finally:
            program.kill()


def talks(
    host: Host, kind: str, address: str, *, rdma_port: int = 0, port: int = PORT, sizes: Sequence[int] = SIZES
) -> int:
    """A client, of which every byte came back; bytes that went by RDMA Read or Write out of its memory."""
    argv = [*PYTHON_SDP, kind, address, str(port), str(rdma_port), *map(str, sizes)]
    with host.namespace.inside():
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.split()
    assert words[:2] == ["right:", f"{len(sizes)},"], done.stdout
    return int(words[2])


def promoted(*hosts: Host, ends: int = 1) -> None:
    """Waits until so many ends of each host are on their rings both ways, and their provider carries them by SDP."""
    for host in hosts:
        host.sidestep.wait_for(lambda found: sum(_by_sdp(each) for each in found) >= ends)


def _by_sdp(found: Connection) -> bool:
    return found.promoted and found.link is not None and found.link["protocol"] == "sdp"


def listening(host: Host, port: int) -> None:
    """Waits until somebody listens there."""
    deadline = time.monotonic() + LISTEN_S
    while f":{port} " not in host.plain(["ss", "-Hltn"], stdout=subprocess.PIPE, text=True).stdout:
        assert time.monotonic() < deadline, f"nobody listens at {port}"
        time.sleep(0.02)  # nothing tells when a program begins to listen


def random_file(path: Path, mebibytes: int) -> tuple[Path, str]:
    """A file of random bytes, no two blocks of which are alike, and its checksum."""
    block = random.Random(1).randbytes(1 << 20)
    with path.open("wb") as file:
        for number in range(mebibytes):
            file.write(number.to_bytes(4, "big") + block[4:])
    return path, sha256_of(path)


def sha256_of(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def on_tcp(*hosts: Host) -> None:
    """Waits until the one connection of each host has gone back."""
    for host in hosts:
        host.sidestep.wait_for(lambda found: len(found) == 1 and found[0].state == "pinned")


def ends_well(client: subprocess.Popen[str], more_than: int = 0) -> None:
    """Every byte was right, and the end came behind them."""
    if client.stdin is not None:
        client.stdin.close()
    said = line(client)
    assert said.startswith("right: "), said
    assert int(said.split()[1]) > more_than
    assert line(client) == "the end came"
    assert client.wait(PATIENCE_S) == 0
