"""The loader on aarch64, emulated: programs without our C library are promoted, and all else is as without it.

qemu-user is no such machine: it runs code by its own order of memory, makes vfork(2) a fork(2), and knows no clone3(2).
What it shows is that the instructions are the right ones; `emulated` says what is brought to it. On hardware none of
this was run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from built import wheel
from common import ECHO
from emulated import GLIBC, KINDS, Emulated, build, build_go, missing

from sidestep.testing import Sidestep, free_port

BYTES = 4 << 20  # each way
GO = ("go", "cgo")
SITES = re.compile(r"^ *[0-9a-f]+:\s.*(?:\tsvc\t|tpidr_el0\b)", re.M)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    if reason := missing():
        pytest.skip(reason)
    pytest.importorskip("ziglang", reason="make wheels brings the compiler")
    return Emulated(wheel("aarch64"), tmp_path_factory.mktemp("aarch64"))


@pytest.fixture(scope="module")
def provider() -> Iterator[Sidestep]:
    with Sidestep(promote_after="0") as one:
        yield one


@pytest.fixture
def echo(provider: Sidestep) -> str:
    """The port of a server of this machine: a channel to it joins two kinds of CPU."""
    port = str(free_port())
    return listening(provider.popen([sys.executable, "-c", ECHO, port], stdout=subprocess.PIPE), port)


def listening(server: subprocess.Popen[Any], port: str) -> str:
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return port


class Started:
    """Programs under the loader, ended with the test."""

    def __init__(self, emulated: Emulated, provider: Sidestep) -> None:
        self._emulated, self._provider = emulated, provider
        self.all: list[subprocess.Popen[bytes]] = []

    def __call__(self, program: Path, *arguments: str) -> subprocess.Popen[bytes]:
        argv, env = self._emulated.loaded(self._provider, program, *arguments)
        self.all.append(subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return self.all[-1]


@pytest.fixture
def start(emulated: Emulated, provider: Sidestep) -> Iterator[Started]:
    started = Started(emulated, provider)
    yield started
    for one in started.all:
        one.kill()
        one.communicate()


def program_of(name: str, kind: str) -> Path:
    return build_go(name, cgo=kind == "cgo") if kind in GO else build(name, kind)


def wait_for_promoted(provider: Sidestep, program: subprocess.Popen[bytes], count: int) -> None:
    provider.wait_for(lambda found: count <= len([one for one in found if one.promoted and one.pid == program.pid]), 60)


# ---- what is replaced ----


@pytest.mark.parametrize("kind", [*KINDS, *GO])
def test_every_site_is_found_and_none_is_left(emulated: Emulated, kind: str) -> None:
    """As binutils' disassembler finds them."""
    objdump = shutil.which("aarch64-linux-gnu-objdump")
    if objdump is None:
        pytest.skip("there is no disassembler; apt-get install binutils-aarch64-linux-gnu")
    program = program_of("exchange", kind)
    mapped = [program, GLIBC / "lib/ld-linux-aarch64.so.1"] if kind == "cgo" else [program]
    code = subprocess.run([objdump, "-d", *mapped], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = emulated.check(program)
    assert (found["refused"], found["left"]) == (None, [])
    assert found["sites"] == found["replaced"] + found["idle"] == len(SITES.findall(code)) > 20
    assert found["idle"] == (kind == "musl")  # how its handlers return


def test_data_among_the_code_is_left_alone(emulated: Emulated, start: Started) -> None:
    program = build("literals_aarch64", "static")
    assert subprocess.run(emulated.native(program), check=False).returncode == 0
    assert emulated.check(program)["refused"] is None
    assert start(program).wait(60) == 0


@pytest.mark.parametrize("words", [("literals_aarch64", "static", "-DTABLE"), ("uncovered_aarch64", "static")])
def test_a_program_is_refused_over_what_may_be_data(emulated: Emulated, words: tuple[str, ...]) -> None:
    found = emulated.check(build(*words))
    assert found["refused"]
    assert len(found["left"]) == 1


# ---- what it runs ----


@pytest.mark.parametrize("kind", [*KINDS, *GO])
def test_megabytes_come_back_as_they_were_by_ring(provider: Sidestep, start: Started, echo: str, kind: str) -> None:
    program = start(program_of("exchange", kind), "talk", echo, str(BYTES))
    assert program.stdin is not None
    assert program.stdout is not None
    if kind not in GO:
        wait_for_promoted(provider, program, 1)  # it talks all the time
        program.stdin.write(b"go\n")
        program.stdin.flush()
    assert program.stdout.readline() == b"equal\n"
    mine = [one for one in provider.connections() if one.pid == program.pid]
    assert all(one.promoted for one in mine)
    assert sum(one.rx.ring_bytes for one in mine) > BYTES // 2
    assert sum(one.tx.ring_bytes for one in mine) > BYTES // 2
    program.communicate(b"\n")
    assert program.returncode == 0


@pytest.mark.parametrize(
    ("server", "client"), [("static", "go"), ("go", "musl"), ("musl", "static-pie"), ("cgo", "go")]
)
def test_both_ends_are_emulated(provider: Sidestep, start: Started, server: str, client: str) -> None:
    port = str(free_port())
    other = start(program_of("exchange", server), "serve", port)
    listening(other, port)
    program = start(program_of("exchange", client), "talk", port, str(BYTES))
    assert program.stdin is not None
    assert program.stdout is not None
    if client not in GO:
        wait_for_promoted(provider, program, 1)
        program.stdin.write(b"go\n")
        program.stdin.flush()
    assert program.stdout.readline() == b"equal\n"
    ends = [one for one in provider.connections() if one.pid in (program.pid, other.pid)]
    assert {one.pid for one in ends if one.promoted and one.rx.ring_bytes} == {program.pid, other.pid}
    program.communicate(b"\n")
    assert program.returncode == 0


@pytest.mark.parametrize("kind", KINDS)
def test_all_registers_are_kept_while_signals_come(provider: Sidestep, start: Started, echo: str, kind: str) -> None:
    program = start(build("registers", kind), echo)
    wait_for_promoted(provider, program, 1)
    assert program.wait(120) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_storms_of_signals_and_children_lose_nothing(provider: Sidestep, start: Started, echo: str, kind: str) -> None:
    seconds = int(os.environ.get("SIDESTEP_STORM_SECONDS", "3"))
    program = start(build("storm", kind), echo, str(seconds))
    wait_for_promoted(provider, program, 1)
    assert program.wait(seconds + 60) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["stack", "other"])
