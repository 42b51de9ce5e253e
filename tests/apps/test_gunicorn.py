"""gunicorn: workers forked before they accept, each blocking (sync) or with threads and keep-alive (gthread)."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import needed
from stage import PROGRAMS, Program, Stage, all_of, sha256

SIZES = (0, 1, 1000, 65_536, 2_000_001)
WORKERS = 3


def gunicorn(stage: Stage, worker_class: str) -> tuple[Program, int]:
    """A prefork server."""
    needed.module("gunicorn")
    return stage.serve(lambda port: [
        sys.executable, "-m", "gunicorn", "--workers", str(WORKERS), "--worker-class", worker_class, "--threads",
        "1" if worker_class == "sync" else "4", "--bind", f"127.0.0.1:{port}", "--chdir", str(PROGRAMS),
        "--worker-tmp-dir", str(stage.workdir), "--no-control-socket", "checksum_app:app",
    ])  # fmt: skip


def test_held_uploads(stage: Stage) -> None:
    """Three uploads held on their way keep workers of the sync kind busy; all answers are right."""
    server, port = gunicorn(stage, "sync")
    clients = [stage.python("client", "http_client.py", port, "post", "/", 3_000_000) for _ in range(WORKERS)]
    for client in clients:
        assert json.loads(client.line()) == "begun"
    stage.check_path(port, WORKERS, nudge=all_of(*(client.nudge for client in clients)))
    for client in clients:
        client.stdin.close()
    answers = [json.loads(client.rest()) for client in clients]
    assert [answer[:2] for answer in answers] == [[200, 3_000_000]] * WORKERS
    # a worker that starts late may leave its upload to one that is done with the first
    assert len({answer[3] for answer in answers}) > 1, "one worker took all the uploads that were held at once"
    assert server.stop() == 0


def test_keep_alive(stage: Stage) -> None:
    """Keep-alive connections to threaded workers: bodies of all sizes are right."""
    server, port = gunicorn(stage, "gthread")
    clients = [
        stage.python("client", "http_client.py", port, "fetch", *[f"/{size}" for size in SIZES * 10]) for _ in range(3)
    ]
    expected = [[200, size, sha256(random.Random(size).randbytes(size))] for size in SIZES] * 10
    for client in clients:
        assert json.loads(client.line()) == expected
    stage.check_path(port, len(clients), nudge=all_of(*(client.nudge for client in clients)))
    for client in clients:
        client.rest()
    assert server.stop() == 0
    assert "Traceback" not in Path(server.log).read_text(), server.complaint("complained")
