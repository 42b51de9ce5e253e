"""The model of a connection: two peers that follow SDP's rules for credits, adverts, cancellations, modes and closing.

Sections are those of docs/wire/sdp.md. Each rule is one function of `Flow`, `Source` or `Sink`; `Rules` says which of
them are broken on purpose. What a peer sends it decides in the moment of sending: a reply that lacks credit is not
queued but remains undecided. The counters of §12.1 and the held MSeqAck of §12.3 rely on that, as
`replies_when_decided` and `drop_when_acked` show.

An RDMA Write is an item in the channel and reaches memory when its turn comes, which is the latest moment that the
transport allows: before the Send behind it. An RDMA Read completes at any time after it was begun, and its key must
be good until then.

What must hold: no message without a receive for it, no credit above the true one; each byte delivered once and in
order, no RDMA Write into a buffer that was taken back, no key withdrawn under a read; no deadlock and no endless
chatter (see `explorer`); and, where nothing is under way, both ends agree about counters, modes and adverts.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field

from sdp_model.explorer import SIDES, Broken, Channel, Item, OfTwo, Step, Will
from sdp_model.flow import Act, Choice, Flow
from sdp_model.peer import Bounds, Message, Peer, Rules, Setting
from sdp_model.sink import Sink
from sdp_model.source import Source


class Turn(Sink):
    """One peer while it takes a step."""

    def take_in(self, message: Message) -> None:
        """§19.1 has the order: header first, then the message, then its payload."""
        if message.kind == "Write":
            self.on_write(message)
            return
        self.take_header(message)
        if message.kind == "Data":
            if message.payload:
                self.on_payload(message)
        elif message.kind == "SinkAvail":
            self.on_sink_avail(message)
            if message.payload:
                self.on_payload(message)
        elif message.kind != "Control":
            ON[message.kind](self, message)

    def choices(self) -> Iterator[Choice]:
        """Everything that this peer may do by itself; a refresh only if no reply is about to carry the credits."""
        found = [*self.choices_of_source(), *self.choices_of_sink(), *self.choices_of_credit()]
        replies = any(will is Will.PROTOCOL and act not in (Sink.end_read, Flow.refresh) for will, act in found)
        return (choice for choice in found if not (replies and choice[1] is Flow.refresh))


ON: dict[str, Act] = {
    "SrcAvail": Sink.on_src_avail,
    "RdmaRdCompl": Source.on_rdma_rd_compl,
    "SendSm": Source.on_send_sm,
    "SrcAvailCancel": Sink.on_src_avail_cancel,
    "RdmaWrCompl": Sink.on_rdma_wr_compl,
    "SinkAvailCancel": Source.on_sink_avail_cancel,
    "SinkCancelAck": Sink.on_sink_cancel_ack,
    "ModeChange": Sink.on_mode_change,
    "DisConn": Sink.on_dis_conn,
}


@dataclass
class Connection(OfTwo[Peer]):
    """The model: two peers under `rules`, within `bounds`, starting as `peers`."""

    name: str
    peers: tuple[Peer, Peer]
    bounds: Bounds = field(default_factory=Bounds)
    rules: Rules = field(default_factory=Rules)
    effects_only: bool = False  # do not look into the peers, only at what a program or the transport would notice

    @property
    def setting(self) -> Setting:
        return Setting(self.bounds, self.rules)

    def steps(self, side: int, peer: Peer, item: Item | None) -> Iterator[Step[Peer] | Broken]:
        name = SIDES[side]
        if item is not None:
            assert isinstance(item, Message)
            turn = Turn(self.setting, copy(peer), name)
            try:
                turn.take_in(item)
            except Broken as broken:
                yield broken
                return
            yield Step(Will.PROTOCOL, f"{name} <- {item}", turn.peer, tuple(turn.sent), taken=True)
        for will, act in Turn(self.setting, peer, name).choices():
            turn = Turn(self.setting, copy(peer), name)
            try:
                act(turn)
            except Broken as broken:
                yield broken
                return
            yield Step(will, turn.label(), turn.peer, tuple(turn.sent))

    # Invariants of every state.

    def fault(self, peers: tuple[Peer, Peer], channels: tuple[Channel, Channel]) -> str | None:
        a, b = peers
        ab, ba = channels
        if self.bounds.credits:
            on_their_way = [sum(isinstance(one, Message) and one.kind != "Write" for one in way) for way in channels]
            if a.credit > b.posted - on_their_way[0] or b.credit > a.posted - on_their_way[1]:
                return "a peer believes that it has more credit than there are receives posted"
            if a.credit < 0 or b.credit < 0:
                return "credit below 0"
        for source, sink in ((a, b), (b, a)):
            if sink.reading and sink.reading[0] not in [advert.key for advert in source.adverts]:
                return f"key {sink.reading[0]} is withdrawn while it is being read"
        if not ab and not ba and not self.effects_only:
            return self.disagreement(a, b) or self.disagreement(b, a)
        return None

    def disagreement(self, source: Peer, sink: Peer) -> str | None:
        """What the two ends of a half-connection see differently though nothing is under way between them."""
        if source.dis_conn_sent:
            return (
                None
                if sink.got == source.total and sink.dis_conn_got and not sink.offers
                else "closed half is not done"
            )
        if source.mode != sink.sink_mode:
            return f"modes differ: {source.mode}, {sink.sink_mode}"
        if source.pnd != sink.nd:
            return f"PotentialNonDiscards {source.pnd} != NonDiscards {sink.nd}"
        if [one.key for one in source.queue] != [one.key for one in sink.offers]:
            return f"SinkAvails held {source.queue} are not those offered {sink.offers}"
        if [one.key for one in source.adverts] != [one.key for one in sink.srcs]:
            return f"SrcAvails offered {source.adverts} are not those held {sink.srcs}"
        if (source.rest.length if source.rest else 0) != sink.due:
            return f"rest to be sent {source.rest}, but {sink.due} due"
        return None

    def stalled(self, peers: tuple[Peer, Peer], channels: tuple[Channel, Channel]) -> str | None:
        for name, peer in zip(SIDES, peers, strict=True):
            if peer.withdrawing or peer.answering or peer.refusals_queued or peer.owes_cancel_ack:
                return f"{name} has a cancel to answer"
            if any(one.untold for one in peer.srcs):
                return f"{name} has a RdmaRdCompl to send"
            if peer.cancel is not None or peer.taking_back:
                return f"{name} waits for the end of its cancel"
            if peer.controls_left:
                return f"{name} has a payload-free message to send"
        return None

    def unfinished(self, peers: tuple[Peer, Peer], channels: tuple[Channel, Channel]) -> str | None:
        for name, source, sink in (("A", *peers), ("B", *peers[::-1])):
            if sink.got != source.total:
                return f"{name} could not deliver more than {sink.got} bytes of {source.total}"
            if source.closing and not source.dis_conn_sent:
                return f"{name} cannot close"
        return self.disagreement(*peers) or self.disagreement(*peers[::-1])
