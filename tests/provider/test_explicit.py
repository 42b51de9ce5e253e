"""What the provider answers to explicit sockets: real clients, real sockets, and protocols that fail."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from common import eventually, forked, standing_still
from ledger import WITNESS_NUMBER, Book, install
from shim_client import ShimClient

from sidestep import limits
from sidestep.native.layout import IPPROTO_SDP, Ask, Refusal, Rpc
from sidestep.provider import control, rpc
from sidestep.provider.proof import lookup as proof
from sidestep.provider.rpc import Message
from sidestep.testing import Sidestep

MakeClient = Callable[[], ShimClient]
UNKNOWN_NUMBER = IPPROTO_SDP + 77
_CLONE_NEWNET = 0x40000000  # sched.h; os.unshare came with Python 3.12


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Book:
    """What the protocols `ledger` and `witness` are told, which the provider finds installed."""
    return install(tmp_path, monkeypatch)


@pytest.fixture
def sidestep(book: Book) -> Iterator[Sidestep]:
    """A private provider with these protocols."""
    with Sidestep() as private:
        yield private


class Bound:
    """A TCP socket bound to a port, and the two ends of the pipe that says so."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, reuse_port: bool = False) -> None:
        self.sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        if reuse_port:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.sock.bind((host, port))
        self.address: tuple[str, int] = self.sock.getsockname()[:2]
        self.reader, self.writer = os.pipe()

    @property
    def endpoint(self) -> str:
        """As the protocols write it."""
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def ask(self, client: ShimClient, protocol: int = 0) -> Message:
        """May the protocols have that port?"""
        answer = client.ask(Ask.BIND, protocol=protocol, local=self.address, fds=[self.sock.fileno(), self.reader])
        os.close(self.reader)
        self.reader = -1
        return answer

    def close(self) -> None:
        """As a process ends."""
        self.sock.close()
        for fd in (self.reader, self.writer):
            if fd >= 0:
                os.close(fd)
        self.reader = self.writer = -1


@pytest.fixture
def bound(closing: ExitStack) -> Callable[..., Bound]:
    """Makes sockets that are closed after the test."""

    def make(*args: Any, **kwargs: Any) -> Bound:
        made = Bound(*args, **kwargs)
        closing.callback(made.close)
        return made

    return make


def counters(sidestep: Sidestep) -> dict[str, int]:
    """The provider's counters."""
    found: dict[str, int] = sidestep.status()["counters"]
    return found


# ---- opening ----


@pytest.mark.parametrize(
    ("protocol", "host", "error"),
    [
        (0, "0.0.0.0", 0),
        (0, "::", 0),
        (IPPROTO_SDP, "0.0.0.0", 0),
        (IPPROTO_SDP, "::", 0),
        (WITNESS_NUMBER, "0.0.0.0", 0),
        (WITNESS_NUMBER, "::", errno.EPROTONOSUPPORT),
        (UNKNOWN_NUMBER, "0.0.0.0", errno.EPROTONOSUPPORT),
    ],
)
def test_a_socket_can_be_opened_where_there_is_a_protocol_for_it(
    shim_client: MakeClient, protocol: int, host: str, error: int
) -> None:
    answer = shim_client().ask(Ask.OPEN, protocol=protocol, local=(host, 0))
    assert (answer.error, answer.reason, answer.protocol) == (error, 0, protocol)


def test_without_such_a_protocol_there_is_only_the_wildcard(closing: ExitStack) -> None:
    with Sidestep() as bare:
        client = closing.enter_context(ShimClient(bare.socket))
        client.hello()
        assert client.ask(Ask.OPEN, protocol=IPPROTO_SDP).error == errno.EPROTONOSUPPORT
        assert client.ask(Ask.OPEN).error == 0
        assert counters(bare)["explicit_refused{OPEN_EPROTONOSUPPORT}"] == 1
        assert counters(bare)["explicit_asked{OPEN}"] == 2


# ---- one space of ports ----


