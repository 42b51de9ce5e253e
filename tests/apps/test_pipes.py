"""netcat and socat: bytes from pipe to pipe, both ways at once, with the end of each direction seen."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from stage import Program, Stage, payload, require, sha256

SIZE = 16_000_000


class Feeder(threading.Thread):
    """Writes `data` to a program but for the last byte, which `finish` sends, so the connection lives until then."""

    def __init__(self, program: Program, data: bytes) -> None:
        super().__init__(daemon=True)
        self.program, self.data = program, data
        self.error: OSError | None = None

    def run(self) -> None:
        try:
            self.program.stdin.write(self.data[:-1])
            self.program.stdin.flush()
        except OSError as error:
            self.error = error

    def finish(self) -> None:
        self.join()
        if self.error:
            raise self.error
        self.program.stdin.write(self.data[-1:])
        self.program.stdin.close()


class Collector(threading.Thread):
    """Reads a program's output to its end."""

    def __init__(self, program: Program) -> None:
        super().__init__(daemon=True)
        self.program = program
        self.data = bytearray()
        self.error: AssertionError | None = None
        self.start()

    def run(self) -> None:
        try:
            while piece := self.program.read(1 << 20):
                self.data += piece
        except AssertionError as error:
            self.error = error

    def checksum(self) -> str:
        self.join()
        if self.error:
            raise self.error
        return sha256(bytes(self.data))


def exchange(stage: Stage, port: int, server: Program, client: Program) -> None:
    """Send SIZE bytes each way at the same time, look at the path before the last byte, and compare checksums."""
    forth, back = payload(SIZE, seed=1), payload(SIZE, seed=2)
    collectors = Collector(server), Collector(client)
    feeders = Feeder(client, forth), Feeder(server, back)
    for feeder in feeders:
        feeder.start()
    for feeder in feeders:
        feeder.join()
    stage.check_path(port, ring_bytes_min=SIZE)
    for feeder in feeders:
        feeder.finish()
    assert collectors[0].checksum() == sha256(forth)
    assert collectors[1].checksum() == sha256(back)
    client.expect_exit()
    server.expect_exit()


@pytest.fixture
def nc() -> Iterator[str]:
    """The OpenBSD netcat: the only one that can half-close (-N)."""
    yield require("nc.openbsd")


def test_netcat_both_ways(stage: Stage, nc: str) -> None:
    """16 MB each way through nc, which ends when both directions have ended."""
    server, port = stage.serve(lambda port: [nc, "-N", "-l", "127.0.0.1", str(port)], stdin=-1, stdout=-1)
    client = stage.converse("client", [nc, "-N", "127.0.0.1", str(port)])
    exchange(stage, port, server, client)


def test_netcat_one_way(stage: Stage, nc: str) -> None:
    """A stream in one direction, ended by the sender: the receiver sees every byte and then the end."""
    server, port = stage.serve(lambda port: [nc, "-d", "-l", "127.0.0.1", str(port)], stdout=-1)
    client = stage.converse("client", [nc, "-N", "127.0.0.1", str(port)])
    data = payload(SIZE)
    collector = Collector(server)
    feeder = Feeder(client, data)
    feeder.start()
    feeder.join()
    stage.check_path(port)
    feeder.finish()
    assert collector.checksum() == sha256(data)
    client.expect_exit()
    server.expect_exit()


def test_socat_both_ways(stage: Stage) -> None:
    """16 MB each way through socat's select loop."""
    socat = require("socat")
    server, port = stage.serve(
        lambda port: [socat, "-t", "20", "STDIO", f"TCP4-LISTEN:{port},bind=127.0.0.1"], stdin=-1, stdout=-1
    )
    client = stage.converse("client", [socat, "-t", "20", "STDIO", f"TCP4:127.0.0.1:{port}"])
    exchange(stage, port, server, client)


def test_socat_forked_echo(stage: Stage) -> None:
    """A child for each connection echoes through an executed `cat`; three clients at once."""
    socat = require("socat")
    _, port = stage.serve(
        lambda port: [socat, "-t", "20", f"TCP4-LISTEN:{port},bind=127.0.0.1,fork", f"EXEC:{require('cat')}"]
    )
    clients = [
        stage.converse("client", [socat, "-t", "20", "STDIO", f"TCP4:127.0.0.1:{port}"]) for _ in range(3)
    ]
    data = [payload(2_000_000, seed=n) for n in range(len(clients))]
    collectors = [Collector(client) for client in clients]
    feeders = [Feeder(client, part) for client, part in zip(clients, data, strict=True)]
    for feeder in feeders:
        feeder.start()
    for feeder in feeders:
        feeder.join()
    stage.check_path(port, len(clients))
    for feeder in feeders:
        feeder.finish()
    assert [collector.checksum() for collector in collectors] == [sha256(part) for part in data]
    for client in clients:
        client.expect_exit()


def test_socat_ipv6(stage: Stage) -> None:
    """The same over IPv6."""
    socat = require("socat")
    server, port = stage.serve(
        lambda port: [socat, "-t", "20", "STDIO", f"TCP6-LISTEN:{port},bind=[::1]"], stdin=-1, stdout=-1
    )
    client = stage.converse("client", [socat, "-t", "20", "STDIO", f"TCP6:[::1]:{port}"])
    exchange(stage, port, server, client)
