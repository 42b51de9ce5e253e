"""The source of a half-connection: docs/wire/sdp.md §10 to §12 and §16.1, from the end that sends the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from sdp_model.explorer import Broken, Will
from sdp_model.flow import Choice, Flow
from sdp_model.peer import Change, Message, SinkAdvert, Span, SrcAdvert


class Source(Flow):
    """One peer while it takes a step as a source."""

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

    def offer_source(self, count: int) -> None:
        """§10.2 rule 2: with payload in Combined, without in Pipelined."""
        peer = self.peer
        peer.keys += 1
        payload = 1 if peer.mode == "Combined" else 0
        advert = SrcAdvert(peer.keys, peer.head, count, payload)
        peer.adverts += (advert,)
        peer.head += count
        message = Message("SrcAvail", start=advert.start, payload=payload, key=advert.key, length=count)
        if payload:
            self.send_payload(message)
        else:
            self.send(message)

    def withdraw(self) -> None:
        """Unacknowledged bytes return to the head of the queue; the keys of all own SrcAvails, and a cancel, end."""
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

    def send_dis_conn(self) -> None:
        peer = self.peer
        peer.dis_conn_sent = True
        peer.queue, peer.answering = (), False
        self.send(Message("DisConn"))

    def close(self) -> None:
        self.peer.closes_left -= 1
        self.peer.closing = True
        self.said = "the program closes its half"

    def choices_of_source(self) -> Iterator[Choice]:
        peer, bounds = self.peer, self.bounds
        left = peer.total - peer.head
        plain = self.may_send(payload=False)
        if peer.rest and self.may_send(payload=True):
            yield Will.PROTOCOL, Source.send_rest
        if left and self.payload_allowed() and self.may_send(payload=True):
            sizes = range(1, min(bounds.private_max, left) + 1)
            if bounds.data or peer.closing or peer.mode == "Buffered" or left < min(bounds.advert_sizes):
                for size in sizes:
                    yield Will.USER, partial(Source.send_data, count=size)
        if left and self.may_offer_source():
            for size in bounds.advert_sizes:
                if size <= left:
                    yield Will.USER, partial(Source.offer_source, count=size)
        if peer.adverts and peer.cancel is None and peer.cancels_left and plain:
            yield Will.WHIM, Source.send_cancel
        if peer.queue:
            oldest = peer.queue[0]
            if left and not peer.answering and not peer.rest:
                for size in range(1, min(oldest.length - oldest.written, left) + 1):
                    yield Will.USER, partial(Source.write, count=size)
            if oldest.written and plain:
                yield Will.PROTOCOL, Source.send_rdma_wr_compl
        waits = peer.queue and peer.queue[0].written
        if plain and (peer.owes_cancel_ack or (peer.answering and peer.queue)) and not waits:
            yield Will.PROTOCOL, Source.send_sink_cancel_ack
        if peer.changes_left and self.may_change(peer.changes_left[0]) and plain:
            yield Will.WHIM, Source.change_mode
        if peer.closes_left:
            yield Will.WHIM, Source.close
        if peer.closing and not peer.dis_conn_sent and plain:
            done = not (left or peer.adverts or peer.rest or waits)
            if done or not self.rules.close_waits:
                yield Will.PROTOCOL, Source.send_dis_conn
