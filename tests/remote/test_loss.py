"""Whatever is lost, both programs see what TCP would have shown them, or go on over TCP without a byte missing."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from common import PATIENCE_S
from hosts import Host
from talking import PORT, TALKERS, ends_well, line, on_tcp, promoted, serving, talking

pytestmark = pytest.mark.slow


def test_the_rdma_connection_is_cut_and_tcp_goes_on(two: tuple[Host, Host]) -> None:
    one, other = two
    serving(other)
    client = talking(one, other.address, size=50_000)
    promoted(one, other)
    one.cut_rdma(spared_port=PORT)
    on_tcp(one, other)
    ends_well(client)
    assert not one.counter("relay_reset") + other.counter("relay_reset")


def test_many_are_cut_at_once_under_load(two: tuple[Host, Host]) -> None:
    one, other = two
    serving(other)
    clients = [talking(one, other.address, size=20_000, pause_s=0) for _ in range(8)]
    promoted(one, other, ends=8)
    one.cut_rdma(spared_port=PORT)
    for client in clients:
        ends_well(client)
    assert not one.counter("relay_reset") + other.counter("relay_reset")


def test_a_link_that_comes_back_costs_nothing_but_time(two: tuple[Host, Host]) -> None:
    one, other = two
    serving(other)
    client = talking(one, other.address)
    promoted(one, other)
    other.link("down")
    time.sleep(2)  # shorter than either TCP or the device gives up
    other.link("up")
    ends_well(client)


def test_a_host_that_is_gone_for_ever_is_found_by_keepalive(two: tuple[Host, Host]) -> None:
    one, other = two
    for host in two:
        host.plain(["sysctl", "-qw", *(f"net.ipv4.tcp_keepalive_{name}" for name in ("time=1", "intvl=1", "probes=3"))])
    server = serving(other)
    client = talking(one, other.address)
    promoted(one, other)
    other.link("down")
    assert line(client).startswith("Connection timed out after ")
    assert line(server) == "server: Connection timed out"


@pytest.mark.parametrize("whose", ["opener's", "acceptor's"])
def test_a_provider_that_is_killed_resets_what_it_held(two: tuple[Host, Host], whose: str) -> None:
    one, other = two
    server = serving(other)
    client = talking(one, other.address)
    promoted(one, other)
    (one if whose == "opener's" else other).sidestep.kill_provider()
    assert line(client).startswith("Connection reset by peer after ")
    assert line(server) == "server: Connection reset by peer"
    client = talking(one, other.address)  # without a provider
    ends_well(client)


def leaving(host: Host, to: Host) -> subprocess.Popen[str]:
    """A program with a promoted connection, about to send its last bytes and to close."""
    argv = [*TALKERS, "leave", to.address, str(PORT), "5000"]
    client = host.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert line(client) == "talks"
    promoted(host, to)
    print(file=client.stdin, flush=True)
    assert line(client) == "is quiet"
    return client


@pytest.mark.parametrize("restarted", [False, True], ids=["gone", "restarted"])
def test_a_provider_that_dies_with_the_last_bytes_is_found_out(two: tuple[Host, Host], *, restarted: bool) -> None:
    """TCP has brought the end of a program that closed, and nobody lives who knows how many bytes came before it."""
    one, other = two
    server = serving(other)
    client = leaving(one, other)
    os.kill(one.sidestep.provider_pid, signal.SIGSTOP)
    print(file=client.stdin, flush=True)
    assert client.wait(PATIENCE_S) == 0
    one.sidestep.kill_provider()
    if restarted:
        one.restart_provider()
    assert line(server) == "server: Connection reset by peer"


def test_a_provider_that_cannot_leave_in_time_keeps_nobody_waiting(two: tuple[Host, Host]) -> None:
    """The other one stands still while it is told to go, and a program has closed with bytes on their way."""
    one, other = two
    serving(other)
    client = leaving(one, other)
    os.kill(other.sidestep.provider_pid, signal.SIGSTOP)
    print(file=client.stdin, flush=True)
    assert client.wait(PATIENCE_S) == 0
    one.sidestep.kill_provider(signal.SIGTERM)
    os.kill(other.sidestep.provider_pid, signal.SIGCONT)
    other.sidestep.wait_for(lambda found: not found)  # the server has heard an end, the stream's or a reset


@pytest.mark.parametrize("whose", ["opener's", "acceptor's"])
def test_a_provider_that_is_told_to_go_leaves_tcp_behind(two: tuple[Host, Host], whose: str) -> None:
    one, other = two
    serving(other)
    client = talking(one, other.address)
    promoted(one, other)
    (one if whose == "opener's" else other).sidestep.kill_provider(signal.SIGTERM)
    ends_well(client)


def test_a_program_that_is_killed_ends_as_over_tcp(two: tuple[Host, Host]) -> None:
    one, other = two
    server = serving(other)
    client = talking(one, other.address, pause_s=0.1)
    promoted(one, other)
    server.kill()
    assert line(client).startswith(("end after ", "Connection reset by peer after "))


def test_the_host_of_a_cut_connection_has_forgotten_it(two: tuple[Host, Host]) -> None:
    one, other = two
    serving(other)
    client = talking(one, other.address)
    promoted(one, other)
    other.restart_provider()
    assert line(client).startswith("Connection reset by peer after ")
    client = talking(one, other.address)
    promoted(one, other)
    ends_well(client)
