"""The responder of a reliable connection: what the other end asks for, checked, carried out once (IBTA 9.7.3, 9.7.4).

Theory of operation. The packet that is expected goes through a line of checks; the first that fails decides the answer.
A packet ahead of it tells that one was lost, and is answered with one NAK until the expected one is here. One behind it
was carried out before: it is acknowledged again, an RDMA Read is answered again out of the memory as it is now, and an
atomic operation by the number that was kept, or not at all (IBTA 9.7.5.1.6): it is never carried out twice.

    a check fails for                     answer                          queue pair
    opcodes, lengths, rights, alignment   NAK 0x61 invalid request        error
    key, domain, bounds                   NAK 0x62 remote access          error
    a receive of this end                 NAK 0x63 remote operational     error
    no receive is posted                  RNR NAK: the same packet again  goes on
    a number that was left out            NAK 0x60: go back to it         goes on

Answers leave in the order of their numbers, an acknowledgement behind the answers to the Reads before it; one
acknowledgement stands for all that are due. A Read's answer is made packet by packet as it is sent, and its key is
checked for each.

A refusal that ends the queue pair is this end's last word. It is given again to who asks again, since it may be lost;
the specification would have a queue pair in error be silent (IBTA 9.7.4.1 says nothing of the answer's own loss).
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from sidestep import limits
from sidestep.rdma.roce.numbers import after, ahead, packets_of
from sidestep.rdma.roce.packet import (
    ACK_NO_CREDITS,
    ENDS,
    SENDS,
    STARTS,
    WRITES,
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
from sidestep.rdma.soft.memory import AccessRefusal
from sidestep.rdma.soft.qp import REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE
from sidestep.rdma.verbs import EventKind
from sidestep.rdma.work import ATOMIC_LEN, RKey, Status

if TYPE_CHECKING:
    from sidestep.rdma.roce.path import Path
    from sidestep.rdma.soft.keys import Memory
    from sidestep.rdma.work import Receive, Scatter

_RNR_NAK: Final = 0x20  # and the code of a timer
_FULL: Final = frozenset({Op.SEND_FIRST, Op.SEND_MIDDLE, Op.WRITE_FIRST, Op.WRITE_MIDDLE})
_LASTS: Final = ENDS - STARTS
_ATOMICS: Final = frozenset({Op.CMP_SWAP, Op.FETCH_ADD})
_ANSWERED: Final = _ATOMICS | {Op.READ_REQUEST}  # requests that no acknowledgement answers
_ATOMIC_MASK: Final = (1 << 8 * ATOMIC_LEN) - 1
_LENGTH_MAX: Final = 1 << 31  # bytes of a message (IBTA 9.7.8)
_READ_OPS: Final = (
    Op.READ_RESPONSE_FIRST,
    Op.READ_RESPONSE_MIDDLE,
    Op.READ_RESPONSE_LAST,
    Op.READ_RESPONSE_ONLY,
)


class Nak(Enum):
    """Syndromes of refusals (IBTA 9.7.5.2.8, table 46)."""

    SEQUENCE = 0x60
    INVALID_REQUEST = 0x61
    REMOTE_ACCESS = 0x62
    REMOTE_OPERATION = 0x63


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message is whole."""

    receive: Receive
    length: int
    solicited: bool
    invalidated: RKey | None
    immediate: bytes | None


@dataclass(frozen=True, slots=True)
class Refused:
    """The queue pair is to end."""

    nak: Nak
    why: str
    event: EventKind | None = None  # None: the receive tells it
    receive: Receive | None = None  # whose completion tells it
    status: Status = Status.SUCCESS  # of that


Outcome: TypeAlias = Delivered | Refused | None


class Host(Protocol):
    """The queue pair: its receives, and what the other end may do."""

    @property
    def remote_access(self) -> int: ...
    def next_receive(self) -> Receive | None: ...
    def take_receive(self) -> Receive: ...
    def untake_receive(self, receive: Receive) -> None: ...
    def may_receive(self, scatter: Scatter) -> bool: ...
    def grant(self, key: int, va: int, length: int, right: int) -> memoryview | AccessRefusal: ...
    def may_be_invalidated(self, key: int) -> Memory | AccessRefusal: ...


@dataclass(slots=True)
class _Sending:
    """A Send of which not all is here."""

    receive: Receive
    length: int = 0  # bytes placed


@dataclass(slots=True)
class _Writing:
    """An RDMA Write of which not all is here."""

    va: int
    rkey: int
    length: int  # of all
    placed: int = 0


