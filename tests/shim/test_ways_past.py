"""Ways past the hooks: by a handle of the C library, within it, or by a system call of a program's own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import needed
import pytest
import toolchain
from common import PATIENCE_S

from sidestep.observe import connections
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN = 65, 1  # Linux 6.3
LIE_MAX = 64  # writes after which the shim asks whose number it is: PROBE_EVERY


@pytest.mark.parametrize("unseen", [True, False])
@pytest.mark.parametrize("promoted", [True, False])
def test_a_close_by_a_function_that_a_handle_leads_to(tmp_path: Path, *, promoted: bool, unseen: bool) -> None:
    """The number is the next file's, whether the connection has been promoted or the peer is not there."""
    program = [sys.executable, str(PROGRAMS / "hidden_close.py")]
    flags = ["-D_GNU_SOURCE", "-shared", "-fPIC"]
    own = [toolchain.build("unseen-file.so", [PROGRAMS / "unseen_file.c"], flags), "unseen_close"]
    serve = ["serve", tmp_path / "note", *(own if unseen else ["libc.so.6", "close"])]
    with Sidestep(promote_after="0") as sidestep:
        with sidestep.popen([*program, *serve], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            ask = [*program, "ask", server.stdout.readline().strip()]
            asked = sidestep.run(ask) if promoted else subprocess.run(ask, timeout=60)
            assert server.communicate(timeout=20)[0] == "right\n"
        assert asked.returncode == 0
        assert bool(sidestep.status()["counters"].get("claim_matched")) == promoted


def test_a_number_that_nobody_has_seen_change(tmp_path: Path) -> None:
    """Writes go to the file from the next look on, which comes with each 64th."""
    program = toolchain.build("unseen-file", [PROGRAMS / "unseen_file.c"], ["-D_GNU_SOURCE"])
    writes = 1000
    with Sidestep(promote_after="0") as sidestep:
        ended = sidestep.run([program, str(writes), tmp_path / "file"], stdout=subprocess.PIPE, text=True)
        assert ended.returncode == 0
        assert sidestep.status()["counters"]["claim_matched"] == 1
    assert writes - LIE_MAX <= int(ended.stdout) == (tmp_path / "file").stat().st_size


@pytest.mark.parametrize("promote_after", ["0", None], ids=["at_once", "default"])
def test_a_set_that_no_hook_has_seen(promote_after: str | None) -> None:
    """Nobody would wake who waits in it for bytes by ring: its members stay on TCP."""
    program = toolchain.build("raw-epoll", [PROGRAMS / "raw_epoll.c"], ["-D_GNU_SOURCE"])
    with Sidestep(promote_after=promote_after) as sidestep:
        ended = sidestep.run([program], stdout=subprocess.PIPE, text=True, timeout=100)
        assert ended.stdout == "whole\n"
        assert sidestep.status()["counters"].get("claim_matched", 0) == 0


def _make_no_code() -> None:
    """As in a service with MemoryDenyWriteExecute=: no page that could be written is executed from now on."""
    ctypes.CDLL(None).prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0)


@pytest.mark.parametrize("by", ["deep", "handle", "version"])
def test_functions_that_are_asked_of_the_c_library_alone(by: str) -> None:
    """A plug-in that is bound to it before us, and addresses from dlsym() and dlvsym() with a handle of it."""
    flags = ["-D_GNU_SOURCE", "-ldl"]
    program = toolchain.build("past-names", [PROGRAMS / "past_names.c"], flags)
    plugin = toolchain.build("past-names.so", [PROGRAMS / "past_names.c"], [*flags, "-DPLUGIN", "-shared", "-fPIC"])
    with Sidestep(promote_after="0") as sidestep:
        ended = sidestep.run([program, by, plugin], stdout=subprocess.PIPE, text=True, preexec_fn=_make_no_code)
        assert ended.stdout == "whole\n"
        ends = [one.connection for one in connections.ended(sidestep.socket)]
        assert [one.promoted for one in ends] == [True, True]


INSIDE = ["fgets", "fread", "scanf", "wide", "other", "fdopen", "cin", "cin_alone", "printf", "perror", "exec"]


def _inside(how: str) -> list[str | Path]:
    program = toolchain.build("inside", [PROGRAMS / "inside.c"], ["-D_GNU_SOURCE", "-ldl", "-lrt"])
    if not how.startswith("cin"):
        return [program, how]
    source = PROGRAMS / "inside_cin.cc"
    compiler = needed.program(os.environ.get("CXX", "c++"), "g++")
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]

    def build(made: Path) -> None:
        subprocess.run([*command, source, "-o", made], check=True)

    return [program, how, toolchain.made_once(f"{toolchain.hashed(command, [source])}-inside.so", build)]


@pytest.mark.parametrize("how", [*INSIDE, "aio", "aio-list"])
def test_calls_that_the_c_library_makes_within_itself(how: str) -> None:
    """The peer sleeps, so that all that has arrived must be found in the ring; and more comes behind it."""
    with Sidestep(promote_after="0") as sidestep:
        pipe = subprocess.PIPE
        with sidestep.popen(_inside(how), stdin=pipe, stdout=pipe, text=True, preexec_fn=_make_no_code) as program:
            sidestep.wait_for(lambda found: len(found) == 2 and all(c.promoted for c in found))
            assert program.communicate("go", timeout=PATIENCE_S)[0] == "whole\n"
        assert program.returncode == 0
        ends = [one.connection for one in connections.ended(sidestep.socket)]
        assert [one.promoted for one in ends] == [not how.startswith("aio")] * 2
