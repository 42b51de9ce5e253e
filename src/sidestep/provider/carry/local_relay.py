"""Connections both of whose ends are here, so that an offload protocol can stand between them.

Theory of operation. A and B are the two ends of one TCP connection. Each has a channel of its own with the provider,
and a relay as if the other were on another host (`remote_relay`). The protocol brings a link for each:

    A ══ ring ══► relay ── link │ protocol │ link ── relay ══ ring ══► B      (and the other way round)
    └─────────────────────────── native TCP ──────────────────────────┘

Bytes stay in A's ring until B has read them. So a protocol that fails or is removed loses nothing (`cut_off`). Those
that its link has go straight from ring to ring, and those that follow go by TCP. If an application sends no more, and
the other ring has no room for its bytes, the connection is reset.

If the provider dies, bytes that it held are lost. The shims notice by a pipe that it alone holds open, and reset.
"""

from __future__ import annotations

from collections.abc import Callable

from sidestep.errors import PeerViolation
from sidestep.loop import nothing
from sidestep.provider.carry.direction import In, Out, Recall
from sidestep.provider.carry.hub import End, Hub
from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.switch.link import Control, Link


class _NoLink:
    """Link of a protocol that has gone: it takes everything, and brings nothing."""

    rounds = plain = buffered = False
    spacers = True
    room, under_way = 1, 0

    def send_control(self, control: Control, count: int = 0) -> None:
        """Drops it."""

    def send(self, piece: memoryview) -> None:
        """Drops it: the bytes stay in the ring."""

    def finish(self, on_gone: Callable[[], object]) -> None:
        on_gone()

    def lend(self, record: dict[str, int]) -> None:
        """Never."""

    def take_back(self, record: dict[str, int], error: int) -> None:
        """Never called."""

    def details(self) -> dict[str, object]:
        return {}


class LocalEnd(RemoteRelay):
    """An end whose other end is here, too."""

    lends = False  # no field of such a link is the engine's
    other: LocalEnd

    def give_up(self, reason: str | None) -> None:
        """Counts the reset of a connection once, where it began."""
        super().give_up(None if reason == "far" else reason)

    def handle_fault(self) -> None:
        self.cut_off()

    def cut_off(self) -> None:
        """Takes both ends back to TCP, or resets them, without a call to the protocol."""
        both = self, self.other
        if not (self.lost or self.left):
            self._hub.counters.add("relay_left")
        for one in both:
            one.link = _NoLink()
            self._hub.finishing.pop(one, None)
            if not one.lost:
                one.turn(one.side)  # the application may have sent more by now
        for one in both:
            try:
                one._pass()
            except (ConnectionResetError, ValueError, PeerViolation):  # an application's counts are impossible
                one.reset("violation")
        for one in both:
            one.break_off()
        for one in both:
            one.handle_arrived(None if one.other.failed else one.other.settled_at)
        for one in both:
            if not one.other.failed:
                one.handle_resynced()
        for one in both:
            one.handle_arrived(None)  # the other one has failed, where it is not over

    def _pass(self) -> None:
        """Takes straight to the other end what our link may have; its ring has room for all that was sent."""
        other = self.other
        if self.out is Out.RECALLED and not self.failed:
            other.handle_control(Control.RESENDS, 0)
        if self.lost or other.lost:
            return
        if other.recall is Recall.OURS and self.out is not Out.RECALLED:  # an ended one does not send again
            other.give_kept()
        peer = self.side.peer
        if other.into is In.CONSENTED and peer.tx_switched == self.out_round == other.in_round:
            other.handle_control(Control.SWITCHED, peer.tx_switch_offset)
        if not other.flows or other.recall is not Recall.NOT:
            return
        channel = self.side.channel
        for piece in channel.readable(other.side.channel.sent - channel.received):
            piece = piece[: self.sent - other.side.channel.sent]
            for room in (piece and other.data_room(len(piece))) or ():
                room[:], piece = piece[: len(room)], piece[len(room) :]
                other.handle_data(len(room))


def enter(
    hub: Hub, ends: tuple[End, End], links: tuple[Link, Link], *, protocol: str, on_drop: Callable[[], None]
) -> tuple[LocalEnd, LocalEnd]:
    """Takes in two applications that have not attached yet, who connected first; raises Unavailable."""
    one = LocalEnd(hub, protocol, nothing, links[0], ends_here=2)
    other = LocalEnd(hub, protocol, on_drop, links[1], ends_here=0)
    one.other, other.other = other, one
    hub.enter(other, ends[1])
    try:
        hub.enter(one, ends[0])
    except BaseException:
        one.lost = True
        hub.drop(other)
        raise
    return one, other
