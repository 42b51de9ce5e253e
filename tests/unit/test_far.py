"""A connection between two hosts: two providers' hubs, an application at each, and a real link of SDP over iWARP."""

from __future__ import annotations

import random
import selectors
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ipaddress import IPv4Address

import pytest
from channel_app import RING, App

from sidestep.counters import Counters
from sidestep.provider import far as fars
from sidestep.provider.far import Far
from sidestep.provider.joints import Handed, Relays
from sidestep.provider.services import ProviderServices
from sidestep.rdma.iwarp.device import IwarpDevice
from sidestep.rdma.soft.loop import Loop
from sidestep.sdp.endpoint import Stack, Stream
from sidestep.sdp.settings import Addresses
from sidestep.switch.sdp.link import SdpLink

TURN_S = 0.02
WAIT_S = 20.0


class Host:
    """One provider: a hub and a stack."""

    def __init__(self, stack: ExitStack, loop: Loop, address: str) -> None:
        self.loop = loop
        self.faults: list[BaseException] = []
        self.selector = stack.enter_context(selectors.DefaultSelector())
        self.now = 0.0
        self.services = ProviderServices(self.selector, lambda: self.now, lambda _: None)
        self.counters = Counters()
        self.hub = Relays(self.services, self.counters, relays_max=8, guarded=self._guarded)
        self.hub.descriptors()
        stack.callback(self.hub.close)
        self.device = IwarpDevice(address, loop)
        stack.callback(self.device.close)
        self.stack = Stack(self.device, lambda: loop.now)
        stack.callback(self.stack.close)
        self.lost: list[Far] = []
        self.logged: list[str] = []
        self.dropped = 0

    def _guarded(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:
            self.faults.append(error)

    def _on_drop(self) -> None:
        self.dropped += 1

    def link(self, stream: Stream) -> SdpLink:
        return SdpLink(stream, self.loop.soon, self.lost.append, self.logged.append)

    def take(self, app: App, link: SdpLink) -> Far:
        far = fars.enter(
            self.hub, app.given(), protocol="test", on_drop=self._on_drop, link=link, segment_id=bytes(16), uid=0
        )
        link.carry(far)
        return far


class World:
    """Two hosts, and connections between them."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.loop = Loop()
        stack.callback(self.loop.close)
        self.one, self.two = Host(stack, self.loop, "127.0.0.1"), Host(stack, self.loop, "127.0.0.2")

    def turns(self, until: Callable[[], bool]) -> None:
        """Lets both hosts work until something is so."""
        deadline = self.loop.now + WAIT_S
        while not until():
            assert self.loop.now < deadline, "it never came to be"
            self.turn()

    def turn(self) -> bool:
        """One turn of all; whether anything was to be done."""
        busy = False
        for host in (self.one, self.two):
            if host.hub.about_to_wait():
                busy = True
                host.hub.handle_turn()
        return self.loop.turn(0 if busy else TURN_S) or busy

    def rest(self) -> None:
        """Lets both hosts work until nothing happens any more."""
        quiet = 0
        while quiet < 3:
            quiet = 0 if self.turn() else quiet + 1

    def pair(self, *, promoted: bool = True) -> tuple[App, App, Far, Far]:
        """Two applications whose providers have a link."""
        apps = App(0), App(1)
        for app in apps:
            self.stack.callback(app.close)
        taken: list[Far] = []
        listener = self.two.stack.listen(0, lambda stream: taken.append(self.two.take(apps[1], self.two.link(stream))))
        addresses = Addresses(
            IPv4Address(self.one.device.address), 1, IPv4Address(self.two.device.address), listener.service_id & 0xFFFF
        )
        stream = self.one.stack.connect(self.two.device.address, addresses, lambda *_: None)
        far = self.one.take(apps[0], self.one.link(stream))
        self.turns(lambda: bool(taken))
        listener.close()
        if promoted:
            for words in ({"attached": 1}, {"rx_ready": 1}, {"tx_switch_offset": 7, "tx_switched": 1}):
                for app in apps:
                    app.say(**words)
                self.rest()
            assert [app.word("tx_switch_offset") for app in apps] == [7, 7]
            assert all(app.word("handed_on") & Handed.SWITCH for app in apps)
        return *apps, far, taken[0]


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def world(closing: ExitStack) -> Iterator[World]:
    made = World(closing)
    yield made
    assert not made.one.faults + made.two.faults


def test_words_are_handed_on_in_their_order(world: World) -> None:
    a, b, _, _ = world.pair(promoted=False)
    a.say(attached=1)
    world.rest()
    assert (a.word("attached"), b.word("attached")) == (0, 0)
    b.say(attached=1)
    world.rest()
    assert (a.word("attached"), b.word("attached")) == (1, 1)
    b.say(rx_ready=1)
    world.rest()
    assert (a.word("rx_ready"), b.word("rx_ready")) == (1, 0)
    a.say(tx_switch_offset=123, tx_switched=1)
    world.rest()
    assert (b.word("tx_switched"), b.word("tx_switch_offset"), a.word("handed_on")) == (1, 123, Handed.SWITCH)


def test_bytes_both_ways_in_any_portions(world: World) -> None:
    a, b, _, _ = world.pair()
    dice = random.Random(5)
    for sender, receiver in ((a, b), (b, a)):
        data, sent, got = dice.randbytes(100_000), 0, b""
        while len(got) < len(data):
            sent += sender.send(data[sent : sent + dice.randrange(1, 6000)])
            world.turn()
            got += receiver.receive()
        assert got == data
    world.rest()
    assert a.end.unread == b.end.unread == 0 or max(a.end.unread, b.end.unread) <= RING // 4
