"""`sidestep check`: predictions for real programs, built on the spot, and for places with real limits."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needed
import pytest
from foreign_programs import put_out_of_reach

from sidestep.observe import other_users
from sidestep.observe.check import memory_limit
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow  # compiles, and runs commands as processes
Check = Callable[..., dict[str, Any]]
Build = Callable[..., Path]

needs_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the bytes of calls are those of x86-64")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make namespaces and control groups")


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """`sidestep check --json` of a program, in a runtime directory of its own; `before` goes before the command."""

    def run(program: str | Path, *, before: tuple[str, ...] = (), socket: Path | None = None) -> dict[str, Any]:
        path = socket or tmp_path / "runtime" / "provider"
        (tmp_path / "runtime").mkdir(mode=0o700, exist_ok=True)
        argv = [
            *before,
            sys.executable,
            "-m",
            "sidestep",
            "check",
            f"--socket={path}",
            "--json",
            "--",
            str(program),
            "-x",
        ]
        found = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert found.returncode in (0, 1), found.stderr
        document: dict[str, Any] = json.loads(found.stdout)
        assert (document["verdict"] == "fail") == (found.returncode == 1)
        return document

    return run


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compiles a program, or with -shared a library, from this text."""

    def compile_it(text: str, *options: str | Path, name: str = "program", compiler: str = "cc") -> Path:
        made = tmp_path_factory.mktemp("built") / name
        source = made.with_suffix(".c")
        source.write_text(text)
        subprocess.run([compiler, "-O1", source, "-o", made, *options], check=True)
        return made

    return compile_it


EMPTY = "int main(void) { return 0; }\n"


def by_subject(document: dict[str, Any], subject: str) -> list[dict[str, str]]:
    """The findings about something."""
    return [one for one in document["findings"] if one["subject"] == subject]


def test_an_ordinary_program_in_an_ordinary_place_is_fit(check: Check, build: Build) -> None:
    program = build(EMPTY)
    found = check(program)
    assert found["verdict"] == "ok", found
    assert [one["level"] for one in by_subject(found, str(program))] == ["ok"]
    assert {"memfd", "eventfd", "passing", "sock_diag", "descriptors", "shim", "provider", "namespace", "memory"} <= {
        one["subject"] for one in found["findings"]
    }


def test_a_static_program_is_if_the_loader_can_start_it(check: Check, build: Build) -> None:
    program = build(EMPTY, "-static")
    found = check(program)
    (finding,) = by_subject(found, str(program))
    assert (found["verdict"], finding["level"]) == ("ok", "ok")
    assert "sidestep's loader starts it" in finding["text"]
    found = check(put_out_of_reach(program))
    (finding,) = by_subject(found, str(program))
    assert (found["verdict"], finding["level"]) == ("fail", "fail")
    assert "its system calls cannot be replaced: it has no section headers" in finding["text"]


