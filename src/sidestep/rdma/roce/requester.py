"""The requester of a reliable connection: what this end asks for, until it is acknowledged (IBTA 9.7.5, 9.7.6).

Theory of operation. A request that leaves becomes a `_Flight`: it gets as many sequence numbers as it has packets; an
RDMA Read as many as its answer. Four numbers lie on the circle:

    acknowledged <= cursor <= reached, the first never sent; cursor <= next, the first that no flight has

The packet at `cursor` is made out of the memory of its request, whenever it is sent: go-back-N only moves `cursor` back
to `acknowledged`, and nothing is kept of packets that were sent. An RDMA Read is asked for in requests of a part of the
window each, as far as the depth allows: the answer then does not come in a burst that sockets drop; one that is not
whole is asked for again from its first packet that is missing. An atomic operation has one number, as its answer; it is
asked for again as it was, and the other end carries it out once.

What comes back: an acknowledgement of all up to a number, a NAK, or a packet of a Read's answer. One that passes the
answer to a Read which is not whole tells that something of it was lost. What lies outside of what was sent and not
acknowledged is old, or made up, and is dropped.

`retry_count` times without progress everything is sent again, because it was lost (NAK, or no answer for a while);
`rnr_retry` times because the other end had no receive. Seven is seven, and for receives: for ever (IBTA 9.7.5.2.8). The
first expiry of the timer comes after the timeout agreed, each after that takes longer: the other end may be a process
that waits for a CPU, and is not to be given up within half a second. IBTA 9.7.6.1.3 would have four times at most.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from sidestep.rdma.roce.numbers import after, ahead, packets_of, rnr_timer_s
from sidestep.rdma.roce.packet import (
    READ_RESPONSES,
    Aeth,
    AtomicAckEth,
    AtomicEth,
    Bth,
    Extension,
    Ieth,
    ImmDt,
    Op,
    Packet,
    Reth,
)
from sidestep.rdma.roce.pieces import piece_of, place
from sidestep.rdma.work import ATOMIC_LEN, CompareSwap, FetchAdd, RdmaRead, RdmaWrite, Send, Status

if TYPE_CHECKING:
    from sidestep.rdma.roce.path import Path
    from sidestep.rdma.soft.ordered import Sent
    from sidestep.rdma.work import Gather, Scatter

_ACK_EVERY: Final = 16  # packets of a long message; a power of two
_RNR_ENDLESS: Final = 7
_VA_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF
_KEY_MASK: Final = 0xFFFF_FFFF
_PATIENCE: Final = (1, 2, 4, 8, 16)  # times the timeout, from one expiry to the next
_SENDS: Final = (Op.SEND_FIRST, Op.SEND_MIDDLE, Op.SEND_LAST, Op.SEND_ONLY)
_SENDS_INVALIDATE: Final = (Op.SEND_FIRST, Op.SEND_MIDDLE, Op.SEND_LAST_INV, Op.SEND_ONLY_INV)
_SENDS_IMMEDIATE: Final = (Op.SEND_FIRST, Op.SEND_MIDDLE, Op.SEND_LAST_IMM, Op.SEND_ONLY_IMM)
_WRITES: Final = (Op.WRITE_FIRST, Op.WRITE_MIDDLE, Op.WRITE_LAST, Op.WRITE_ONLY)
_WRITES_IMMEDIATE: Final = (Op.WRITE_FIRST, Op.WRITE_MIDDLE, Op.WRITE_LAST_IMM, Op.WRITE_ONLY_IMM)
_ATOMIC_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF
_NAK_SEQUENCE: Final = 0x60
_REFUSED: Final = {  # IBTA 9.7.5.2.8, table 46: what a NAK does to the request
    0x61: Status.REMOTE_INVALID_REQUEST,
    0x62: Status.REMOTE_ACCESS_ERROR,
}


class Memory(Protocol):
    """Whether entries of a request may be used: asked for each packet, since access may end in between."""

    def may_read(self, gather: Gather) -> bool: ...
    def may_sink(self, scatter: Scatter) -> bool: ...


class _Flight:
    """A request that has sequence numbers."""

    __slots__ = ("atomic", "count", "first", "following", "read", "sent")

    def __init__(self, sent: Sent, first: int, count: int) -> None:
        self.sent = sent
        self.first = first
        self.count = count
        self.read = sent.request if isinstance(sent.request, RdmaRead) else None
        self.atomic = sent.request if isinstance(sent.request, CompareSwap | FetchAdd) else None
        self.following: _Flight | None = None  # the next one

    @property
    def end(self) -> int:
        """The first number behind it."""
        return after(self.first, self.count)

    @property
    def acknowledgeable(self) -> bool:
        """An acknowledgement is all that it waits for."""
        return self.read is None and self.atomic is None


class Requester:
    """Of one queue pair.

    `handle` and `handle_timeout` tell whether the status of a request has changed; `poll` sets `changed`.
    """

    def __init__(self, path: Path, memory: Memory, *, depth: int) -> None:
        self._path = path
        self._memory = memory
        self.depth = depth  # requests for RDMA Reads under way
        self._flights: deque[_Flight] = deque()  # not acknowledged, the oldest first
        self._flight: _Flight | None = None  # whose packet is at the cursor
        self._acknowledged = self._cursor = self._reached = self._next = path.send_psn
        self._asked: deque[int] = deque()  # numbers behind the answers to Reads that were asked for
        self._retries_left = path.retry_count
        self._rnr_left = path.rnr_retry
        self._waits_until: float | None = None  # for a receive of the other end
        self._expires = 0.0  # when what was sent is taken for lost
        self._expiries = 0  # of the timer, without progress
        self._gone_back_to: int | None = None  # for a loss that was told; what else tells of it is no news
        self.changed = False  # a request failed before anything of it was sent
        self.resent = 0  # times that the cursor went back
        self.packets_resent = 0

    # --- the queue pair's side ---

    def begin(self, sent: Sent) -> None:
        """Sends a request when its turn comes."""
        count = packets_of(sent.length, self._path.mtu)
        flight = _Flight(sent, self._next, count)
        if self._flights:
            self._flights[-1].following = flight
        self._flights.append(flight)
        self._flight = self._flight or flight
        self._next = after(self._next, count)

    def stop(self) -> None:
        """Nothing is sent or awaited any more."""
        self._flights.clear()
        self._flight = None
        self._acknowledged = self._cursor = self._reached = self._next
        self._waits_until = None

    # --- what goes out ---

    def poll(self, now: float) -> Packet | None:
        """The next packet, if one may be sent."""
        flight = self._flight
        if flight is None or self._waits_until is not None or flight.sent.status is not None:
            return None
        outstanding = ahead(self._cursor, self._acknowledged)
        if outstanding >= self._path.window:
            return None
        again = ahead(self._cursor, self._reached) < 0
        if flight.read is not None:
            packet = self._ask(flight, outstanding)
        elif flight.atomic is not None:
            packet = self._operate(flight, flight.atomic)
        else:
            packet = self._piece(flight, outstanding)
        self.packets_resent += again and packet is not None
        if packet is not None and not outstanding:
            self._start_timer(now)
        return packet

    def _ask(self, flight: _Flight, outstanding: int) -> Packet | None:
        """Asks for a part of an RDMA Read."""
        done = ahead(self._cursor, flight.first)
        part = max(1, self._path.window // 2)
        # Asked for again it is a part of one request, never of two: only that may be repeated (IBTA 9.7.5.1.6).
        count = min(flight.count - done, part - done % part)
        if not self._may_ask() or (outstanding and outstanding + count > self._path.window):
            return None
        assert flight.read is not None
        begin = done * self._path.mtu
        length = min(count * self._path.mtu, flight.sent.length - begin)
        where = Reth(flight.read.remote_va + begin & _VA_MASK, flight.read.rkey & _KEY_MASK, length)
        packet = self._packet(Op.READ_REQUEST, (where,), ack_req=True)
        self._asked.append(after(self._cursor, count))
        self._step(flight, count)
        return packet

    def _may_ask(self) -> bool:
        """Whether the other end has room for one more request that it is to answer."""
        while self._asked and ahead(self._acknowledged, self._asked[0]) >= 0:
            self._asked.popleft()
        return len(self._asked) < self.depth

    def _operate(self, flight: _Flight, atomic: CompareSwap | FetchAdd) -> Packet | None:
        """Asks for an atomic operation."""
        if not self._may_ask():
            return None
        swaps = isinstance(atomic, CompareSwap)
        operand, compare = (atomic.swap, atomic.compare) if isinstance(atomic, CompareSwap) else (atomic.add, 0)
        where = atomic.remote_va & _VA_MASK, atomic.rkey & _KEY_MASK
        operands = AtomicEth(*where, operand & _ATOMIC_MASK, compare & _ATOMIC_MASK)
        packet = self._packet(Op.CMP_SWAP if swaps else Op.FETCH_ADD, (operands,), ack_req=True)
        self._asked.append(after(self._cursor, 1))
        self._step(flight, 1)
        return packet

    def _piece(self, flight: _Flight, outstanding: int) -> Packet | None:
        """A packet of a Send or Write."""
        request = flight.sent.request
        assert isinstance(request, Send | RdmaWrite)
        if not self._memory.may_read(request.gather):
            flight.sent.status = Status.LOCAL_PROTECTION_ERROR  # taken back since it was posted
            self.changed = True
            return None
        index = ahead(self._cursor, flight.first)
        begins, ends = index == 0, index == flight.count - 1
        ops = _opcodes(request)
        op = ops[3] if begins and ends else ops[0] if begins else ops[2] if ends else ops[1]
        extensions: tuple[Extension, ...] = ()
        if begins and isinstance(request, RdmaWrite):
            extensions = (Reth(request.remote_va & _VA_MASK, request.rkey & _KEY_MASK, flight.sent.length),)
        elif ends and isinstance(request, Send) and request.invalidate is not None:
            extensions = (Ieth(request.invalidate & _KEY_MASK),)
        if ends and request.immediate is not None:
            extensions += (ImmDt(request.immediate),)
        payload = piece_of(request.gather, index * self._path.mtu, self._path.mtu)
        asks = ends or outstanding == self._path.window - 1 or not after(self._cursor, 1) % _ACK_EVERY
        # IBTA 9.2.3: what completes a receive may ask for an event.
        solicited = ends and request.solicited and (isinstance(request, Send) or request.immediate is not None)
        packet = self._packet(op, extensions, payload, ack_req=asks, solicited=solicited)
        self._step(flight, 1)
        return packet

    def _packet(
        self, op: Op, extensions: tuple[Extension, ...], payload: memoryview | bytes = b"", *, ack_req: bool,
        solicited: bool = False,
    ) -> Packet:  # fmt: skip
        pad = -len(payload) % 4  # IBTA 9.2.4: packets end on four bytes
        bth = Bth(op, self._path.remote_qp, self._cursor, ack_req=ack_req, solicited=solicited, pad=pad)
        return Packet(bth, extensions, payload)

    def _step(self, flight: _Flight, count: int) -> None:
        self._cursor = after(self._cursor, count)
        if self._cursor == flight.end:
            self._flight = flight.following
        if ahead(self._cursor, self._reached) > 0:
            self._reached = self._cursor

    # --- what comes back ---

    def handle(self, packet: Packet, now: float) -> bool:
        """Takes a response in; whether the status of a request has changed."""
        psn = packet.bth.psn
        if not 0 <= ahead(psn, self._acknowledged) < ahead(self._reached, self._acknowledged):
            return False  # IBTA 9.7.5.1.4: old, or not of this connection
        op = packet.bth.opcode
        if op in READ_RESPONSES:
            return self._answered(packet, now)
        aeth = packet.find(Aeth)
        if op is Op.ATOMIC_ACK:
            return self._operated(packet, now)
        if op is not Op.ACK or aeth is None:
            return False
        kind = aeth.syndrome >> 5
        if kind == 0:
            before = self._acknowledged
            if not self._acknowledge(after(psn, 1), now):
                return self._go_back(now) or self._acknowledged != before
            return True
        if kind == 1:
            return self._not_ready(psn, rnr_timer_s(aeth.syndrome & 0x1F), now)
        return self._refused(psn, aeth.syndrome, now) if kind == 3 else False

    def _acknowledge(self, end: int, now: float) -> bool:
        """All before this number was carried out; False if an answer that it waits for is missing (IBTA 9.7.5.1.2).

        What is before that answer is acknowledged.
        """
        begin = self._acknowledged
        while self._flights and ahead(end, self._acknowledged) > 0 and self._flights[0].acknowledgeable:
            flight = self._flights[0]
            if ahead(end, flight.end) < 0:
                self._acknowledged = end
                break
            self._acknowledged = flight.end
            self._finish(flight)
        if self._acknowledged != begin:
            self._progress(now)
        return ahead(end, self._acknowledged) <= 0

    def _answered(self, packet: Packet, now: float) -> bool:
        """A packet of the answer to an RDMA Read."""
        psn = packet.bth.psn
        flight = next((each for each in self._flights if ahead(psn, each.end) < 0), None)
        if flight is None or flight.read is None:
            return False  # the answer to what is none
        before = self._acknowledged
        if not self._acknowledge(flight.first, now) or psn != self._acknowledged:
            return self._go_back(now) or self._acknowledged != before  # something before it was lost
        begin = ahead(psn, flight.first) * self._path.mtu
        aeth = packet.find(Aeth)
        wanted = min(self._path.mtu, flight.sent.length - begin)
        # First or Middle, Last or Only: who answers again from the middle may call it either (IBTA is silent).
        if len(packet.payload) != wanted or (aeth is not None and aeth.syndrome >> 5):
            return self._fail(flight, Status.BAD_RESPONSE)
        scatter = flight.read.scatter
        if not (self._memory.may_sink(scatter) and place(scatter, begin, packet.payload)):
            return self._fail(flight, Status.LOCAL_PROTECTION_ERROR)
        self._acknowledged = after(psn, 1)
        if self._acknowledged == flight.end:
            self._finish(flight)
        self._progress(now)
        return True

    def _operated(self, packet: Packet, now: float) -> bool:
        """The answer to an atomic operation: the number before it."""
        psn = packet.bth.psn
        flight = next((each for each in self._flights if ahead(psn, each.end) < 0), None)
        if flight is None or flight.atomic is None:
            return False  # the answer to what is none
        before = self._acknowledged
        if not self._acknowledge(flight.first, now):
            return self._go_back(now) or self._acknowledged != before  # something before it was lost
        aeth, answer = packet.find(Aeth), packet.find(AtomicAckEth)
        assert aeth is not None  # the opcode has both
        assert answer is not None
        if aeth.syndrome >> 5 or len(packet.payload):
            return self._fail(flight, Status.BAD_RESPONSE)
        scatter = flight.atomic.scatter
        number = answer.original.to_bytes(ATOMIC_LEN, sys.byteorder)
        if not (self._memory.may_sink(scatter) and place(scatter, 0, number)):
            return self._fail(flight, Status.LOCAL_PROTECTION_ERROR)
        self._acknowledged = flight.end
        self._finish(flight)
        self._progress(now)
        return True

    def _not_ready(self, psn: int, wait_s: float, now: float) -> bool:
        """RNR NAK: the other end had no receive for this packet (IBTA 9.7.5.2.8)."""
        before = self._acknowledged
        if not self._acknowledge(psn, now):
            return self._go_back(now) or self._acknowledged != before
        if self._waits_until is not None:
            return True  # told already
        if self._path.rnr_retry != _RNR_ENDLESS:
            if not self._rnr_left:
                return self._fail(self._flights[0], Status.RNR_RETRY_EXCEEDED)
            self._rnr_left -= 1
        self._rewind()
        self._waits_until = now + wait_s
        return True

    def _refused(self, psn: int, syndrome: int, now: float) -> bool:
        """NAK: all before this packet was carried out, and it was not."""
        before = self._acknowledged
        whole = self._acknowledge(psn, now)
        if not whole or syndrome == _NAK_SEQUENCE:
            return self._go_back(now) or self._acknowledged != before
        return self._fail(self._flights[0], _REFUSED.get(syndrome, Status.REMOTE_OPERATION_ERROR))

    # --- going back ---

    @property
    def deadline(self) -> float | None:
        """When `handle_timeout` is to be called."""
        if self._waits_until is not None:
            return self._waits_until
        return self._expires if self._reached != self._acknowledged else None

    def handle_timeout(self, now: float) -> bool:
        """Time has passed; whether the status of a request has changed."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return False
        if self._waits_until is not None:
            self._waits_until = None
            self._start_timer(now)
            return False
        self._gone_back_to = None
        self._expiries += 1
        return self._go_back(now)

    def _go_back(self, now: float) -> bool:
        """Sends again what is not acknowledged, once for each loss; whether a request has failed for it."""
        if self._gone_back_to == self._acknowledged or self._waits_until is not None:
            return False
        if not self._retries_left:
            return self._fail(self._flights[0], Status.RETRY_EXCEEDED)
        self._retries_left -= 1
        self._gone_back_to = self._acknowledged
        self._start_timer(now)
        self._rewind()
        return False

    def _start_timer(self, now: float) -> None:
        self._expires = now + self._path.timeout_s * _PATIENCE[min(self._expiries, len(_PATIENCE) - 1)]

    def _rewind(self) -> None:
        self.resent += 1
        self._cursor = self._acknowledged
        self._flight = self._flights[0]
        self._asked.clear()

    def _progress(self, now: float) -> None:
        self._retries_left = self._path.retry_count
        self._rnr_left = self._path.rnr_retry
        self._gone_back_to = None
        self._expiries = 0
        self._start_timer(now)
        if ahead(self._cursor, self._acknowledged) < 0:  # it was sent before, and is here after all
            self._cursor = self._acknowledged
            self._flight = self._flights[0] if self._flights else None

    def _finish(self, flight: _Flight) -> None:
        self._flights.popleft()
        flight.sent.status = Status.SUCCESS

    def _fail(self, flight: _Flight, status: Status) -> bool:
        flight.sent.status = status
        self.changed = True
        return True


def _opcodes(request: Send | RdmaWrite) -> tuple[Op, Op, Op, Op]:
    """Of its first, middle and last packet, and of one that is all of it."""
    if isinstance(request, RdmaWrite):
        return _WRITES if request.immediate is None else _WRITES_IMMEDIATE
    if request.invalidate is not None:
        return _SENDS_INVALIDATE
    return _SENDS if request.immediate is None else _SENDS_IMMEDIATE
