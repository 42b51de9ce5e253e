"""Connections both of whose ends are here, so that an offload protocol can stand between them.

Theory of operation. A and B are the two ends of one TCP connection; the protocol carries their bytes. Each has a
channel of its own with the provider, and a `RemoteRelay` as if the other were on another host. What joins the two is a
link that never leaves the process, and whose bytes the protocol moves:

    A ══ ring ══► relay ── passage │ protocol │ passage ── relay ══ ring ══► B      (and the other way round)
    └──────────────────────────── native TCP ────────────────────────────┘

A passage is the link of one relay, and the protocol's stream with its application. It passes controls on to the other
in the next turn, but for those that end a direction. These stand behind its last byte, so they wait until the protocol
has committed that and calls `end`. A passage does not pass data on: the protocol reads the bytes in place, and commits
them to the other passage. All else is as between two hosts (`remote_relay`).

Bytes stay in A's ring until B has read them, though the protocol has long consumed them. So a protocol that fails or is
removed loses nothing. Bytes that are not committed then go straight from ring to ring, and both ends leave.

If the provider dies, bytes that it held are lost. The shims notice by a pipe that it alone holds open, and reset.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Final

from sidestep.errors import Misuse, PeerViolation
from sidestep.loop import nothing
from sidestep.provider.carry.hub import End, Hub, Side
from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.switch.link import Control
from sidestep.switch.stream import Stream

if TYPE_CHECKING:
    from sidestep.rdma.verbs import Lent

_ENDS: Final = frozenset({Control.BACK, Control.SHUT, Control.ENDED})


class _Way(Enum):
    """Route of one application's bytes to the other."""

    PROTOCOL = "the protocol moves them, and words that follow them wait"
    DONE = "all have been committed, or nobody wants the others"
    STRAIGHT = "the protocol has gone: they go from ring to ring"
    OVER = "its end is lost, and says nothing more"


class _End(RemoteRelay):
    """An end whose other end is here, too."""

    link: _Passage
    lends = False

    def turn(self, side: Side) -> None:
        """Takes the side's turn, and the protocol's soon after, as there may be news for it."""
        super().turn(side)
        self.link.call_later()


