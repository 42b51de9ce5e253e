"""What several unit tests need: waiting with a deadline, commands, and a connection slot as a shim would write it."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sidestep.native.layout import State

# A server that says so when it listens on the port of its argument.
ECHO = """
import socket, sys, threading
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
def serve(one):
    with one:
        while data := one.recv(65536):
            one.sendall(data)
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
TcpPair = tuple[socket.socket, socket.socket]


def pattern(size: int, seed: int = 1) -> bytes:
    """Bytes that do not repeat."""
    return Random(seed).randbytes(size)


def digest(data: Any) -> str:
    """Of any buffer."""
    return hashlib.sha256(data).hexdigest()


def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Returns once `condition` holds; fails if it does not within the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{condition} did not come true in {timeout_s} s")
        time.sleep(0.002)


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """The process is alive, and makes no step: it goes on for a moment after it was told to stop."""
    os.kill(pid, signal.SIGSTOP)
    try:
        threads = Path(f"/proc/{pid}/task")
        while any(path.read_text().rpartition(")")[2].split()[0] != "T" for path in threads.glob("*/stat")):
            os.sched_yield()
        yield
    finally:
        with suppress(ProcessLookupError):  # it was killed
            os.kill(pid, signal.SIGCONT)


def run_command(place: Path, *args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `sidestep ARGS` with runtime and configuration directories of its own."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(("SIDESTEP_", "LD_PRELOAD"))}
    base |= {"XDG_RUNTIME_DIR": str(place), "XDG_CONFIG_HOME": str(place)}
    return subprocess.run(
        [sys.executable, "-m", "sidestep", *args], env=base | env,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def slot(port: int, **changes: object) -> dict[str, object]:
    """A connection slot as a shim would write it."""
    return {
        "generation": 1,
        "state": State.PROMOTED,
        "role": 1,
        "family": socket.AF_INET,
        "local_addr": bytes(10) + b"\xff\xff\x7f\0\0\1",
        "remote_addr": bytes(10) + b"\xff\xff\x7f\0\0\2",
        "local_port": port,
        "remote_port": 80,
        "fd": 5,
        "pid": os.getpid(),
        "born_ns": time.monotonic_ns() - 10**9,
        "promoted_ns": time.monotonic_ns(),
        "segment_id": b"s" * 16,
        "tx_ring_bytes": 100,
        "tx_ring_msgs": 4,
    } | changes
