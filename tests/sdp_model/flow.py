"""Flow control, docs/wire/sdp.md §8 and §9: what may be sent with which credit, and when the peer is refreshed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sdp_model.explorer import Will
from sdp_model.peer import Message, Peer, Setting

Act = Callable[..., None]
Choice = tuple[Will, Act]


class Flow:
    """One peer while it takes a step."""

    def __init__(self, setting: Setting, peer: Peer, name: str) -> None:
        self.setting = setting
        self.rules = setting.rules
        self.bounds = setting.bounds
        self.peer = peer
        self.name = name
        self.sent: list[Message] = []
        self.said = ""

    def label(self) -> str:
        return (
            f"{self.name}: {self.said}" if self.said else f"{self.name} -> {', '.join(str(one) for one in self.sent)}"
        )

    def acks(self) -> int:
        """§8, §12.3: MSeqAck stays below the MSeq of a SrcAvailCancel that is being worked off."""
        return self.peer.unsaid - self.peer.held

    def adds_credit(self, acks: int) -> bool:
        """§9.3: Bufs and MSeqAck would raise what the peer can compute."""
        return self.peer.posted + acks > self.peer.last_bufs

    def may_send(self, *, payload: bool, acks: int | None = None) -> bool:
        """§9.3, CA4-82: two credits stay in reserve, the last of them for messages that bring credits."""
        peer = self.peer
        if not self.bounds.credits or peer.credit > self.rules.payload_reserve:
            return True
        if payload or peer.credit == 0:
            return False
        if peer.credit >= 2 or not self.rules.last_credit_only_for_credits:
            return True
        return self.adds_credit(self.acks() if acks is None else acks)

    def must_refresh(self) -> bool:
        """§9.4: a peer that may be down to one credit is told of new buffers, without waiting for anything.

        A peer that has too few credits for payload is told of buffers that it cannot know of, and that messages were
        taken in; but a single empty Data is no reason to answer, else two peers would answer each other for ever.
        """
        peer, rules = self.peer, self.rules
        peer_credit = peer.last_bufs - peer.unsaid
        if rules.refresh == "never" or not self.adds_credit(self.acks()):
            return False
        if rules.refresh == "when it helps" and 1 < peer_credit <= rules.payload_reserve:
            return peer.posted > peer.last_bufs or peer.owed or self.acks() >= 2
        return peer_credit <= (rules.payload_reserve if rules.refresh == "always" else 1)

    def send(self, message: Message) -> None:
        """§9.2: Bufs and MSeqAck are one snapshot."""
        peer = self.peer
        acks = self.acks()
        peer.unacked += 1
        peer.unsaid -= acks
        if self.bounds.credits:
            peer.credit -= 1
            peer.last_bufs = peer.posted
            peer.owed = False
        self.sent.append(message._replace(acks=acks, bufs=peer.posted if self.bounds.credits else 0))

    def take_header(self, message: Message) -> None:
        """§9.1, and what MSeqAck confirms."""
        peer = self.peer
        peer.unsaid += 1
        if peer.held:
            peer.held += 1
        peer.unacked -= message.acks
        if peer.cancel is not None:
            peer.cancel = max(0, peer.cancel - message.acks)
        if peer.change:
            left = peer.change.unacked - message.acks
            peer.change = peer.change._replace(unacked=left) if left > 0 else None
        if self.bounds.credits:
            peer.posted -= 1
            peer.credit = message.bufs - (peer.unacked if self.rules.credit_counts_ack else 0)
            peer.owed = peer.owed or message.kind != "Data" or message.payload > 0
            if message.payload and not peer.offers:
                peer.unread += 1
            else:
                peer.posted += 1  # §9.5: at once, whatever the program does

    def still_sending(self) -> bool:
        """The program writes all it has before it reads."""
        peer = self.peer
        return peer.sends_first and bool(peer.head < peer.total or peer.adverts or peer.rest)

    def choices_of_credit(self) -> Iterator[Choice]:
        peer = self.peer
        if peer.unread and not self.still_sending():
            yield Will.USER, Flow.consume
        if peer.updates_left and self.may_send(payload=False):
            yield Will.WHIM, Flow.send_update
        if peer.controls_left and self.may_send(payload=False):
            yield Will.PROTOCOL, Flow.send_control
        if self.bounds.credits and self.must_refresh() and self.may_send(payload=False):
            yield Will.PROTOCOL, Flow.refresh

    def consume(self) -> None:
        self.peer.unread -= 1
        self.peer.posted += 1
        self.said = "the program takes a message's payload"

    def send_update(self) -> None:
        self.peer.updates_left -= 1
        self.send(Message("Data"))

    def send_control(self) -> None:
        self.peer.controls_left -= 1
        self.send(Message("Control"))

    def refresh(self) -> None:
        self.send(Message("Data"))
