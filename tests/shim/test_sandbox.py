"""A program that puts itself under a seccomp filter: nothing that the shim does is forbidden to it afterwards."""

from __future__ import annotations

import os
import subprocess

import pytest
import toolchain
from common import PATIENCE_S
from foreign_programs import KINDS, PROGRAMS, build, loader_missing
from told_ends import End, join, promote

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

ROUNDS = 20
WAYS = pytest.mark.parametrize("way", ["prctl", "seccomp"])


@pytest.mark.parametrize("lenient", [5, 0])
@WAYS
def test_connections_go_back_to_tcp(sidestep: Sidestep, way: str, lenient: int) -> None:
    """They need the calls with which shims wait. Where these are forbidden, all calls on them are the kernel's."""
    a, b = End(sidestep), End(sidestep)
    join(a, b)
    promote(sidestep, a, b)
    a.ask("s.sendall(b'unread')")
    b.ask("__import__('sandbox') and None")
    assert b.ask(f"__import__('sandbox').enter({way!r}, {lenient})") == 0
    b.tell("s.recv(6)")
    a.ask("s.sendall(b'!')")
    assert b.answer() == "b'unread'"
    assert b.ask("s.recv(1)") == b"!"
    for _ in range(20):
        a.ask("s.sendall(b'ping')")
        assert b.ask("s.recv(4)") == b"ping"
        b.ask("s.sendall(b'pong')")
        assert a.ask("s.recv(4)") == b"pong"
    found = sidestep.connections()
    assert not any(c.promoted for c in found)
    assert {c.reason for c in found} >= ({"SANDBOX", "PEER_LEFT"} if lenient else {"PEER_LEFT"})
    b.ask("s.close()")
    assert a.ask("s.recv(1)") == b""


@WAYS
def test_connections_stay_on_tcp(sidestep: Sidestep, way: str) -> None:
    """Those that it has, and those that it accepts."""
    a, b = End(sidestep), End(sidestep)
    join(a, b)
    where = b.ask("serve('near')")
    b.ask("__import__('sandbox') and None")
    assert b.ask(f"__import__('sandbox').enter({way!r})") == 0
    a.ask(f"connect({where}, 'near')")
    b.ask("accept('near')")
    for name in ("s", "near"):
        for _ in range(20):
            a.ask(f"{name}.sendall(b'ping')")
            assert b.ask(f"{name}.recv(4)") == b"ping"
            b.ask(f"{name}.sendall(b'pong')")
            assert a.ask(f"{name}.recv(4)") == b"pong"
    assert not any(c.promoted for c in sidestep.connections())
    b.ask("near.close()")
    assert a.ask("near.recv(1)") == b""


def test_a_child_hears_nothing_of_the_provider(sidestep: Sidestep) -> None:
    """It does not know the provider yet, and the filter forbids to meet it."""
    a, b = End(sidestep), End(sidestep)
    join(a, b)
    promote(sidestep, a, b)
    b.ask("__import__('sandbox') and None")
    assert b.ask("__import__('sandbox').waits_in_a_child(s.fileno())") == 0
    a.ask("s.sendall(b'ping')")
    assert b.ask("s.recv(4)") == b"ping"


@pytest.mark.parametrize("promoted", [True, False])
@pytest.mark.parametrize(("how", "told"), [("strict", "600 400 10 3\n"), ("child", "10 3\n")])
@pytest.mark.parametrize("kind", ["dynamic", *KINDS])
def test_threads_that_the_shim_cannot_serve(
    sidestep: Sidestep, kind: str, how: str, told: str, *, promoted: bool
) -> None:
    """In strict mode a look at the clock is forbidden, too; a child in the same memory goes past the shim."""
    if kind != "dynamic" and (why := loader_missing()):
        pytest.skip(why)  # such a program stays on TCP on this machine
    options = ["-O1", "-D_GNU_SOURCE"]
    program = toolchain.build("confined", [PROGRAMS / "confined.c"], options) if kind == "dynamic" else None
    env = {} if promoted else {"SIDESTEP_PROMOTE_AFTER": "1000000:1000000000"}
    with sidestep.popen(
        [program or build("confined", kind), how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=sidestep.env(**env),
    ) as running:  # fmt: skip
        sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted == promoted for c in found))
        said, _ = running.communicate("go", timeout=PATIENCE_S)
    assert said == told
    assert running.returncode == 5