def test_all_protocols_get_the_native_port_until_the_lease_ends(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    here = bound()
    assert here.ask(shim_client()).error == 0
    assert book.lines() == [f"ledger bind {here.endpoint}", f"witness bind {here.endpoint}"]
    assert sidestep.status()["explicit_binds"] == 1
    here.close()
    eventually(lambda: len(book.lines()) == 4)
    assert book.lines()[2:] == [f"witness release {here.endpoint}", f"ledger release {here.endpoint}"]
    assert sidestep.status()["explicit_binds"] == 0


def test_a_named_protocol_alone_gets_it(book: Book, shim_client: MakeClient, bound: Callable[..., Bound]) -> None:
    here, there = bound(), bound("::1")
    client = shim_client()
    assert here.ask(client, WITNESS_NUMBER).error == 0
    assert there.ask(client, IPPROTO_SDP).error == 0
    assert book.lines() == [f"witness bind {here.endpoint}", f"ledger bind {there.endpoint}"]
    assert bound("::1").ask(client, WITNESS_NUMBER).error == errno.EPROTONOSUPPORT
    assert bound().ask(client, UNKNOWN_NUMBER).error == errno.EPROTONOSUPPORT


def test_a_v4_mapped_port_is_the_v4_port(book: Book, shim_client: MakeClient, bound: Callable[..., Bound]) -> None:
    here = bound("::ffff:127.0.0.1")
    assert here.ask(shim_client()).error == 0
    assert book.lines()[0] == f"ledger bind 127.0.0.1:{here.address[1]}"


@pytest.mark.parametrize("how", ["EADDRINUSE", "EACCES"])
def test_a_failing_protocol_fails_the_bind_and_the_others_are_released(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound], how: str
) -> None:
    here, client = bound(), shim_client()
    book.refuse("witness", how)
    assert here.ask(client).error == getattr(errno, how)
    assert book.lines() == [
        f"ledger bind {here.endpoint}", f"witness refuse {here.endpoint}", f"ledger release {here.endpoint}",
    ]  # fmt: skip
    assert sidestep.status()["explicit_binds"] == 0
    assert counters(sidestep)[f"explicit_refused{{BIND_{how}}}"] == 1
    with pytest.raises(BrokenPipeError):
        os.write(here.writer, b"x")  # nobody has the other end


