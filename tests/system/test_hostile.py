"""Clients of a system-wide provider that lie, and what becomes of them."""

from __future__ import annotations

import os
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
from shim_client import Channel, ShimClient
from tenants import ALICE, BOB, End, Namespace, System, answer, as_user, udp_beside

from sidestep import limits
from sidestep.errors import Unavailable
from sidestep.native.layout import Refusal, Rpc
from sidestep.provider import control, rpc
from sidestep.provider.proof import lookup as proof
from sidestep.provider.rpc import Message

LINGER_S = 100  # of which a busy machine uses up no half

TcpPair = tuple[socket.socket, socket.socket]
MakePair = Callable[..., TcpPair]
MakeChannel = Callable[..., Channel]
MakeNamespaces = Callable[..., tuple[Namespace, Namespace]]
Join = Callable[..., tuple[End, End]]


def bring(client: ShimClient, kind: Rpc, tcp: socket.socket, channel: Channel, proofs: list[int]) -> None:
    """An OFFER or CLAIM about `tcp`, with other descriptors as proof."""
    own = [channel.doorbell, channel.doorbell_page]
    if kind is Rpc.OFFER:
        assert channel.segment is not None
        own = [channel.segment, *own]
    rpc.send(client.sock, client.message_about(kind, tcp, channel, 1), [*proofs, *own])


def not_a_socket(closing: ExitStack) -> int:
    return closing.enter_context(tempfile.TemporaryFile()).fileno()


def not_a_tcp_socket(closing: ExitStack) -> int:
    return closing.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)).fileno()


def not_an_internet_socket(closing: ExitStack) -> int:
    one, other = socket.socketpair()
    closing.enter_context(other)
    return closing.enter_context(one).fileno()


@pytest.mark.parametrize("wrong", [not_a_socket, not_a_tcp_socket, not_an_internet_socket])
@pytest.mark.parametrize("kind", [Rpc.OFFER, Rpc.CLAIM])
def test_a_duplicate_of_another_kind_costs_the_connection(
    system: System, tcp_pair: MakePair, channel: MakeChannel, closing: ExitStack,
    wrong: Callable[[ExitStack], int], kind: Rpc,
) -> None:  # fmt: skip
    client = system.client(ALICE)
    bring(client, kind, tcp_pair()[0], channel(), [wrong(closing)])
    assert client.hung_up()
    assert system.counter("client_dropped{descriptor}") == 1


@pytest.mark.parametrize("count", [0, 3])
def test_a_wrong_number_of_descriptors_costs_the_connection(
    system: System, tcp_pair: MakePair, channel: MakeChannel, count: int
) -> None:
    client = system.client(ALICE)
    active, _ = tcp_pair()
    bring(client, Rpc.CLAIM, active, channel(None), [active.fileno()] * count)
    assert client.hung_up()
    assert system.counter("client_dropped{malformed}") == 1


def test_a_socket_of_another_connection_proves_nothing(
    system: System, tcp_pair: MakePair, channel: MakeChannel
) -> None:
    """An offer waits for Alice's other end; Bob claims it with a socket of his own."""
    victim, thief = system.client(ALICE), system.client(BOB)
    (active, passive), (mine, _) = tcp_pair(), tcp_pair()
    victim.offer(active, channel(), token=1)
    victim.wait_offer(passive)
    bring(thief, Rpc.CLAIM, passive, channel(None), [mine.fileno()])
    assert answer(thief) is Refusal.NOT_PROVEN
    bring(thief, Rpc.CLAIM, mine, channel(None), [passive.fileno()])
    assert answer(thief) is Refusal.NOT_PROVEN
    bring(thief, Rpc.OFFER, passive, channel(), [mine.fileno()])
    assert answer(thief) is Refusal.NOT_PROVEN
    rightful = system.client(ALICE)
    rightful.claim(passive, channel(None), token=2)
    assert answer(rightful) is Rpc.ATTACH


