"""Rows run with real server programs and their own load generators."""

from __future__ import annotations

import csv
import functools
import hashlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness.machine import connections_to
from harness.model import BenchError, Evidence, Sample, Settings
from harness.talks import BUILD, Talk, latency
from harness.world import Program, World, program_missing, wait_for_port
from sidestep.testing import free_port

PATIENCE_S = 40.0
FETCHES = 8
FETCH = f"""
import hashlib, http.client, sys
server = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]))
for _ in range({FETCHES}):
    server.request("GET", "/page.txt")
    print(hashlib.sha256(server.getresponse().read()).hexdigest())
"""
FILE = b"0123456789abcde\n" * 38  # a small static page, 608 bytes

Measure = Callable[[World, Settings], Sample]


def _watch(world: World, server: Program, client: Program, port: int, ends: int, from_s: float) -> Evidence | None:
    """Looks at the connections once they were open for `from_s`, until all are promoted or `client` ends.

    CPU time is counted from then on, as the look has a cost of its own.
    """
    found: Evidence | None = None
    with suppress(FileNotFoundError):  # the client ended between the two looks
        while client.running() and connections_to(client.pid, port) < ends // 2:
            time.sleep(0.02)
    time.sleep(from_s)
    while client.running():
        try:
            found = world.evidence(port, ends, [server, client])
        except FileNotFoundError:  # the client ended between the two looks
            break
        if found is None or found.ok:
            break
        time.sleep(0.2)
    world.begin(server, client)
    return found


_redis_rates: dict[tuple[str, int, int], float] = {}


def _redis_server(world: World, port: int) -> list[str]:
    argv = ["redis-server", "--port", str(port), "--bind", world.address, "--save", "", "--appendonly", "no"]
    return [*argv, "--protected-mode", "no"]


def redis_get(connections: int) -> Measure:
    """Requests a second of redis-benchmark GET."""

    def ask(
        world: World, server: Program, port: int, requests: int, look_from_s: float | None
    ) -> tuple[dict[str, str], Evidence | None]:
        argv = ["redis-benchmark", "-h", world.address, "-p", str(port), "-t", "get", "--csv"]
        client = world.start([*argv, "-c", str(connections), "-n", str(requests)])
        look = look_from_s is not None
        evidence = _watch(world, server, client, port, 2 * connections, look_from_s or 0) if look else None
        output = client.finish(PATIENCE_S)
        world.end()
        rows = list(csv.DictReader(output.splitlines()))
        if len(rows) != 1 or not rows[0].get("rps"):
            raise BenchError(f"redis-benchmark gave no figures: {rows!r}")
        return rows[0], evidence

    def measure(world: World, settings: Settings) -> Sample:
        port = free_port()
        with tempfile.TemporaryDirectory(prefix="bench-redis-") as folder:
            server = world.serve([*_redis_server(world, port), "--dir", folder])
            wait_for_port(world, server, port)
            with world.beside(), socket.create_connection((world.address, port)) as sock:
                # the key that redis-benchmark -t get asks for
                sock.sendall(b"*3\r\n$3\r\nSET\r\n$16\r\nkey:__rand_int__\r\n$3\r\nVXK\r\n")
                if (answer := sock.recv(16)) != b"+OK\r\n":
                    raise BenchError(f"redis-server answered {answer!r} to SET")
            kind = world.name, world.load, connections
            if kind not in _redis_rates:  # once, to know how many requests fill the time
                _redis_rates[kind] = float(ask(world, server, port, 20_000, None)[0]["rps"])
            requests = int(_redis_rates[kind] * (settings.seconds + settings.warmup_s))
            row, evidence = ask(world, server, port, max(1000, requests), 0.3 * settings.seconds)
            server.stop()
        rate = float(row["rps"])
        _redis_rates[kind] = rate
        return Sample(rate, {f"{q}_us": 1e3 * float(row[f"{q}_latency_ms"]) for q in ("p50", "p99")}, evidence)

    return measure


