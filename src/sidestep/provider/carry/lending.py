"""Lends connections with other hosts to the engine, and takes them back.

The engine (`engine.h`) is a thread that never runs Python. A connection on which nothing unusual goes on is lent
to it: it moves bytes between the application's ring and the wire, and gives the connection back at anything it does not
know. Then the relay goes on as if it had done all of that itself. It is taken back as well whenever Python has
something to do with it: every way into a relay that is lent begins with `reclaim`.

A connection that is given back again and again would only pay for that, so each time it waits longer before it is lent
anew, and forgets that while it is lent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from sidestep.native import layout
from sidestep.native.layout import Back
from sidestep.provider.carry.direction import Ending, In, Leaving, Out, Recall

if TYPE_CHECKING:
    from sidestep.counters import Counters
    from sidestep.loop import Loop, Timer
    from sidestep.native._engine import Engine, Loan
    from sidestep.provider.carry.hub import Side
    from sidestep.provider.carry.remote_relay import RemoteRelay
    from sidestep.settings import RemoteSettings

_RECORD: Final = "engine_record"
_STAND: Final = (Ending.OPEN, Ending.SHUT)  # ends that leave the other direction as it is
_PAUSE_S: Final = 0.001  # seconds before it is lent again after it was given back; doubled each time
_PAUSE_MAX_S: Final = 1.0
_CALM_MAX_S: Final = 0.05  # seconds that it passes nothing on for that, and nothing of what is under way arrives
_CALM_LOOK_S: Final = 0.001  # seconds between two attempts
_LASTS_S: Final = 0.1  # seconds, after which being lent has paid for itself


class Reason(IntEnum):
    """Why a connection is given back; `enum engine_reason`."""

    ASKED = 1  # we have taken it
    WORDS = 2  # the application has said something
    MESSAGE = 3  # so has the other host, or it broke a rule
    ENDED = 4  # the other host has ended the wire
    BROKEN = 5  # the wire is broken
    COUNTS = 6  # the application's counts are impossible
    CREDIT = 7  # it waits for credit that does not come
    SMALL = 8  # the other host's buffers are small for what there is to send
    MEMORY = 9  # there is none
    SILENT = 10  # the other host acknowledges nothing
    HOT = 11  # so much goes out that its application's ring is worth pinning


@dataclass(slots=True)
class _State:
    """Of one relay."""

    loan: Loan | None = None
    since: float = 0.0
    pause_s: float = 0.0  # how long it waited the last time before it was lent again
    until: float = 0.0
    calm_since: float = 0.0
    under_way: int = 0  # the least that was under way since then
    timer: Timer | None = None  # it is wanted again then
    given_back: Counter[str] = field(default_factory=Counter)  # by the reason


class Lending:
    """Of one process."""

    def __init__(self, engine: Engine, loop: Loop, counters: Counters) -> None:
        self.engine = engine
        self._loop = loop
        self._counters = counters
        self._relays: dict[RemoteRelay, _State] = {}
        self._lent: dict[Loan, RemoteRelay] = {}
        self._wanted: dict[RemoteRelay, None] = {}  # to be lent as soon as nothing is under way

    def __contains__(self, relay: RemoteRelay) -> bool:
        return (state := self._relays.get(relay)) is not None and state.loan is not None

    def want(self, relay: RemoteRelay) -> None:
        """It may be lent; what is not quiet now is looked at again in the next turn."""
        if relay not in self and not relay.lost:
            relay.link.buffered = True
            self._wanted[relay] = None

    def forget(self, relay: RemoteRelay) -> None:
        """It is over."""
        self._wanted.pop(relay, None)
        if (state := self._relays.pop(relay, None)) is not None and state.timer is not None:
            state.timer.cancel()

    def details(self, relay: RemoteRelay) -> dict[str, object]:
        """Who has it, what it has been given back for, and its counts, which are not the relay's while it is lent."""
        state = self._relays.get(relay, _State())
        told: dict[str, object] = {"engine": state.loan is not None, "given_back": dict(state.given_back)}
        if state.loan is not None:
            record = layout.unpack(_RECORD, state.loan.look())
            coming = record["last_bufs_sent"] - (record["rx_mseq"] - record["last_ack_sent"])
            told |= {
                "sent": record["sent"], "held": record["held"], "credit": record["credit"], "remote_credit": coming,
                "receives_posted": record["posted"],
            }  # fmt: skip
        return told

    def handle_turn(self) -> None:
        """Lends what is quiet now."""
        wanted, self._wanted = self._wanted, {}
        for relay in wanted:
            if relay.lost or relay in self:
                continue
            record = _of(relay, relay.side)
            if record is None:
                if relay.calm:
                    relay.calm = False
                    relay.handle_room()  # which comes here again, as its next turn does anyway
                continue
            state = self._relays.setdefault(relay, _State())
            now = self._loop.now
            if now < state.until:
                self._want_later(relay, state, state.until - now)
            elif self._lend(relay, state, record):
                relay.calm = False
            elif not relay.link.plain:
                self._wait(relay, state, _PAUSE_S)
            elif relay.calm and now - state.calm_since >= _CALM_MAX_S:
                self._wait(relay, state)
            else:
                under_way = relay.link.under_way
                if not relay.calm or under_way < state.under_way:
                    relay.calm, state.calm_since, state.under_way = True, now, under_way
                self._wanted[relay] = None  # with the next turn, or soon: nothing else may happen here
                self._want_later(relay, state, _CALM_LOOK_S)

    def _want_later(self, relay: RemoteRelay, state: _State, delay_s: float) -> None:
        """One timer at a time: a relay may have many turns until then."""

        def due() -> None:
            state.timer = None
            self.want(relay)

        if state.timer is None:
            state.timer = self._loop.call_later(delay_s, due)

    def _lend(self, relay: RemoteRelay, state: _State, record: dict[str, int]) -> bool:
        lent = relay.link.lend(record)
        if lent is None:
            return False
        side = relay.side
        # what had come in part was shown just now
        record |= {"read_reported": relay.read_reported, "asking": side.asking}
        try:
            loan = self.engine.lend(
                layout.pack(_RECORD, **record), side.channel, side.peer, side.feeds[0].doorbell, side.number, *lent
            )  # fmt: skip
        except OSError:  # no memory, or epoll(7) watches no more: Python goes on
            relay.link.take_back(record, 0)
            return False
        state.loan, state.since = loan, self._loop.now
        self._lent[loan] = relay
        self._counters.add("engine_lent")
        return True

    def reclaim(self, relay: RemoteRelay) -> None:
        """Python has something to do with it."""
        if (state := self._relays.get(relay)) is not None and state.loan is not None:
            self._take(state.loan)

    def take_returned(self) -> Iterator[RemoteRelay]:
        """Those that the engine has given back, taken."""
        for loan in self.engine.returned():
            if loan in self._lent:
                yield self._take(loan)

    def _take(self, loan: Loan) -> RemoteRelay:
        relay = self._lent.pop(loan)
        state = self._relays[relay]
        number, error, packed = loan.take()
        reason, record = Reason(number), layout.unpack(_RECORD, packed)
        state.loan = None
        state.given_back[reason.name.lower()] += 1
        self._counters.add("engine_given_back", reason.name.lower())
        lasted_s = self._loop.now - state.since
        if lasted_s >= _LASTS_S:
            state.pause_s = 0.0
        relay.sent, relay.read_reported = record["sent"], record["read_reported"]
        relay.side.held, relay.side.asking = record["held"], bool(record["asking"])
        relay.link.take_back(record, error)
        self._wait(relay, state, _PAUSE_S if reason is Reason.HOT else None)
        return relay

    def _wait(self, relay: RemoteRelay, state: _State, pause_s: float | None = None) -> None:
        """Python carries it for a while: for twice as long as the last time, if it is not said how long."""
        if pause_s is None:
            pause_s = state.pause_s = min(max(2 * state.pause_s, _PAUSE_S), _PAUSE_MAX_S)
        state.until = self._loop.now + pause_s
        relay.calm = False
        relay.handle_room()
        self.want(relay)


