"""The sink of a half-connection: docs/wire/sdp.md §10 to §12 and §16.1, from the end that receives the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from sdp_model.explorer import Broken, Will
from sdp_model.flow import Choice
from sdp_model.peer import Message, SinkAdvert, SrcAdvert
from sdp_model.source import Source


class Sink(Source):
    """One peer while it takes a step as a sink. (A Transaction is a step as both.)"""

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

    def may_answer_cancel(self) -> bool:
        """§12.3 rules 3 and 4: not before the reads have completed and been told."""
        peer = self.peer
        if not peer.withdrawing or peer.reading or peer.refusals_queued:
            return False
        return not (peer.srcs and peer.srcs[0].untold and self.rules.read_told_before_cancel)

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

    def on_dis_conn(self, message: Message) -> None:
        peer = self.peer
        if peer.srcs or peer.reading or peer.due:
            raise Broken(f"{self.name} gets DisConn and has a SrcAvail or bytes due")
        if any(one.written for one in peer.offers):
            raise Broken(f"{self.name} gets DisConn and has a buffer written without RdmaWrCompl")
        peer.dis_conn_got = True
        if self.rules.dis_conn_voids:
            peer.offers, peer.taking_back = (), False

    def choices_of_sink(self) -> Iterator[Choice]:
        peer, bounds = self.peer, self.bounds
        plain = self.may_send(payload=False)
        if peer.reading:
            yield Will.PROTOCOL, Sink.end_read
        untold = peer.srcs and peer.srcs[0].untold and not peer.due
        if untold and plain:
            yield Will.PROTOCOL, Sink.send_rdma_rd_compl
        if self.may_serve():
            oldest = peer.srcs[0]
            for size in bounds.read_sizes:
                if size <= oldest.left:
                    yield Will.USER, partial(Sink.start_read, count=size)
            if bounds.refuse and oldest.left and not untold and not peer.due and plain:
                yield Will.USER, Sink.refuse
        if self.must_refuse() and plain:
            yield Will.PROTOCOL, Sink.refuse
        if peer.refusals_queued and plain:
            yield Will.PROTOCOL, Sink.send_queued_refusal
        if self.may_answer_cancel() and self.may_send(payload=False, acks=peer.unsaid):
            yield Will.PROTOCOL, Sink.answer_cancel
        if self.may_offer_sink():
            if peer.offers_left and plain:
                yield Will.WHIM, partial(Sink.offer_sink, payload=0)
            room = peer.total - peer.head
            if peer.transactions_left and room and self.payload_allowed() and self.may_send(payload=True):
                yield Will.WHIM, partial(Sink.offer_sink, payload=1)
        if peer.offers and not peer.taking_back and peer.takes_back_left and plain:
            yield Will.WHIM, Sink.take_back
        if peer.sink_mode == "Buffered" and peer.sink_changes_left and plain:
            yield Will.WHIM, Sink.leave_buffered
