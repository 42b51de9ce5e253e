"""Programs that move bytes by io_uring or kernel AIO: which connections go back to TCP, and that no byte is lost."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import needed
import pytest
import toolchain

from sidestep.observe.connections import Connection
from sidestep.testing import Sidestep

PROGRAMS = Path(__file__).parent / "programs"
Say = Callable[[str], int]


SQPOLL, SQE128 = 1 << 1, 1 << 10  # of linux/io_uring.h
LOADED = pytest.mark.parametrize("say", ["linked", "plugin"], indirect=True)


@pytest.fixture
def say(request: pytest.FixtureRequest, sidestep: Sidestep, tmp_path: Path) -> Say:
    """Starts ring_user, and does as it is told; what it answers.

    A plugin's libraries are in no scope of the shim's, and what is linked statically calls none.
    """
    library = tmp_path / "liburing.so.2"
    flags = ["-O2", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    shutil.copy(toolchain.build("ring-library.so", [PROGRAMS / "ring_library.c"], flags), library)
    user = tmp_path / "ring_user"
    plugin, static = request.param == "plugin", request.param == "static"
    made_of = [PROGRAMS / "ring_user.c", PROGRAMS / "ring_library.c" if static else library]
    subprocess.run(
        [toolchain.compiler(), "-O2", *toolchain.WARNINGS, *(["-shared", "-fPIC"] if plugin else ["-DALONE"]),
         *made_of, "-o", user, f"-Wl,-rpath,{tmp_path}"], check=True, timeout=60,
    )  # fmt: skip
    argv = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(user)!r}).use_ring()"] if plugin else [user]
    return started(sidestep, argv)


def started(sidestep: Sidestep, argv: Sequence[str | Path]) -> Say:
    """The way to give a program commands, each of which it answers."""
    program = sidestep.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def tell(what: str) -> int:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(f"{what}\n")
        answer = int(program.stdout.readline())
        # switched off by kernel.io_uring_disabled or seccomp, as in many containers: then no program has one
        if what.startswith("ring") and -answer in (errno.ENOSYS, errno.EPERM):
            pytest.skip("this kernel lets nobody have an io_uring")
        return answer

    return tell


def promote(sidestep: Sidestep, say: Say, ends: int = 2) -> None:
    while sum(c.promoted for c in sidestep.connections()) != ends:  # all ends claim, consent and switch in calls
        assert say("talk") == 0


@LOADED
def test_connections_go_back_to_tcp(sidestep: Sidestep, say: Say) -> None:
    promote(sidestep, say)
    assert say("ring") == 0
    assert say("mix") == 0


@LOADED
def test_a_socket_of_kernel_aio_goes_back_to_tcp(sidestep: Sidestep, say: Say) -> None:
    promote(sidestep, say)
    assert say("aio") == 0
    assert {c.reason for c in sidestep.connections()} == {"ASYNC_IO", "PEER_LEFT"}


@pytest.mark.parametrize("say", ["linked", "plugin", "static"], indirect=True)
def test_connections_stay_on_tcp(sidestep: Sidestep, say: Say) -> None:
    assert say("ring") == 0
    found: list[Connection] = []
    while not found or any(c.reason == "YOUNG" for c in found):  # until the provider has answered
        for _ in range(20):
            assert say("talk") == 0
        found = sidestep.connections()
    assert {c.reason for c in found} == {"IO_URING"}
    assert not any(c.promoted for c in found)
    assert say("mix") == 0


def of_files(sidestep: Sidestep, *arguments: str, plugin: bool = False) -> Say:
    """Starts ring_files, and gives it commands; as a plug-in it brings liburing into no scope of the shim's."""
    if not Path("/usr/include/liburing.h").exists():
        needed.missing("liburing", "/usr/include/liburing.h")
    flags = ["-O2", "-D_GNU_SOURCE", "-pthread", *toolchain.WARNINGS, "-luring"]
    name, shared = ("ring-files.so", ["-shared", "-fPIC"]) if plugin else ("ring-files", [])
    program = str(toolchain.build(name, [PROGRAMS / "ring_files.c"], [*flags, *shared]))
    argv = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({program!r}).main(1, None)"] if plugin else [program]
    return started(sidestep, [*argv, *arguments])


@pytest.mark.parametrize("flags", [0, SQE128])
def test_a_ring_for_files_is_no_reason(flags: int, sidestep: Sidestep) -> None:
    say = of_files(sidestep)
    assert say(f"ring {flags}") == 0
    assert say("file") == 0
    promote(sidestep, say, ends=4)
    for _ in range(5):
        assert say("file") == 0
        assert say("talk") == 0
    assert all(c.promoted for c in sidestep.connections())


