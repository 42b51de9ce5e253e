"""Connections whose two channels end in this provider, so that an offload protocol can stand between their ends.

Theory of operation. A and B are the two ends of one TCP connection; the protocol carries their bytes. Each has a
channel of its own with the provider: A made a segment and is side 0 of it, for B the provider made one and is side 0
itself.

    A ══ ring ══► side A │ protocol │ side B ══ ring ══► B          (and the other way round)
    └──────────────── native TCP ─────────────────────┘

The TCP connection is still one from A to B, and both shims do what they do when they share a segment. So the words that
they exchange by a segment are handed on from one to the other, each behind the bytes that it follows:

- *Consent*: A's `rx_ready` is shown to B, whose `tx_switched` and offset are then shown to A before the first of B's
  bytes is read here. B is told so (`handed_on`), and does not go back to TCP before.
- *The end*: A tells its own (`shut_wr`, CHANNEL_CLOSED) before its kernel sends the FIN, so when B hears the FIN it
  says so (`fin_seen`), and what A had to tell is in A's segment by then; if it told nothing, it was killed. When A's
  last byte has been committed to B, the provider publishes how A ended and then `tx_fin_at` and `tx_fin`: only then
  is the FIN that B may have heard long ago the end of the stream.
- *Going back to TCP* (`tx_back` BACK): A sends by TCP from a count of its ring on. What the ring held is carried to the
  end, then B is told the count of its own ring at which TCP goes on. A's request that B goes back (CHANNEL_DEMOTE) is
  handed on at once.
- *A recall* (A's next reader has no shim, what it has not read is to come again by TCP) is handed on with its count: B
  sends again what it wrote from there on. Only if B has ended or gone back meanwhile the connection is reset.
- *A reset* (CHANNEL_RESET) is said to both: a broken rule, a protocol that failed, or bytes for an end that has closed
  without reading them, which TCP answers with a reset as well.

The same stream runs through both rings, so a count of the one is a count of the other. Bytes stay in B's ring until A
has read them: what the protocol has consumed is only *held*. So B can send again whatever A recalls, and a protocol
that fails or is removed loses nothing: the provider goes on by itself with the first byte that was not committed,
copying from ring to ring, and asks both ends back to TCP.

One bell of the provider's serves all its channels. An application names the channel that has news in the hint ring of
its own bell (`bell.h`), so one that has none costs nothing. Every word read here is a stranger's: each is read once and
checked, and what makes no sense ends that connection alone.

If the provider dies, what it held is lost: the shims hear it by a pipe that it alone holds open, and reset. One that is
told to stop asks all connections back to TCP first, and waits a moment for them.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import partial
from typing import Final, NamedTuple

from sidestep import limits
from sidestep.counters import Counters
from sidestep.errors import Misuse, Unavailable
from sidestep.native import _channel
from sidestep.provider.services import ProviderServices
from sidestep.switch.stream import Stream


class Notice(IntFlag):
    """CHANNEL_* bits of channel.h."""

    CLOSED = 1
    DEMOTE = 2
    RECALL = 4
    RESET = 8


class Handed(IntFlag):
    """CHANNEL_HANDED_* bits."""

    SWITCH = 1
    ASKED = 2


class Back(IntEnum):
    """How a direction of a ring ends (`tx_back`, channel.h)."""

    NOT = 0
    BACK = 1
    RECALLED = 2
    ENDED = 3


class Words(NamedTuple):
    """What an application says of itself, as `Channel.remote` reads it."""

    attached: int
    rx_ready: int
    notice: int
    shut_wr: int
    fin_seen: int
    tx_back: int
    tx_switched: int
    tx_switch_offset: int
    tx_back_at: int
    rx_frozen: int
    tail: int

    @property
    def back(self) -> int:
        """How the ring ends: a word of another round than the first, which is the only one, says nothing."""
        return self.tx_back & 3 if self.tx_back >> 2 == 1 else Back.NOT


@dataclass(frozen=True, slots=True)
class End:
    """What the provider needs to make its side of a channel with one application."""

    channel: _channel.Channel
    bell_name: bytes  # of the application's bell, 16 bytes
    bell_index: int
    bell_fd: int
    bell_page_fd: int
    held: Callable[[], bool]  # whether any process still holds that end of the TCP connection
    client_open: Callable[[], bool]  # whether who attached it is still connected to the provider


class _Side(Stream):
    """The provider's side of one application's channel."""

    def __init__(self, relay: Relay, end: End, bell: _channel.RemoteBell, number: int) -> None:
        self.on_change = _nothing
        self.relay = relay
        self.channel = end.channel
        self.end_of = end
        self.bell = bell
        self.number = number
        self.moved = False  # bytes, in this turn
        self.held = 0  # bytes that the protocol has consumed, and the other application has not read
        self.starved = False  # there was no room for the protocol
        self.asking = False  # the application is to ring when it has read
        self.gone = False  # no process holds that end any more
        # Of the direction that comes from this application, what has been handed on to the other:
        self.words = Words(*[0] * 11)
        self.ready_told = self.switched = self.demote_told = self.recalled = False
        self.frozen = False  # recalled by the other: nothing more is read
        self.finished = False  # every byte has been committed to the other
        self.back_told = self.end_told = self.closed_told = False

    # ---- for the protocol, until it has left ----

    def readable(self) -> tuple[memoryview, ...]:
        return () if self.lost else self.take()

    def consume(self, count: int) -> None:
        if not self.lost:
            self.hold(count)

    def writable(self) -> tuple[memoryview, ...]:
        return () if self.lost else self.room()

    def commit(self, count: int) -> None:
        if not self.lost:
            self.put(count)

    @property
    def lost(self) -> bool:
        return self.relay.lost or self.relay.left

    def end(self) -> None:
        if not self.lost:
            self.relay.handle_end(self)

    def close(self) -> None:
        if not (self.ended and self.relay.told_end(self)):
            self.relay.leave()

    # ---- for the relay as well ----

    def take(self) -> tuple[memoryview, ...]:
        """What is in the application's ring and not held."""
        if self.relay.lost or self.frozen or not self.switched:
            return ()
        try:
            return self.channel.readable(self.held)
        except (ConnectionResetError, ValueError):  # ValueError: it has taken back what was read
            self.relay.reset("violation")
            return ()

    def hold(self, count: int) -> None:
        """The first bytes of these are done with, as far as the protocol is concerned."""
        if self.relay.lost or not count:
            return
        try:
            there = self.channel.avail
        except ConnectionResetError:
            self.relay.reset("violation")
            return
        if not 0 <= count <= there - self.held:
            raise Misuse(f"{count} bytes are not there to be consumed")
        self.held += count
        self.moved = True
        self.relay.look_again(self)  # a protocol may do this at any time, and the sender may wait for the room

    def room(self) -> tuple[memoryview, ...]:
        """The room in the application's ring; if there is none it rings when it has read."""
        if self.relay.lost:
            return ()
        try:
            room = self.channel.writable()
            self.starved = not room
            if not room:
                self.ask()  # then look once more
                room = self.channel.writable()
        except ConnectionResetError:
            self.relay.reset("violation")
            return ()
        return room

    def put(self, count: int) -> None:
        """Shows the application the first bytes of the room."""
        if self.relay.lost or not count:
            return
        self.channel.commit(count)
        self.moved = True
        self.bell.ring()
        self.relay.after_commit(self)

    def ask(self, *, wanted: bool = True) -> None:
        """Has the application ring when it has read, or not. Look after this: there is a full fence in it."""
        if self.asking != wanted:
            self.asking = wanted
            self.channel.publish("want_space", int(wanted))

    @property
    def ended(self) -> bool:
        consumed = self.channel.received + self.held
        return not self.relay.lost and self.ending and (self.frozen or consumed == self.words.tail)

    # ---- what the application said ----

    @property
    def closed(self) -> bool:
        """Nobody holds that end of the connection any more."""
        return self.gone or bool(self.words.notice & Notice.CLOSED)

    @property
    def final(self) -> bool:
        """It sends nothing any more, neither by ring nor by TCP."""
        return self.closed or bool(self.words.shut_wr)

    @property
    def ending(self) -> bool:
        """Its ring gets no more bytes."""
        return self.frozen or self.final or self.words.back == Back.BACK

    @property
    def read_count(self) -> int:
        """Bytes of ours that it has read."""
        return self.channel.sent - self.channel.unread


