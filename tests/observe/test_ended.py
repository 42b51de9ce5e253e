"""Connections that have ended: those of programs that run, and those that programs took with them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chatting import Started, ended, expect
from common import PATIENCE_S, eventually, slot
from prometheus_client.parser import text_string_to_metric_families
from shim_client import ShimClient

from sidestep import config, limits
from sidestep.observe.connections import Ended
from sidestep.observe.connections import ended as look
from sidestep.observe.metrics import Exporter
from sidestep.provider.control import ControlConnection
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow  # real programs, and commands as processes

# Connections with itself: one talks until it is told not to, one hardly at all, one again; the first two are closed.
PROGRAM = """
import os, select, socket
listener = socket.create_server(("127.0.0.1", 0))
kept = []
for talks in (True, False, True):
    one = socket.create_connection(listener.getsockname())
    other = listener.accept()[0]
    kept += (one, other)
    while True:
        one.sendall(bytes(100))
        other.recv(100, socket.MSG_WAITALL)
        other.sendall(b"x")
        one.recv(1)
        if not talks or select.select([0], [], [], 0)[0]:
            break
    if talks:
        os.read(0, 1)
# Closed at the end, or the next connection would have their places.
for end in kept[:4]:
    end.close()
print("closed", flush=True)
os.read(0, 1)
"""

# A process with a socket, which only its child keeps: the child returns bytes, and ends at another one without a close.
FORKS = """
import os, socket, sys
if sys.argv[1] == "accepts":
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    one = listener.accept()[0]
else:
    one = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
one.sendall(one.recv(1))
child = os.fork()
if child == 0 and sys.argv[2:] == ["strange"]:  # a program without the shim, and one that outlives it
    os.set_inheritable(one.fileno(), True)
    os.execve("/bin/sh", ["sh", "-c", "sleep 1000 & echo $!; read line"], {"SIDESTEP_DISABLE": "1"})
while child == 0:
    if (byte := one.recv(1)) != b"x":
        os._exit(0)
    one.sendall(byte)
one.close()
if sys.argv[2:] != ["strange"]:
    print(child, flush=True)
    os.read(0, 1)
os.waitpid(child, 0)
print("reaped", flush=True)
os.read(0, 1)
"""
TALKS = """
import socket, sys
if sys.argv[1] == "accepts":
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    one, peer = listener.accept()
    print(peer[1], flush=True)
else:
    one = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
for line in sys.stdin:
    one.sendall(line[:1].encode())
    print(one.recv(1).decode(), flush=True)
