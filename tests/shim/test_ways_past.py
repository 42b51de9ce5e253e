"""Ways past the hooks: a handle of the C library, an object that prefers it, a system call of a program's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import toolchain

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
LIE_MAX = 64  # writes after which the shim asks whose number it is: PROBE_EVERY
MESSAGES = 4000


@pytest.mark.parametrize("promoted", [True, False])
def test_a_close_by_the_c_librarys_own_handle(tmp_path: Path, *, promoted: bool) -> None:
    """The number is the next file's, whether the connection has been promoted or the peer is not there."""
    program = [sys.executable, str(PROGRAMS / "hidden_close.py")]
    with Sidestep(promote_after="0") as sidestep:
        with sidestep.popen([*program, "serve", tmp_path / "note"], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            ask = [*program, "ask", server.stdout.readline().strip()]
            asked = sidestep.run(ask) if promoted else subprocess.run(ask, timeout=60)
            assert server.communicate(timeout=20)[0] == "right\n"
        assert asked.returncode == 0
        assert bool(sidestep.status()["counters"].get("claim_matched")) == promoted


@pytest.mark.parametrize("what", ["plug-in", "libc.so.6"])
def test_what_prefers_the_c_library(what: str) -> None:
    """An object that was opened with RTLD_DEEPBIND, and a function that dlsym() found by a handle, write in order."""
    plug_in = toolchain.build("plug-in.so", [PROGRAMS / "plug_in.c"], ["-shared", "-fPIC"])
    host = toolchain.build("plug-in-host", [PROGRAMS / "plug_in_host.c"], ["-D_GNU_SOURCE", "-ldl"])
    with Sidestep(promote_after="0") as sidestep:
        named = str(plug_in) if what == "plug-in" else what
        with sidestep.popen([host, named], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            source = (
                "import os, socket, sys\n"
                "one = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
                f"for _ in range({MESSAGES}):\n"
                "    message = os.urandom(64)\n"
                "    one.sendall(message)\n"
                "    assert one.recv(64, socket.MSG_WAITALL) == message\n"
            )
            asked = sidestep.run([sys.executable, "-c", source, server.stdout.readline().strip()])
            assert server.wait(20) == 0
        assert asked.returncode == 0
        assert sidestep.status()["counters"]["claim_matched"] == 1


def test_a_number_that_nobody_has_seen_change(tmp_path: Path) -> None:
    """Writes go to the file from the next look on, which comes with each 64th."""
    program = toolchain.build("unseen-file", [PROGRAMS / "unseen_file.c"], ["-D_GNU_SOURCE"])
    writes = 1000
    with Sidestep(promote_after="0") as sidestep:
        ended = sidestep.run([program, str(writes), tmp_path / "file"], stdout=subprocess.PIPE, text=True)
        assert ended.returncode == 0
        assert sidestep.status()["counters"]["claim_matched"] == 1
    assert writes - LIE_MAX <= int(ended.stdout) == (tmp_path / "file").stat().st_size


def test_a_function_that_another_library_replaces_stays_its_own(tmp_path: Path) -> None:
    """What dlsym() finds by a handle is ours only in place of the very function that ours calls."""
    source = tmp_path / "between.c"
    source.write_text("int listen(int fd, int n) { return fd + n + 8; }")
    between = tmp_path / "between.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", between, source], check=True)
    look = "import ctypes\nprint(ctypes.CDLL('libc.so.6').listen(-1, 0), ctypes.CDLL(None).listen(-1, 0))\n"
    with Sidestep() as sidestep:
        env = {**os.environ, **sidestep.env()}
        env["LD_PRELOAD"] = f"{env['LD_PRELOAD']}:{between}"
        ended = subprocess.run([sys.executable, "-c", look], env=env, stdout=subprocess.PIPE, text=True, timeout=60)
    assert ended.stdout == "-1 7\n"
