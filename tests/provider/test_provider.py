"""The provider end to end: real clients, real TCP connections, and clients that misbehave."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from common import PATIENCE_S, TcpPair, eventually, slot
from shim_client import Channel, ShimClient

from sidestep import config, limits
from sidestep.errors import Unavailable
from sidestep.native import _channel, layout
from sidestep.native.layout import IPPROTO_SDP, Ask, Refusal, Rpc, State, Welcome
from sidestep.provider import arena, control, memory, rpc
from sidestep.provider.clients import Client
from sidestep.provider.rpc import Message
from sidestep.provider.server import Provider, Watchdog
from sidestep.settings import ProviderSettings
from sidestep.switch.budget import SWEEP_INTERVAL_S
from sidestep.switch.offers import ClientId
from sidestep.testing import WAIT_TIMEOUT_S, Sidestep

MakeClient = Callable[[], ShimClient]
MakePair = Callable[..., TcpPair]


@pytest.fixture
def sidestep() -> Iterator[Sidestep]:
    """A private provider whose offers do not expire while a test is held up."""
    with Sidestep(offer_expiry_s=600) as private:
        yield private


def provider_fds(sidestep: Sidestep) -> int:
    """Descriptors the provider holds."""
    return sum(1 for _ in Path(f"/proc/{sidestep.provider_pid}/fd").iterdir())


def counter(sidestep: Sidestep, name: str) -> int:
    """One of the provider's counters."""
    return int(sidestep.status()["counters"].get(name, 0))


def refusal_of(client: ShimClient) -> Refusal:
    """The reason of the REFUSED that comes next."""
    packet = client.receive()
    packet.descriptors.close()
    assert packet.message.type is Rpc.REFUSED
    return Refusal(packet.message.reason)


def same_file(one: int, other: int) -> bool:
    """Whether two descriptors lead to the same thing; not for eventfds, which are all of one inode."""
    first, second = os.fstat(one), os.fstat(other)
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def rings(doorbell: int) -> int:
    """How many times a doorbell can still be rung."""
    text = Path(f"/proc/self/fdinfo/{doorbell}").read_text()
    return int(text.split("eventfd-count:")[1].split()[0], 16)


def same_doorbell(one: int, other: int) -> bool:
    """Whether two descriptors are of one doorbell: who rings the one takes from the other."""
    before = rings(other)
    assert _channel.doorbell_ring(one)
    return rings(other) == before - 1


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_claim_joins_the_two_ends(
    sidestep: Sidestep, shim_client: MakeClient, tcp_pair: MakePair, channel: Callable[..., Channel],
    family: socket.AddressFamily, host: str,
) -> None:  # fmt: skip
    offerer, claimer = shim_client(), shim_client()
    active, passive = tcp_pair(host, family)
    offered, claimed = channel((8192, 4096)), channel(None)
    assert claimer.offers_waiting(passive) == 0

    offerer.offer(active, offered, token=11)
    claimer.wait_offer(passive)
    claimer.claim(passive, claimed, token=22)

    attach = claimer.receive()
    with attach.descriptors as passed:
        segment, doorbell, page = passed.numbers
        assert (attach.message.type, attach.message.token) == (Rpc.ATTACH, 22)
        assert attach.message.ring_size == (8192, 4096)
        assert attach.message.segment_id == offered.segment_id
        assert attach.message.doorbell_page_id not in {bytes(16), offered.doorbell_page_id}
        assert offered.segment is not None
        assert same_file(segment, offered.segment)
        assert same_file(page, offered.doorbell_page)
        assert same_doorbell(doorbell, offered.doorbell)
    told = offerer.receive()
    with told.descriptors as passed:
        doorbell, page = passed.numbers
        assert (told.message.type, told.message.token) == (Rpc.CLAIMED, 11)
        assert told.message.doorbell_page_id not in {bytes(16), claimed.doorbell_page_id}
        assert same_file(page, claimed.doorbell_page)
        assert same_doorbell(doorbell, claimed.doorbell)
    assert claimer.offers_waiting(passive) == 0
    assert counter(sidestep, "claim_matched") == 1


