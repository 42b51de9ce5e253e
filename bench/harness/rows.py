"""The rows of the table, in its order, with what each must reach and what it aims at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from harness import apps, large, talks
from harness.model import Row
from sidestep.demo.world import program_missing

REDIS: Final = ("redis-server", "redis-benchmark")
NGINX: Final = ("nginx", "wrk")
MIB: Final = 1 << 20

QUIET: Final = (
    Row("pingpong", "64 B ping-pong, blocking, p50", "us", 5, 8, talks.pingpong("blocking"), lower_is_better=True),
    Row("pingpong-epoll", "64 B ping-pong, epoll, p50", "us", 4, 7, talks.pingpong("epoll"), lower_is_better=True),
    Row("stream-64", "64 B one-way stream", "messages/s", 6, 20, talks.stream(64, as_bytes=False)),
    Row("stream-4k", "4 KiB one-way stream", "MB/s", 1.7, 3, talks.stream(4 << 10, as_bytes=True)),
    Row("stream-64k", "64 KiB stream", "MB/s", 3, 4, talks.stream(64 << 10, as_bytes=True, limit=True)),
    Row("stream-256k", "256 KiB stream", "MB/s", 1.5, 3, talks.stream(256 << 10, as_bytes=True)),
    Row("stream-1m", "1 MiB stream", "MB/s", 2.5, 4, talks.stream(MIB, as_bytes=True, limit=True)),
    Row("redis-1", "redis-benchmark GET, 1 connection", "requests/s", 1.5, 3, apps.redis_get(1), needs=REDIS),
    Row("redis-50", "redis-benchmark GET, 50 connections", "requests/s", 1.5, 2, apps.redis_get(50), needs=REDIS),
    Row(
        "nginx", "nginx static 608 B, wrk keep-alive, 16 conn.", "requests/s", 1.2, 2, apps.nginx_static(16),
        needs=NGINX,
    ),
    Row(
        "pgbench-1", "pgbench -S, 1 client over TCP", "tps", 1.1, 1.5, apps.pgbench_select(1),
        needs=("postgres",), user="postgres",
    ),
    Row(
        "pgbench-8", "pgbench -S, 8 clients over TCP", "tps", 1.7, 2, apps.pgbench_select(8),
        needs=("postgres",), user="postgres",
    ),
    Row("python", "Python blocking ping-pong, p50", "us", 4, 8, talks.python("blocking"), lower_is_better=True),
    Row("asyncio", "Python asyncio echo, p50", "us", 1.9, 2.2, talks.python("asyncio"), lower_is_better=True),
    Row("short", "connect, exchange 64 B, close", "connections/s", 0.95, 1.0, talks.short(), promotes=False),
    Row(
        "static-pingpong", "64 B ping-pong of a static program, p50", "us", 4, 6.4,
        talks.pingpong("blocking", program="pingpong-static"), lower_is_better=True,
    ),
    *(
        Row(
            f"{kind}-pingpong", f"64 B ping-pong of {kind}, p50", "us", 1.5, 4,
            talks.pingpong("blocking", program=f"pingpong-{kind}"), lower_is_better=True, needs=("go",),
        )
        for kind in ("go", "cgo")
    ),
    *(
        Row(
            f"{kind}-http", f"net/http of {kind}, wrk keep-alive, 16 conn.", "requests/s", 1.5, 2,
            apps.go_http(16, f"httpd-{kind}"), needs=("go", "wrk"),
        )
        for kind in ("go", "cgo")
    ),
    Row(
        "go-redis", "redis GET by go-redis, 1 connection, p50", "us", 1.3, 2, apps.go_redis,
        lower_is_better=True, needs=("redis-server", "go-redis"),
    ),
    Row("pairs", "8 busy pairs on 2 CPUs, total", "messages/s", 2, 3, talks.pairs(8), cpus=2),
)  # fmt: skip

LARGE: Final = (
    Row("grpc-cpp", "gRPC C++, 1 MB unary calls", "calls/s", 1.1, 1.5, large.grpc_cpp, needs=("grpc-cpp",)),
    Row("grpc-python", "gRPC Python, 1 MB unary calls", "calls/s", 1.1, 1.5, large.grpc_python, needs=("grpc",)),
    Row("ray", "Ray, 30 MB between two nodes of a host", "MB/s", 1.1, 1.5, large.ray, needs=("ray",)),
    Row("dask", "Dask, 30 MB from a worker", "MB/s", 1.1, 1.5, large.dask, needs=("distributed",)),
    Row(
        "nginx-16m", "nginx 16 MiB files, wrk keep-alive, 4 conn.", "requests/s", 1.8, 2.5,
        apps.nginx_static(4, 16 * MIB), needs=NGINX,
    ),
    Row("python-16m", "Python 16 MiB transfers", "MB/s", 2.7, 4, talks.python_transfer(16 * MIB)),
)  # fmt: skip

# One end, or none, is under sidestep, or the descriptor is no connection: the peer has no part in these.
NATIVE: Final = (
    Row(
        "untouched", "a call on a descriptor that is no connection", "ns", 0.98, 1.0, talks.untouched(),
        lower_is_better=True, promotes=False, peer=False, rounds_factor=5,
    ),
    Row(
        "static-untouched", "the call of a static program on no connection", "ns", 0.97, 1.0,
        talks.untouched("untouched-static"), lower_is_better=True, promotes=False, peer=False, rounds_factor=5,
    ),
    Row(
        "native-pingpong", "64 B ping-pong with a program not under sidestep", "us", 0.98, 1.0,
        talks.pingpong("blocking", stranger=True), lower_is_better=True, promotes=False, peer=False, as_placed=True,
        rounds_factor=2,
    ),
    Row(
        "native-stream", "64 B stream to a program not under sidestep", "messages/s", 0.99, 1.0,
        talks.stream(64, as_bytes=False, stranger=True), promotes=False, peer=False, as_placed=True, rounds_factor=2,
    ),
    Row(
        "native-short", "connections to a program not under sidestep", "connections/s", 1.6, 2,
        talks.short(stranger=True), promotes=False, peer=False, as_placed=True, rounds_factor=2,
    ),
)  # fmt: skip

COSTS: Final = (
    Row(
        "cpu-pingpong", "CPU time, 64 B ping-pong, blocking", "s/million messages", 1, 2,
        talks.cost(talks.pingpong("blocking"), 1e6), lower_is_better=True,
    ),
    Row(
        "cpu-stream-64", "CPU time, 64 B one-way stream", "s/million messages", 1, 2,
        talks.cost(talks.stream(64, as_bytes=False), 1e6), lower_is_better=True,
    ),
    Row(
        "cpu-stream-64k", "CPU time, 64 KiB stream", "s/GB", 1, 2,
        talks.cost(talks.stream(64 << 10, as_bytes=True), 1e9 / (64 << 10)), lower_is_better=True,
    ),
    Row(
        "cpu-stream-1m", "CPU time, 1 MiB stream", "s/GB", 1, 2,
        talks.cost(talks.stream(MIB, as_bytes=True), 1e9 / MIB), lower_is_better=True,
    ),
    Row(
        "after-idle", "64 B round trip after an idle second, blocking, p50", "us", 1, 0, talks.after_idle(),
        absolute=True, over_tcp=True, lower_is_better=True,
    ),
    Row(
        "idle-cpu", "CPU time, 100 connections idle for 10 s", "ms", 0, 0, talks.idle_cpu(100),
        absolute=True, lower_is_better=True, peer=False, rounds_max=1,
    ),
    Row(
        "idle-memory", "memory, each of 10,000 idle connections", "KiB", 8, 2, talks.idle_memory(10_000),
        absolute=True, over_tcp=True, lower_is_better=True, peer=False, rounds_max=1,
    ),
)  # fmt: skip


BESIDE: Final = (
    Row("pingpong", "64 B ping-pong, blocking, p50", "us", 1.9, 2.5, talks.pingpong("blocking"), lower_is_better=True),
    Row("pingpong-epoll", "64 B ping-pong, epoll, p50", "us", 1.9, 2.5, talks.pingpong("epoll"), lower_is_better=True),
    Row("stream-64k", "64 KiB stream", "MB/s", 2.5, 4, talks.stream(64 << 10, as_bytes=True)),
    Row("redis-1", "redis-benchmark GET, 1 conn.", "requests/s", 1.4, 2, apps.redis_get(1), needs=REDIS),
    Row("redis-50", "redis-benchmark GET, 50 conn.", "requests/s", 0.97, 1.5, apps.redis_get(50), needs=REDIS),
    Row("nginx-1m", "nginx 1 MiB files, 4 conn.", "requests/s", 1.4, 2, apps.nginx_static(4, MIB), needs=NGINX),
    Row(
        "nginx-short", "nginx 608 B, a connection a request, 4 at a time", "requests/s", 1, 1.1,
        apps.nginx_static(4, keep_alive=False), promotes=False, needs=NGINX,
    ),
    Row("pairs", "8 busy pairs on 2 CPUs, total", "messages/s", 2, 3, talks.pairs(8), cpus=2),
    *(
        Row(
            f"go-{name}", f"64 B ping-pong of go, echo by {calls}, p50", "us", 1.4, 2,
            talks.pingpong(mode, program="pingpong-go"), lower_is_better=True, needs=("go",),
            peer=mode != "copy",  # splice(2) does not find what sockmap put into a socket, and waits
        )
        for name, calls, mode in (("pingpong", "Read and Write", "plain"), ("copy", "io.Copy", "copy"))
    ),
    *(replace(row, must=1, aim=1) for row in COSTS if row.name in ("cpu-pingpong", "cpu-stream-64k")),
)  # fmt: skip


def _crowded(load: int) -> Iterator[Row]:
    """The rows that run beside so many endless shell loops."""
    for row in BESIDE:
        yield replace(row, name=f"{row.name}-load{load}", title=f"{row.title}, beside {load} busy programs", load=load)


ROWS: Final[tuple[Row, ...]] = (*QUIET, *LARGE, *_crowded(4), *_crowded(8), *NATIVE, *COSTS)

_SPECIAL: Final[dict[str, Callable[[], str | None]]] = {
    "postgres": apps.postgres_missing,
    "go-redis": apps.go_redis_missing,
    "grpc-cpp": large.grpc_cpp_missing,
    **{module: large.package_missing(module) for module in ("grpc", "distributed", "ray")},
}


def missing(row: Row) -> list[str]:
    """Why a row cannot run here at all, a sentence for each program that is missing."""
    found = [_SPECIAL[name]() if name in _SPECIAL else program_missing(name) for name in row.needs]
    if row.user:
        found.append(apps.user_missing(row.user))
    return [sentence for sentence in found if sentence]
