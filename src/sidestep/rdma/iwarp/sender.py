"""The sending half of an RDMAP stream: which message goes next, in which pieces, and when a request is done.

Messages are framed whole, one after the other (segments of two messages are never mixed), but a long one in pieces of
`CHUNK`, as the transport takes them: so little is framed ahead that memory is soon its owner's again, and that an
answer to an RDMA Read is looked at again before each piece. Requests of this end and answers to the other end's RDMA
Reads take turns.

No I/O here: messages go into an `Outbound`, and `written` is called when the transport has taken something of it.

- A Send or Write is done when TCP has all of it, an RDMA Read when its response was delivered; requests complete in the
  order of posting (RFC 5040 5.5, rules 9, 15, 19).
- No more Reads are under way than agreed: the queue stands still meanwhile (the verbs draft for iWARP 8.2.2).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sidestep.rdma.iwarp.counting import StreamTally
from sidestep.rdma.iwarp.ddp import QUEUE_READ, QUEUE_SEND, RdmapOp, ReadRequest
from sidestep.rdma.iwarp.receiver import READ_REFUSED, Begun, Fault, Outstanding
from sidestep.rdma.soft.memory import AccessRefusal
from sidestep.rdma.work import Access, RdmaRead, RdmaWrite, Send, Status

if TYPE_CHECKING:
    from sidestep.native._framing import Outbound
    from sidestep.rdma.iwarp.qp import IwarpQueuePair
    from sidestep.rdma.work import Gather, SendRequest

CHUNK: Final = 256 << 10  # bytes of a message that are framed at a time
WAITING_MAX: Final = 512 << 10  # bytes framed and not yet taken by the transport; then nothing more is framed
_VERSION: Final = 0x40  # RDMAP's, in its control octet
_SEND: Final = _VERSION | RdmapOp.SEND
_SEND_SE: Final = _VERSION | RdmapOp.SEND_SE
_SEND_INV: Final = _VERSION | RdmapOp.SEND_INV
_SEND_SE_INV: Final = _VERSION | RdmapOp.SEND_SE_INV
_WRITE: Final = _VERSION | RdmapOp.WRITE
_READ_REQUEST: Final = _VERSION | RdmapOp.READ_REQUEST
_READ_RESPONSE: Final = _VERSION | RdmapOp.READ_RESPONSE
_REMOTE_READ: Final = int(Access.REMOTE_READ)
_MSN: Final = 0xFFFF_FFFF
_TO: Final = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(slots=True)
class _Message:
    """What is being framed."""

    rdmap: int
    tagged: bool
    stag: int  # or the one to be invalidated
    base: int  # tagged: TO of its first byte; else its MSN
    gather: Gather
    length: int  # bytes
    begun: Begun | None  # None: an answer
    answers: ReadRequest | None = None
    header: bytes = b""  # DDP's, of what it answers
    framed: int = 0  # bytes


class Sender:
    """One stream's."""

    __slots__ = (
        "_answers", "_begun", "_current", "_failing", "_outbound", "_owner", "_read_msn", "_send_msn", "_sink_to",
        "_turn_of_answers", "_unwritten", "depth", "held", "reads", "requests", "resources", "sink_stag", "tally",
    )  # fmt: skip

    def __init__(self, outbound: Outbound, owner: IwarpQueuePair, sink_stag: int) -> None:
        self._outbound = outbound
        self._owner = owner
        self.held = True  # a responder waits for the first message of the other end (RFC 5044 7.1.2, rule 4)
        self.depth = 0  # RDMA Reads of this end that may be under way (ORD)
        self.resources = 0  # those of the other end (IRD)
        self.sink_stag = sink_stag  # names nothing but where responses go
        self.requests: deque[SendRequest] = deque()  # not begun
        self.reads: deque[Outstanding] = deque()
        self._begun: deque[Begun] = deque()
        self._unwritten: deque[tuple[int, Begun]] = deque()  # with the position at which each is written whole
        self._answers: deque[tuple[ReadRequest, bytes]] = deque()
        self._current: _Message | None = None
        self._turn_of_answers = False
        self._failing = False  # a request cannot be carried out, and those before it are not done yet
        self._send_msn = self._read_msn = 1  # RFC 5041 4.3
        self._sink_to = 0
        self.tally = StreamTally()

    @property
    def outstanding(self) -> int:
        return len(self.requests) + len(self._begun)

    @property
    def idle(self) -> bool:
        """Whether nothing of either end is left to be done here."""
        return not self.requests and not self._begun and not self._answers and self._current is None

    # --- what makes it go on ---

    def pump(self) -> None:
        outbound = self._outbound
        while not self.held and not self._failing and outbound.waiting < WAITING_MAX:
            message = self._current
            if message is None:
                if not self._next():
                    return
                message = self._current
                if message is None:
                    continue  # it needed nothing of the wire
            self._frame(message)

    def written(self) -> None:
        unwritten = self._unwritten
        position = self._outbound.written
        while unwritten and unwritten[0][0] <= position:
            unwritten.popleft()[1].done = True
        self._settle()

    def ready_to_receive(self, read: bool) -> None:
        """The first message of an initiator, without a byte: an RDMA Write, or a Read (RFC 6581 9)."""
        if not read:
            self._outbound.tagged(_WRITE, self.sink_stag, 0, (), 0, 0, True)
            self.tally.messages_sent[RdmapOp.WRITE] += 1
            return
        self.reads.append(Outstanding(Begun(None), (), self.sink_stag, 0, 0))
        asked = ReadRequest(self.sink_stag, 0, 0, self.sink_stag, 0).encode()
        self._ask(asked)

    def nudge(self) -> None:
        """An RDMA Write without a byte, which means nothing to anybody (RFC 5041 5.2), unless there is more to send."""
        if self._current is None and not self.held:
            self.ready_to_receive(read=False)

    def read_done(self) -> None:
        read = self.reads.popleft()
        read.begun.done = True
        self._settle()

    def respond(self, request: ReadRequest, header: bytes) -> bool:
        """Queues an answer; False if the other end has more Reads under way than agreed."""
        under_way = len(self._answers) + (self._current is not None and self._current.answers is not None)
        if under_way >= self.resources:
            return False
        self._answers.append((request, header))
        return True

    def take_unfinished(self) -> list[SendRequest]:
        """Takes out all requests that are not completed, in the order of posting."""
        unfinished = [each.request for each in self._begun if each.request is not None] + list(self.requests)
        self._begun.clear()
        self._unwritten.clear()
        self.requests.clear()
        self.reads.clear()
        self._answers.clear()
        self._current = None
        self.held = True
        return unfinished

    # --- lending it to the engine ---

    def lend(self, record: dict[str, int]) -> bool:
        """Whether nothing of either end is under way; then the record has its number of the next Send."""
        if self.held or self._failing or not self.idle or self.reads:
            return False
        record["tx_msn"] = self._send_msn
        return True

    def take_back(self, record: dict[str, int]) -> None:
        self._send_msn = record["tx_msn"]
        self.tally.messages_sent[RdmapOp.SEND] += record["messages_sent"]
        self.tally.bytes_sent[RdmapOp.SEND] += record["wire_sent"]

    # --- choosing ---

    def _next(self) -> bool:
        """Begins something; False if nothing can begin."""
        first, second = self._begin_request, self._begin_answer
        if self._turn_of_answers:
            first, second = second, first
        return first() or second()

    def _begin_answer(self) -> bool:
        if not self._answers:
            return False
        request, header = self._answers.popleft()
        self._turn_of_answers = False
        self._current = _Message(
            _READ_RESPONSE, True, request.sink_stag, request.sink_offset, (), request.length, None, request, header
        )
        return True

    def _begin_request(self) -> bool:
        if not self.requests:
            return False
        request = self.requests[0]
        if request.fence and (self.reads or (not isinstance(request, Send | RdmaWrite | RdmaRead) and self._begun)):
            return False
        if isinstance(request, RdmaRead) and self.depth and len(self.reads) >= self.depth:
            return False
        self.requests.popleft()
        self._turn_of_answers = True
        begun = Begun(request)
        self._begun.append(begun)
        if (status := self._owner.begin(request)) is not Status.SUCCESS:
            self._fail(begun, status)
        elif isinstance(request, Send):
            self._begin_send(request, begun)
        elif isinstance(request, RdmaWrite):
            length = sum(map(len, request.gather))
            self._current = _Message(_WRITE, True, request.rkey, request.remote_va, request.gather, length, begun)
        elif isinstance(request, RdmaRead):
            self._begin_read(request, begun)
        else:
            begun.done = True
            self._settle()
        return True

    def _begin_send(self, request: Send, begun: Begun) -> None:
        length = sum(map(len, request.gather))
        if request.invalidate is None:
            rdmap, stag = _SEND_SE if request.solicited else _SEND, 0
        else:
            rdmap, stag = _SEND_SE_INV if request.solicited else _SEND_INV, request.invalidate
        self._current = _Message(rdmap, False, stag, self._send_msn, request.gather, length, begun)
        self._send_msn = (self._send_msn + 1) & _MSN

    def _begin_read(self, request: RdmaRead, begun: Begun) -> None:
        length = sum(map(len, request.scatter))
        if self._sink_to + length > _TO:
            self._sink_to = 0
        read = Outstanding(begun, request.scatter, self.sink_stag, self._sink_to, length)
        self._sink_to += length
        begun.byte_len = length
        self.reads.append(read)
        asked = ReadRequest(read.sink_stag, read.sink_to, length, request.rkey, request.remote_va).encode()
        self._ask(asked)

    def _ask(self, asked: bytes) -> None:
        self._outbound.untagged(_READ_REQUEST, 0, QUEUE_READ, self._read_msn, (asked,), 0, len(asked), True)
        self._read_msn = (self._read_msn + 1) & _MSN
        self.tally.messages_sent[RdmapOp.READ_REQUEST] += 1
        self.tally.bytes_sent[RdmapOp.READ_REQUEST] += len(asked)

    def _fail(self, begun: Begun, status: Status) -> None:
        """Nothing more is framed; it is told when everything before it is done."""
        begun.status = status
        begun.done = True
        self._failing = True
        self._settle()

    # --- framing ---

    def _frame(self, message: _Message) -> None:
        begin = message.framed
        end = min(begin + CHUNK, message.length)
        last = end == message.length
        gather = message.gather
        answers, begun = message.answers, message.begun
        if begun is not None and begin and not self._owner.may_read(gather):  # taken back amid the message
            self._current = None
            self._fail(begun, Status.LOCAL_PROTECTION_ERROR)
            return
        if answers is not None and message.length:
            # The whole range again, before each piece: the memory may have been taken back (RFC 5042 6.2.2).
            granted = self._owner.grant(answers.source_stag, answers.source_offset, answers.length, _REMOTE_READ)
            if isinstance(granted, AccessRefusal):
                self._refuse(message, answers, granted)
                return
            gather = (granted,)
        if message.tagged:
            # What the other end reads may change meanwhile, and the checksum must be of what is sent: it is copied.
            copy = answers is not None
            self._outbound.tagged(message.rdmap, message.stag, message.base, gather, begin, end, last, copy)
        else:
            self._outbound.untagged(message.rdmap, message.stag, QUEUE_SEND, message.base, gather, begin, end, last)
        message.framed = end
        opcode = message.rdmap & 0xF
        self.tally.bytes_sent[opcode] += end - begin
        if last:
            self.tally.messages_sent[opcode] += 1
            self._current = None
            if begun is not None:
                self._unwritten.append((self._outbound.position, begun))

    def _refuse(self, message: _Message, answers: ReadRequest, why: AccessRefusal) -> None:
        self._current = None
        read = answers.encode()
        size = len(message.header) + len(read)
        self._owner.answer_failed(Fault(READ_REFUSED[why], message.header, size, read, message.framed))

    # --- completing ---

    def _settle(self) -> None:
        begun = self._begun
        while begun and begun[0].done:
            first = begun.popleft()
            assert first.request is not None, "what is not the user's is not completed"
            if first.status is not Status.SUCCESS:
                self._owner.failed(first.request, first.status)
                return
            self._owner.completed(first.request, first.byte_len)
