"""UCX: a program's epoll set has its worker's in it, and that has those of the transports, with the connections."""

from __future__ import annotations

import subprocess
from pathlib import Path

import needed
import pytest
import toolchain

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

HEADER = "/usr/include/ucp/api/ucp.h"
PROGRAMS = Path(__file__).resolve().parent / "programs"


def test_ucx_sleeps_in_sets_in_sets(sidestep: Sidestep) -> None:
    """Ten megabytes each way are whole, and the connections that carried them are on their rings to the end."""
    if not Path(HEADER).exists():
        needed.missing("UCX", HEADER)
    program = toolchain.build("ucx-talk", [PROGRAMS / "ucx_talk.c"], ["-D_GNU_SOURCE", "-lucp"])
    tcp = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    with sidestep.popen(
        [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=sidestep.env() | tcp
    ) as talk:
        assert talk.stdin is not None
        assert talk.stdout is not None
        assert talk.stdout.readline() == "10034160 bytes are whole\n"
        found = sidestep.connections()
        talk.stdin.close()
    assert talk.returncode == 0
    busy = [c for c in found if c.tx.ring_bytes > 1_000_000]
    assert len(busy) == 2
    assert all(c.promoted for c in busy)
