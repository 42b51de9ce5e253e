"""Connections that end in this provider, which stands between their ends: their hub, and what they share.

One doorbell of the provider's serves all its channels. An application names the channel that has news in the hint ring
of its own doorbell (`doorbell.h`), so an idle channel costs nothing. Every word read here is a stranger's: each is read
once and checked. A word that makes no sense ends that connection alone.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.counters import Counters
from sidestep.errors import Unavailable
from sidestep.loop import Loop
from sidestep.native import _channel
from sidestep.native.layout import HINT_RING_ALWAYS, NONCE_COUNT, Knows, Notice, PeerState
from sidestep.provider.carry.lending import Lending
from sidestep.switch.protocol import Row

if TYPE_CHECKING:
    from sidestep.native._engine import Engine
    from sidestep.provider.carry.remote_relay import RemoteRelay

_SPARE: Final = 256  # bytes of a reply around its links
_NUMBER_MAX: Final = HINT_RING_ALWAYS - 1  # largest number of a side
_CLOSED: Final = int(Notice.CLOSED)  # an operator of a flag costs 2 us


@dataclass(frozen=True, slots=True)
class End:
    """Descriptors and facts from which the provider makes its side of a channel with one application."""

    channel: _channel.Channel
    doorbell_name: bytes  # name of the application's doorbell, 16 bytes
    doorbell_index: int
    doorbell_fd: int
    doorbell_page_fd: int
    held: Callable[[], bool]  # True if a process still holds that end of the TCP connection
    received: Callable[[], int | None]  # bytes that TCP has brought to it, and maybe its FIN; None: no process holds it
    client_open: Callable[[], bool]  # True if the client that attached it is still connected to the provider


@dataclass(frozen=True, slots=True)
class NewDoorbell:
    """Another doorbell of an application's end: a program has taken the connection up from the one before."""

    number: int  # number of the side
    word: int  # `doorbell_nonce` in the channel, when it was named
    alone: bool  # true if its other doorbells are no more, unless another was named since
    doorbell_name: bytes
    doorbell_index: int
    fds: tuple[int, int]  # the doorbell and its page, which stay the caller's


class Side:
    """The provider's side of one application's channel."""

    def __init__(self, relayed: RemoteRelay, end: End, number: int) -> None:
        self.relayed = relayed
        self.channel = end.channel
        self.end_of = end
        self.feeds: list[_Feed] = []  # doorbells: one for each program that has taken it up, and may hold it
        self.number = number
        self.held = 0  # bytes of its ring that have been passed on, and that the other application has not read
        self.asking = False  # the application is to ring when it has read
        self.gone = False  # no process holds that end any more
        self.peer = PeerState(*[0] * len(PeerState._fields))

    def tell(self, **peer: int) -> None:
        """Shows the application some words, in their order, and rings."""
        for name, value in peer.items():
            self.channel.publish(name, value)
        self.ring()

    def ring(self) -> None:
        """Wakes all programs that hold the application's end."""
        for feed in self.feeds:
            feed.doorbell.ring()

    def ask(self, *, wanted: bool = True) -> None:
        """Has the application ring when it has read, or not. Look after this: there is a full fence in it."""
        if self.asking != wanted:
            self.asking = wanted
            self.channel.publish("want_space", int(wanted))

    def room_for(self, length: int) -> tuple[memoryview, ...]:
        """The room in the application's ring or, if that has less than `length` bytes, behind it."""
        pieces = self.channel.writable()
        return pieces if sum(map(len, pieces)) >= length or not self.channel.spill() else self.channel.writable()

    @property
    def closed(self) -> bool:
        """True if no process holds that end of the connection any more."""
        return self.gone or bool(self.peer.notice & _CLOSED)

    @property
    def final(self) -> bool:
        """True if it sends nothing any more, neither by ring nor by TCP."""
        return self.closed or bool(self.peer.shut_wr)

    @property
    def read_count(self) -> int:
        """Bytes of ours that it has read."""
        return self.channel.sent - self.channel.unread


def page(found: Iterable[Row]) -> tuple[list[Row], bool]:
    """Returns the first of these connections, as many as fit into one reply, and whether more follow."""
    rows: list[Row] = []
    left = limits.CONTROL_PIECE_MAX - _SPARE
    for uid, row in found:
        details = row | {"process": os.getpid()}
        left -= len(json.dumps(details)) + 2  # a comma and a space
        if rows and (left < 0 or len(rows) == limits.LINKS_PER_REPLY):
            return rows, True
        rows.append((uid, details))
    return rows, False


