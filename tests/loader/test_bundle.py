"""`sidestep bundle`: static programs and those of musl in a root without glibc, promoted with any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toolchain
from bare_root import MUSL, PLACE, RUN, BareRoot, entered, need_mounts
from common import run_command
from foreign_programs import KINDS, PROGRAMS, build

from sidestep import bundle as bundles
from sidestep import installation
from sidestep.errors import Unavailable
from sidestep.testing import Connection, Sidestep, free_port

pytestmark = pytest.mark.slow  # real programs

BYTES = 8 << 20  # each way
NAMES = {kind: f"exchange-{kind}" for kind in KINDS}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bundle") / "made"
    argv = [sys.executable, "-m", "sidestep", "bundle", str(made), "--at", PLACE, "--json"]
    document = json.loads(subprocess.check_output(argv, text=True))
    assert sorted(document["files"]) == sorted(path.name for path in made.iterdir())
    assert document["bytes"] == sum(path.stat().st_size for path in made.iterdir() if not path.is_symlink())
    return made


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, bundle: Path, provider: Sidestep) -> BareRoot:
    need_mounts(entered(), "--rbind", "/proc")
    made = BareRoot(tmp_path_factory.mktemp("root"), bundle, provider)
    for kind, name in NAMES.items():
        made.add(build("exchange", kind), name)
    return made


@contextmanager
def running(program: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    with program:
        try:
            yield program
        finally:
            program.kill()


def said(program: subprocess.Popen[bytes]) -> bytes:
    assert program.stdout is not None
    return program.stdout.readline()


def exchanged(provider: Sidestep, program: subprocess.Popen[bytes], port: int) -> None:
    """Once it is promoted all bytes go by the ring, and come back as they were; it ends well."""

    def its_end() -> Connection | None:
        ends = [one for one in provider.connections() if one.remote.endswith(f":{port}") and one.role == "active"]
        return ends[0] if len(ends) == 1 and ends[0].promoted else None

    provider.wait_for(lambda _: program.poll() is not None or its_end() is not None)
    assert program.stdin is not None
    program.stdin.write(b"\n")
    program.stdin.flush()
    assert said(program) == b"equal\n"
    end = its_end()
    assert end is not None
    assert min(end.tx.ring_bytes, end.rx.ring_bytes) >= BYTES
    program.communicate(timeout=60)
    assert program.returncode == 0


PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_is_promoted_with_one_of_glibc(root: BareRoot, echo: int, kind: str) -> None:
    with running(root.popen(RUN, NAMES[kind], "talk", str(echo), str(BYTES), **PIPES)) as program:
        exchanged(root.provider, program, echo)


@pytest.mark.parametrize("how", ["serve", "inetd"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_is_promoted_with_clients_there_and_outside(root: BareRoot, kind: str, how: str) -> None:
    port = free_port()
    with running(root.popen(RUN, NAMES[kind], how, str(port), **PIPES)) as server:
        assert said(server) == b"ready\n"
        talk = ("talk", str(port), str(BYTES))
        for other in KINDS:
            with running(root.popen(RUN, NAMES[other], *talk, **PIPES)) as program:
                exchanged(root.provider, program, port)
        ordinary = toolchain.build("exchange-glibc", [PROGRAMS / "exchange.c"], ["-O1", "-D_GNU_SOURCE"])
        with running(root.provider.popen([ordinary, *talk], **PIPES)) as program:
            exchanged(root.provider, program, port)


@pytest.mark.parametrize("how", ["fork", "vfork", "spawn"])
@pytest.mark.parametrize("parent", ["musl", "static"])
@pytest.mark.parametrize("child", ["musl", "static-pie"])
def test_so_are_programs_that_it_executes(root: BareRoot, echo: int, how: str, parent: str, child: str) -> None:
    argv = [RUN, NAMES[parent], how, NAMES[child], "talk", str(echo), str(BYTES)]
    with running(root.popen(*argv, **PIPES)) as program:
        exchanged(root.provider, program, echo)


CONTAINER = """
bundle=$1 provider=$2 root=$3 server=$4 client=$5 port=$6 bytes=$7
mount -t proc proc "$root/proc"
mount --bind "$bundle" "$root/opt/sidestep"
mount -o bind,remount,ro "$root/opt/sidestep"
mount --bind "$provider" "$root/run/sidestep"
ip link set lo up
exec 3<&0
setpriv --no-new-privs chroot "$root" /opt/sidestep/run "$server" serve "$port" >"$root/tmp/said" &
read ready <"$root/tmp/said"
exec setpriv --no-new-privs chroot "$root" /opt/sidestep/run "$client" talk "$port" "$bytes" <&3
"""


def test_so_are_two_with_namespaces_of_their_own(root: BareRoot) -> None:
    """Of users, mounts, processes and the network, as containers have them; the second is process 1."""
    argv = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "--kill-child"]
    need_mounts(argv, "-t", "proc", "proc")
    os.mkfifo(root.path / "tmp/said")
    places = [root.bundle, root.provider.socket.parent, root.path]
    argv += ["sh", "-ec", CONTAINER, "sh", *map(str, places), NAMES["musl"], NAMES["static-pie"], "7000", str(BYTES)]
    with running(subprocess.Popen(argv, env=root.env(), **PIPES)) as program:
        exchanged(root.provider, program, 7000)


def test_so_is_a_script_by_its_interpreter(root: BareRoot, echo: int) -> None:
    script = root.path / "bin/script"
    script.write_text(f"#!/bin/{NAMES['musl']} talk\n")
    script.chmod(0o755)
    with running(root.popen(RUN, NAMES["musl"], "fork", "script", str(echo), str(BYTES), **PIPES)) as program:
        exchanged(root.provider, program, echo)


def test_what_the_loader_refuses_runs_as_without(root: BareRoot) -> None:
    root.add(build("uncovered", "musl"), "uncovered")
    program = root.popen(RUN, "uncovered", stdout=subprocess.PIPE)
    assert (program.communicate(timeout=60)[0], program.returncode) == (b"ran\n", 3)


@pytest.mark.parametrize(("name", "code", "words"), [("nothing", 127, "No such file"), ("/tmp", 126, "denied")])
def test_what_cannot_be_executed_there_is_named(root: BareRoot, name: str, code: int, words: str) -> None:
    program = root.popen(RUN, name, stderr=subprocess.PIPE)
    told = program.communicate(timeout=60)[1].decode()
    assert program.returncode == code
    assert told.startswith(f"sidestep: {name}: ")
    assert words in told


CHROOT = """
import os, sys
root, outside, inside, *argv = sys.argv[1:]
os.waitpid(os.posix_spawn(outside, [outside], os.environ), 0)
os.chroot(root)
os.execv(inside, [inside, *argv])
"""


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_loader_is_not_there_any_more_programs_run_as_without(root: BareRoot, kind: str) -> None:
    """A program has started one by the loader, and leaves for a root without it."""
    inside = f"/bin/{NAMES[kind]}"
    mounted = [*entered(), "sh", "-ec", 'mount --rbind /proc "$0/proc"; exec "$@"', str(root.path)]
    moved = [sys.executable, "-c", CHROOT, str(root.path), str(build("exchange", kind)), inside, "fork", inside, "fork"]
    assert root.provider.run([*mounted, *moved], check=False).returncode == 2  # the innermost has too few arguments


# ---- what is refused when it is made ----


def test_a_directory_that_holds_something_is_left_as_it_is(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("there")
    found = run_command(tmp_path, "bundle", tmp_path)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.splitlines() == [
        f"sidestep: {tmp_path} is not empty",
        "hint: name a new one: programs may be using what is there",
    ]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("place", ["opt/sidestep", "/opt/../sidestep", f"/{'long/' * 1000}"])
def test_no_place_is_taken_where_nothing_could_start(tmp_path: Path, place: str) -> None:
    found = run_command(tmp_path, "bundle", tmp_path / "made", "--at", place)
    assert found.returncode == 1
    assert "is no place for a bundle\nhint: give the path it will have, such as /opt/sidestep" in found.stderr
    assert not (tmp_path / "made").exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = run_command(tmp_path, "bundle", tmp_path / "file/made")
    assert (found.returncode, found.stdout) == (1, "")
    assert f"a bundle cannot be written to {tmp_path}/file/made: " in found.stderr


def test_a_loader_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "loader", lambda: None)
    with pytest.raises(Unavailable, match="sidestep-loader is missing; install sidestep with pip, or run 'make build'"):
        installation.loader_needed()
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    with pytest.raises(Unavailable, match="sidestep-loader is for x86_64 and aarch64, and this is riscv64"):
        installation.loader_needed()


def test_so_is_a_system_without_glibc(tmp_path: Path, loader: Path) -> None:
    with pytest.raises(Unavailable, match="make the bundle on one with glibc"):
        bundles.write(tmp_path / "made", bundles.PLACE, loader, [MUSL])
