"""A queue pair of the software RNIC: what the user posts, and what a stream makes of it.

States are those of `verbs.QpState`. The five of the verbs draft for iWARP (Idle, RTS, Closing, Terminate, Error) map to
INIT, RTS and, as soon as the stream ends in whatever way, ERROR: what still goes out or is awaited then is the business
of `stream` and of nobody else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sidestep.rdma.iwarp.terminate import CODE_TEXT, Condition, told_by
from sidestep.rdma.soft.memory import AccessRefusal
from sidestep.rdma.soft.qp import ERROR, FLUSHED, OP_RECEIVE, OPCODES, RTR, RTS, SUCCESS, SoftQueuePair
from sidestep.rdma.verbs import EventKind, QpState
from sidestep.rdma.work import Completion

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidestep.rdma.iwarp.ddp import ReadRequest
    from sidestep.rdma.iwarp.device import IwarpDevice
    from sidestep.rdma.iwarp.manager import IwarpConnection
    from sidestep.rdma.iwarp.receiver import Fault
    from sidestep.rdma.iwarp.stream import RdmapStream
    from sidestep.rdma.soft.memory import QpInit
    from sidestep.rdma.verbs import Lent, SendRing
    from sidestep.rdma.work import Receive, RKey, SendRequest, Status

_INVALIDATE_REFUSED: Final = {
    AccessRefusal.INVALID_STAG: Condition.INVALIDATE_UNKNOWN,
    AccessRefusal.NOT_ASSOCIATED: Condition.INVALIDATE_OTHER_STREAM,
    AccessRefusal.ACCESS: Condition.INVALIDATE_RIGHTS,
    AccessRefusal.IN_USE: Condition.INVALIDATE_FIXED,
}
_OF_ACCESS: Final = frozenset(
    condition for condition in Condition if condition.name.startswith(("TAGGED_", "READ_", "RESPONSE_", "INVALIDATE_"))
) - {Condition.READ_REQUEST_MALFORMED}


class IwarpQueuePair(SoftQueuePair):
    """One end of a stream."""

    __slots__ = ("_unsignaled", "sink_stag", "stream")

    device: IwarpDevice
    connection: IwarpConnection | None

    def __init__(self, device: IwarpDevice, init: QpInit) -> None:
        # Names nothing: the other end only repeats it in its responses.
        self.sink_stag = device.keys.take(device.keys.part())
        number = device.next_qp_number()
        super().__init__(number, device, init)
        self.stream: RdmapStream | None = None
        self._unsignaled = 0  # done, and in the queue until a signaled one is

    # --- the user's side ---

    @property
    def sends_outstanding(self) -> int:
        return self._unsignaled + (self.stream.sender.outstanding if self.stream is not None else 0)

    def post_send(self, request: SendRequest) -> None:
        """Queues the request; it leaves in this turn of the loop or the next."""
        if self.check_post(request, self.sends_outstanding):
            stream = self.stream
            assert stream is not None
            stream.sender.requests.append(request)
            stream.pump_soon()

    def lend(self, record: dict[str, int], reclaim: Callable[[], object], ring: Callable[[], SendRing]) -> Lent | None:
        del ring
        return self.stream.lend(record, reclaim) if self.state is RTS and self.stream is not None else None

    def use_large_frames(self) -> None:
        if self.stream is not None:
            self.stream.use_large_frames()

    def take_back(self, record: dict[str, int], error: int) -> None:
        assert self.stream is not None
        self.stream.take_back(record, error)

    def modify_to_error(self) -> None:
        if self.state in (ERROR, QpState.RESET):
            return
        self.end()
        if self.stream is not None:
            self.stream.abort()
        self._over(by_remote=False, confirmed=False)

    def destroy(self) -> None:
        """Gives it back; its connection is reset, unless it ends already: what is said last is to arrive."""
        if self.state is QpState.RESET:
            return
        super().destroy()
        self.device.keys.free(self.sink_stag)
        if (stream := self.stream) is not None:
            stream.receiver.give_up()
            if not stream.leaving:
                stream.abort()
        self._over(by_remote=False, confirmed=False)
        self.stream = None

    def take_unfinished(self) -> list[SendRequest]:
        return self.stream.sender.take_unfinished() if self.stream is not None else []

    def details(self) -> dict[str, object]:
        found = super().details()
        if self.stream is not None:
            found |= self.stream.details() | self.stream.tally.as_json()
        return found

    # --- the connection manager's side ---

    def attach(self, stream: RdmapStream, *, ready: bool) -> None:
        self.stream = stream
        self.initiator_depth = stream.sender.depth
        self.state = RTS if ready else RTR

    def ready_to_send(self) -> None:
        if self.state is RTR:
            self.state = RTS

    def _flush_receives(self) -> None:
        self._flush_taken(None)
        super()._flush_receives()

    def _flush_taken(self, fault: Fault | None) -> None:
        """Receives of messages of which not all has come; one may have failed for a reason of its own."""
        add, number = self.recv_cq.add, self.number
        taken = self.stream.receiver.give_up() if self.stream is not None else []
        if fault is not None and fault.receive is not None:
            add(Completion(fault.receive.wr_id, fault.status, OP_RECEIVE, 0, number))
            taken = [receive for receive in taken if receive is not fault.receive]
        for receive in taken:
            add(Completion(receive.wr_id, FLUSHED, OP_RECEIVE, 0, number))
        if fault is not None and fault.receive is not None:
            self.device.events.add("completion_failed", fault.status.name)

    # --- the stream's side ---

    def peer_failed(self, fault: Fault) -> None:
        """The other end broke a rule, or what it sent does not fit."""
        if self.state in (ERROR, QpState.RESET):
            return
        self._flush_taken(fault)
        self.end()
        if fault.receive is None or fault.status is FLUSHED:
            of_access = fault.condition in _OF_ACCESS
            self.tell(EventKind.QP_ACCESS_ERROR if of_access else EventKind.QP_REQUEST_ERROR, fault.condition.value)
        self._over(by_remote=False, confirmed=False)

    def disconnected_by_peer(self) -> None:
        self.end()
        self._over(by_remote=True, confirmed=True)

    def connection_lost(self, why: str) -> None:
        if self.state is RTS:  # else there was none, which the connection counts
            self.device.events.add("connection_broken")
        self.end()
        self.tell(EventKind.QP_FATAL, why)
        self._over(by_remote=True, confirmed=False)

    def stream_closed(self, *, confirmed: bool) -> None:
        self._over(by_remote=False, confirmed=confirmed)

    def break_off(self, kind: EventKind, why: str) -> None:
        if self.state in (ERROR, QpState.RESET):
            return
        self.end()
        self.tell(kind, why)
        if self.stream is not None:
            self.stream.terminate(Condition.STREAM_BROKEN)
        self._over(by_remote=False, confirmed=False)

    def _over(self, *, by_remote: bool, confirmed: bool) -> None:
        if self.connection is not None:
            self.connection.lost(by_remote=by_remote, confirmed=confirmed)

    # What the receiver asks and tells.

    @property
    def receives_left(self) -> int:
        """Receives that no message has taken, shared ones included."""
        return len(self._receives)

    def grant(self, key: int, va: int, length: int, right: int) -> memoryview | AccessRefusal:
        return self.domain.grant(key, va, length, right, self)

    def invalidate(self, key: int, *, only_check: bool = False) -> Condition | None:
        """Voids a key for the other end; what is wrong if it must not."""
        memory = self.domain.may_be_invalidated(key, self)
        if isinstance(memory, AccessRefusal):
            return _INVALIDATE_REFUSED[memory]
        if not only_check:
            memory.invalidate()
        return None

    def heard(self) -> None:
        """The first message of the other end is good: this one may send as well (RFC 5044 7.1.2, rule 4)."""
        assert self.stream is not None
        self.stream.heard()
        if self.state is RTR and self.connection is not None:
            self.connection.communication_established()

    def received(self, receive: Receive, length: int, solicited: bool, invalidated: RKey | None) -> None:
        self.recv_cq.add(Completion(receive.wr_id, SUCCESS, OP_RECEIVE, length, self.number, solicited, invalidated))

    def respond(self, request: ReadRequest, header: bytes) -> bool:
        """Queues the answer to a Read Request, which came with this DDP header; False if there is no slot left."""
        assert self.stream is not None
        return self.stream.sender.respond(request, header)

    def read_done(self) -> None:
        """The oldest RDMA Read was delivered."""
        assert self.stream is not None
        self.stream.sender.read_done()

    def terminated(self, payload: bytes) -> None:
        assert self.stream is not None
        code, text = told_by(payload)
        # Who can choose the names of counters could make any number of them.
        self.device.events.add("terminate_received", f"{code:#06x}" if code in CODE_TEXT else "unknown")
        self.end()
        self.tell(EventKind.QP_FATAL, text)
        self.stream.leave()
        self._over(by_remote=True, confirmed=True)

    # What the sender asks and tells.

    def completed(self, request: SendRequest, byte_len: int) -> None:
        if request.signaled:
            self._unsignaled = 0
            self.send_cq.add(Completion(request.wr_id, SUCCESS, OPCODES[type(request)], byte_len, self.number))
        else:
            self._unsignaled += 1

    def failed(self, request: SendRequest, status: Status) -> None:
        """A request could not be carried out, and all before it are done."""
        assert self.stream is not None
        self.device.events.add("completion_failed", status.name)
        self.send_cq.add(Completion(request.wr_id, status, OPCODES[type(request)], 0, self.number))
        self.end()
        self.stream.terminate(Condition.OUTGOING)
        self._over(by_remote=False, confirmed=False)

    def answer_failed(self, fault: Fault) -> None:
        assert self.stream is not None
        self.stream.fault(fault)
