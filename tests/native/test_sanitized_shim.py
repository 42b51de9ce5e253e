"""The shim under ASan with UBSan and under TSan, preloaded into real programs: promoted, right, and not one report."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needed
import pytest
import toolchain
from common import PATIENCE_S
from toolchain import ADDRESS, THREAD, Sanitizer

from sidestep.testing import Connection, Sidestep

BENCH = toolchain.ROOT / "bench" / "c"
PROGRAMS = toolchain.NATIVE_TESTS / "programs"
CONNECTIONS = 4
ENDS_WITHIN_S = PATIENCE_S

pytestmark = pytest.mark.slow


class Stage(toolchain.SanitizedShim):
    """Starts programs under the sanitized shim."""

    def __init__(self, sanitizer: Sanitizer, sidestep: Sidestep, directory: Path) -> None:
        super().__init__(sanitizer, sidestep, directory)
        self.sidestep = sidestep
        self.env |= {
            "SIDESTEP_LOG": str(directory / "shim.log"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONMALLOC": "malloc",  # so that ASan sees Python's buffers too
        }

    def popen(self, *argv: str | Path) -> subprocess.Popen[Any]:
        pipe = subprocess.PIPE
        return self.sidestep.popen(argv, env=self.env, stdin=pipe, stdout=pipe, text=True)

    def bench(self, name: str, *more: str) -> Path:
        """A program of bench/c, built for the sanitizer too, which then knows how its threads are ordered."""
        sources = [BENCH / f"{part}.c" for part in (name, *more, "bench")]
        flags = [*self.sanitizer.flags, "-D_GNU_SOURCE", f"-I{BENCH}"]
        return toolchain.build(f"{name}-{self.sanitizer.name}", sources, flags)


@pytest.fixture(params=[ADDRESS, THREAD], ids=lambda s: s.name)
def stage(request: pytest.FixtureRequest, sidestep: Sidestep, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(request.param, sidestep, tmp_path)
    yield made
    made.check()


def both_promoted(connections: int) -> Callable[[list[Connection]], bool]:
    """Both ends of so many connections are promoted."""
    return lambda found: sum(c.promoted for c in found) == 2 * connections


def streamed(found: list[Connection]) -> bool:
    """Bytes went one way by ring. The way back follows with the next call, which a program that holds does not make."""
    return any(c.tx.ring_bytes for c in found) and any(c.rx.ring_bytes for c in found)


def hold_and_end(
    stage: Stage,
    server: subprocess.Popen[Any],
    client: subprocess.Popen[Any],
    moved: Callable[[list[Connection]], bool],
) -> None:
    """The client says that it holds its connections; they have `moved`; then both programs end well."""
    assert client.stdout is not None
    lines = []
    while (line := client.stdout.readline()) and "holding" not in line:
        lines.append(line)
    assert "holding" in line, f"the client ended early, {client.wait(ENDS_WITHIN_S)}: {lines}"
    stage.sidestep.wait_for(moved)
    assert client.communicate(timeout=ENDS_WITHIN_S)[0] is not None
    assert client.returncode == 0
    server.terminate()
    assert server.wait(ENDS_WITHIN_S) == -signal.SIGTERM


@pytest.mark.parametrize(
    "mode", [["-m", "blocking"], ["-m", "poll"], ["-m", "epoll"], ["-m", "epoll", "-e"]], ids="".join
)
def test_ping_pong(stage: Stage, mode: list[str]) -> None:
    program = stage.bench("pingpong", "pingpong_events", "waiter")
    server = stage.popen(program, "server", *mode)
    assert server.stdout is not None
    port = server.stdout.readline().split()[1]
    options = ["-p", port, "-n", str(CONNECTIONS), "-w", "0", "-c", "2000", "-H"]
    hold_and_end(stage, server, stage.popen(program, "client", *mode, *options), both_promoted(CONNECTIONS))


@pytest.mark.parametrize("size", [64, 65536])
def test_stream(stage: Stage, size: int) -> None:
    program = stage.bench("stream")
    mode = ["-m", "blocking", "-s", str(size), "-V"]
    server = stage.popen(program, "server", *mode)
    assert server.stdout is not None
    port = server.stdout.readline().split()[1]
    options = ["-p", port, "-w", "0", "-t", "0.5", "-H"]
    hold_and_end(stage, server, stage.popen(program, "client", *mode, *options), streamed)


def test_python_with_threads(stage: Stage) -> None:
    if stage.sanitizer is THREAD:
        # the interpreter is not built with TSan, so what orders its threads is unseen: only the shim counts
        stage.env["TSAN_OPTIONS"] += ":ignore_noninstrumented_modules=1"
    program = PROGRAMS / "echo_threads.py"
    server = stage.popen(sys.executable, program, "server")
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    client = stage.popen(sys.executable, program, "client", port, str(CONNECTIONS), "300")
    hold_and_end(stage, server, client, both_promoted(CONNECTIONS))


@pytest.mark.parametrize("stage", [ADDRESS], ids=lambda s: s.name, indirect=True)
def test_redis(stage: Stage, tmp_path: Path) -> None:
    """Not under TSan: redis brings an allocator of its own that it cannot stand in for."""
    needed.programs("redis-server", "redis-benchmark")
    server, port = redis_server(stage, tmp_path)
    clients = 8
    asked = ["-h", "127.0.0.1", "-p", str(port), "-c", str(clients), "-t", "get,set", "-n", "2000000000"]
    benchmark = stage.popen("redis-benchmark", *asked)
    stage.sidestep.wait_for(
        lambda found: sum(c.promoted and c.rx.ring_msgs > 500 for c in found) == 2 * clients, ENDS_WITHIN_S
    )
    benchmark.terminate()
    assert benchmark.wait(ENDS_WITHIN_S) == -signal.SIGTERM
    # the server saw every client leave, still answers, and ends well
    stage.sidestep.wait_for(lambda found: not found)
    asked = ["-h", "127.0.0.1", "-p", str(port), "shutdown", "nosave"]
    assert stage.popen("redis-cli", *asked).wait(ENDS_WITHIN_S) == 0
    assert server.wait(ENDS_WITHIN_S) == 0


def redis_server(stage: Stage, directory: Path) -> tuple[subprocess.Popen[Any], int]:
    """A server on a port that was free a moment ago; another one where somebody was quicker."""
    for _ in range(5):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = ["--save", "", "--appendonly", "no", "--dir", str(directory), "--bind", "127.0.0.1"]
        server = stage.popen("redis-server", *options, "--port", str(port))
        assert server.stdout is not None
        for line in server.stdout:
            if "Ready to accept connections" in line:
                return server, port
        assert server.wait(ENDS_WITHIN_S) == 1
    pytest.fail("no port was free for redis-server")
