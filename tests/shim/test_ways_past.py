"""Ways past the hooks: by a handle of the C library, within it, or by a system call of a program's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import toolchain

from sidestep.observe import connections
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
LIE_MAX = 64  # writes after which the shim asks whose number it is: PROBE_EVERY


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


@pytest.mark.parametrize("by", ["deep", "handle", "version"])
def test_functions_that_are_asked_of_the_c_library_alone(by: str) -> None:
    """A plug-in that is bound to it before us, and addresses from dlsym() and dlvsym() with a handle of it."""
    flags = ["-D_GNU_SOURCE", "-ldl"]
    program = toolchain.build("past-names", [PROGRAMS / "past_names.c"], flags)
    plugin = toolchain.build("past-names.so", [PROGRAMS / "past_names.c"], [*flags, "-DPLUGIN", "-shared", "-fPIC"])
    with Sidestep(promote_after="0") as sidestep:
        ended = sidestep.run([program, by, plugin], stdout=subprocess.PIPE, text=True, timeout=100)
        assert ended.stdout == "whole\n"
        ends = [one.connection for one in connections.ended(sidestep.socket)]
        assert [one.promoted for one in ends] == [True, True]
