"""The rows of the table, in its order, with what each must reach and what it aims at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from harness import apps, talks
from harness.model import Row
from harness.world import program_missing

ROWS: Final[tuple[Row, ...]] = (
    Row("pingpong", "64 B ping-pong, blocking, p50", "us", 5, 8, talks.pingpong("blocking"), lower_is_better=True),
    Row("pingpong-epoll", "64 B ping-pong, epoll, p50", "us", 4, 7, talks.pingpong("epoll"), lower_is_better=True),
    Row("stream-64", "64 B one-way stream", "messages/s", 6, 20, talks.stream(64, as_bytes=False)),
    Row("stream-4k", "4 KiB one-way stream", "MB/s", 1.7, 3, talks.stream(4 << 10, as_bytes=True)),
    Row("stream-64k", "64 KiB stream", "MB/s", 1.5, 3, talks.stream(64 << 10, as_bytes=True)),
    Row("stream-256k", "256 KiB stream", "MB/s", 1.5, 3, talks.stream(256 << 10, as_bytes=True)),
    Row("stream-1m", "1 MiB stream", "MB/s", 1.5, 3, talks.stream(1 << 20, as_bytes=True)),
    Row(
        "redis-1", "redis-benchmark GET, 1 connection", "requests/s", 1.5, 3, apps.redis_get(1),
        needs=("redis-server", "redis-benchmark"),
    ),
    Row(
        "redis-50", "redis-benchmark GET, 50 connections", "requests/s", 1.5, 2, apps.redis_get(50),
        needs=("redis-server", "redis-benchmark"),
    ),
    *(
        Row(
            f"redis-{connections}-load", f"redis-benchmark GET, {connections} conn., beside 8 busy programs",
            "requests/s", 0.97, 1.5, apps.redis_get(connections), load=8, needs=("redis-server", "redis-benchmark"),
        )
        for connections in (1, 50)
    ),
    Row(
        "nginx", "nginx static 608 B, wrk keep-alive, 16 conn.", "requests/s", 1.2, 2, apps.nginx_static(16),
        needs=("nginx", "wrk"),
    ),
    Row(
        "pgbench-1", "pgbench -S, 1 client over TCP", "tps", 1.1, 1.5, apps.pgbench_select(1),
        needs=("postgres",), user="postgres",
    ),
    Row(
        "pgbench-8", "pgbench -S, 8 clients over TCP", "tps", 1.0, 1.3, apps.pgbench_select(8),
        needs=("postgres",), user="postgres",
    ),
    Row("python", "Python blocking ping-pong, p50", "us", 4, 8, talks.python("blocking"), lower_is_better=True),
    Row("asyncio", "Python asyncio echo, p50", "us", 1.3, 1.8, talks.python("asyncio"), lower_is_better=True),
    Row("short", "connect, exchange 64 B, close", "connections/s", 0.95, 1.0, talks.short(), promotes=False),
    Row(
        "untouched", "a call on a descriptor that is no connection", "ns", 0.98, 1.0, talks.untouched(),
        lower_is_better=True, promotes=False, rounds_factor=5,
    ),
    Row(
        "native-pingpong", "64 B ping-pong with a program not under sidestep", "us", 0.98, 1.0,
        talks.pingpong("blocking", stranger=True), lower_is_better=True, promotes=False, as_placed=True,
        rounds_factor=2,
    ),
    Row(
        "native-stream", "64 B stream to a program not under sidestep", "messages/s", 0.98, 1.0,
        talks.stream(64, as_bytes=False, stranger=True), promotes=False, as_placed=True, rounds_factor=2,
    ),
    Row(
        "static-pingpong", "64 B ping-pong of a static program, p50", "us", 4, 6.4,
        talks.pingpong("blocking", program="pingpong-static"), lower_is_better=True,
    ),
    Row(
        "static-untouched", "the call of a static program on no connection", "ns", 0.97, 1.0,
        talks.untouched("untouched-static"), lower_is_better=True, promotes=False, rounds_factor=5,
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
    Row("pairs", "8 busy pairs on 2 CPUs, total", "messages/s", 1.0, 3, talks.pairs(8), cpus=2),
    Row(
        "idle-cpu", "CPU time, 100 connections idle for 10 s", "ms", 0, 0, talks.idle_cpu(100),
        absolute=True, lower_is_better=True, rounds_max=1,
    ),
    Row(
        "idle-memory", "memory, each of 10,000 idle connections", "KiB", 32, 32, talks.idle_memory(10_000),
        absolute=True, lower_is_better=True, rounds_max=1,
    ),
)  # fmt: skip

_SPECIAL: Final[dict[str, Callable[[], str | None]]] = {
    "postgres": apps.postgres_missing,
    "go-redis": apps.go_redis_missing,
}


def missing(row: Row) -> list[str]:
    """Why a row cannot run here at all, a sentence for each program that is missing."""
    found = [_SPECIAL[name]() if name in _SPECIAL else program_missing(name) for name in (*row.needs, "taskset")]
    if row.user:
        found.append(apps.user_missing(row.user))
    return [sentence for sentence in found if sentence]