@pytest.mark.parametrize(
    ("way", "flags"),
    [("number", 0), ("number", SQE128), ("registered", 0), ("update", 0), ("wait", 0), ("splice", 0)],
)
def test_a_socket_in_a_ring_goes_back_to_tcp_and_no_other(way: str, flags: int, sidestep: Sidestep) -> None:
    say = of_files(sidestep)
    assert say(f"ring {flags}") == 0
    promote(sidestep, say, ends=4)
    assert say("file") == 0
    assert say(way) == 0
    assert say("talk") == 0
    assert sorted(str(c.reason) for c in sidestep.connections()) == ["IO_URING", "None", "None", "PEER_LEFT"]
    for _ in range(30):
        assert say("talk") == 0
    assert sum(c.promoted for c in sidestep.connections()) == 2


def test_a_child_goes_on_with_the_ring_of_its_parent(sidestep: Sidestep) -> None:
    say = of_files(sidestep, "0")
    assert say("ring") == 0
    promote(sidestep, say, ends=4)
    assert say("file") == 0
    assert say("talk") == 0
    assert sum(c.promoted for c in sidestep.connections()) == 4
    assert say("number") == 0
    assert say("talk") == 0
    assert sum(c.promoted for c in sidestep.connections()) == 2


def test_a_ring_of_a_plugin_is_seen_into(sidestep: Sidestep) -> None:
    say = of_files(sidestep, plugin=True)
    assert say("ring 0") == 0
    assert say("file") == 0
    promote(sidestep, say, ends=4)
    assert say("file") == 0
    assert say("number") == 0
    assert say("talk") == 0
    assert sum(c.promoted for c in sidestep.connections()) == 2


def test_a_socket_that_a_ring_sees_first_is_never_promoted(sidestep: Sidestep) -> None:
    say = of_files(sidestep)
    assert say("ring 0") == 0
    assert say("wait") == 0
    promote(sidestep, say, ends=2)
    for _ in range(30):
        assert say("talk") == 0
    assert "IO_URING" in {c.reason for c in sidestep.connections()}
    assert sum(c.promoted for c in sidestep.connections()) == 2


def test_a_socket_that_a_ring_passes_on_goes_back_to_tcp(sidestep: Sidestep) -> None:
    say = of_files(sidestep)
    assert say("ring 0") == 0
    promote(sidestep, say, ends=4)
    assert say("pass") == 0
    assert "PASSED" in {c.reason for c in sidestep.connections()}


def test_a_ring_by_which_a_connection_may_come_keeps_all_on_tcp(sidestep: Sidestep) -> None:
    say = of_files(sidestep)
    assert say("ring 0") == 0
    promote(sidestep, say, ends=4)
    assert say("arrive") == 0
    assert say("talk") == 0
    assert not any(c.promoted for c in sidestep.connections())


@pytest.mark.parametrize("way", ["close", "reuse"])
def test_a_number_that_a_ring_closes_is_anothers(way: str, sidestep: Sidestep) -> None:
    say = of_files(sidestep)
    assert say("ring 0") == 0
    promote(sidestep, say, ends=4)
    assert say(way) == 0


def test_an_epoll_set_in_a_ring_keeps_all_on_tcp(sidestep: Sidestep) -> None:
    say = of_files(sidestep)
    assert say("ring 0") == 0
    promote(sidestep, say, ends=4)
    assert say("set") == 0
    assert not any(c.promoted for c in sidestep.connections())


def test_entries_that_pass_by_the_library_keep_all_on_tcp(sidestep: Sidestep) -> None:
    say = of_files(sidestep)
    assert say("ring 0") == 0
    promote(sidestep, say, ends=4)
    assert say("past") == 0
    assert say("talk") == 0
    assert not any(c.promoted for c in sidestep.connections())


def test_a_ring_that_a_thread_of_the_kernel_reads_keeps_all_on_tcp(sidestep: Sidestep) -> None:
    say = of_files(sidestep)
    promote(sidestep, say, ends=4)
    assert say(f"ring {SQPOLL}") == 0
    assert say("talk") == 0
    assert {c.reason for c in sidestep.connections()} == {"IO_URING"}
    assert not any(c.promoted for c in sidestep.connections())


@pytest.fixture
def trusting(tmp_path: Path) -> Iterator[Sidestep]:
    """A provider whose policy says that rings of the programs here have no sockets."""
    rules = tmp_path / "policy.conf"
    rules.write_text('rings files "*ring*"\n')
    with Sidestep(policy=rules) as made:
        yield made


def test_the_policy_makes_a_ring_no_reason_that_is_not_seen_into(trusting: Sidestep) -> None:
    say = of_files(trusting)
    assert say(f"ring {SQPOLL}") == 0
    assert say("file") == 0
    promote(trusting, say, ends=4)
    assert say("file") == 0
    assert say("talk") == 0
    assert all(c.promoted for c in trusting.connections())


def test_a_socket_that_is_seen_in_a_ring_goes_back_whatever_the_policy_says(trusting: Sidestep) -> None:
    say = of_files(trusting)
    assert say("ring 0") == 0
    promote(trusting, say, ends=4)
    assert say("number") == 0
    assert say("set") == 0
    assert not any(c.promoted for c in trusting.connections())
