"""Programs whose bytes move by ways that no shim sees, an io_uring and kernel AIO: their connections go back to TCP."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import toolchain

from sidestep.testing import Sidestep

PROGRAMS = Path(__file__).parent / "programs"
Say = Callable[[str], int]


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
    program = sidestep.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def tell(what: str) -> int:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(f"{what}\n")
        answer = int(program.stdout.readline())
        # switched off by kernel.io_uring_disabled or seccomp, as in many containers: then no program has one
        if what == "ring" and -answer in (errno.ENOSYS, errno.EPERM):
            pytest.skip("this kernel lets nobody have an io_uring")
        return answer

    return tell


def promote(sidestep: Sidestep, say: Say) -> None:
    while sum(c.promoted for c in sidestep.connections()) != 2:  # both ends claim, consent and switch in calls
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
    for _ in range(20):
        assert say("talk") == 0
    found = sidestep.connections()
    assert {c.reason for c in found} == {"IO_URING"}
    assert not any(c.promoted for c in found)
    assert say("mix") == 0
