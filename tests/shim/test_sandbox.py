"""A program that puts itself under a seccomp filter: nothing that the shim does is forbidden to it afterwards."""

from __future__ import annotations

import subprocess

import pytest
import toolchain
from common import PATIENCE_S
from foreign_programs import KINDS, PROGRAMS, build, loader_missing
from told_ends import End, join, promote

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

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
