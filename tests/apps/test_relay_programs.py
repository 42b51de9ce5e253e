"""Real programs with a protocol between them: the relay of examples/, and one that is slow."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import needed
import pytest
import queue_link
from common import PATIENCE_S
from relay_example import installed, prefer_relay, relayed

from sidestep.provider import control
from sidestep.testing import Sidestep, free_port

PROGRAMS = Path(__file__).with_name("programs")
SLOW = Path(__file__).with_name("slow_protocol")


@pytest.fixture
def through() -> Iterator[Sidestep]:
    """A provider that has only the relay."""
    with relayed(Sidestep(promote_after="8")) as sidestep:
        yield sidestep


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sidestep]:
    """A provider that has only the slow protocol."""
    monkeypatch.setenv("PYTHONPATH", f"{SLOW}:{Path(queue_link.__file__).parent}")
    with Sidestep(promote_after="0") as sidestep:
        prefer_relay(sidestep)
        yield sidestep


@pytest.mark.parametrize("way", ["close", "shutdown"])
@pytest.mark.parametrize("wait", ["blocking", "select", "epoll"])
def test_the_end_does_not_overtake_the_bytes(slow: Sidestep, way: str, wait: str) -> None:
    port = free_port()
    server = slow.popen(
        [sys.executable, PROGRAMS / "parting.py", "serve", str(port), way], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    reader = slow.popen(
        [sys.executable, PROGRAMS / "parting.py", "read", str(port), wait],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    slow.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
    output, _ = reader.communicate("go\n", timeout=PATIENCE_S)
    expected = random.Random(1).randbytes(300_000)
    assert output.split() == ["300000", hashlib.sha256(expected).hexdigest()]
    counters = slow.status()["counters"]
    assert counters["relay_opened"] == 1
    assert not [name for name in counters if name.startswith("relay_reset")], counters


def test_the_example_is_found_started_and_listed(through: Sidestep) -> None:
    with control.ControlConnection(through.socket) as connection:
        answer, descriptors = connection.request("modules")
        descriptors.close()
    states = {one["name"]: one["state"] for one in answer["modules"]}
    loaded_when_first_wanted = dict.fromkeys(("relay", "sdp", "iwarp", "roce", "verbs"), "installed")
    assert states == {"local": "removed"} | loaded_when_first_wanted
    assert (installed() / "sidestep_relay.py").exists()


def test_redis(through: Sidestep) -> None:
    for name in ("redis-server", "redis-cli", "redis-benchmark"):
        needed.program(name)  # fails where CI=true, and else skips with the reason
    port = str(free_port())
    server = through.popen(
        ["redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
    )
    while through.run(["redis-cli", "-p", port, "ping"], capture_output=True).stdout != b"PONG\n":
        assert server.poll() is None
    command = ["redis-benchmark", "-h", "127.0.0.1", "-p", port, "-q", "-d", "3000", "-t", "set,get,lpush,lrange_100"]
    for clients, pipeline in (("50", "1"), ("10", "16")):
        told = through.run([*command, "-c", clients, "-n", "3000", "-P", pipeline], capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        assert "requests per second" in told.stdout
    counters = through.status()["counters"]
    assert counters["relay_opened"] >= 50, counters
    # it closes connections with answers under way, which is a reset on TCP as well
    assert {name for name in counters if name.startswith("relay_reset")} <= {"relay_reset{unread}"}, counters
    assert server.poll() is None
