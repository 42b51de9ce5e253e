"""curl: uploads with a length and chunked, several in one process, downloads in parallel."""

from __future__ import annotations

import json
import sys

import needed
from flow import Feeder
from stage import PROGRAMS, Stage, payload, sha256

SIZE = 10_000_000


def upload_server(stage: Stage) -> int:
    """Port of a server that answers an upload with its checksum."""
    return stage.serve(lambda port: [sys.executable, str(PROGRAMS / "upload_server.py"), str(port)])[1]


def test_chunked_upload(stage: Stage) -> None:
    """curl sends what it reads from a pipe; the server computes the same checksum."""
    port = upload_server(stage)
    curl = stage.converse("client", [
        needed.program("curl"), "-sSf", "-H", "Expect:", "-T", "-", f"http://127.0.0.1:{port}/"
    ])  # fmt: skip
    data = payload(SIZE)
    Feeder(curl, data).feed_by_ring(stage, port)
    assert json.loads(curl.line()) == [SIZE, sha256(data)]
    curl.rest()


def test_uploads_on_one_connection(stage: Stage) -> None:
    """Files of many sizes and, last, a pipe that the test keeps open: the connection is reused for all."""
    port = upload_server(stage)
    files = []
    for size in (0, 1, 1000, 65_536, 3_000_000):
        path = stage.workdir / f"upload-{size}"
        path.write_bytes(payload(size, seed=size))
        files.append(path)
    argv = [needed.program("curl"), "-sSf", "-H", "Expect:", "-w", "%{stderr}%{num_connects}\n"]
    for name in [*map(str, files), "-"]:
        argv += ["-T", name, f"http://127.0.0.1:{port}/"]
    curl = stage.converse("client", argv)
    for path in files:
        data = path.read_bytes()
        assert json.loads(curl.line()) == [len(data), sha256(data)]
    feeder = Feeder(curl, payload(SIZE))
    feeder.nudge()
    stage.check_path(port, nudge=feeder.nudge)
    feeder.finish()
    assert json.loads(curl.line()) == [SIZE, sha256(payload(SIZE))]
    curl.rest()
    assert curl.log.read_text().split() == ["1", "0", "0", "0", "0", "0"]


def test_parallel_downloads(stage: Stage) -> None:
    """Four downloads at once, paced by curl itself so that they can be looked at, arrive whole."""
    data = [payload(60_000_000, seed=n) for n in range(4)]  # more than TCP's buffers and a spill could swallow at once
    for number, body in enumerate(data):
        (stage.workdir / f"file{number}").write_bytes(body)
    server = stage.start("server", [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"], stdout=-1)
    port = int(server.until("Serving HTTP").split()[5])
    argv = [needed.program("curl"), "-sSf", "--parallel", "--parallel-immediate", "--limit-rate", "30M"]
    for number in range(len(data)):
        argv += ["-o", f"got{number}", f"http://127.0.0.1:{port}/file{number}"]
    with stage.watching(port, len(data)):
        stage.run("client", argv)
    for number, body in enumerate(data):
        assert sha256((stage.workdir / f"got{number}").read_bytes()) == sha256(body)
