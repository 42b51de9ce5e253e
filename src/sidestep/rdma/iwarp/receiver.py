"""The receiving half of an RDMAP stream: every check before a byte is placed, placement, and delivery in order.

What arrives comes as runs (`sidestep.native._framing.Run`): consecutive segments of one message that continue each
other. A run is first *placed*, if it may be, and then *delivered*: on a TCP stream nothing comes ahead of its turn.

No I/O here. The queue pair is told what came of it by calls. After a fault nothing more is
looked at: the first one in the order of the stream counts (RFC 5040 7.1).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sidestep.rdma.iwarp.ddp import QUEUE_READ, QUEUE_SEND, QUEUE_TERMINATE, ReadRequest
from sidestep.rdma.iwarp.terminate import Condition, Includes, Terminate
from sidestep.rdma.soft.memory import AccessRefusal
from sidestep.rdma.work import Access, RKey, Status

if TYPE_CHECKING:
    from sidestep.native._framing import Inbound, Run
    from sidestep.rdma.iwarp.counting import StreamTally
    from sidestep.rdma.iwarp.qp import IwarpQueuePair
    from sidestep.rdma.work import Receive, Scatter, SendRequest

_WRITE: Final = 0
_READ_REQUEST: Final = 1
_READ_RESPONSE: Final = 2
_SEND: Final = 3
_SEND_INV: Final = 4
_SEND_SE: Final = 5
_SEND_SE_INV: Final = 6
_TERMINATE: Final = 7
_INVALIDATES: Final = frozenset({_SEND_INV, _SEND_SE_INV})
_REMOTE_WRITE: Final = int(Access.REMOTE_WRITE)
_REMOTE_READ: Final = int(Access.REMOTE_READ)
_TAGGED: Final = 0x80  # in DDP's control octet
_MSN: Final = 0xFFFF_FFFF
_VERSION: Final = 0x40  # RDMAP's, where it stands in its control octet
_QUEUES: Final = {_READ_REQUEST: QUEUE_READ, _TERMINATE: QUEUE_TERMINATE}  # Sends: QUEUE_SEND

_WRITE_REFUSED: Final = {
    AccessRefusal.INVALID_STAG: Condition.TAGGED_STAG,
    AccessRefusal.NOT_ASSOCIATED: Condition.TAGGED_OTHER_STREAM,
    AccessRefusal.ACCESS: Condition.TAGGED_RIGHTS,
    AccessRefusal.WRAP: Condition.TAGGED_WRAP,
    AccessRefusal.BOUNDS: Condition.TAGGED_BOUNDS,
}
_FRAMING_FAULTS: Final = {"short": Condition.SEGMENT_SIZE, "crc": Condition.CRC, "marker": Condition.MARKER}
READ_REFUSED: Final = {
    AccessRefusal.INVALID_STAG: Condition.READ_STAG,
    AccessRefusal.NOT_ASSOCIATED: Condition.READ_OTHER_STREAM,
    AccessRefusal.ACCESS: Condition.READ_RIGHTS,
    AccessRefusal.WRAP: Condition.READ_WRAP,
    AccessRefusal.BOUNDS: Condition.READ_BOUNDS,
}


@dataclass(slots=True)
class Fault:
    """What the other end did wrong, and what a Terminate tells of it."""

    condition: Condition
    header: bytes = b""  # DDP's, of the segment
    segment_len: int = 0  # bytes of it, the header included
    read: bytes = b""  # what a Read Request asked for
    answered: int = 0  # bytes of that which were sent
    receive: Receive | None = None  # the one that it happened to
    status: Status = Status.FLUSHED  # how that one ends

    @property
    def message(self) -> Terminate:
        code, includes = self.condition.code, self.condition.includes
        if includes is Includes.READ and self.read:
            return Terminate.about(self.condition, self.header + self.read, answered=self.answered)
        if includes is Includes.NOTHING or not self.header:
            return Terminate(code)
        return Terminate(code, self.segment_len, self.header)


@dataclass(slots=True)
class Begun:
    """A request that has left the send queue, until it is completed."""

    request: SendRequest | None  # None: the device's own
    byte_len: int = 0
    done: bool = False
    status: Status = Status.SUCCESS


@dataclass(slots=True)
class Outstanding:
    """An RDMA Read of ours whose response is awaited."""

    begun: Begun  # the request
    scatter: Scatter
    sink_stag: int
    sink_to: int
    length: int  # bytes
    arrived: int = 0  # bytes delivered


@dataclass(slots=True)
class _Message:
    """A Send family message that takes up a receive."""

    receive: Receive
    capacity: int  # bytes
    delivered: int = 0  # bytes


class Receiver:
    """One stream's."""

    __slots__ = (
        "_heard", "_message", "_next", "_open", "_owner", "_read_msn", "_reads", "_send_msn", "_stopped", "_tally",
        "_terminate_msn", "fault", "may_read", "may_write", "run_count",
    )  # fmt: skip

    def __init__(
        self, owner: IwarpQueuePair, remote_access: int, reads: deque[Outstanding], tally: StreamTally
    ) -> None:
        self._owner = owner
        self._tally = tally  # of what is good
        self._reads = reads  # in the order of their requests
        self.may_read = bool(remote_access & _REMOTE_READ)
        self.may_write = bool(remote_access & _REMOTE_WRITE)
        self._send_msn = self._read_msn = self._terminate_msn = 1  # RFC 5041 4.3
        self._message: _Message | None = None  # number `_send_msn`, once something of it has arrived
        self._open: int | None = None  # opcode of a tagged message that has begun
        self._next: tuple[int, int] | None = None  # its STag and next TO, once a byte of it has come
        self._heard = self._stopped = False
        self.fault: Fault | None = None
        self.run_count = 0  # those that came in order

    @property
    def heard(self) -> bool:
        """Whether the other end has sent anything good."""
        return self._heard

    @property
    def amid_message(self) -> bool:
        """Whether the last segment of a message that has begun is still to come."""
        return self._message is not None or self._open is not None

    def give_up(self) -> list[Receive]:
        """Takes nothing any more; the the receive of a message that is not complete."""
        self._stopped = True
        message, self._message = self._message, None
        return [] if message is None else [message.receive]

    def lend(self, record: dict[str, int]) -> bool:
        """Whether no message has begun; then the record has the number of the next Send."""
        record["rx_msn"] = self._send_msn
        return self._heard and not (self.amid_message or self._stopped or self.fault)

    def take_back(self, record: dict[str, int]) -> None:
        self._send_msn = record["rx_msn"]
        self._tally.messages_received[_SEND] += record["messages_received"]
        self._tally.bytes_received[_SEND] += record["wire_received"]

    def take_all(self, inbound: Inbound) -> Fault | None:
        if self.fault is not None or self._stopped:
            return self.fault
        for run in inbound.parse():
            self.run_count += 1
            if (fault := self.take(inbound, run)) is None:
                self._count(run)
            if fault is not None or self._stopped:
                return fault
        if inbound.fault is not None:
            self.fault = Fault(_FRAMING_FAULTS[inbound.fault])
        return self.fault

    def _count(self, run: Run) -> None:
        tally, opcode = self._tally, run.rdmap & 0xF
        tally.bytes_received[opcode] += run.length
        tally.segments_received += run.segments
        if run.last:
            tally.messages_received[opcode] += 1

    def take(self, source: Inbound, run: Run) -> Fault | None:
        if self.fault is None and not self._stopped:
            self.fault = self._check_turn(source, run) or self._place(source, run) or self._deliver(source, run)
        return self.fault

    # --- what can be said of a run in its turn, before a byte of it is placed ---

    def _check_turn(self, source: Inbound, run: Run) -> Fault | None:
        if (condition := _malformed(run)) is not None:
            return _fault(condition, source, run)
        opcode = run.rdmap & 0xF
        if not self._heard and opcode != _TERMINATE:
            self._heard = True
            self._owner.heard()
        if run.control & _TAGGED:
            if (condition := self._continues(run, opcode)) is not None:
                return _fault(condition, source, run)
            return self._check_response(source, run) if opcode == _READ_RESPONSE else None
        if opcode == _READ_REQUEST:
            expected = self._read_msn
        else:
            expected = self._terminate_msn if opcode == _TERMINATE else self._send_msn
        if run.msn != expected:
            return _fault(Condition.MSN_UNEXPECTED, source, run)
        if run.queue == QUEUE_SEND and run.offset != (self._message.delivered if self._message is not None else 0):
            return _fault(Condition.MESSAGE_OFFSET, source, run)
        return None

    def _continues(self, run: Run, opcode: int) -> Condition | None:
        """A tagged message ends before another begins, and has no gaps (an ordered stream shows them)."""
        if self._open is not None and self._open != opcode:
            return Condition.OPCODE_UNKNOWN
        if run.length and self._next is not None:  # a segment of nothing names neither (RFC 5041 5.2)
            stag, to = self._next
            if stag != run.stag:
                return Condition.TAGGED_STAG_CHANGED
            if to != run.offset:
                return Condition.TAGGED_GAP
        if run.last:
            self._open = self._next = None
            return None
        self._open = opcode
        if run.length:
            self._next = run.stag, run.offset + run.length
        return None

    def _check_response(self, source: Inbound, run: Run) -> Fault | None:
        """It answers the oldest RDMA Read, in order, and ends where that ends."""
        if not self._reads:
            return _fault(Condition.RESPONSE_UNASKED, source, run)
        read = self._reads[0]
        if run.stag != read.sink_stag:
            return _fault(Condition.RESPONSE_STAG, source, run)
        if run.offset != read.sink_to + read.arrived:
            return _fault(Condition.RESPONSE_OFFSET, source, run)
        arrived = read.arrived + run.length
        if arrived <= read.length and run.last != (arrived == read.length):
            return _fault(Condition.RESPONSE_LENGTH, source, run, -1)
        return None

    # --- placing ---

    def _place(self, source: Inbound, run: Run) -> Fault | None:
        """Checks where the bytes of a run belong, and puts them there; nothing of a segment that fails is placed."""
        opcode = run.rdmap & 0xF
        if opcode == _WRITE:
            return self._place_write(source, run) if run.length else None
        if opcode == _READ_RESPONSE:
            return self._place_response(source, run) if run.length else None
        return self._place_send(source, run) if run.queue == QUEUE_SEND else None

    def _place_write(self, source: Inbound, run: Run) -> Fault | None:
        if not self.may_write:
            return _fault(Condition.TAGGED_RIGHTS, source, run)
        room = self._owner.grant(run.stag, run.offset, run.length, _REMOTE_WRITE)
        if not isinstance(room, AccessRefusal):
            source.place(run, 0, (room,), 0, run.length)
            return None
        # Segment by segment: those before the one that is refused are good.
        begun = 0
        for index, (header, size) in enumerate(source.segments(run)):
            length = size - len(header)
            if not length:
                continue  # of nothing neither key nor address is looked at (RFC 5041 5.2)
            room = self._owner.grant(run.stag, run.offset + begun, length, _REMOTE_WRITE)
            if isinstance(room, AccessRefusal):
                return _fault(_WRITE_REFUSED[room], source, run, index)
            source.place(run, begun, (room,), 0, length)
            begun += length
        raise AssertionError("all segments of a refused run were granted")

    def _place_response(self, source: Inbound, run: Run) -> Fault | None:
        read = self._reads[0]
        begun = run.offset - read.sink_to
        if begun >= read.length:  # it starts where the Read goes on, so the Read is complete
            return _fault(Condition.RESPONSE_LENGTH, source, run)
        if begun + run.length > read.length:
            index = _segment_beyond(source, run, read.length - begun)
            return _fault(Condition.RESPONSE_LENGTH, source, run, index)
        if not self._owner.may_sink(read.scatter):  # it may have been taken back meanwhile
            return _fault(Condition.RESPONSE_STAG, source, run)
        source.place(run, 0, read.scatter, begun, run.length)
        return None

    def _place_send(self, source: Inbound, run: Run) -> Fault | None:
        owner, message = self._owner, self._message
        if message is None:
            if not owner.receives_left:
                return _fault(Condition.NO_RECEIVE, source, run)
            receive = owner.take_receive()
            self._message = message = _Message(receive, sum(map(len, receive.scatter)))
        if not owner.may_receive(message.receive.scatter):  # for every segment: it may be taken back meanwhile
            fault = _fault(Condition.RECEIVE_UNUSABLE, source, run)
            fault.receive, fault.status = message.receive, Status.LOCAL_PROTECTION_ERROR
            return fault
        voids = run.last and run.rdmap & 0xF in _INVALIDATES  # RFC 5040 7.2: with all other checks
        if voids and (condition := owner.invalidate(run.stag, only_check=True)) is not None:
            return _fault(condition, source, run, -1)
        room = message.capacity - run.offset
        if run.length > room:
            outside = room < 0
            condition = Condition.MESSAGE_OFFSET if outside else Condition.MESSAGE_TOO_LONG
            fault = _fault(condition, source, run, 0 if outside else _segment_beyond(source, run, room))
            fault.receive, fault.status = message.receive, Status.LOCAL_LENGTH_ERROR
            return fault
        if run.length:
            source.place(run, 0, message.receive.scatter, run.offset, run.length)
        return None

    # --- delivering ---

    def _deliver(self, source: Inbound, run: Run) -> Fault | None:
        """What a run means now that everything before it has been delivered."""
        opcode = run.rdmap & 0xF
        if opcode == _WRITE:
            return None
        if opcode == _READ_RESPONSE:
            self._reads[0].arrived += run.length
            if run.last:
                self._owner.read_done()
            return None
        if run.queue == QUEUE_SEND:
            return self._deliver_send(source, run, opcode)
        if run.segments > 1 or not run.last:
            return _fault(Condition.NOT_LAST, source, run)
        if opcode == _READ_REQUEST:
            return self._deliver_request(source, run)
        self._terminate_msn += 1
        self._owner.terminated(source.payload(run))
        return None

    def _deliver_request(self, source: Inbound, run: Run) -> Fault | None:
        if run.offset or run.length != ReadRequest.LENGTH:
            return _fault(Condition.READ_REQUEST_MALFORMED, source, run)
        content = source.payload(run)
        request = ReadRequest.decode(content)
        condition = None
        if not request.length:
            pass  # neither key nor right of nothing is looked at (RFC 5040 5.2.1); it may say "ready to receive"
        elif not self.may_read:
            condition = Condition.READS_DISABLED
        else:
            granted = self._owner.grant(request.source_stag, request.source_offset, request.length, _REMOTE_READ)
            if isinstance(granted, AccessRefusal):
                condition = READ_REFUSED[granted]
        header = source.segments(run)[0][0]
        if condition is None and not self._owner.respond(request, header):
            condition = Condition.READS_TOO_MANY
        if condition is not None:
            return Fault(condition, header, len(header) + len(content), content)
        self._read_msn = (self._read_msn + 1) & _MSN
        return None

    def _deliver_send(self, source: Inbound, run: Run, opcode: int) -> Fault | None:
        message = self._message
        assert message is not None  # placed before
        message.delivered += run.length
        if not run.last:
            return None
        invalidated = None
        if opcode in _INVALIDATES:
            if (condition := self._owner.invalidate(run.stag)) is not None:
                return _fault(condition, source, run, -1)
            invalidated = RKey(run.stag)
        self._message = None
        self._send_msn = (self._send_msn + 1) & _MSN
        self._owner.received(message.receive, message.delivered, opcode in (_SEND_SE, _SEND_SE_INV), invalidated)
        return None


def _malformed(run: Run) -> Condition | None:
    control, rdmap = run.control, run.rdmap
    tagged = bool(control & _TAGGED)
    if control & 3 != 1:
        return Condition.DDP_VERSION_TAGGED if tagged else Condition.DDP_VERSION_UNTAGGED
    if rdmap & 0xC0 != _VERSION:
        return Condition.RDMAP_VERSION
    opcode = rdmap & 0xF
    if opcode > _TERMINATE:
        return Condition.OPCODE_UNKNOWN
    if tagged != (opcode in (_WRITE, _READ_RESPONSE)):
        return Condition.OPCODE_TAGGED
    if not tagged and run.queue != _QUEUES.get(opcode, QUEUE_SEND):
        return Condition.QUEUE_NUMBER
    return None


def _segment_beyond(source: Inbound, run: Run, room: int) -> int:
    """The index of the first segment that ends more than `room` bytes behind the start of its run; there is one."""
    end = 0
    for index, (header, size) in enumerate(source.segments(run)):
        end += size - len(header)
        if end > room:
            return index
    raise AssertionError("the run fits")


def _fault(condition: Condition, source: Inbound, run: Run, index: int = 0) -> Fault:
    header, size = source.segments(run)[index]
    return Fault(condition, header, size)