class _Passage(Stream):
    """The link of one end, and the protocol's stream with its application."""

    other: _Passage
    relay: _End
    rounds = False  # true once the protocol has moved a direction to its end

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.on_change = nothing
        self._views: tuple[memoryview, ...] = ()  # views of our application's bytes, which stay there meanwhile,
        self._views_from = 0  # position of their first byte
        self._way = _Way.PROTOCOL
        self._sent = 0  # bytes that our application has sent
        self._passed = 0  # number of them that the protocol has consumed, or that went straight
        self._out: list[tuple[Control, int]] = []  # words for the other end, in order; DATA: bytes that go straight
        self._held: list[tuple[Control, int]] = []  # a word behind bytes that the protocol has
        self._delivers = self._calls = False  # calls of the next turn
        self._on_gone: Callable[[], object] = nothing

    # ---- the link ----

    @property
    def room(self) -> int:
        """Always 1: the room in the other ring is the bound."""
        return 1

    def details(self) -> dict[str, object]:
        """Always empty, since no command asks for it."""
        return {}

    plain = buffered = False  # no field here is the engine's
    spacers = True
    under_way = 0

    def lend(self, record: dict[str, int]) -> Lent | None:
        """Always None, as there is no wire."""
        return None

    def take_back(self, record: dict[str, int], error: int) -> None:
        raise Misuse("it is never lent")

    def send_control(self, control: Control, count: int = 0) -> None:
        if control is Control.LEAVE:
            self.go_straight()
        elif control is Control.RECALL:
            self.other.finish_way()  # all later bytes reach our application by TCP
        if self._way is _Way.OVER:
            return
        if control in _ENDS and self._way is _Way.PROTOCOL:
            self._held.append((control, count))
        else:
            self._out.append((control, count))
            self._deliver_later()

    def send(self, piece: memoryview) -> None:
        """Bytes, which lie in our application's ring behind those that were sent before."""
        channel = self.relay.side.channel
        self._views, self._views_from = channel.readable(), channel.received
        self._sent += len(piece)
        if self._way is _Way.STRAIGHT:
            self._out.append((Control.DATA, len(piece)))
            self._deliver_later()

    def finish(self, on_gone: Callable[[], object]) -> None:
        """Ends this passage, whose end is lost: the other end gets all queued words, the protocol loses its stream."""
        self._out += self._held
        self._held.clear()
        self._way, self._on_gone = _Way.OVER, on_gone
        self._deliver_later()
        self._let_go()
        if not (self.relay.open or self.other.relay.open):  # the other has not left TCP either
            self._hub.drop(self.other.relay)

    def finish_way(self) -> None:
        """Sends the words that follow our application's bytes, as the protocol is done with these."""
        if self._way is _Way.PROTOCOL:
            self._way = _Way.DONE
            self._out += self._held
            self._held.clear()
            self._deliver_later()
            self.call_later()

    def _deliver_later(self) -> None:
        if not self._delivers:
            self._delivers = True
            self._hub.later(self._deliver)

    def _deliver(self) -> None:
        """Delivers the queued words to the other end."""
        self._delivers = False
        relay = self.other.relay
        try:
            self._send_all(relay)
        except Exception:
            relay.reset("fault")
            raise
        finally:
            if self._way is _Way.OVER:
                on_gone, self._on_gone = self._on_gone, nothing
                on_gone()
                relay.handle_farewell()
                relay.handle_arrived(None)

    def _send_all(self, relay: RemoteRelay) -> None:
        out, self._out = self._out, []
        with suppress(PeerViolation):  # an application's, which has been reset for it
            for control, count in out:
                if relay.lost:
                    return
                if control is Control.DATA:
                    self._pass(relay, count)
                elif control is Control.RESET:
                    relay.give_up(None)
                else:
                    relay.handle_control(control, count)
                if control is Control.SWITCHED:
                    self.call_later()  # the hub finds bytes to read from now on

    def _pieces(self, count: int) -> tuple[memoryview, ...]:
        """The first of our application's bytes that have not passed."""
        found, skip = [], self._passed - self._views_from
        for view in self._views:
            if part := view[skip : skip + count]:
                found.append(part)
            count -= len(part)
            skip = max(0, skip - len(view))
        return tuple(found)

    def _pass(self, relay: RemoteRelay, count: int) -> None:
        """Straight into the other ring, which has room for all that was sent."""
        for piece in self._pieces(count):
            for room in relay.data_room(len(piece)) or ():
                room[:] = piece[: len(room)]
                relay.handle_data(len(room))
                piece = piece[len(room) :]
        self._passed += count

    def go_straight(self) -> None:
        """The protocol has gone: what it has not committed goes to the other end, and so does what follows."""
        both = (self, self.other)
        if any(one._way in (_Way.STRAIGHT, _Way.OVER) for one in both):
            return
        for one in both:
            try:
                one.relay.turn(one.relay.side)  # the application may have sent more by now
            except Exception:
                one.relay.reset("fault")
                raise
        for one in both:
            one._let_go()
            if one._way is _Way.OVER:
                continue
            if one._way is _Way.PROTOCOL and not one.other.relay.lost:
                one._passed = one.other.relay.side.channel.sent
                one._out += [(Control.DATA, one._sent - one._passed), *one._held]
            else:
                one._passed = one._sent
            one._way = _Way.STRAIGHT
            one._held.clear()
        for one in both:
            one._deliver()

    # ---- the protocol's stream ----

    @property
    def lost(self) -> bool:
        return self._way in (_Way.STRAIGHT, _Way.OVER)

    @property
    def ended(self) -> bool:
        return self._way is _Way.DONE or (not self.lost and bool(self._held) and self._passed == self._sent)

    def readable(self) -> tuple[memoryview, ...]:
        if self._way is not _Way.PROTOCOL or not self.other.relay.flows:  # the other end does not know of them yet
            return ()
        return self._pieces(self._sent - self._passed)

    def consume(self, count: int) -> None:
        if self._way is not _Way.PROTOCOL or not count:
            return
        if not 0 <= count <= self._sent - self._passed:
            raise Misuse(f"{count} bytes are not there to be consumed")
        self._passed += count
        self.call_later()

    def writable(self) -> tuple[memoryview, ...]:
        if self.lost or self.other._way is not _Way.PROTOCOL:
            return ()
        try:
            return self.relay.side.channel.writable()
        except ConnectionResetError:
            self.relay.reset("violation")
            return ()

    def commit(self, count: int) -> None:
        if self.lost or self.other._way is not _Way.PROTOCOL or not count:
            return
        if not (self.relay.flows and 0 <= count <= self.relay.side.channel.space):
            raise Misuse(f"there is no room for {count} bytes, or nobody has sent them")
        self.relay.handle_data(count)
        self.call_later()

    def end(self) -> None:
        if self.lost or self.other._way is not _Way.PROTOCOL:
            return
        if self.other.ended:
            self.other.finish_way()
        else:  # the protocol gives up in the midst of a stream
            self.leave()

    def close(self) -> None:
        if not (self.ended and self.other._way is _Way.DONE):
            self.leave()

    def leave(self) -> None:
        if not self.lost:
            self.relay.leave()
            self.other.relay.leave()

    def call_later(self) -> None:
        """Calls the protocol in the next turn, once a turn, as it may have something to do."""
        if not self._calls:
            self._calls = True
            self._hub.later(self._call)

    def _call(self) -> None:
        self._calls = False
        try:
            self.on_change()
        except Exception:
            self.leave()
            raise

    def _let_go(self) -> None:
        """Takes the stream from the protocol, which is called about it in the next turn."""
        self._hub.later(self.on_change)
        self.on_change = nothing


def open_relay(
    hub: Hub, offerer: End, claimer: End, *, protocol: str, on_drop: Callable[[], None]
) -> tuple[Stream, Stream]:
    """A relay between two applications that have not attached yet; raises Unavailable."""
    one, other = _Passage(hub), _Passage(hub)
    one.relay = _End(hub, protocol, nothing, one, ends_here=2)
    other.relay = _End(hub, protocol, on_drop, other, ends_here=0)
    one.other, other.other = other, one
    hub.enter(other.relay, claimer)
    try:
        hub.enter(one.relay, offerer)
    except BaseException:
        one.relay.lost = True
        hub.drop(other.relay)
        raise
    return one, other
