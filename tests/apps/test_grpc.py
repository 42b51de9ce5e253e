"""gRPC in C++, as Debian has it: calls and streams in both directions at once, on several connections."""

from __future__ import annotations

import os
from pathlib import Path

import needed
import pytest
from matrix import build
from stage import PROGRAMS, Stage

CONNECTIONS = 8
SENT = 6_069_734 + 500 * 4096  # bytes of each connection, each way, in one of its two exchanges


@pytest.fixture(scope="session")
def echo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The compiled program."""
    if not Path("/usr/include/grpcpp/grpcpp.h").exists():
        needed.missing("libgrpc++-dev", "/usr/include/grpcpp/grpcpp.h")
    program = tmp_path_factory.mktemp("grpc") / "echo_grpc"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(program)]
    libraries = ["-lgrpc++", "-lgrpc", "-lgpr", "-labsl_synchronization"]
    compiler = needed.program(os.environ.get("CXX", "c++"), "g++")
    build(program, [compiler, *flags, str(PROGRAMS / "grpc/echo_grpc.cc"), *libraries])
    return str(program)


def test_echo(stage: Stage, echo: str) -> None:
    """Calls of 0 B to 5 MB and streams of 4 KiB messages come back as they were sent, before and after promotion."""
    server, port = stage.serve(lambda port: [echo, "server", str(port)])
    client = stage.converse("client", [echo, "client", str(port), str(CONNECTIONS)])
    assert client.line() == "all came back", client.complaint("no answer")
    stage.check_path(port, CONNECTIONS, nudge=client.nudge)
    client.tell("again")
    assert client.line() == "came back again", client.complaint("no answer")
    stage.check_path(port, CONNECTIONS, ring_bytes_min=2 * SENT)
    client.rest()
    assert server.popen.poll() is None, server.complaint("ended")