def test_a_doorbell_has_one_name_and_nobody_else_can_take_it(
    shim_client: MakeClient, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    server, doorbell = shim_client(), channel(None)
    names = []
    for client, token in [(server, 1), (server, 2), (shim_client(), 3)]:
        offerer = shim_client()
        active, passive = tcp_pair("127.0.0.1", socket.AF_INET)
        offerer.offer(active, channel((4096, 4096)), token=token)
        client.wait_offer(passive)
        client.claim(passive, doorbell, token=token)
        client.receive().descriptors.close()
        told = offerer.receive()
        told.descriptors.close()
        names.append(told.message.doorbell_page_id)
    assert names[0] == names[1]
    assert names[0] != names[2], "another client gave the same id"


def test_one_process_may_hold_both_ends(
    shim_client: MakeClient, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    client = shim_client()
    active, passive = tcp_pair()
    client.offer(active, channel(), token=1)
    client.claim(passive, channel(None), token=2)  # the same connection to the provider: in order
    kinds = []
    for _ in range(2):
        packet = client.receive()
        packet.descriptors.close()
        kinds.append(packet.message.type)
    assert kinds == [Rpc.ATTACH, Rpc.CLAIMED]


def test_a_claim_without_an_offer_is_refused(
    shim_client: MakeClient, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    client = shim_client()
    _, passive = tcp_pair()
    client.claim(passive, channel(None), token=2)
    assert refusal_of(client) is Refusal.NO_OFFER


def test_the_offering_end_cannot_claim_its_own_offer(
    shim_client: MakeClient, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    client = shim_client()
    active, _ = tcp_pair()
    client.offer(active, channel(), token=1)
    client.claim(active, channel(None), token=2)
    assert refusal_of(client) is Refusal.NO_OFFER


def test_an_offer_expires_and_its_descriptors_are_closed(
    closing: ExitStack, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    private = closing.enter_context(Sidestep(offer_expiry_s=0.05))
    client = closing.enter_context(ShimClient(private.socket))
    client.hello()
    before = provider_fds(private)
    active, _ = tcp_pair()
    started = time.monotonic()
    client.offer(active, channel(), token=7)
    assert refusal_of(client) is Refusal.EXPIRED
    assert time.monotonic() - started >= 0.05
    assert client.offers_waiting(active) == 0
    assert provider_fds(private) == before
    assert private.status()["budget_used_bytes"] == 0
    client.offer(active, channel(), token=7)  # and may be made again
    assert refusal_of(client) is Refusal.EXPIRED


def test_a_withdrawn_offer_is_gone_without_a_word(
    sidestep: Sidestep, shim_client: MakeClient, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    client = shim_client()
    active, passive = tcp_pair()
    client.offer(active, channel(), token=7)
    client.withdraw(7)
    client.withdraw(8)  # unknown: perhaps just claimed
    client.claim(passive, channel(None), token=9)
    assert refusal_of(client) is Refusal.NO_OFFER
    assert client.offers_waiting(passive) == 0
    assert counter(sidestep, "offer_withdrawn") == 1


def test_offers_of_a_client_that_leaves_are_gone(
    sidestep: Sidestep, shim_client: MakeClient, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    leaving, staying = shim_client(), shim_client()
    pairs = [tcp_pair() for _ in range(5)]
    for token, (active, _) in enumerate(pairs):
        leaving.offer(active, channel(), token)
    for _, passive in pairs:
        staying.wait_offer(passive)
    leaving.close()
    eventually(lambda: sidestep.status()["offers_pending"] == 0)
    for _, passive in pairs:
        staying.claim(passive, channel(None), token=1)
        assert refusal_of(staying) is Refusal.NO_OFFER


def test_offering_what_one_does_not_hold_is_refused(
    shim_client: MakeClient, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    client = shim_client()
    active, passive = tcp_pair()
    mine, others = channel(), channel()
    assert mine.segment is not None
    forged = client.message_about(Rpc.OFFER, active, mine, 1)
    wrong_cookie = _replaced(forged, cookie=client.message_about(Rpc.OFFER, passive, others, 1).cookie)
    rpc.send(client.sock, wrong_cookie, [mine.segment, mine.doorbell, mine.doorbell_page])
    assert refusal_of(client) is Refusal.NOT_PROVEN
    client.offer(active, mine, token=1)
    forged_claim = _replaced(client.message_about(Rpc.CLAIM, passive, mine, 2), cookie=forged.cookie, ring_size=(0, 0))
    rpc.send(client.sock, forged_claim, [mine.doorbell, mine.doorbell_page])
    assert refusal_of(client) is Refusal.NOT_PROVEN
    client.claim(passive, channel(None), token=3)  # the rightful owner still gets it
    packet = client.receive()
    packet.descriptors.close()
    assert packet.message.type is Rpc.ATTACH


def test_another_network_namespace_is_refused(
    shim_client: MakeClient, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    client = shim_client()
    active, passive = tcp_pair()
    client.netns_cookie += 1
    client.offer(active, channel(), token=1)
    assert refusal_of(client) is Refusal.FOREIGN_NETNS
    client.claim(passive, channel(None), token=1)
    assert refusal_of(client) is Refusal.FOREIGN_NETNS


def test_a_connection_is_offered_once(
    shim_client: MakeClient, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    client, other = shim_client(), shim_client()
    (active, _), (unrelated, _) = tcp_pair(), tcp_pair()
    offered = channel()
    client.offer(active, offered, token=1)
    client.offer(active, channel(), token=2)
    assert refusal_of(client) is Refusal.DUPLICATE
    client.offer(unrelated, channel(), token=1)
    assert refusal_of(client) is Refusal.DUPLICATE
    client.offer(unrelated, offered, token=3)  # the segment of another offer
    assert refusal_of(client) is Refusal.DUPLICATE
    other.offer(active, channel(), token=1)
    assert refusal_of(other) is Refusal.DUPLICATE


def test_a_client_has_a_bounded_number_of_offers(
    sidestep: Sidestep, shim_client: MakeClient, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    client = shim_client()
    for token in range(limits.OFFERS_PENDING_MAX):
        client.offer(tcp_pair()[0], channel(), token)
    client.offer(tcp_pair()[0], channel(), token=limits.OFFERS_PENDING_MAX)
    assert refusal_of(client) is Refusal.TOO_MANY
    assert sidestep.status()["offers_pending"] <= limits.OFFERS_PENDING_MAX


def test_the_budget_is_kept_and_ended_channels_give_it_back(
    closing: ExitStack, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    one = limits.CHANNEL_HEADER_SIZE + 2 * 4096
    private = closing.enter_context(Sidestep(budget_bytes=2 * one, offer_expiry_s=600))
    client = closing.enter_context(ShimClient(private.socket))
    client.hello()
    pairs = [tcp_pair() for _ in range(3)]
    client.offer(pairs[0][0], channel(), token=0)
    client.offer(pairs[1][0], channel(), token=1)
    client.offer(pairs[2][0], channel(), token=2)
    assert refusal_of(client) is Refusal.NO_BUDGET
    client.withdraw(0)
    client.offer(pairs[2][0], channel(), token=2)
    client.claim(pairs[2][1], channel(None), token=9)
    packet = client.receive()
    packet.descriptors.close()
    assert packet.message.type is Rpc.ATTACH
    assert private.status()["budget_used_bytes"] == 2 * one  # a live channel is counted still


def test_an_arena_tells_what_is_spilled(shim_client: MakeClient) -> None:
    client = shim_client()
    one, other = (letter * 16 for letter in (b"1", b"2"))
    client.write_arena([
        {"generation": 1, "state": State.PROMOTED, "segment_id": one, "tx_spilled": 5},
        {"generation": 2, "state": State.PROMOTED, "segment_id": one, "tx_spilled": 6},
        {"generation": 1, "state": State.NATIVE, "segment_id": one, "tx_spilled": 7},
        {"generation": 3, "state": State.ATTACHED, "segment_id": other, "tx_spilled": 1 << 60},
    ])  # fmt: skip
    found = [(segment, spilled) for segment, spilled in arena.segments_in_use(client.arena) if segment]
    assert found == [(one, 5), (other, layout.CHANNEL_SPILL)]


def test_what_is_spilled_takes_from_the_budget(
    closing: ExitStack, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    one = limits.CHANNEL_HEADER_SIZE + 2 * 4096
    private = closing.enter_context(Sidestep(budget_bytes=3 * one, offer_expiry_s=600))
    client = closing.enter_context(ShimClient(private.socket))
    client.hello()
    offered = channel()
    client.offer(tcp_pair()[0], offered, token=0)  # nothing has been looked at before: there is a sweep
    slot = {"generation": 1, "state": State.PROMOTED, "segment_id": offered.segment_id}
    for token, spilled, refused in ((1, 5000, False), (2, one + 1, True), (3, 3, False)):
        client.write_arena([slot | {"tx_spilled": spilled}, slot | {"tx_spilled": 0}])
        time.sleep(SWEEP_INTERVAL_S)
        # more than there is room for, so that it looks again
        for ring_size, number in (((1 << 16, 1 << 16), 10 + token), ((4096, 4096), token)):
            client.offer(tcp_pair()[0], channel(ring_size), token=number)
            if number >= 10 or refused:
                assert refusal_of(client) is Refusal.NO_BUDGET
        if not refused:
            client.withdraw(token)
        assert private.status()["budget_used_bytes"] == min(one + spilled, 3 * one)


def _replaced(message: Message, **changes: object) -> Message:
    fields = {name: getattr(message, name) for name in Message._fields}
    return Message(**(fields | changes))


# ---- clients that misbehave ----

MISBEHAVIOURS: list[Callable[[ShimClient], None]] = []


def misbehaviour(function: Callable[[ShimClient], None]) -> Callable[[ShimClient], None]:
    """Adds what a bad client does to the list that is tried."""
    MISBEHAVIOURS.append(function)
    return function


@misbehaviour
def wrong_order(client: ShimClient) -> None:
    rpc.send(client.sock, Message(type=Rpc.WITHDRAW))


@misbehaviour
def second_hello(client: ShimClient) -> None:
    client.hello()
    fd = memory.reopen_read_only(client.arena)
    rpc.send(client.sock, Message(type=Rpc.HELLO), [fd])
    os.close(fd)


@misbehaviour
def hello_without_arena(client: ShimClient) -> None:
    rpc.send(client.sock, Message(type=Rpc.HELLO))


@misbehaviour
def hello_with_a_pipe(client: ShimClient) -> None:
    reader, writer = os.pipe()
    rpc.send(client.sock, Message(type=Rpc.HELLO), [reader])
    os.close(reader)
    os.close(writer)


@misbehaviour
def hello_with_an_unsealed_arena(client: ShimClient) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    rpc.send(client.sock, Message(type=Rpc.HELLO), [fd])
    os.close(fd)


@misbehaviour
def garbage(client: ShimClient) -> None:
    client.sock.send(random.Random(1).randbytes(layout.RPC_MSG_SIZE))


@misbehaviour
def half_a_message(client: ShimClient) -> None:
    client.sock.send(Message(type=Rpc.HELLO).encode()[:80])


@misbehaviour
def huge_message(client: ShimClient) -> None:
    client.sock.send(Message(type=Rpc.HELLO).encode() + bytes(100_000))


@misbehaviour
def flood_of_descriptors(client: ShimClient) -> None:
    with open(os.devnull, "rb") as null:
        socket.send_fds(client.sock, [Message(type=Rpc.HELLO).encode()], [null.fileno()] * 250)


@misbehaviour
def providers_own_message(client: ShimClient) -> None:
    client.hello()
    rpc.send(client.sock, Message(type=Rpc.ATTACH))


@misbehaviour
def control_on_a_shims_connection(client: ShimClient) -> None:
    client.hello()
    rpc.send(client.sock, Message(type=Rpc.CONTROL), body=b'{"op": "stop"}')


@misbehaviour
def control_that_is_no_json(client: ShimClient) -> None:
    rpc.send(client.sock, Message(type=Rpc.CONTROL), body=b"\xff" * 20)


@misbehaviour
def control_nested_deeply(client: ShimClient) -> None:
    rpc.send(client.sock, Message(type=Rpc.CONTROL), body=b"[" * limits.CONTROL_REQUEST_MAX)


@misbehaviour
def control_too_long(client: ShimClient) -> None:
    rpc.send(client.sock, Message(type=Rpc.CONTROL), body=b" " * (limits.CONTROL_REQUEST_MAX + 1))


@misbehaviour
def offer_without_descriptors(client: ShimClient) -> None:
    client.hello()
    rpc.send(client.sock, Message(type=Rpc.OFFER))


def offer_made(client: ShimClient, rings: tuple[int, int], told: tuple[int, int], *, swapped: bool = False) -> None:
    client.hello()
    made = Channel.make(rings)
    assert made.segment is not None
    doorbell = (made.doorbell_page, made.doorbell) if swapped else (made.doorbell, made.doorbell_page)
    message = Message(type=Rpc.OFFER, ring_size=told, netns_cookie=client.netns_cookie)
    rpc.send(client.sock, message, [made.segment, *doorbell])
    made.close()


@misbehaviour
def offer_of_odd_rings(client: ShimClient) -> None:
    offer_made(client, (4096, 12288), (4096, 12288))


@misbehaviour
def offer_of_a_segment_too_small(client: ShimClient) -> None:
    offer_made(client, (4096, 4096), (8192, 4096))


@misbehaviour
def offer_with_swapped_descriptors(client: ShimClient) -> None:
    offer_made(client, (4096, 4096), (4096, 4096), swapped=True)


@misbehaviour
def claim_of_a_doorbell_beyond_the_page(client: ShimClient) -> None:
    client.hello()
    made = Channel.make(None)
    message = Message(type=Rpc.CLAIM, doorbell_index=layout.DOORBELLS_PER_PAGE, netns_cookie=client.netns_cookie)
    rpc.send(client.sock, message, [made.doorbell, made.doorbell_page])
    made.close()


@pytest.mark.parametrize("misbehave", MISBEHAVIOURS, ids=lambda function: function.__name__)
def test_who_breaks_a_rule_is_dropped_and_nobody_else(
    sidestep: Sidestep, shim_client: MakeClient, tcp_pair: MakePair, channel: Callable[..., Channel],
    misbehave: Callable[[ShimClient], None],
) -> None:  # fmt: skip
    good = shim_client()
    before = provider_fds(sidestep)
    with ShimClient(sidestep.socket) as bad:
        misbehave(bad)
        assert bad.hung_up()
    eventually(lambda: provider_fds(sidestep) == before)
    assert not any("internal_error" in name for name in sidestep.status()["counters"])
    active, passive = tcp_pair()
    good.offer(active, channel(), token=1)
    good.claim(passive, channel(None), token=2)
    packet = good.receive()
    packet.descriptors.close()
    assert packet.message.type is Rpc.ATTACH


def test_a_client_that_never_reads_is_dropped(
    sidestep: Sidestep, shim_client: MakeClient, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    deaf = shim_client()
    _, passive = tcp_pair()
    claim = channel(None)

    def flood() -> None:
        while True:
            deaf.claim(passive, claim, token=1)  # each is answered by a refusal that nobody reads

    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        _retrying(flood)
    assert counter(sidestep, "client_dropped{slow}") == 1


def _retrying(send: Callable[[], None]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            send()
        except BlockingIOError:
            os.sched_yield()  # the provider has not read on yet


@pytest.mark.slow
def test_silent_connections_are_closed_after_a_while(sidestep: Sidestep, closing: ExitStack) -> None:
    silent = closing.enter_context(ShimClient(sidestep.socket, timeout_s=2 * limits.HELLO_TIMEOUT_S))
    started = time.monotonic()
    assert silent.hung_up()
    assert time.monotonic() - started > limits.HELLO_TIMEOUT_S / 2
    assert counter(sidestep, "client_dropped{silent}") == 1


def test_who_has_spoken_to_a_provider_without_a_cpu_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HELLO_TIMEOUT_S", 0.05)
    monkeypatch.setattr(Watchdog, "__enter__", lambda _: None)  # it takes SIGALRM for itself, as pytest's timeouts do
    path = tmp_path / "provider"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        provider = Provider(ProviderSettings(path), listener)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(path))
            rpc.send(client, Message(type=Rpc.CONTROL), body=b'{"op": "status"}')
            provider.parts.loop.notices.append(lambda: time.sleep(0.2))  # held up in the turn that takes the client in
            for _ in range(2):
                provider._turn(1)
            client.setblocking(False)
            packet = rpc.receive(client)
            assert packet is not None
            assert b"client_accepted" in packet.body
        provider.close()


def test_many_clients_share_one_provider_and_one_arena(sidestep: Sidestep, closing: ExitStack) -> None:
    family = [closing.enter_context(ShimClient(sidestep.socket)) for _ in range(50)]
    family[0].hello()
    for client in family[1:]:
        client.arena_id = family[0].arena_id
        os.dup2(family[0].arena, client.arena, inheritable=False)
        client.hello()
    status = sidestep.status()
    assert (status["shims"], status["families"]) == (50, 1)
    for client in family[1:]:
        client.close()
    eventually(lambda: sidestep.status()["shims"] == 1)
    assert sidestep.status()["families"] == 1
    family[0].close()
    eventually(lambda: sidestep.status()["families"] == 0)


def test_killing_the_provider_amid_offers_leaves_clients_a_plain_end_and_a_new_one_serves(
    sidestep: Sidestep, shim_client: MakeClient, tcp_pair: MakePair, channel: Callable[..., Channel]
) -> None:
    client = shim_client()
    active, passive = tcp_pair()
    client.offer(active, channel(), token=1)
    sidestep.kill_provider()
    assert client.hung_up()
    with pytest.raises(Unavailable):
        sidestep.connections()
    sidestep.restart_provider()
    with ShimClient(sidestep.socket) as again:
        again.hello()
        again.offer(active, channel(), token=1)
        again.claim(passive, channel(None), token=2)
        packet = again.receive()
        packet.descriptors.close()
        assert packet.message.type is Rpc.ATTACH


def test_the_registry_says_that_the_provider_is_closing(sidestep: Sidestep, shim_client: MakeClient) -> None:
    client = shim_client()
    assert client.registry_header()["closing"] == 0
    assert control.stop(sidestep.socket) == sidestep.provider_pid
    assert client.registry_header()["closing"] == 1
    assert client.hung_up()
    assert not sidestep.socket.exists()


# ---- looking ----


def test_connections_of_all_arenas_are_listed(sidestep: Sidestep, closing: ExitStack) -> None:
    clients = [closing.enter_context(ShimClient(sidestep.socket)) for _ in range(70)]  # more than one page of arenas
    for index, client in enumerate(clients):
        client.hello()
        client.write_arena([slot(1000 + index), slot(1, generation=2), slot(1, state=0), slot(1, state=99)])
    found = sidestep.connections()
    assert [connection.local for connection in found] == [f"127.0.0.1:{1000 + index}" for index in range(70)]
    one = found[0]
    assert (one.remote, one.role, one.state, one.promoted) == ("127.0.0.2:80", "active", "promoted", True)
    assert (one.tx.ring_bytes, one.tx.ring_msgs, one.rx.ring_bytes) == (100, 4, 0)
    assert one.program == Path("/proc/self/comm").read_text().strip()
    assert one.age_s >= 1.0
    assert one.segment == (b"s" * 16).hex()
    assert json.loads(json.dumps(one.as_json()))["tx"]["ring_msgs"] == 4


@pytest.fixture
def scribbled(sidestep: Sidestep, closing: ExitStack) -> ShimClient:
    client = closing.enter_context(ShimClient(sidestep.socket, slots_max=64))
    client.hello()
    return client


@pytest.mark.parametrize("seed", range(5))
def test_an_arena_of_noise_harms_nobody(sidestep: Sidestep, scribbled: ShimClient, seed: int) -> None:
    noise = random.Random(seed)
    length = os.fstat(scribbled.arena).st_size - layout.ARENA_SLOTS_OFFSET
    os.pwrite(scribbled.arena, noise.randbytes(length), layout.ARENA_SLOTS_OFFSET)
    header = layout.offsets("arena_header")
    os.pwrite(scribbled.arena, struct.pack("=I", noise.getrandbits(32)), header["slots_used"])
    sidestep.connections()  # whatever they are
    os.pwrite(scribbled.arena, noise.randbytes(64), 0)
    assert sidestep.connections() == []


@pytest.mark.slow
def test_ten_thousand_connections_are_listed(sidestep: Sidestep, closing: ExitStack) -> None:
    client = closing.enter_context(ShimClient(sidestep.socket, slots_max=10_000))
    client.hello()
    client.write_arena([slot(index) for index in range(10_000)])
    assert len(sidestep.connections()) == 10_000


def test_who_may_not_remove_a_module_begins_no_removal(tmp_path: Path) -> None:
    """While root's removal waits for connections to be back on TCP, a stranger's would have let new ones in again."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        provider = Provider(ProviderSettings(tmp_path / "provider", system=True), listener)
        provider.parts.hub.refused.add("sdp")
        stranger = Client(ClientId(1), ours, pid=os.getpid(), uid=os.geteuid() + 1, accepted_at=0)
        asked = rpc.Packet(Message(type=Rpc.CONTROL), b'{"op": "module_remove", "name": "sdp"}', rpc.Descriptors())
        provider.parts.table.on_message(stranger, asked)
        packet = rpc.receive(theirs)
        assert packet is not None
        assert b"only root" in packet.body
        assert provider.parts.hub.refused == {"sdp"}
        provider.close()


@pytest.mark.parametrize("version", [layout.LAYOUTS.start - 1, layout.LAYOUT_VERSION + 1])
def test_a_layout_that_is_not_served_is_told_so(sidestep: Sidestep, version: int) -> None:
    with ShimClient(sidestep.socket) as other:
        rpc.send(other.sock, Message(type=Rpc.HELLO, version=version))
        assert other.receive().message.type is Rpc.LAYOUT
        assert other.hung_up()
    assert sidestep.status()["counters"]["client_dropped{version}"] == 1


@pytest.mark.parametrize("version", layout.LAYOUTS)
def test_each_layout_is_served_in_its_own_words(
    sidestep: Sidestep, tcp_pair: MakePair, channel: Callable[..., Channel], version: int
) -> None:
    active, passive = tcp_pair()
    with ShimClient(sidestep.socket, version=version) as one, ShimClient(sidestep.socket) as other:
        assert (one.hello().version, other.hello().version) == (version, layout.LAYOUT_VERSION)
        one.write_arena([slot(7, born_ns=7)])
        assert [found.born_ns for found in sidestep.connections()] == [7]
        one.offer(active, channel(), token=1)
        other.claim(passive, channel(None), token=2)
        for client in (one, other):
            packet = client.receive()
            packet.descriptors.close()
            assert packet.message.version == client.version
            assert packet.message.type in (Rpc.ATTACH, Rpc.CLAIMED)


def test_the_family_of_the_other_end_is_told_of_a_doorbell(sidestep: Sidestep, channel: Callable[..., Channel]) -> None:
    """By another name than the sender has for it, as no two clients may mean one by theirs. Nobody else is told."""
    made = channel(None)
    bells = [made.doorbell, made.doorbell_page]
    bell = Message(
        type=Rpc.NEW_DOORBELL, token=3 << 32 | 7, cookie=99, doorbell_index=5, doorbell_page_id=bytes(range(16))
    )  # fmt: skip
    with ShimClient(sidestep.socket) as one, ShimClient(sidestep.socket) as other:
        for client in (one, other):
            assert client.hello().flags & Welcome.NEW_DOORBELLS
        rpc.send(one.sock, bell._replace(arena_id=bytes(16)), bells)  # there is no such family
        rpc.send(one.sock, bell._replace(arena_id=other.family_id), bells)
        packet = other.receive()
        with packet.descriptors:
            told = packet.message
            assert len(packet.descriptors) == 2
        assert (told.type, told.token, told.cookie, told.doorbell_index) == (Rpc.NEW_DOORBELL, 3 << 32 | 7, 99, 5)
        assert told.doorbell_page_id != bell.doorbell_page_id
        assert sidestep.status()["shims"] == 2


def test_who_does_not_read_gets_no_second_doorbell(sidestep: Sidestep, channel: Callable[..., Channel]) -> None:
    """Descriptors on their way count against a user, all of whose programs may have few of them (RLIMIT_NOFILE)."""
    made = channel(None)
    with ShimClient(sidestep.socket) as one, ShimClient(sidestep.socket) as idle:
        for client in (one, idle):
            client.hello()
        for kind in (Rpc.NEW_DOORBELL, Rpc.NEW_DOORBELL, Rpc.SERVE):
            bells = [made.doorbell, made.doorbell_page] if kind is Rpc.NEW_DOORBELL else []
            rpc.send(one.sock, Message(type=kind, arena_id=idle.family_id), bells)
        one.ask(Ask.OPEN, protocol=IPPROTO_SDP)  # answered behind all three
        received = [idle.receive() for _ in range(2)]
        for packet in received:
            packet.descriptors.close()
        assert [packet.message.type for packet in received] == [Rpc.NEW_DOORBELL, Rpc.SERVE]


@pytest.mark.parametrize("wrong", ["an eventfd", "a page", "an index"])
def test_what_is_no_doorbell_is_not_passed_on(sidestep: Sidestep, channel: Callable[..., Channel], wrong: str) -> None:
    made = channel(None)
    bells = [made.doorbell_page if wrong == "an eventfd" else made.doorbell, made.doorbell_page]
    if wrong == "a page":
        bells[1] = made.doorbell
    index = layout.DOORBELLS_PER_PAGE if wrong == "an index" else 0
    with ShimClient(sidestep.socket) as one, ShimClient(sidestep.socket) as other:
        for client in (one, other):
            client.hello()
        rpc.send(one.sock, Message(type=Rpc.NEW_DOORBELL, doorbell_index=index, arena_id=other.family_id), bells)
        assert one.hung_up()
        assert sidestep.status()["shims"] == 1
        other.sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.receive()


def test_a_family_is_reached_by_its_name_whoever_has_it_too(sidestep: Sidestep) -> None:
    """A program that was executed is a client anew, and no peer can keep it out: none knows the id of its arena."""
    with ShimClient(sidestep.socket) as one, ShimClient(sidestep.socket) as taker, ShimClient(sidestep.socket) as other:
        taker.family_id = other.family_id
        for client in (one, taker, other):
            client.hello()
        other.sock.close()
        other.sock = config.connect(sidestep.socket)
        other.sock.settimeout(WAIT_TIMEOUT_S)
        other.hello()
        rpc.send(one.sock, Message(type=Rpc.SERVE, arena_id=other.family_id, segment_id=bytes(range(16))))
        for client in (taker, other):
            packet = client.receive()
            assert (packet.message.type, packet.message.segment_id) == (Rpc.SERVE, bytes(range(16)))


def _join(client: ShimClient, other: ShimClient, arena: int | None = None) -> None:
    given = memory.reopen_read_only(other.arena if arena is None else arena)
    rpc.send(client.sock, Message(type=Rpc.JOIN, arena_id=other.arena_id, segment_id=other.family_id), [given])
    os.close(given)


def _told(client: ShimClient) -> tuple[Rpc, bytes]:
    packet = client.receive()
    with packet.descriptors:
        return packet.message.type, packet.message.segment_id


def test_who_holds_a_connection_of_another_family_hears_what_that_is_asked(sidestep: Sidestep) -> None:
    """It was given one. The family lives on with it, and once it has left it hears nothing more."""
    segment = bytes(range(16))
    with ShimClient(sidestep.socket) as one, ShimClient(sidestep.socket) as given, ShimClient(sidestep.socket) as other:
        for client in (one, given, other):
            client.hello()
        _join(given, other)
        given.ask(Ask.OPEN, protocol=IPPROTO_SDP)  # answered behind it
        ask = Message(type=Rpc.SERVE, arena_id=other.family_id, segment_id=segment)
        rpc.send(one.sock, ask)
        assert [_told(client) for client in (given, other)] == [(Rpc.SERVE, segment)] * 2
        other.sock.close()
        eventually(lambda: sidestep.status()["shims"] == 2)
        assert sidestep.status()["families"] == 3
        rpc.send(one.sock, ask)
        assert _told(given) == (Rpc.SERVE, segment)
        rpc.send(given.sock, Message(type=Rpc.LEAVE, arena_id=other.arena_id))
        eventually(lambda: sidestep.status()["families"] == 2)


@pytest.mark.parametrize("wrong", ["before HELLO", "another arena by its id", "too many", "no arena"])
def test_a_false_join_costs_the_client_its_connection(sidestep: Sidestep, wrong: str) -> None:
    with ShimClient(sidestep.socket) as one, ShimClient(sidestep.socket) as other:
        other.hello()
        if wrong != "before HELLO":
            one.hello()
        if wrong == "no arena":
            rpc.send(one.sock, Message(type=Rpc.JOIN, arena_id=other.arena_id))
        else:
            _join(one, other, one.arena if wrong == "another arena by its id" else None)
        for _ in range(limits.GUEST_ARENAS_MAX if wrong == "too many" else 0):
            with ShimClient(sidestep.socket) as another, suppress(OSError):
                _join(one, another)
        assert one.hung_up()
        assert sidestep.status()["shims"] == 1


def test_what_a_client_sent_before_it_closed_is_read(sidestep: Sidestep) -> None:
    """A program that executes the next one closes with WELCOME unread: the kernel reports a reset first."""
    with ShimClient(sidestep.socket) as one, ShimClient(sidestep.socket) as other:
        other.hello()
        arena = memory.reopen_read_only(one.arena)
        rpc.send(one.sock, Message(type=Rpc.HELLO, pid=os.getpid(), arena_id=one.arena_id), [arena])
        os.close(arena)
        assert select.select([one.sock], [], [], WAIT_TIMEOUT_S)[0]
        os.kill(sidestep.provider_pid, signal.SIGSTOP)
        try:
            rpc.send(one.sock, Message(type=Rpc.SERVE, arena_id=other.family_id, segment_id=bytes(range(16))))
            one.sock.close()
        finally:
            os.kill(sidestep.provider_pid, signal.SIGCONT)
        assert other.receive().message.segment_id == bytes(range(16))
