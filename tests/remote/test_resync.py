"""A link that breaks while TCP lives: what the two providers ask each other, over a real device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from ipaddress import IPv4Address

import pytest
from channel_app import App
from remote_world import World, all_of, go_back, reset, see_fin

from sidestep.errors import PeerViolation
from sidestep.provider.carry.direction import In
from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.rdma.cm import Connection, ConnectionEvent, ConnectionRequest, Rejected
from sidestep.remote.link import SdpLink
from sidestep.remote.promotion import SIZE, Promotion, Purpose
from sidestep.remote.resync import Resync, ResyncResponder, Route, by_request
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import SdpEvent, SdpEventKind
from sidestep.sdp.settings import Addresses
from sidestep.sdp.wire import service_id
from sidestep.switch.link import Carried

NAME = bytes(range(16))
KEY = b"k" * 32


class Settling(World):
    """Two hosts that settle; the second answers as `_At` does."""

    def __init__(self, stack: ExitStack, engines: tuple[bool, bool]) -> None:
        super().__init__(stack, engines=engines)
        self.answers = ResyncResponder(self.loop)
        self.answering: Callable[[ConnectionRequest, Promotion, bytes], None] = self._answer
        self.asked: list[Promotion] = []
        self.hello = b""
        self.promotion = Promotion(Purpose.CARRY, 7, NAME)
        self.listener = self.two.stack.take_requests(0, self._requested)
        self.port = self.listener.service_id & 0xFFFF
        self.askers: set[Resync] = set()
        stack.callback(self._close)

    def _close(self) -> None:
        for resync in self.askers:
            resync.close()

    def joined(self, *, promoted: bool = True) -> tuple[App, App, RemoteRelay, RemoteRelay]:
        """A connection over a link that the first host has made."""
        apps = App(0), App(1)
        for app in apps:
            self.stack.callback(app.close)
        self._accepting = apps[1]
        self.taken: list[RemoteRelay] = []
        made: list[RemoteRelay] = []

        def beside(hello: bytes) -> bytes:
            self.hello = hello
            return self.promotion.encode(hello, KEY)

        def told(stream: SdpStream, event: object) -> None:
            if isinstance(event, SdpEvent) and event.kind is SdpEventKind.ESTABLISHED:
                link = SdpLink(stream, self.loop, self._broken, self.one.logged.append)
                made.append(self.one.take(apps[0], link))
                link.handle_established()

        addresses = Addresses(IPv4Address(self.one.device.address), 1, IPv4Address(self.two.device.address), self.port)
        self.one.stack.connect(self.two.device.address, addresses, told, beside_hello=beside)
        self.turns(lambda: bool(made and self.taken))
        if promoted:
            self.promote(*apps)
        return *apps, made[0], self.taken[0]

    def _broken(self, far: Carried) -> None:
        route = Route(self.hello, partial(by_request, self.one.stack, self.two.device.address, self.port))
        self.askers.add(Resync(self.loop, route, self.promotion, KEY, far, self.askers.discard))

    def _requested(self, request: ConnectionRequest) -> None:
        found = Promotion.find(request.private_data, KEY)
        assert found is not None
        self.asked.append(found)
        hello = request.private_data[:-SIZE]
        if found.purpose is not Purpose.CARRY:
            self.answering(request, found, hello)
            return

        def accepted(stream: SdpStream) -> None:
            link = SdpLink(
                stream,
                self.loop,
                lambda _far: self.answers.handle_broken(NAME),
                self.two.logged.append,
                rounds=found.rounds,
            )
            far = self.two.take(self._accepting, link)
            far.on_over = lambda: self.answers.remove(NAME)
            self.answers.add(NAME, hello, link, far)
            self.taken.append(far)

        self.two.stack.serve(request, accepted, self.port, beside_hello=SIZE)

    def _answer(self, request: ConnectionRequest, found: Promotion, hello: bytes) -> None:
        request.reject(private_data=self.answers.answer(found, hello, KEY))

    def ask(self, purpose: Purpose, arrived: int = 0, *, hello: bytes | None = None) -> Promotion | None:
        """One question of the first host's, and its answer."""
        told: list[Rejected] = []
        qp = self.one.stack.domain.create_qp(self.one.stack.send_cq, self.one.stack.recv_cq)

        def hear(_connection: Connection, event: ConnectionEvent) -> None:
            if isinstance(event, Rejected):
                told.append(event)

        hello = self.hello if hello is None else hello
        asked = replace(self.promotion, purpose=purpose, arrived=arrived).encode(hello, KEY)
        self.one.stack.device.cm.connect(self.two.device.address, service_id(self.port), qp, hello + asked, hear)
        self.turns(lambda: bool(told))
        qp.destroy()
        self.rest()
        return Promotion.find(hello + told[0].private_data, KEY)

    def cut(self, far: RemoteRelay) -> None:
        """The RDMA connection is lost, seen from this end first."""
        assert isinstance(far.link, SdpLink)
        far.link.stream.abort()

    def over(self) -> bool:
        """Whether neither host has a connection."""
        return not len(self.one.hub) + len(self.two.hub)