def go_redis(world: World, settings: Settings) -> Sample:
    """Median time of a GET by go-redis, one after the other, in us."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as folder:
        server = world.serve([*_redis_server(world, port), "--dir", folder])
        wait_for_port(world, server, port)
        argv = [str(BUILD / "redis-go"), "client", "-p", str(port)]
        client = world.start([*argv, "-w", str(settings.warmup_s), "-t", str(settings.seconds)])
        talk = Talk(server, client, port)
        evidence = talk.measured(world, settings, 2)
        result = talk.result()
    beside = latency(result)
    return Sample(beside["p50_us"], {**beside, "rate": result["rate"]}, evidence)


def go_redis_missing() -> str | None:
    """Why its client cannot be built, with the remedy; None when it can."""
    found = program_missing("go")
    if not found and not Path("/usr/share/gocode/src/gopkg.in/redis.v5").is_dir():
        found = "go-redis is not installed; apt-get install golang-gopkg-redis.v5-dev"
    return found


NGINX_CONF = """
daemon off;
worker_processes 1;
{user}
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 100000000;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen {address}:{port};
        root {folder}/www;
    }}
}}
"""
_WRK_TIME = re.compile(r"^\s+(50|99)%\s+([\d.]+)(us|ms|s)\s*$", re.M)
_WRK_SCALE = {"us": 1.0, "ms": 1e3, "s": 1e6}


def nginx_static(connections: int, size: int | None = None, *, keep_alive: bool = True) -> Measure:
    """Requests a second for a static file, by wrk with keep-alive or with a connection for each request."""

    def measure(world: World, settings: Settings) -> Sample:
        port = free_port()
        page = FILE if size is None else random.Random(1).randbytes(size)
        with tempfile.TemporaryDirectory(prefix="bench-nginx-") as name:
            folder = Path(name)
            (folder / "www").mkdir()
            (folder / "www" / "page.txt").write_bytes(page)
            user = "user root;" if os.geteuid() == 0 else ""  # workers stay who we are, as for a user's own nginx
            (folder / "nginx.conf").write_text(
                NGINX_CONF.format(user=user, folder=folder, address=world.address, port=port)
            )
            argv = ["nginx", "-p", name, "-c", str(folder / "nginx.conf"), "-e", "stderr"]
            return _wrk(world, settings, argv, port, connections, page, keep_alive=keep_alive)

    return measure


def go_http(connections: int, program: str) -> Measure:
    """The same of Go's net/http."""

    def measure(world: World, settings: Settings) -> Sample:
        port = free_port()
        with tempfile.NamedTemporaryFile(prefix="bench-go-") as page:
            page.write(FILE)
            page.flush()
            return _wrk(
                world, settings, [str(BUILD / program), f"{world.address}:{port}", page.name], port, connections, FILE
            )

    return measure


def _wrk(
    world: World, settings: Settings, argv: list[str], port: int, connections: int, page: bytes, *,
    keep_alive: bool = True,
) -> Sample:  # fmt: skip
    server = world.serve(argv)
    wait_for_port(world, server, port)
    url = f"http://{world.address}:{port}/page.txt"
    with world.beside(), urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        if answer.read() != page:
            raise BenchError(f"{server.name} served another page than the one it was given")
    if len(page) > len(FILE):  # wrk looks at the length alone
        reader = world.start([sys.executable, "-c", FETCH, world.address, str(port)])
        if reader.finish(PATIENCE_S).split() != FETCHES * [hashlib.sha256(page).hexdigest()]:
            raise BenchError(f"{server.name} served another page by one connection than the one it was given")
    seconds = max(1, round(settings.seconds))
    argv = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency"]
    client = world.start([*argv, *([] if keep_alive else ["-H", "Connection: close"]), url])
    evidence = _watch(world, server, client, port, 2 * connections if keep_alive else 0, 0.4 * seconds)
    output = client.finish(PATIENCE_S)
    world.end()
    server.stop()
    rate = re.search(r"^Requests/sec:\s+([\d.]+)", output, re.M)
    if not rate or "Socket errors" in output or "Non-2xx" in output:
        raise BenchError(f"wrk gave no clean figures: {' | '.join(output.split())}")
    times = {f"p{q}_us": float(t) * _WRK_SCALE[unit] for q, t, unit in _WRK_TIME.findall(output)}
    return Sample(float(rate[1]), times, evidence)


