"""SuspComm: one end's socket moves to another process, and the peer connects anew (docs/wire/sdp.md §15).

The connection is followed over its renewals: the peer that answered sends SuspCommAck as the last message of the old
connection and its Hello as the first of the new one, in the same channel here, since nothing overtakes either. Each
half is a stream of numbered bytes that go by Data or by a SrcAvail that is read; adverts that were not read are void
afterwards, and their bytes are sent again. Credits are counted as in §9, with pools so small that they matter.

L is the peer that suspends, R the one that answers; the connecting peer of the connection is in `connecting`.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from sdp_model.explorer import SIDES, Broken, Channel, Item, OfTwo, Step, Will


class Message(NamedTuple):
    """One SDP message."""

    kind: str
    bufs: int = 0
    acks: int = 0
    start: int = 0
    length: int = 0

    def __str__(self) -> str:
        what = f"bytes {self.start}..{self.start + self.length - 1}, " if self.length else ""
        return f"{self.kind}({what}Bufs {self.bufs}, acks {self.acks})"


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be broken on purpose."""

    refreshes_while_suspended: bool = True  # L goes on telling of new buffers until the SuspCommAck
    own_transfers_first: bool = True  # step 2: SuspComm waits for In-Process transfers
    answer_after_transfers: bool = True  # step 3
    accepting_disregards: bool = True  # step 8
    one_request_at_a_time: bool = True  # no SuspComm of one's own while the other's is not answered
    unread_sent_again: bool = True  # step 7


@dataclass(slots=True, unsafe_hash=True)
class Peer:
    """One end. `source` and `sink` state are that of the two halves."""

    total: int
    connecting: bool
    suspends_left: int = 0
    up: bool = True  # False between the two connections, from SuspCommAck to Hello or HelloAck
    suspending: bool = False  # SuspComm sent, SuspCommAck not received
    answering: bool = False  # SuspComm received, SuspCommAck not sent
    head: int = 0
    advert: tuple[int, int] | None = None  # own: first byte, count
    got: int = 0
    offered: tuple[int, int] | None = None  # the other's
    reading: bool = False
    read: bool = False  # the RdmaRdCompl is to be sent
    pool: int = 3
    posted: int = 3
    credit: int = 3
    unacked: int = 0
    unsaid: int = 0
    last_bufs: int = 3


