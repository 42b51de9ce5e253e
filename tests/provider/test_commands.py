"""`sidestep demote` and `promote` at the provider: who is told, who may ask, and what is taken for done."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from click.testing import CliRunner
from common import eventually, forked, slot
from shim_client import ShimClient

from sidestep import limits
from sidestep.cli.group import cli
from sidestep.errors import Misuse, Unavailable
from sidestep.native import layout
from sidestep.native.layout import Ask, Reason, Rpc, Rx, State, Tx
from sidestep.observe import demotion
from sidestep.observe.demotion import Order, Result
from sidestep.provider import commands as orders
from sidestep.provider import rpc
from sidestep.provider.clients import Arena, Client
from sidestep.provider.commands import Passed
from sidestep.provider.control import ControlConnection
from sidestep.provider.pairing.registry import Registry
from sidestep.switch.offers import ClientId
from sidestep.testing import Sidestep

MakeClient = Callable[[], ShimClient]
ARENA = bytes(range(16))
NOBODY = 65534
DEMOTED = {"state": State.PINNED, "reason": Reason.DEMOTED}
ON_RING = {"tx_state": Tx.RING, "rx_state": Rx.RING}


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry(netns_cookie=1)
    yield made
    made.close()


class Family:
    """Clients of one arena as `give` sees them, and what they received."""

    def __init__(self, *uids: int) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in uids]
        self.readers = [theirs for _, theirs in pairs]
        self.clients = {
            ClientId(n): Client(ClientId(n), ours, 1, uid, 0.0)
            for n, ((ours, _), uid) in enumerate(zip(pairs, uids, strict=True))
        }
        self.arena = Arena(ARENA, 1, -1, uids[0], 1, clients=set(self.clients))

    def give(self, registry: Registry, *slots: tuple[int, int], caller_uid: int, kind: Rpc = Rpc.DEMOTE) -> Any:
        caller = Client(ClientId(99), self.readers[0], 1, caller_uid, 0.0)
        request = {"arena": ARENA.hex(), "slots": slots}
        return orders.give(
            kind, caller, request, arenas={ARENA: self.arena}, clients=self.clients, registry=registry,
            sees=lambda client, _: client.uid != NOBODY,
        )  # fmt: skip

    def received(self, index: int) -> list[tuple[Rpc, int]]:
        found: list[tuple[Rpc, int]] = []
        while True:
            try:
                packet = self.readers[index].recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            message = rpc.Message.decode(packet)
            found.append((message.type, message.token))


@pytest.fixture
def family(closing: ExitStack) -> Callable[..., Family]:
    def make(*uids: int) -> Family:
        made = Family(*uids)
        for sock in (*made.readers, *(client.sock for client in made.clients.values())):
            closing.callback(sock.close)
        return made

    return make


@pytest.mark.parametrize("caller_uid", [1000, 0], ids=["its own user", "root"])
def test_every_process_of_the_family_is_told(
    registry: Registry, family: Callable[..., Family], caller_uid: int
) -> None:
    three = family(1000, 1000, 1000)
    reply = three.give(registry, (5, 7), (6, 1), caller_uid=caller_uid, kind=Rpc.PROMOTE)
    assert reply == {"passed": Passed.SENT, "told": 2}
    for index in range(3):
        assert three.received(index) == [(Rpc.PROMOTE, 5 << 32 | 7), (Rpc.PROMOTE, 6 << 32 | 1)]


@pytest.mark.parametrize("uids", [(1000,), (0, 2000)], ids=["another's", "of one that root started"])
def test_what_another_user_holds_is_not_touched(
    registry: Registry, family: Callable[..., Family], uids: tuple[int, ...]
) -> None:
    theirs = family(*uids)
    assert theirs.give(registry, (5, 7), caller_uid=2000) == {"passed": Passed.FOREIGN, "told": 0}
    assert [theirs.received(index) for index in range(len(uids))] == [[]] * len(uids)


def test_who_is_a_peer_reaches_the_family_and_no_other(registry: Registry, family: Callable[..., Family]) -> None:
    """The name is known to its peers alone; it only makes a family look at a connection. Old shims have none."""
    ours, theirs = family(1000, 1000), family(1000)
    ours.arena.family_id = bytes(15) + b"p"
    arenas = {ARENA: ours.arena, ARENA[::-1]: theirs.arena}
    for named in (ours.arena.family_id, ARENA, bytes(16)):
        asked = rpc.Message(type=Rpc.SERVE, arena_id=named, segment_id=ARENA)
        orders.serve(asked, arenas=arenas, clients=ours.clients, registry=registry)
    assert [ours.received(0), ours.received(1), theirs.received(0)] == [[(Rpc.SERVE, 0)], [(Rpc.SERVE, 0)], []]


def test_nobody_owns_nothing(registry: Registry, family: Callable[..., Family]) -> None:
    """Whom a user namespace shows as nobody may be anybody."""
    assert family(NOBODY).give(registry, (5, 7), caller_uid=NOBODY) == {"passed": Passed.FOREIGN, "told": 0}


def test_who_does_not_read_is_neither_waited_for_nor_dropped(registry: Registry, family: Callable[..., Family]) -> None:
    deaf = family(1000)
    told = 0
    for _ in range(1000):
        reply = deaf.give(registry, *((number, 1) for number in range(100)), caller_uid=1000)
        told += reply["told"]
        if reply["passed"] is Passed.BUSY:
            break
    assert reply["passed"] is Passed.BUSY
    assert len(deaf.received(0)) == told  # none got lost, and the count is right
    assert deaf.give(registry, (1, 1), caller_uid=1000) == {"passed": Passed.SENT, "told": 1}


def test_orders_leave_room_for_the_answers_to_who_does_not_read(sidestep: Sidestep, shim_client: MakeClient) -> None:
    deaf = shim_client()
    request = {"arena": deaf.arena_id.hex(), "slots": [[number, 1] for number in range(limits.ORDERS_PER_REQUEST)]}
    told = 0
    with ControlConnection(sidestep.socket) as control:
        for _ in range(1000):
            reply = control.document("demote", **request)
            told += reply["told"]
            if reply["passed"] == Passed.BUSY:
                break
    assert reply["passed"] == Passed.BUSY
    # as many answers as a client can wait for: one for each of its offers
    for token in range(limits.OFFERS_PENDING_MAX):
        rpc.send(deaf.sock, rpc.Message(type=Rpc.ASK, token=token, flags=Ask.OPEN))
    assert [_told(deaf, Rpc.DEMOTE) & 0xFFFFFFFF for _ in range(told)] == [1] * told
    assert [_told(deaf, Rpc.ANSWER) for _ in range(limits.OFFERS_PENDING_MAX)] == list(range(limits.OFFERS_PENDING_MAX))


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"arena": "zz", "slots": [[1, 1]]},
        {"arena": ARENA.hex(), "slots": []},
        {"arena": ARENA.hex(), "slots": [[1]]},
        {"arena": ARENA.hex(), "slots": [[-1, 1]]},
        {"arena": ARENA.hex(), "slots": [[layout.ARENA_SLOTS_MAX, 1]]},
        {"arena": ARENA.hex(), "slots": [[1, 1 << 32]]},
        {"arena": ARENA.hex(), "slots": [[1, 1]] * (limits.ORDERS_PER_REQUEST + 1)},
        {"arena": ARENA.hex(), "slots": [[float("inf"), 1]]},
        {"arena": 5, "slots": [[1, 1]]},
        {"arena": ARENA.hex(), "slots": 5},
    ],
    ids=str,
)
def test_a_request_that_makes_no_sense_is_refused(sidestep: Sidestep, request_: dict[str, Any]) -> None:
    with pytest.raises(Misuse):
        orders.parse(request_)
    with ControlConnection(sidestep.socket) as control:
        with pytest.raises(Unavailable, match="refused 'demote'"):
            control.document("demote", **request_)
        assert control.status()["counters"].get("internal_error{message}") is None


def test_an_arena_nobody_has_is_gone(sidestep: Sidestep) -> None:
    with ControlConnection(sidestep.socket) as control:
        assert control.document("demote", arena=ARENA.hex(), slots=[[1, 1]]) == {"passed": "gone", "told": 0}
        assert control.status()["counters"]["order_refused{gone}"] == 1


def test_the_registry_tells_who_is_awake(sidestep: Sidestep, shim_client: MakeClient) -> None:
    client, bystander = shim_client(), shim_client()
    client.write_arena([slot(1000)])
    before = client.registry_header()["commands"]
    assert [outcome.result for outcome in sidestep.demote(lambda c: c.local == "127.0.0.1:1000", 0)] == [Result.PENDING]
    with client.receive().descriptors:
        # before and after the message: who looked in between looks again
        assert client.registry_header()["commands"] == before + 2
    bystander.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        bystander.receive()


def _told(client: ShimClient, kind: Rpc) -> int:
    packet = client.receive()
    packet.descriptors.close()
    assert packet.message.type is kind
    return packet.message.token


@pytest.mark.parametrize(
    ("order", "after", "result"),
    [
        (Order.DEMOTE, DEMOTED, Result.TCP),
        (Order.DEMOTE, DEMOTED | {"rx_state": Rx.RING}, Result.PENDING),  # the other end still sends by ring
        (Order.DEMOTE, ON_RING, Result.PENDING),
        (Order.DEMOTE, {"state": State.FREE}, Result.ENDED),
        (Order.DEMOTE, {"generation": 3}, Result.ENDED),  # the slot is another connection's
        (Order.PROMOTE, ON_RING, Result.PROMOTED),
        (Order.PROMOTE, {"state": State.NATIVE}, Result.ALLOWED),
        (Order.PROMOTE, {"state": State.ATTACHED}, Result.PENDING),
        (Order.PROMOTE, DEMOTED, Result.PENDING),
        (Order.PROMOTE, {"state": State.PINNED, "reason": Reason.URGENT_DATA}, Result.STAYS),
    ],
)
def test_done_is_what_the_connection_says(
    sidestep: Sidestep, shim_client: MakeClient, order: Order, after: dict[str, object], result: Result
) -> None:
    client = shim_client()
    before = ON_RING if order is Order.DEMOTE else DEMOTED
    client.write_arena([slot(1), slot(1000, **before)])

    def program() -> int:  # that gets the order
        failed = _told(client, Rpc[order.name]) != 1 << 32 | 1
        client.write_arena([slot(1), slot(1000, **({"generation": 1} | after))])
        return failed

    pid = forked(program)
    (outcome,) = demotion.order(sidestep.socket, order, lambda c: c.local == "127.0.0.1:1000", 0.5)
    assert os.waitpid(pid, 0)[1] == 0
    assert outcome.result is result
    assert outcome.done == (outcome.result in (Result.TCP, Result.PROMOTED, Result.ALLOWED, Result.ENDED))


def test_more_connections_than_a_request_holds(sidestep: Sidestep, closing: ExitStack) -> None:
    count = 3 * limits.ORDERS_PER_REQUEST + 1
    client = closing.enter_context(ShimClient(sidestep.socket, slots_max=count))
    client.hello()
    client.write_arena([slot(1000 + number) for number in range(count)])
    outcomes = sidestep.demote(timeout_s=0)
    assert len(outcomes) == count
    told: set[int] = set()
    while len(told) < count:
        told.add(_told(client, Rpc.DEMOTE) >> 32)
    assert told == set(range(count))


def test_the_commands(sidestep: Sidestep, shim_client: MakeClient) -> None:
    client = shim_client()
    client.write_arena([slot(1000, **DEMOTED), slot(1001, **ON_RING)])
    place = f"--socket={sidestep.socket}"
    run = CliRunner().invoke

    done = run(cli, ["demote", place, "127.0.0.1:1000"])
    assert (done.exit_code, "127.0.0.1:1000 127.0.0.2:80  is on TCP" in done.output) == (0, True)
    both = run(cli, ["demote", place, "--port=80", "--timeout=0", "--json"])
    assert both.exit_code == 1
    assert [one["result"] for one in json.loads(both.stdout)["connections"]] == ["tcp", "pending"]
    assert run(cli, ["promote", place, "--pid", str(os.getpid()), "--port=1001"]).exit_code == 0
    for wrong in ([], ["--all", "--pid=1"]):
        assert run(cli, ["demote", place, *wrong]).exit_code == 2
    assert isinstance(run(cli, ["demote", place, "--port=9"]).exception, Unavailable)
    assert isinstance(run(cli, ["demote", place, "elsewhere"]).exception, Misuse)
    eventually(lambda: client.registry_header()["commands"] >= 6)
