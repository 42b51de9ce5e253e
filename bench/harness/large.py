"""Rows of large messages, by libraries that move them for others: gRPC, Ray and Dask."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from harness.model import Settings
from harness.talks import BUILD, HERE, Talk, latency, ran
from harness.world import CountedWorld
from sidestep.demo.world import Evidence, Sample, program_missing
from sidestep.testing import free_port

CALL: Final = 1_000_000  # bytes of a call and of its answer
BLOCK: Final = 30_000_000  # bytes
UP_S: Final = 180.0  # for a cluster to come up and to fetch, beside busy programs too
_PYTHON: Final = HERE / "python"


def _python(program: str, *options: str) -> list[str]:
    return [sys.executable, str(_PYTHON / program), *options]


def _timing(settings: Settings) -> list[str]:
    return ["--warmup", str(settings.warmup_s), "--seconds", str(settings.seconds), "--hold"]


def grpc_cpp(world: CountedWorld, settings: Settings) -> Sample:
    """Calls a second by gRPC's C++."""
    program = str(BUILD / "grpc_unary")
    timing = ["-w", str(settings.warmup_s), "-t", str(settings.seconds)]
    return _calls(world, settings, [program, "server"], [program, "client", "-s", str(CALL), "-p", "{port}", *timing])


def grpc_python(world: CountedWorld, settings: Settings) -> Sample:
    """Calls a second by gRPC's Python."""
    client = _python("grpc_unary.py", "client", "--size", str(CALL), "--port", "{port}", *_timing(settings))
    return _calls(world, settings, _python("grpc_unary.py", "server"), client)


def _calls(world: CountedWorld, settings: Settings, server: list[str], client: list[str]) -> Sample:
    result, evidence = ran(world, settings, Talk.start(world, server, client))
    return Sample(result["rate"], {**latency(result), "rate": result["rate"]}, evidence)


def ray(world: CountedWorld, settings: Settings) -> Sample:
    """MB/s of blocks between two nodes of a cluster."""
    port = free_port()
    driver = world.start(_python("ray_blocks.py", "--port", str(port), "--size", str(BLOCK), *_timing(settings)))
    talk = Talk(driver, driver, port)
    evidence = talk.held(world, UP_S)
    return _blocks(talk.result(), evidence)


def dask(world: CountedWorld, settings: Settings) -> Sample:
    """MB/s of blocks from a worker to its client."""
    scheduler_port, port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="bench-dask-") as name:
        where = ["--host", "127.0.0.1", "--no-dashboard"]
        argv = [sys.executable, "-m", "dask", "scheduler", *where, "--port", str(scheduler_port), "--no-show"]
        scheduler = world.serve(argv, scheduler_port, UP_S, cwd=Path(name))
        argv = [sys.executable, "-m", "dask", "worker", f"tcp://127.0.0.1:{scheduler_port}", *where, "--no-nanny"]
        argv += ["--worker-port", str(port), "--nthreads", "1", "--local-directory", name]
        worker = world.serve(argv, port, UP_S, cwd=Path(name))
        options = ["--scheduler", str(scheduler_port), "--size", str(BLOCK), *_timing(settings)]
        talk = Talk(worker, world.start(_python("dask_blocks.py", *options)), port)
        evidence = talk.held(world, UP_S)
        result = talk.result()
        scheduler.stop()
    return _blocks(result, evidence)


def _blocks(result: dict[str, Any], evidence: Evidence | None) -> Sample:
    return Sample(result["rate"] * BLOCK / 1e6, {**latency(result), "rate": result["rate"]}, evidence)


def package_missing(module: str) -> Callable[[], str | None]:
    """Why a package of Python cannot be used, with the remedy; None when it is installed."""

    def look() -> str | None:
        there = importlib.util.find_spec(module) is not None
        return None if there else f"Python's package {module} is not installed; make bench LARGE=1"

    return look


def grpc_cpp_missing() -> str | None:
    """The same of gRPC's C++ and its compiler."""
    if why := program_missing("g++"):
        return why
    if not Path("/usr/include/grpcpp/grpcpp.h").exists():
        return "gRPC's C++ is not installed; apt-get install libgrpc++-dev"
    return None
