"""asyncio and uvloop echo, each as server and as client."""

from __future__ import annotations

import json
import sys

import needed
import pytest
from stage import PROGRAMS, Stage

CONNECTIONS = 10


@pytest.mark.parametrize(
    ("server_loop", "client_loop"), [("asyncio", "asyncio"), ("uvloop", "uvloop"), ("asyncio", "uvloop")]
)
def test_echo(stage: Stage, server_loop: str, client_loop: str) -> None:
    """Ten connections at once: small round trips, full-duplex bulk, a read that times out, half-close."""
    if "uvloop" in (server_loop, client_loop):
        needed.module("uvloop")
    _, port = stage.serve(lambda port: [sys.executable, str(PROGRAMS / "echo.py"), server_loop, "server", str(port)])
    client = stage.python("client", "echo.py", client_loop, "client", port, CONNECTIONS)
    assert json.loads(client.line()) == {"verdicts": ["whole"] * CONNECTIONS, "timeouts": 1}
    stage.check_path(port, CONNECTIONS, nudge=client.nudge)
    client.stdin.close()
    assert json.loads(client.line()) == "closed"
    client.rest()