def test_calls_that_are_left_take_nothing_with_them(provider: Sidestep, start: Started, kind: str, place: str) -> None:
    program = start(build("leaving", kind), place)
    wait_for_promoted(provider, program, 6)
    assert program.wait(120) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["fork", "vfork", "spawn"])
def test_children_execute_programs(start: Started, kind: str, how: str) -> None:
    program = start(build("exchange", kind), how, "/bin/sh", "-c", "echo here; exit 7")
    assert program.communicate()[0] == b"here\n"
    assert program.returncode == 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_finds_the_kernels_frame(emulated: Emulated, start: Started, kind: str) -> None:
    native = subprocess.run(
        emulated.native(build("frames", kind)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    loaded = start(build("frames", kind))
    assert loaded.communicate()[0].decode() == native.stdout.decode()
    assert loaded.returncode == native.returncode == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_is_told_what_it_is_told_without(
    provider: Sidestep, emulated: Emulated, start: Started, kind: str
) -> None:
    """But for what only the loader, of all that is emulated, gets right: the program's name, and where it lies."""
    other = re.compile(r"^(?:environment |started as |name ).*\n", re.M)
    program = build("told", kind)
    native = subprocess.run(
        emulated.native(program, "one", "two words", ""), env=provider.env(LD_PRELOAD=None), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, check=False,
    )  # fmt: skip
    loaded = start(program, "one", "two words", "")
    said = loaded.communicate()[0].decode()
    assert other.sub("", said) == other.sub("", native.stdout.decode())
    assert f"started as {program}\n" in said
    assert loaded.returncode == native.returncode == 42
