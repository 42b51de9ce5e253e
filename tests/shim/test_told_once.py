"""An epoll set tells of a connection once a look, also as it begins to be managed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from common import PATIENCE_S

from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).with_name("programs") / "told_once.py")
CLIENTS, EACH = 3, 150


def test_a_look_tells_of_a_connection_once() -> None:
    """The kernel has told of it, another thread attaches it, and then the first looks at the ring."""
    with Sidestep("0") as stage:
        server = stage.popen(
            [sys.executable, PROGRAM, "server", str(CLIENTS * EACH)], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        clients = [stage.popen([sys.executable, PROGRAM, "client", port, str(EACH)]) for _ in range(CLIENTS)]
        assert [client.wait(100) for client in clients] == [0] * CLIENTS
        assert server.stdout.readline().strip() == "[]"
        assert server.wait(PATIENCE_S) == 0