def _confine(sidestep: Sidestep, a: End, b: End, how: str, *, promoted: bool) -> None:
    """Joins them, and a child of the second has the connection for a while: nothing goes by ring meanwhile."""
    join(a, b)
    if promoted:
        promote(sidestep, a, b)
    assert b.ask(f"__import__('sandbox').begin(s.fileno(), {ROUNDS}{how})") == b"."
    for _ in range(ROUNDS):
        a.ask("s.sendall(b'unread')")
        assert a.ask("get(6)") == b"UNREAD"
    found = sidestep.connections()
    assert not any(c.promoted for c in found)
    assert "SANDBOX" in {c.reason for c in found}


@pytest.mark.parametrize("promoted", [False, True])
@pytest.mark.parametrize("how", ["", ", copies=20"])
def test_the_connection_is_promoted_when_the_confined_process_has_ended(
    sidestep: Sidestep, how: str, *, promoted: bool
) -> None:
    """The kernel has counted what it has moved."""
    a, b = End(sidestep), End(sidestep)
    _confine(sidestep, a, b, how, promoted=promoted)
    for _ in range(ROUNDS):  # it lives, and its parent makes calls, too
        b.ask("s.sendall(b'ping')")
        assert a.ask("get(4)") == b"ping"
        a.ask("s.sendall(b'pong')")
        assert b.ask("get(4)") == b"pong"
    assert not any(c.promoted for c in sidestep.connections())
    assert b.ask("__import__('sandbox').end()") == 0
    promote(sidestep, a, b)
    for one, other in ((a, b), (b, a)):
        one.ask("s.sendall(bytes(range(256)) * 1000)")
        assert other.ask("get(256000) == bytes(range(256)) * 1000")
    b.ask("s.close()")
    assert a.ask("s.recv(1)") == b""


@pytest.mark.parametrize("promoted", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        ", 'clone'",
        ", 'sendto'",
        ", partly='fcntl'",
        ", other_arch=True",
        ", unknown=True",
        ", shut=True",
        ", refused=True",
    ],
)
def test_it_stays_on_tcp_where_the_process_may_have_changed_it(sidestep: Sidestep, how: str, *, promoted: bool) -> None:
    """Or may have given it to others, or has ended its direction."""
    a, b = End(sidestep), End(sidestep)
    _confine(sidestep, a, b, how, promoted=promoted)
    assert b.ask("__import__('sandbox').end()") == 0
    for _ in range(5 * ROUNDS):
        a.ask("s.sendall(b'ping')")
        assert b.ask("get(4)") == b"ping"
        if "shut" not in how:
            b.ask("s.sendall(b'pong')")
            assert a.ask("get(4)") == b"pong"
    assert not any(c.promoted for c in sidestep.connections())
    if "shut" in how:
        assert b.ask("s.send(b'late')") == "EPIPE"
        assert a.ask("s.recv(1)") == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="a process counts others for itself only by root's leave")
def test_a_slot_is_free_again_whoever_counted_processes_otherwise(sidestep: Sidestep) -> None:
    """Nobody learns of that process's end by its number."""
    a, b = End(sidestep), End(sidestep)
    _confine(sidestep, a, b, ", apart=True", promoted=True)
    assert b.ask("__import__('sandbox').end()") == 0
    for end in (a, b):
        end.ask("s.close()")
    sidestep.wait_for(lambda found: all(c.role == "unknown" for c in found))  # not connected