@dataclass(slots=True)
class _Feed:
    """One doorbell of an application, and the channels whose news it names."""

    name: tuple[bytes, int]
    doorbell: _channel.RemoteDoorbell
    sides: dict[int, Side]


class Hub:
    """All connections through this provider, and the doorbell that serves them."""

    def __init__(self, loop: Loop, counters: Counters, *, relays_max: int, engine: Engine | None = None) -> None:
        self.lending = None if engine is None else Lending(engine, loop, counters)
        self._engine_ready = False  # the engine has something for us
        self.loop = loop
        self.counters = counters
        self._relayed_max = relays_max
        self._leaving = False
        self.refused: set[str] = set()  # protocols that are about to go
        self._relayed: dict[int, RemoteRelay] = {}
        self._sides: dict[int, Side] = {}  # sides by number
        self.finishing: dict[RemoteRelay, None] = {}  # relays that are over, but for last words on their way
        self._feeds: dict[tuple[bytes, int], _Feed] = {}
        self._news: dict[Side, None] = {}  # sides in order
        self._young: deque[tuple[float, RemoteRelay]] = deque()  # relays in order of the latest time of attachment
        self._numbers = 0
        self._tidy_due = False
        self._doorbell: _channel.Doorbell | None = None
        self._life: tuple[int, int] = (-1, -1)  # reading and writing end of the pipe
        self.doorbell_id: Final = secrets.token_bytes(16)

    def __len__(self) -> int:
        return len(self._relayed)

    def __iter__(self) -> Iterator[RemoteRelay]:
        return iter(self._relayed.values())

    def links(self, after: int) -> tuple[list[Row], bool]:
        """Connections with other hosts, from so many on, as far as one reply takes them; and whether there are more."""
        relays = [one for one in self if one.ends_here == 1]
        return page((one.uid, one.details()) for one in relays[after:])

    # ---- making ----

    def enter(self, relayed: RemoteRelay, end: End) -> None:
        """Takes in an end whose application has not attached yet; raises Unavailable."""
        if self._leaving or relayed.protocol in self.refused:
            raise Unavailable("the provider, or its protocol, is going away")
        if relayed.ends_here and sum(bool(each.ends_here) for each in self) >= self._relayed_max:
            raise Unavailable(f"{self._relayed_max} connections already go through this provider")
        try:
            relayed.side = side = self._side(relayed, end)
        except (OSError, Unavailable) as error:
            raise Unavailable(f"a doorbell cannot be used: {error}") from error
        self._relayed[id(relayed)] = relayed
        side.channel.publish("hint", side.number)
        side.channel.publish("knows", Knows.DOORBELLS | Knows.LEAVE)
        self.mark(side)
        self._young.append((self.loop.now + limits.RELAY_ATTACH_S, relayed))
        if len(self._young) == 1:
            self.loop.call_later(limits.RELAY_ATTACH_S, self._check_attached)
        if relayed.ends_here:
            self.counters.add("relay_opened")

    def descriptors(self) -> tuple[int, int, int]:
        """Descriptors by which a shim rings this hub and notices its death: doorbell, its page, and the pipe."""
        if self._doorbell is None:
            life = os.pipe2(os.O_CLOEXEC)
            try:
                doorbell = _channel.Doorbell()
                if self.lending is None:
                    self.loop.on_readable(doorbell.wait_fd, self._rung)
                else:
                    engine = self.lending.engine
                    engine.set_doorbell(doorbell)
                    self.loop.on_readable(engine.fd, self._tell)
            except BaseException:
                for fd in life:
                    os.close(fd)
                raise
            self._doorbell, self._life = doorbell, life
        return self._doorbell.fd, self._doorbell.page_fd, self._life[0]

    def _side(self, relayed: RemoteRelay, end: End) -> Side:
        self._numbers = self._numbers % _NUMBER_MAX + 1
        while self._numbers in self._sides:
            self._numbers = self._numbers % _NUMBER_MAX + 1
        side = Side(relayed, end, self._numbers)
        doorbell = (end.doorbell_fd, end.doorbell_page_fd)
        self._listen(side, self._feed((end.doorbell_name, end.doorbell_index), doorbell))
        self._sides[side.number] = side
        return side

    def _feed(self, name: tuple[bytes, int], fds: tuple[int, int]) -> _Feed:
        """Returns the feed of a doorbell and its page; raises OSError, Unavailable."""
        feed = self._feeds.get(name)
        if feed is None:
            feed = _Feed(name, _channel.RemoteDoorbell(*fds, name[1]), {})
            if not feed.doorbell.gives_hints:
                raise Unavailable("an application's doorbell cannot name the channels that have news")
            self._feeds[name] = feed
            if self.lending is not None:
                self.lending.engine.feed(feed.doorbell)
        return feed

    def _listen(self, side: Side, feed: _Feed) -> None:
        if feed not in side.feeds:
            side.feeds.append(feed)
            feed.sides[side.number] = side

    def _ignore(self, side: Side, feed: _Feed) -> None:
        side.feeds.remove(feed)
        del feed.sides[side.number]
        if not feed.sides:
            del self._feeds[feed.name]
            if self.lending is not None:
                self.lending.engine.unfeed(feed.doorbell)
            feed.doorbell.close()

    def handle_new_doorbell(self, new_doorbell: NewDoorbell) -> None:
        """Takes one more doorbell of an application's end, if its own channel proves it; else does nothing."""
        side = self._sides.get(new_doorbell.number)
        if side is None:
            return
        word = side.channel.doorbell_nonce
        if not word & ~NONCE_COUNT or (word ^ new_doorbell.word) & ~NONCE_COUNT:
            return
        self.reclaim(side.relayed)
        try:
            if len(side.feeds) >= limits.RELAY_DOORBELLS_MAX:
                raise Unavailable("an end of a connection has too many doorbells")
            feed = self._feed((new_doorbell.doorbell_name, new_doorbell.doorbell_index), new_doorbell.fds)
        except (OSError, Unavailable):  # the kernel would not report what such a program does
            side.relayed.reset("doorbell")
            return
        self._listen(side, feed)
        if new_doorbell.alone and new_doorbell.word == word:
            for other in [other for other in side.feeds if other is not feed]:
                self._ignore(side, other)
        room = len(side.feeds) < limits.RELAY_DOORBELLS_MAX // 2  # several programs may name one at once
        side.tell(knows=Knows.DOORBELLS | Knows.LEAVE if room else Knows.LEAVE, doorbell_nonce_seen=new_doorbell.word)
        self.mark(side)

    def _check_attached(self) -> None:
        """Drops connections that an application never took up: both ends are on TCP."""
        now = self.loop.now
        while self._young and (self._young[0][0] <= now or self._young[0][1].open or self._young[0][1].lost):
            _, relayed = self._young.popleft()
            if not (relayed.open or relayed.lost or relayed.promised):
                self.counters.add("relay_dropped", "not_attached")
                self.drop(relayed)
        if self._young:
            self.loop.call_later(self._young[0][0] - now, self._check_attached)

    # ---- the loop's part ----

    def about_to_wait(self) -> bool:
        """Call before waiting; whether the wait must not sleep."""
        if self._doorbell is None or not self._relayed:
            return False
        if self.lending is None:
            self._doorbell.sleep()
        return self.news

    @property
    def news(self) -> bool:
        """True if an application, or a side that was marked, waits for the next turn."""
        if self.lending is not None:
            return bool(self._news) or self._engine_ready
        return bool(self._news) or any(feed.doorbell.news for feed in self._feeds.values())

    def handle_turn(self) -> None:
        """Call after waiting: serves each channel that has news, once."""
        if self._doorbell is None or not self._relayed:
            return
        if self.lending is None:
            self._handle_doorbell(self._doorbell)
        elif self._engine_ready:
            self._handle_engine(self.lending)
        news, self._news = self._news, {}
        for side in news:
            if not side.relayed.lost:
                self.loop.call(partial(self._serve, side))
        if self.lending is not None:
            self.lending.handle_turn()

    def _handle_doorbell(self, doorbell: _channel.Doorbell) -> None:
        """Marks the sides that applications have named since the last turn."""
        doorbell.wake()
        for feed in self._feeds.values():
            if feed.doorbell.news:
                numbers = feed.doorbell.hints()
                for side in feed.sides.values() if numbers is None else _named(feed.sides, numbers):
                    self.mark(side)

    def _handle_engine(self, lending: Lending) -> None:
        """Does the same where the engine reads the doorbell; marks also connections that the engine has returned."""
        self._engine_ready = False
        for relayed in lending.take_returned():
            self.mark(relayed.side)
        numbers = lending.engine.news()
        for feed in self._feeds.values():
            for side in feed.sides.values() if numbers is None else _named(feed.sides, numbers):
                if side.relayed not in lending:
                    self.mark(side)

    def _tell(self) -> None:
        self._engine_ready = True

    def _serve(self, side: Side) -> None:
        try:
            side.relayed.turn(side)
        except Exception:
            side.relayed.handle_fault()
            raise
        if self.lending is not None and side.relayed.lends:
            self.lending.want(side.relayed)

    def lent_details(self, relayed: RemoteRelay) -> dict[str, object]:
        """Details of the connection that an engine may add; none without an engine."""
        return {} if self.lending is None else self.lending.details(relayed)

    def reclaim(self, relayed: RemoteRelay) -> None:
        """Takes it back from the engine, if that has it."""
        if self.lending is not None:
            self.lending.reclaim(relayed)

    def mark(self, side: Side) -> None:
        """Marks a side that has, or may have, news, so that the next turn serves it."""
        self._news[side] = None

    def _rung(self) -> None:
        if self._doorbell is not None:
            self._doorbell.acknowledge()

    # ---- the end ----

    def handle_disconnect(self) -> None:
        """A client has gone; connections that it held may have gone with it."""
        for relayed in list(self._relayed.values()):
            if not (relayed.checking or relayed.side.gone or relayed.side.end_of.client_open()):
                relayed.checking = True
                self.loop.call_later(limits.RELAY_CHECK_S, partial(self._check, relayed, limits.RELAY_CHECK_S))

    def _check(self, relayed: RemoteRelay, waited_s: float) -> None:
        """Asks the kernel about an end whose process has left the provider."""
        relayed.checking, side = False, relayed.side
        if relayed.lost:
            return
        self.mark(side)
        if side.gone or side.end_of.client_open():
            return
        side.gone = not side.end_of.held()
        if not side.gone:
            wait_s = min(2 * waited_s, limits.RELAY_CHECK_MAX_S)
            relayed.checking = True
            self.loop.call_later(wait_s, partial(self._check, relayed, wait_s))

    def leave(self, protocol: str | None = None) -> None:
        """Asks connections back to TCP: those that a protocol carries, or all, and then no others are taken in."""
        self._leaving |= protocol is None
        for relayed in list(self._relayed.values()):
            if protocol in (None, relayed.protocol):
                self.loop.call(relayed.leave)

    def cut_off(self, protocol: str) -> None:
        """Takes connections back to TCP whose protocol has gone, and whose two ends are here."""
        for relayed in list(self._relayed.values()):
            if protocol == relayed.protocol:
                relayed.cut_off()

    def settled(self, protocol: str | None = None) -> bool:
        """True if the provider, or that protocol, can leave without a connection being reset."""
        settled = all(relayed.settled for relayed in self._relayed.values() if protocol in (None, relayed.protocol))
        return settled and not any(protocol in (None, relayed.protocol) for relayed in self.finishing)

    def drop(self, relayed: RemoteRelay) -> None:
        """Drops a connection: its link has no more to do with it."""
        if relayed.lost:
            return
        self.reclaim(relayed)
        if self.lending is not None:
            self.lending.forget(relayed)
        relayed.lost = True
        del self._relayed[id(relayed)]
        relayed.on_drop()
        relayed.side.tell(notice=Notice.OVER)  # the shim may be waiting for an answer
        self._forget(relayed.side)
        relayed.bid_farewell()
        if not self._tidy_due:
            self.loop.call_later(limits.RELAY_TIDY_S, self._tidy)
            self._tidy_due = True

    def _tidy(self) -> None:
        """Frees memory: ended connections refer to themselves in circles, and their buffers lie between those in use.

        Python looks for circles when there are many more objects, whatever their size; here few objects hold much.
        """
        self._tidy_due = False
        gc.collect()
        _channel.give_back_free_memory()

    def _forget(self, side: Side) -> None:
        for feed in list(side.feeds):
            self._ignore(side, feed)
        del self._sides[side.number]
        self._news.pop(side, None)
        side.channel.close()

    def close(self) -> None:
        """Lets go of everything; connections that still go through here are reset by their shims."""
        for relayed in list(self._relayed.values()):
            self.drop(relayed)
        if self._doorbell is not None:
            if self.lending is None:
                self.loop.forget(self._doorbell.wait_fd)
            else:
                self.loop.forget(self.lending.engine.fd)
                self.lending.engine.set_doorbell(None)
            self._doorbell.close()
            self._doorbell = None
            for fd in self._life:
                os.close(fd)


def _named(sides: dict[int, Side], numbers: list[int]) -> Iterator[Side]:
    for number in numbers:
        if (side := sides.get(number)) is not None:
            yield side