def test_a_program_of_musl_that_cannot_be_is_not(check: Check, build: Build, sidestep: Sidestep) -> None:
    program = build('#include <stdio.h>\nint main(void) { return puts("well") < 0; }\n', compiler="musl-gcc")
    assert check(program)["verdict"] == "ok"
    found = check(put_out_of_reach(program))
    (finding,) = by_subject(found, str(program))
    assert (found["verdict"], finding["level"]) == ("fail", "fail")
    assert "its system calls cannot be replaced" in finding["text"]
    argv = [sys.executable, "-m", "sidestep", "doctor", f"--socket={sidestep.socket}", "--json", str(program)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert by_subject(json.loads(ended.stdout), str(program)) == [finding]
    argv = [sys.executable, "-m", "sidestep", "run", f"--socket={sidestep.socket}", "--", str(program)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "well\n", "")


def test_a_library_that_is_missing_is_named(check: Check, build: Build) -> None:
    library = build("int other(void) { return 0; }\n", "-shared", "-fPIC", name="libother.so")
    program = build("int other(void); int main(void) { return other(); }\n", library, f"-Wl,-rpath,{library.parent}")
    assert check(program)["verdict"] == "ok"
    library.unlink()
    found = check(program)
    assert found["verdict"] == "fail"
    assert any("libother.so not found" in one["text"] for one in by_subject(found, str(program)))


def test_a_library_beside_the_program_is_found_through_a_link(check: Check, build: Build, tmp_path: Path) -> None:
    """As /usr/bin/java is one: $ORIGIN is where the program lies, for the kernel has resolved the link."""
    shared = ("-shared", "-fPIC", "-Wl,-soname,libother.so")
    library = build("int other(void) { return 0; }\n", *shared, name="libother.so")
    program = build("int other(void); int main(void) { return other(); }\n", library, "-Wl,-rpath,$ORIGIN/../lib")
    jvm = tmp_path / "jvm"
    for folder, file in (("bin", program), ("lib", library)):
        (jvm / folder).mkdir(parents=True)
        shutil.move(file, jvm / folder)
    (tmp_path / "alternative").symlink_to(jvm / "bin" / program.name)
    (tmp_path / "java").symlink_to("alternative")
    subprocess.run([tmp_path / "java"], check=True)
    found = check(tmp_path / "java")
    assert found["verdict"] == "ok", found["findings"][:2]
    library = jvm / "lib" / library.name
    library.unlink()
    found = check(tmp_path / "java")
    assert any("libother.so not found" in one["text"] for one in by_subject(found, str(tmp_path / "java")))


CALLS = """
#include <sys/syscall.h>
#include <unistd.h>
int main(void) { return %s; }
"""
INLINE = '({ long r; __asm__ volatile("mov $NUMBER, %%eax; syscall" : "=a"(r) :: "rcx", "r11", "memory"); r < 0; })'


@needs_x86_64
def test_calls_past_the_c_library_are_noted_as_a_guess(check: Check, build: Build) -> None:
    for number, words in ((425, "io_uring"), (44, "socket calls")):  # io_uring_setup, sendto
        program = build(CALLS % INLINE.replace("NUMBER", str(number)))
        found = check(program)
        assert found["verdict"] == "note"
        (note,) = [one for one in by_subject(found, str(program)) if one["level"] == "note"]
        assert words in note["text"]
        assert note["text"].endswith("a guess")


def test_calls_through_the_c_library_are_the_shims(check: Check, build: Build) -> None:
    program = build(CALLS % "syscall(425, 0, 0) < 0")
    assert check(program)["verdict"] == "ok"


def test_a_library_for_io_uring_is_seen(check: Check, build: Build) -> None:
    library = build("int io_uring_queue_init(void) { return 0; }\n", "-shared", "-fPIC", name="liburing.so.2")
    text = "int io_uring_queue_init(void); int main(void) { return io_uring_queue_init(); }\n"
    found = check(build(text, library, f"-Wl,-rpath,{library.parent}"))
    assert found["verdict"] == "note"
    assert "liburing.so.2" in str(found["findings"])


# ---- places ----

# A program that is run with one system call forbidden: load its number; is it that one; then so; else let it pass.
SECCOMP = """
import ctypes, os, struct, sys
number, action = int(sys.argv[1]), int(sys.argv[2], 16)
filters = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, action), (0x06, 0, 0, 0x7FFF0000)]
code = b"".join(struct.pack("=HBBI", *one) for one in filters)
buffer = ctypes.create_string_buffer(code)
program = struct.pack("=HxxxxxxQ", len(filters), ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit(os.strerror(ctypes.get_errno()))
os.execv(sys.argv[3], sys.argv[3:])
"""
EPERM, KILL = "50001", "80000000"  # SECCOMP_RET_ERRNO | 1, SECCOMP_RET_KILL_PROCESS
MEMFD_CREATE, EVENTFD2, PREADV2, SENDMSG = "319", "290", "327", "46"


@needs_x86_64
@pytest.mark.parametrize(
    ("number", "action", "subject", "words"),
    [
        (MEMFD_CREATE, EPERM, "memfd", "the kernel refuses: Operation not permitted"),
        (MEMFD_CREATE, KILL, "memfd", "a process that tries is killed by SIGSYS"),
        (EVENTFD2, KILL, "eventfd", "a process that tries is killed by SIGSYS"),
        (PREADV2, EPERM, "eventfd", "the kernel refuses: Operation not permitted"),
        (SENDMSG, EPERM, "passing", "the kernel refuses: Operation not permitted"),
    ],
)
def test_what_a_filter_forbids_is_found_without_dying(
    check: Check, number: str, action: str, subject: str, words: str
) -> None:
    found = check("sh", before=(sys.executable, "-c", SECCOMP, number, action))
    assert found["verdict"] == "fail"
    (finding,) = by_subject(found, subject)
    assert (finding["level"], finding["text"]) == ("fail", words)
    assert finding["remedy"] == "allow it in the container's seccomp profile"


def test_few_descriptors_are_noted(check: Check) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found = check("sh", before=("sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh"))
    (finding,) = by_subject(found, "descriptors")
    assert (found["verdict"], finding["level"]) == ("note", "note")
    assert finding["text"] == f"a program may open 256 (up to {hard})"


@needs_root
def test_a_provider_in_another_network_namespace_is_noted(check: Check, sidestep: Sidestep) -> None:
    (here,) = by_subject(check("sh", socket=sidestep.socket), "namespace")
    assert here["level"] == "ok"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces can be made here")
    (there,) = by_subject(check("sh", before=("unshare", "--net"), socket=sidestep.socket), "namespace")
    assert there["level"] == "note"
    assert "serves both; connections between the two stay on TCP" in there["text"]
    assert other_users.remedy() in there["remedy"]  # as explain says


@needs_root
def test_a_small_container_is_told_its_room(check: Check, tmp_path: Path) -> None:
    group = own_group()
    if group is None:
        pytest.skip("no control group for memory can be made here")
    try:
        found = check("sh", before=("sh", "-c", f'echo $$ >"{group}/cgroup.procs"; exec "$@"', "sh"))
    finally:
        group.rmdir()
    (finding,) = by_subject(found, "memory")
    assert "is 268,435,456 bytes: room for 508 channels of 528,384" in finding["text"]
    assert finding["level"] == "ok"


def own_group() -> Path | None:
    """A control group with a limit of 256 MiB; None where none can be made."""
    for base, name in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers != ("memory" if base.name == "memory" else ""):
                continue
            group = base / path.lstrip("/") / f"sidestep-test-{os.getpid()}"
            try:
                group.mkdir()
            except OSError:
                continue
            try:
                (group / name).write_text(str(256 << 20))
            except OSError:
                group.rmdir()
                continue
            return group
    return None


def test_without_a_limit_there_is_none() -> None:
    limit, file = memory_limit()
    assert (limit is None) == (file is None)
    assert limit is None or limit > 0


def test_nothing_of_the_program_runs(check: Check, tmp_path: Path, build: Build) -> None:
    mark = tmp_path / "ran"
    text = f'#include <stdio.h>\n__attribute__((constructor)) void run(void) {{ fopen("{mark}", "w"); }}\n{EMPTY}'
    program = build(text)
    assert check(program)["verdict"] == "ok"
    assert not mark.exists()
    subprocess.run([program], check=True)
    assert mark.exists()  # the test would see it


def test_the_verdict_is_the_last_line(build: Build, tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "sidestep",
        "check",
        f"--socket={tmp_path}/none/provider",
        str(put_out_of_reach(build(EMPTY, "-static"))),
    ]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 1
    assert found.stdout.splitlines()[-1].endswith(": its connections stay on TCP")


def test_libuv_is_told_to_do_without_io_uring(check: Check) -> None:
    assert check(needed.program("node"))["verdict"] == "ok"