def made(remote: RemoteSettings | None) -> Engine | None:
    """An engine for connections with these hosts, if there are any, and it is wanted."""
    if remote is None or not remote.engine:
        return None
    from sidestep.native._engine import Engine

    engine = Engine()
    engine.start(remote.engine_cpus)
    return engine


def _of(relay: RemoteRelay, side: Side) -> dict[str, int] | None:
    """What the engine needs of a relay; None: something else goes on."""
    sends = relay.out is Out.RING and relay.ending is Ending.OPEN
    receives = relay.into is In.RING and relay.peer_ending is Ending.OPEN
    if (
        not (relay.open and (sends or receives))
        or relay.recall is not Recall.NOT
        or relay.leaving is not Leaving.STAYS
        or relay.ending not in _STAND
        or relay.peer_ending not in _STAND
        or (side.peer.shut_wr and relay.ending is Ending.OPEN)  # what it has said is told behind its last byte
        or (relay.peer_ending is Ending.SHUT and side.channel.unread)  # Python tells how far that is read
        or (side.peer.back(relay.out_round) == Back.BACK and relay.out not in (Out.BACK, Out.RECALLED))
        or relay.settled_at is not None
        or len(side.feeds) > 1  # it would ring one of them
        or relay.unconfirmed
        or side.gone
        or side.closed
        or side.peer.fin_seen & ~relay.seen
    ):
        return None
    return dict.fromkeys((name for name, _, _ in layout.RECORDS[_RECORD]), 0) | {
        "sends": sends, "receives": receives, "sent": relay.sent, "held": side.held, "window": relay.window,
        "read_reported": relay.read_reported, "read_step": relay.read_step, "asking": side.asking,
    }  # fmt: skip
