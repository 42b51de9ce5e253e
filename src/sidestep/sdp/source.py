"""The send half of a connection: the Data Source of one direction of the stream.

Theory of operation. The user's sends form a queue; its head goes by one of four mechanisms (docs/wire/sdp.md §10):

- Bcopy: Data messages, each into a private buffer of the sink.
- Read Zcopy: a SrcAvail shows the sink where the bytes are; it reads them and says so by RdmaRdCompl, or refuses by
  SendSm, and then the rest goes by Data before anything else of the stream.
- Write Zcopy: the sink has shown a buffer by SinkAvail; the bytes are written there and RdmaWrCompl says how many. The
  Write and its message are always posted together, so an advertisement is never half used.
- Transaction: a Data message that carries a SinkAvail for the other direction.

While an own SrcAvail is incomplete nothing with payload may be sent, but what SendSm demands. So the bytes of the
stream that are not yet with the sink are, in this order: what SendSm has demanded (`forced`), what is advertised
(`adverts`), and the rest of the queue. When advertisements become void - withdrawn, overridden by a SinkAvail, or by a
mode change - the queue simply takes their bytes back.

`pnd` (PotentialNonDiscards) counts the payload messages that have not used up a SinkAvail, as far as this end can
know. A SinkAvail that states another count crossed such a message and is stale (§12.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.rdma.work import Access, RKey
from sidestep.sdp.flow import Flow
from sidestep.sdp.header import MASK, ge
from sidestep.sdp.requests import Register, StreamSend
from sidestep.sdp.settings import SdpSettings
from sidestep.sdp.states import MODE_CHANGES, MODES, Master
from sidestep.sdp.strategy import Strategy
from sidestep.sdp.wire import BSDH_LEN, OOB_PRES, Mode, ModeChange, RdmaWrCompl, SinkAvail, SrcAvail, SrcAvailCancel

if TYPE_CHECKING:
    from sidestep.sdp.halves import Halves

_SRC_AVAIL_LEN: Final = BSDH_LEN + SrcAvail.LENGTH
_SINK_AVAIL_LEN: Final = BSDH_LEN + SinkAvail.LENGTH
_GATHER_MAX: Final = limits.SDP_GATHER_MAX
_URGENT_PIECE: Final = 32 << 10  # bytes of a message that ends in an urgent byte: below SDP_URGENT_AHEAD_MAX


class SourceAdvert:
    """A SrcAvail of ours that is not processed."""

    __slots__ = ("acked", "length", "mseq", "payload", "send", "start")

    def __init__(self, send: StreamSend, start: int, length: int, payload: int, mseq: int) -> None:
        self.send = send
        self.start = start  # offset in the send
        self.length = length
        self.payload = payload  # bytes that went with the SrcAvail
        self.acked = 0  # bytes that RdmaRdCompl has told of
        self.mseq = mseq


class Source:
    """One send half."""

    __slots__ = (
        "_flow", "_host", "_settings", "_strategy", "adverts", "announced", "cancel_mseq", "cancel_wanted",
        "change_mseq", "ended", "ending", "forced", "frozen", "hint", "mode", "mode_wanted", "one_advert", "passed",
        "payload_max", "pnd", "queue", "read", "sinks", "transact", "urgent", "written",
    )  # fmt: skip

    def __init__(self, flow: Flow, settings: SdpSettings, strategy: Strategy, host: Halves) -> None:
        self._flow, self._settings, self._strategy, self._host = flow, settings, strategy, host
        self.queue: deque[StreamSend] = deque()
        self.forced: deque[tuple[StreamSend, int, int]] = deque()  # (send, from, to): demanded by SendSm
        self.adverts: deque[SourceAdvert] = deque()
        self.sinks: deque[SinkAvail] = deque()  # valid ones of the other end
        self.urgent: deque[StreamSend] = deque()  # sends that end in an urgent byte which has not gone yet
        self.announced = False  # OOB_PEND of the first of them
        self.ending = False  # the user sends no more
        self.ended = False  # DisConn was sent
        self.passed = 0  # bytes of the stream that are with the sink, or will be
        self.read = self.written = 0  # of these, by Read Zcopy and by Write Zcopy
        self.payload_max = 0  # bytes of payload in one Data message
        self.one_advert = False  # the other end takes one: Pipelined mode would bring nothing, and OFED ignores it
        self.transact = False  # payload may take a SinkAvail of ours along
        self.reset()

    def reset(self) -> None:
        """As at the start of a transport connection; what is queued stays."""
        self.mode = Mode.COMBINED
        self.mode_wanted: Mode | None = None  # the user's, or the strategy's
        self.hint = False  # the sink would like Pipelined
        self.pnd = 0
        self.change_mseq: int | None = None  # of a change from Pipelined to Combined that is not acknowledged
        self.frozen = 0  # what the counter of a SinkAvail sent before that change must be to have been valid
        self.cancel_wanted = False
        self.cancel_mseq: int | None = None  # of a SrcAvailCancel that is not answered
        self.sinks.clear()
        self.announced = False  # the other end's new process knows nothing of it
        self._watch_urgent()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to send, or to be read."""
        return not (self.queue or self.forced or self.adverts or self.cancel_mseq is not None)

    # --- sending ---

    def pump(self) -> None:
        flow = self._flow
        queue = self.queue
        while True:
            if self.cancel_wanted and not self._cancel():
                return
            if self.cancel_mseq is not None:
                return  # no payload, nor what SendSm demanded: withdrawn with the rest (docs/internals/sdp.md)
            if self.forced:
                if not flow.may_send_payload():
                    return
                self._send_forced()
                continue
            if self.mode_wanted is not None and not self._change_mode():
                return
            if not queue:
                return
            head = queue[0]
            if not self.adverts and (head.bcopy_only or head.length - head.offset <= self._strategy.bcopy_max):
                if flow.credit < flow.payload_credit or len(flow.in_flight) >= flow.send_queue:
                    return
                self._send_data(head)
            elif not self._send_large(head):
                return

    def _send_data(self, head: StreamSend) -> None:
        """One message of payload: as much of the queue as goes by Bcopy and fits. The credit was looked at."""
        queue = self.queue
        room = self._room() if self.sinks else self.payload_max
        left = head.length - head.offset
        if left > room or head.urgent or len(queue) == 1:
            if head.urgent and left > _URGENT_PIECE < room:
                room = min(room, left - _URGENT_PIECE)
            taken = left if left < room else room
            offset = head.offset
            head.offset = offset + taken
            head.pending += 1
            head.passed += taken
            last = taken == left
            if last:
                queue.popleft()
            view = head.view if taken == head.length else head.view[offset : offset + taken]
            urgent = last and head.urgent
            if urgent or not self.transact or not self._transact(view, taken, head):
                self._count_payload()
                self._flow.send_data((view,), taken, head, OOB_PRES if urgent else 0, last)
            self.passed += taken
            if urgent:
                self.urgent.popleft()
                self.announced = False
                self._watch_urgent()
            return
        views: list[memoryview] = []
        total = 0
        in_flight, wr_id = self._flow.in_flight, self._flow.next_wr_id
        while True:
            views.append(head.view if left == head.length else head.view[head.offset :])
            head.offset = head.length
            head.pending += 1
            head.passed += left
            total += left
            queue.popleft()
            if not queue or len(views) == _GATHER_MAX:
                break
            nxt = queue[0]
            left = nxt.length - nxt.offset
            if nxt.urgent or left > room - total or left > self._strategy.bcopy_max:
                break
            in_flight.append((wr_id, head, None))
            head = nxt
        self._count_payload()
        self._flow.send_data(tuple(views), total, head)
        self.passed += total

    def _transact(self, view: memoryview, length: int, send: StreamSend) -> bool:
        """Sends a piece with a SinkAvail of ours, if there is one to send (Transaction, §10.4)."""
        if self.sinks:
            return False  # not every stack knows that the payload uses one up
        offer = self._host.transaction()
        if offer is None or length > self._flow.remote_size - _SINK_AVAIL_LEN:
            return False
        header, receive = offer
        self._count_payload()
        self._flow.send_header(header, (view,), send=send)
        self._host.advertised(receive)
        return True

    def _room(self) -> int:
        """Bytes of payload that the next message may carry: they must fit into a SinkAvail that they use up as well.

        A SinkAvail has more room than a private buffer had, but buffers may have grown (docs/internals/sdp.md).
        """
        return min(self.payload_max, self.sinks[0].length) if self.sinks else self.payload_max

    def lend(self) -> bool:
        """Whether nothing waits to be sent, or for an answer."""
        return not (
            self.queue or self.forced or self.adverts or self.sinks or self.urgent or self.announced or self.ending
            or self.cancel_wanted or self.cancel_mseq is not None or self.mode_wanted is not None
            or self.change_mseq is not None or self.mode is Mode.PIPELINED
        )  # fmt: skip

    def take_back(self, record: dict[str, int]) -> None:
        self.pnd = (self.pnd + record["payloads_sent"]) & MASK
        self.passed += record["wire_sent"] - BSDH_LEN * record["messages_sent"]

    def _count_payload(self) -> None:
        """A payload message uses up the oldest valid SinkAvail, or counts (§12.1)."""
        if self.sinks:
            self.sinks.popleft()
        else:
            self.pnd = (self.pnd + 1) & MASK

    def _send_forced(self) -> None:
        send, start, end = self.forced.popleft()
        taken = min(end - start, self._room())
        if start + taken < end:
            self.forced.appendleft((send, start + taken, end))
            send.pending += 1  # the piece that goes now; the range keeps its own
        send.passed += taken
        self.passed += taken
        self._count_payload()
        self._flow.send_data((send.view[start : start + taken],), taken, send, 0, start + taken == end)

    def _send_large(self, head: StreamSend) -> bool:
        """By Write or Read Zcopy, or marks the send for Bcopy; False if it has to wait."""
        if self.sinks and not self.adverts:
            return self._write(head)
        if self.adverts and (MODES[self.mode].src_avails is not None or self.sinks):
            return False
        if head.bcopy_only or head.length - head.offset <= self._strategy.bcopy_max:
            return False  # its turn comes when the advertisements are processed
        if self.mode_wanted is Mode.BUFFERED:
            if self.adverts:
                return False  # until they are processed and the mode has changed
            head.bcopy_only = True
            return True
        if self.mode is Mode.BUFFERED or not self._strategy.wants_zcopy(head.length - head.offset):
            head.bcopy_only = True
            return True
        if not self.one_advert and self.change_mseq is None:
            mode = self._strategy.send_mode(self.mode, len(self.queue), self.hint)
            if mode is not self.mode:
                self.mode_wanted = mode
                return True
        if self._host.holds_advert() or not self._host.adverts_left():
            if self.adverts:
                return False
            # an advertisement that waits for one of the other end's could wait for ever, and so could we for room
            # among those that may be outstanding, if all of them are SinkAvails: do as other stacks do
            head.bcopy_only = True
            return True
        return self._advertise(head)

    def _write(self, head: StreamSend) -> bool:
        """RDMA Write into the oldest SinkAvail, and the message that completes it."""
        flow = self._flow
        if flow.room() < 2 or not flow.may_send_bare():
            return False
        checked = self._settings.local_access is not None  # the device sends from registered memory only
        if checked and head.region is None:
            if not head.registering:
                head.registering = True
                flow.work.append(Register(head, Access.LOCAL_READ))
            return False
        sink = self.sinks.popleft()
        views: list[memoryview] = []
        total = 0
        wr_id = flow.next_wr_id
        queue = self.queue
        while True:
            taken = min(head.length - head.offset, sink.length - total)
            views.append(head.view[head.offset : head.offset + taken])
            head.offset += taken
            head.passed += taken
            head.pending += 1
            flow.in_flight.append((wr_id, head, None))
            total += taken
            if head.offset == head.length:
                queue.popleft()
            if total == sink.length or not queue or len(views) == _GATHER_MAX or queue[0].bcopy_only:
                break
            head = queue[0]
            if checked and head.region is None:
                break
        flow.send_write(tuple(views), sink.va, RKey(sink.rkey), None)
        self.passed += total
        self.written += total
        flow.send_header(RdmaWrCompl(total))  # lands behind the Write: RC keeps their order
        self._strategy.saw_use()
        return True

    def _advertise(self, head: StreamSend) -> bool:
        """A SrcAvail for the head of the queue, once its memory is registered."""
        flow = self._flow
        if head.region is None or not head.region.remote:
            if not head.registering:
                head.registering = True
                flow.work.append(Register(head, Access.REMOTE_READ))
            return False
        if not flow.may_send_payload():
            return False
        length = min(head.length - head.offset, self._strategy.advert_max, limits.SDP_ADVERT_MAX)
        payload = 0
        if MODES[self.mode].src_avail_payload:  # at least one byte goes along, and one is left to read
            payload = min(self._strategy.payload, flow.remote_size - _SRC_AVAIL_LEN, length - 1)
            if payload < 1:
                head.bcopy_only = True
                return True
            self._count_payload()
        offset = head.offset
        header = SrcAvail(length, head.region.rkey, head.region.va + offset)
        views = (head.view[offset : offset + payload],) if payload else ()
        mseq = flow.send_header(header, views, send=head if payload else None)
        head.offset += length
        head.pending += 2 if payload else 1  # the memory of the payload is in use until the message has gone
        head.passed += payload
        self.passed += payload
        if head.offset == head.length:
            self.queue.popleft()
        self.adverts.append(SourceAdvert(head, offset, length, payload, mseq))
        self._host.advert_timer("answer")
        return True

    # --- urgent data (§13) ---

    def enqueue(self, send: StreamSend) -> None:
        """Takes a send; the connection has looked at the state and the bound."""
        self.queue.append(send)
        if send.urgent:
            self.urgent.append(send)
            self._watch_urgent()

    def _watch_urgent(self) -> None:
        self._flow.announce = self._announce if self.urgent and not self.announced else None

    def _announce(self, payload_len: int) -> bool:
        """Whether OOB_PEND may ride on the message that goes now, payload included: the urgent byte is near enough."""
        if self._urgent_distance() + payload_len > limits.SDP_URGENT_AHEAD_MAX:
            return False
        self.announced = True
        self._flow.announce = None
        return True

    def _urgent_distance(self) -> int:
        """Bytes of the stream that are not surely with the sink, up to the first urgent one."""
        target = self.urgent[0]
        ahead = -1
        for _, start, end in self.forced:
            ahead += end - start
        for advert in self.adverts:
            ahead += advert.length - advert.payload - advert.acked
        for send in self.queue:
            ahead += send.length - send.offset
            if send is target:
                return ahead
        return -1  # it has left the queue: the message that goes now ends in it

    def announce_alone(self) -> bool:
        """Whether the announcement is due on a message of its own: the bytes themselves cannot go yet."""
        return bool(self.urgent) and not self.announced and self._urgent_distance() <= limits.SDP_URGENT_AHEAD_MAX

    # --- what the sink says of our SrcAvails ---

    def handle_read_completed(self, length: int, mseq_ack: int, hint: bool) -> None:
        """RdmaRdCompl: so many more bytes of the oldest SrcAvail are with the sink."""
        if not self.adverts:
            raise PeerViolation(f"RdmaRdCompl of {length} bytes, nothing is advertised", rule="read_unasked")
        oldest = self.adverts[0]
        if not ge(mseq_ack, oldest.mseq):
            return  # said before the sink saw this advertisement: it was of one that is void
        if self.forced:
            raise PeerViolation("RdmaRdCompl before the bytes that SendSm asked for", rule="read_early")
        if length > oldest.length - oldest.payload - oldest.acked:
            raise PeerViolation(f"RdmaRdCompl of {length} bytes is more than advertised", rule="read_excess")
        self.hint = hint
        oldest.acked += length
        oldest.send.passed += length
        self.passed += length
        self.read += length
        self._strategy.saw_use()
        if oldest.payload + oldest.acked == oldest.length:
            self.adverts.popleft()
            oldest.send.pending -= 1
            self._host.end_send(oldest.send)
            self._processed()
        elif length and self.cancel_mseq is None:  # no time for nothing, and none that a withdrawal does not allow
            self._host.advert_timer("answer")

    def handle_send_sm(self, mseq_ack: int) -> None:
        """SendSm: the rest of the oldest SrcAvail goes by Data; or a withdrawal is done."""
        if self.cancel_mseq is not None and ge(mseq_ack, self.cancel_mseq):
            self._withdrawn()
            return
        if not self.adverts or not ge(mseq_ack, self.adverts[0].mseq):
            return  # it crossed what has made the advertisement void
        oldest = self.adverts.popleft()
        self.forced.append((oldest.send, oldest.start + oldest.payload + oldest.acked, oldest.start + oldest.length))
        oldest.send.bcopy_only = True
        self._strategy.saw_refusal()
        self._processed()

    def _processed(self) -> None:
        """An advertisement less."""
        if self.adverts:
            if self.cancel_mseq is None:
                self._host.advert_timer("answer")
        elif self.cancel_mseq is not None:
            self._withdrawn()  # complete without an answer of its own (§12.3)
        else:
            self._host.advert_timer(None)

    # --- withdrawing SrcAvails (§12.3) ---

    def cancel(self) -> None:
        """Takes all own advertisements back; what was not read goes another way, or is cancelled by the user."""
        if self.adverts and self.cancel_mseq is None:
            self.cancel_wanted = True

    def _cancel(self) -> bool:
        if not self.adverts:
            self.cancel_wanted = False
            self.drop_cancelled()
            return True
        if not self._flow.may_send_bare():
            return False
        self.cancel_wanted = False
        self.cancel_mseq = self._flow.send_header(SrcAvailCancel())
        self._host.advert_timer("cancel")
        return True

    def _withdrawn(self) -> None:
        self.cancel_mseq = None
        for advert in self.adverts:
            advert.send.bcopy_only = True  # it was not answered in time
        self._take_back(self._unread(), with_forced=True)
        self._host.advert_timer(None)
        self.drop_cancelled()

    def _unread(self) -> list[tuple[StreamSend, int]]:
        ranges = [(advert.send, advert.start + advert.payload + advert.acked) for advert in self.adverts]
        self.adverts.clear()
        return ranges

    def _take_back(self, ranges: Iterable[tuple[StreamSend, int]], *, with_forced: bool) -> None:
        """What was advertised from these offsets on is to be sent anew: it returns to the head of the queue."""
        if with_forced:
            ranges = [*((send, start) for send, start, _ in self.forced), *ranges]
            self.forced.clear()
        back: list[StreamSend] = []
        for send, start in ranges:
            send.pending -= 1
            if not back or back[-1] is not send:
                back.append(send)
                send.offset = start  # the ranges are in stream order: this is the first
        for send in reversed(back):
            if not self.queue or self.queue[0] is not send:
                self.queue.appendleft(send)

    def take_all_back(self) -> None:
        """The transport connection ends, the stream does not: whatever is not with the sink is to be sent anew."""
        self._take_back(self._unread(), with_forced=True)

    def void_adverts(self, before: int | None = None) -> None:
        """The sink has dropped our SrcAvails (those sent before this message, if given)."""
        if not self.adverts or (before is not None and ge(self.adverts[0].mseq, before)):
            return
        self._take_back(self._unread(), with_forced=False)
        self.cancel_mseq = None  # a withdrawal is thereby complete (§12.2)
        self._host.advert_timer(None)
        self.drop_cancelled()

    def cancel_send(self, send: StreamSend) -> None:
        """The user takes back what is possible of it."""
        send.cancelled = True
        if any(advert.send is send for advert in self.adverts):
            self.cancel()
        else:
            self.drop_cancelled()

    def drop_cancelled(self) -> None:
        """Sends that the user has cancelled leave the queue; an urgent byte among them is forgotten."""
        if not any(send.cancelled for send in self.queue):
            return
        dropped = [send for send in self.queue if send.cancelled]
        kept = [send for send in self.queue if not send.cancelled]
        self.queue.clear()
        self.queue.extend(kept)
        for send in dropped:
            if send.urgent and send in self.urgent:
                if self.urgent[0] is send and self.announced:
                    self.announced = False  # the peer was told of a byte that never comes; the next one is told anew
                self.urgent.remove(send)
                self._watch_urgent()
            if send.pending:
                self._flow.ask_completion()
            self._host.end_send(send)

    # --- what the sink shows us ---

    def handle_sink_avail(self, header: SinkAvail, buffer_size: int) -> None:
        """A SinkAvail: judged whether it is stale, then queued (§12.1, §12.2, §11.4); `buffer_size` is the sink's."""
        if header.length < buffer_size - BSDH_LEN:
            raise PeerViolation(f"SinkAvail of {header.length} bytes", rule="sink_avail_small")
        if MODES[self.mode].sink_avails:
            if header.non_discards != self.pnd:
                self.pnd = (self.pnd - 1) & MASK  # a payload message has used it up
                return
            if self.ended:
                return
            if self._host.adverts_of_peer() >= self._settings.max_adverts:
                raise PeerViolation("more advertisements than MaxAdverts allows", rule="adverts")
            self.sinks.append(header)
            self.void_adverts()  # Write Zcopy wins
        elif self.change_mseq is not None:
            if header.non_discards != self.frozen:
                self.frozen = (self.frozen - 1) & MASK
                self.pnd = (self.pnd - 1) & MASK
            else:
                self.void_adverts(before=self.change_mseq)  # the sink dropped them, seeing its SinkAvail outstanding
        else:
            raise PeerViolation(f"SinkAvail in mode {self.mode.name.title()}", rule="sink_avail_mode")

    # --- modes (§11) ---

    def want_mode(self, mode: Mode) -> None:
        """The user's wish; Buffered to Combined is the sink's to do."""
        self.mode_wanted = mode

    def _change_mode(self) -> bool:
        """One step towards the mode that is wanted; False if nothing else may be sent before it."""
        wanted = self.mode_wanted
        if wanted is self.mode or self.mode is Mode.BUFFERED:
            self.mode_wanted = None
            return True
        if self.change_mseq is not None:
            return True  # not before it is acknowledged, which may take long; the stream goes on
        if self.mode is Mode.PIPELINED:
            step = Mode.COMBINED
        elif wanted is Mode.BUFFERED:
            if self.adverts:
                return True  # no new one is made meanwhile
            step = Mode.BUFFERED
        else:
            step = Mode.PIPELINED
        if not self._flow.may_send_bare():
            return False
        mseq = self._flow.send_header(ModeChange(False, step))
        if self.mode is Mode.PIPELINED:
            self.change_mseq = mseq
            self.frozen = self.pnd
            if self.sinks:
                self.sinks.clear()
                self.void_adverts()
        self.mode = step
        self._host.mode_changed()
        return True

    def handle_mode_change(self, mode: Mode) -> None:
        """ModeChange with S=1: the sink, master in Buffered mode only, asks for Combined."""
        if MODE_CHANGES.get((self.mode, mode)) is not Master.SINK:
            raise PeerViolation(
                f"the sink changes {self.mode.name.title()} to {mode.name.title()}", rule="mode_transition"
            )
        self.mode = mode
        self._host.mode_changed()

    def acknowledged(self, mseq_ack: int) -> None:
        """What MSeqAck confirms beyond credits: called while a change is not acknowledged."""
        if self.change_mseq is not None and ge(mseq_ack, self.change_mseq):
            self.change_mseq = None

    def end(self) -> None:
        """DisConn was sent: the sink's advertisements are void."""
        self.ended = True
        self.sinks.clear()
        self._flow.announce = None
