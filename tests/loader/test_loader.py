"""Static programs, those of musl, and Go, started by the loader: promoted, and in all else as without it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from foreign_programs import KINDS, build, build_go, build_rust, put_out_of_reach

from sidestep.observe.connections import ended
from sidestep.testing import Sidestep, free_port

BYTES = 4 << 20  # each way
pytestmark = pytest.mark.slow  # real programs


@pytest.mark.parametrize("kind", KINDS)
def test_all_registers_are_kept_while_signals_come(provider: Sidestep, echo: int, kind: str) -> None:
    program = provider.popen([build("registers", kind), str(echo)])
    ends = provider.wait_for(lambda found: len([one for one in found if one.promoted]) == 2)
    assert program.pid in {one.pid for one in ends}
    assert program.wait(60) == 0


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_storms_of_signals_lose_nothing(provider: Sidestep, echo: int, kind: str) -> None:
    """Long form: SIDESTEP_STORM_SECONDS=900."""
    seconds = int(os.environ.get("SIDESTEP_STORM_SECONDS", "3"))
    program = provider.popen([build("storm", kind), str(echo), str(seconds)])
    assert program.wait(seconds + 60) == 0
    # afterwards: beside a load it may have ended before a look at what is live
    over = [one.connection for one in ended(provider.socket) if one.connection.pid == program.pid]
    assert any(one.promoted for one in over), over


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["stack", "other"])
def test_calls_that_are_left_take_nothing_with_them(provider: Sidestep, kind: str, place: str) -> None:
    program = provider.popen([build("leaving", kind), place])
    provider.wait_for(lambda found: len([one for one in found if one.promoted and one.pid == program.pid]) == 6)
    assert program.wait(60) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_is_told_what_it_is_told_without(provider: Sidestep, tmp_path: Path, kind: str) -> None:
    argv = [str(build("told", kind)), "one", "two words", ""]
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    native = subprocess.run(argv, env=env, stdout=subprocess.PIPE, cwd=tmp_path, timeout=60, check=False)
    loaded = provider.run(argv, stdout=subprocess.PIPE, cwd=tmp_path, check=False)
    assert (loaded.stdout.decode(), loaded.returncode) == (native.stdout.decode(), native.returncode)
    assert native.returncode == 42


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_finds_the_kernels_frame(provider: Sidestep, kind: str) -> None:
    program = build("frames", kind)
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    native = subprocess.run([program], env=env, stdout=subprocess.PIPE, timeout=60, check=False)
    loaded = provider.run([program], stdout=subprocess.PIPE, check=False)
    assert (loaded.stdout.decode(), loaded.returncode) == (native.stdout.decode(), native.returncode)
    assert native.returncode == 5


@pytest.mark.parametrize("kind", KINDS)
def test_children_are_made_as_only_clone3_can(provider: Sidestep, kind: str) -> None:
    program = build("children", kind)
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    native = subprocess.run([program], env=env, stdout=subprocess.PIPE, timeout=60, check=True).stdout.decode()
    loaded = provider.run([program], stdout=subprocess.PIPE).stdout.decode()
    assert loaded == native
    assert "both: exit 7, pidfd 1, number 1\n" in native


def test_go_returns_what_it_gets_by_splice(provider: Sidestep) -> None:
    """io.Copy from a connection to itself: by a pipe, and it waits for an edge when the ring has no room."""
    exchanged_with(provider, [build_go("exchange"), "serve"])


_SENDER = """
import select, socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as to:
    while not select.select([sys.stdin], [], [], 0)[0]:
        to.sendall(b"a")
        to.recv(1)
    to.sendall(b"e" + bytes(50_000))