def test_a_protocol_that_raises_anything_else_is_no_protocol_any_more(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    here, client = bound(), shim_client()
    book.refuse("ledger", "raise")
    assert here.ask(client).error == 0
    assert book.lines() == ["ledger stop", f"witness bind {here.endpoint}"]
    assert client.ask(Ask.OPEN, protocol=IPPROTO_SDP).error == errno.EPROTONOSUPPORT
    assert counters(sidestep)["module_failed{ledger}"] == 1


def test_what_is_bound_twice_natively_is_bound_once_and_released_by_the_last(
    book: Book, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    one = bound(reuse_port=True)
    other = bound(*one.address, reuse_port=True)
    assert one.ask(shim_client(), IPPROTO_SDP).error == 0
    assert other.ask(shim_client(), IPPROTO_SDP).error == 0
    one.close()
    third = bound(*other.address, reuse_port=True)
    assert third.ask(shim_client(), IPPROTO_SDP).error == 0
    other.close()
    third.close()
    eventually(lambda: len(book.lines()) == 2)
    assert book.lines() == [f"ledger bind {one.endpoint}", f"ledger release {one.endpoint}"]


def test_the_port_is_kept_for_whoever_still_has_the_socket(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    """A process that bound and forked may end: its child has the socket, and with it the lease."""
    here, parent = bound(), shim_client()
    assert here.ask(parent, IPPROTO_SDP).error == 0
    parent.close()
    eventually(lambda: sidestep.status()["shims"] == 0)
    assert book.lines() == [f"ledger bind {here.endpoint}"]
    assert sidestep.status()["explicit_binds"] == 1
    here.close()
    eventually(lambda: book.lines()[-1] == f"ledger release {here.endpoint}")


def test_the_provider_keeps_no_copy_of_the_native_socket(
    book: Book, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    client = shim_client()
    first = bound()
    address = first.address
    assert first.ask(client).error == 0
    first.close()
    for _ in range(50):  # in use if anybody had one
        again = bound(*address)
        assert again.ask(client).error == 0
        again.close()


def test_who_comes_after_finds_the_port_free(book: Book, shim_client: MakeClient, bound: Callable[..., Bound]) -> None:
    """Even where the end of the lease and the next bind reach the provider in one turn."""
    client, first = shim_client(), bound("0.0.0.0")
    assert first.ask(client, IPPROTO_SDP).error == 0
    port = first.address[1]
    for _ in range(20):
        first.close()
        first = bound("127.0.0.1", port)
        assert first.ask(client, IPPROTO_SDP).error == 0
    binds = [line for line in book.lines() if " bind " in line]
    releases = [line for line in book.lines() if " release " in line]
    assert len(binds) == 1 + 20
    assert len(releases) == 20
    assert book.lines()[1] == f"ledger release 0.0.0.0:{port}"


def test_an_end_that_the_successor_made_known_is_heard_once(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    """The request to bind, and then the end of the lease before it, wait for the provider together."""
    client, first = shim_client(), bound("0.0.0.0")
    assert first.ask(client, IPPROTO_SDP).error == 0
    first.sock.close()
    second = bound("127.0.0.1", first.address[1])
    with standing_still(sidestep.provider_pid):
        _ask_bind(client, second.address, [second.sock.fileno(), second.reader], IPPROTO_SDP)
        first.close()
    with (packet := client.receive()).descriptors:
        assert (packet.message.type, packet.message.error) == (Rpc.ANSWER, 0)
    assert sidestep.status()["explicit_binds"] == 1
    assert not any("internal_error" in name for name in counters(sidestep))
    second.close()
    eventually(lambda: sidestep.status()["explicit_binds"] == 0)
    assert book.lines() == [
        f"ledger bind {first.endpoint}", f"ledger release {first.endpoint}",
        f"ledger bind {second.endpoint}", f"ledger release {second.endpoint}",
    ]  # fmt: skip


def test_the_provider_releases_everything_when_it_stops(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    here = bound()
    assert here.ask(shim_client()).error == 0
    sidestep.kill_provider(15)
    assert book.lines()[2:] == [
        f"witness release {here.endpoint}", f"ledger release {here.endpoint}", "ledger stop", "witness stop",
    ]  # fmt: skip


def test_a_protocol_that_was_removed_is_not_told_of_the_end(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    here = bound()
    assert here.ask(shim_client()).error == 0
    with control.ControlConnection(sidestep.socket) as connection:
        connection.request("module_remove", name="ledger")
    here.close()
    eventually(lambda: sidestep.status()["explicit_binds"] == 0)
    assert book.lines()[2:] == ["ledger stop", f"witness release {here.endpoint}"]


# ---- limits ----


def test_one_user_gets_so_many_ports_and_the_next_is_native(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    client = shim_client()
    held = [bound() for _ in range(limits.EXPLICIT_BINDS_PER_USER_MAX)]
    assert {one.ask(client, IPPROTO_SDP).error for one in held} == {0}
    answer = bound().ask(client)
    assert (answer.error, answer.reason) == (0, Refusal.TOO_MANY)
    assert bound().ask(shim_client(), IPPROTO_SDP).error == errno.ENOBUFS, "another connection does not help"
    held[0].close()
    eventually(lambda: sidestep.status()["explicit_binds"] == limits.EXPLICIT_BINDS_PER_USER_MAX - 1)
    assert bound().ask(client, IPPROTO_SDP).error == 0


def test_a_socket_of_another_network_is_native(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, closing: ExitStack
) -> None:
    here = _bound_elsewhere(closing)
    client = shim_client()
    reader, writer = os.pipe()
    closing.callback(os.close, writer)
    closing.callback(os.close, reader)
    fds = [here.fileno(), reader]
    answer = client.ask(Ask.BIND, local=here.getsockname(), fds=fds)
    assert (answer.error, answer.reason) == (0, Refusal.FOREIGN_NETNS)
    answer = client.ask(Ask.BIND, protocol=IPPROTO_SDP, local=here.getsockname(), fds=fds)
    assert answer.error == errno.EADDRNOTAVAIL
    assert book.lines() == []


def _bound_elsewhere(closing: ExitStack) -> socket.socket:
    """A bound socket from a network namespace of its own, made by a child that passes it on."""
    if os.geteuid():
        pytest.skip("a network namespace of its own needs root")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def pass_on() -> int:
        if ctypes.CDLL(None).unshare(_CLONE_NEWNET):
            return 1
        sock = socket.socket()
        sock.bind(("0.0.0.0", 0))
        socket.send_fds(theirs, [b"x"], [sock.fileno()])
        return 0

    with ours, theirs:
        assert os.waitpid(forked(pass_on), 0)[1] == 0
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    return closing.enter_context(socket.socket(fileno=fds[0]))


# ---- listening and connecting ----


@pytest.mark.parametrize(
    ("protocol", "error"),
    [(0, 0), (IPPROTO_SDP, 0), (WITNESS_NUMBER, errno.EOPNOTSUPP), (UNKNOWN_NUMBER, errno.EPROTONOSUPPORT)],
)
def test_a_protocol_listens_if_it_carries_accepted_connections(
    shim_client: MakeClient, protocol: int, error: int
) -> None:
    answer = shim_client().ask(Ask.LISTEN, protocol=protocol, local=("127.0.0.1", 80))
    assert (answer.error, answer.reason) == (error, 0)


@pytest.mark.parametrize(
    ("protocol", "remote", "error"),
    [
        (0, "127.0.0.1", 0),
        (0, "::1", 0),
        (IPPROTO_SDP, "::1", 0),
        (WITNESS_NUMBER, "127.0.0.1", 0),
        (WITNESS_NUMBER, "::1", errno.EPROTONOSUPPORT),
        (UNKNOWN_NUMBER, "127.0.0.1", errno.EPROTONOSUPPORT),
    ],
)
def test_a_connection_is_carried_by_the_protocol_it_names(
    shim_client: MakeClient, protocol: int, remote: str, error: int
) -> None:
    answer = shim_client().ask(Ask.CONNECT, protocol=protocol, remote=(remote, 80))
    assert (answer.error, answer.reason) == (error, 0)


def test_a_protocol_that_knows_no_way_fails_who_insists_on_it(
    sidestep: Sidestep, book: Book, shim_client: MakeClient
) -> None:
    client = shim_client()
    book.refuse("ledger", "no way")
    assert client.ask(Ask.CONNECT, protocol=IPPROTO_SDP, remote=("127.0.0.1", 80)).error == errno.ENETUNREACH
    assert client.ask(Ask.CONNECT, remote=("127.0.0.1", 80)).error == 0, "others do"
    assert counters(sidestep)["explicit_refused{CONNECT_ENETUNREACH}"] == 1


def test_the_policy_holds_for_explicit_sockets(book: Book, closing: ExitStack, tmp_path: Path) -> None:
    """Who does not care goes on natively, who insists is told."""
    rules = tmp_path / "rules"
    rules.write_text("use tcp connect * 127.0.0.1:80\nuse tcp listen * *:81\n")
    with Sidestep(policy=rules) as strict:
        client = closing.enter_context(ShimClient(strict.socket))
        client.hello()
        answer = client.ask(Ask.CONNECT, remote=("127.0.0.1", 80))
        assert (answer.error, answer.reason) == (0, Refusal.POLICY)
        assert client.ask(Ask.CONNECT, protocol=IPPROTO_SDP, remote=("127.0.0.1", 80)).error == errno.EACCES
        assert client.ask(Ask.CONNECT, protocol=IPPROTO_SDP, remote=("127.0.0.1", 81)).error == 0
        assert client.ask(Ask.LISTEN, protocol=IPPROTO_SDP, local=("127.0.0.1", 81)).error == errno.EACCES
        assert client.ask(Ask.LISTEN, local=("127.0.0.1", 81)).error == 0
        assert counters(strict)["explicit_refused{CONNECT_POLICY}"] == 1
        assert counters(strict)["explicit_refused{LISTEN_EACCES}"] == 1


# ---- hostile clients ----


def _malformed(sidestep: Sidestep, client: ShimClient, rule: str = "malformed") -> None:
    """The client is dropped for that, and the provider goes on."""
    assert client.hung_up()
    eventually(lambda: counters(sidestep).get(f"client_dropped{{{rule}}}") == 1)


def _ask_bind(client: ShimClient, local: tuple[str, int], fds: list[int], protocol: int = 0) -> None:
    """Asks without waiting for the answer."""
    address = proof.mapped_address(local[0])
    message = Message(type=Rpc.ASK, flags=Ask.BIND, protocol=protocol, local_addr=address, local_port=local[1])
    rpc.send(client.sock, message, fds)


def test_a_port_that_is_not_held_is_not_reserved(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    here, client = bound(), shim_client()
    _ask_bind(client, ("127.0.0.1", here.address[1] ^ 1), [here.sock.fileno(), here.reader])
    _malformed(sidestep, client, "unproven")
    other = shim_client()
    _ask_bind(other, ("0.0.0.0", here.address[1]), [here.sock.fileno(), here.reader])
    assert other.hung_up()
    assert book.lines() == []


def test_a_socket_that_is_bound_to_nothing_reserves_nothing(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    client, here = shim_client(), bound()
    with socket.socket() as unbound:
        _ask_bind(client, ("0.0.0.0", 0), [unbound.fileno(), here.reader])
        _malformed(sidestep, client, "unproven")
    assert book.lines() == []


@pytest.mark.parametrize("kind", ["file", "unix", "udp", "raw icmp", "none"])
def test_only_a_tcp_socket_proves_a_port(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound], closing: ExitStack, kind: str
) -> None:
    client, here = shim_client(), bound()
    if kind == "raw icmp" and os.geteuid():
        pytest.skip("a raw socket needs root")
    if kind in ("file", "none"):
        fd = os.open("/dev/null", os.O_RDONLY)
        closing.callback(os.close, fd)
    else:
        family, style, number = {
            "unix": (socket.AF_UNIX, socket.SOCK_STREAM, 0),
            "udp": (socket.AF_INET, socket.SOCK_DGRAM, 0),
            "raw icmp": (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        }[kind]
        sock = closing.enter_context(socket.socket(family, style, number))
        if kind == "udp":
            sock.bind(("127.0.0.1", here.address[1]))
        fd = sock.fileno()
    _ask_bind(client, here.address, [] if kind == "none" else [fd, here.reader])
    _malformed(sidestep, client, "malformed" if kind == "none" else "descriptor")
    assert book.lines() == []


def test_a_port_of_one_interface_is_native(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    here, client = bound(), shim_client()
    reader = os.dup(here.reader)
    here.sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
    answer = here.ask(client)
    assert (answer.error, answer.reason) == (0, Refusal.NO_PROTOCOL)
    here.reader = reader
    assert here.ask(client, IPPROTO_SDP).error == errno.EADDRNOTAVAIL
    assert book.lines() == []


@pytest.mark.parametrize("kind", ["writing end", "file", "fifo", "socket", "two-way"])
def test_only_the_reading_end_of_a_pipe_is_a_lease(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound], closing: ExitStack,
    tmp_path: Path, kind: str,
) -> None:  # fmt: skip
    client, here = shim_client(), bound()
    if kind == "writing end":
        fd = here.writer
    elif kind == "socket":
        fd = here.sock.fileno()
    else:
        path = tmp_path / "file"
        if kind == "two-way":
            path = Path(f"/proc/self/fd/{here.reader}")
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.write_bytes(b"")
        fd = os.open(path, os.O_RDWR if kind == "two-way" else os.O_RDONLY | os.O_NONBLOCK)
        closing.callback(os.close, fd)
    _ask_bind(client, here.address, [here.sock.fileno(), fd])
    _malformed(sidestep, client, "descriptor")
    assert book.lines() == []


def test_a_lease_that_speaks_has_ended(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    here = bound()
    assert here.ask(shim_client(), IPPROTO_SDP).error == 0
    os.write(here.writer, b"I hold it")
    eventually(lambda: book.lines()[-1] == f"ledger release {here.endpoint}")
    assert sidestep.status()["explicit_binds"] == 0


def test_descriptors_come_with_a_bind_alone(
    sidestep: Sidestep, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    client, here = shim_client(), bound()
    rpc.send(client.sock, Message(type=Rpc.ASK, flags=Ask.OPEN), [here.reader])
    _malformed(sidestep, client)


def test_an_unknown_question_is_refused(sidestep: Sidestep, shim_client: MakeClient) -> None:
    client = shim_client()
    rpc.send(client.sock, Message(type=Rpc.ASK, flags=99))
    _malformed(sidestep, client)


def test_nobody_else_sends_answers(sidestep: Sidestep, shim_client: MakeClient) -> None:
    client = shim_client()
    rpc.send(client.sock, Message(type=Rpc.ANSWER))
    _malformed(sidestep, client)


def test_the_provider_keeps_no_descriptor_of_what_it_refused(
    sidestep: Sidestep, book: Book, shim_client: MakeClient, bound: Callable[..., Bound]
) -> None:
    client = shim_client()
    book.refuse("ledger", "EADDRINUSE")
    fds = Path(f"/proc/{sidestep.provider_pid}/fd")
    assert bound().ask(client).error == errno.EADDRINUSE
    before = len(list(fds.iterdir()))
    for _ in range(20):
        assert bound().ask(client).error == errno.EADDRINUSE
    assert len(list(fds.iterdir())) == before
