"""nginx with a master and two workers: keep-alive load, sendfile, reload under load."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import needed
import pytest
from stage import Mode, Program, Stage, payload, sha256, wait_until

from sidestep.testing import free_port

CONFIGURATION = """
daemon off;
worker_processes 2;
{user}
pid {root}/nginx.pid;
error_log {root}/error.log notice;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {root}/body; proxy_temp_path {root}/proxy; fastcgi_temp_path {root}/fastcgi;
    uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
    sendfile {sendfile}; tcp_nopush on; keepalive_requests 1000000;
    server {{
        listen 127.0.0.1:{port};
        root {root}/www;
        location = /generation {{ return 200 "generation {generation}"; }}
    }}
}}
"""
LARGE_SIZE = 100_000_000


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A file of 100 MB and its checksum."""
    path = tmp_path_factory.mktemp("large") / "large"
    data = payload(LARGE_SIZE)
    path.write_bytes(data)
    return path, sha256(data)


def configure(root: Path, port: int, *, generation: int = 1, sendfile: bool = True) -> Path:
    """Write the configuration."""
    (root / "www").mkdir(exist_ok=True)
    # Workers drop to another user by default; a user's provider serves that user alone.
    user = "user root;" if os.geteuid() == 0 else ""
    path = root / "nginx.conf"
    path.write_text(CONFIGURATION.format(
        root=root, port=port, generation=generation, user=user, sendfile="on" if sendfile else "off"
    ))  # fmt: skip
    return path


def nginx(stage: Stage, *, sendfile: bool = True) -> tuple[Program, int]:
    """Start nginx on a free port."""
    program = needed.program("nginx")

    def argv(port: int) -> list[str]:
        path = configure(stage.workdir, port, sendfile=sendfile)
        return [program, "-p", str(stage.workdir), "-e", str(stage.workdir / "error.log"), "-c", str(path)]

    return stage.serve(argv)


def test_keep_alive_load(stage: Stage) -> None:
    """wrk keeps 16 connections busy; no request fails."""
    server, port = nginx(stage)
    (stage.workdir / "www" / "small").write_bytes(b"x" * 612)
    with stage.watching(port, 16):
        report = stage.run(
            "client", [needed.program("wrk"), "-t", "2", "-c", "16", "-d", "2s", f"http://127.0.0.1:{port}/small"]
        ).decode()
    assert not re.search("Socket errors|Non-2xx", report), report
    found = re.search(r"(\d+) requests in", report)
    assert int(found[1] if found else 0) > 1000, report
    assert server.stop() == 0


def test_keep_alive_answers(stage: Stage) -> None:
    """Bodies of many sizes on one keep-alive connection are those on disk, errors included."""
    _, port = nginx(stage)
    sizes = (0, 1, 1000, 8191, 65_536, 1_000_003)
    for size in sizes:
        (stage.workdir / "www" / str(size)).write_bytes(payload(size, seed=size))
    client = stage.python("client", "http_client.py", port, "fetch", *[f"/{size}" for size in sizes * 20], "/absent")
    *answers, absent = json.loads(client.line())
    assert answers == [[200, size, sha256(payload(size, seed=size))] for size in sizes] * 20
    assert absent[0] == 404
    stage.check_path(port, nudge=client.nudge)
    client.rest()


@pytest.mark.parametrize("sendfile", [True, False], ids=["sendfile", "writev"])
def test_large_file(stage: Stage, large_file: tuple[Path, str], sendfile: bool) -> None:
    """curl fetches 100 MB, by sendfile and by writev; the checksum is right."""
    path, checksum = large_file
    _, port = nginx(stage, sendfile=sendfile)
    (stage.workdir / "www" / "large").symlink_to(path)
    curl = stage.converse("client", [needed.program("curl"), "-sSf", f"http://127.0.0.1:{port}/large"])
    body = bytearray()
    # We are the ones who read what curl writes, so the connection lives for as long as we take our time.
    stage.check_path(port, nudge=lambda: body.extend(curl.take(LARGE_SIZE // 40)))
    body += curl.rest()
    assert len(body) == LARGE_SIZE
    assert sha256(body) == checksum


def test_reload_under_load(stage: Stage) -> None:
    """Three reloads under load: no request fails, all clients meet each generation, the old workers go."""
    _, port = nginx(stage)
    client = stage.python("client", "http_client.py", port, "pester", "/generation", 6)
    workers: set[int] = set()
    for generation in (1, 2, 3, 4):
        if generation > 1:
            conf = configure(stage.workdir, port, generation=generation)
            stage.run("server", [needed.program("nginx"), "-p", str(stage.workdir), "-c", str(conf), "-s", "reload"])
        assert json.loads(client.line()) == f"generation {generation}"
        stage.check_path(port, 6)
        old, workers = workers, worker_pids(stage.workdir)
        wait_until(lambda old=old: not any(alive(pid) for pid in old), "the old workers to go")  # type: ignore[misc]
    client.stdin.close()
    assert json.loads(client.line()) == {"answers": [f"generation {n}" for n in (1, 2, 3, 4)], "idle": 0}
    client.rest()


@pytest.mark.usefixtures("load")
def test_upgrade_of_the_binary(stage: Stage, closing: ExitStack) -> None:
    """The new master gets an environment of the old one's making, and serves as the old one did."""
    port = free_port()
    path = configure(stage.workdir, port)
    path.write_text(path.read_text().replace("daemon off", "daemon on"))  # else the signal is ignored
    (stage.workdir / "www" / "large").write_bytes(payload(1_000_000))
    pid_file, old_file = stage.workdir / "nginx.pid", stage.workdir / "nginx.pid.oldbin"
    log = stage.workdir / "error.log"
    stage.run("server", [needed.program("nginx"), "-p", str(stage.workdir), "-e", str(log), "-c", str(path)])
    old = int(wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the pid"))
    closing.callback(end, pid_file)
    wait_until(lambda: log.read_text().count("start worker process ") == 2, "the old workers")
    pest = stage.python("client", "http_client.py", port, "pester", "/generation", 6)
    assert json.loads(pest.line()) == "generation 1"
    os.kill(old, signal.SIGUSR2)
    wait_until(lambda: old_file.exists() and pid_file.exists() and pid_file.read_text().strip(), "the new master")
    wait_until(lambda: log.read_text().count("start worker process ") == 4, "its workers")
    os.kill(old, signal.SIGQUIT)
    wait_until(lambda: not alive(old), "the old one to go")
    client = stage.python("client", "http_client.py", port, "fetch", *["/large"] * 40)
    assert json.loads(client.line()) == [[200, 1_000_000, sha256(payload(1_000_000))]] * 40
    stage.check_path(port, 7, nudge=client.nudge)
    if stage.mode is Mode.BOTH:
        share = stage.ring_share(port)
        print(f"{share:.4f} of the bytes went by ring")
        assert share > 0.5
    client.rest()
    pest.stdin.close()
    assert json.loads(pest.line()) == {"answers": ["generation 1"], "idle": 0}
    pest.rest()


def end(pid_file: Path) -> None:
    """Ends the master, which has a session of its own, and with it its workers."""
    if pid_file.exists():
        os.kill(int(pid_file.read_text()), signal.SIGTERM)


def worker_pids(root: Path) -> set[int]:
    """Process ids of the current workers, from nginx's own log."""
    started = re.findall(r"start worker process (\d+)", (root / "error.log").read_text())
    return {int(pid) for pid in started[-2:]}


def alive(pid: int) -> bool:
    """Whether the process still runs."""
    return Path(f"/proc/{pid}").exists()
