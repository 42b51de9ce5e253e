"""One end of a connection that providers carry: its application is here, and a link leads to the other end's provider.

Theory of operation. Each application has a channel with its own provider, the TCP connection between the two lives on,
and the words that they would exchange in shared memory are handed on (`direction`). Every word is a message of the
link, which leads to another host, or to another end in this process (`local_relay`):

    A ══ ring ══► relay at A's host ── link ──► relay at B's host ══ ring ══► B      (and the other way round)
    └──────────────────────────────── native TCP ─────────────────────────┘

Bytes stay in A's ring until the link has told that B has *read* them, and never more are sent than B's ring has room
for. So whatever arrives is put into B's ring at once, straight from the link: no word waits behind bytes that nobody
reads, and all that B recalls, or that a broken link has swallowed, A still has and can send by TCP.

What A has said and only counts once B's host has done its part (`acked`, channel.h) is confirmed by an ACKED.

The link breaks: each provider learns, by whatever way the link's owner finds, up to which byte the other has come, and
has its application send by TCP what follows (`handle_arrived`). Not before the other has done the same does it let its
application read TCP behind what has come by ring (`handle_resynced`): an end that has gone back to TCP, or ended, by
itself cannot send again, and what TCP brings then would be read in the place of what is lost. If all that cannot be
found out, or done, the connection is reset. An application that is on TCP already needs nothing of it.

All that the link brings is a stranger's: counts are checked against our own, and words that come out of their order end
the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.native import layout
from sidestep.native.layout import Acked, Back, Knows, Notice, PeerState, Seen, Spacer
from sidestep.provider.carry.direction import (
    AGAIN,
    AWAITED,
    BEFORE,
    BY_APPLICATION,
    SILENT,
    USED,
    EndEvent,
    Ending,
    In,
    InEvent,
    LeaveEvent,
    Leaving,
    Out,
    OutEvent,
    Recall,
    RecallEvent,
    moved,
)
from sidestep.provider.carry.hub import End, Hub, Side
from sidestep.provider.carry.relayed import Relayed
from sidestep.switch.link import Control, Link

_RECALL: Final = int(Notice.RECALL)  # an operator of a flag costs 2 us
_DEMOTE: Final = int(Notice.DEMOTE)
_LEAVE: Final = int(Notice.LEAVE)
_SEEN_RESET: Final = int(Seen.RESET)


class RemoteRelay(Relayed):
    """One connection."""

    def details(self) -> dict[str, object]:
        return {
            "protocol": self.protocol, "segment": self.segment_id.hex(), "sent": self.sent, "held": self.side.held,
            "window": self.window, "arrived": self.side.channel.sent,
        } | self.link.details() | self._hub.lent_details(self)  # fmt: skip

    # ---- turns ----

    def turn(self, side: Side) -> None:
        """There may be news from our application."""
        self.reclaim()
        try:
            self._look(side)
        except (ConnectionResetError, ValueError, PeerViolation):  # ValueError: it has taken back what was read
            self.reset("violation")

    def reclaim(self) -> None:
        self._hub.reclaim(self)

    def handle_room(self) -> None:
        if not self.lost:
            self._hub.mark(self.side)

    def _look(self, side: Side) -> None:
        side.peer = peer = PeerState(*side.channel.remote())
        self._tell_attached(side, peer)
        if self.leaving is Leaving.FOLLOWS and self._free:
            self._hub.drop(self)
            return
        if not self.open:
            return
        if self.settled_at is not None and (peer.fin_seen or side.closed):
            self._arm_reset()
        if peer.fin_seen & ~self.seen:
            self._handle_fin(peer.fin_seen)
        if peer.rx_ready == self.in_round + 1 and (self.into is In.TCP or (self.into is In.BACK and self.rounds)):
            self._consent(side, peer)
        if peer.tx_switched > self.out_round:
            raise PeerViolation("a ring without consent", rule="link_order")
        if peer.tx_switched == self.out_round and self.out is Out.INVITED:
            self.out = moved(self.out, OutEvent.SWITCHED)
            self.arrived_reported = -1
            self.link.send_control(Control.SWITCHED, peer.tx_switch_offset)
        if peer.notice & _RECALL and self.recall not in BY_APPLICATION:
            self._recall(side, peer)
        elif bool(peer.notice & _DEMOTE) != self.asking and (self.rounds or not self.asking):
            self._ask(side)
        if peer.notice & _LEAVE:
            self.leave()
        back = peer.back(self.out_round or 1)
        if back == Back.BACK and peer.tx_back_at != peer.tail:
            self.reset("violation")
        if self.spacers and peer.tx_spacer == self.out_round << 2 | Spacer.ASKED and self.out_spaced != self.out_round:
            self.out_spaced = self.out_round
            self.link.send_control(Control.SPACER, self.out_round)
        # it cannot have sent by ring without having gone there, and its end would be waited for behind such bytes
        if (side.final or back) and self.out in BEFORE and not self._drained:
            self.reset("violation")
        if self.lost:
            return
        self._send(side)
        self._tell_read(side)
        self._tell_end(side, peer)
        self._show_end(side)
        if self.shown is self.ending is Ending.ENDED and not self.lost:
            self._hub.drop(self)

    @property
    def _invites(self) -> bool:
        """Whether consent of our application's is still to be said."""
        return self.recall is Recall.NOT and self.leaving is Leaving.STAYS and self.settled_at is None

    def _consent(self, side: Side, peer: PeerState) -> None:
        """Our application consents to a round, which it does once the last one is over."""
        self.in_round = peer.rx_ready
        if not self._invites:
            return
        if self.asking and self.rounds:
            self._ask(side)  # what it has asked for since the last consent is revoked by this one
        self.into = moved(self.into, InEvent.CONSENT)
        side.channel.publish("acked", Acked.READY)
        self.link.send_control(Control.READY)
        if self.shown is not Ending.OPEN:
            self._decide(Back.ENDED)

    def _ask(self, side: Side) -> None:
        """Our application asks the other back to TCP, or does so no more."""
        self.asking = not self.asking
        self.unanswered += self.asking
        side.channel.revoke(0, Acked.REQUEST)
        self.link.send_control(Control.ASK, not self.asking)

    def _handle_fin(self, seen: int) -> None:
        if not self.seen:
            self.link.send_control(Control.FIN_SEEN)
        if seen & ~self.seen & _SEEN_RESET:
            self._hub.loop.call_later(limits.SETTLE_ENDED_S, self._check_dead)
        self.seen |= seen

    def _check_dead(self) -> None:
        """Its TCP is dead, as keepalive finds, and the other end would have said by now how it ended."""
        if not (self.lost or self.taken or self.side.closed):
            self.reset("link_lost")

    def _tell_attached(self, side: Side, peer: PeerState) -> None:
        if peer.attached and self.into is In.APART:
            self.into = moved(self.into, InEvent.ATTACHED)
            # what it can leave unread, and the size of the ring that it sends by
            self.link.send_control(Control.ATTACHED, side.channel.rx_size << 32 | side.channel.tx_most)
            if self.spacers:
                side.channel.publish("acked", Acked.SPACER)
            if self.link.rounds:
                self._tell_rounds()
        self._open(side)

    def _tell_rounds(self) -> None:
        if not self.rounds_reported:
            self.rounds_reported = True
            self.link.send_control(Control.ROUNDS, 1)

    def _open(self, side: Side) -> None:
        """Both applications have attached: each hears it of the other."""
        if self.into is In.ATTACHED and self.window:
            self.into = moved(self.into, InEvent.MET)
            self.out = moved(self.out, OutEvent.MET)
            self.open = True
            side.tell(attached=1)

    def _send(self, side: Side) -> None:
        """Data from our application's ring, as far as there is room at the other end and in the link."""
        if self.out is not Out.RING or self.calm:
            return
        window = self.window - side.held
        most = limits.LINK_PIECE_MAX if self.link.buffered else window
        for piece in side.channel.readable(side.held):
            while piece and window > 0 and self.link.room:
                part, piece = piece[: min(window, most)], piece[min(window, most) :]
                self.link.send(part)
                window -= len(part)
                side.held += len(part)
                self.sent += len(part)

    def _tell_read(self, side: Side, *, all_of_it: bool = False) -> None:
        """How far our application has read, when that is worth a word; else it rings once it has read more."""
        if (self.into is not In.RING and self.into is not In.BACK) or (
            (self.calm or not self.link.room) and not all_of_it
        ):
            return
        channel = side.channel
        for _ in range(2):
            read = side.read_count
            if read > self.read_reported and (all_of_it or read - self.read_reported >= self.read_step):
                self.read_reported = read
                self.link.send_control(Control.READ, read)
            wanted = channel.sent - self.read_reported >= self.read_step
            if wanted == side.asking:
                break
            side.ask(wanted=wanted)  # then look once more

    def _recall(self, side: Side, peer: PeerState) -> None:
        """Our application wants by TCP what it has not read."""
        if self.recall is not Recall.NOT:  # all that has not come before is wanted already
            if peer.rx_frozen != self.recalled_at:
                self.reset("recall")  # the other end sends again what follows later bytes
                return
            self.recall = moved(self.recall, RecallEvent.WANT)
            return
        channel = side.channel
        if PeerState(*channel.remote()).rx_ready != peer.rx_ready:
            self._hub.mark(side)  # the consent to the round that it recalls is said first
            return
        decided = channel.decide(True, Back.RECALLED, self.in_round or 1)
        if decided != Back.RECALLED or not self.read_reported <= peer.rx_frozen <= channel.sent:
            self.reset("violation")
            return
        self.recall = moved(self.recall, RecallEvent.WANT)
        self.recalled_at = peer.rx_frozen
        self.link.send_control(Control.RECALL, peer.rx_frozen)

    @property
    def _drained(self) -> bool:
        """Whether the link has all that our application has sent by ring."""
        side = self.side
        return self.out is Out.RECALLED or side.channel.received + side.held == side.peer.tail

    def _tell_end(self, side: Side, peer: PeerState) -> None:
        """How our application's direction ends, behind its last byte."""
        if side.closed and (self.ending is Ending.OPEN or self.ending is Ending.SHUT):
            self.ending = moved(self.ending, EndEvent.CLOSED)
            self.link.send_control(Control.CLOSED, side.read_count)
        if not self._drained:
            return
        back = peer.back(self.out_round or 1)
        if back == Back.BACK and self.out not in (Out.BACK, Out.RECALLED) and self.ending not in SILENT:
            self.out = moved(self.out, OutEvent.BACK)
            self.arrived_reported = -1
            self._tell_read(side, all_of_it=True)
            self._send_end(Control.BACK, peer.tail)
        if peer.shut_wr and self.ending is Ending.OPEN:
            self.ending = moved(self.ending, EndEvent.SHUT)
            self._send_end(Control.SHUT, peer.tail)
        if side.closed and self.ending is not Ending.ENDED:
            self.ending = moved(self.ending, EndEvent.ENDED)
            self._send_end(Control.ENDED, peer.tail)

    def _send_end(self, control: Control, count: int) -> None:
        self.unconfirmed += 1
        self.link.send_control(control, count)

    def _show_end(self, side: Side) -> None:
        """How the other application's direction ends, once all of it is in our application's ring."""
        if self.peer_ending not in (Ending.OPEN, Ending.SHUT) and self.shown is not Ending.ENDED:
            unread = self.out is not Out.RECALLED and side.peer.tail != self.peer_read_at_close
            if unread and (self.peer_ending is Ending.ENDED or not side.channel.space):
                self.reset("unread")  # it closed without reading them, which TCP answers with a reset as well
                return
        if self.peer_ending not in SILENT or self.recall is Recall.REQUESTED:  # what is not granted is no end
            return
        if self.shown is (shown := self.peer_ending if self.peer_ending is Ending.ENDED else Ending.SHUT):
            return
        self.shown = shown
        if self.into is not In.BACK and self.recall not in BY_APPLICATION and not self._decide(Back.ENDED):
            return
        how = {"shut_wr": 1} if shown is Ending.SHUT else {"notice": int(Notice.CLOSED)}
        side.tell(**how, tx_fin_at=side.channel.sent, tx_fin=1)

    # ---- what the other provider says ----

    def handle_control(self, control: Control, count: int) -> None:
        """Anything but DATA.

        Raises:
            PeerViolation: It makes no sense now; the connection is reset.
        """
        if self.lost:
            return
        try:
            self._RECEIVED[control](self, self.side, count)
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
        if not self.flows:
            self.reset("violation")
            raise PeerViolation("data from an end that does not send by ring", rule="link_data")
        if length > self.side.channel.tx_most:
            self.reset("violation")
            raise PeerViolation(f"{length} bytes of data for a ring of {self.side.channel.tx_most}", rule="link_data")
        if self.recall not in (Recall.NOT, Recall.OURS):
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
        if self.recall is Recall.OURS:
            self._keeping = bytearray(length)
            return (memoryview(self._keeping),)
        return tuple(found)

    def handle_data(self, length: int) -> None:
        if self._keeping is not None:
            kept, self._keeping = self._keeping, None
            if self.recall is Recall.OURS:
                self._kept += kept
            return
        side = self.side
        try:
            if self.recall is Recall.OURS and not self.lost:  # it was for the ring, until just now
                self._kept += b"".join(side.channel.writable())[len(self._kept) :][:length]
                return
            if self.lost or self.recall is not Recall.NOT:
                return
            side.channel.commit(length)
            side.ring()
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
        if self.out is Out.BACK and (
            not self.rounds_reported or self.arrived_reported < 0 or self.out_round >= layout.CHANNEL_ROUNDS
        ):
            raise PeerViolation("consent to another round, and this one is not over", rule="link_order")
        self.out = moved(self.out, OutEvent.INVITED)
        if self.out is Out.INVITED:
            self.out_round += 1
            side.channel.revoke(0, Acked.SWITCH)
            side.tell(rx_ready=self.out_round)

    def _on_switched(self, side: Side, count: int) -> None:
        self.into = moved(self.into, InEvent.SWITCHED)
        self.peer_switched_at = count
        # SWITCHED may have crossed our RECALL. The other application then sends again by TCP without waiting for ACKED,
        # and ours may have read beyond `count` before this word comes: the ring would begin in what it has read.
        self._switch_withheld = self.recall is Recall.OURS
        if not self._switch_withheld:
            self._show_switch(side)

    def _on_read(self, side: Side, count: int) -> None:
        channel = side.channel
        passed = count - channel.received
        if not 0 <= passed <= side.held:
            raise PeerViolation(f"{count} bytes read, of {self.sent} that were sent", rule="link_count")
        if passed:
            channel.consume(passed)
            side.held -= passed
            if channel.wants_space:
                side.ring()

    def _on_ask(self, side: Side, count: int) -> None:
        if count > self.rounds_reported:
            raise PeerViolation(f"{count} with a question back to TCP", rule="link_order")
        if self.asked is not bool(count):  # an answer to each would be a queue without a bound
            return
        self.asked = not count
        if self.asked:
            side.tell(notice=Notice.DEMOTE)
            self.link.send_control(Control.ACKED, Acked.REQUEST)
        elif not self.left and self.out is not Out.RECALLED:  # else we ask, too
            side.channel.revoke(Notice.DEMOTE, 0)
            side.ring()

    def _on_recall(self, side: Side, count: int) -> None:
        channel = side.channel
        if not channel.received <= count <= self.sent:
            raise PeerViolation(f"a recall from byte {count}, of {self.sent} that were sent", rule="link_count")
        recalled = moved(self.out, OutEvent.RECALLED, rule="link_count")
        if not self._stop_at(side, count, recalled):
            # The application has gone back by itself, ended or died, and will not send again. When a provider leaves,
            # the end that asked keeps what comes until it learns of that (`_arrived`).
            if not self.left:
                self.reset("recall")
            return
        side.ring()
        self.link.send_control(Control.ACKED, Acked.REQUEST)
        self.link.send_control(Control.RESENDS)

    def _on_resends(self, side: Side, _count: int) -> None:
        self.recall = moved(self.recall, RecallEvent.RESENDS)
        if self.recall in AGAIN:
            self._kept.clear()
            if self.recall is Recall.GRANTED:
                side.tell(acked=Acked.RECALL)  # our application may read TCP
            elif self.undecided:
                self._read_tcp(side)

    def _on_back(self, side: Side, count: int) -> None:
        self.into = moved(self.into, InEvent.BACK)
        if self.peer_ending in SILENT:
            raise PeerViolation("back to TCP behind its end", rule="link_order")
        # it may never have left TCP: then the count is that of the round before, or 0
        if self._arrived(count) and self._read_tcp(side) == Back.BACK:
            side.channel.revoke(0, Acked.READY)  # before our application consents anew
            side.tell(tx_ended=self.in_round)

    def _on_shut(self, _side: Side, count: int) -> None:
        self.peer_ending = moved(self.peer_ending, EndEvent.SHUT)
        self._arrived(count)

    def _on_closed(self, side: Side, count: int) -> None:
        if not side.channel.received <= count <= self.sent:
            raise PeerViolation(f"closed with {count} bytes read, of {self.sent} that were sent", rule="link_count")
        self.peer_ending = moved(self.peer_ending, EndEvent.CLOSED, rule="link_count")
        self.peer_read_at_close = count

    def _on_ended(self, _side: Side, count: int) -> None:
        self.peer_ending = moved(self.peer_ending, EndEvent.ENDED)
        self._arrived(count)

    def _arrived(self, count: int) -> bool:
        """All has, unless some is recalled and we drop what comes; that is said. False: it is reset."""
        if self.recall is Recall.OURS and count != self.recalled_at:
            self.give_kept()  # it will not send it again
        elif self.recall is Recall.REQUESTED and count != self.recalled_at:
            self.reset("recall")  # nor what our application wants again
            return False
        if self.recall is Recall.NOT and count != self.side.channel.sent:
            raise PeerViolation(f"an end at byte {count}, of {self.side.channel.sent} that came", rule="link_count")
        self.link.send_control(Control.ARRIVED, count)
        return True

    def _on_fin_seen(self, side: Side, _count: int) -> None:
        # What our application had to tell was there before its kernel sent the FIN, and the FIN has arrived.
        side.peer = PeerState(*side.channel.remote())
        side.gone |= not side.final

    def _on_acked(self, side: Side, count: int) -> None:
        self.unanswered = max(0, self.unanswered - bool(count & Acked.REQUEST))  # an older question may be meant
        if count & Acked.SPACER:
            side.channel.decide_spacer(False, Spacer.SENT if count & Acked.SPACED else Spacer.NONE, self.out_spaced)
        side.tell(acked=count & (Acked.SWITCH | (0 if self.unanswered else Acked.REQUEST)))

    def _on_arrived(self, side: Side, count: int) -> None:
        if not self.unconfirmed or count != side.peer.tail:
            raise PeerViolation(f"{count} bytes have arrived, where no end was told there", rule="link_count")
        self.unconfirmed -= 1
        self.arrived_reported = count

    def _on_spacer(self, side: Side, count: int) -> None:
        if not self.in_spaced < count <= self.in_round:
            raise PeerViolation(f"a spacer behind round {count} of {self.in_round}", rule="link_order")
        self.in_spaced = count
        knows = PeerState(*side.channel.remote()).knows & Knows.SPACER
        reads = count == self.in_round and self.into in (In.RING, In.BACK) and self.recall is Recall.NOT
        spaced = knows and reads and side.channel.decide_spacer(True, Spacer.SENT, count) == Spacer.SENT
        self.link.send_control(Control.ACKED, Acked.SPACER | Acked.SPACED if spaced else Acked.SPACER)

    def _on_rounds(self, side: Side, count: int) -> None:
        if self.rounds:
            raise PeerViolation("rounds are told again", rule="link_order")
        self.rounds = True
        self.spacers = bool(count)
        side.tell(acked=Acked.ROUNDS | (Acked.SPACER if self.spacers else 0))
        self._tell_rounds()

    def _on_reset(self, _side: Side, _count: int) -> None:
        self.give_up("far")

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
            self.settled_at = self.side.channel.sent if self.recall is Recall.NOT else self.recalled_at
        if self.side.peer.fin_seen and not self.side.end_of.held():
            if self._free:
                self._hub.drop(self)  # all has arrived, or went by TCP
            else:
                self.reset("link_lost")  # TCP has been reset, as it is where the other provider has died
            return None
        if self.left and self._free:
            self._hub.drop(self)
            return None
        if self.into is In.RING and not (self._reset_armed or self.taken):
            received = self.side.end_of.received()
            if received is not None and received > self.peer_switched_at + 1:  # one may be a FIN
                self._arm_reset()  # what stands behind the lost bytes may fill TCP's buffers, and the end be stuck
        return self.settled_at

    def _arm_reset(self) -> None:
        """TCP gets through, so the other provider would ask soon, if it lived; and after the end nobody else resets."""
        if not self._reset_armed:
            self._reset_armed = True
            self._hub.loop.call_later(limits.SETTLE_ENDED_S, partial(self.handle_arrived, None))

    def handle_fault(self) -> None:
        """A turn has failed."""
        self.leave()

    def cut_off(self) -> None:
        """The protocol has gone; a link with another host breaks with it."""

    def handle_farewell(self) -> None:
        """The other provider has let go of it, and all that it said has come; not opened, it never left TCP there."""
        if not (self.open or self.lost):
            self._hub.drop(self)

    def handle_arrived(self, count: int | None) -> bool:
        """Of our application's bytes `count` have arrived; None: that cannot be found out. False: it is over now.

        What follows goes by TCP. What comes from the other end still waits for `handle_resynced`.
        """
        if self.break_off() is None:
            return False
        if count is None:
            if self.given and self.taken:
                self._hub.drop(self)  # whoever still misses something of ours is the one to reset it
            else:
                self.reset("link_lost")
            return False
        side = self.side
        try:
            if not side.channel.received <= count <= self.sent:
                self.reset("violation")
            elif not self._send_again(side, count):
                self.reset("link_lost")
            else:
                # nobody will hear of what it says from now on, and so it need not wait for that
                side.tell(acked=Acked.SWITCH | Acked.REQUEST, notice=Notice.DEMOTE)
        except (ConnectionResetError, ValueError):
            self.reset("violation")
        return not self.lost

    def _send_again(self, side: Side, count: int) -> bool:
        """By TCP what follows; False: it cannot."""
        if self.out in USED or self.out is Out.BACK:
            return self._stop_at(side, count, moved(self.out, OutEvent.RECALLED))
        return True

    def handle_resynced(self) -> None:
        """The other application sends by TCP what has not arrived here, and ours may read it."""
        if self.lost or self.settled_at is None:
            return
        side = self.side
        self.turn(side)
        if self.lost:
            return
        if self.recall is not Recall.NOT and self.recalled_at != self.settled_at:
            self.reset("recall")  # it wants again what the other end counts as arrived
            return
        if self.recall in BY_APPLICATION:
            side.tell(acked=Acked.RECALL)
        if self.undecided:
            self._read_tcp(side)
        if not self.lost:
            self._hub.drop(self)

    def reset(self, reason: str) -> None:
        """Bytes are lost, or a rule was broken: both ends are told to reset the connection."""
        self.reclaim()
        if not self.lost:
            self.failed = True
            self.link.send_control(Control.RESET)
            self.give_up(reason)

    def give_up(self, reason: str | None) -> None:
        """Our application is told to reset the connection; None: that is counted at its other end."""
        self.reclaim()
        if self.lost:
            return
        if reason is not None:
            self._hub.counters.add("relay_reset", reason)
        self.side.tell(notice=Notice.RESET)
        self._hub.drop(self)

    def bid_farewell(self) -> None:
        """Nothing more goes over the link."""
        self._hub.finishing[self] = None
        self.link.finish(lambda: self._hub.finishing.pop(self, None))
        self.on_over()

    def leave(self, *, crowded: bool = False) -> None:
        """The protocol goes, or makes room: both directions end where they are, and TCP goes on from there."""
        self.reclaim()
        if self.lost or self.left:
            return
        self.leaving = moved(self.leaving, LeaveEvent.LEAVE)
        self.link.send_control(Control.LEAVE, int(crowded))
        if not self.lost:
            self._leave(self.side, crowded=crowded)

    def _leave(self, side: Side, *, crowded: bool) -> None:
        if self.ends_here:
            self._hub.counters.add("relay_left")
        if self.into in AWAITED and self.recall is Recall.NOT and self.peer_ending not in SILENT:
            # What has arrived here is read from the ring. From there on the other end sends again by TCP, which ours
            # reads once it is known that it can: it may just have gone back, or ended, by itself.
            self.recall = moved(self.recall, RecallEvent.TAKE)
            self.recalled_at = side.channel.sent
            self.link.send_control(Control.RECALL, self.recalled_at)
        side.tell(notice=Notice.DEMOTE | Notice.CROWDED if crowded else Notice.DEMOTE)
        self._hub.mark(side)

    def _on_leave(self, side: Side, count: int) -> None:
        left, self.leaving = self.left, moved(self.leaving, LeaveEvent.REQUESTED)
        if not left:
            self._leave(side, crowded=count == 1)

    @property
    def settled(self) -> bool:
        """Whether neither application depends on the provider any more, and the other provider knows.

        Who does not lead is dropped then, which is what is to be waited for.
        """
        return self.leaving is Leaving.LEADS and self._free and self.settled_at is not None

    @property
    def _free(self) -> bool:
        """Whether ours does not, nor the other one on what we have still to say."""
        unused = self.out not in USED and self.out is not Out.BACK
        return self.given and self.taken and (unused or self.arrived_reported >= 0)

    _RECEIVED = {  # noqa: RUF012 - not to be changed
        Control.ATTACHED: _on_attached, Control.READY: _on_ready, Control.SWITCHED: _on_switched,
        Control.READ: _on_read, Control.ASK: _on_ask, Control.RECALL: _on_recall,
        Control.BACK: _on_back, Control.SHUT: _on_shut, Control.CLOSED: _on_closed,
        Control.ENDED: _on_ended, Control.FIN_SEEN: _on_fin_seen, Control.ACKED: _on_acked,
        Control.RESET: _on_reset, Control.LEAVE: _on_leave, Control.ARRIVED: _on_arrived,
        Control.RESENDS: _on_resends, Control.ROUNDS: _on_rounds, Control.SPACER: _on_spacer,
    }  # fmt: skip


def enter(
    hub: Hub, end: End, *, protocol: str, on_drop: Callable[[], None], link: Link, segment_id: bytes, uid: int
) -> RemoteRelay:
    """Takes a connection in whose application has not attached yet; raises Unavailable."""
    relay = RemoteRelay(hub, protocol, on_drop, link, segment_id=segment_id, uid=uid)
    hub.enter(relay, end)
    return relay
