"""Rows run with real server programs and their own load generators."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from harness.model import Measure, Settings
from harness.talks import BUILD, Talk, latency, ran
from harness.world import CountedWorld
from sidestep.demo.works import Redis, fetch, nginx_server, redis_server
from sidestep.demo.world import LOAD_S, Program, Sample, World, program_missing
from sidestep.errors import Unavailable
from sidestep.testing import free_port

FILE = b"0123456789abcde\n" * 38  # a small static page, 608 bytes


def redis_get(connections: int) -> Measure:
    """Requests a second of redis-benchmark GET."""
    asks = defaultdict[int, Redis](partial(Redis, connections, calibration=20_000, runs=1))  # by load
    return lambda world, settings: asks[world.load](world, settings.seconds, settings.warmup_s)


def go_redis(world: CountedWorld, settings: Settings) -> Sample:
    """Median time of a GET by go-redis, one after the other, in us."""
    with redis_server(world) as (server, port):
        argv = [str(BUILD / "redis-go"), "client", "-p", str(port)]
        client = world.start([*argv, "-w", str(settings.warmup_s), "-t", str(settings.seconds)])
        result, evidence = ran(world, settings, Talk(server, client, port))
    beside = latency(result)
    return Sample(beside["p50_us"], {**beside, "rate": result["rate"]}, evidence)


def go_redis_missing() -> str | None:
    """Why its client cannot be built, with the remedy; None when it can."""
    found = program_missing("go")
    if not found and not Path("/usr/share/gocode/src/gopkg.in/redis.v5").is_dir():
        found = "go-redis is not installed; apt-get install golang-gopkg-redis.v5-dev"
    return found


_WRK_TIME = re.compile(r"^\s+(50|99)%\s+([\d.]+)(us|ms|s)\s*$", re.M)
_WRK_SCALE = {"us": 1.0, "ms": 1e3, "s": 1e6}


def nginx_static(connections: int, size: int | None = None, *, keep_alive: bool = True) -> Measure:
    """Requests a second for a static file, by wrk with keep-alive or with a connection for each request."""

    def measure(world: CountedWorld, settings: Settings) -> Sample:
        page = FILE if size is None else random.Random(1).randbytes(size)
        with nginx_server(world, page) as (server, port):
            return _wrk(world, settings, server, port, connections, page, keep_alive=keep_alive)

    return measure


def go_http(connections: int, program: str) -> Measure:
    """The same of Go's net/http."""

    def measure(world: CountedWorld, settings: Settings) -> Sample:
        port = free_port()
        with tempfile.NamedTemporaryFile(prefix="bench-go-") as page:
            page.write(FILE)
            page.flush()
            server = world.serve([str(BUILD / program), f"{world.address}:{port}", page.name], port)
            return _wrk(world, settings, server, port, connections, FILE)

    return measure


def _wrk(
    world: World, settings: Settings, server: Program, port: int, connections: int, page: bytes, *,
    keep_alive: bool = True,
) -> Sample:  # fmt: skip
    equal = fetch(world, port, page, 0).result()["equal"]  # wrk looks at the length alone
    seconds = max(1, round(settings.seconds))
    argv = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency"]
    argv += [*([] if keep_alive else ["-H", "Connection: close"]), f"http://{world.address}:{port}/page.txt"]
    output, evidence = world.watched(server, world.start(argv), port, connections if keep_alive else 0, 0.4 * seconds)
    rate = re.search(r"^Requests/sec:\s+([\d.]+)", output, re.M)
    if not rate or "Socket errors" in output or "Non-2xx" in output:
        raise Unavailable(f"wrk gave no clean figures: {' | '.join(output.split())}")
    times = {f"p{q}_us": float(t) * _WRK_SCALE[unit] for q, t, unit in _WRK_TIME.findall(output)}
    return Sample(float(rate[1]), times, evidence, equal)


def postgres_folder() -> Path | None:
    """Where PostgreSQL's programs are: on the path, or the newest of Debian's versions."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parts[-2]), reverse=True)
    on_path = shutil.which("postgres")
    folders = [*([Path(on_path).resolve().parent] if on_path else []), *versions]
    needed = ("initdb", "postgres", "pgbench", "pg_isready")
    return next((folder for folder in folders if all((folder / name).exists() for name in needed)), None)


@cache
def _cluster() -> tempfile.TemporaryDirectory[str]:
    """A fresh cluster with pgbench's tables, made once and removed when this program ends."""
    folder = tempfile.TemporaryDirectory(prefix="bench-postgres-")
    programs = postgres_folder()
    assert programs is not None, "the row is skipped where PostgreSQL is missing"
    argv = [str(programs / "initdb"), "-D", folder.name, "-U", "bench", "-A", "trust", "-E", "UTF8", "--no-sync"]
    made = subprocess.run(argv, capture_output=True, text=True, check=False)
    if made.returncode:
        raise Unavailable(f"initdb failed: {made.stderr.strip()}")
    with (Path(folder.name) / "pg_hba.conf").open("a") as hosts:
        hosts.write("host all all 0.0.0.0/0 trust\n")  # of whatever address it listens at
    with World("preparing") as world, _postgres(world, Path(folder.name)) as (_, port):
        fill = world.start([str(programs / "pgbench"), "-i", "-q", "-s", "5", *_where(world, port)])
        fill.finish(LOAD_S)
    return folder


def _where(world: World, port: int) -> list[str]:
    return ["-h", world.address, "-p", str(port), "-U", "bench", "postgres"]


@contextmanager
def _postgres(world: World, folder: Path) -> Iterator[tuple[Program, int]]:
    programs, port = postgres_folder(), free_port()
    assert programs is not None, "the row is skipped where PostgreSQL is missing"
    settings = {
        "port": str(port), "listen_addresses": world.address, "unix_socket_directories": "", "fsync": "off",
        "max_connections": "50", "autovacuum": "off",
    }  # fmt: skip
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    argv = [str(programs / "postgres"), "-D", str(folder), *options]
    server = world.serve(argv, port, stop=signal.SIGINT)  # fast shutdown
    deadline = time.monotonic() + LOAD_S
    ready = [str(programs / "pg_isready"), "-q", "-h", world.address, "-p", str(port)]
    while not _succeeds(world, ready):  # it listens before it is ready
        if time.monotonic() > deadline:
            raise server.fault(f"is not ready after {LOAD_S:g} s")
        time.sleep(0.05)
    yield server, port
    server.stop()


def _succeeds(world: World, argv: list[str]) -> bool:
    with world.client.inside():
        return subprocess.run(argv, check=False).returncode == 0


def pgbench_select(connections: int) -> Measure:
    """Transactions a second of pgbench -S over TCP."""

    def measure(world: CountedWorld, settings: Settings) -> Sample:
        programs = postgres_folder()
        assert programs is not None, "the row is skipped where PostgreSQL is missing"
        seconds = max(1, round(settings.seconds))
        argv = [str(programs / "pgbench"), "-n", "-S", "-c", str(connections), "-j", "1", "-T", str(seconds)]
        with _postgres(world, Path(_cluster().name)) as (server, port):
            client = world.start([*argv, *_where(world, port)])
            output, evidence = world.watched(server, client, port, connections, 0.4 * seconds)
        rate = re.search(r"^tps = ([\d.]+)", output, re.M)
        mean = re.search(r"^latency average = ([\d.]+) ms", output, re.M)
        failed = re.search(r"^number of failed transactions: ([1-9]\d*)", output, re.M)
        if not rate or not mean or failed:
            raise Unavailable(f"pgbench gave no clean figures: {' | '.join(output.splitlines())}")
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
