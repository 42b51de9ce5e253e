"""A connection of which one end is here and the other on another host, with a link between the two providers.

Theory of operation. As in `relay`, each application has a channel with its own provider, the TCP connection between
the two lives on, and the words that they would exchange in shared memory are handed on, each behind the bytes that it
follows. Here every word is a message of the link:

    A ══ ring ══► Far at A's host ── link ──► Far at B's host ══ ring ══► B          (and the other way round)
    └──────────────────────────────── native TCP ─────────────────────────┘

Bytes stay in A's ring until the link has told that B has *read* them, and never more are sent than B's ring has room
for. So whatever arrives is put into B's ring at once, straight from the link: no word waits behind bytes that nobody
reads, and all that B recalls, or that a broken link has swallowed, A still has and can send by TCP.

What A has said and only counts once B's host has done its part (`handed_on`, channel.h) is confirmed by a HANDED.

The link breaks: each provider learns, by whatever way the link's owner finds, up to which byte the other has come, and
has its application send by TCP what follows (`handle_arrived`). Not before the other has done the same does it let its
application read TCP behind what has come by ring (`handle_settled`): an end that has gone back to TCP, or ended, by
itself cannot send again, and what TCP brings then would be read in the place of what is lost. If all that cannot be
found out, or done, the connection is reset. An application that is on TCP already needs nothing of it.

All that the link brings is a stranger's: counts are checked against our own, and words that come out of their order end
the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.native import _channel
from sidestep.native.layout import Back, Handed, Notice, Seen, Words
from sidestep.provider.joints import End, Joint, Relays, Side
from sidestep.switch.link import Link, Say

_RECALL: Final = int(Notice.RECALL)  # an operator of a flag costs 2 us
_DEMOTE: Final = int(Notice.DEMOTE)
_SEEN_RESET: Final = int(Seen.RESET)


def _nothing() -> None:
    """Nobody wants to know."""


def _rings(read: int, sent: int) -> int:
    """What an application can leave unread, and the size of the ring that it sends by, as the count of ATTACHED."""
    return sent << 32 | read


class Far(Joint):
    """One connection."""

    sides: tuple[Side]

    def __init__(
        self, hub: Relays, protocol: str, on_drop: Callable[[], None], link: Link, segment_id: bytes, uid: int
    ) -> None:
        super().__init__(hub, protocol, on_drop)
        self.segment_id = segment_id  # by which a shim's slot names it
        self.uid = uid  # whose it is
        self.link = link
        self._doomed = False  # the link is broken, and the other end has ended
        self.on_over: Callable[[], None] = _nothing  # called once it is lost: its link has no more to do with it
        # Of the direction from our application:
        self.sent = 0  # bytes given to the link
        self.window = 0  # bytes of the ring that the other application reads; 0: it has not attached
        self.arrived_told = -1  # of our application's bytes, as the other provider has confirmed behind an end
        self.attached_told = self.ready_told = self.switched = self.demote_told = self.recalled = False
        self.dying = False  # its TCP is dead
        self.fin_told = False
        self.stopped = False  # recalled by the other: nothing more is sent
        self.back_told = self.shut_told = self.closed_told = self.ended_told = False
        # Of the direction to it:
        self.far_ready = self.far_switched = self.far_back = self.far_shut = self.far_ended = False
        self.far_switched_at = 0  # bytes that came by TCP before
        self.far_read_at_close: int | None = None  # what the other had read when it closed
        self.read_told = 0
        self.read_step = 0  # bytes read that are worth a word
        self.asked_answered = False
        self.frozen: int | None = None  # the count from which our application wants all by TCP
        self.failed = False  # reset, for a reason that the other end may not know
        self.taken_at: int | None = None  # the count from which we have asked for all by TCP, as a provider goes
        self.took_back = False  # that was granted
        self.resends = False  # whatever was recalled comes by TCP
        self._kept = bytearray()  # what has come from there on, until it is known whether that is granted
        self._keeping: bytearray | None = None  # where the next of it goes
        self.leads = False  # our provider is the one that goes
        self.settled_at: int | None = None  # what we have said has arrived, when the link was broken
        self.end_shown = (False, False)  # how much our application knows of `far_shut` and `far_ended`

    @property
    def side(self) -> Side:
        """Ours."""
        return self.sides[0]

    @property
    def memory(self) -> memoryview:
        """Our application's ring."""
        return self.side.channel.ring()

    def details(self) -> dict[str, object]:
        """How it is now, for people."""
        return {
            "protocol": self.protocol, "segment": self.segment_id.hex(), "sent": self.sent, "held": self.side.held,
            "window": self.window, "arrived": self.side.channel.sent, **self.link.details(),
        }  # fmt: skip

    # ---- turns ----

    def turn(self, side: Side) -> None:
        """There may be news from our application."""
        try:
            self._look(side)
        except (ConnectionResetError, ValueError):  # ValueError: it has taken back what was read
            self.reset("violation")

    def handle_room(self) -> None:
        """The link takes data again."""
        if not self.lost:
            self._hub.mark(self.side)

    def _look(self, side: Side) -> None:
        side.words = words = Words(*side.channel.remote())
        self._tell_attached(side, words)
        if self.left and not self.leads and self._free:
            self._hub.drop(self)
            return
        if not self.open:
            return
        if self.settled_at is not None and (words.fin_seen or side.closed):
            self._doom()
        if words.fin_seen and not self.fin_told:
            self.fin_told = True
            self.link.say(Say.FIN_SEEN)
        if words.fin_seen & _SEEN_RESET and not self.dying:
            self.dying = True
            self._hub.call_later(limits.SETTLE_ENDED_S, self._check_dead)
        if words.rx_ready and not self.ready_told and not self.left and self.settled_at is None:
            self.ready_told = True
            side.channel.publish("handed_on", Handed.READY)
            self.link.say(Say.READY)
        if words.tx_switched and not self.switched:
            if not self.far_ready:  # a sender that does not wait for consent
                self.reset("violation")
                return
            self.switched = True
            self.link.say(Say.SWITCHED, words.tx_switch_offset)
        if words.notice & _RECALL and not self.recalled:
            self.recalled = True
            if self.taken_at is None:
                self._recall(side, words)
            elif words.rx_frozen != self.taken_at:
                self.reset("recall")  # the other end sends again what follows later bytes
            else:
                self.frozen = self.taken_at
        elif words.notice & _DEMOTE and not self.demote_told:
            self.demote_told = True
            self.link.say(Say.ASK)
        if words.back == Back.BACK and words.tx_back_at != words.tail:
            self.reset("violation")
        # it cannot have sent by ring without having gone there, and its end would be waited for behind such bytes
        if (side.final or words.back) and not (self.switched or self._drained):
            self.reset("violation")
        if self.lost:
            return
        self._send(side)
        self._tell_read(side)
        self._tell_end(side, words)
        self._show_end(side)
        if self.end_shown[1] and self.ended_told and not self.lost:
            self._hub.drop(self)

    @property
    def promised(self) -> bool:
        """On our ATTACHED the other provider opens it, and its application consents, whatever we have heard yet."""
        return self.attached_told

    def _check_dead(self) -> None:
        """Its TCP is dead, as keepalive finds, and the other end would have said by now how it ended."""
        if not (self.lost or self._taken or self.side.closed):
            self.reset("link_lost")

    def _tell_attached(self, side: Side, words: Words) -> None:
        if words.attached and not self.attached_told:
            self.attached_told = True
            self.link.say(Say.ATTACHED, _rings(side.channel.tx_most, side.channel.rx_size))
        self._open(side)

    def _open(self, side: Side) -> None:
        """Both applications have attached: each hears it of the other."""
        if self.attached_told and self.window and not self.open:
            self.open = True
            side.channel.publish("attached", 1)
            side.bell.ring()

    def _send(self, side: Side) -> None:
        """Data from our application's ring, as far as there is room at the other end and in the link."""
        if not self.switched or self.stopped:
            return
        window = self.window - side.held
        for piece in side.channel.readable(side.held):
            if window <= 0 or not self.link.room:
                break
            part = piece[:window]
            self.link.send(part)
            window -= len(part)
            side.held += len(part)
            self.sent += len(part)

    def _tell_read(self, side: Side, *, all_of_it: bool = False) -> None:
        """How far our application has read, when that is worth a word; else it rings once it has read more."""
        if not self.far_switched:
            return
        channel = side.channel
        for _ in range(2):
            read = side.read_count
            if read > self.read_told and (all_of_it or read - self.read_told >= self.read_step):
                self.read_told = read
                self.link.say(Say.READ, read)
            wanted = channel.sent - self.read_told >= self.read_step
            if wanted == side.asking:
                break
            side.ask(wanted=wanted)  # then look once more

    def _recall(self, side: Side, words: Words) -> None:
        """Our application wants by TCP what it has not read."""
        channel = side.channel
        if (
            channel.decide(True, Back.RECALLED) != Back.RECALLED
            or not self.read_told <= words.rx_frozen <= channel.sent
        ):
            self.reset("violation")
            return
        self.frozen = words.rx_frozen
        self.link.say(Say.RECALL, words.rx_frozen)

    @property
    def _drained(self) -> bool:
        """Whether the link has all that our application has sent by ring."""
        side = self.side
        return self.stopped or side.channel.received + side.held == side.words.tail

    def _tell_end(self, side: Side, words: Words) -> None:
        """How our application's direction ends, behind its last byte."""
        if side.closed and not self.closed_told:
            self.closed_told = True
            self.link.say(Say.CLOSED, side.read_count)
        if not self._drained:
            return
        if words.back == Back.BACK and not (self.back_told or self.shut_told or self.stopped):
            self.back_told = True
            self._tell_read(side, all_of_it=True)
            self.link.say(Say.BACK, words.tail)
        if words.shut_wr and not (self.shut_told or self.closed_told):
            self.shut_told = True
            self.link.say(Say.SHUT, words.tail)
        if side.closed and not self.ended_told:
            self.ended_told = True
            self.link.say(Say.ENDED, words.tail)

    def _show_end(self, side: Side) -> None:
        """How the other application's direction ends, once all of it is in our application's ring."""
        if self.far_read_at_close is not None and not self.end_shown[1]:
            unread = not self.stopped and side.words.tail != self.far_read_at_close
            if unread and (self.far_ended or not side.channel.space):
                self.reset("unread")  # it closed without reading them, which TCP answers with a reset as well
                return
        if self.end_shown == (shown := (self.far_shut, self.far_ended)):
            return
        self.end_shown = shown
        if not (self.far_back or self.recalled) and not self._decide(Back.ENDED):
            return
        channel = side.channel
        if self.far_shut:
            channel.publish("shut_wr", 1)
        if self.far_ended:
            channel.publish("notice", Notice.CLOSED)
        channel.publish("tx_fin_at", channel.sent)
        channel.publish("tx_fin", 1)
        side.bell.ring()

    def _decide(self, how: Back) -> bool:
        """Ends the ring to our application; False: it has recalled bytes that cannot be sent again."""
        side = self.side
        stands = side.channel.decide(True, how)
        if stands == Back.RECALLED and Words(*side.channel.remote()).rx_frozen != side.channel.sent:
            self.reset("recall")
        elif stands not in (how, Back.RECALLED, Back.BACK):
            self.reset("violation")
        return not self.lost

    # ---- what the other provider says ----

    def handle_word(self, word: Say, count: int) -> None:
        """Anything but DATA.

        Raises:
            PeerViolation: It makes no sense now; the connection is reset.
        """
        if self.lost:
            return
        try:
            self._HEARD[word](self, self.side, count)
        except PeerViolation:
            self.reset("violation")
            raise
        except (ConnectionResetError, ValueError):  # our application's words, not theirs
            self.reset("violation")
        if not self.lost:
            self._hub.mark(self.side)

    def data_room(self, length: int) -> tuple[memoryview, ...] | None:
        """Where the next `length` bytes go; None: nobody wants them any more.

        Raises:
            PeerViolation: There is no room, so more was sent than allowed, or it is not the time for it.
        """
        if self.lost:
            return None
        if not self.far_switched or self.far_back or self.far_shut or self.far_ended:
            self.reset("violation")
            raise PeerViolation("data from an end that does not send by ring", rule="link_data")
        if length > self.side.channel.tx_most:
            self.reset("violation")
            raise PeerViolation(f"{length} bytes of data for a ring of {self.side.channel.tx_most}", rule="link_data")
        if self._drops and not self._keeps:
            return None
        room, found = length + len(self._kept), []
        try:
            for piece in self.side.room_for(room):
                if part := piece[:room]:
                    found.append(part)
                    room -= len(part)
        except ConnectionResetError:
            self.reset("violation")
            return None
        if room:
            self.reset("violation")
            raise PeerViolation(f"{length} bytes of data, {room} more than there is room for", rule="link_data")
        if self._keeps:
            self._keeping = bytearray(length)
            return (memoryview(self._keeping),)
        return tuple(found)

    def handle_data(self, length: int) -> None:
        """So many bytes have come into that room."""
        if self._keeping is not None:
            kept, self._keeping = self._keeping, None
            if self._keeps:
                self._kept += kept
            return
        side = self.side
        try:
            if self._keeps and not self.lost:  # it was for the ring, until just now
                self._kept += b"".join(side.channel.writable())[len(self._kept) :][:length]
                return
            if self.lost or self._drops:
                return
            side.channel.commit(length)
            side.bell.ring()
            self._tell_read(side)
        except (ConnectionResetError, ValueError):
            self.reset("violation")

    def _on_attached(self, side: Side, count: int) -> None:
        read, sent = count & 0xFFFFFFFF, count >> 32
        if self.window or not all(limits.RING_SIZE_MIN <= ring <= limits.RING_SIZE_MAX for ring in (read, sent)):
            raise PeerViolation(f"attached again, or rings of {read} and {sent} bytes", rule="link_order")
        self.window = read
        self.read_step = min(sent, side.channel.tx_size) // 4  # its ring may fill before ours does
        self._open(side)

    def _on_ready(self, side: Side, _count: int) -> None:
        if self.far_ready or not self.open:
            raise PeerViolation("consent twice, or too early", rule="link_order")
        self.far_ready = True
        side.channel.publish("rx_ready", 1)
        side.bell.ring()

    def _on_switched(self, side: Side, count: int) -> None:
        if self.far_switched or not self.ready_told:
            raise PeerViolation("a switch twice, or without consent", rule="link_order")
        self.far_switched = True
        self.far_switched_at = count
        side.channel.publish("tx_switch_offset", count)
        side.channel.publish("tx_switched", 1)
        side.bell.ring()
        self.link.say(Say.HANDED, Handed.SWITCH)

    def _on_read(self, side: Side, count: int) -> None:
        channel = side.channel
        passed = count - channel.received
        if not 0 <= passed <= side.held:
            raise PeerViolation(f"{count} bytes read, of {self.sent} that were sent", rule="link_count")
        if passed:
            channel.consume(passed)
            side.held -= passed
            if channel.wanted:
                side.bell.ring()

    def _on_ask(self, side: Side, _count: int) -> None:
        if self.asked_answered:  # it stands; an answer to each would be a queue without a bound
            return
        self.asked_answered = True
        side.channel.publish("notice", Notice.DEMOTE)
        side.bell.ring()
        self.link.say(Say.HANDED, Handed.ASKED)

    def _on_recall(self, side: Side, count: int) -> None:
        channel = side.channel
        if not channel.received <= count <= self.sent or self.stopped:
            raise PeerViolation(f"a recall from byte {count}, of {self.sent} that were sent", rule="link_count")
        if not self._stop_at(side, count):
            # It has gone back by itself, or ended, and will not send again. When a provider goes, who has asked keeps
            # what comes until it hears of that (`_check_count`).
            if not self.left:
                self.reset("recall")
            return
        side.bell.ring()
        self.link.say(Say.HANDED, Handed.ASKED)
        self.link.say(Say.RESENDS)

    def _on_resends(self, side: Side, _count: int) -> None:
        self.resends = True
        if self.taken_at is None or self.took_back:
            return
        self.took_back = True
        self._kept.clear()
        self._read_tcp(side)

    def _read_tcp(self, side: Side) -> None:
        """Our application reads TCP behind what has come by ring, unless it does already."""
        if self.ready_told and not (self.far_back or self.recalled or any(self.end_shown)):
            side.channel.publish("tx_back_at", side.channel.sent)
            if self._decide(Back.BACK):
                side.bell.ring()

    def _stop_at(self, side: Side, count: int) -> bool:
        """Our application sends again by TCP what follows byte `count` of its ring; False: it cannot."""
        channel = side.channel
        channel.publish("rx_frozen", count)
        stands = channel.decide(False, Back.RECALLED)
        if stands != Back.RECALLED and Words(*channel.remote()).tail != count:
            return False
        self.stopped = True
        channel.publish("notice", Notice.RECALL | Notice.DEMOTE)
        return True

    def _on_back(self, side: Side, count: int) -> None:
        channel = side.channel
        if self.far_back or self.far_shut or self.far_ended or not self.ready_told:
            raise PeerViolation("back to TCP twice, or without having been invited", rule="link_order")
        if not self._check_count(count):  # it may never have left TCP: then the count is 0
            return
        self.far_back = True
        self.link.say(Say.ARRIVED, count)
        channel.publish("tx_back_at", channel.sent)
        if self._decide(Back.BACK):
            side.bell.ring()

    def _on_shut(self, _side: Side, count: int) -> None:
        if self.far_shut or self.far_ended:
            raise PeerViolation("an end twice", rule="link_order")
        if not self._check_count(count):
            return
        self.far_shut = True
        self.link.say(Say.ARRIVED, count)

    def _on_closed(self, side: Side, count: int) -> None:
        if self.far_read_at_close is not None or not side.channel.received <= count <= self.sent:
            raise PeerViolation(f"closed twice, or {count} bytes read of {self.sent}", rule="link_count")
        self.far_read_at_close = count

    def _on_ended(self, _side: Side, count: int) -> None:
        if self.far_ended or self.far_read_at_close is None:
            raise PeerViolation("an end twice, or of an end that is open", rule="link_order")
        if not self._check_count(count):
            return
        self.far_ended = True
        self.link.say(Say.ARRIVED, count)

    def _check_count(self, count: int) -> bool:
        """That all has arrived, unless some is recalled and we drop what comes. False: it is reset."""
        if self._keeps and count != self.taken_at:
            self._give_kept()  # it will not send it again
        elif self.recalled and not self.resends and count != self.frozen:
            self.reset("recall")  # nor what our application wants again
        if not self.lost and not self._drops and count != self.side.channel.sent:
            raise PeerViolation(f"an end at byte {count}, of {self.side.channel.sent} that came", rule="link_count")
        return not self.lost

    @property
    def _keeps(self) -> bool:
        """Whether data that comes now may come again by TCP, or may not: not our application has asked for that."""
        return self.taken_at is not None and not (self.resends or self.recalled)

    def _give_kept(self) -> None:
        """What was kept goes where it would have gone."""
        side = self.side
        self.taken_at = None
        kept, self._kept = memoryview(bytes(self._kept)), bytearray()
        for piece in side.channel.writable():  # it was seen that there is room
            part = kept[: len(piece)]
            piece[: len(part)] = part
            kept = kept[len(part) :]
            side.channel.commit(len(part))
        side.bell.ring()

    @property
    def _drops(self) -> bool:
        """Whether data that comes now comes again by TCP."""
        return self.recalled or self.taken_at is not None

    def _on_fin_seen(self, side: Side, _count: int) -> None:
        # What our application had to tell was there before its kernel sent the FIN, and the FIN has arrived.
        side.words = Words(*side.channel.remote())
        side.gone |= not side.final

    def _on_handed(self, side: Side, count: int) -> None:
        side.channel.publish("handed_on", count & (Handed.SWITCH | Handed.ASKED))
        side.bell.ring()

    def _on_arrived(self, side: Side, count: int) -> None:
        if not (self.back_told or self.shut_told or self.ended_told) or count != side.words.tail:
            raise PeerViolation(f"{count} bytes have arrived, where no end was told there", rule="link_count")
        self.arrived_told = count

    def _on_reset(self, _side: Side, _count: int) -> None:
        self._give_up("far")

    # ---- the end ----

    def break_off(self) -> int | None:
        """The link is broken: how many bytes of the other application its host may count as arrived; None: it is over.

        Always the same, whatever our application does afterwards.
        """
        if not self.lost:
            self.turn(self.side)  # the last words may have come just before
        if self.lost:
            return None
        if self.settled_at is None:
            self.settled_at = self.side.channel.sent if self.frozen is None else self.frozen
        if self.side.words.fin_seen and not self.side.end_of.held():
            if self._free:
                self._hub.drop(self)  # all has arrived, or went by TCP
            else:
                self.reset("link_lost")  # TCP has been reset, as it is where the other provider has died
            return None
        if self.left and self._free:
            self._hub.drop(self)
            return None
        if self.far_switched and not (self._doomed or self._taken):
            received = self.side.end_of.received()
            if received is not None and received > self.far_switched_at + 1:  # one may be a FIN
                self._doom()  # what stands behind the lost bytes may fill TCP's buffers, and the end not get through
        return self.settled_at

    def _doom(self) -> None:
        """TCP gets through, so the other provider would ask soon, if it lived; and after the end nobody else resets."""
        if not self._doomed:
            self._doomed = True
            self._hub.call_later(limits.SETTLE_ENDED_S, self._give_up_waiting)

    def handle_farewell(self) -> None:
        """The other provider has let go of it, and all that it said has come; not opened, it never left TCP there."""
        if not (self.open or self.lost):
            self._hub.drop(self)

    def _give_up_waiting(self) -> None:
        self.handle_arrived(None)

    def handle_arrived(self, count: int | None) -> bool:
        """Of our application's bytes `count` have arrived; None: that cannot be found out. False: it is over now.

        What follows goes by TCP. What comes from the other end still waits for `handle_settled`.
        """
        if self.break_off() is None:
            return False
        if count is None:
            if self._given and self._taken:
                self._hub.drop(self)  # whoever still misses something of ours is the one to reset it
            else:
                self.reset("link_lost")
            return False
        side = self.side
        try:
            if not side.channel.received <= count <= self.sent:
                self.reset("violation")
            elif (self.switched or self.far_ready) and not self.stopped and not self._stop_at(side, count):
                self.reset("link_lost")
            else:
                # nobody will hear of what it says from now on, and so it need not wait for that
                side.channel.publish("handed_on", Handed.SWITCH | Handed.ASKED)
                side.channel.publish("notice", Notice.DEMOTE)
                side.bell.ring()
        except (ConnectionResetError, ValueError):
            self.reset("violation")
        return not self.lost

    def handle_settled(self) -> None:
        """The other application sends by TCP what has not arrived here, and ours may read it."""
        if self.lost or self.settled_at is None:
            return
        side = self.side
        self.turn(side)
        if self.lost:
            return
        if self.frozen is not None and self.frozen != self.settled_at:
            self.reset("recall")  # it wants again what the other end counts as arrived
            return
        self._read_tcp(side)
        if not self.lost:
            self._hub.drop(self)

    def reset(self, reason: str) -> None:
        """Bytes are lost, or a rule was broken: both ends are told to reset the connection."""
        if not self.lost:
            self.failed = True
            self.link.say(Say.RESET)
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        super().reset(reason)

    def bid_farewell(self) -> None:
        """Nothing more goes over the link."""
        self._hub.finishing[self] = None
        self.link.finish(self._finished)
        self.on_over()

    def _finished(self) -> None:
        self._hub.finishing.pop(self, None)

    def handle_gone(self) -> None:
        """No process holds our end any more: the other end is to hear how it ended."""
        self._hub.mark(self.side)

    def leave(self) -> None:
        """The protocol goes: both directions end where they are, and TCP goes on from there."""
        if self.lost or self.left:
            return
        self.leads = True
        self.link.say(Say.LEAVE)
        self._leave(self.side)

    def _leave(self, side: Side) -> None:
        self.left = True
        self._hub.counters.add("relay_left")
        if self.ready_told and not (self.recalled or self.far_back or self.far_shut or self.far_ended):
            # What has arrived here is read from the ring. From there on the other end sends again by TCP, which ours
            # reads once it is known that it can: it may just have gone back, or ended, by itself.
            self.taken_at = side.channel.sent
            self.link.say(Say.RECALL, self.taken_at)
        side.channel.publish("notice", Notice.DEMOTE)
        side.bell.ring()
        self._hub.mark(side)

    def _on_leave(self, side: Side, _count: int) -> None:
        self.leads = False  # if both providers go, neither waits for the other one's farewell
        if not self.left:
            self._leave(side)

    def let_go(self) -> None:
        """The provider cannot wait longer: a connection that still depends on it is reset by its shim."""

    @property
    def settled(self) -> bool:
        """Whether neither application depends on the provider any more, and the other provider knows.

        Who does not lead is dropped then, which is what is to be waited for.
        """
        return self.leads and self._free and self.settled_at is not None

    @property
    def _free(self) -> bool:
        """Whether ours does not, nor the other one on what we have still to say."""
        unused = not (self.switched or self.far_ready) or self.stopped
        return self._given and self._taken and (unused or self.arrived_told >= 0)

    @property
    def _given(self) -> bool:
        """Whether our application sends nothing by ring any more, and all that it has sent was given to the link."""
        ended = self.back_told or self.shut_told or self.ended_told
        return not (self.switched or self.far_ready) or self.stopped or ended

    @property
    def _taken(self) -> bool:
        """Whether our application needs nothing by ring any more but what is there."""
        resent = self.took_back or (self.recalled and self.resends)
        return not self.ready_told or self.far_back or resent or any(self.end_shown)

    _HEARD = {  # noqa: RUF012 - not to be changed
        Say.ATTACHED: _on_attached,
        Say.READY: _on_ready,
        Say.SWITCHED: _on_switched,
        Say.READ: _on_read,
        Say.ASK: _on_ask,
        Say.RECALL: _on_recall,
        Say.BACK: _on_back,
        Say.SHUT: _on_shut,
        Say.CLOSED: _on_closed,
        Say.ENDED: _on_ended,
        Say.FIN_SEEN: _on_fin_seen,
        Say.HANDED: _on_handed,
        Say.RESET: _on_reset,
        Say.LEAVE: _on_leave,
        Say.ARRIVED: _on_arrived,
        Say.RESENDS: _on_resends,
    }


def enter(
    hub: Relays, end: End, *, protocol: str, on_drop: Callable[[], None], link: Link, segment_id: bytes, uid: int
) -> Far:
    """Takes a connection in whose application has not attached yet; raises Unavailable."""
    far = Far(hub, protocol, on_drop, link, segment_id, uid)
    hub.enter(far, (end,), _side)
    return far


def _side(joint: Far, end: End, bell: _channel.RemoteBell, number: int) -> Side:
    return Side(joint, end, bell, number)
