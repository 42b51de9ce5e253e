"""SDP of Python programs between two hosts: with each other, with a provider that serves TCP programs, by a gateway."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Host, Make
from talking import PORT, PYTHON_SDP, TALKERS, line, running, talks

from sidestep.sdp.portmapper import UDP_PORT

pytestmark = pytest.mark.slow

SIDESTEP = Path(sys.executable).with_name("sidestep")


def refused(host: Host, address: str) -> bool:
    """Whether a client hears that there is no such service."""
    with host.namespace.inside():
        argv = [*PYTHON_SDP, "talk", address, str(PORT), "0", "1"]
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    return done.returncode != 0 and "ConnectionRefusedError" in done.stderr


@pytest.fixture
def bare(make_hosts: Make) -> tuple[Host, Host]:
    """Two hosts whose providers carry nothing between hosts: their port mappers are free."""
    one, other = make_hosts(2, remote=None)
    return one, other


@pytest.mark.parametrize("server", ["serve", "serve-async"])
@pytest.mark.parametrize("client", ["talk", "talk-async"])
def test_two_programs_find_each_other(bare: tuple[Host, Host], server: str, client: str) -> None:
    one, other = bare
    with running(other, *PYTHON_SDP, server, other.address, str(PORT), says="listens True"):
        placed = talks(one, client, other.address)
    assert placed >= 2_900_000, "the large one went by Zcopy"


def test_by_ipv6_at_a_given_port_while_nobody_answers(bare: tuple[Host, Host]) -> None:
    one, other = bare
    with running(other, *PYTHON_SDP, "serve", other.address6, str(PORT), says="listens True"):
        talks(one, "talk", other.address6, rdma_port=PORT)
        talks(one, "talk", other.address6)


def test_two_servers_of_a_host(bare: tuple[Host, Host]) -> None:
    """The first one answers the port mapper's questions for both."""
    one, other = bare
    with (
        running(other, *PYTHON_SDP, "serve", other.address, str(PORT + 1), says="listens True"),
        running(other, *PYTHON_SDP, "serve", other.address, str(PORT), says="listens False"),
    ):
        talks(one, "talk", other.address)


def test_a_host_whose_port_mapper_is_silent_is_tried_at_the_services_own_number(bare: tuple[Host, Host]) -> None:
    one, other = bare
    with other.namespace.inside():
        silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with silent:
        silent.bind(("", UDP_PORT))
        with running(other, *PYTHON_SDP, "serve", other.address, str(PORT), says="listens False"):
            talks(one, "talk", other.address, sizes=[1])
            assert silent.recv(128, socket.MSG_DONTWAIT), "it was asked"
        assert refused(one, other.address)  # now nobody is there


def test_a_provider_at_the_server_does_not_know_it_and_an_explicit_port_reaches_it(two: tuple[Host, Host]) -> None:
    one, other = two
    with running(other, *PYTHON_SDP, "serve", other.address, str(PORT), says="listens False"):
        assert refused(one, other.address)
        assert talks(one, "talk", other.address, rdma_port=PORT) >= 2_900_000


@pytest.fixture
def letting_in(make_hosts: Make, tmp_path: Path) -> tuple[Host, Host]:
    """Two hosts that let each other in everywhere."""
    rules = tmp_path / "let-in.conf"
    rules.write_text("use both listen * *:*\n")
    one, other = make_hosts(2, policy=rules)
    return one, other


@pytest.mark.parametrize("client", ["talk", "talk-async"])
def test_a_program_of_another_host_that_knows_only_tcp(letting_in: tuple[Host, Host], client: str) -> None:
    """It listens under `sidestep run`, or not: its host's provider serves it."""
    one, other = letting_in
    with running(other, *TALKERS, "serve", other.address, str(PORT), says="listens"):
        placed = talks(one, client, other.address)
    assert other.counter("visit_accepted") == 1
    assert placed > 2_000_000


def test_a_program_under_sidestep_run(letting_in: tuple[Host, Host]) -> None:
    one, other = letting_in
    server = other.popen([*TALKERS, "serve", other.address, str(PORT)], stdout=subprocess.PIPE, text=True)
    assert line(server) == "listens"
    talks(one, "talk", other.address)
    assert other.counter("visit_accepted") == 1


def test_tcp_clients_reach_a_python_server_by_a_gateway(bare: tuple[Host, Host]) -> None:
    one, other = bare
    rule = f"tcp {one.address}:{PORT} to sdp {other.address}:{PORT}"
    with running(other, *PYTHON_SDP, "serve", other.address, str(PORT), says="listens True"):
        with one.namespace.inside():
            gateway = subprocess.Popen([SIDESTEP, "gateway", "--json", rule], stdout=subprocess.PIPE, text=True)
        with gateway:
            try:
                assert "rules" in line(gateway)
                talk = [*TALKERS, "talk", one.address, str(PORT), "0.3", "300000"]
                with running(other, *talk, says="talks") as client:
                    assert line(client).startswith("right: ")
                    assert line(client) == "the end came"
            finally:
                gateway.kill()


def test_a_python_client_reaches_a_tcp_server_by_a_gateway(bare: tuple[Host, Host]) -> None:
    one, other = bare
    rule = f"sdp {other.address}:{PORT} to tcp {other.address}:{PORT + 1}"
    with running(other, *TALKERS, "serve", other.address, str(PORT + 1), says="listens"):
        with other.namespace.inside():
            gateway = subprocess.Popen([SIDESTEP, "gateway", "--json", rule], stdout=subprocess.PIPE, text=True)
        with gateway:
            try:
                assert "rules" in line(gateway)
                for client in ("talk", "talk-async"):
                    talks(one, client, other.address)
            finally:
                gateway.kill()
