"""A child that has changed its user, and fallen into other hands, writes into the arena it shares with its parent."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest
import toolchain
from toolchain import ADDRESS

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("attack", ["list", "noise", "lock", "tail", "head"])
def test_the_parent_goes_on(sidestep: Sidestep, tmp_path: Path, attack: str) -> None:
    """At worst a connection is reset; none of the parent's memory is written, and it waits for nothing for ever."""
    shim = toolchain.SanitizedShim(ADDRESS, sidestep, tmp_path)
    program = toolchain.build(
        "stranger-child", [toolchain.NATIVE_TESTS / "programs" / "stranger_child.c"], ADDRESS.flags
    )
    parent = sidestep.popen(
        [program], env=shim.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    while sum(c.promoted for c in sidestep.connections()) != 2:  # both ends claim, consent and switch in calls
        parent.stdin.write("talk\n")
        assert parent.stdout.readline() == "talked 0\n"
    out, _ = parent.communicate(f"{attack}\n")
    assert parent.returncode == 0, out
    old, new = out.splitlines()
    assert new == "new 0"
    if attack in ("lock", "tail", "head"):
        assert old == f"old {-errno.ECONNRESET}"
    shim.check()
