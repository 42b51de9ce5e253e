"""Asking the kernel who holds a connection, about real connections."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from sidestep.provider.proof import lookup as proof
from sidestep.provider.proof.lookup import SocketProver
from sidestep.switch.offers import ConnectionKey


@pytest.fixture
def prover() -> Iterator[SocketProver]:
    made = SocketProver()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.9")]
)
def test_both_ends_of_a_connection_are_confirmed(
    prover: SocketProver, tcp_pair: Callable[..., tuple[socket.socket, socket.socket]],
    family: socket.AddressFamily, host: str,
) -> None:  # fmt: skip
    for end in tcp_pair(host, family):
        assert prover.holds(proof.connection_key(end, 0), proof.socket_cookie(end))


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_what_tcp_has_brought_is_counted(
    prover: SocketProver, tcp_pair: Callable[..., tuple[socket.socket, socket.socket]],
    family: socket.AddressFamily, host: str,
) -> None:  # fmt: skip
    active, passive = tcp_pair(host, family)
    key, cookie = proof.connection_key(passive, 0), proof.socket_cookie(passive)
    assert prover.received(key, cookie) == 0
    active.sendall(b"a" * 300)
    assert prover.received(key, cookie) == 300
    assert passive.recv(1000) == b"a" * 300
    active.shutdown(socket.SHUT_WR)
    assert prover.received(key, cookie) in (300, 301)
    assert prover.received(key, cookie + 1) is None


def test_a_v4_mapped_end_is_found_as_the_v4_connection_it_is(prover: SocketProver) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        active = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
        passive, _ = server.accept()
    with active, passive:
        assert passive.family == socket.AF_INET6
        assert proof.connection_key(passive, 0).mirrored() == proof.connection_key(active, 0)
        assert prover.holds(proof.connection_key(passive, 0), proof.socket_cookie(passive))


def test_another_cookie_or_port_is_not_confirmed(
    prover: SocketProver, tcp_pair: Callable[..., tuple[socket.socket, socket.socket]]
) -> None:
    active, passive = tcp_pair()
    key = proof.connection_key(active, 0)
    assert not prover.holds(key, proof.socket_cookie(passive))
    assert not prover.holds(key, proof.socket_cookie(active) + 1)
    assert not prover.holds(key, 0)
    assert not prover.holds(key, 2**64 - 1)  # the kernel's own "any cookie"
    assert not prover.holds(key.mirrored(), proof.socket_cookie(active))
    assert not prover.holds(key._replace(remote_port=key.remote_port ^ 1), proof.socket_cookie(active))


def test_a_listener_does_not_pass_for_a_connection(prover: SocketProver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        local = proof.mapped_address("127.0.0.1")
        port = server.getsockname()[1]
        key = ConnectionKey(0, local, port, local, 1)
        assert not prover.holds(key, proof.socket_cookie(server))


def test_a_closed_connection_is_not_confirmed(
    prover: SocketProver, tcp_pair: Callable[..., tuple[socket.socket, socket.socket]]
) -> None:
    active, passive = tcp_pair()
    key, cookie = proof.connection_key(active, 0), proof.socket_cookie(active)
    active.close()  # it closes first and lingers in TIME_WAIT, held by nobody
    passive.close()
    assert not prover.holds(key, cookie)


@pytest.mark.parametrize("unsent", [0, 8_000_000])
def test_a_connection_whose_end_the_kernel_keeps_is_held_by_nobody(
    prover: SocketProver, tcp_pair: Callable[..., tuple[socket.socket, socket.socket]], unsent: int
) -> None:
    """FIN-WAIT-2 for a minute, or FIN-WAIT-1 until all is sent: the process has gone all the same."""
    active, passive = tcp_pair()
    key, cookie = proof.connection_key(active, 0), proof.socket_cookie(active)
    if unsent:
        active.setblocking(False)
        active.send(bytes(unsent))
    active.shutdown(socket.SHUT_WR)
    assert unsent or passive.recv(1) == b""
    assert prover.holds(key, cookie)
    active.close()
    assert not prover.holds(key, cookie)
