"""Ordinary SDP of another host, for programs of this one that know only TCP."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hosts import NETWORK, Host, Make
from standard_peer import StandardPeer
from talking import PORT, TALKERS, ends_well, line, promoted, serving, talking

from sidestep.api.sockets import MSG_WAITALL, SHUT_WR
from sidestep.sdp.portmapper import PortMapKind
from sidestep.sdp.settings import Carrier
from sidestep.settings import RemoteSettings

pytestmark = pytest.mark.slow


@contextmanager
def peer_at(host: Host, carrier: Carrier = Carrier.IWARP) -> Iterator[StandardPeer]:
    """A standard peer beside that host's provider."""
    with host.namespace.inside(), ExitStack() as closing:
        yield StandardPeer(closing, host.address, carrier)


@contextmanager
def plain_server(host: Host) -> Iterator[None]:
    """An echo server that knows only TCP."""
    with host.namespace.inside():
        server = subprocess.Popen([*TALKERS, "serve", host.address, str(PORT)], stdout=subprocess.PIPE, text=True)
    with server:
        try:
            assert line(server) == "listens"
            yield
        finally:
            server.kill()


def echoes(peer: StandardPeer, host: Host, rdma_port: int, size: int) -> None:
    """Bytes come back as they went out, and the end behind them."""
    data = random.Random(size).randbytes(size)
    room = bytearray(size)
    with peer.connect(host.address, rdma_port) as sock:
        for start in range(0, size, 100_000):
            sock.sendall(data[start : start + 100_000])
            end = min(start + 100_000, size)
            assert sock.recv_into(memoryview(room)[start:end], flags=MSG_WAITALL) == end - start
        sock.shutdown(SHUT_WR)
        assert sock.recv(1) == b""
    assert room == data


@pytest.fixture
def make_hosts(make_hosts: Make, tmp_path: Path) -> Make:
    """Other hosts are let in everywhere, unless a test has a policy of its own."""
    rules = tmp_path / "let-in.conf"
    rules.write_text("use both listen * *:*\n")
    return lambda count, **options: make_hosts(count, **{"policy": rules} | options)


@pytest.mark.parametrize("carrier", list(Carrier))
def test_a_standard_peer_reaches_a_program_that_knows_only_tcp(two: tuple[Host, Host], carrier: Carrier) -> None:
    one, other = two
    with plain_server(other), peer_at(one, carrier) as peer:
        answer = peer.ask(other.address, PORT)
        assert answer.kind is PortMapKind.ACCEPT
        assert 0 < answer.lifetime_s <= 45
        assert peer.ask(other.address, PORT).ap_port == answer.ap_port
        for size in (1, 100_000, 3_000_000):
            echoes(peer, other, answer.ap_port, size)
    assert other.counter("visit_accepted") == 3
    assert other.counter("remote_joined") == 0


def test_the_listener_sees_this_host_at_the_address_that_was_asked_for(two: tuple[Host, Host]) -> None:
    one, other = two
    with other.namespace.inside():
        listener = socket.create_server(("0.0.0.0", PORT))
    with listener, peer_at(one) as peer, peer.connect(other.address, peer.ask(other.address, PORT).ap_port) as sock:
        accepted, who = listener.accept()
        with accepted:
            assert (who[0], accepted.getsockname()) == (other.address, (other.address, PORT))
            sock.sendall(b"hello")
            assert accepted.recv(5, socket.MSG_WAITALL) == b"hello"


def test_nobody_listens(two: tuple[Host, Host]) -> None:
    one, other = two
    with peer_at(one) as peer:
        assert peer.ask(other.address, PORT).kind is PortMapKind.DENY
        with plain_server(other):
            answer = peer.ask(other.address, PORT)
        with pytest.raises(ConnectionRefusedError):  # the program has gone, and its RDMA port not yet
            peer.connect(other.address, answer.ap_port)
        assert peer.ask(other.address, PORT).kind is PortMapKind.DENY
    assert other.counter("visit_refused") == 1


def test_a_listener_whose_queue_is_full(two: tuple[Host, Host]) -> None:
    one, other = two
    with ExitStack() as closing:
        with other.namespace.inside():
            listener = closing.enter_context(socket.create_server((other.address, PORT), backlog=0))
            closing.enter_context(socket.create_connection((other.address, PORT)))
        peer = closing.enter_context(peer_at(one))
        answer = peer.ask(other.address, PORT)
        with pytest.raises(ConnectionRefusedError):
            peer.connect(other.address, answer.ap_port)
        listener.accept()[0].close()
        peer.connect(other.address, answer.ap_port).close()  # there is room again


def test_a_reset_of_the_program_arrives(two: tuple[Host, Host]) -> None:
    one, other = two
    with other.namespace.inside():
        listener = socket.create_server((other.address, PORT))
    with listener, peer_at(one) as peer, peer.connect(other.address, peer.ask(other.address, PORT).ap_port) as sock:
        accepted, _ = listener.accept()
        sock.sendall(b"never read")
        accepted.recv(1)
        accepted.close()  # with unread bytes
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (f"use tcp listen * *:{PORT}", PortMapKind.DENY),
        (f"use tcp listen {Path(sys.executable).name} *:{PORT}", PortMapKind.DENY),
        ("use tcp listen nginx *:*", PortMapKind.DENY),  # no rule says otherwise
        ("use both listen * *:*", PortMapKind.ACCEPT),
        (f"use sdp listen * *:{PORT}\nuse tcp listen * *:*", PortMapKind.ACCEPT),
        ("use local listen * *:*", PortMapKind.DENY),
    ],
)
def test_the_policy_says_who_may_be_reached(make_hosts: Make, tmp_path: Path, rule: str, kind: PortMapKind) -> None:
    policy = tmp_path / "policy.conf"
    policy.write_text(rule + "\n")
    one, other = make_hosts(2, policy=policy)
    with plain_server(other), peer_at(one) as peer:
        answer = peer.ask(other.address, PORT)
        assert answer.kind is kind
        if kind is PortMapKind.ACCEPT:
            echoes(peer, other, answer.ap_port, 1000)


def test_a_host_that_is_not_trusted(make_hosts: Make) -> None:
    one, other = make_hosts(2, remote=RemoteSettings.parse("198.18.7.9"))
    with plain_server(other), peer_at(one) as peer:
        assert peer.ask(other.address, PORT).kind is PortMapKind.DENY


def test_with_a_key_nobody_comes_in_without(make_hosts: Make, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 40)
    key.chmod(0o600)
    one, other = make_hosts(2, remote=RemoteSettings.parse(NETWORK, str(key)))
    with plain_server(other), peer_at(one) as peer:
        assert peer.ask(other.address, PORT).kind is PortMapKind.DENY


def test_what_sidestep_promotes_and_ordinary_sdp_reach_the_same_service(two: tuple[Host, Host]) -> None:
    one, other = two
    serving(other)
    client = talking(one, other.address)
    promoted(one, other)
    with peer_at(one) as peer:
        echoes(peer, other, peer.ask(other.address, PORT).ap_port, 100_000)
    ends_well(client)
    assert (other.joined("accept"), other.counter("visit_accepted")) == (1, 1)


def test_an_ordinary_request_at_the_providers_own_port_is_rejected(two: tuple[Host, Host]) -> None:
    one, other = two
    with plain_server(other), peer_at(one) as peer:
        own = peer.ask(other.address, 0)
        assert own.kind is PortMapKind.ACCEPT
        with pytest.raises(ConnectionRefusedError):
            peer.connect(other.address, own.ap_port)
