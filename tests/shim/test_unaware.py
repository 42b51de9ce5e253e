"""A thread that waits in an epoll set since before a connection of it was promoted hears of what the ring brings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from common import PATIENCE_S

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).with_name("programs") / "unaware.py")


def test_another_thread_may_take_what_was_to_wake_it() -> None:
    with Sidestep("0") as stage:
        server = stage.popen(
            [sys.executable, PROGRAM, "server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        client = stage.popen([sys.executable, PROGRAM, "client", server.stdout.readline().strip()])
        stage.wait_for(lambda found: len([one for one in found if one.promoted]) == 2)
        assert server.communicate("\n", timeout=PATIENCE_S)[0].strip() == "[1]"
        assert client.wait(PATIENCE_S) == 0
