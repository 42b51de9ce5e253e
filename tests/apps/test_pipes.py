"""netcat and socat: bytes from pipe to pipe, both ways at once, with the end of each direction seen."""

from __future__ import annotations

import sys

import needed
import pytest
from flow import Collector, Feeder
from stage import Mode, Program, Stage, all_of, payload, sha256, wait_until

SIZE = 16_000_000


def exchange(stage: Stage, port: int, server: Program, client: Program) -> None:
    """Send SIZE bytes each way at the same time, look at the path before the last byte, and compare checksums."""
    forth, back = payload(SIZE, seed=1), payload(SIZE, seed=2)
    to_server, to_client = Collector(server), Collector(client)
    feeders = by_client, by_server = Feeder(client, forth), Feeder(server, back)
    for feeder in feeders:
        feeder.nudge()
    stage.check_path(port, nudge=all_of(*(feeder.nudge for feeder in feeders)))
    ring_bytes_min = by_client.left + by_server.left - 2  # all that is still to come but the last byte each
    for feeder in feeders:
        feeder.start()
    for feeder in feeders:
        feeder.join()
    stage.check_path(port, ring_bytes_min=ring_bytes_min)
    # A listening nc leaves at the client's end of stream, whatever its own input holds: the server's ends first.
    by_server.finish()
    wait_until(lambda: len(to_client.data) >= SIZE, "the client to write all that the server sent")
    by_client.finish()
    assert to_server.checksum() == sha256(forth)
    assert to_client.checksum() == sha256(back)
    client.expect_exit()
    server.expect_exit()


@pytest.fixture
def nc() -> str:
    """The OpenBSD netcat: the only one that can half-close (-N)."""
    return needed.program("nc.openbsd")


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
    Feeder(client, data).feed_by_ring(stage, port)
    assert collector.checksum() == sha256(data)
    client.expect_exit()
    server.expect_exit()


ONE_CALL = "import socket, sys; socket.create_connection(('127.0.0.1', {port})).sendall(sys.stdin.buffer.read())"


def test_one_call_of_a_whole_stream(stage: Stage, nc: str) -> None:
    """A program of one thread sends a new connection's whole stream by one call; most of it goes by ring."""
    server, port = stage.serve(lambda port: [nc, "-d", "-l", "127.0.0.1", str(port)], stdout=-1)
    client = stage.converse("client", [sys.executable, "-c", ONE_CALL.format(port=port)])
    data = payload(4 * SIZE)
    collector = Collector(server)
    feeder = Feeder(client, data)
    feeder.start()
    feeder.join()
    feeder.finish()
    assert collector.checksum() == sha256(data)
    client.expect_exit()
    server.expect_exit()
    if stage.mode is Mode.BOTH:
        assert stage.ring_share(port) > 0.5


def test_socat_both_ways(stage: Stage) -> None:
    """16 MB each way through socat's select loop."""
    socat = needed.program("socat")
    server, port = stage.serve(
        lambda port: [socat, "-t", "20", "STDIO", f"TCP4-LISTEN:{port},bind=127.0.0.1"], stdin=-1, stdout=-1
    )
    client = stage.converse("client", [socat, "-t", "20", "STDIO", f"TCP4:127.0.0.1:{port}"])
    exchange(stage, port, server, client)


def test_socat_forked_echo(stage: Stage) -> None:
    """A child for each connection echoes through an executed `cat`; three clients at once."""
    socat = needed.program("socat")
    _, port = stage.serve(
        lambda port: [socat, "-t", "20", f"TCP4-LISTEN:{port},bind=127.0.0.1,fork", f"EXEC:{needed.program('cat')}"]
    )
    clients = [stage.converse("client", [socat, "-t", "20", "STDIO", f"TCP4:127.0.0.1:{port}"]) for _ in range(3)]
    data = [payload(2_000_000, seed=n) for n in range(len(clients))]
    collectors = [Collector(client) for client in clients]
    feeders = [Feeder(client, part) for client, part in zip(clients, data, strict=True)]
    for feeder in feeders:
        feeder.nudge()
    stage.check_path(port, len(clients), nudge=all_of(*(feeder.nudge for feeder in feeders)))
    for feeder in feeders:
        feeder.start()
    for feeder in feeders:
        feeder.join()
    for feeder in feeders:
        feeder.finish()
    assert [collector.checksum() for collector in collectors] == [sha256(part) for part in data]
    for client in clients:
        client.expect_exit()


def test_socat_ipv6(stage: Stage) -> None:
    """The same over IPv6."""
    socat = needed.program("socat")
    server, port = stage.serve(
        lambda port: [socat, "-t", "20", "STDIO", f"TCP6-LISTEN:{port},bind=[::1]"], stdin=-1, stdout=-1
    )
    client = stage.converse("client", [socat, "-t", "20", "STDIO", f"TCP6:[::1]:{port}"])
    exchange(stage, port, server, client)
