"""Which users' ends a system-wide provider pairs, and what one user sees of another."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from common import PATIENCE_S, eventually, forked, slot
from shim_client import Channel, ShimClient
from tenants import ALICE, BOB, SERVICE, Namespace, System, answer, as_user

from sidestep import config, limits
from sidestep.errors import Unavailable
from sidestep.native import layout
from sidestep.native.layout import Refusal, Rpc, Welcome
from sidestep.provider import control, rpc
from sidestep.provider.rpc import Message

TcpPair = tuple[socket.socket, socket.socket]
MakePair = Callable[..., TcpPair]
MakeChannel = Callable[..., Channel]


def claimed(offerer: ShimClient, claimer: ShimClient, pair: TcpPair, channel: MakeChannel) -> tuple[object, object]:
    """What the offerer and the claimer are told."""
    offerer.offer(pair[0], channel(), token=1)
    claimer.wait_offer(pair[1])
    claimer.claim(pair[1], channel(None), token=1)
    told = answer(claimer)
    return answer(offerer), told


def test_it_runs_without_root_and_asks_for_possession(system: System) -> None:
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{system.pid}/status").read_text().splitlines())
    assert status["Uid"].split() == [str(SERVICE)] * 4
    assert int(status["CapEff"], 16) == 0
    assert system.client(ALICE).wants == Welcome.POSSESSION | Welcome.PATH


@pytest.mark.parametrize("uid", [0, ALICE, SERVICE])
def test_one_user_is_paired(system: System, tcp_pair: MakePair, channel: MakeChannel, uid: int) -> None:
    offerer, claimer = system.client(uid), system.client(uid)
    assert claimed(offerer, claimer, tcp_pair(), channel) == (Rpc.CLAIMED, Rpc.ATTACH)


def test_two_users_are_not_paired(system: System, tcp_pair: MakePair, channel: MakeChannel) -> None:
    found = claimed(system.client(ALICE), system.client(BOB), tcp_pair(), channel)
    assert found == (Refusal.FOREIGN_USER, Refusal.FOREIGN_USER)
    assert system.counter("offer_refused{FOREIGN_USER}") == 1
    assert system.counter("claim_refused{FOREIGN_USER}") == 1
    assert system.counter("claim_matched") == 0


def test_the_duplicate_is_closed_at_once(system: System, tcp_pair: MakePair, channel: MakeChannel) -> None:
    client = system.client(ALICE)
    active, passive = tcp_pair()
    client.offer(active, channel(), token=1)
    client.wait_offer(active)
    active.close()
    passive.settimeout(PATIENCE_S)
    assert passive.recv(1) == b""  # the end of the stream, with the offer still pending


def joins(system: System, uid: int, family: ShimClient) -> ShimClient:
    """Another process of that client's family, of another user by now."""
    member = system.stranger(uid)
    member.arena_id = family.arena_id
    os.dup2(family.arena, member.arena, inheritable=False)
    member.hello()
    return member


def test_a_server_that_root_started_is_paired_with_all(
    system: System, tcp_pair: MakePair, channel: MakeChannel
) -> None:
    worker = joins(system, BOB, system.client(0))
    assert claimed(system.client(ALICE), worker, tcp_pair(), channel) == (Rpc.CLAIMED, Rpc.ATTACH)


def test_a_family_that_root_did_not_start_is_not(system: System, tcp_pair: MakePair, channel: MakeChannel) -> None:
    member = joins(system, BOB, system.client(ALICE))
    found = claimed(system.client(ALICE), member, tcp_pair(), channel)
    assert found == (Refusal.FOREIGN_USER, Refusal.FOREIGN_USER)


def test_what_root_ran_stays_known_by_its_process(system: System, tcp_pair: MakePair, channel: MakeChannel) -> None:
    """An exec after the drop brings a new family; the process is the same."""
    system.client(0).close()
    server = system.client(BOB)  # of this very process, as after an exec
    assert claimed(system.client(ALICE), server, tcp_pair(), channel) == (Rpc.CLAIMED, Rpc.ATTACH)


def born_as(pid: int, live: Callable[[], None]) -> None:
    """Runs `live` in a child with that number, and reaps it."""

    def living() -> int:
        if os.getpid() == pid:
            live()
        return 0

    last = Path("/proc/sys/kernel/ns_last_pid")
    if not last.exists():
        pytest.skip("this kernel does not let anybody choose the number of a process")
    deadline = time.monotonic() + limits.HELLO_TIMEOUT_S / 2  # what has connected before is still let in then
    while time.monotonic() < deadline:
        last.write_text(str(pid - 1))
        child = forked(living)
        _, status = os.waitpid(child, 0)
        if child == pid:
            assert status == 0, "see standard error"
            return
    pytest.skip(f"another process has the number {pid}")


def used_number() -> int:
    """Of a process that has gone."""
    os.waitpid(child := forked(lambda: 0), 0)
    return child


