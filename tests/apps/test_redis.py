"""redis: a data check over every kind of conversation it has, and redis-benchmark."""

from __future__ import annotations

import json
import random
import re

import needed
from flow import Feeder
from stage import Program, Stage, sha256


def redis_server(stage: Stage) -> tuple[Program, int]:
    """A redis server without persistence."""
    server = needed.program("redis-server")
    return stage.serve(
        lambda port: [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    )


def test_data(stage: Stage) -> None:
    """Pipelines, large values, MULTI and WATCH, pub/sub, BLPOP, a script and CLIENT LIST give the known answers."""
    server, port = redis_server(stage)
    client = stage.python("client", "redis_check.py", port)
    result = json.loads(client.line())
    sizes = (1, 1000, 16_384, 65_537, 1 << 20, 8 << 20)
    assert result == {
        "pipelines": sum(batch * 1000 + item for batch in range(20) for item in range(250)),
        "large": {str(size): sha256(random.Random(size).randbytes(size)) for size in sizes},
        "transactions": [[70, 30], "refused", 1],
        "pubsub": "in order",
        "blpop": [f"item {i}" for i in range(50)],
        "script": 500500,
        "clients": ["check-0", "check-1", "check-2", "check-3"],
        "keys": 20 * 250 + len(sizes) + 2,
    }
    stage.check_path(port, 4, nudge=client.nudge)
    client.rest()
    assert server.stop() == 0


def test_benchmark_counts(stage: Stage) -> None:
    """redis-benchmark's commands all arrive: the server counts what was asked for."""
    _, port = redis_server(stage)
    benchmark, cli = needed.program("redis-benchmark"), needed.program("redis-cli")
    asked = 20_000
    with stage.watching(port):
        for pipeline in ("1", "16"):
            # fmt is skipped so that an option and its value stay on one line
            stage.run("client", [
                benchmark, "-h", "127.0.0.1", "-p", str(port), "-c", "50", "-n", str(asked), "-P", pipeline, "-q",
                "-d", "100", "-r", "1000", "-t", "set,get,incr,lpush,mset",
            ])  # fmt: skip
    stats = stage.run("client", [cli, "-p", str(port), "info", "commandstats"]).decode()
    calls = {name: int(count) for name, count in re.findall(r"cmdstat_(\w+):calls=(\d+)", stats)}
    for command in ("set", "get", "incr", "lpush", "mset"):
        assert 2 * asked <= calls[command] <= 2 * asked + 2 * 50 * 16, stats  # it may overshoot by what is in flight
    assert not re.search(r"(rejected|failed)_calls=[1-9]", stats), stats


def test_benchmark_path(stage: Stage) -> None:
    """50 busy connections of redis-benchmark all take the path they should."""
    _, port = redis_server(stage)
    benchmark = stage.start("client", [
        needed.program("redis-benchmark"), "-h", "127.0.0.1", "-p", str(port), "-c", "50", "-n", "2000000000",
        "-t", "get",
    ])  # fmt: skip
    stage.check_path(port, 50, ring_bytes_min=1000)
    assert benchmark.popen.poll() is None, benchmark.complaint("ended early")


def test_mass_insertion(stage: Stage) -> None:
    """redis-cli --pipe streams 100,000 commands; the server has exactly them, and stays reachable."""
    _, port = redis_server(stage)
    cli = needed.program("redis-cli")
    count = 100_000
    commands = []
    for number in range(count):
        key, value = f"k{number}".encode(), f"value {number}".encode()
        commands.append(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key, len(value), value))
    pipe = stage.converse("client", [cli, "-p", str(port), "--pipe"])
    feeder = Feeder(pipe, b"".join(commands))
    feeder.nudge()
    stage.check_path(port, nudge=feeder.nudge)
    feeder.start()
    feeder.join()
    feeder.finish()
    assert f"replies: {count}" in pipe.rest().decode()
    assert stage.run("client", [cli, "-p", str(port), "dbsize"]).split() == [str(count).encode()]
    assert stage.run("client", [cli, "-p", str(port), "get", f"k{count - 1}"]) == f"value {count - 1}\n".encode()
