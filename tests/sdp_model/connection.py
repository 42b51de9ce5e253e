"""SDP's rules for credits, the transfer mechanisms, their adverts and cancellations, modes and closing: one peer of the model.

Sections are those of docs/wire/sdp.md. Each rule is one function; `Rules` says which of them are broken on purpose.
Everything that a peer sends it decides in the moment of sending: a reply that lacks credit is not queued but remains
undecided, which is what the counters and the held MSeqAck rely on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field

from sdp_model.explorer import SIDES, Broken, Channel, Item, Step, Will
from sdp_model.peer import Change, Message, Peer, Rules, SinkAdvert, Span, SrcAdvert


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large the conversation is that a model tries."""

    private_max: int = 1  # payload bytes of a Data message
    advert_sizes: tuple[int, ...] = (2,)  # lengths of SrcAvails
    offer_size: int = 2  # length of SinkAvails; larger than `private_max`, §10.3
    adverts_max: int = 2  # MaxAdverts of both peers
    read_sizes: tuple[int, ...] = (1, 2)
    data: bool = True  # the source may choose Data for bytes that it need not send so
    refuse: bool = True  # the sink may answer a SrcAvail with SendSm
    read: bool = True
    credits: bool = False  # count credits and buffers


@dataclass
class Connection:
    """The model: two peers under `rules`, within `bounds`, starting as `peers`."""

    name: str
    peers: tuple[Peer, Peer]
    bounds: Bounds = field(default_factory=Bounds)
    rules: Rules = field(default_factory=Rules)

    def start(self) -> tuple[Peer, Peer]:
        return self.peers

    def arrived(self, channel: Channel) -> Iterable[int]:
        return (0,)

    def steps(self, side: int, peer: Peer, item: Item | None) -> Iterator[Step[Peer] | Broken]:
        name = SIDES[side]
        if item is not None:
            assert isinstance(item, Message)
            turn = Turn(self, copy(peer), name)
            try:
                turn.take_in(item)
            except Broken as broken:
                yield broken
                return
            yield Step(Will.PROTOCOL, f"{name} <- {item}", turn.peer, tuple(turn.sent), taken=True)
        for will, act in Turn(self, peer, name).choices():
            turn = Turn(self, copy(peer), name)
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
            if a.credit > b.posted - len(ab) or b.credit > a.posted - len(ba):
                return "a peer believes that it has more credit than there are receives posted"
            if a.credit < 0 or b.credit < 0:
                return "credit below 0"
        for source, sink in ((a, b), (b, a)):
            if sink.reading and sink.reading[0] not in [advert.key for advert in source.adverts]:
                return f"key {sink.reading[0]} is withdrawn while it is being read"
        if not ab and not ba:
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


Choice = tuple[Will, Callable[["Turn"], None]]