def _nothing() -> None:
    """What a stream calls before a protocol has taken it."""


class Relay:
    """One connection through the provider."""

    def __init__(self, hub: Relays, protocol: str, on_drop: Callable[[], None]) -> None:
        self._hub = hub
        self.protocol = protocol
        self.on_drop = on_drop
        self.sides: tuple[_Side, _Side]
        self.open = False  # both applications have attached
        self.lost = False  # reset, or over
        self.checking = False  # whether the kernel is to be asked about its ends
        self.left = False  # the protocol has gone, and no byte was in it

    # ---- turns ----

    def turn(self, side: _Side) -> None:
        """There may be news from the application of `side`."""
        other = self._other(side)
        before = other.ending, other.switched
        try:
            self._hand_on()
        except ConnectionResetError:
            self.reset("violation")
        if self.lost:
            return
        for one in self.sides:
            one.moved = False
        if self.left:
            self._pump(side, other)
            self._pump(other, side)
        else:
            side.on_change()
            if before != (other.ending, other.switched):
                other.on_change()
        if self.lost:
            return
        try:
            self._release(side, other)
            self._release(other, side)
        except ConnectionResetError:
            self.reset("violation")
            return
        for one in self.sides:
            if one.moved:
                self._hub.mark(one)
        if self._is_over():
            self._hub.drop(self)

    def look_again(self, side: _Side) -> None:
        """Something has changed that the next turn is to see to."""
        self._hub.mark(side)

    def after_commit(self, side: _Side) -> None:
        """The room may be used up, and the application wait for nothing but to be asked for more."""
        try:
            if not side.channel.space:
                side.starved = True
                side.ask()
                if side.channel.space:
                    self._hub.mark(side)
        except ConnectionResetError:
            self.reset("violation")

    @staticmethod
    def _release(source: _Side, target: _Side) -> None:
        """Gives back to `source` the room of what the application of `target` has read."""
        for _ in range(2):
            count = min(target.read_count - source.channel.received, source.held)
            if count:
                source.channel.consume(count)
                source.held -= count
                if source.channel.wanted:
                    source.bell.ring()
            # nobody waits for room while half of the ring is free
            wanted = target.starved or 2 * source.held >= source.channel.rx_size
            if wanted == target.asking:
                break
            target.ask(wanted=wanted)

    def _hand_on(self) -> None:
        """Shows each application what the other has said."""
        a, b = self.sides
        a.words = Words(*a.channel.remote())
        b.words = Words(*b.channel.remote())
        if not self.open:
            if not (a.words.attached and b.words.attached):
                return
            self.open = True
            for side in self.sides:
                side.channel.publish("attached", 1)
                side.bell.ring()
        for source, target in ((a, b), (b, a)):
            if target.words.fin_seen and not source.final:
                # what it had to tell was there before the FIN went out, and the FIN has arrived
                source.words = Words(*source.channel.remote())
                source.gone = not source.final
        for source, target in ((a, b), (b, a)):
            if not self.lost:
                self._hand_on_from(source, target)

    def _hand_on_from(self, source: _Side, target: _Side) -> None:
        words = source.words
        if words.rx_ready and not source.ready_told:
            source.ready_told = True
            target.channel.publish("rx_ready", 1)
            target.bell.ring()
        if words.tx_switched and not source.switched:
            if not target.ready_told:  # a sender that does not wait for consent
                self.reset("violation")
                return
            source.switched = True
            target.channel.publish("tx_switch_offset", words.tx_switch_offset)
            target.channel.publish("tx_switched", 1)
            source.channel.publish("handed_on", Handed.SWITCH)
            target.bell.ring()
            source.bell.ring()
        if words.notice & Notice.RECALL and not source.recalled:
            source.recalled = True
            self._recall(source, target)
        elif words.notice & Notice.DEMOTE and not source.demote_told:
            source.demote_told = True
            target.channel.publish("notice", Notice.DEMOTE)
            source.channel.publish("handed_on", Handed.ASKED)
            target.bell.ring()
        if words.back == Back.BACK and words.tx_back_at != words.tail:
            self.reset("violation")
        if self.lost:
            return
        if source.closed and (source.finished or not target.channel.space) and self._unread(source, target):
            self.reset("unread")
        elif source.finished:
            self._tell_end(source, target)

    @staticmethod
    def _unread(source: _Side, target: _Side) -> bool:
        """Whether `source`, which has closed, left bytes of `target` unread: TCP would answer them with a reset."""
        return not target.frozen and target.words.tail != source.read_count

    # ---- the end of a direction ----

    def handle_end(self, target: _Side) -> None:
        """The protocol has committed to `target` all that there was."""
        source = self._other(target)
        if self.lost or source.finished:
            return
        if not source.ended:  # the protocol gives up in the midst of a stream
            self.leave()
            return
        source.finished = True
        self._hub.mark(source)

    def told_end(self, side: _Side) -> bool:
        """Whether the protocol has ended the direction to this side's application."""
        return self._other(side).finished

    def _tell_end(self, source: _Side, target: _Side) -> None:
        channel = target.channel
        if source.frozen and not source.final:
            return
        if source.words.back == Back.BACK and not source.back_told:
            source.back_told = True
            channel.publish("tx_back_at", channel.sent)
            if not self._decide(target, Back.BACK):
                return
            target.bell.ring()
        if not source.final or (source.end_told and (source.closed_told or not source.closed)):
            return
        if not (source.end_told or source.back_told or source.frozen) and not self._decide(target, Back.ENDED):
            return
        if source.words.shut_wr:
            channel.publish("shut_wr", 1)
        if source.closed:
            source.closed_told = True
            channel.publish("notice", Notice.CLOSED)
        source.end_told = True
        channel.publish("tx_fin_at", channel.sent)
        channel.publish("tx_fin", 1)
        target.bell.ring()

    def _decide(self, target: _Side, value: Back) -> bool:
        """Ends the ring towards `target`; False: it has recalled bytes, and they cannot be sent again."""
        if (
            target.channel.decide(True, value) == Back.RECALLED
            and Words(*target.channel.remote()).rx_frozen != target.channel.sent
        ):
            self.reset("recall")
        return not self.lost

    def _recall(self, source: _Side, target: _Side) -> None:
        """The application of `source` reads no more by ring, and wants what it has not read by TCP."""
        if source.channel.decide(True, Back.RECALLED) != Back.RECALLED:
            self.reset("violation")  # we had decided otherwise
            return
        frozen = source.words.rx_frozen
        if not target.channel.received <= frozen <= source.channel.sent:
            self.reset("violation")
            return
        target.channel.publish("rx_frozen", frozen)
        stands = target.channel.decide(False, Back.RECALLED)
        if stands != Back.RECALLED and Words(*target.channel.remote()).tail != frozen:
            self.reset("recall")  # it has gone back by itself, or ended, and will not send again
            return
        target.frozen = True
        target.channel.publish("notice", Notice.RECALL | Notice.DEMOTE)
        source.channel.publish("handed_on", Handed.ASKED)
        target.bell.ring()

    def reset(self, reason: str) -> None:
        """Bytes are lost, or a rule was broken: both ends are told to reset the connection."""
        if self.lost:
            return
        self._hub.counters.add("relay_reset", reason)
        for side in self.sides:
            side.channel.publish("notice", Notice.RESET)
            side.bell.ring()
        self._hub.drop(self)

    # ---- leaving ----

    def leave(self) -> None:
        """The protocol goes: both ends are asked back to TCP, and what it has not committed is taken from the rings."""
        if self.lost or self.left:
            return
        self.left = True
        self._hub.counters.add("relay_left")
        for side in self.sides:
            side.held = self._other(side).channel.sent - side.channel.received
            self._hub.bid_farewell(side)
            side.channel.publish("notice", Notice.DEMOTE)
            side.bell.ring()
            self._hub.mark(side)

    @property
    def settled(self) -> bool:
        """Whether neither end depends on the provider any more."""
        return all(
            side.back_told or side.end_told or not (side.switched or other.ready_told)
            for side, other in (self.sides, self.sides[::-1])
        )

    def _pump(self, source: _Side, target: _Side) -> None:
        """Carries a stream without a protocol, a ringful at a time."""
        taken = 0
        room = list(target.room())
        for piece in source.take():
            while piece and room:
                count = min(len(piece), len(room[0]))
                room[0][:count] = piece[:count]
                taken += count
                piece, rest = piece[count:], room.pop(0)[count:]
                if rest:
                    room.insert(0, rest)
        target.put(taken)
        source.hold(taken)
        if source.ended:
            self.handle_end(target)

    # ---- the end ----

    def check_held(self) -> bool:
        """Asks the kernel about ends whose process has left the provider; whether to ask again later."""
        again = False
        for side in self.sides:
            if not side.gone and not side.end_of.client_open():
                side.gone = not side.end_of.held()
                again |= not side.gone
        if all(side.gone for side in self.sides):
            self._hub.drop(self)
            return False
        for side in self.sides:
            self._hub.mark(side)
        return again

    def _is_over(self) -> bool:
        return all(side.end_told for side in self.sides) or all(side.closed for side in self.sides)

    def _other(self, side: _Side) -> _Side:
        return self.sides[0] if side is self.sides[1] else self.sides[1]


