"""Two hosts' hubs in one process, with applications played word by word and a real link of SDP over iWARP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from ipaddress import IPv4Address
from random import randrange
from struct import Struct

from channel_app import RING, App
from fake_device import ADDRESSES, open_fake

from sidestep import limits
from sidestep.counters import Counters
from sidestep.loop import Loop
from sidestep.native._engine import Engine
from sidestep.native.layout import Acked, Back, Notice, Seen
from sidestep.provider.carry import remote_relay
from sidestep.provider.carry.hub import Hub
from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.rdma.iwarp.device import ATTRIBUTES, IwarpDevice
from sidestep.rdma.kernel.pinned import PinnedMemory
from sidestep.rdma.roce.udp_link import UdpRoceDevice
from sidestep.rdma.verbs import Device, DeviceAttributes
from sidestep.remote.control_link import PRIVATE_DATA_MAX, ControlLink, Req, Talker
from sidestep.remote.control_manager import ControlManager
from sidestep.remote.control_pool import QueuePairPool
from sidestep.remote.link import SdpLink
from sidestep.remote.protocol import settings_on
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import SdpEvent, StreamEvent, StreamReceive
from sidestep.sdp.settings import Addresses
from sidestep.sdp.stack import Stack
from sidestep.switch.link import Carried, Control

WORD = Struct(">B7xQ")
RINGS = RING << 32 | RING  # what ATTACHED says of them
TURN_S = 0.02
WAIT_S = 20.0


class HubWorld:
    """One provider's, whose time is the test's."""

    def __init__(self, stack: ExitStack, relays_max: int = 8, *, engine: bool = False) -> None:
        self.faults: list[BaseException] = []
        self.now = 0.0
        self.hub_loop = Loop(self.faults.append, clock=lambda: self.now)
        stack.callback(self.hub_loop.close)
        self.counters = Counters()
        self.engine = Engine() if engine else None  # without its thread: it works in `step`
        self.hub = Hub(self.hub_loop, self.counters, relays_max=relays_max, engine=self.engine)
        self.hub.descriptors()
        stack.callback(self.hub.close)
        self.dropped = 0

    def _on_drop(self) -> None:
        self.dropped += 1

    def step(self) -> bool:
        """A turn of the engine, and what it tells is heard; whether there was anything."""
        if self.engine is None:
            return False
        self.now += 1e-4  # what was given back is lent again after a while
        busy = self.engine.step()
        return bool(self.hub_loop.run(self.hub_loop.poll(0))) or busy

    def pass_time(self, seconds: float) -> None:
        """And what is due by then happens."""
        self.now += seconds
        self.hub_loop.run([])


class Host(HubWorld):
    """One provider: a hub and a stack."""

    def __init__(
        self,
        stack: ExitStack,
        loop: Loop,
        address: str,
        *,
        engine: bool,
        wire: str = "iwarp",
        attributes: DeviceAttributes = ATTRIBUTES,
        relays_max: int = 8,
        pinned: PinnedMemory | None = None,
    ) -> None:
        super().__init__(stack, relays_max, engine=engine)
        self.loop = loop
        self.device: Device
        if wire == "verbs":
            self.device = open_fake(address, loop, pinned)
        elif wire == "roce":
            self.device = UdpRoceDevice(address, loop)
        else:
            self.device = IwarpDevice(address, loop, attributes=attributes)
        stack.callback(self.device.close)
        self.manager: ControlManager | None = None
        self.control: ControlLink | None = None
        if wire == "verbs":
            self.manager = ControlManager(self.device, loop, wire, lambda _address, reached: reached(self.control))
        self.stack = Stack(
            self.device, lambda: loop.now, settings_on(self.device), manager=self.manager, private_waits=False,
            private_data_max=PRIVATE_DATA_MAX if self.manager is not None else 0,
        )  # fmt: skip
        stack.callback(self.stack.close)
        if self.manager is not None:
            stack.callback(self.manager.close)
        self.lost: list[Carried] = []
        self.logged: list[str] = []

    def keep_joined(self) -> QueuePairPool:
        """Queue pairs are joined for connections to come."""
        assert self.manager is not None
        self.manager.keep_joined(self.stack.make_usual_qp, partial(self.counters.add, "pooled_queue_pair"))
        assert self.manager.pool is not None
        return self.manager.pool

    def wait_for_attachments(self) -> None:
        """Applications that have not attached by now are not waited for any longer."""
        self.pass_time(limits.RELAY_ATTACH_S)

    def link(self, stream: SdpStream, *, rounds: bool = False) -> SdpLink:
        return SdpLink(stream, self.loop, self.lost.append, self.logged.append, rounds=rounds)

    def take(self, app: App, link: SdpLink) -> RemoteRelay:
        far = remote_relay.enter(
            self.hub, app.given(), protocol="test", on_drop=self._on_drop, link=link, segment_id=bytes(16), uid=0
        )
        link.carry(far)
        return far


class Stranger:
    """The other end of a link, which follows no rules."""

    def __init__(self, stream: SdpStream) -> None:
        self.stream = stream
        stream.tell = self._told
        self.room = memoryview(bytearray(1 << 16))
        self.heard = bytearray()
        self.events: list[str] = []
        self.open = True
        self._reading = False

    def _told(self, _stream: SdpStream, event: StreamEvent) -> None:
        if isinstance(event, SdpEvent):
            self.events.append(event.kind.name)
        if type(event) is StreamReceive:
            self._reading = False
            self.heard += self.room[: event.filled]
            if event.filled:
                self.read()
            else:
                self.open = False
        elif isinstance(event, SdpEvent) and event.kind.name in ("BROKEN", "CLOSED", "END_OF_STREAM"):
            self.open = False

    def read(self) -> None:
        """Hears what comes."""
        if not self._reading and self.open:
            self._reading = True
            self.stream.receive(self.room)

    def write(self, data: bytes) -> None:
        """Any bytes."""
        if self.open:
            self.stream.send(memoryview(data))

    def send_control(self, word: int, count: int = 0, data: bytes = b"") -> None:
        """One word, and what follows it."""
        self.write(WORD.pack(word, count) + data)

    def words(self) -> list[tuple[Control, int]]:
        """What has been heard, without data."""
        found, rest = [], bytes(self.heard)
        while len(rest) >= WORD.size:
            number, count = WORD.unpack(rest[: WORD.size])
            rest = rest[WORD.size + (count if number == Control.DATA else 0) :]
            found.append((Control(number), count))
        return found


class World:
    """Two hosts, and connections between them."""

    def __init__(
        self,
        stack: ExitStack,
        *,
        engines: tuple[bool, bool] = (False, False),
        wire: str = "iwarp",
        attributes: DeviceAttributes = ATTRIBUTES,
        relays_max: int = 8,
        pinned: tuple[PinnedMemory | None, PinnedMemory | None] = (None, None),
    ) -> None:
        self.stack = stack
        self.loop = Loop()
        stack.callback(self.loop.close)
        one, two = "127.0.0.1", "127.0.0.2"
        if wire == "roce":
            net = f"127.{randrange(1, 255)}.{randrange(256)}"  # its port is one for each address
            one, two = f"{net}.1", f"{net}.2"
        elif wire == "verbs":
            one, two = ADDRESSES
        control = [self._control_stack(address) for address in (one, two) if wire == "verbs"]
        self.one, self.two = (
            Host(
                stack,
                self.loop,
                address,
                engine=engine,
                wire=wire,
                attributes=attributes,
                relays_max=relays_max,
                pinned=memory,
            )
            for address, engine, memory in zip((one, two), engines, pinned, strict=True)
        )
        if control:
            self._make_control_link(*control)

    def _control_stack(self, address: str) -> Stack:
        stack = Stack(IwarpDevice(address, self.loop), lambda: self.loop.now)
        self.stack.callback(stack.device.close)
        self.stack.callback(stack.close)
        return stack

    def _make_control_link(self, asks: Stack, answers: Stack) -> None:
        """By which both ask for connections, as the queue pairs are joined by number."""

        def made(host: Host, stream: SdpStream) -> None:
            host.control = ControlLink(stream, self.loop, asked(host), lambda: None, host.logged.append)

        def asked(host: Host) -> Callable[[ControlLink, int, Req], Talker | None]:
            manager = host.manager
            assert manager is not None
            return manager.take

        listener = answers.listen(0, lambda stream: made(self.two, stream))
        addresses = Addresses(
            IPv4Address(self.one.device.address), 1, IPv4Address(self.two.device.address), listener.service_id & 0xFFFF
        )
        begun: list[SdpStream] = []
        asks.connect(self.two.device.address, addresses, lambda stream, _told: begun.append(stream))
        self._loop_until(lambda: bool(begun))
        made(self.one, begun[0])
        assert self.one.control is not None
        self.one.control.begin()
        self._loop_until(lambda: self.two.control is not None)
        listener.close()

    def _loop_until(self, so: Callable[[], bool]) -> None:
        deadline = self.loop.now + WAIT_S
        while not so():
            assert self.loop.now < deadline, "there is no control link"
            self.loop.turn(TURN_S)

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
            busy |= host.step()
            busy |= host.hub.about_to_wait()
            host.hub.handle_turn()
        return self.loop.turn(0 if busy else TURN_S) or busy

    def rest(self) -> None:
        """Lets both hosts work until nothing happens any more."""
        quiet = 0
        while quiet < 3:
            quiet = 0 if self.turn() else quiet + 1

    def pair(
        self, *, promoted: bool = True, rings: tuple[int, int] = (RING, RING), rounds: bool = True
    ) -> tuple[App, App, RemoteRelay, RemoteRelay]:
        """Two applications whose providers have a link; without `rounds` the first one's is of before those."""
        apps = App(0, rings[0]), App(1, rings[1])
        for app in apps:
            self.stack.callback(app.close)
        taken: list[RemoteRelay] = []
        listener = self.two.stack.listen(
            0, lambda stream: taken.append(self.two.take(apps[1], self.two.link(stream, rounds=rounds)))
        )
        addresses = Addresses(
            IPv4Address(self.one.device.address), 1, IPv4Address(self.two.device.address), listener.service_id & 0xFFFF
        )
        stream = self.one.stack.connect(self.two.device.address, addresses, lambda *_: None)
        far = self.one.take(apps[0], self.one.link(stream))
        self.turns(lambda: bool(taken))
        listener.close()
        if promoted:
            self.promote(*apps)
        return *apps, far, taken[0]

    def promote(self, *apps: App) -> None:
        """Both directions go by ring."""
        for words in ({"attached": 1}, {"rx_ready": 1}, {"tx_switch_offset": 7, "tx_switched": 1}):
            for app in apps:
                app.send_control(**words)
            self.rest()
        assert [app.word("tx_switch_offset") for app in apps] == [7, 7]
        assert all(app.word("acked") & Acked.SWITCH for app in apps)

    def stranger(self, *, promoted: bool = True) -> tuple[App, RemoteRelay, Stranger]:
        """An application whose provider has a link with somebody who says what he likes."""
        app = App(0)
        self.stack.callback(app.close)
        met: list[Stranger] = []
        listener = self.two.stack.listen(0, lambda stream: met.append(Stranger(stream)))
        addresses = Addresses(
            IPv4Address(self.one.device.address), 1, IPv4Address(self.two.device.address), listener.service_id & 0xFFFF
        )
        stream = self.one.stack.connect(self.two.device.address, addresses, lambda *_: None)
        far = self.one.take(app, self.one.link(stream))
        self.turns(lambda: bool(met))
        listener.close()
        app.send_control(attached=1)
        if promoted:
            met[0].send_control(Control.ATTACHED, RINGS)
            self.rest()
            app.send_control(rx_ready=1)
            self.rest()
            met[0].send_control(Control.READY)
            met[0].send_control(Control.SWITCHED, 7)
            self.rest()
            app.send_control(tx_switch_offset=7, tx_switched=1)
        self.rest()
        return app, far, met[0]