def test_the_number_of_a_process_of_roots_makes_nobody_roots(
    system: System, tcp_pair: MakePair, channel: MakeChannel
) -> None:
    """One that has gone connected when it had the number, and its descriptor lives on."""
    number, alice = used_number(), system.client(ALICE)
    thief = system.stranger(BOB)
    thief.sock.close()
    thief.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thief.sock.settimeout(PATIENCE_S)

    def connect() -> None:
        os.seteuid(BOB)
        thief.sock.connect(os.fspath(system.socket))

    def serve() -> None:
        system.client(0)
        thief.hello()
        found = claimed(alice, thief, tcp_pair(), channel)
        os.write(writer, str(found).encode())

    reader, writer = os.pipe()
    born_as(number, connect)
    born_as(number, serve)
    os.close(writer)
    with open(reader, "rb") as told:
        assert told.read() == str((Refusal.FOREIGN_USER, Refusal.FOREIGN_USER)).encode()


def test_an_arena_cannot_be_joined_by_its_id(system: System) -> None:
    family, thief = system.client(0), system.stranger(BOB)
    thief.arena_id = family.arena_id
    with pytest.raises(ConnectionError):
        thief.hello()
    assert system.counter("client_dropped{arena}") == 1
    with control.ControlConnection(system.socket) as connection:
        status = connection.status()
    assert (status["shims"], status["families"]) == (1, 1)
    family.close()


def test_one_sees_only_ones_own_families(system: System) -> None:
    alice, bob = system.client(ALICE), system.client(BOB)
    with as_user(BOB):
        connection = control.ControlConnection(system.socket)
    with connection:
        document, descriptors = connection.request("arenas", after=0)
        descriptors.close()
    assert document["arenas"] == [bob.arena_id.hex()]
    with control.ControlConnection(system.socket) as connection:
        document, descriptors = connection.request("arenas", after=0)
        descriptors.close()
    assert set(document["arenas"]) == {alice.arena_id.hex(), bob.arena_id.hex()}


@pytest.mark.parametrize(
    ("op", "arguments"), [("stop", {}), ("module_remove", {"name": "local"}), ("module_add", {"name": "local"})]
)
def test_only_root_and_its_own_user_govern_it(system: System, op: str, arguments: dict[str, str]) -> None:
    with as_user(ALICE):
        connection = control.ControlConnection(system.socket)
    with connection, pytest.raises(Unavailable, match="only root"):
        connection.request(op, **arguments)
    with as_user(SERVICE):
        connection = control.ControlConnection(system.socket)
    with connection:
        connection.request(op, **arguments)[1].close()


def test_root_in_a_container_governs_nothing(
    system: System, namespaces: Callable[..., tuple[Namespace, Namespace]], tcp_pair: MakePair, channel: MakeChannel
) -> None:
    container, _ = namespaces()
    family = system.client(ALICE)
    claimed(system.client(0), system.client(0), tcp_pair(), channel)

    def ask() -> tuple[str, list[str], list[str]]:
        with control.ControlConnection(system.socket) as connection:
            with pytest.raises(Unavailable) as refused:
                connection.request("stop")
            decisions = connection.document("trace", after=0)["decisions"]
            return str(refused.value), connection.document("arenas", after=0)["arenas"], decisions

    refusal, arenas, decisions = container.run(ask)
    assert "only root" in refusal
    assert arenas == []
    assert decisions == []  # the host's root has its number
    family.close()


def test_root_in_a_container_governs_nothing_by_a_socket_of_the_hosts(system: System) -> None:
    """Somebody outside has given it to him."""
    code = "import sys; from pathlib import Path; from sidestep import config; from sidestep.provider import rpc; "
    code += "from sidestep.native.layout import Rpc; sock = config.connect(Path(sys.argv[1])); "
    code += 'rpc.send(sock, rpc.Message(type=Rpc.CONTROL), [0], b\'{"op": "stop"}\'); '
    code += "print(rpc.receive(sock).body.decode())"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as shown:
        answers = [
            subprocess.run(
                [*container, sys.executable, "-c", code, str(system.socket)], stdin=shown.fileno(),
                capture_output=True, text=True, check=True, timeout=60,
            ).stdout
            for container in (["unshare", "--pid", "--fork"], ["unshare", "--pid", "--net", "--fork"], [])
        ]  # fmt: skip
    assert ["only root" in one for one in answers] == [True, True, False]


def test_a_policy_pairs_two_users(closing: ExitStack, tcp_pair: MakePair, channel: MakeChannel) -> None:
    system = System(closing, policy=f"pair {ALICE} {BOB}\n")
    alice, bob, other = system.client(ALICE), system.client(BOB), system.client(SERVICE)
    assert claimed(alice, bob, tcp_pair(), channel) == (Rpc.CLAIMED, Rpc.ATTACH)
    assert claimed(bob, alice, tcp_pair(), channel) == (Rpc.CLAIMED, Rpc.ATTACH)
    found = claimed(alice, other, tcp_pair(), channel)
    assert found == (Refusal.FOREIGN_USER, Refusal.FOREIGN_USER)


