"""Python's own http.server, which closes after each answer, with a client of the standard library."""

from __future__ import annotations

import json
import sys

from stage import Stage, payload, sha256

SIZES = (0, 1, 1000, 65_536, 3_000_001)


def http_server(stage: Stage) -> int:
    """Port of a server that serves the workdir."""
    server = stage.start("server", [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"], stdout=-1)
    return int(server.until("Serving HTTP").split()[5])


def test_short_connections(stage: Stage) -> None:
    """One connection a request: every body is whole."""
    port = http_server(stage)
    for size in SIZES:
        (stage.workdir / f"file{size}").write_bytes(payload(size, seed=size))
    client = stage.python("client", "http_client.py", port, "fetch", *[f"/file{size}" for size in SIZES * 10])
    assert json.loads(client.line()) == [[200, size, sha256(payload(size, seed=size))] for size in SIZES] * 10
    client.rest()


def test_held_download(stage: Stage) -> None:
    """A download held half way is where it should be, and ends well."""
    port = http_server(stage)
    data = payload(40_000_000)
    (stage.workdir / "large").write_bytes(data)
    client = stage.python("client", "http_client.py", port, "held", "/large")
    assert json.loads(client.line()) == "begun"
    stage.check_path(port, nudge=client.nudge)
    assert json.loads(client.rest()) == [len(data), sha256(data)]
