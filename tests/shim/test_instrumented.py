"""Programs under Valgrind, and those that were built with AddressSanitizer, start and are promoted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import needed
import pytest
import toolchain
from common import PATIENCE_S

from sidestep.config import ENV_SOCKET
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "two_connections.c"


@pytest.mark.parametrize("by", ["valgrind", "address"])
def test_it_starts_and_is_promoted(sidestep: Sidestep, by: str) -> None:
    """Two processes with two connections; a third program reads the file that one of them carries."""
    flags = ["-D_GNU_SOURCE", "-pthread", *(["-g", "-fsanitize=address"] if by == "address" else [])]
    program = toolchain.build(f"two-connections-{by}", [PROGRAM], flags)
    before = [needed.program("valgrind"), "-q", "--error-exitcode=9"] if by == "valgrind" else []
    run = [sys.executable, "-m", "sidestep", "run", "--promote-after", "0", "--"]
    env = os.environ | {ENV_SOCKET: str(sidestep.socket)}
    with subprocess.Popen(
        [*run, *before, program, "popen", "poll"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as server:
        sidestep.wait_for(lambda found: len(found) == 4 and all(c.promoted for c in found))
        told, _ = server.communicate("go", timeout=PATIENCE_S)
    assert told.split() == ["whole", "answered"]
    assert server.returncode == 0
