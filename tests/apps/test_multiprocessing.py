"""multiprocessing.connection over AF_INET, and a manager with proxies."""

from __future__ import annotations

import json
import sys

from stage import PROGRAMS, Stage


def test_listener_and_client(stage: Stage) -> None:
    """Objects and bytes of all sizes come back over three connections; a wrong key is refused."""
    _, port = stage.serve(lambda port: [sys.executable, str(PROGRAMS / "mp_peer.py"), "server", str(port)])
    client = stage.python("client", "mp_peer.py", "client", port)
    result = json.loads(client.line())
    assert result == {"objects": 100, "bytes": 21, "idle": [False] * 3, "wrong key": "AuthenticationError"}
    stage.check_path(port, 3, nudge=client.nudge)
    client.rest()


def test_manager(stage: Stage) -> None:
    """A queue used through proxies from two threads, one of which blocks in get()."""
    _, port = stage.serve(lambda port: [sys.executable, str(PROGRAMS / "mp_peer.py"), "manager", str(port)])
    client = stage.python("client", "mp_peer.py", "proxies", port)
    assert json.loads(client.line()) == {"in order": True, "left": 0}
    stage.check_path(port, nudge=client.nudge)
    client.rest()