def reset(app: App) -> bool:
    """Whether its provider has told it to reset the connection."""
    return bool(app.word("notice") & Notice.RESET)


def go_back(app: App, round_number: int = 1) -> None:
    """It sends by TCP from now on, as `tx_back` of the shim does."""
    sent = app.end.sent
    app.end.publish("tx_back_at", sent)
    assert app.end.decide(True, Back.BACK, round_number) in (Back.BACK, Back.RECALLED)
    app.hint()


def recall(app: App, round_number: int = 1) -> int:
    """It reads no more by ring, as `conn_demote` of the shim does with `recall`; the count from which it wants all."""
    at = app.end.received
    app.end.publish("rx_frozen", at)
    assert app.end.decide(False, Back.RECALLED, round_number) == Back.RECALLED
    app.send_control(notice=Notice.RECALL | Notice.DEMOTE)
    return at


def consent(app: App, round_number: int) -> None:
    """It may be sent to by ring in another round, as `rx_open` of the shim does it."""
    assert (app.word("tx_ended"), app.end.avail) == (round_number - 1, 0)
    app.end.revoke(Notice.DEMOTE | Notice.RECALL, 0)
    app.send_control(rx_ready=round_number)


def shut(app: App, round_number: int = 1) -> None:
    """It shuts its sending direction down."""
    app.end.decide(True, Back.ENDED, round_number)
    app.send_control(shut_wr=1)