def postgres_folder() -> Path | None:
    """Where PostgreSQL's programs are: on the path, or the newest of Debian's versions."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parts[-2]), reverse=True)
    on_path = shutil.which("postgres")
    folders = [*([Path(on_path).resolve().parent] if on_path else []), *versions]
    needed = ("initdb", "postgres", "pgbench", "pg_isready")
    return next((folder for folder in folders if all((folder / name).exists() for name in needed)), None)


@functools.cache
def _cluster() -> tempfile.TemporaryDirectory[str]:
    """A fresh cluster with pgbench's tables, made once and removed when this program ends."""
    folder = tempfile.TemporaryDirectory(prefix="bench-postgres-")
    programs = postgres_folder()
    assert programs is not None, "the row is skipped where PostgreSQL is missing"
    argv = [str(programs / "initdb"), "-D", folder.name, "-U", "bench", "-A", "trust", "-E", "UTF8", "--no-sync"]
    made = subprocess.run(argv, capture_output=True, text=True, check=False)
    if made.returncode:
        raise BenchError(f"initdb failed: {made.stderr.strip()}")
    with (Path(folder.name) / "pg_hba.conf").open("a") as hosts:
        hosts.write("host all all 0.0.0.0/0 trust\n")  # of whatever address it listens at
    with World("preparing") as world:
        port = free_port()
        _postgres(world, Path(folder.name), port)
        fill = world.start([str(programs / "pgbench"), "-i", "-q", "-s", "5", *_where(world, port)])
        fill.finish(PATIENCE_S)
    return folder


def _where(world: World, port: int) -> list[str]:
    return ["-h", world.address, "-p", str(port), "-U", "bench", "postgres"]


def _postgres(world: World, folder: Path, port: int) -> Program:
    programs = postgres_folder()
    assert programs is not None, "the row is skipped where PostgreSQL is missing"
    settings = {
        "port": str(port), "listen_addresses": world.address, "unix_socket_directories": "", "fsync": "off",
        "max_connections": "50", "autovacuum": "off",
    }  # fmt: skip
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    server = world.serve([str(programs / "postgres"), "-D", str(folder), *options], stop=signal.SIGINT)  # fast shutdown
    wait_for_port(world, server, port)
    deadline = time.monotonic() + PATIENCE_S
    ready = [str(programs / "pg_isready"), "-q", "-h", world.address, "-p", str(port)]
    while not _succeeds(world, ready):  # it listens before it is ready
        if time.monotonic() > deadline:
            raise BenchError(f"postgres is not ready after {PATIENCE_S:g} s: {server.complaint()}")
        time.sleep(0.05)
    return server


def _succeeds(world: World, argv: list[str]) -> bool:
    with world.beside():
        return subprocess.run(argv, check=False).returncode == 0


def pgbench_select(connections: int) -> Measure:
    """Transactions a second of pgbench -S over TCP."""

    def measure(world: World, settings: Settings) -> Sample:
        programs = postgres_folder()
        assert programs is not None, "the row is skipped where PostgreSQL is missing"
        port = free_port()
        server = _postgres(world, Path(_cluster().name), port)
        seconds = max(1, round(settings.seconds))
        argv = [str(programs / "pgbench"), "-n", "-S", "-c", str(connections), "-j", "1", "-T", str(seconds)]
        client = world.start([*argv, *_where(world, port)])
        evidence = _watch(world, server, client, port, 2 * connections, 0.4 * seconds)
        output = client.finish(PATIENCE_S)
        world.end()
        server.stop()
        rate = re.search(r"^tps = ([\d.]+)", output, re.M)
        mean = re.search(r"^latency average = ([\d.]+) ms", output, re.M)
        failed = re.search(r"^number of failed transactions: ([1-9]\d*)", output, re.M)
        if not rate or not mean or failed:
            raise BenchError(f"pgbench gave no clean figures: {' | '.join(output.splitlines())}")
        return Sample(float(rate[1]), {"mean_us": 1e3 * float(mean[1])}, evidence)

    return measure


def postgres_missing() -> str | None:
    """Why PostgreSQL cannot be used, with the remedy; None when it is installed."""
    return None if postgres_folder() else "postgres is not installed; apt-get install postgresql"


def user_missing(user: str) -> str | None:
    """Why programs cannot be run as `user`; None when they can."""
    if os.geteuid():
        return None
    if not shutil.which("setpriv"):
        return "setpriv is not installed; apt-get install util-linux"
    known = subprocess.run(["id", "-u", user], capture_output=True, check=False).returncode == 0
    return None if known else f"there is no user {user} to run it as; apt-get install postgresql"


def as_user(user: str, argv: list[str], *more: str) -> list[str]:
    """`argv` run by this Python as `user`, who may look where root's Python and this checkout lie, and `more`."""
    who = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
    who += [f"--{kind}-caps={','.join(f'+{cap}' for cap in ('dac_override', *more))}" for kind in ("inh", "ambient")]
    return [*who, "env", "HOME=/tmp", f"USER={user}", "PYTHONDONTWRITEBYTECODE=1", sys.executable, *argv]
