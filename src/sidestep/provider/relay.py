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

If the provider dies, what it held is lost: the shims hear it by a pipe that it alone holds open, and reset. One that
is told to stop asks all connections back to TCP first, and waits a moment for them. It needs no call of an application
that has not begun to send by ring, or of which all has arrived: that direction is cut short by a recall of what it
adds.
"""

from __future__ import annotations

from collections.abc import Callable

from sidestep.errors import Misuse
from sidestep.native import _channel
from sidestep.native.layout import Back, Handed, Notice, Words
from sidestep.provider.joints import End, Joint, Relays, Side
from sidestep.switch.stream import Stream


def _nothing() -> None:
    """What a stream calls before a protocol has taken it."""


class _Side(Side, Stream):
    """One that a protocol has a stream with."""

    joint: Relay

    def __init__(self, joint: Relay, end: End, bell: _channel.RemoteBell, number: int) -> None:
        super().__init__(joint, end, bell, number)
        self.on_change = _nothing
        self.moved = False  # bytes, in this turn
        self.starved = False  # there was no room for the protocol
        # Of the direction that comes from this application, what has been handed on to the other:
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
        return self.joint.lost or self.joint.left

    def end(self) -> None:
        if not self.lost:
            self.joint.handle_end(self)

    def close(self) -> None:
        if not (self.ended and self.joint.told_end(self)):
            self.joint.leave()

    # ---- for the relay as well ----

    def take(self) -> tuple[memoryview, ...]:
        """What is in the application's ring and not held."""
        if self.joint.lost or self.frozen or not self.switched:
            return ()
        try:
            return self.channel.readable(self.held)
        except (ConnectionResetError, ValueError):  # ValueError: it has taken back what was read
            self.joint.reset("violation")
            return ()

    def hold(self, count: int) -> None:
        """The first bytes of these are done with, as far as the protocol is concerned."""
        if self.joint.lost or not count:
            return
        try:
            there = self.channel.avail
        except ConnectionResetError:
            self.joint.reset("violation")
            return
        if not 0 <= count <= there - self.held:
            raise Misuse(f"{count} bytes are not there to be consumed")
        self.held += count
        self.moved = True
        self.joint.look_again(self)  # a protocol may do this at any time, and the sender may wait for the room

    def room(self) -> tuple[memoryview, ...]:
        """The room in the application's ring; if there is none it rings when it has read."""
        if self.joint.lost:
            return ()
        try:
            room = self.channel.writable()
            self.starved = not room
            if not room:
                self.ask()  # then look once more
                room = self.channel.writable()
        except ConnectionResetError:
            self.joint.reset("violation")
            return ()
        return room

    def put(self, count: int) -> None:
        """Shows the application the first bytes of the room."""
        if self.joint.lost or not count:
            return
        self.channel.commit(count)
        self.moved = True
        self.bell.ring()
        self.joint.after_commit(self)

    @property
    def ended(self) -> bool:
        consumed = self.channel.received + self.held
        return not self.joint.lost and self.ending and (self.frozen or consumed == self.words.tail)

    @property
    def ending(self) -> bool:
        """Its ring gets no more bytes."""
        return self.frozen or self.final or self.words.back == Back.BACK


class Relay(Joint):
    """One connection both of whose ends are here."""

    sides: tuple[_Side, _Side]
    left = False  # the protocol has gone, and no byte was in it

    def bid_farewell(self) -> None:
        """Both streams are lost to the protocol, which hears of it in the next turn."""
        for side in self.sides:
            self._bid_farewell(side)

    def _bid_farewell(self, side: _Side) -> None:
        self._hub.later(side.on_change)
        side.on_change = _nothing

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
        if self.left and target.words.rx_ready and not (source.switched or source.back_told):
            self._cut_short(source, target)  # it may sit in one long call of the kernel's, and is not waited for
        if words.rx_ready and not (source.ready_told or self.left):
            source.ready_told = True
            source.channel.publish("handed_on", Handed.READY)
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
        # it cannot have sent by ring without having gone there, and its end would be waited for behind such bytes
        if (source.final or words.back) and words.tail and not (source.switched or source.frozen):
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

    # ---- leaving ----

    def leave(self) -> None:
        """The protocol goes: both ends are asked back to TCP, and what it has not committed is taken from the rings."""
        if self.lost or self.left:
            return
        self.left = True
        self._hub.counters.add("relay_left")
        for side in self.sides:
            side.held = self._other(side).channel.sent - side.channel.received
            self._bid_farewell(side)
            side.channel.publish("notice", Notice.DEMOTE)
            side.bell.ring()
            self._hub.mark(side)

    def let_go(self) -> None:
        """The provider cannot wait longer: directions of which all has arrived need nothing more of their sender."""
        for source, target in (self.sides, self.sides[::-1]):
            if self.lost or source.back_told or source.end_told:
                continue
            source.words = Words(*source.channel.remote())
            if source.switched and not source.ending and source.words.tail == target.channel.sent:
                self._cut_short(source, target)

    def _cut_short(self, source: _Side, target: _Side) -> None:
        """Ends the ring from `source` at what has arrived at `target`; what it may just be adding is recalled."""
        arrived = target.channel.sent
        if target.ready_told:
            source.channel.publish("rx_frozen", arrived)
            if source.channel.decide(False, Back.RECALLED) != Back.RECALLED:
                return  # it has ended the round itself
            source.frozen = True
            source.channel.publish("notice", Notice.RECALL | Notice.DEMOTE)
            source.bell.ring()
        source.back_told = True
        target.channel.publish("tx_back_at", arrived)
        target.channel.decide(True, Back.BACK)
        target.bell.ring()

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

    def _is_over(self) -> bool:
        return all(side.end_told for side in self.sides) or all(side.closed for side in self.sides)

    def _other(self, side: _Side) -> _Side:
        return self.sides[0] if side is self.sides[1] else self.sides[1]


def open_relay(
    hub: Relays, offerer: End, claimer: End, *, protocol: str, on_drop: Callable[[], None]
) -> tuple[Stream, Stream]:
    """A relay between two applications that have not attached yet; raises Unavailable."""
    one, other = hub.enter(Relay(hub, protocol, on_drop), (offerer, claimer), _Side)
    return one, other
