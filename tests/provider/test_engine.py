"""The engine beside Python: whoever has a connection, the bytes are the same, and so is what either leaves."""

from __future__ import annotations

import errno
import os
import random
from contextlib import ExitStack
from typing import Any, Final, cast

import pytest
from channel_app import Stream
from remote_world import World, reset

from sidestep.native._engine import Engine, Loan
from sidestep.provider.carry import lending
from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.rdma.verbs import Lent
from sidestep.remote.link import SdpLink

ENGINES: Final = {"engines": (True, True), "engine-python": (True, False), "python-engine": (False, True)}
SIZES: Final = (1, 16, 17, 100, 4000, 4096, 5000, 30_000, 65_536, 200_000)


def lent(world: World) -> int:
    return sum(host.counters.get("engine_lent") for host in (world.one, world.two))


def taken_back(world: World, end: RemoteRelay) -> None:
    """The engine of the first host has had it, and will get it again."""
    lender = world.one.hub.lending
    assert lender is not None
    world.turns(lambda: end in lender)
    end.reclaim()


def state(end: RemoteRelay) -> tuple[dict[str, int], dict[str, int]]:
    """What one end has counted of what it sent, and of what it received: it must be what the other end has."""
    link = end.link
    assert isinstance(link, SdpLink)
    connection, qp = link.stream.connection, link.stream.qp
    assert qp is not None
    flow = connection._flow
    sent = {"mseq": flow.tx_mseq, "msn": qp.stream.sender._send_msn, "payloads": connection._source.pnd}  # type: ignore[attr-defined]
    received = {"mseq": flow.rx_mseq, "msn": qp.stream.receiver._send_msn, "payloads": connection._sink.nd}  # type: ignore[attr-defined]
    return sent, received


@pytest.mark.parametrize("engines", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("ring", [4096, 65536], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_each_byte_arrives_whoever_carries_it(
    closing: ExitStack, engines: tuple[bool, bool], ring: int, seed: int
) -> None:
    """Connections change hands at any moment, amid messages and with the wire full."""
    dice = random.Random(seed)
    world = World(closing, engines=engines)
    a, b, *ends = world.pair(rings=(ring, ring))
    streams = Stream(a, b, dice), Stream(b, a, dice)
    changes = dice.choice((0.0, 0.05, 0.5))
    for _ in range(600):
        stream = dice.choice(streams)
        if dice.random() < 0.5:
            stream.send(dice.choice(SIZES))
        else:
            stream.receive()
        if dice.random() < 0.7:
            world.turn()
        if dice.random() < changes:
            dice.choice(ends).reclaim()
    for stream in streams:
        while stream.got < len(stream.sent):
            world.rest()
            stream.receive()
    world.rest()
    for end in ends:
        end.reclaim()
    world.rest()
    (sent, received), (other_sent, other_received) = map(state, ends)
    assert (sent, received) == (other_received, other_sent)
    assert not reset(a)
    assert not reset(b)
    assert lent(world) > 0
    assert not world.one.faults + world.two.faults


def test_what_is_idle_is_lent_and_stays_there(closing: ExitStack) -> None:
    world = World(closing, engines=(True, True))
    a, b, *_ = world.pair()
    for _ in range(50):
        world.rest()
    before = lent(world)
    for _ in range(200):
        a.send(b"ping")
        world.rest()
        assert b.receive() == b"ping"
        b.send(b"pong")
        world.rest()
        assert a.receive() == b"pong"
    assert lent(world) == before


def test_words_that_come_between_the_last_look_and_the_loan_are_heard(closing: ExitStack) -> None:
    world = World(closing, engines=(True, True))
    a, b, end, _ = world.pair()
    lend, said = end.link.lend, list[str]()

    def late(record: dict[str, int]) -> Lent | None:
        if (found := lend(record)) is not None and not said:
            said.append("it ends")
            a.send_control(shut_wr=1)
        return found

    taken_back(world, end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(end.link, "lend", late)
        world.turns(lambda: bool(said))
    world.turns(lambda: bool(b.word("tx_fin")))


def test_who_waits_to_be_lent_and_ends_is_not_held_up(closing: ExitStack) -> None:
    world = World(closing, engines=(True, True))
    a, b, end, _ = world.pair()
    taken_back(world, end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(end.link, "lend", lambda _record: None)
        world.turns(lambda: end.calm)
        a.send(b"last")
        a.send_control(shut_wr=1)
        world.turns(lambda: not end.calm)
    world.turns(lambda: bool(b.word("tx_fin")))
    assert b.receive() == b"last"


@pytest.mark.parametrize("pause_s", [0.0, lending._PAUSE_S])
def test_what_the_engine_left_unread_is_read(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    """It gives the connection back for a word that it does not know, and may be lent it before that was heard."""
    monkeypatch.setattr(lending, "_PAUSE_S", pause_s)
    monkeypatch.setattr(lending, "_PAUSE_MAX_S", pause_s)
    world = World(closing, engines=(True, True))
    a, b, *_ = world.pair()
    for _ in range(20):
        a.send(b"data")
        world.turns(lambda: b.receive() == b"data")
    a.send(b"last")
    a.send_control(shut_wr=1)
    world.turns(lambda: bool(b.word("tx_fin")))
    assert b.receive() == b"last"


class Full:
    """An engine that takes no more connections for a while."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.refused = engine, 0

    def lend(self, *given: Any) -> Loan:
        if self.refused < 3:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._engine.lend(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_what_the_engine_cannot_take_python_carries(closing: ExitStack) -> None:
    world = World(closing, engines=(True, True))
    a, b, end, _ = world.pair()
    taken_back(world, end)
    lender = world.one.hub.lending
    assert lender is not None
    lender.engine = full = cast(Engine, Full(lender.engine))
    there, back = Stream(a, b, random.Random(1)), Stream(b, a, random.Random(2))

    def talk() -> bool:
        for stream in (there, back):
            stream.send(100)
            stream.receive()
        return end in lender

    world.turns(talk)
    assert cast(Full, full).refused == 3
    for stream in (there, back):
        while stream.got < len(stream.sent):
            world.rest()
            stream.receive()