@dataclass
class Suspend(OfTwo[Peer]):
    """The model."""

    name: str
    peers: tuple[Peer, Peer]
    rules: Rules = field(default_factory=Rules)

    def steps(self, side: int, peer: Peer, item: Item | None) -> Iterator[Step[Peer] | Broken]:
        name = SIDES[side]
        if item is not None:
            assert isinstance(item, Message)
            after = copy(peer)
            try:
                sent = self.take_in(after, item, name)
            except Broken as broken:
                yield broken
                return
            yield Step(Will.PROTOCOL, f"{name} <- {item}", after, sent, taken=True)
        for will, label, after, sent in self.own(peer):
            yield Step(will, f"{name}: {label}" if label else f"{name} -> {', '.join(map(str, sent))}", after, sent)

    # Credits, §9.

    def adds_credit(self, peer: Peer) -> bool:
        return peer.posted + peer.unsaid > peer.last_bufs

    def may_send(self, peer: Peer, *, payload: bool = False) -> bool:
        if payload or peer.credit != 1:
            return peer.credit >= (3 if payload else 2)
        return self.adds_credit(peer)

    def send(self, peer: Peer, kind: str, start: int = 0, length: int = 0) -> Channel:
        message = Message(kind, peer.posted, peer.unsaid, start, length)
        peer.unacked, peer.unsaid, peer.credit, peer.last_bufs = peer.unacked + 1, 0, peer.credit - 1, peer.posted
        return (message,)

    def renew(self, peer: Peer, *, connecting: bool) -> None:
        """§15 step 7: everything but the bytes of the stream begins anew."""
        if peer.advert and self.rules.unread_sent_again:
            peer.head = peer.advert[0]
        peer.advert = peer.offered = None
        peer.connecting, peer.suspending, peer.answering = connecting, False, False
        peer.posted = peer.credit = peer.last_bufs = peer.pool
        peer.unacked = peer.unsaid = 0

    # What comes in.

    def take_in(self, peer: Peer, message: Message, name: str) -> Channel:
        if message.kind == "Hello":
            peer.up = True
            return (Message("HelloAck", peer.pool),)
        if message.kind == "HelloAck":
            peer.up = True
            return ()
        if not peer.up:
            return ()  # of the old connection, which is closed
        peer.unsaid += 1
        peer.unacked -= message.acks
        peer.credit = message.bufs - peer.unacked
        if peer.credit < 0:
            raise Broken(f"{name}: credit below 0")
        if message.kind == "Data" and message.length:
            self.deliver(peer, message.start, message.length, name)
        elif message.kind == "SrcAvail":
            peer.offered = (message.start, message.length)
        elif message.kind == "RdmaRdCompl":
            if not peer.advert:
                raise Broken(f"{name} gets {message} without a SrcAvail")
            peer.advert = None
        elif message.kind == "SuspComm":
            self.on_susp_comm(peer, name)
        elif message.kind == "SuspCommAck":
            if not peer.suspending or peer.reading:
                raise Broken(f"{name} gets {message} and has not asked, or reads")
            self.renew(peer, connecting=False)
            peer.up = False
        return ()

    def deliver(self, peer: Peer, start: int, count: int, name: str) -> None:
        if start != peer.got:
            raise Broken(f"{name} gets byte {start}, the next one is {peer.got}")
        peer.got += count

    def on_susp_comm(self, peer: Peer, name: str) -> None:
        """§15 step 8 when both ask at once."""
        if peer.answering:
            raise Broken(f"{name} gets a second SuspComm")
        if peer.suspending:
            if not peer.connecting and self.rules.accepting_disregards:
                return
            peer.suspends_left += 1  # to be repeated
            peer.suspending = False
        peer.answering = True

    # What a peer does by itself.

    def own(self, peer: Peer) -> Iterator[tuple[Will, str, Peer, Channel]]:
        rules = self.rules
        if not peer.up:
            return
        if peer.reading:
            after = copy(peer)
            after.reading, after.read = False, True
            assert after.offered
            after.got += after.offered[1]
            yield Will.PROTOCOL, "RDMA Read completes", after, ()
        if peer.suspending:
            yield from self.refreshing(peer, allowed=rules.refreshes_while_suspended)
            return
        if peer.read and self.may_send(peer):
            after = copy(peer)
            after.read, after.offered = False, None
            yield Will.PROTOCOL, "", after, self.send(after, "RdmaRdCompl")
        busy = peer.reading or peer.read
        if peer.answering:
            if (not busy or not rules.answer_after_transfers) and self.may_send(peer):
                after = copy(peer)
                sent = self.send(after, "SuspCommAck")
                self.renew(after, connecting=True)
                after.up = False
                yield Will.PROTOCOL, "", after, (*sent, Message("Hello", after.pool))
            yield from self.refreshing(peer, allowed=not self.may_send(peer))
            if not rules.one_request_at_a_time:
                yield from self.asking(peer)
            return
        yield from self.refreshing(peer, allowed=True)
        left = peer.total - peer.head
        if left and not peer.advert and self.may_send(peer, payload=True):
            after = copy(peer)
            after.head += 1
            yield Will.USER, "", after, self.send(after, "Data", peer.head, 1)
            if left >= 2:
                after = copy(peer)
                after.head += 2
                after.advert = (peer.head, 2)
                yield Will.USER, "", after, self.send(after, "SrcAvail", peer.head, 2)
        if peer.offered and not busy:
            after = copy(peer)
            after.reading = True
            yield Will.USER, f"RDMA Read of bytes {peer.offered[0]}+{peer.offered[1]}", after, ()
        if not busy or not rules.own_transfers_first:
            yield from self.asking(peer)

    def asking(self, peer: Peer) -> Iterator[tuple[Will, str, Peer, Channel]]:
        if peer.suspends_left and self.may_send(peer):
            after = copy(peer)
            after.suspends_left -= 1
            after.suspending = True
            yield Will.USER, "", after, self.send(after, "SuspComm")

    def refreshing(self, peer: Peer, *, allowed: bool) -> Iterator[tuple[Will, str, Peer, Channel]]:
        """§9.4; at two credits as well, since payload needs three."""
        peer_credit = peer.last_bufs - peer.unsaid
        if allowed and peer_credit <= 2 and self.adds_credit(peer) and self.may_send(peer):
            after = copy(peer)
            yield Will.PROTOCOL, "", after, self.send(after, "Data")

    def fault(self, peers: tuple[Peer, Peer], channels: tuple[Channel, Channel]) -> str | None:
        for source, sink in (peers, peers[::-1]):
            if sink.reading and source.advert is None:
                return "a key is withdrawn while it is being read"
        return None

    def stalled(self, peers: tuple[Peer, Peer], channels: tuple[Channel, Channel]) -> str | None:
        for name, peer in zip(SIDES, peers, strict=True):
            if peer.suspending or peer.answering or not peer.up:
                return f"{name} is in the middle of a suspension"
        return None

    def unfinished(self, peers: tuple[Peer, Peer], channels: tuple[Channel, Channel]) -> str | None:
        for name, source, sink in (("A", *peers), ("B", *peers[::-1])):
            if source.suspends_left:
                return f"{name} could not suspend"
            if sink.got != source.total:
                return f"{name} could not deliver more than {sink.got} bytes of {source.total}"
        return None