def test_a_duplicate_that_lingers_holds_nobody_up(system: System, tcp_pair: MakePair, channel: MakeChannel) -> None:
    client = system.client(ALICE)
    active, _ = tcp_pair()
    active.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
    active.setblocking(False)
    with suppress(BlockingIOError):
        while active.send(bytes(1 << 16)):  # more than the peer has room for: it cannot acknowledge the end
            pass
    os.kill(system.pid, signal.SIGSTOP)
    try:
        client.offer(active, channel(), token=1)
        active.close()  # now the provider holds the last one
    finally:
        os.kill(system.pid, signal.SIGCONT)
    before = time.monotonic()
    system.client(BOB)
    assert time.monotonic() - before < LINGER_S / 2


def test_a_socket_without_a_connection_proves_nothing(
    system: System, tcp_pair: MakePair, channel: MakeChannel, closing: ExitStack
) -> None:
    client = system.client(ALICE)
    active, _ = tcp_pair()
    listening = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    fresh = closing.enter_context(socket.socket())
    for number, useless in enumerate((listening, fresh), 1):
        bring(client, Rpc.CLAIM, active, channel(None), [useless.fileno()])
        assert answer(client) is Refusal.NOT_PROVEN
        assert system.counter("claim_refused{NOT_PROVEN}") == number


def test_a_socket_bound_to_an_interface_proves_nothing(
    system: System, tcp_pair: MakePair, channel: MakeChannel
) -> None:
    client = system.client(ALICE)
    active, _ = tcp_pair()
    active.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
    client.offer(active, channel(), token=1)
    assert answer(client) is Refusal.NOT_PROVEN


def unbound(end: End) -> socket.socket:
    return socket.socket(end.tcp.family, socket.SOCK_DGRAM)


def elsewhere(end: End) -> socket.socket:
    made = unbound(end)
    made.bind(("127.0.0.1", 0))
    return made


def connected(end: End) -> socket.socket:
    made = udp_beside(end.tcp)
    made.connect(end.tcp.getpeername())
    return made


def stream(end: End) -> socket.socket:
    made = socket.socket()
    made.bind((end.tcp.getsockname()[0], 0))
    return made


@pytest.mark.parametrize("make", [unbound, elsewhere, connected, stream])
def test_a_udp_socket_that_does_not_fit_costs_the_connection(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel, closing: ExitStack,
    make: Callable[[End], socket.socket],
) -> None:  # fmt: skip
    pair = namespaces()
    active, _ = join(pair)
    client = system.client(ALICE, active.netns)
    way = closing.enter_context(pair[0].run(lambda: make(active)))
    client.offer(active.tcp, channel(), token=1, way=way)
    assert client.hung_up()
    assert system.counter("client_dropped{descriptor}") == 1


def test_a_udp_socket_of_another_namespace_costs_the_connection(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel, closing: ExitStack
) -> None:
    """One from a namespace that does reach the other end, beside a connection of one that does not."""
    true_pair, own_pair = namespaces(), namespaces()
    active, passive = join(true_pair)
    _, thief = join(own_pair)
    offerer, claimer = system.client(ALICE, active.netns), system.client(ALICE, thief.netns)
    offerer.offer(active.tcp, channel(), token=1, way=active.way)
    claimer.wait_offer(thief.tcp)
    claimer.claim(thief.tcp, channel(None), token=1, way=passive.way)
    assert claimer.hung_up()
    assert system.counter("client_dropped{descriptor}") == 1


def test_a_nonce_from_elsewhere_is_not_taken(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel
) -> None:
    """A flood of guesses at the socket where a nonce is expected changes nothing."""
    active, passive = join(namespaces())
    offerer, claimer = system.client(ALICE, active.netns), system.client(ALICE, passive.netns)
    offerer.offer(active.tcp, channel(), token=1, way=active.way)
    claimer.wait_offer(passive.tcp)
    for guess in range(64):
        active.way.sendto(guess.to_bytes(16, "big"), passive.way.getsockname())
    claimer.claim(passive.tcp, channel(None), token=1, way=passive.way)
    assert answer(claimer) is Rpc.ATTACH