@dataclass(slots=True)
class _Answer:
    """What is to be told about one number, or all up to it."""

    psn: int
    syndrome: int


@dataclass(slots=True)
class _Read:
    """An RDMA Read that was carried out, or is."""

    psn: int
    va: int
    rkey: int
    length: int
    count: int  # packets of the answer
    sent: int = 0  # of these


@dataclass(frozen=True, slots=True)
class _Operated:
    """An atomic operation that was carried out, and the number before it."""

    psn: int
    op: Op
    operands: AtomicEth
    original: int


class Responder:
    """Of one queue pair."""

    def __init__(self, path: Path, host: Host, *, resources: int) -> None:
        self._path = path
        self._host = host
        self._resources = resources  # RDMA Reads and atomic operations that wait to be answered
        self._expected = path.receive_psn
        self._completed = 0  # messages, modulo 2^24
        self._reported_gap = False  # who is ahead was told, or asked to wait
        self._message: _Sending | _Writing | None = None
        self._answers: deque[_Answer | _Read | _Operated] = deque()  # in the order of their numbers
        # The last ones, should they be asked for again.
        self._fetches: deque[_Read | _Operated] = deque(maxlen=max(1, resources))
        self._carried_out = after(path.receive_psn, -1)  # the last packet of a Send or Write
        self._last_word: _Answer | None = None  # it has ended by this
        self.refused: Refused | None = None  # found when an answer was sent

    # --- the queue pair's side ---

    @property
    def expected(self) -> int:
        return self._expected

    def give_up(self) -> Receive | None:
        """A message that is not whole comes no more; the receive that it has taken."""
        message, self._message = self._message, None
        return message.receive if isinstance(message, _Sending) else None

    def stop(self) -> None:
        """Nothing is answered any more, but what was before the last word, and that."""
        if self._last_word is None:
            self._answers.clear()
        self._fetches.clear()

    def insist(self, psn: int) -> None:
        """Asked again after the last word."""
        if self._last_word is not None and ahead(psn, self._last_word.psn) >= 0:
            self._queue(self._last_word)

    # --- lending it to the engine ---

    def lend(self, record: dict[str, int]) -> bytes | None:
        """What has come of a Send, whose receive is free again, if that is all there is; and the numbers in the record.

        None: something is to be answered, or another message has come in part.
        """
        message = self._message
        if self._answers or self._last_word is not None or isinstance(message, _Writing):
            return None
        record |= {
            "expected": self._expected, "carried_out": self._carried_out, "completed": self._completed,
            "reported_gap": self._reported_gap,
        }  # fmt: skip
        if message is None:
            return b""
        self._message = None
        self._host.untake_receive(message.receive)
        return bytes(piece_of(message.receive.scatter, 0, message.length))

    def take_back(self, record: dict[str, int]) -> None:
        self._expected, self._carried_out = record["expected"], record["carried_out"]
        self._completed, self._reported_gap = record["completed"], bool(record["reported_gap"])
        if record["owes_ack"]:
            self._queue(_Answer(self._carried_out, ACK_NO_CREDITS))

    # --- what comes ---

    def handle(self, packet: Packet) -> Outcome:
        """Takes a request in; what the queue pair has to do about it."""
        psn = packet.bth.psn
        distance = ahead(psn, self._expected)
        if distance > 0:
            if not self._reported_gap:  # IBTA 9.7.4.1.2: one NAK for a gap
                self._reported_gap = True
                self._queue(_Answer(self._expected, Nak.SEQUENCE.value))
            return None
        if distance < 0:
            self._repeat(packet)
            return None
        self._reported_gap = False
        op = packet.bth.opcode
        broken = self._out_of_sequence(op) or self._wrong_length(op, len(packet.payload), packet.bth.pad)
        if broken is not None:
            return self._refuse(psn, Nak.INVALID_REQUEST, broken, EventKind.QP_REQUEST_ERROR)
        if op is Op.READ_REQUEST:
            return self._take_read(packet)
        if op in _ATOMICS:
            return self._take_atomic(packet)
        outcome = self._take_send(packet) if op in SENDS else self._take_write(packet)
        if not isinstance(outcome, Refused) and packet.bth.ack_req and self._carried_out == psn:
            self._queue(_Answer(psn, ACK_NO_CREDITS))
        return outcome

    def _out_of_sequence(self, op: Op) -> str | None:
        """IBTA 9.7.4.1.3: packets of one message follow each other, and nothing comes between them."""
        if self._message is None:
            fits = op in _ANSWERED or (op in STARTS and op in SENDS | WRITES)
        else:
            fits = op not in STARTS and op in (SENDS if isinstance(self._message, _Sending) else WRITES)
        return None if fits else f"{op.name} was not due"

    def _wrong_length(self, op: Op, size: int, pad: int) -> str | None:
        """IBTA 9.7.4.1.6: what a packet of this opcode carries."""
        mtu = self._path.mtu
        if op in _FULL:
            right = size == mtu and not pad
        elif op in _ANSWERED:
            right = not size and not pad
        else:
            right = (1 if op in _LASTS else 0) <= size <= mtu and pad == -size % 4
        return None if right else f"{op.name} of {size} bytes and {pad} of padding, path MTU {mtu}"

    def _take_send(self, packet: Packet) -> Outcome:
        op, psn, payload = packet.bth.opcode, packet.bth.psn, packet.payload
        host = self._host
        message = self._message
        receive = message.receive if isinstance(message, _Sending) else host.next_receive()
        if receive is None:
            return self._not_ready(psn)
        length = message.length if isinstance(message, _Sending) else 0
        if message is None:
            host.take_receive()
            self._message = message = _Sending(receive)
        if length + len(payload) > sum(map(len, receive.scatter)):
            why = "a message is longer than the receive posted for it"
            return self._refuse(psn, Nak.INVALID_REQUEST, why, None, Status.LOCAL_LENGTH_ERROR)
        ieth = packet.find(Ieth)
        revoked = None if ieth is None else host.may_be_invalidated(ieth.rkey)
        if isinstance(revoked, AccessRefusal):
            why = f"a message was to void a key that it may not: {revoked.name}"
            return self._refuse(psn, Nak.REMOTE_ACCESS, why, EventKind.QP_ACCESS_ERROR)
        if not host.may_receive(receive.scatter) or not place(receive.scatter, length, payload):
            why = "a posted receive lies in no region"
            return self._refuse(psn, Nak.REMOTE_OPERATION, why, None, Status.LOCAL_PROTECTION_ERROR)
        assert isinstance(message, _Sending)
        message.length = length + len(payload)
        self._carry_out(psn)
        if op not in ENDS:
            return None
        if revoked is not None:
            revoked.invalidate()
        return self._deliver(packet, receive, message.length, None if ieth is None else RKey(ieth.rkey))

    def _take_write(self, packet: Packet) -> Outcome:
        op, psn, payload = packet.bth.opcode, packet.bth.psn, packet.payload
        host = self._host
        if not host.remote_access & REMOTE_WRITE:
            why = "the other end may not write on this queue pair"
            return self._refuse(psn, Nak.INVALID_REQUEST, why, EventKind.QP_REQUEST_ERROR)
        message = self._message
        if not isinstance(message, _Writing):
            reth = packet.find(Reth)
            assert reth is not None  # the opcode has one
            message = _Writing(reth.va, reth.rkey, reth.length)
        left = message.length - message.placed
        if len(payload) > left or (op in ENDS) != (len(payload) == left) or message.length > _LENGTH_MAX:
            why = f"{op.name} of {len(payload)} bytes, where {left} are left"
            return self._refuse(psn, Nak.INVALID_REQUEST, why, EventKind.QP_REQUEST_ERROR)
        granted = self._room(message, len(payload))
        if isinstance(granted, AccessRefusal):
            why = f"the other end named memory that it may not use so: {granted.name}"
            return self._refuse(psn, Nak.REMOTE_ACCESS, why, EventKind.QP_ACCESS_ERROR)
        immediate = packet.find(ImmDt)
        receive = None
        if immediate is not None and (receive := host.next_receive()) is None:
            return self._not_ready(psn)
        if not place((granted,), 0, payload):
            return self._refuse(psn, Nak.REMOTE_OPERATION, "memory cannot be written", EventKind.QP_FATAL)
        message.placed += len(payload)
        self._message = message
        self._carry_out(psn)
        if op not in ENDS:
            return None
        if receive is None:
            self._finish()
            return None
        host.take_receive()
        return self._deliver(packet, receive, message.length, None)

    def _room(self, message: _Writing, size: int) -> memoryview | AccessRefusal:
        """Where a packet's bytes go: all of the message is checked before its first byte, and each packet again."""
        if not message.placed:
            whole = self._host.grant(message.rkey, message.va, message.length, REMOTE_WRITE)
            if isinstance(whole, AccessRefusal):
                return whole
        return self._host.grant(message.rkey, message.va + message.placed, size, REMOTE_WRITE)

    def _take_read(self, packet: Packet) -> Outcome:
        psn, reth = packet.bth.psn, packet.find(Reth)
        assert reth is not None  # the opcode has one
        if not self._host.remote_access & REMOTE_READ or not self._resources or reth.length > _LENGTH_MAX:
            why = f"an RDMA Read of {reth.length} bytes, which the other end may not make on this queue pair"
            return self._refuse(psn, Nak.INVALID_REQUEST, why, EventKind.QP_REQUEST_ERROR)
        granted = self._host.grant(reth.rkey, reth.va, reth.length, REMOTE_READ)
        if isinstance(granted, AccessRefusal):
            why = f"the other end named memory that it may not use so: {granted.name}"
            return self._refuse(psn, Nak.REMOTE_ACCESS, why, EventKind.QP_ACCESS_ERROR)
        read = _Read(psn, reth.va, reth.rkey, reth.length, packets_of(reth.length, self._path.mtu))
        self._answer_by(read, after(psn, read.count))
        return None

    def _take_atomic(self, packet: Packet) -> Outcome:
        psn, operands = packet.bth.psn, packet.find(AtomicEth)
        assert operands is not None  # the opcode has them
        if not self._host.remote_access & REMOTE_ATOMIC or not self._resources:
            why = "an atomic operation, which the other end may not ask for on this queue pair"
            return self._refuse(psn, Nak.INVALID_REQUEST, why, EventKind.QP_REQUEST_ERROR)
        if operands.va % ATOMIC_LEN:  # IBTA 9.4.5
            why = f"an atomic operation at {operands.va:#x}, which is not a multiple of {ATOMIC_LEN}"
            return self._refuse(psn, Nak.INVALID_REQUEST, why, EventKind.QP_REQUEST_ERROR)
        granted = self._host.grant(operands.rkey, operands.va, ATOMIC_LEN, REMOTE_ATOMIC)
        if isinstance(granted, AccessRefusal):
            why = f"the other end named memory that it may not use so: {granted.name}"
            return self._refuse(psn, Nak.REMOTE_ACCESS, why, EventKind.QP_ACCESS_ERROR)
        original = int.from_bytes(granted, sys.byteorder)
        if packet.bth.opcode is Op.FETCH_ADD:
            new = original + operands.swap_or_add & _ATOMIC_MASK
        else:
            new = operands.swap_or_add if original == operands.compare else original
        if not place((granted,), 0, new.to_bytes(ATOMIC_LEN, sys.byteorder)):
            return self._refuse(psn, Nak.REMOTE_OPERATION, "memory cannot be written", EventKind.QP_FATAL)
        self._answer_by(_Operated(psn, packet.bth.opcode, operands, original), after(psn, 1))
        return None

    def _answer_by(self, answer: _Read | _Operated, expected: int) -> None:
        """It was asked for the first time; the number that comes next."""
        waiting = [each for each in self._answers if not isinstance(each, _Answer)]
        if len(waiting) >= self._resources:
            # Who keeps to the depth that was agreed has the oldest answer already, and it is a repeated one.
            self._answers.remove(waiting[0])
        self._fetches.append(answer)
        self._queue(answer)
        self._expected = expected
        self._finish()

    def _repeat(self, packet: Packet) -> None:
        """Carried out before (IBTA 9.7.4.2, 9.7.5.1.6)."""
        psn = packet.bth.psn
        if packet.bth.opcode in _ATOMICS:
            self._operated_before(packet)
            return
        if packet.bth.opcode is not Op.READ_REQUEST:
            # The number of a Read's answer would tell that the answer was lost.
            self._queue(_Answer(self._carried_out, ACK_NO_CREDITS))
            return
        reth = packet.find(Reth)
        assert reth is not None  # the opcode has one
        for read in self._fetches:
            if not isinstance(read, _Read):
                continue
            skipped = ahead(psn, read.psn)
            begin = skipped * self._path.mtu
            if not 0 <= skipped < read.count or reth.rkey != read.rkey or reth.va != read.va + begin:
                continue
            # A request that comes late is dropped: its answer is there, and its memory may be the other end's no more.
            granted = self._host.grant(reth.rkey, reth.va, reth.length, REMOTE_READ)
            if begin + reth.length <= read.length and not isinstance(granted, AccessRefusal):
                self._answer_again(_Read(psn, reth.va, reth.rkey, reth.length, packets_of(reth.length, self._path.mtu)))
            return

    def _operated_before(self, packet: Packet) -> None:
        """What is not known any more, or is another operation, is dropped (IBTA 9.7.5.1.6)."""
        asked = packet.bth.psn, packet.bth.opcode, packet.find(AtomicEth)
        for each in self._fetches:
            known = isinstance(each, _Operated) and (each.psn, each.op, each.operands) == asked
            if known and each not in self._answers:  # else its answer is on its way
                self._queue(each)

    def _answer_again(self, read: _Read) -> None:
        for at, each in enumerate(self._answers):
            if isinstance(each, _Read) and 0 <= (skipped := ahead(read.psn, each.psn)) < each.count:
                if each.sent > skipped:  # else it is on its way
                    self._answers[at] = read
                return
        self._queue(read)

    # --- what goes out ---

    def poll(self) -> Packet | None:
        """The next answer. `refused` is set if memory is not the other end's any more."""
        if not self._answers:
            return None
        answer = self._answers[0]
        if isinstance(answer, _Answer):
            self._answers.popleft()
            return self._packet(Op.ACK, answer.psn, answer.syndrome)
        if isinstance(answer, _Operated):
            self._answers.popleft()
            return self._packet(Op.ATOMIC_ACK, answer.psn, ACK_NO_CREDITS, more=(AtomicAckEth(answer.original),))
        begin, psn = answer.sent * self._path.mtu, after(answer.psn, answer.sent)
        size = min(self._path.mtu, answer.length - begin)
        granted = self._host.grant(answer.rkey, answer.va + begin, size, REMOTE_READ)
        if isinstance(granted, AccessRefusal):
            self._answers.clear()
            why = f"memory was taken back while it was read: {granted.name}"
            self.refused = self._refuse(psn, Nak.REMOTE_ACCESS, why, EventKind.QP_ACCESS_ERROR)
            return self.poll()
        op = _READ_OPS[0 if not answer.sent else 1]
        answer.sent += 1
        if answer.sent == answer.count:
            self._answers.popleft()
            op = _READ_OPS[3 if answer.count == 1 else 2]
        return self._packet(op, psn, ACK_NO_CREDITS, granted)

    def _packet(
        self, op: Op, psn: int, syndrome: int, payload: memoryview | bytes = b"", more: tuple[Extension, ...] = ()
    ) -> Packet:
        bth = Bth(op, self._path.remote_qp, psn, pad=-len(payload) % 4)
        extensions = () if op is Op.READ_RESPONSE_MIDDLE else (Aeth.of(syndrome, self._completed), *more)
        return Packet(bth, extensions, payload)

    # --- what follows ---

    def _carry_out(self, psn: int) -> None:
        self._carried_out = psn
        self._expected = after(psn, 1)

    def _finish(self) -> None:
        self._message = None
        self._completed = after(self._completed, 1)

    def _deliver(self, packet: Packet, receive: Receive, length: int, invalidated: RKey | None) -> Delivered:
        self._finish()
        immediate = packet.find(ImmDt)
        return Delivered(
            receive, length, packet.bth.solicited, invalidated, None if immediate is None else immediate.data
        )

    def _not_ready(self, psn: int) -> Outcome:
        """IBTA 9.7.5.2.8: nothing was done, and what is behind it is dropped without a word until it comes again."""
        self._reported_gap = True
        self._queue(_Answer(psn, _RNR_NAK | self._path.rnr_timer_code))
        return None

    def _refuse(
        self, psn: int, nak: Nak, why: str, event: EventKind | None, status: Status = Status.SUCCESS
    ) -> Refused:
        receive = None
        if status is not Status.SUCCESS:
            receive = self.give_up()
        self._last_word = _Answer(psn, nak.value)
        self._queue(self._last_word)
        return Refused(nak, why, event, receive, status)

    def _queue(self, answer: _Answer | _Read | _Operated) -> None:
        """In the order of numbers; an acknowledgement takes the place of the one before it, or after it."""
        answers = self._answers
        if len(answers) >= limits.ROCE_ANSWERS_MAX:
            return
        at = len(answers)
        while at and ahead(answers[at - 1].psn, answer.psn) > 0:
            at -= 1
        before = answers[at - 1] if at else None
        if isinstance(answer, _Answer) and isinstance(before, _Answer):
            if before.psn == answer.psn and before.syndrome == answer.syndrome:
                return
            if before.syndrome == answer.syndrome == ACK_NO_CREDITS:
                answers[at - 1] = answer
                return
        behind = answers[at] if at < len(answers) else None
        if isinstance(answer, _Answer) and answer.syndrome == ACK_NO_CREDITS and isinstance(behind, _Answer):
            return  # which tells of this one as well
        answers.insert(at, answer)