def close(app: App) -> None:
    """The last descriptor is closed."""
    app.send_control(notice=Notice.CLOSED)


def see_fin(app: App, seen: Seen = Seen.END) -> None:
    """Its native socket has told the end."""
    app.poke(f"side[{1 - app.provider_side}].fin_seen", seen)


def snap(world: World, *ends: RemoteRelay) -> None:
    """The link of these is broken, and neither host has heard the last of the other."""
    for far in ends:
        assert isinstance(far.link, SdpLink)
        far.link.abandon()
    world.rest()


def settle(one: RemoteRelay, other: RemoteRelay) -> None:
    """What the two providers tell each other then."""
    arrived = one.break_off()
    assert arrived is not None
    there = other.break_off()
    if there is not None and other.handle_arrived(arrived) and one.handle_arrived(there):
        one.handle_resynced()
        other.handle_resynced()
        return
    one.handle_arrived(None)
    other.handle_arrived(None)


def all_of(sender: App, receiver: App, sent: int) -> None:
    """What the receiver has by ring and what the sender has to send by TCP are all, and each byte once."""
    by_ring = receiver.end.received + receiver.end.avail
    if receiver.word("tx_back") & 3 == Back.BACK:
        assert receiver.word("tx_back_at") == by_ring
    if sender.word("notice") & Notice.RECALL:
        assert sender.word("rx_frozen") == by_ring
        assert sender.end.unread >= sent - by_ring
    else:
        assert sent == by_ring == 0


PeerState = list[tuple[int, int]]


def is_cut_off_by(
    word: tuple[int, int], before: PeerState, world: World, app: App, far: RemoteRelay, stranger: Stranger
) -> None:
    """What the stranger says before does no harm; with that word its connection is reset, as a violation."""
    for each in before:
        stranger.send_control(*each)
    world.rest()
    assert not far.lost
    stranger.send_control(*word)
    world.rest()
    assert far.lost
    assert reset(app)
    assert world.one.counters.get("relay_reset", "violation") == 1