"""


@pytest.fixture
def program(sidestep: Sidestep, closing: ExitStack) -> Started:
    """It has closed two of its connections."""
    started = sidestep.popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    closing.enter_context(ended(started))
    assert started.stdin is not None
    for count in (2, 4):
        eventually(partial(promoted, sidestep, count))
        started.stdin.write("\n")
        started.stdin.flush()
    expect(started, "closed")
    return started


def promoted(sidestep: Sidestep, count: int) -> bool:
    return sum(one.promoted for one in sidestep.connections()) == count


def ends(program: Started) -> None:
    assert program.stdin is not None
    program.stdin.close()
    assert program.wait(PATIENCE_S) == 0


def listed(sidestep: Sidestep, *args: str) -> list[dict[str, Any]]:
    argv = [sys.executable, "-m", "sidestep", "ss", f"--socket={sidestep.socket}", "--ended", "--json", *args]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    rows: list[dict[str, Any]] = json.loads(found.stdout)["connections"]
    return rows


def test_those_of_a_program_that_runs(sidestep: Sidestep, program: Started) -> None:
    rows = listed(sidestep)
    assert sorted(one["state"] for one in rows) == ["native", "native", "promoted", "promoted"]
    assert {one["pid"] for one in rows} == {program.pid}
    assert {one["ended_s"] for one in rows} == {None}
    active = next(one for one in rows if one["state"] == "promoted" and one["role"] == "active")
    passive = next(one for one in rows if one["state"] == "promoted" and one["role"] == "passive")
    assert active["tx"] == passive["rx"]
    assert active["tx"]["ring_bytes"] > 0
    assert len(sidestep.connections()) == 2  # the live ones are shown without --ended
    assert len(listed(sidestep, "--state=promoted")) == 2
    assert listed(sidestep, "--pid=1") == []


def test_those_that_a_program_took_with_it(sidestep: Sidestep, program: Started) -> None:
    ends(program)
    eventually(lambda: len(listed(sidestep)) == 6)
    rows = listed(sidestep)
    assert [one["born_ns"] for one in rows] == sorted(one["born_ns"] for one in rows)
    assert sorted(one["state"] for one in rows) == ["native"] * 2 + ["promoted"] * 4
    assert all(one["pid"] == program.pid and one["program"].startswith("python") for one in rows)
    assert all(one["ended_s"] >= 0 for one in rows)
    assert {one.family for one in look(sidestep.socket)} == {program.pid}
    table = subprocess.run(
        [sys.executable, "-m", "sidestep", "ss", f"--socket={sidestep.socket}", "--ended"],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert len(table) == 7


def test_metrics_count_them_once(sidestep: Sidestep, program: Started) -> None:
    exporter = Exporter(sidestep.socket)

    def count() -> dict[str, float]:
        families = {one.name: one for one in text_string_to_metric_families(exporter.text().decode())}
        found = families["sidestep_connections_ended"].samples
        by_state = dict.fromkeys(("native", "promoted"), 0.0)
        for sample in found:
            by_state[sample.labels["state"]] += sample.value
        by_state["seen"] = families["sidestep_connections_seen"].samples[0].value
        by_state["messages"] = sum(sample.value for sample in families["sidestep_messages"].samples)
        return by_state

    first = count()
    assert first.items() >= {"native": 2, "promoted": 2, "seen": 6}.items()
    assert count() == first
    ends(program)
    eventually(lambda: len(look(sidestep.socket)) == 6)
    assert count() == first | {"promoted": 4}


def test_what_is_kept_is_bounded_and_given_in_pages(sidestep: Sidestep) -> None:
    def rows() -> list[Ended]:
        return look(sidestep.socket)

    def told(count: int, last_ns: int) -> bool:
        found = rows()
        return len(found) == count and found[-1].connection.born_ns == last_ns

    for family in range(5):
        with ShimClient(sidestep.socket, slots_max=300) as client:
            client.hello()
            client.write_arena([slot(1000 + number, born_ns=1 + family * 1000 + number) for number in range(300)])
        count = min(limits.ENDED_MAX, (family + 1) * limits.ENDED_PER_FAMILY_MAX)
        eventually(partial(told, count, family * 1000 + limits.ENDED_PER_FAMILY_MAX))
    assert rows()[0].connection.born_ns == 1001  # the first family is forgotten
    with ControlConnection(sidestep.socket) as control:
        assert len(control.document("ended", after=0)["ended"]) == limits.ENDED_PER_REPLY


def test_a_program_that_comes_back_has_not_ended(sidestep: Sidestep) -> None:
    with ShimClient(sidestep.socket) as client:
        client.hello()
        client.write_arena([slot(1000)])
        client.sock.close()
        eventually(lambda: len(look(sidestep.socket)) == 1)
        client.sock = config.connect(sidestep.socket)
        client.hello()
        assert look(sidestep.socket) == []
        assert len(sidestep.connections()) == 1


@pytest.fixture
def python(closing: ExitStack) -> Callable[..., Started]:
    """Starts a program, by a given way, with pipes."""

    def start(popen: Callable[..., Started], code: str, *args: object) -> Started:
        argv = [sys.executable, "-c", code, *map(str, args)]
        return closing.enter_context(ended(popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)))

    return start


def number(program: Started) -> int:
    """The number that a program prints."""
    assert program.stdout is not None
    return int(program.stdout.readline())


def tell(program: Started, word: str) -> None:
    assert program.stdin is not None
    program.stdin.write(f"{word}\n")
    program.stdin.flush()


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def states(sidestep: Sidestep, port: int) -> tuple[list[str], list[str]]:
    """States of the ends that have this port as their own: of the live ones, and of those that are over."""
    over = (one.connection for one in look(sidestep.socket))
    live, past = (
        [one.state for one in found if one.local.endswith(f":{port}")] for found in (sidestep.connections(), over)
    )
    return live, past


@pytest.mark.parametrize("way", ["exits", "is_killed"])
@pytest.mark.parametrize("state", ["native", "offered", "promoted"])
def test_those_of_a_child_that_ends_without_a_close(
    sidestep: Sidestep, python: Callable[..., Started], state: str, way: str
) -> None:
    """Its family lives, and frees the place only when it needs one."""
    popen: Callable[..., Started] = sidestep.popen if state == "promoted" else subprocess.Popen
    if state == "offered":  # to an end that will never answer
        talks = python(popen, TALKS, "accepts")
        forks = python(sidestep.popen, FORKS, "connects", number(talks))
        port = number(talks)
    else:
        forks = python(sidestep.popen, FORKS, "accepts")
        port = number(forks)
        talks = python(popen, TALKS, "connects", port)

    def reached() -> bool:
        tell(talks, "x")
        expect(talks, "x")
        return states(sidestep, port) == ([state], [])

    tell(talks, "x")
    expect(talks, "x")
    child = number(forks)
    eventually(reached)
    if way == "is_killed":
        os.kill(child, signal.SIGKILL)
    else:
        tell(talks, "q")
    eventually(partial(is_zombie, child))
    assert states(sidestep, port) == ([], [state])
    tell(forks, "")
    expect(forks, "reaped")
    assert states(sidestep, port) == ([], [state])
    if state == "offered":  # nobody could take it up
        eventually(lambda: sidestep.status()["offers_pending"] == 0)


def test_a_program_without_the_shim_may_hold_one_for_longer(sidestep: Sidestep, python: Callable[..., Started]) -> None:
    forks = python(sidestep.popen, FORKS, "accepts", "strange")
    port = number(forks)
    talks = python(subprocess.Popen, TALKS, "connects", port)
    tell(talks, "x")
    sleeper = number(forks)
    with ExitStack() as sleeping:
        sleeping.callback(os.kill, sleeper, signal.SIGKILL)
        assert len(states(sidestep, port)[0]) == 1
        tell(forks, "")
        expect(forks, "reaped")
        assert len(states(sidestep, port)[0]) == 1
    eventually(lambda: [len(found) for found in states(sidestep, port)] == [0, 1])


def test_what_makes_no_sense_is_passed_over(sidestep: Sidestep) -> None:
    """The slots are a stranger's."""
    with ShimClient(sidestep.socket) as client:
        client.hello()
        client.write_arena([
            slot(1, state=77), slot(2, reason=99999), slot(4, generation=(1 << 32) - 1),
            slot(5, generation=2, state=77), slot(6, generation=4, state=0),
        ])  # fmt: skip
    eventually(lambda: [one.connection.local for one in look(sidestep.socket)] == ["127.0.0.1:4", "127.0.0.1:6"])
