"""Works of the demo. Their servers and redis-benchmark are those of bench/, too."""

from __future__ import annotations

import csv
import hashlib
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from sidestep.demo.world import END_S, START_S, Program, Sample, World
from sidestep.testing import free_port

RUNS_MAX: Final = 4  # runs of a work, until one lasts long enough for all its connections to be seen offloaded
FILE_LEN: Final = 16 << 20  # bytes

Measure = Callable[[World, float], Sample]


def command(role: str, world: World, *more: object) -> list[str]:
    """The command of a role of programs.py; for a client, `more` begins with the server's port."""
    programs = Path(__file__).with_name("programs.py")
    return [sys.executable, "-I", str(programs), role, world.address, *map(str, more)]


def talk(role: str, *more: int) -> Measure:
    """A work of one connection between two of our own programs; `more` goes to the client."""

    def run(world: World, seconds: float) -> Sample:
        port = int(world.start(command(f"{role}_server", world), world.server).expect("listening", START_S))
        return _held(world, world.start(command(f"{role}_client", world, port, seconds, *more)), port, seconds)

    return run


def _held(world: World, client: Program, port: int, seconds: float) -> Sample:
    """Sample by the figures of a client with one connection, which is looked at while it is open."""
    client.expect("holding", seconds + END_S)
    evidence = world.evidence(port, 2)
    result = client.result()
    return Sample(result["value"], evidence=evidence, equal=result["equal"])


@contextmanager
def redis_server(world: World) -> Iterator[tuple[Program, int]]:
    """A redis-server, and its port."""
    with tempfile.TemporaryDirectory(prefix="sidestep-redis-") as folder:
        port = free_port()
        argv = ["redis-server", "--port", str(port), "--bind", world.address, "--save", "", "--appendonly", "no"]
        server = world.serve([*argv, "--protected-mode", "no", "--dir", folder], port)
        yield server, port
        server.stop()


@dataclass(slots=True)
class Redis:
    """redis-benchmark GET over some connections; remembers the requests that fill a second, by name of the world."""

    connections: int
    calibration: int = 5_000  # requests, to learn how many fill the time
    runs: int = RUNS_MAX
    rates: dict[str, float] = field(default_factory=dict)

    def __call__(self, world: World, seconds: float, warmup_s: float = 0.0) -> Sample:
        with redis_server(world) as (server, port):
            equal = world.start(command("redis_check", world, port)).result()["equal"]
            if world.name not in self.rates:
                self._ask(world, server, port, self.calibration, 0.0)
            requests = max(1000, int(self.rates[world.name] * (seconds + warmup_s)))
            for _ in range(self.runs):
                sample = self._ask(world, server, port, requests, 0.3 * seconds)
                if sample.evidence is None or sample.evidence.ok:
                    break
                requests *= 2  # the run was over before all connections could be seen
        return replace(sample, equal=equal)

    def _ask(self, world: World, server: Program, port: int, requests: int, from_s: float) -> Sample:
        argv = ["redis-benchmark", "-h", world.address, "-p", str(port), "-t", "get", "--csv"]
        client = world.start([*argv, "-c", str(self.connections), "-n", str(requests)])
        output, evidence = world.watched(server, client, port, self.connections, from_s)
        rows = list(csv.DictReader(output.splitlines()))
        if len(rows) != 1 or not rows[0].get("rps"):
            raise client.fault(f"gave no figures: {rows!r}")
        self.rates[world.name] = float(rows[0]["rps"])
        beside = {f"{q}_us": 1e3 * float(rows[0][f"{q}_latency_ms"]) for q in ("p50", "p99")}
        return Sample(self.rates[world.name], beside, evidence)


_NGINX: Final = """
daemon off; worker_processes 1; pid {folder}/pid; error_log stderr warn; {user}
events {{ worker_connections 1024; }}
http {{
    access_log off; keepalive_requests 100000000; sendfile on; tcp_nopush on;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{ listen {address}:{port}; root {folder}/www; }}
}}
"""


@contextmanager
def nginx_server(world: World, page: bytes) -> Iterator[tuple[Program, int]]:
    """An nginx that serves `page` as /page.txt, and its port."""
    with tempfile.TemporaryDirectory(prefix="sidestep-nginx-") as name:
        folder, port = Path(name), free_port()
        (folder / "www").mkdir()
        (folder / "www" / "page.txt").write_bytes(page)
        user = "user root;" if os.geteuid() == 0 else ""  # workers stay the same user: the folder is ours alone
        conf = folder / "nginx.conf"
        conf.write_text(_NGINX.format(folder=folder, user=user, address=world.address, port=port))
        server = world.serve(["nginx", "-p", name, "-e", "stderr", "-c", str(conf)], port)
        yield server, port
        server.stop()


def fetch(world: World, port: int, page: bytes, seconds: float) -> Program:
    """A client that gets /page.txt of a web server again and again, and compares it with `page`."""
    return world.start(command("fetch", world, port, seconds, hashlib.sha256(page).hexdigest()))


def _nginx(world: World, seconds: float) -> Sample:
    page = random.Random(2002).randbytes(FILE_LEN)  # noqa: S311 - any bytes will do
    with nginx_server(world, page) as (_, port):
        return _held(world, fetch(world, port, page, seconds), port, seconds)


@dataclass(frozen=True, slots=True)
class Work:
    """Work that the demo runs in each world."""

    name: str
    title: str
    unit: str
    run: Measure
    lower_is_better: bool = False
    needs: tuple[str, ...] = ()  # programs, by name


_REDIS: Final = ("redis-server", "redis-benchmark")
WORKS: Final = (
    Work("redis-1", "redis-benchmark GET, 1 connection", "requests/s", Redis(1), needs=_REDIS),
    Work("redis-50", "redis-benchmark GET, 50 connections", "requests/s", Redis(50), needs=_REDIS),
    Work("echo", "64 B ping-pong in Python, median", "us", talk("echo"), lower_is_better=True),
    Work("bulk", "16 MiB transfers in Python, SHA-256 checked", "MB/s", talk("bulk")),
    Work("nginx", "nginx, 16 MiB files, SHA-256 checked", "MB/s", _nginx, needs=("nginx",)),
)