@dataclass(slots=True)
class _Feed:
    """One bell of an application, and the channels whose news it names."""

    bell: _channel.RemoteBell
    sides: dict[int, _Side]


class Relays:
    """All connections through this provider, and the bell that serves them."""

    def __init__(
        self,
        services: ProviderServices,
        counters: Counters,
        *,
        relays_max: int,
        guarded: Callable[[Callable[[], None]], None],
    ) -> None:
        """`guarded` calls what it is given and answers for what that raises."""
        self._services = services
        self.counters = counters
        self._relays_max = relays_max
        self._leaving = False
        self._guarded = guarded
        self._relays: dict[int, Relay] = {}
        self._feeds: dict[tuple[bytes, int], _Feed] = {}
        self._news: dict[_Side, None] = {}  # in order
        self._farewells: list[Callable[[], None]] = []  # protocols that have still to hear that a stream is lost
        self._young: deque[tuple[float, Relay]] = deque()  # in order of the time by which they must be attached
        self._numbers = 0
        self._bell: _channel.Bell | None = None
        self._life: tuple[int, int] = (-1, -1)  # reading and writing end of the pipe
        self.bell_id: Final = secrets.token_bytes(16)

    def __len__(self) -> int:
        return len(self._relays)

    # ---- making ----

    def open(self, offerer: End, claimer: End, *, protocol: str, on_drop: Callable[[], None]) -> tuple[Stream, Stream]:
        """A relay between two applications that have not attached yet; raises Unavailable."""
        if self._leaving:
            raise Unavailable("the provider is going away")
        if len(self._relays) >= self._relays_max:
            raise Unavailable(f"{self._relays_max} connections already go through this provider")
        relay = Relay(self, protocol, on_drop)
        made: list[_Side] = []
        try:
            for end in (offerer, claimer):
                made.append(self._side(relay, end))
        except (OSError, Unavailable) as error:
            for side in made:
                self._forget(side)
            raise Unavailable(f"a bell cannot be used: {error}") from error
        relay.sides = (made[0], made[1])
        self._relays[id(relay)] = relay
        for side in made:
            side.channel.publish("hint", side.number)
            self.mark(side)
        self._young.append((self._services.now() + limits.RELAY_ATTACH_S, relay))
        if len(self._young) == 1:
            self._services.call_later(limits.RELAY_ATTACH_S, self._check_attached)
        self.counters.add("relay_opened")
        return relay.sides

    def descriptors(self) -> tuple[int, int, int]:
        """What a shim needs to ring us and to hear us die: bell, its page, and the pipe."""
        if self._bell is None:
            life = os.pipe2(os.O_CLOEXEC)
            try:
                bell = _channel.Bell()
                self._services.watch(bell.wait_fd, self._rung)
            except BaseException:
                for fd in life:
                    os.close(fd)
                raise
            self._bell, self._life = bell, life
        return self._bell.fd, self._bell.page_fd, self._life[0]

    def _side(self, relay: Relay, end: End) -> _Side:
        name = (end.bell_name, end.bell_index)
        feed = self._feeds.get(name)
        if feed is None:
            feed = _Feed(_channel.RemoteBell(end.bell_fd, end.bell_page_fd, end.bell_index), {})
            if not feed.bell.gives_hints:
                raise Unavailable("an application's bell cannot name the channels that have news")
            self._feeds[name] = feed
        self._numbers = self._numbers % 0xFFFFFFFF + 1
        while self._numbers in feed.sides:
            self._numbers = self._numbers % 0xFFFFFFFF + 1
        side = _Side(relay, end, feed.bell, self._numbers)
        feed.sides[side.number] = side
        return side

    def _check_attached(self) -> None:
        """Drops connections that an application never took up: both ends are on TCP."""
        now = self._services.now()
        while self._young and (self._young[0][0] <= now or self._young[0][1].open or self._young[0][1].lost):
            _, relay = self._young.popleft()
            if not relay.open and not relay.lost:
                self.counters.add("relay_dropped", "not_attached")
                self.drop(relay)
        if self._young:
            self._services.call_later(self._young[0][0] - now, self._check_attached)

    # ---- the loop's part ----

    def about_to_wait(self) -> bool:
        """Call before waiting; whether the wait must not sleep."""
        if self._farewells:
            return True
        if self._bell is None or not self._relays:
            return False
        self._bell.sleep()
        return bool(self._news) or any(feed.bell.news for feed in self._feeds.values())

    def handle_turn(self) -> None:
        """Call after waiting: serves each channel that has news, once."""
        farewells, self._farewells = self._farewells, []
        for farewell in farewells:
            self._guarded(farewell)
        if self._bell is None or not self._relays:
            return
        self._bell.wake()
        for feed in self._feeds.values():
            if feed.bell.news:
                numbers = feed.bell.hints()
                for side in feed.sides.values() if numbers is None else _named(feed.sides, numbers):
                    self.mark(side)
        news, self._news = self._news, {}
        for side in news:
            if not side.relay.lost:
                self._guarded(partial(self._serve, side))

    def _serve(self, side: _Side) -> None:
        try:
            side.relay.turn(side)
        except Exception:
            side.relay.leave()
            raise

    def mark(self, side: _Side) -> None:
        """There is, or may be, news of this side: it is served in the next turn."""
        self._news[side] = None

    def _rung(self) -> None:
        if self._bell is not None:
            self._bell.hear()

    # ---- the end ----

    def handle_disconnect(self) -> None:
        """A client has gone; connections that it held may have gone with it."""
        for relay in list(self._relays.values()):
            if not relay.checking and any(not side.gone and not side.end_of.client_open() for side in relay.sides):
                relay.checking = True
                self._services.call_later(limits.RELAY_CHECK_S, partial(self._check, relay, limits.RELAY_CHECK_S))

    def _check(self, relay: Relay, waited_s: float) -> None:
        relay.checking = False
        if not relay.lost and relay.check_held():
            wait_s = min(2 * waited_s, limits.RELAY_CHECK_MAX_S)
            relay.checking = True
            self._services.call_later(wait_s, partial(self._check, relay, wait_s))

    def leave(self, protocol: str | None = None) -> None:
        """Asks connections back to TCP: those that a protocol carries, or all, and then no others are taken in."""
        self._leaving |= protocol is None
        for relay in list(self._relays.values()):
            if protocol in (None, relay.protocol):
                relay.leave()

    @property
    def settled(self) -> bool:
        """Whether the provider can go without a connection being reset."""
        return all(relay.settled for relay in self._relays.values())

    def drop(self, relay: Relay) -> None:
        """Lets go of a connection: both streams are lost to the protocol, which hears of it in the next turn."""
        if relay.lost:
            return
        relay.lost = True
        del self._relays[id(relay)]
        relay.on_drop()
        for side in relay.sides:
            self._forget(side)
            self.bid_farewell(side)

    def bid_farewell(self, side: _Side) -> None:
        """The protocol hears in the next turn that the stream is lost to it."""
        self._farewells.append(side.on_change)
        side.on_change = _nothing

    def _forget(self, side: _Side) -> None:
        name = (side.end_of.bell_name, side.end_of.bell_index)
        feed = self._feeds[name]
        del feed.sides[side.number]
        if not feed.sides:
            del self._feeds[name]
            feed.bell.close()
        self._news.pop(side, None)
        side.channel.close()

    def close(self) -> None:
        """Lets go of everything; connections that still go through here are reset by their shims."""
        for relay in list(self._relays.values()):
            self.drop(relay)
        if self._bell is not None:
            self._services.unwatch(self._bell.wait_fd)
            self._bell.close()
            self._bell = None
            for fd in self._life:
                os.close(fd)


def _named(sides: dict[int, _Side], numbers: list[int]) -> Iterator[_Side]:
    for number in numbers:
        if (side := sides.get(number)) is not None:
            yield side
