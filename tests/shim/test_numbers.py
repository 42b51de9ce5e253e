"""Numbers of descriptors are the program's: what a thread closes, another's new file may get at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import toolchain

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "reused_numbers.py"
CONNECTIONS = 400  # where the entry of a number outlived it, 160 to 200 calls failed meanwhile


def test_a_number_that_is_closed_is_the_next_files() -> None:
    slow = toolchain.build("slow-close.so", [PROGRAM.with_name("slow_close.c")], ["-shared", "-fPIC"])
    with Sidestep(promote_after="0") as sidestep:
        env = sidestep.env()
        env["LD_PRELOAD"] += f":{slow}"
        promoted = 0
        while promoted <= CONNECTIONS / 10:  # on a busy machine most connections end before they are promoted
            argv = [sys.executable, str(PROGRAM), str(CONNECTIONS)]
            ended = sidestep.run(argv, env=env, stdout=subprocess.PIPE, text=True)
            assert ended.stdout == "0\n"
            promoted = sidestep.status()["counters"].get("claim_matched", 0)


def test_a_number_that_is_given_what_it_names_already() -> None:
    """Threads that use it meanwhile notice nothing."""
    program = toolchain.build("same-number", [PROGRAM.with_name("same_number.c")], ["-O2", "-pthread"])
    with Sidestep(promote_after="0", ring_size=1 << 14) as sidestep:
        ended = sidestep.run([program], stdout=subprocess.PIPE, text=True)
        promoted = sidestep.status()["counters"]["claim_matched"]
    assert ended.stdout == "right\n"
    assert promoted == 1