def test_one_sees_only_what_of_oneself_has_ended(system: System) -> None:
    for uid in (ALICE, BOB):
        client = system.client(uid)
        client.write_arena([slot(uid)])
        client.close()

    def seen(connection: control.ControlConnection) -> set[int]:
        slots = [layout.unpack("conn_slot", b64decode(row["slot"])) for row in connection.ended()]
        return {found["local_port"] for found in slots}

    with control.ControlConnection(system.socket) as connection:
        eventually(lambda: seen(connection) == {ALICE, BOB})
    with as_user(BOB):
        connection = control.ControlConnection(system.socket)
    with connection:
        assert seen(connection) == {BOB}


def test_one_sees_only_decisions_about_oneself(system: System, tcp_pair: MakePair, channel: MakeChannel) -> None:
    claimed(system.client(ALICE), system.client(BOB), tcp_pair(), channel)
    client = system.client(ALICE)
    client.offer(tcp_pair()[0], channel(), token=1)
    with control.ControlConnection(system.socket) as connection:
        assert {one["uid"] for one in connection.document("trace", after=0)["decisions"]} == {ALICE, BOB}
    with as_user(BOB):
        connection = control.ControlConnection(system.socket)
    with connection:
        assert {one["uid"] for one in connection.document("trace", after=0)["decisions"]} == {BOB}


def test_a_trace_tells_that_two_users_are_not_paired(system: System, tcp_pair: MakePair, channel: MakeChannel) -> None:
    claimed(system.client(ALICE), system.client(BOB), tcp_pair(), channel)
    with control.ControlConnection(system.socket) as connection:
        offered, *refused = connection.document("trace", after=0)["decisions"]
    assert (offered["role"], offered["uid"], offered["protocol"]) == ("connect", ALICE, "local")
    assert [(one["role"], one["uid"], one["protocol"]) for one in refused] == [
        ("connect", ALICE, None), ("listen", BOB, None),
    ]  # fmt: skip
    assert all("another user's" in one["why"] for one in refused)


def test_one_user_cannot_take_all_the_memory(closing: ExitStack, tcp_pair: MakePair, channel: MakeChannel) -> None:
    system = System(closing, budget_bytes=64 << 20)
    greedy, modest = system.client(ALICE), system.client(BOB)
    large = channel((2 << 20, 2 << 20))
    for token in range(3):  # a quarter of the budget holds three of them
        greedy.offer(tcp_pair()[0], dataclasses.replace(large, segment_id=secrets.token_bytes(16)), token=token)
    greedy.offer(tcp_pair()[0], dataclasses.replace(large, segment_id=secrets.token_bytes(16)), token=3)
    assert answer(greedy) is Refusal.NO_BUDGET
    active, passive = tcp_pair()
    modest.offer(active, channel((2 << 20, 2 << 20)), token=1)
    modest.wait_offer(passive)


def test_one_user_cannot_take_all_the_offers(closing: ExitStack, tcp_pair: MakePair, channel: MakeChannel) -> None:
    system = System(closing, descriptors=512)
    greedy, modest = system.client(ALICE), system.client(BOB)
    refusal: object = None
    accepted = 0
    while refusal is None:
        greedy.offer(tcp_pair()[0], channel(), token=accepted)
        with control.ControlConnection(system.socket) as connection:
            refused = connection.status()["counters"].get("offer_refused{TOO_MANY}")
        refusal = answer(greedy) if refused else None
        accepted += not refused
    assert refusal is Refusal.TOO_MANY
    active, passive = tcp_pair()
    modest.offer(active, channel(), token=1)
    modest.wait_offer(passive)
    assert system.counter("offer_accepted") == accepted + 1


def test_one_user_cannot_take_all_the_connections(closing: ExitStack) -> None:
    system = System(closing, descriptors=512)
    with control.ControlConnection(system.socket) as connection:
        room = connection.status()["clients_max"] // limits.USER_SHARE
    greedy = [system.client(ALICE) for _ in range(room)]
    assert system.stranger(ALICE).hung_up()
    assert system.counter("client_dropped{too_many}") == 1
    system.client(BOB)
    greedy[0].close()


@pytest.mark.parametrize("leaves", [False, True])
def test_one_user_cannot_have_all_the_descriptors_on_their_way(closing: ExitStack, *, leaves: bool) -> None:
    """The kernel bounds what was sent and not received, for all clients together, and a dropped one keeps its part."""
    system = System(closing, descriptors=512)
    with control.ControlConnection(system.socket) as connection:
        room = connection.status()["clients_max"] // limits.USER_SHARE
    families = [system.client(ALICE) for _ in range(room // 2)]
    asking = Message(type=Rpc.CONTROL), (), b'{"op": "arenas"}'
    for _ in range(2 * 512 // len(families)):
        with as_user(ALICE):
            greedy = closing.enter_context(config.connect(system.socket))
        with suppress(OSError):  # it may have been dropped
            for _ in range(1 if leaves else 10):
                rpc.send(greedy, *asking)
            if leaves:
                greedy.shutdown(socket.SHUT_WR)  # no client any more, but what it was sent stays in its queue
        with control.ControlConnection(system.socket) as connection:
            connection.status()  # the provider has come so far
    assert system.counter("client_dropped{slow}") or system.counter("client_dropped{too_many}")
    system.client(BOB).close()
    for family in families:
        family.close()
