"""Changing the size of receive buffers (docs/wire/sdp.md §14), SinkAvails under way, both peers asking at once.

A message lands in the oldest posted buffer, so buffers are a queue of sizes. Sizes are those of payload; a SinkAvail
is one byte larger than the private buffers of its sink are at that time. Credits are left out: the pool is larger
than what is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from sdp_model.explorer import SIDES, Broken, Channel, Item, OfTwo, Step, Will

POOL = 2


class Message(NamedTuple):
    """One SDP message."""

    kind: str
    size: int = 0  # of the payload, of the SinkAvail's buffer, or the size asked for or granted
    non_discards: int = 0

    def __str__(self) -> str:
        return f"{self.kind}({self.size}{f', NonDiscards {self.non_discards}' if self.kind == 'SinkAvail' else ''})"


@dataclass(frozen=True, slots=True)
class Rules:
    """What may be broken on purpose."""

    increase_waits_for_answer: bool = True  # rule 1
    decrease_at_once: bool = True  # rule 1
    increase_answered_late: bool = True  # rule 4: not before the old buffers are used up
    accepting_disregards: bool = True  # rule 7
    one_request_at_a_time: bool = True  # none of one's own while the other's is not answered
    payload_fits_offer: bool = True  # payload is no longer than the SinkAvail that it uses up


@dataclass(slots=True, unsafe_hash=True)
class Peer:
    """One end."""

    size: int = 2  # of the own private buffers, as it is in force
    limit: int = 2  # largest payload to send
    buffers: tuple[int, ...] = (2,) * POOL
    requests: tuple[int, ...] = ()  # sizes that the program will ask for
    asked: int = 0
    answering: int = 0  # the size to grant
    data_left: int = 0
    offers_left: int = 0
    offers: tuple[int, ...] = ()  # own SinkAvails
    nd: int = 0
    queue: tuple[int, ...] = ()  # the other's valid SinkAvails
    pnd: int = 0


@dataclass
class Resize(OfTwo[Peer]):
    """The model."""

    name: str
    peers: tuple[Peer, Peer]
    rules: Rules = field(default_factory=Rules)

    def steps(self, side: int, peer: Peer, item: Item | None) -> Iterator[Step[Peer] | Broken]:
        name = SIDES[side]
        if item is not None:
            assert isinstance(item, Message)
            for answer in self.answers(peer, item, side):
                after = copy(peer)
                try:
                    self.take_in(after, item, side, answer)
                except Broken as broken:
                    yield broken
                    return
                yield Step(Will.PROTOCOL, f"{name} <- {item}", after, (), taken=True)
        for will, after, message in self.own(peer):
            yield Step(will, f"{name} -> {message}", after, (message,))

    def answers(self, peer: Peer, message: Message, side: int) -> list[int]:
        """Rule 2: the size asked for, or the present one."""
        return [message.size, peer.size] if message.kind == "ChRcvBuf" else [0]

    def take_in(self, peer: Peer, message: Message, side: int, answer: int) -> None:
        largest = message.size if message.kind == "Data" else 1
        if largest > peer.buffers[0]:
            raise Broken(f"{SIDES[side]}: {message} is larger than the buffer of {peer.buffers[0]} that it lands in")
        peer.buffers = peer.buffers[1:]
        peer.buffers += (peer.answering or peer.size,)  # rule 3: of the new size, whatever is still to drain
        if message.kind == "Data":
            self.on_data(peer, message, side)
        elif message.kind == "SinkAvail":
            if message.non_discards == peer.pnd:
                peer.queue += (message.size,)
            else:
                peer.pnd -= 1
        elif message.kind == "ChRcvBuf":
            self.on_request(peer, message, side, answer)
        else:
            if not peer.asked:
                raise Broken(f"{SIDES[side]} gets {message} and has not asked")
            peer.limit, peer.asked = message.size, 0

    def on_data(self, peer: Peer, message: Message, side: int) -> None:
        if not peer.offers:
            peer.nd += 1
            return
        if message.size > peer.offers[0]:
            raise Broken(
                f"{SIDES[side]}: {message} does not fit into the SinkAvail of {peer.offers[0]} that it uses up"
            )
        peer.offers = peer.offers[1:]

    def on_request(self, peer: Peer, message: Message, side: int, answer: int) -> None:
        if peer.answering:
            raise Broken(f"{SIDES[side]} gets {message} and has not answered the one before")
        if peer.asked:
            if SIDES[side] == "B" and self.rules.accepting_disregards:
                return
            peer.requests, peer.asked = (peer.asked, *peer.requests), 0
        peer.answering = answer

    def own(self, peer: Peer) -> Iterator[tuple[Will, Peer, Message]]:
        rules = self.rules
        after = copy(peer)
        if peer.data_left:
            size = min(peer.limit, peer.queue[0]) if peer.queue and rules.payload_fits_offer else peer.limit
            after.data_left -= 1
            if peer.queue:
                after.queue = peer.queue[1:]
            else:
                after.pnd += 1
            yield Will.USER, after, Message("Data", size)
        if peer.requests and not peer.asked and not (peer.answering and rules.one_request_at_a_time):
            after = copy(peer)
            size, *later = peer.requests
            after.asked, after.requests = size, tuple(later)
            if rules.decrease_at_once if size < peer.limit else not rules.increase_waits_for_answer:
                after.limit = size
            yield Will.USER, after, Message("ChRcvBuf", size)
        if peer.answering and not self.waits(peer):
            after = copy(peer)
            after.size, after.answering = peer.answering, 0
            yield Will.PROTOCOL, after, Message("ChRcvBufAck", peer.answering)
        if peer.offers_left and len(peer.offers) < 2:
            after = copy(peer)
            after.offers_left -= 1
            after.offers += (peer.size + 1,)
            yield Will.WHIM, after, Message("SinkAvail", peer.size + 1, peer.nd)

    def waits(self, peer: Peer) -> bool:
        """Rule 4."""
        return peer.answering > peer.size and self.rules.increase_answered_late and min(peer.buffers) < peer.answering

    def fault(self, peers: tuple[Peer, Peer], channels: tuple[Channel, Channel]) -> str | None:
        if any(channels):
            return None
        for source, sink in (peers, peers[::-1]):
            if source.pnd != sink.nd or source.queue != sink.offers:
                return "the two ends count SinkAvails differently"
        return None

    def stalled(self, peers: tuple[Peer, Peer], channels: tuple[Channel, Channel]) -> str | None:
        return None

    def unfinished(self, peers: tuple[Peer, Peer], channels: tuple[Channel, Channel]) -> str | None:
        for name, asker, other in (("A", *peers), ("B", *peers[::-1])):
            if asker.asked and not other.answering:
                return f"{name} waits for an answer that never comes"
            if asker.requests and not asker.asked and not asker.answering:
                return f"{name} could not ask"
            if not asker.asked and asker.limit != other.size:
                return f"{name} sends up to {asker.limit}, the other one's buffers are of {other.size}"
        return None
