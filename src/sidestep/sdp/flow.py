"""Sequence numbers, credits and the queue of work: all that leaves a connection leaves through here.

Theory of operation. Every SDP message takes one private buffer that the other end has posted, so a message may be
sent only where one is known to be there (docs/wire/sdp.md §9). Each header says how many buffers its sender has
posted (`Bufs`) and which message it received last (`MSeqAck`), one consistent pair; from it follows

    credit = Bufs - (tx_mseq - MSeqAck mod 2**32)

Payload is sent only with three credits or more: the last but one is for messages without payload, the last for those
that bring the other end new credit. As a message without payload can always be digested without the user, its buffer
is posted again at once, and neither end can be left without a way to say so.

`remote_credit` is the same number as the other end must see it. When it falls to one the other end has to be told
of more (CA4-82). That rule alone is neither enough nor does it come to rest (docs/internals/sdp.md): an end with
a credit of two could wait for ever to send payload, and two ends with two free buffers each would answer each other's
updates for ever. So this end keeps one credit more behind its payload than it must, where the other end has five
buffers or more; it tells of new credit earlier, unless something else is about to go out anyway; and it pauses before
it tells of credit that came from mere updates.

Withdrawing advertisements (`SrcAvailCancel`) asks for an `MSeqAck` that lags behind on purpose: `held_ack`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from sidestep import limits
from sidestep.errors import InternalError, PeerViolation
from sidestep.rdma.work import RdmaRead, RdmaWrite, Receive, RKey, Send
from sidestep.sdp.header import MASK
from sidestep.sdp.requests import Disconnect, StreamSend, Work
from sidestep.sdp.wire import BSDH, BSDH_LEN, OOB_PEND, Header, Mid

_SIGNAL_EVERY: Final = limits.SDP_SIGNAL_EVERY
_DATA: Final = int(Mid.DATA)
_pack: Final = BSDH.pack

Done: TypeAlias = Callable[[], None]


class Flow:
    """The state of both directions that no mechanism owns. Counters are 32-bit serial numbers."""

    __slots__ = (
        "announce", "credit", "down", "gone", "held_ack", "in_flight", "last_ack_sent", "last_bufs_sent", "next_wr_id",
        "open", "owes", "payload_credit", "peer_ack", "posted", "receive_count", "remote_size", "rx_mseq",
        "send_queue", "sent_count", "tx_mseq", "unsignaled", "work",
    )  # fmt: skip

    def __init__(self, receive_count: int, send_queue: int) -> None:
        self.work: deque[Work] = deque()
        self.receive_count = receive_count  # buffers posted while nothing is unread
        self.send_queue = send_queue
        self.open = False  # the transport connection carries messages
        self.down = False  # it takes nothing more
        self.gone = False  # it is over, and everything was flushed
        self.next_wr_id = 1
        # asked whether OOB_PEND may ride on the next message, which has so many bytes of payload
        self.announce: Callable[[int], bool] | None = None
        self.sent_count = 0
        self.posted = 0
        self.owes = False  # buffers were posted of which the other end has not been told, but for mere updates
        self.reset()

    def reset(self) -> None:
        """As at the start of a connection: Hello and HelloAck have sequence number 0 and take no credit."""
        self.tx_mseq = 0  # of the message sent last
        self.rx_mseq = 0  # of the message received last
        self.held_ack: int | None = None  # what MSeqAck says instead, while a withdrawal is worked off
        self.peer_ack = 0  # of the message received last
        self.credit = 0
        self.payload_credit = 3  # what a message with payload needs
        self.remote_size = 0  # bytes of the other end's private buffers
        self.last_bufs_sent = 0
        self.last_ack_sent = 0
        self.unsignaled = 0
        # (wr_id, send of the user or None, what to do then or None), in the order of posting
        self.in_flight: deque[tuple[int, StreamSend | None, Done | None]] = deque()

    # --- the end of it ---

    def shut(self) -> None:
        """The transport connection takes nothing more: no RDMA Read either, though an advertisement arrives still."""
        self.down = True
        self.send_queue = 0

    def disconnect(self) -> None:
        """Ends the transport connection, if that was not ordered before."""
        if not self.down:
            self.shut()
            self.work.append(Disconnect())

    # --- what the other end knows ---

    def remote_credit(self) -> int:
        """How many messages the other end may think it can send us."""
        return self.last_bufs_sent - ((self.rx_mseq - self.last_ack_sent) & MASK)

    def unacknowledged(self) -> int:
        """Messages received that the other end does not know to be received."""
        return (self.rx_mseq - self.last_ack_sent) & MASK

    def brings_credit(self) -> bool:
        """Whether a message sent now would give the other end more credit than it has."""
        ack = self.rx_mseq if self.held_ack is None else self.held_ack
        return self.posted - ((self.rx_mseq - ack) & MASK) > self.remote_credit()

    def credit_low(self) -> bool:
        """Whether the other end may have to be told of more credit."""
        remote_credit = self.last_bufs_sent - ((self.rx_mseq - self.last_ack_sent) & MASK)
        return remote_credit < 4 or 2 * remote_credit <= self.posted

    def may_send_bare(self) -> bool:
        """Whether a message without payload may be sent (two credits, or one if it brings credit: CA4-82)."""
        if len(self.in_flight) >= self.send_queue:
            return False
        return self.credit >= 2 or (self.credit == 1 and self.brings_credit())

    def may_send_payload(self) -> bool:
        """Whether a message with payload, or an advertisement, may be sent."""
        return self.credit >= self.payload_credit and len(self.in_flight) < self.send_queue

    def room(self) -> int:
        """Work requests that the send queue still takes."""
        return max(0, self.send_queue - len(self.in_flight))

    # --- lending it to the engine ---

    _LENT: Final = (
        "credit", "last_ack_sent", "last_bufs_sent", "owes", "peer_ack", "posted", "remote_size", "rx_mseq", "tx_mseq",
    )  # fmt: skip

    def lend(self, record: dict[str, int]) -> bool:
        """Whether nobody waits for what is in flight; then the record has the counters."""
        if not self.open or self.down or self.work or self.held_ack is not None or self.announce is not None:
            return False
        if any(send is not None or then is not None for _, send, then in self.in_flight):
            return False
        record.update((name, int(getattr(self, name))) for name in self._LENT)
        return True

    def take_back(self, record: dict[str, int]) -> None:
        for name in self._LENT:
            setattr(self, name, record[name])
        self.owes = bool(self.owes)
        self.sent_count += record["messages_sent"]

    # --- receiving ---

    def take_header(self, bufs: int, mseq: int, mseq_ack: int) -> None:
        """Accounts for a received message.

        Raises:
            PeerViolation: a sequence number that does not follow, or an acknowledgement of what was not sent.
        """
        if mseq != (self.rx_mseq + 1) & MASK:
            raise PeerViolation(f"MSeq {mseq} after {self.rx_mseq}", rule="sequence")
        unseen = (self.tx_mseq - mseq_ack) & MASK
        if unseen > (self.tx_mseq - self.peer_ack) & MASK:
            raise PeerViolation(
                f"MSeqAck {mseq_ack}, where {self.peer_ack} to {self.tx_mseq} can be acknowledged",
                rule="acknowledgement",
            )
        self.rx_mseq = mseq
        self.peer_ack = mseq_ack
        self.posted -= 1
        credit = bufs - unseen
        self.credit = credit if credit > 0 else 0

    def post(self, receive: Receive) -> None:
        """Gives a private buffer to the transport."""
        self.posted += 1
        self.owes = True
        self.work.append(receive)

    # --- sending ---

    def send_data(
        self,
        gather: tuple[memoryview | bytes, ...],
        length: int,
        send: StreamSend | None,
        flags: int = 0,
        signaled: bool = True,
    ) -> None:
        """Sends a Data message: `length` bytes of payload in `gather`, as a piece of `send`."""
        self.tx_mseq = mseq = (self.tx_mseq + 1) & MASK
        self.credit -= 1
        ack = self.last_ack_sent = self.rx_mseq if self.held_ack is None else self.held_ack
        bufs = self.last_bufs_sent = self.posted if self.posted < 0xFFFF else 0xFFFF
        self.owes = False
        if self.announce is not None and self.announce(length):
            flags |= OOB_PEND
        self.sent_count += 1
        wr_id = self.next_wr_id
        self.next_wr_id = wr_id + 1
        if signaled or self.unsignaled >= _SIGNAL_EVERY or len(self.in_flight) + 2 >= self.send_queue:
            self.unsignaled = 0
            signaled = True
        else:
            self.unsignaled += 1
        self.in_flight.append((wr_id, send, None))
        header = _pack(_DATA, flags, bufs, BSDH_LEN + length, mseq, ack)
        self.work.append(Send(wr_id, (header, *gather), signaled, flags != 0))

    def send_update(self) -> None:
        """Sends Data without payload: it tells of credit, or carries a flag."""
        self.send_data((), 0, None, 0, False)

    def send_header(
        self,
        header: Header,
        payload: tuple[memoryview, ...] = (),
        *,
        flags: int = 0,
        send: StreamSend | None = None,
        then: Done | None = None,
    ) -> int:
        """Sends any other message and returns its sequence number; `then` is called when the transport is done."""
        self.tx_mseq = mseq = (self.tx_mseq + 1) & MASK
        self.credit -= 1
        ack = self.last_ack_sent = self.rx_mseq if self.held_ack is None else self.held_ack
        bufs = self.last_bufs_sent = min(self.posted, 0xFFFF)
        self.owes = False
        payload_len = sum(map(len, payload))
        if self.announce is not None and self.announce(payload_len):
            flags |= OOB_PEND
        extended = header.encode()
        length = BSDH_LEN + len(extended) + payload_len
        packed = _pack(header.MID, flags, bufs, length, mseq, ack) + extended
        self.sent_count += 1
        solicited = header.SOLICITED or flags & OOB_PEND != 0
        self.work.append(Send(self._begin(send, then), (packed, *payload), True, solicited))
        self.unsignaled = 0
        return mseq

    def send_write(self, gather: tuple[memoryview, ...], va: int, rkey: RKey, then: Done | None) -> None:
        """Posts an RDMA Write; it takes no credit and no sequence number."""
        self.work.append(RdmaWrite(self._begin(None, then), gather, va, rkey))

    def ask_completion(self) -> None:
        """Makes the transport tell of unsignaled messages that nothing else may follow: an RDMA Write of nothing.

        Without room in the send queue there is no need: the last that fit in are signaled.
        """
        if self.unsignaled and self.room():
            self.unsignaled = 0
            self.send_write((), 0, RKey(0), None)

    def send_read(self, scatter: tuple[memoryview, ...], va: int, rkey: RKey, then: Done) -> None:
        """Posts an RDMA Read; likewise."""
        self.work.append(RdmaRead(self._begin(None, then), scatter, va, rkey))

    def _begin(self, send: StreamSend | None, then: Done | None) -> int:
        wr_id = self.next_wr_id
        self.next_wr_id = wr_id + 1
        self.in_flight.append((wr_id, send, then))
        return wr_id

    # --- what is in flight ---

    def senders(self, wr_id: int) -> list[StreamSend]:
        """Whose bytes a request carries, in the order of its gather list; the latest is found first.

        Of a SrcAvail too, if it has payload; these bytes are in the region that it shows.
        """
        found: list[StreamSend] = []
        for number, send, _ in reversed(self.in_flight):
            if number < wr_id:
                break
            if number == wr_id and send is not None:
                found.append(send)
        found.reverse()
        return found

    def when_sent(self, wr_id: int, then: Done) -> None:
        """Calls when this request has completed; not at all if the connection ends before."""
        in_flight = self.in_flight
        for index in range(len(in_flight) - 1, -1, -1):
            number, send, _ = in_flight[index]
            if number == wr_id:
                in_flight[index] = (number, send, then)
                return
        raise InternalError(f"request {wr_id} is not in flight")
