"""The receive half of a connection: the Data Sink of one direction of the stream.

Theory of operation. Bytes reach the user in the order of the stream, from four places (docs/wire/sdp.md §10):

- `ready`: payload that no receive waited for, still in its private buffers, and urgent marks between.
- `due`: bytes that the source owes by Data, because SendSm refused the rest of its advertisement.
- `adverts`: SrcAvails, to be read by RDMA Read into the user's memory, the oldest first.
- RDMA Writes of the source into receives that a SinkAvail has shown it (`shown`).

As the source sends no payload while a SrcAvail of its own is incomplete, whatever is in `ready` precedes whatever is
in `adverts`. A SinkAvail goes out only when all of that is empty and nothing is due, and only for the receives at the
head of the queue; so the bytes that follow belong to the oldest receive shown. A payload message always takes one: its
bytes go there instead (§12.1), and `nd` (NonDiscards) counts the payload messages that found none.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.rdma.work import Access, Receive, RKey
from sidestep.sdp.flow import Flow
from sidestep.sdp.header import MASK
from sidestep.sdp.requests import Register, StreamReceive, Suspended
from sidestep.sdp.resize import Resize
from sidestep.sdp.settings import SdpSettings
from sidestep.sdp.states import MODE_CHANGES, MODES, Master
from sidestep.sdp.strategy import Strategy
from sidestep.sdp.wire import REQ_PIPE, Mode, ModeChange, RdmaRdCompl, SendSm, SinkAvail, SinkAvailCancel, SrcAvail

if TYPE_CHECKING:
    from sidestep.sdp.halves import Halves

_READ_MAX: Final = 1 << 30  # bytes of one RDMA Read: every device takes as much


class SinkAdvert:
    """A SrcAvail of the other end that is not processed."""

    __slots__ = ("left", "planned", "read", "reading", "rkey", "unreported", "va")

    def __init__(self, header: SrcAvail, payload: int) -> None:
        self.rkey = RKey(header.rkey)
        self.va = header.va + payload  # the payload is not read once more
        self.left = header.length - payload  # bytes to read
        self.planned = 0  # bytes of them for which a read is posted
        self.read = 0  # bytes of them that have come
        self.reading = 0  # RDMA Reads under way
        self.unreported = 0  # bytes read that no RdmaRdCompl has told of


class Sink:
    """One receive half."""

    __slots__ = (
        "_flow", "_host", "_resize", "_settings", "_strategy", "adverts", "cancel_sent", "cancel_wanted", "closed",
        "due", "ended", "frozen", "last_read", "mode", "nd", "read", "reads", "reads_max", "ready", "ready_bytes",
        "receives", "refusal", "shown", "unrefused", "untold", "urgent_byte", "urgent_pending", "withdrawing",
        "written",
    )  # fmt: skip

    def __init__(self, flow: Flow, resize: Resize, settings: SdpSettings, strategy: Strategy, host: Halves) -> None:
        self._flow, self._resize, self._settings, self._strategy, self._host = flow, resize, settings, strategy, host
        self.receives: deque[StreamReceive] = deque()
        # (bytes, their private buffer or None, None), or (empty, private buffer or None, urgent byte) for a mark
        self.ready: deque[tuple[memoryview, Receive | None, int | None]] = deque()
        self.ready_bytes = 0
        self.ended = False  # DisConn has come
        self.closed = False  # the user receives nothing more: what is advertised would wait for ever
        self.urgent_byte: int | None = None  # of the mark that was reached or is ahead, not taken yet
        self.adverts: deque[SinkAdvert] = deque()
        self.shown: deque[StreamReceive] = deque()
        self.reads = 0
        self.read = self.written = 0  # bytes, by Read Zcopy and by Write Zcopy
        self.reads_max = settings.reads_max  # or what the other end serves, if its Hello says so and it is less
        self.reset()

    def reset(self) -> None:
        """As at the start of a transport connection; what has arrived stays."""
        self.mode = Mode.COMBINED
        self.frozen = False  # no RDMA Read is begun any more: the connection moves
        self.nd = 0
        self.due = 0
        self.urgent_pending = 0  # OOB_PEND seen, byte not yet; a new transport connection announces it anew
        self.adverts.clear()
        self.reads = 0
        self.last_read: StreamReceive | None = None  # what the RDMA Read posted last is into
        self.refusal: object = None  # the SendSm that is queued and has not gone
        self.unrefused = 0  # bytes due because of it
        self.untold = 0  # adverts that were read, of which no RdmaRdCompl has gone
        self.withdrawing = False
        self.cancel_wanted = False
        self.cancel_sent = False
        for receive in self.receives:
            receive.advert = False
            receive.reads = 0
            receive.planned = receive.filled
        self.shown.clear()

    @property
    def readable(self) -> bool:
        """Whether a receive would end, or begin an RDMA Read, at once."""
        return bool(self.ready_bytes or self.adverts or self.ended)

    @property
    def unserved(self) -> bool:
        """Whether bytes stand before those that a SinkAvail could ask for."""
        return bool(self.ready or self.adverts or self.due)

    # --- payload ---

    def deliver(self, payload: memoryview, buffer: Receive, urgent: bool) -> None:
        """Takes the payload of a message; `urgent`: its last byte is out of band."""
        length = len(payload)
        if self.shown:
            self._deliver_shown(payload, buffer, urgent)
            return
        self.nd = (self.nd + 1) & MASK
        if self.due:
            if length > self.due and self.adverts:
                raise PeerViolation(f"{length} bytes where SendSm asked for {self.due}", rule="payload_amid_advert")
            self.due = self.due - length if self.due > length else 0
        elif self.adverts and not self.withdrawing:
            raise PeerViolation("payload while a SrcAvail is incomplete", rule="payload_amid_advert")
        if urgent:
            self._put_urgent(payload, buffer)
            self.serve()
            return
        receives = self.receives
        if receives and not self.ready:  # the usual case: somebody waits
            receive = receives[0]
            if receive.reads == 0:
                filled = receive.filled
                room = receive.length - filled
                if length <= room:
                    end = filled + length
                    receive.view[filled:end] = payload
                    receive.filled = receive.planned = end
                    if length == room or not receive.waitall:
                        receives.popleft()
                        self._host.end_receive(receive)
                    self._resize.repost(buffer)
                    if self.adverts:
                        self.serve()  # all that was due may be here
                    return
        self.ready.append((payload, buffer, None))
        self.ready_bytes += length
        self.serve()

    def _deliver_shown(self, payload: memoryview, buffer: Receive, urgent: bool) -> None:
        """The payload of exactly one message goes into the oldest receive shown (§12.1)."""
        receive = self._use_up()
        length = len(payload)
        if urgent:
            self._put_urgent(payload, buffer)
        elif self._is_next(receive) and length <= receive.length:
            receive.view[:length] = payload
            self._end_shown(receive, length)
            self._resize.repost(buffer)
        else:
            self.ready.append((payload, buffer, None))
            self.ready_bytes += length
        self._after_shown()

    def _use_up(self) -> StreamReceive:
        receive = self.shown.popleft()
        receive.advert = False
        return receive

    def _is_next(self, receive: StreamReceive) -> bool:
        """Whether what has come into it follows what the user has read.

        Not so if one that was shown earlier got nothing: an urgent byte alone, or a write of nothing, used it up.
        """
        return not self.ready and self.receives[0] is receive

    def _end_shown(self, receive: StreamReceive, length: int) -> None:
        receive.filled = receive.planned = length
        self.receives.popleft()
        self._host.end_receive(receive)

    def _after_shown(self) -> None:
        """A SinkAvail less; bytes that did not fit where they came in are served in the order of the stream."""
        self._settle_cancel()
        self.serve()
        self.keep_order()

    def keep_order(self) -> None:
        """Bytes that are here stand before what may come into receives that are shown: those are asked for again."""
        if self.ready_bytes and self.shown:
            self.cancel()

    def _put_urgent(self, payload: memoryview, buffer: Receive) -> None:
        """A message that ends in an urgent byte: the mark stands before that byte.

        A byte that stays in the stream keeps the private buffer, like others. A mark alone does not: nobody is told
        that he should read what it stands before, so it must not take room from what is to come. There are no more
        marks than pieces of payload, since of two in the same place only the later one is of use.
        """
        byte, inline = payload[-1], self._settings.urgent_inline
        if len(payload) > 1:
            self.ready.append((payload[:-1], None if inline else buffer, None))
            self.ready_bytes += len(payload) - 1
        elif not inline:
            if self.ready and self.ready[-1][2] is not None:
                self.ready.pop()
            self._resize.repost(buffer)
        if inline:
            self.ready.append((memoryview(b""), buffer, byte))
            self.ready_bytes += 1
        else:
            self.ready.append((memoryview(b""), None, byte))
            self.urgent_byte = byte
        if self.urgent_pending:
            self.urgent_pending -= 1
        else:
            self._host.tell_urgent()

    @property
    def filled(self) -> int:
        """Bytes that have come for receives which are not done."""
        return sum(receive.filled for receive in self.receives)

    def lend(self) -> bool:
        """Whether nothing is here, advertised or asked for, but receives that take the next bytes, as they are."""
        if any(receive.cancelled or receive.advert or receive.reads for receive in self.receives):
            return False
        return not (
            self.ready or self.adverts or self.due or self.shown or self.reads or self.untold or self.withdrawing
            or self.cancel_wanted or self.cancel_sent or self.urgent_pending or self.urgent_byte is not None
            or self.ended or self.closed or self.refusal is not None or self.mode is Mode.PIPELINED
        )  # fmt: skip

    def take_back(self, record: dict[str, int]) -> None:
        self.nd = (self.nd + record["payloads_received"]) & MASK

    # --- the user ---

    def serve(self) -> None:
        """Gives receives what there is: buffered bytes first, then RDMA Reads, then the end."""
        receives = self.receives
        while receives:
            receive = receives[0]
            if receive.advert or receive.reads:
                break
            if self.ready:
                if self._fill(receive):
                    receives.popleft()
                    self._host.end_receive(receive)
                    continue
                if self.ready:
                    continue
            if self.due or self.withdrawing or self.adverts or not self.ended:
                break
            receives.popleft()
            self._host.end_receive(receive)
        if self.adverts and not self.due and not self.withdrawing and not self.frozen and not (receives and self.ready):
            self._read()

    def _fill(self, receive: StreamReceive) -> bool:
        """Copies from `ready`; whether the receive has ended."""
        ready = self.ready
        while ready:
            payload, buffer, byte = ready[0]
            if byte is not None:
                if receive.filled:
                    return True  # a read stops at the mark
                ready.popleft()
                if buffer is not None:
                    self._resize.repost(buffer)
                if not self._settings.urgent_inline:
                    continue  # passed; the byte is had by take_urgent()
                receive.view[0] = byte
                receive.filled = receive.planned = 1
                self.ready_bytes -= 1
                if receive.length == 1 or not receive.waitall:
                    return True
                continue
            filled = receive.filled
            taken = min(len(payload), receive.length - filled)
            receive.view[filled : filled + taken] = payload[:taken]
            receive.filled = receive.planned = filled + taken
            self.ready_bytes -= taken
            if taken == len(payload):
                ready.popleft()
                if buffer is not None:
                    self._resize.repost(buffer)
            else:
                ready[0] = (payload[taken:], buffer, None)
            if receive.filled == receive.length:
                return True
        return receive.filled > 0 and not receive.waitall

    def take_urgent(self) -> int | None:
        """The urgent byte, once; None if there is none to take."""
        byte, self.urgent_byte = self.urgent_byte, None
        return byte

    def peek(self) -> memoryview:
        """The next bytes of the stream that are here, in one piece; they stay."""
        for payload, _, byte in self.ready:
            if len(payload):
                return payload.toreadonly()
            if byte is not None and self._settings.urgent_inline:
                return memoryview(bytes((byte,)))
        return memoryview(b"")

    def peek_into(self, room: memoryview) -> int:
        """Copies what is here, up to the urgent byte, and returns how much; it stays."""
        count = 0
        for payload, _, byte in self.ready:
            if byte is None:
                taken = min(len(payload), len(room) - count)
                room[count : count + taken] = payload[:taken]
                count += taken
            elif count:
                break  # as a receive does
            elif self._settings.urgent_inline:
                room[0] = byte
                count = 1
            if count == len(room):
                break
        return count

    def put_back(self, data: bytes) -> None:
        """Takes bytes back that were received last."""
        self.ready.appendleft((memoryview(data), None, None))
        self.ready_bytes += len(data)
        self.serve()
        self.keep_order()

    def cancel_receive(self, receive: StreamReceive) -> None:
        """The user takes the room back: at once, or once nobody else uses it."""
        if receive.done:
            return
        receive.cancelled = True
        if receive.advert:
            self.cancel()
        else:
            self.drop_cancelled()

    @property
    def at_mark(self) -> bool:
        """Whether the next byte to read is the urgent one."""
        return bool(self.ready) and self.ready[0][2] is not None

    # --- Read Zcopy (§10.2) ---

    def handle_src_avail(self, header: SrcAvail, payload: memoryview, buffer: Receive) -> None:
        """A SrcAvail: to be read, refused, or ignored because a SinkAvail of ours is outstanding (§12.2)."""
        count = len(payload)
        mode = MODES[self.mode]
        name = self.mode.name.title()
        if mode.src_avails == 0:
            raise PeerViolation(f"SrcAvail in mode {name}", rule="src_avail_mode")
        if self.withdrawing:
            raise PeerViolation("SrcAvail before the withdrawal was answered", rule="src_avail_cancelling")
        if mode.src_avail_payload != (count > 0):
            raise PeerViolation(f"SrcAvail with {count} bytes of payload in mode {name}", rule="src_avail_payload")
        if mode.src_avails is not None and (len(self.adverts) + self.untold >= mode.src_avails or self.due):
            raise PeerViolation(f"a second SrcAvail in mode {name}", rule="src_avail_second")
        if count:
            self.deliver(payload, buffer, False)
        elif self.shown:
            self.adverts.clear()  # our SinkAvail wins, and the source will know
            return
        if self._host.adverts_of_peer() >= self._settings.max_adverts:
            raise PeerViolation("more advertisements than MaxAdverts allows", rule="adverts")
        self.adverts.append(SinkAdvert(header, count))
        self.serve()

    def _read(self) -> None:
        """Starts the RDMA Reads that receives, the read depth and the send queue allow; or refuses."""
        host, flow = self._host, self._flow
        if not self.receives:
            if (self.closed or host.waits_for_reader()) and not self.reads:
                self.refuse()  # nobody will read it; or both ends wait to be read: one has to give way (§10.2)
            return
        last = self.last_read
        passed = last is None or not last.reads
        for receive in self.receives:
            if receive.advert or receive.cancelled:
                return
            if not passed:  # bytes further on go into a later receive already
                if receive is not last:
                    continue
                passed = True
            while receive.planned < receive.length:
                advert = next((one for one in self.adverts if one.planned < one.left), None)
                if advert is None:
                    return
                if self.reads >= self.reads_max or flow.room() < 2:
                    return  # each completion comes here again
                if self._settings.local_access is not None and not self._is_registered(receive):
                    return  # the answer comes here again
                room = receive.length - receive.planned
                if not self._strategy.wants_read(advert.left - advert.planned, room):
                    if receive.planned > receive.filled:
                        if receive.waitall:
                            return  # it ends full, or not yet: what comes next is its
                        break  # what is being read is enough for this receive
                    if not advert.reading and advert is self.adverts[0]:
                        self.refuse()
                    return
                count = min(advert.left - advert.planned, room, _READ_MAX)
                view = receive.view[receive.planned : receive.planned + count]
                va = advert.va + advert.planned
                advert.planned += count
                receive.planned += count
                advert.reading += 1
                receive.reads += 1
                self.reads += 1
                self.last_read = receive
                flow.send_read((view,), va, advert.rkey, partial(self._read_done, advert, receive, count))

    def _is_registered(self, receive: StreamReceive) -> bool:
        """Whether a device that wants it so may read into this; if it never will, the bytes are asked for by Data."""
        if receive.region is not None:
            return True
        if receive.register_failed:
            self.refuse()
        elif not receive.registering:
            receive.registering = True
            assert self._settings.local_access is not None
            self._flow.work.append(Register(receive, self._settings.local_access))
        return False

    def _read_done(self, advert: SinkAdvert, receive: StreamReceive, count: int) -> None:
        self.reads -= 1
        if not self.reads:
            self.last_read = None  # its memory is the user's again
        advert.reading -= 1
        advert.read += count
        if not advert.unreported:
            pipe = self._strategy.wants_pipelined(receive.length) and not receive.waitall
            self._host.control(partial(self._report, advert, REQ_PIPE if pipe else 0))
        advert.unreported += count
        if advert.read == advert.left and self.adverts and self.adverts[0] is advert:
            self.adverts.popleft()
            self.untold += 1
        receive.reads -= 1
        if not receive.reads and receive is self.last_read:
            self.last_read = None  # nobody holds on to the user's memory
        receive.filled += count
        if not receive.reads and (receive.filled == receive.length or not receive.waitall or receive.cancelled):
            self.receives.popleft()  # reads end in the order in which they were posted
            self._host.end_receive(receive)
        if self.withdrawing and not self.reads:
            self._withdrawn()
        self.serve()

    def _report(self, advert: SinkAdvert, flags: int) -> None:
        count, advert.unreported = advert.unreported, 0
        self.read += count
        if advert.read == advert.left:
            self.untold -= 1
        self._flow.send_header(RdmaRdCompl(count), flags=flags)

    def refuse(self) -> None:
        """SendSm for the oldest advertisement: its rest is to come by Data."""
        if self.due or self.withdrawing or not self.adverts or self.adverts[0].reading:
            return
        advert = self.adverts.popleft()
        self.due = advert.left - advert.read
        self.refusal = self._send_refusal
        self._host.control(self.refusal)

    def _send_refusal(self) -> None:
        self.refusal = None
        self._flow.send_header(SendSm())

    def handle_src_avail_cancel(self, mseq: int) -> None:
        """All SrcAvails are withdrawn: what is being read is still taken (§12.3)."""
        if self.withdrawing:
            raise PeerViolation("a second SrcAvailCancel before the first was answered", rule="cancel_second")
        unsent = self.refusal is not None and self._host.withdraw_control(self.refusal)
        if unsent:
            self.refusal = None
        self.due = 0  # the source knows what it was asked for, and may now do as it likes
        if not self.adverts and not unsent:
            return
        self.withdrawing = True
        self._flow.held_ack = (mseq - 1) & MASK
        self.unrefused = int(unsent)
        if not self.reads:
            self._withdrawn()

    def _withdrawn(self) -> None:
        """No RDMA Read runs any more. MSeqAck may advance: only that of a SendSm has a meaning for the source."""
        dropped = self.unrefused > 0 or any(advert.read < advert.left for advert in self.adverts)
        self.adverts.clear()
        self.unrefused = 0
        self._flow.held_ack = None
        if dropped:
            self._host.control(self._answer_withdrawal)
        else:
            self.withdrawing = False

    def _answer_withdrawal(self) -> None:
        self.withdrawing = False  # not before: until then the source may neither advertise nor withdraw anything
        self._flow.send_header(SendSm())
        self.serve()

    # --- Write Zcopy (§10.3) ---

    def next_shown(self) -> StreamReceive | None:
        """The receive that a SinkAvail may show now; asks for its registration where that is what is missing."""
        if (
            not MODES[self.mode].sink_avails
            or self.cancel_sent
            or self.cancel_wanted
            or self.ended
            or self.unserved
            or self.withdrawing
            or self.reads
            or (self.shown and not self.receives[0].advert)  # what is shown next comes behind what is shown
        ):
            return None
        for receive in self.receives:
            if receive.advert:
                continue
            if (
                receive.waitall  # may end short (§20)
                or receive.filled
                or receive.register_failed
                or receive.cancelled
                or receive.length <= self._resize.local  # what makes the stale rule work
                or not self._strategy.wants_sink_avail(receive.length)
                or not self._host.adverts_left()
            ):
                return None
            if receive.region is None or not receive.region.remote:
                if not receive.registering:
                    receive.registering = True
                    self._flow.work.append(Register(receive, Access.LOCAL_WRITE | Access.REMOTE_WRITE))
                return None
            return receive
        return None

    def offer(self, receive: StreamReceive) -> SinkAvail:
        """The message that shows it."""
        assert receive.region is not None
        length = min(receive.length, limits.SDP_ADVERT_MAX)
        return SinkAvail(length, receive.region.rkey, receive.region.va, self.nd)

    def advertised(self, receive: StreamReceive) -> None:
        receive.advert = True
        self.shown.append(receive)

    def show(self) -> None:
        """Sends the SinkAvails that may be sent."""
        flow = self._flow
        # registered while credit is waited for: then it may ride on the payload that goes first (Transaction)
        while self.receives and (receive := self.next_shown()) is not None and flow.may_send_payload():
            flow.send_header(self.offer(receive))
            self.advertised(receive)

    def handle_write_completed(self, length: int) -> None:
        """RdmaWrCompl: the oldest receive shown is complete."""
        if not self.shown:
            raise PeerViolation(f"RdmaWrCompl of {length} bytes, nothing is advertised", rule="write_unasked")
        receive = self.shown[0]
        if length > receive.length:
            raise PeerViolation(f"RdmaWrCompl of {length} bytes into {receive.length}", rule="write_excess")
        self._use_up()
        self.written += length
        if length and self._is_next(receive):
            self._end_shown(receive, length)
        elif length:
            self.ready.append((memoryview(bytes(receive.view[:length])), None, None))
            self.ready_bytes += length
        self._after_shown()

    def cancel(self) -> None:
        """Takes all SinkAvails back."""
        if self.shown and not self.cancel_sent:
            self.cancel_wanted = True

    def pump(self) -> bool:
        """Sends the withdrawal that is wanted; False if it has to wait."""
        self.cancel_wanted = self.cancel_wanted and bool(self.shown)
        if not self.cancel_wanted:
            return True
        if not self._flow.may_send_bare():
            return False
        self._flow.send_header(SinkAvailCancel())
        self.cancel_wanted, self.cancel_sent = False, True
        return True

    def handle_sink_cancel_ack(self) -> None:
        """The SinkAvails that are left are void. Without a withdrawal of ours it means nothing."""
        if self.cancel_sent:
            self._hide()
            self.serve()

    def _hide(self) -> None:
        """No receive is shown any more: the source has dropped, or will drop, what it knew of them."""
        for receive in self.shown:
            receive.advert = False
        self.shown.clear()
        self._settle_cancel()

    def _settle_cancel(self) -> None:
        """A withdrawal is done once nothing is shown; the receives for which it was asked end with what they hold."""
        if self.shown or not (self.cancel_sent or self.cancel_wanted):
            return
        self.cancel_sent = self.cancel_wanted = False
        self.drop_cancelled()

    def drop_cancelled(self) -> None:
        """Receives that the user has cancelled end, but for those that are shown or being read into."""
        kept: deque[StreamReceive] = deque()
        dropped: list[StreamReceive] = []
        for receive in self.receives:
            (dropped if receive.cancelled and not receive.advert and not receive.reads else kept).append(receive)
        self.receives = kept
        for receive in dropped:
            self._host.end_receive(receive)

    # --- modes and the end ---

    def handle_mode_change(self, mode: Mode) -> None:
        """ModeChange with S=0: the source, master but in Buffered mode, changes."""
        master = MODE_CHANGES.get((self.mode, mode))
        if master is not Master.SOURCE or (mode is Mode.BUFFERED and (self.adverts or self.withdrawing)):
            raise PeerViolation(
                f"the source changes {self.mode.name.title()} to {mode.name.title()}", rule="mode_transition"
            )
        if self.mode is Mode.PIPELINED:
            self._hide()
        self.mode = mode
        self._host.mode_changed()
        self.serve()

    def ask_combined(self) -> None:
        """Buffered to Combined: the one transition of which the sink is the master."""
        if self.mode is Mode.BUFFERED:
            self.mode = Mode.COMBINED
            self._host.control(ModeChange(True, Mode.COMBINED))
            self._host.mode_changed()

    def end(self) -> None:
        """DisConn has come: our SinkAvails are void, and receives end with what they have."""
        if self.adverts or self.due:
            raise PeerViolation("DisConn before all that was advertised was delivered", rule="end_amid_advert")
        self.ended = True
        self._hide()
        self.serve()

    def keep(self) -> None:
        """Copies what was not read yet: its private buffers are of a transport connection that is over."""
        for index, (payload, buffer, byte) in enumerate(self.ready):
            self.ready[index] = (memoryview(bytes(payload)), None, byte)
            if buffer is not None:
                self._resize.repost(buffer)

    def let_go(self) -> None:
        """Nothing is under way any more, and nothing can come: receives get what is here."""
        self.shown.clear()
        self.adverts.clear()
        self.last_read = None
        for receive in self.receives:
            receive.advert = False
            receive.reads = 0
        self.serve()

    def end_all(self) -> None:
        """All receives end; no RDMA is under way, and none can come into those that were shown."""
        self._hide()
        receives = list(self.receives)
        self.receives.clear()
        for receive in receives:
            receive.cancelled = True  # none filled does not mean the end of the stream
            self._host.end_receive(receive)

    def drain(self) -> list[tuple[bytes, int | None]]:
        """What was received and not read, for who takes it over: bytes, and urgent marks with their byte."""
        self.keep()
        unread = [(bytes(payload), byte) for payload, _, byte in self.ready]
        self.ready.clear()
        self.ready_bytes = 0
        return unread

    def take_over(self, suspended: Suspended) -> None:
        """The same, at who takes it over."""
        for payload, byte in suspended.unread:
            self.ready.append((memoryview(payload), None, byte))
            self.ready_bytes += len(payload) + (byte is not None and self._settings.urgent_inline)
        self.urgent_byte = suspended.urgent_byte
