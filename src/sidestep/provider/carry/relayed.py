"""State of one end of a connection that providers carry, and the ends of rings as its application sees them.

The words of the other provider, and the turns, are in `remote_relay`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from sidestep.loop import nothing
from sidestep.native.layout import Acked, Back, Notice, PeerState
from sidestep.provider.carry.direction import Directions, Out, RecallEvent, moved
from sidestep.provider.carry.hub import Hub, Side
from sidestep.rdma.verbs import SendRing
from sidestep.switch.link import Control, Link


class Relayed(Directions):
    """One connection."""

    side: Side
    lends: ClassVar[bool] = True  # the engine may have it

    def __init__(
        self,
        hub: Hub,
        protocol: str,
        on_drop: Callable[[], None],
        link: Link,
        *,
        segment_id: bytes = b"",
        uid: int = 0,
        ends_here: int = 1,
    ) -> None:
        super().__init__()
        self._hub = hub
        self.protocol = protocol
        self.on_drop = on_drop
        self.ends_here = ends_here  # that count as its own; of two that are joined one counts for both
        self.open = False  # both applications have attached
        self.lost = False  # reset, or over
        self.checking = False  # the kernel is to be asked about its end
        self.segment_id = segment_id  # id by which a shim's slot names it
        self.uid = uid  # the application's user
        self.link = link
        self.on_over: Callable[[], None] = nothing  # called once it is lost: its link has no more to do with it
        self.rounds = False  # true if our application may consent anew: the other provider has sent ROUNDS
        self.spacers = link.spacers  # true if the other provider answers SPACER
        self.rounds_reported = False  # true if the other one may: we have sent ROUNDS
        # The direction from our application:
        self.out_round = 0  # the last that it was invited to
        self.out_spaced = 0  # round of which it has asked about a spacer
        self.sent = 0  # bytes given to the link
        self.window = 0  # bytes of the ring that the other application reads; 0: it has not attached
        self.unconfirmed = 0  # ends that were sent and that no ARRIVED has answered
        self.arrived_reported = -1  # bytes of our application that the other provider has confirmed behind the last end
        # The direction to it:
        self.in_round = 0  # the last that it has consented to
        self.in_spaced = 0  # round of which the other end has asked about a spacer
        self.recalled_at = 0  # the count from which all is wanted by TCP
        self.peer_switched_at = 0  # bytes that came by TCP before
        self._switch_withheld = False  # true if our application does not know that
        self.peer_read_at_close = 0  # bytes that the other application had read when it closed
        self.read_reported = 0
        self.read_step = 0  # bytes read that are worth a word
        self._kept = bytearray()  # bytes that come while it is not known whether they come again
        self._keeping: bytearray | None = None  # buffer for the next of them
        # Both directions; none of these restricts later events, except as it says itself
        self.seen = 0  # `Seen` of our application's socket
        self.asking = False  # the wish of our application to receive by TCP is sent
        self.unanswered = 0  # words that no ACKED has answered yet
        self.asked = False  # the other application's wish stands, and is answered
        self.failed = False  # reset, for a reason that the other end may not know
        self.settled_at: int | None = None  # bytes that we reported as arrived, when the link was broken
        self.calm = False  # true if no word is passed on, so that it can be lent
        self._reset_armed = False  # and the other end has ended: a clock runs

    @property
    def memory(self) -> memoryview:
        """Memory of our application's ring, and the spill behind it."""
        return self.side.channel.ring()

    @property
    def ring(self) -> SendRing:
        channel = self.side.channel
        return SendRing(channel.ring()[: channel.rx_size], channel.pages, self.uid)

    @property
    def moved(self) -> int:
        channel = self.side.channel
        try:
            return channel.sent + channel.received + channel.avail
        except ConnectionResetError:  # the application's count is impossible: the next turn finds that
            return 0

    @abstractmethod
    def reset(self, reason: str) -> None:
        """Resets the connection at both ends: bytes are lost, or a rule was broken."""

    # ---- words to our application ----

    def _decide(self, how: Back) -> int:
        """Ends the ring to our application: how it does; NOT: it has recalled bytes that cannot be sent again."""
        side = self.side
        stands = side.channel.decide(True, how, self.in_round or 1)
        if stands == Back.RECALLED:
            if PeerState(*side.channel.remote()).rx_frozen != side.channel.sent:
                self.reset("recall")
            else:
                side.channel.publish("acked", Acked.RECALL)  # all bytes are there
        elif stands not in (how, Back.BACK):
            self.reset("violation")
        return Back.NOT if self.lost else stands

    def _read_tcp(self, side: Side) -> int:
        """Has our application read TCP behind the bytes that came by ring; returns how the round ends, as `_decide`."""
        side.channel.publish("tx_back_at", side.channel.sent)
        stands = self._decide(Back.BACK)
        if stands:
            side.ring()
        return stands

    def _stop_at(self, side: Side, count: int, recalled: Out) -> bool:
        """Has our application send again by TCP from byte `count` of its ring on; False: it cannot."""
        channel = side.channel
        side.gone |= not (side.end_of.client_open() or side.end_of.held())  # a killed process has decided nothing
        channel.publish("rx_frozen", count)
        stands = Back.ENDED if side.gone else channel.decide(False, Back.RECALLED, self.out_round or 1)
        if stands != Back.RECALLED and PeerState(*channel.remote()).tail != count:
            return False
        self.out = recalled
        channel.publish("notice", Notice.RECALL | Notice.DEMOTE)
        return True

    def _show_switch(self, side: Side) -> None:
        self._switch_withheld = False
        side.tell(tx_switch_offset=self.peer_switched_at, tx_switched=self.in_round)
        self.link.send_control(Control.ACKED, Acked.SWITCH)

    def give_kept(self) -> None:
        """Moves the kept bytes to the ring, where they belong: the other application does not send them again."""
        side = self.side
        if self._switch_withheld:
            self._show_switch(side)
        self.recall = moved(self.recall, RecallEvent.REFUSED)
        kept, self._kept = memoryview(bytes(self._kept)), bytearray()
        for piece in side.channel.writable():  # the ring has room, as checked before
            part = kept[: len(piece)]
            piece[: len(part)] = part
            kept = kept[len(part) :]
            side.channel.commit(len(part))
        side.ring()
