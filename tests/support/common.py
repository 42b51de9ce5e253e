"""What several unit tests need: waiting with a deadline, commands, and a connection slot as a shim would write it."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from sidestep.native.layout import State
from sidestep.provider.control import ControlConnection
from sidestep.testing import Sidestep

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
# A wait ends with its event: only a broken run waits for as long, and the wait fails before pytest's own limit does.
PATIENCE_S: Final = 100.0
TcpPair = tuple[socket.socket, socket.socket]


def pattern(size: int, seed: int = 1) -> bytes:
    """Bytes that do not repeat."""
    return Random(seed).randbytes(size)


def digest(data: Any) -> str:
    """Of any buffer."""
    return hashlib.sha256(data).hexdigest()


def eventually(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Returns once `condition` holds; fails if it does not within the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{condition} did not come true in {timeout_s} s")
        time.sleep(0.002)


def forked(do: Callable[[], int]) -> int:
    """The number of a child that ends with the status that `do` returns, or 125; it never goes on with our tests."""
    if (pid := os.fork()) == 0:
        status = 125
        try:
            status = do()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


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


def load_protocols(sidestep: Sidestep) -> None:
    """Has the provider load its protocols, as the first question of a program does.

    That takes a second of CPU. On a busy machine it takes longer than the EXPLICIT_ASK_TIMEOUT_S that a call waits.
    """
    with ControlConnection(sidestep.socket, timeout_s=PATIENCE_S) as connection:
        answer, descriptors = connection.request("modules")
        descriptors.close()
        for module in answer["modules"]:
            if module["kind"] == "protocol":
                connection.request("module_add", name=module["name"])[1].close()


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
        "holders": 1,
        "born_ns": time.monotonic_ns() - 10**9,
        "promoted_ns": time.monotonic_ns(),
        "segment_id": b"s" * 16,
        "tx_ring_bytes": 100,
        "tx_ring_msgs": 4,
    } | changes