@pytest.fixture(params=[(False, False), (True, True)], ids=["python", "engines"])
def world(request: pytest.FixtureRequest) -> Iterator[Settling]:
    with ExitStack() as stack:
        made = Settling(stack, request.param)
        yield made
        assert not made.one.faults + made.two.faults
        assert [line for line in made.one.logged + made.two.logged if "Traceback" in line] == []


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_tcp_goes_on_where_the_link_broke(world: Settling, whose: int, seed: int) -> None:
    dice = random.Random(seed)
    a, b, *ends = world.joined()
    counts = {a: 0, b: 0}
    for _ in range(dice.randrange(2, 15)):
        for app in (a, b):
            counts[app] += app.send(dice.randbytes(dice.randrange(1, 1500)))
        world.turn()
        app = dice.choice((a, b))
        app.end.read(dice.randrange(1, 3000))
        app.hint()
    world.cut(ends[whose])
    world.turns(world.over)
    assert not reset(a) | reset(b)
    all_of(a, b, counts[a])
    all_of(b, a, counts[b])
    world.turns(lambda: world.asked[-1].purpose is Purpose.RESYNCED)
    assert [one.purpose for one in world.asked] == [Purpose.CARRY, Purpose.RESYNC, Purpose.RESYNCED]


def test_a_connection_that_ends_is_not_asked_about(world: Settling) -> None:
    a, b, _, _ = world.joined()
    for app in (a, b):
        app.send_control(notice=1)
        world.rest()
    assert world.over()
    world.rest()
    assert [one.purpose for one in world.asked] == [Purpose.CARRY]
    assert not reset(a) | reset(b)


def test_one_that_cannot_send_again_has_both_reset(world: Settling) -> None:
    """It has gone back to TCP, and what it sent by ring before is lost."""
    a, b, one, _ = world.joined()
    world.cut(one)
    a.send(b"lost")
    go_back(a)
    world.turns(world.over)
    world.turns(lambda: reset(b))
    assert reset(a)
    assert b.word("tx_back") == 0  # it has not been told to read TCP
    assert Purpose.FAILED in [each.purpose for each in world.asked]


def test_the_other_way_round(world: Settling) -> None:
    a, b, one, _ = world.joined()
    world.cut(one)
    b.send(b"lost")
    go_back(b)
    world.turns(world.over)
    assert reset(a)
    assert reset(b)
    assert a.word("tx_back") == 0


def test_who_does_not_know_the_link_has_it_reset(world: Settling) -> None:
    a, _, one, other = world.joined()
    world.answers.remove(NAME)
    world.cut(one)
    world.turns(lambda: reset(a))
    assert not other.lost  # nobody asks it any more: its own look at TCP, or the time, will tell


def test_an_answer_is_the_same_however_often_it_is_asked_for(world: Settling) -> None:
    a, b, one, other = world.joined()
    a.send(bytes(300))
    world.rest()
    world.answering = lambda request, _found, _hello: request.reject()  # the asker by itself hears nothing
    assert isinstance(one.link, SdpLink)
    one.link.abandon()
    world.rest()
    world.answering = world._answer
    for _ in range(2):
        found = world.ask(Purpose.RESYNC, 0)
        assert found is not None
        assert (found.purpose, found.arrived) == (Purpose.ARRIVED, 300)
    for _ in range(2):
        found = world.ask(Purpose.RESYNCED)
        assert found is not None
        assert found.purpose is Purpose.HEARD
    assert other.lost
    assert not reset(b)
    assert (b.word("tx_back_at"), b.word("rx_frozen")) == (300, 0)