class Turn:
    """One peer while it takes a step."""

    def __init__(self, model: Connection, peer: Peer, name: str) -> None:
        self.model = model
        self.rules = model.rules
        self.bounds = model.bounds
        self.peer = peer
        self.name = name
        self.sent: list[Message] = []
        self.said = ""

    def label(self) -> str:
        return (
            f"{self.name}: {self.said}" if self.said else f"{self.name} -> {', '.join(str(one) for one in self.sent)}"
        )

    # Flow control, §8 and §9.

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
        """§9.4, and at two credits, with which the peer may be waiting to send payload, if it cannot know better.

        It cannot know of buffers that were not there when Bufs was last announced. It is not told that an empty Data was
        taken in, else two peers with three free buffers would tell each other so for ever; it can ask.
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
            peer.peer_bufs = message.bufs
            peer.owed = peer.owed or message.kind != "Data" or message.payload > 0
            if message.payload and not peer.offers:
                peer.unread += 1
            else:
                peer.posted += 1  # §9.5: at once, whatever the program does

    # Source.

    def payload_allowed(self) -> bool:
        """§10.2 rule 3 and §10.3 rule 3."""
        peer = self.peer
        if peer.dis_conn_sent or peer.rest or (peer.adverts and self.rules.payload_waits_for_adverts):
            return False
        return not (peer.queue and peer.queue[0].written and self.rules.finish_write_first)

    def count_payload(self) -> None:
        """§12.1, eager form: a payload-carrying message uses up the oldest SinkAvail, or counts."""
        peer = self.peer
        if peer.queue and self.rules.consume_counts:
            peer.queue = peer.queue[1:]
            self.answered_if_empty()
        else:
            peer.pnd += 1

    def send_payload(self, message: Message) -> None:
        if message.kind != "SinkAvail" or self.rules.transaction_counts:
            self.count_payload()
        self.send(message)

    def send_data(self, count: int) -> None:
        peer = self.peer
        start = peer.head
        peer.head += count
        self.send_payload(Message("Data", start=start, payload=count))

    def send_rest(self) -> None:
        """§10.2 rule 5: what a SendSm asked for, before anything else of the stream."""
        peer = self.peer
        assert peer.rest
        start, length = peer.rest
        count = min(self.bounds.private_max, length)
        peer.rest = Span(start + count, length - count) if length > count else None
        self.send_payload(Message("Data", start=start, payload=count))

    def may_offer_source(self) -> bool:
        """§10.2 rule 1, §12.3 (none while a cancel is pending), §10.3 rule 4 (a valid SinkAvail goes first)."""
        peer = self.peer
        if peer.dis_conn_sent or peer.rest or peer.cancel is not None or peer.queue or not self.may_send(payload=True):
            return False
        limit = {"Buffered": 0, "Combined": 1, "Pipelined": self.bounds.adverts_max}[peer.mode]
        return len(peer.adverts) < limit

    def offer_source(self, length: int) -> None:
        """§10.2 rule 2: with payload in Combined, without in Pipelined."""
        peer = self.peer
        peer.keys += 1
        payload = 1 if peer.mode == "Combined" else 0
        advert = SrcAdvert(peer.keys, peer.head, length, payload)
        peer.adverts += (advert,)
        peer.head += length
        message = Message("SrcAvail", start=advert.start, payload=payload, key=advert.key, length=length)
        if payload:
            self.send_payload(message)
        else:
            self.send(message)

    def withdraw(self) -> None:
        """Unacknowledged bytes return to the head of the queue; the keys of all own SrcAvails end. Also ends a cancel."""
        peer = self.peer
        if peer.back >= 0:
            peer.head = peer.back
        elif peer.adverts:
            peer.head = peer.adverts[0].next_byte
        peer.adverts, peer.cancel, peer.back = (), None, -1

    def cancel_if_done(self) -> None:
        """§12.3: a cancel is complete too when no SrcAvail is left."""
        if self.peer.cancel is not None and not self.peer.adverts:
            self.withdraw()

    def on_rdma_rd_compl(self, message: Message) -> None:
        """§10.2 rule 4."""
        peer = self.peer
        if not peer.adverts:
            raise Broken(f"{self.name} gets {message} without a SrcAvail")
        if peer.back >= 0:
            raise Broken(f"{self.name} gets {message} for bytes behind others that were withdrawn")
        oldest = peer.adverts[0]
        if message.length > oldest.left:
            raise Broken(f"{self.name} gets {message}, only {oldest.left} bytes are left")
        oldest = oldest._replace(done=oldest.done + message.length)
        peer.adverts = (oldest, *peer.adverts[1:]) if oldest.left else peer.adverts[1:]
        self.cancel_if_done()

    def on_send_sm(self, message: Message) -> None:
        """§10.2 rule 5 and §12.3."""
        peer = self.peer
        if not peer.adverts:
            return  # §19
        if peer.cancel == 0:
            self.withdraw()
            return
        if peer.cancel is not None and self.rules.crossing_send_sm == "ignored":
            return
        oldest, *others = peer.adverts
        if peer.cancel is not None:
            peer.back = oldest.next_byte if peer.back < 0 else peer.back
        else:
            if peer.rest:
                raise Broken(f"{self.name} gets a second SendSm before the rest of the first advert is sent")
            peer.rest = Span(oldest.next_byte, oldest.left)
        peer.adverts = tuple(others)
        self.cancel_if_done()

    def send_cancel(self) -> None:
        """§12.3: always all SrcAvails. The rest of a refused advert is withdrawn with them."""
        peer = self.peer
        peer.cancels_left -= 1
        if peer.rest and not self.rules.rest_after_cancel:
            peer.back, peer.rest = peer.rest.start, None
        self.send(Message("SrcAvailCancel"))
        peer.cancel = peer.unacked

    def on_sink_avail(self, message: Message) -> None:
        """§12.1 and §12.2; §11.4 for one that comes after the change to Combined."""
        peer = self.peer
        if peer.dis_conn_sent:
            return  # §16.1: void at its sink as soon as the DisConn is there
        if peer.mode != "Pipelined":
            self.on_late_sink_avail(message)
            return
        if message.non_discards != peer.pnd and self.rules.stale_check:
            peer.pnd -= self.rules.stale_lowers_pnd
            return
        if self.rules.write_wins and peer.adverts:
            self.withdraw()
        peer.queue += (SinkAdvert(message.key, message.length),)
        if len(peer.queue) > self.bounds.adverts_max:
            raise Broken(f"{self.name} holds more SinkAvails than MaxAdverts")

    def on_late_sink_avail(self, message: Message) -> None:
        """§11.4 step 4, with P*."""
        peer, rules = self.peer, self.rules
        if not peer.change or not rules.late_window:
            raise Broken(f"{self.name} gets {message} in {peer.mode}")
        change = peer.change
        compared = peer.pnd if rules.late_stale == "current" else change.frozen
        stale = message.non_discards != compared
        if stale and rules.late_stale != "none":
            peer.change = change._replace(frozen=change.frozen - 1)
            peer.pnd -= 1
        voids = {
            "first": True,
            "valid": not stale,
            "valid, sent before": not stale and bool(peer.adverts) and peer.adverts[0].before_change,
            "none": False,
        }[rules.late_voids]
        if voids and peer.adverts:
            self.withdraw()

    def write(self, count: int) -> None:
        """§10.3: one of possibly several RDMA Writes into the oldest SinkAvail."""
        peer = self.peer
        oldest = peer.queue[0]
        start = peer.head
        peer.head += count
        peer.queue = (oldest._replace(written=oldest.written + count), *peer.queue[1:])
        self.sent.append(Message("Write", start=start, payload=count, key=oldest.key, length=oldest.written))

    def send_rdma_wr_compl(self) -> None:
        """§10.3: exactly one for each SinkAvail that was written to."""
        peer = self.peer
        written = peer.queue[0].written
        peer.queue = peer.queue[1:]
        if peer.answering and self.rules.cancel_ack_for_writes:
            peer.owes_cancel_ack = True
        self.answered_if_empty()
        self.send(Message("RdmaWrCompl", length=written))

    def on_sink_avail_cancel(self, message: Message) -> None:
        """§12.4 rule 1."""
        peer = self.peer
        if not peer.queue:
            return
        peer.answering = True
        if not self.rules.drop_when_acked:
            kept = peer.queue[:1] if peer.queue[0].written else ()
            peer.owes_cancel_ack = len(peer.queue) > len(kept)
            peer.queue = kept
            self.answered_if_empty()

    def answered_if_empty(self) -> None:
        if not self.peer.queue:
            self.peer.answering = False

    def send_sink_cancel_ack(self) -> None:
        """§12.4 rule 3: the SinkAvails are dropped in the moment in which this says so."""
        peer = self.peer
        if not peer.owes_cancel_ack:
            peer.queue = ()
        peer.answering = peer.owes_cancel_ack = False
        self.send(Message("SinkCancelAck"))

    # Modes, §11.3.

    def may_change(self, to: str) -> bool:
        peer, rules = self.peer, self.rules
        if peer.dis_conn_sent or (peer.change and rules.change_waits_for_ack):
            return False
        if (peer.mode, to) == ("Pipelined", "Combined"):
            return not (rules.change_finishes_write and peer.queue and peer.queue[0].written)
        if (peer.mode, to) == ("Combined", "Buffered"):
            return not (rules.buffered_waits_for_srcs and peer.adverts)
        return (peer.mode, to) == ("Combined", "Pipelined")

    def change_mode(self) -> None:
        """§11.3; §11.4 steps 2 and 3 when it leaves Pipelined."""
        peer = self.peer
        to, *later = peer.changes_left
        peer.changes_left = tuple(later)
        if peer.mode == "Pipelined":
            if peer.queue:
                assert not peer.adverts, "a valid SinkAvail has overridden them"
            peer.queue, peer.answering = (), False
            peer.adverts = tuple(one._replace(before_change=True) for one in peer.adverts)
        left_pipelined = peer.mode == "Pipelined"
        peer.mode = to
        self.send(Message("ModeChange", mode=to))
        if left_pipelined:
            peer.change = Change(peer.unacked, peer.pnd)

    def leave_buffered(self) -> None:
        """§11.3: the sink is master of Buffered."""
        self.peer.sink_changes_left -= 1
        self.peer.sink_mode = "Combined"
        self.send(Message("ModeChange", mode="Combined by the sink"))

    def on_mode_change(self, message: Message) -> None:
        peer = self.peer
        if message.mode == "Combined by the sink":
            if peer.mode != "Buffered":
                raise Broken(f"{self.name} gets {message} in {peer.mode}")
            peer.mode = "Combined"
            return
        legal = [("Combined", "Buffered"), ("Combined", "Pipelined"), ("Pipelined", "Combined")]
        if (peer.sink_mode, message.mode) not in legal:
            raise Broken(f"{self.name} gets {message} in {peer.sink_mode}")
        if message.mode == "Buffered" and peer.srcs:
            raise Broken(f"{self.name} goes Buffered and still has a SrcAvail")
        if peer.sink_mode == "Pipelined":
            if any(one.written for one in peer.offers):
                raise Broken(f"{self.name} leaves Pipelined and has a buffer written without RdmaWrCompl")
            peer.offers, peer.taking_back = (), False
        peer.sink_mode = message.mode

    # Closing, §16.1.

    def send_dis_conn(self) -> None:
        peer = self.peer
        peer.dis_conn_sent = True
        peer.queue, peer.answering = (), False
        self.send(Message("DisConn"))

    def on_dis_conn(self, message: Message) -> None:
        peer = self.peer
        if peer.srcs or peer.reading or peer.due:
            raise Broken(f"{self.name} gets DisConn and has a SrcAvail or bytes due")
        if any(one.written for one in peer.offers):
            raise Broken(f"{self.name} gets DisConn and has a buffer written without RdmaWrCompl")
        peer.dis_conn_got = True
        if self.rules.dis_conn_voids:
            peer.offers, peer.taking_back = (), False

    # Sink.

    def deliver(self, start: int, count: int) -> None:
        if start != self.peer.got:
            raise Broken(f"{self.name} gets byte {start}, the next one is {self.peer.got}")
        self.peer.got += count

    def on_payload(self, message: Message) -> None:
        """§12.1: it goes to the oldest SinkAvail or is counted. §10.2 rule 4: counted down after a SendSm."""
        peer = self.peer
        if peer.dis_conn_got:
            raise Broken(f"{self.name} gets payload after DisConn")
        self.deliver(message.start, message.payload)
        if peer.offers:
            if peer.offers[0].written:
                raise Broken(f"{self.name} puts {message} over bytes that were written by RDMA")
            peer.offers = peer.offers[1:]
            self.taken_back_if_none()
        else:
            peer.nd += 1
        if peer.due:
            if message.payload > peer.due or message.kind != "Data":
                raise Broken(f"{self.name} gets {message}, {peer.due} bytes of a refused advert are due")
            peer.due -= message.payload
        elif peer.srcs and self.rules.payload_waits_for_adverts:
            raise Broken(f"{self.name} gets {message} while a SrcAvail is incomplete")

    def on_src_avail(self, message: Message) -> None:
        """§10.2, §12.2: ignored while a SinkAvail is outstanding."""
        peer = self.peer
        if peer.withdrawing:
            raise Broken(f"{self.name} gets {message} before the cancel is answered")
        wrong = {
            "Buffered": True,
            "Combined": bool(peer.srcs) or not message.payload,
            "Pipelined": bool(message.payload),
        }
        if wrong[peer.sink_mode]:
            raise Broken(f"{self.name} gets {message} in {peer.sink_mode}")
        if message.payload:
            self.on_payload(message)
        if peer.offers and self.rules.src_ignored_by_offer:
            return
        peer.srcs += (SrcAdvert(message.key, message.start, message.length, message.payload),)
        if len(peer.srcs) > self.bounds.adverts_max:
            raise Broken(f"{self.name} holds more SrcAvails than MaxAdverts")

    def may_serve(self) -> bool:
        """§10.2 sink rules 3 to 5: the oldest, not before the rest of a refused one is there, none after a cancel."""
        peer = self.peer
        if peer.withdrawing or peer.reading or not peer.srcs or peer.unread or self.still_sending():
            return False
        return not (peer.due and self.rules.reads_wait_for_rest)

    def still_sending(self) -> bool:
        """The program writes all it has before it reads."""
        peer = self.peer
        return peer.sends_first and bool(peer.head < peer.total or peer.adverts or peer.rest)

    def must_refuse(self) -> bool:
        """§10.2: both programs send and nobody receives, so each SrcAvail would wait for the other."""
        peer = self.peer
        crossing = self.still_sending() and peer.adverts and self.rules.refuses_when_crossing
        return bool(crossing and peer.srcs and not peer.due and not peer.withdrawing)

    def start_read(self, count: int) -> None:
        peer = self.peer
        oldest = peer.srcs[0]
        peer.reading = (oldest.key, oldest.next_byte, count)
        self.said = f"RDMA Read of bytes {oldest.next_byte}..{oldest.next_byte + count - 1}, key {oldest.key}"

    def end_read(self) -> None:
        peer = self.peer
        assert peer.reading
        _key, start, count = peer.reading
        if not peer.due:
            self.deliver(start, count)
        peer.reading = None
        oldest = peer.srcs[0]
        peer.srcs = (oldest._replace(done=oldest.done + count), *peer.srcs[1:])
        self.said = "RDMA Read completes"
        self.release_hold()

    def send_rdma_rd_compl(self) -> None:
        """§10.2 sink rule 3."""
        peer = self.peer
        oldest = peer.srcs[0]
        untold = oldest.untold
        oldest = oldest._replace(reported=oldest.done)
        peer.srcs = (oldest, *peer.srcs[1:]) if oldest.left else peer.srcs[1:]
        self.send(Message("RdmaRdCompl", length=untold))
        if peer.withdrawing and not peer.srcs and self.rules.one_send_sm:
            peer.withdrawing, peer.held = False, 0  # §12.3 rule 4: nothing was dropped

    def refuse(self) -> None:
        """§10.2 sink rule 4: SendSm; the rest is due as Data before anything else is served."""
        peer = self.peer
        oldest = peer.srcs[0]
        peer.due += oldest.left
        peer.srcs = peer.srcs[1:]
        if self.rules.replies_when_decided:
            self.send(Message("SendSm"))
        else:
            peer.refusals_queued += 1
            self.said = "decides to send SendSm"

    def send_queued_refusal(self) -> None:
        self.peer.refusals_queued -= 1
        self.send(Message("SendSm"))

    def on_src_avail_cancel(self, message: Message) -> None:
        """§12.3 rules 1 and 2. A refused advert is complete; what was due of it is withdrawn all the same."""
        peer = self.peer
        if self.rules.cancel_forgets_due:
            peer.due = 0
        if not peer.srcs:
            return
        peer.withdrawing = True
        if self.rules.hold_ack != "never":
            peer.held = 1
        self.release_hold()

    def release_hold(self) -> None:
        """§12.3 rules 3 and 4: MSeqAck moves again once the reads that run have completed."""
        if self.peer.withdrawing and not self.peer.reading and self.rules.hold_ack == "until read":
            self.peer.held = 0

    def answer_cancel(self) -> None:
        """§12.3 rule 4: one SendSm, if anything was dropped."""
        peer = self.peer
        peer.srcs, peer.withdrawing, peer.held = (), False, 0
        self.send(Message("SendSm"))

    def may_offer_sink(self) -> bool:
        """§10.3 sink rules 1 and 3, §12.4: none while SrcAvails, or the rest of a refused one, are under way."""
        peer, rules = self.peer, self.rules
        if peer.sink_mode != "Pipelined" or peer.taking_back or peer.dis_conn_got:
            return False
        if (peer.srcs and rules.sink_avail_waits_for_src) or (peer.due and rules.sink_avail_waits_for_rest):
            return False
        return len(peer.offers) + len(peer.adverts) < self.bounds.adverts_max

    def offer_sink(self, payload: int) -> None:
        """§10.3; with payload it is a Transaction, §10.4."""
        peer = self.peer
        peer.keys += 1
        peer.offers += (SinkAdvert(peer.keys, self.bounds.offer_size),)
        message = Message("SinkAvail", key=peer.keys, length=self.bounds.offer_size, non_discards=peer.nd)
        if payload:
            peer.transactions_left -= 1
            start = peer.head
            peer.head += payload
            self.send_payload(message._replace(start=start, payload=payload))
        else:
            peer.offers_left -= 1
            self.send(message)

    def on_write(self, message: Message) -> None:
        """The latest moment at which an RDMA Write can reach memory: before the Send behind it."""
        peer = self.peer
        if message.key not in [one.key for one in peer.offers]:
            raise Broken(f"{self.name}: RDMA Write into buffer {message.key}, which was taken back")
        changed = []
        for offer in peer.offers:
            if offer.key == message.key:
                if message.length != offer.written:
                    raise Broken(f"{self.name}: RDMA Write at {message.length}, {offer.written} bytes were there")
                start = offer.start if offer.written else message.start
                offer = offer._replace(start=start, written=offer.written + message.payload)
            changed.append(offer)
        peer.offers = tuple(changed)

    def on_rdma_wr_compl(self, message: Message) -> None:
        """§10.3 sink rule 5."""
        peer = self.peer
        if not peer.offers or peer.offers[0].written != message.length:
            raise Broken(f"{self.name} gets {message}, its SinkAvails are {peer.offers}")
        self.deliver(peer.offers[0].start, message.length)
        peer.offers = peer.offers[1:]
        self.taken_back_if_none()

    def take_back(self) -> None:
        """§12.4."""
        self.peer.takes_back_left -= 1
        self.peer.taking_back = True
        self.send(Message("SinkAvailCancel"))

    def taken_back_if_none(self) -> None:
        if not self.peer.offers:
            self.peer.taking_back = False

    def on_sink_cancel_ack(self, message: Message) -> None:
        """§12.4; §19: ignored when no cancel is pending."""
        peer = self.peer
        if not peer.taking_back:
            return
        if any(one.written for one in peer.offers):
            raise Broken(f"{self.name} takes back a buffer that was written without RdmaWrCompl")
        peer.offers, peer.taking_back = (), False

    # All of it.

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
        """Everything that this peer may do by itself."""
        others = [*self.choices_of_credit(), *self.choices_of_source(), *self.choices_of_sink()]
        yield from others
        if self.bounds.credits and not any(will is Will.PROTOCOL and act is not Turn.end_read for will, act in others):
            if self.must_refresh() and self.may_send(payload=False):
                yield Will.PROTOCOL, lambda turn: turn.send(Message("Data"))

    def choices_of_credit(self) -> Iterator[Choice]:
        peer = self.peer
        if peer.unread and not self.still_sending():
            yield Will.USER, Turn.consume
        if peer.updates_left and self.may_send(payload=False):
            yield Will.WHIM, Turn.send_update
        if peer.controls_left and self.may_send(payload=False):
            yield Will.PROTOCOL, Turn.send_control

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

    def choices_of_source(self) -> Iterator[Choice]:
        peer, bounds = self.peer, self.bounds
        left = peer.total - peer.head
        plain = self.may_send(payload=False)
        if peer.rest and self.may_send(payload=True):
            yield Will.PROTOCOL, Turn.send_rest
        if left and self.payload_allowed() and self.may_send(payload=True):
            sizes = range(1, min(bounds.private_max, left) + 1)
            if bounds.data or peer.closing or peer.mode == "Buffered" or left < min(bounds.advert_sizes):
                for size in sizes:
                    yield Will.USER, lambda turn, size=size: turn.send_data(size)
        if left and self.may_offer_source():
            for size in bounds.advert_sizes:
                if size <= left:
                    yield Will.USER, lambda turn, size=size: turn.offer_source(size)
        if peer.adverts and peer.cancel is None and peer.cancels_left and plain:
            yield Will.WHIM, Turn.send_cancel
        if peer.queue:
            oldest = peer.queue[0]
            if left and not peer.answering and not peer.rest:
                for size in range(1, min(oldest.length - oldest.written, left) + 1):
                    yield Will.USER, lambda turn, size=size: turn.write(size)
            if oldest.written and plain:
                yield Will.PROTOCOL, Turn.send_rdma_wr_compl
        waits = peer.queue and peer.queue[0].written
        if plain and (peer.owes_cancel_ack or (peer.answering and peer.queue)) and not waits:
            yield Will.PROTOCOL, Turn.send_sink_cancel_ack
        if peer.changes_left and self.may_change(peer.changes_left[0]) and plain:
            yield Will.WHIM, Turn.change_mode
        if peer.closes_left:
            yield Will.WHIM, Turn.close
        if peer.closing and not peer.dis_conn_sent and plain:
            done = not (left or peer.adverts or peer.rest or waits)
            if done or not self.rules.close_waits:
                yield Will.PROTOCOL, Turn.send_dis_conn

    def close(self) -> None:
        self.peer.closes_left -= 1
        self.peer.closing = True
        self.said = "the program closes its half"

    def choices_of_sink(self) -> Iterator[Choice]:
        peer, bounds = self.peer, self.bounds
        plain = self.may_send(payload=False)
        if peer.reading:
            yield Will.PROTOCOL, Turn.end_read
        untold = peer.srcs and peer.srcs[0].untold and not peer.due
        if untold and plain:
            yield Will.PROTOCOL, Turn.send_rdma_rd_compl
        if self.may_serve():
            oldest = peer.srcs[0]
            if bounds.read:
                for size in bounds.read_sizes:
                    if size <= oldest.left:
                        yield Will.USER, lambda turn, size=size: turn.start_read(size)
            if bounds.refuse and oldest.left and not untold and not peer.due and plain:
                yield Will.USER, Turn.refuse
        if self.must_refuse() and plain:
            yield Will.PROTOCOL, Turn.refuse
        if peer.refusals_queued and plain:
            yield Will.PROTOCOL, Turn.send_queued_refusal
        if peer.withdrawing and not peer.refusals_queued and not peer.reading and (not untold or not self.rules.read_told_before_cancel):
            if self.may_send(payload=False, acks=peer.unsaid):
                yield Will.PROTOCOL, Turn.answer_cancel
        if self.may_offer_sink():
            if peer.offers_left and plain:
                yield Will.WHIM, lambda turn: turn.offer_sink(0)
            room = peer.total - peer.head
            if peer.transactions_left and room and self.payload_allowed() and self.may_send(payload=True):
                yield Will.WHIM, lambda turn: turn.offer_sink(1)
        if peer.offers and not peer.taking_back and peer.takes_back_left and plain:
            yield Will.WHIM, Turn.take_back
        if peer.sink_mode == "Buffered" and peer.sink_changes_left and plain:
            yield Will.WHIM, Turn.leave_buffered


ON: dict[str, Callable[[Turn, Message], None]] = {
    "SrcAvail": Turn.on_src_avail,
    "RdmaRdCompl": Turn.on_rdma_rd_compl,
    "SendSm": Turn.on_send_sm,
    "SrcAvailCancel": Turn.on_src_avail_cancel,
    "RdmaWrCompl": Turn.on_rdma_wr_compl,
    "SinkAvailCancel": Turn.on_sink_avail_cancel,
    "SinkCancelAck": Turn.on_sink_cancel_ack,
    "ModeChange": Turn.on_mode_change,
    "DisConn": Turn.on_dis_conn,
}