def test_a_namespace_that_is_named_wrongly_proves_nothing(
    system: System, tcp_pair: MakePair, channel: MakeChannel
) -> None:
    client = system.client(ALICE)
    active, _ = tcp_pair()
    client.netns_cookie = proof.netns_cookie() + 1
    client.offer(active, channel(), token=1)
    assert answer(client) is Refusal.NOT_PROVEN


def test_many_offers_of_equal_addresses_are_bounded(
    system: System, namespaces: MakeNamespaces, join: Join, channel: MakeChannel
) -> None:
    refused = None
    for _ in range(9):
        active, _ = join(namespaces())
        client = system.client(ALICE, active.netns)
        client.offer(active.tcp, channel(), token=1, way=active.way)
        if system.counter("offer_refused{TOO_MANY}"):
            refused = answer(client)
    assert refused is Refusal.TOO_MANY
    assert system.counter("offer_accepted") == 8


def claim_for_ever(client: ShimClient, tcp: socket.socket, doorbells: Channel) -> None:
    """Claims, without reading an answer, until the provider has had enough."""
    while True:
        try:
            client.claim(tcp, doorbells, token=1)
        except BlockingIOError:
            os.sched_yield()


def test_a_client_that_stands_still_holds_nobody_up(system: System, tcp_pair: MakePair, channel: MakeChannel) -> None:
    """One that sends and never reads is dropped; others are served."""
    deaf = system.client(ALICE)
    active, _ = tcp_pair()
    deaf.sock.setblocking(False)
    with pytest.raises((ConnectionError, BrokenPipeError)):
        claim_for_ever(deaf, active, channel(None))
    assert system.counter("client_dropped{slow}") == 1
    other = system.client(BOB)
    pair = tcp_pair()
    other.offer(pair[0], channel(), token=1)
    other.wait_offer(pair[1])


def test_a_user_who_fills_the_log_silences_nobody_else(system: System) -> None:
    for _ in range(2 * limits.LOG_LINES_MAX):
        stranger = system.stranger(ALICE)
        stranger.sock.send(b"?")
        assert stranger.hung_up()
        stranger.close()
    other = system.stranger(BOB)
    rpc.send(other.sock, Message(type=Rpc.CLAIM))
    assert other.hung_up()
    lines = system.log.read_text().splitlines()
    assert lines[-1].endswith("it began with CLAIM [malformed]")
    assert len(lines) < limits.LOG_LINES_MAX


ODD: tuple[object, ...] = (
    None, True, -1, 1.5, 1 << 31, 1 << 64, -(1 << 70), 10**300, float("nan"), float("inf"), "", "\0", "\ud800",
    "x" * 3000, "../../etc/passwd", "fe80::1%lo", [], [[]], [[0]], [[1 << 64, -1]], [["x", {}]], {},
)  # fmt: skip
PAGE: dict[str, object] = {"after": 0}
MODULE: dict[str, object] = {"name": "sdp", "kind": "protocol"}
CONNECTION: dict[str, object] = {
    "address": "127.0.0.1", "port": 80, "role": "listen", "uid": 1, "program": "x", "gids": [1],
}  # fmt: skip
COMMANDS: dict[str, dict[str, object]] = {
    "arenas": PAGE, "ended": PAGE, "links": PAGE, "trace": PAGE, "decide": CONNECTION, "demote": {"slots": [[0, 0]]},
    "promote": {"slots": [[0, 0]]}, "module_add": MODULE, "module_remove": MODULE,
}  # fmt: skip


@pytest.mark.parametrize("op", COMMANDS)
def test_a_command_that_makes_no_sense_is_answered(system: System, op: str) -> None:
    family = system.client(ALICE)
    good = {"arena": family.arena_id.hex(), **COMMANDS[op]}
    with as_user(ALICE):
        connection = control.ControlConnection(system.socket)
    with connection:
        for name in good:
            for odd in ODD:
                with suppress(Unavailable):  # what is refused leaves the connection as it is
                    connection.request(op, **(good | {name: odd}))[1].close()
        connection.status()
    assert system.counter("internal_error{message}") == 0
    family.close()
