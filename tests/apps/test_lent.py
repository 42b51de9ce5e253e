"""Servers that start programs, which inherit their sockets for a while: then all connections are promoted again."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import needed
import pytest
from common import eventually
from stage import PROGRAMS

from sidestep.testing import Sidestep

CONNECTIONS = 4
LENT = PROGRAMS / "lent"


def _command(server: str, built: Path) -> list[str]:
    if server == "python":
        return [sys.executable, str(LENT / "lender.py")]
    java, compiler = needed.program("java"), needed.program("javac")
    subprocess.run([compiler, "-d", str(built), str(LENT / "Lender.java")], check=True, timeout=120)
    return [java, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-cp", str(built), "Lender"]


@pytest.mark.parametrize("server", ["python", "java"])
def test_a_program_that_ends_gives_the_sockets_back(server: str, sidestep: Sidestep, tmp_path: Path) -> None:
    def start(argv: list[str]) -> subprocess.Popen[str]:
        return sidestep.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def promoted(times: int) -> bool:
        found = sidestep.connections()
        return len(found) == 2 * CONNECTIONS and all(c.promoted and c.promotions >= times for c in found)

    lent = (
        server == "python"
    )  # to programs without the shim; Java's own helper has it, and goes on by ring until it closes all
    lender = start(_command(server, tmp_path))
    assert lender.stdin is not None
    assert lender.stdout is not None
    port = int(lender.stdout.readline())
    talker = start([sys.executable, str(LENT / "talker.py"), str(port), str(CONNECTIONS)])
    eventually(lambda: promoted(1), 30)
    for times in (2, 3):
        lender.stdin.write("0.5\n")
        if lent:
            eventually(lambda: "INHERITED" in {c.reason for c in sidestep.connections()}, 30)
        assert lender.stdout.readline() == "ended 0\n"
        eventually(partial(promoted, times if lent else 1), 30)
    assert talker.communicate(timeout=60)[0] == "whole\n"
    assert talker.returncode == 0