"""


def test_a_child_of_go_reads_on(provider: Sidestep) -> None:
    """By the ring, which nobody could send again: the sender is gone when the child is made."""
    port, pipe = str(free_port()), subprocess.PIPE
    with provider.popen([build_go("inetd"), port, "wc", "-c"], stdin=pipe, stdout=pipe, text=True) as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline() == "ready\n"
        with provider.popen([sys.executable, "-c", _SENDER, port], stdin=pipe) as sender:
            provider.wait_for(lambda found: len(found) == 2 and all(one.promoted for one in found))
            sender.communicate(b"go", timeout=60)
        assert serving.communicate("go\n", timeout=60)[0] == "50000\n"


@pytest.mark.parametrize("how", ["copy", "read"])
def test_static_rust_returns_what_it_gets(provider: Sidestep, how: str) -> None:
    exchanged_with(provider, [build_rust("exchange"), "serve"], how)


def exchanged_with(provider: Sidestep, server: list[str | Path], *more: str) -> None:
    """A client of C, and that server, both promoted: all that the client sends comes back."""
    port = str(free_port())
    serving = provider.popen([*server, port, *more], stdout=subprocess.PIPE)
    assert serving.stdout is not None
    assert serving.stdout.readline() == b"ready\n"
    talk = [str(build("exchange", "static")), "talk", port, str(BYTES)]
    client = provider.popen(talk, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.stdin is not None
    assert client.stdout is not None
    ends = {client.pid, serving.pid}
    provider.wait_for(lambda found: ends <= {one.pid for one in found if one.promoted})
    client.stdin.write(b"\n")
    client.stdin.flush()
    assert client.stdout.readline() == b"equal\n"
    moved = {one.pid: min(one.rx.ring_bytes, one.tx.ring_bytes) for one in provider.connections()}
    assert min(moved[pid] for pid in ends) >= BYTES
    client.communicate(timeout=60)
    assert client.returncode == 0


# ---- what is refused ----


def test_a_program_of_which_a_call_is_left_runs_as_without(provider: Sidestep, loader: Path) -> None:
    program = build("uncovered", "static")
    found = json.loads(subprocess.run([loader, "--check", program], stdout=subprocess.PIPE, check=False).stdout)
    assert found["refused"]
    assert len(found["left"]) == 1
    ran = provider.run([loader, "--run", program, program], stdout=subprocess.PIPE, check=False)
    assert (ran.stdout, ran.returncode) == (b"ran\n", 3)


@pytest.mark.parametrize("kind", KINDS)
def test_so_does_one_that_has_a_use_for_the_loaders_register(provider: Sidestep, loader: Path, kind: str) -> None:
    program = build("segment", kind)
    found = json.loads(subprocess.run([loader, "--check", program], stdout=subprocess.PIPE, check=False).stdout)
    assert "%gs" in found["refused"]
    ran = provider.run([loader, "--run", program, program], stdout=subprocess.PIPE, check=False)
    assert (ran.stdout, ran.returncode) == (b"found 42\n", 4)


def test_so_does_one_that_does_not_say_what_is_code(provider: Sidestep, loader: Path, tmp_path: Path) -> None:
    program = put_out_of_reach(Path(shutil.copy(build("told", "static"), tmp_path / "program")))
    found = json.loads(subprocess.run([loader, "--check", program], stdout=subprocess.PIPE, check=False).stdout)
    assert "section" in found["refused"]
    ran = provider.run([loader, "--run", program, program], stdout=subprocess.PIPE, check=False)
    assert ran.returncode == 42


@pytest.mark.parametrize("kind", KINDS)
def test_so_does_one_with_more_rights_than_its_caller_s(provider: Sidestep, tmp_path: Path, kind: str) -> None:
    """Also where it is executed by its owner, to whom it gives none."""
    program = Path(shutil.copy(build("told", kind), tmp_path / "program"))
    program.chmod(0o4755)
    ordinary, musl = ["sh", "-c", str(program)], [str(build("exchange", "musl")), "fork", str(program)]
    for argv in ([str(program)], ordinary, musl):
        assert provider.run(argv, stdout=subprocess.PIPE, check=False).returncode == 42