def test_settled_before_anything_was_asked_is_a_reset(world: Settling) -> None:
    _, b, _, _ = world.joined()
    found = world.ask(Purpose.RESYNCED)
    assert found is not None
    assert reset(b)


@pytest.mark.parametrize("purpose", [Purpose.RESYNC, Purpose.RESYNCED, Purpose.FAILED, Purpose.ARRIVED, Purpose.HEARD])
def test_a_question_with_another_hello_is_not_answered(world: Settling, purpose: Purpose) -> None:
    _, b, _, other = world.joined()
    changed = bytearray(world.hello)
    changed[-1] ^= 1
    assert world.ask(purpose, hello=bytes(changed)) is None
    assert not other.lost
    assert not reset(b)


def test_an_impossible_count_is_answered_by_nothing(world: Settling) -> None:
    _, b, _, _ = world.joined()
    assert world.ask(Purpose.RESYNC, 1) is None
    assert reset(b)


def test_a_question_that_comes_back_is_no_answer(world: Settling) -> None:
    """Who has no key can send back what we said ourselves."""
    a, _, one, _ = world.joined()
    a.send(b"five!")

    def mirror(request: ConnectionRequest, _found: Promotion, _hello: bytes) -> None:
        request.reject(private_data=request.private_data[-SIZE:])

    world.answering = mirror
    world.cut(one)
    world.turns(lambda: reset(a))


def test_a_question_that_is_accepted_is_no_answer(world: Settling) -> None:
    a, _, one, _ = world.joined()

    def accept(request: ConnectionRequest, _found: Promotion, _hello: bytes) -> None:
        qp = world.two.stack.domain.create_qp(world.two.stack.send_cq, world.two.stack.recv_cq)
        world.stack.callback(qp.destroy)
        request.accept(qp, b"", lambda *_: None)

    world.answering = accept
    world.cut(one)
    world.turns(lambda: reset(a))


def test_what_was_reset_while_the_link_broke_is_reset_there_too(world: Settling) -> None:
    a, b, one, _ = world.joined()
    assert isinstance(one.link, SdpLink)
    one.link.stream.abort()
    one.reset("violation")
    world.turns(lambda: reset(b))
    assert reset(a)


def test_what_was_dropped_as_it_needed_nothing_resets_nobody_else(world: Settling) -> None:
    """Both are on TCP in both directions when the link breaks."""
    a, b, one, other = world.joined()
    for app in (a, b):
        go_back(app)
    world.turns(lambda: one.into is other.into is In.BACK)
    world.cut(one)
    one.handle_arrived(None)
    assert one.lost
    world.turns(lambda: other.lost)
    assert not reset(a) | reset(b)


def test_tcp_that_has_been_reset_is_not_waited_for(world: Settling) -> None:
    """The other host's provider has died, and its application has reset the connection."""
    _, b, one, other = world.joined()
    world.answering = lambda request, _found, _hello: request.reject()
    assert isinstance(one.link, SdpLink)
    one.link.abandon()
    b.held = False
    see_fin(b)
    world.turns(lambda: reset(b))
    assert other.lost


def test_a_name_is_given_once(world: Settling) -> None:
    world.joined()
    with pytest.raises(PeerViolation, match="second link"):
        world.answers.check(NAME)
    world.answers.check(bytes(16))


def test_nothing_is_left_of_many(world: Settling) -> None:
    for _ in range(5):
        _, _, one, _ = world.joined()
        world.cut(one)
        world.turns(world.over)
        world.turns(lambda: world.asked[-1].purpose is Purpose.RESYNCED)
        world.rest()
        world.answers._settled.clear()
    assert not world.answers._links
    assert world.loop.timers_held < 64  # cancelled ones, at most
