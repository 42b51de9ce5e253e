"""The end of a connection: DisConn and AbortConn on the queue pair, DREQ and DREP beside it (docs/wire/sdp.md §16).

A message on the queue pair first reaches the peer's receive queue; then its sender's work completes, and some time
later the peer takes it in. DREQ and DREP belong to the connection manager and may overtake what stands in that queue.
Once one end has disconnected, whatever has not reached its queue is lost. Each peer sends a few bytes, closes or
aborts when it likes, and must judge the end rightly: as the end of the stream only if the other one has closed and
did not abort.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field

from sdp_model.explorer import SIDES, Broken, Channel, Item, OfTwo, Step, Will


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be broken on purpose."""

    drain_before_judging: bool = True  # on DREQ take in what stands in the receive queue before saying "reset"
    dreq_waits_for_completion: bool = True  # of the own DisConn
    abort_conn_after_dis_conn: bool = True
    abort_waits_for_completion: bool = True


@dataclass(slots=True, unsafe_hash=True)
class Peer:
    """One end. `queue` holds what has reached its receive queue and was not taken in."""

    to_send: int
    abort_allowed: bool
    got: int = 0
    queue: tuple[str, ...] = ()
    sent: int = 0  # messages whose work has not completed
    closed: bool = False  # the program has closed its half
    dis_conn_sent: bool = False
    dis_conn_got: bool = False
    abort_got: bool = False
    aborting: bool = False
    linked: bool = True  # the queue pair works
    dreq_got: bool = False
    dreq_sent: bool = False
    told: str = ""  # what the program is told in the end: "end", "reset" or, to the one that aborts, "aborted"


_WORK, _MANAGER, _COMPLETION = "work", "manager", "completion"  # the three ways from one end to the other


@dataclass
class Teardown(OfTwo[Peer]):
    """The model."""

    name: str
    peers: tuple[Peer, Peer]
    rules: Rules = field(default_factory=Rules)

    def arrived(self, channel: Channel) -> Iterable[int]:
        """The first of each way."""
        seen: set[object] = set()
        for place, item in enumerate(channel):
            assert isinstance(item, tuple)
            if item[0] not in seen:
                seen.add(item[0])
                yield place

    def steps(self, side: int, peer: Peer, item: Item | None) -> Iterator[Step[Peer] | Broken]:
        name = SIDES[side]
        if item is not None:
            assert isinstance(item, tuple)
            after = copy(peer)
            sent = self.take_in(after, *item)
            yield Step(Will.PROTOCOL, f"{name} <- {item[1]} ({item[0]})", after, sent, taken=True)
        for will, label, after, sent in self.own(peer):
            yield Step(will, f"{name}: {label}", after, sent)

    def take_in(self, peer: Peer, way: str, what: str) -> Channel:
        if way == _COMPLETION:
            peer.sent -= 1
        elif way == _WORK and peer.linked:
            peer.queue += (what,)
            return ((_COMPLETION, "acknowledgement"),)
        elif what == "DREQ":
            peer.dreq_got = True
            if peer.linked and not peer.dreq_sent:
                return ((_MANAGER, "DREP"),)
        return ()

    def own(self, peer: Peer) -> Iterator[tuple[Will, str, Peer, Channel]]:
        """What a peer does by itself. §16.3 has the states; here they are the flags of `Peer`."""
        if peer.told:
            return
        after = copy(peer)
        if peer.queue:
            what, *rest = peer.queue
            after.queue = tuple(rest)
            after.got += what == "Data"
            after.dis_conn_got |= what == "DisConn"
            after.abort_got |= what == "AbortConn"
            yield Will.PROTOCOL, f"takes {what} in", after, ()
            after = copy(peer)
        if peer.linked and not peer.dreq_got and not peer.aborting:
            yield from self.sending(peer)
        if self.may_disconnect(peer):
            after.linked, after.dreq_sent = False, True
            self.judge(after)
            yield Will.PROTOCOL, f"DREQ; tells its program: {after.told}", after, ((_MANAGER, "DREQ"),)
        elif peer.dreq_got and (not peer.queue or not self.rules.drain_before_judging):
            after.linked = False
            self.judge(after)
            yield Will.PROTOCOL, f"ends; tells its program: {after.told}", after, ()

    def sending(self, peer: Peer) -> Iterator[tuple[Will, str, Peer, Channel]]:
        after = copy(peer)
        if peer.to_send:
            after.to_send -= 1
            after.sent += 1
            yield Will.USER, "Data", after, ((_WORK, "Data"),)
        elif not peer.closed:
            after.closed = after.dis_conn_sent = True
            after.sent += 1
            yield Will.USER, "close: DisConn", after, ((_WORK, "DisConn"),)
        if peer.abort_allowed:
            after = copy(peer)
            after.aborting = True
            if peer.dis_conn_sent and self.rules.abort_conn_after_dis_conn:
                after.sent += 1
                yield Will.WHIM, "abort: AbortConn", after, ((_WORK, "AbortConn"),)
            else:
                yield Will.WHIM, "abort", after, ()

    def may_disconnect(self, peer: Peer) -> bool:
        """§16.1 and §16.2."""
        if not peer.linked or peer.dreq_got:
            return False
        if peer.aborting:
            return not (peer.dis_conn_sent and peer.sent and self.rules.abort_waits_for_completion)
        if peer.abort_got:
            return True
        completed = not peer.sent or not self.rules.dreq_waits_for_completion
        return peer.dis_conn_sent and peer.dis_conn_got and completed

    def judge(self, peer: Peer) -> None:
        """§16.2: an end without DisConn, or with AbortConn, is a reset."""
        if peer.aborting:
            peer.told = "aborted"
        else:
            peer.told = "end" if peer.dis_conn_got and not peer.abort_got else "reset"

    def fault(self, peers: tuple[Peer, Peer], channels: tuple[Channel, Channel]) -> str | None:
        for name, peer, other in (("A", *peers), ("B", *peers[::-1])):
            if peer.told == "reset" and not other.aborting:
                return f"{name} tells of a reset, but nobody aborted"
            if peer.told == "end" and other.aborting and not peer.dreq_sent and other.told:
                return f"{name} tells of a regular end, but the other one had aborted"
            if peer.told == "end" and peer.got != self.peers[peer is peers[0]].to_send:
                return f"{name} tells of a regular end after {peer.got} bytes"
        return None

    def stalled(self, peers: tuple[Peer, Peer], channels: tuple[Channel, Channel]) -> str | None:
        return None

    def unfinished(self, peers: tuple[Peer, Peer], channels: tuple[Channel, Channel]) -> str | None:
        missing = [name for name, peer in zip(SIDES, peers, strict=True) if not peer.told]
        return f"{' and '.join(missing)} never ended" if missing else None
