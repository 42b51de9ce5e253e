"""A queue pair of the software RNIC: what the user posts, and what a stream makes of it.

States are those of `verbs.QpState`. The five of the verbs draft for iWARP (Idle, RTS, Closing, Terminate, Error) map to
INIT, RTS and, as soon as the stream ends in whatever way, ERROR: what still goes out or is awaited then is the business
of `stream` and of nobody else.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.iwarp.terminate import Condition, terminate_text
from sidestep.rdma.soft.memory import Refusal
from sidestep.rdma.verbs import AsyncEvent, EventKind, QpState, QueuePair
from sidestep.rdma.work import (
    Access,
    Completion,
    LocalInvalidate,
    Opcode,
    RdmaRead,
    RdmaWrite,
    RKey,
    Send,
    Status,
)

if TYPE_CHECKING:
    from sidestep.rdma.iwarp.ddp import ReadRequest
    from sidestep.rdma.iwarp.device import IwarpDevice
    from sidestep.rdma.iwarp.manager import IwarpConnection
    from sidestep.rdma.iwarp.receiver import Fault
    from sidestep.rdma.iwarp.stream import Stream
    from sidestep.rdma.soft.memory import Domain
    from sidestep.rdma.soft.queues import SoftQueue
    from sidestep.rdma.verbs import EventHandler, QpCapabilities
    from sidestep.rdma.work import Gather, Receive, Scatter, SendRequest

_RTS: Final = QpState.RTS
_RTR: Final = QpState.RTR
_ERROR: Final = QpState.ERROR
_SUCCESS: Final = Status.SUCCESS
_FLUSHED: Final = Status.FLUSHED
_RECEIVE: Final = Opcode.RECEIVE
_OPCODES: Final = {
    Send: Opcode.SEND,
    RdmaWrite: Opcode.RDMA_WRITE,
    RdmaRead: Opcode.RDMA_READ,
    LocalInvalidate: Opcode.LOCAL_INVALIDATE,
}
_INVALIDATE_REFUSED: Final = {
    Refusal.INVALID_STAG: Condition.INVALIDATE_UNKNOWN,
    Refusal.NOT_ASSOCIATED: Condition.INVALIDATE_OTHER_STREAM,
    Refusal.ACCESS: Condition.INVALIDATE_RIGHTS,
}
_OF_ACCESS: Final = frozenset(
    condition for condition in Condition if condition.name.startswith(("TAGGED_", "READ_", "RESPONSE_", "INVALIDATE_"))
) - {Condition.READ_REQUEST_MALFORMED}
_LOCAL_WRITE: Final = int(Access.LOCAL_WRITE)


class IwarpQueuePair(QueuePair):
    """One end of a stream."""

    __slots__ = (
        "_receives",
        "_unsignaled",
        "capabilities",
        "connection",
        "device",
        "domain",
        "initiator_depth",
        "number",
        "recv_cq",
        "remote_access",
        "send_cq",
        "sink_stag",
        "state",
        "stream",
    )

    domain: Domain
    send_cq: SoftQueue
    recv_cq: SoftQueue

    def __init__(
        self,
        device: IwarpDevice,
        domain: Domain,
        send_cq: SoftQueue,
        recv_cq: SoftQueue,
        capabilities: QpCapabilities,
        remote_access: int,
        on_event: EventHandler | None,
    ) -> None:
        self.device = device
        self.domain = domain
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.capabilities = capabilities
        self.remote_access = remote_access
        self.on_event = on_event
        self.number = device.next_qp_number()
        self.sink_stag = device.keys.take()  # names nothing: the other end only repeats it in its responses
        self.state = QpState.INIT
        self.initiator_depth = 0
        self.stream: Stream | None = None
        self.connection: IwarpConnection | None = None
        self._receives: deque[Receive] = deque()
        self._unsignaled = 0  # done, and in the queue until a signaled one is
        send_cq.users.append(self)
        recv_cq.users.append(self)
        domain.queue_pairs.add(self)

    # --- the user's side ---

    @property
    def receives_posted(self) -> int:
        """Receives that no message has taken yet."""
        return len(self._receives)

    @property
    def sends_outstanding(self) -> int:
        """Requests that occupy the send queue."""
        return self._unsignaled + (self.stream.sender.outstanding if self.stream is not None else 0)

    def post_send(self, request: SendRequest) -> None:
        """Queues the request; it leaves in this turn of the loop or the next."""
        if self.state is not _RTS:
            if self.state is not _ERROR:
                raise Misuse(f"nothing is sent in {self.state.name}")
            self.send_cq.add(Completion(request.wr_id, _FLUSHED, _OPCODES[type(request)], 0, self.number))
            return
        stream = self.stream
        assert stream is not None
        self._check(request)
        stream.sender.requests.append(request)
        self.device.loop.soon(stream.pump)

    def _check(self, request: SendRequest) -> None:
        if self.sends_outstanding >= self.capabilities.max_send_wr:
            raise LimitReached(f"{self.capabilities.max_send_wr} requests are outstanding")
        attributes = self.device.attributes
        entries: Gather
        if isinstance(request, RdmaRead):
            entries, most = request.scatter, attributes.read_scatter_max
        elif isinstance(request, Send | RdmaWrite):
            entries, most = request.gather, attributes.gather_max
        else:
            return
        if len(entries) > most:
            raise Misuse(f"{len(entries)} entries; the device takes {most}")
        if sum(map(len, entries)) > attributes.message_max:
            raise Misuse(f"more than {attributes.message_max} bytes")
        if sum(len(entry) for entry in entries if isinstance(entry, bytes)) > attributes.inline_max:
            raise Misuse(f"more than {attributes.inline_max} bytes of inline data")

    def post_recv(self, receive: Receive) -> None:
        """Posts room for one message."""
        if len(self._receives) >= self.capabilities.max_recv_wr:
            raise LimitReached(f"{self.capabilities.max_recv_wr} receives are posted already")
        if len(receive.scatter) > self.device.attributes.scatter_max:
            raise Misuse(f"a receive of {len(receive.scatter)} entries")
        if self.state is _ERROR:
            self.recv_cq.add(Completion(receive.wr_id, _FLUSHED, _RECEIVE, 0, self.number))
        elif self.state is QpState.RESET:
            raise Misuse("the queue pair is destroyed")
        else:
            self._receives.append(receive)

    def modify_to_error(self) -> None:
        """Flushes everything and resets the connection."""
        if self.state in (_ERROR, QpState.RESET):
            return
        self.end()
        if self.stream is not None:
            self.stream.abort()
        if self.connection is not None:
            self.connection.over(by_remote=False, confirmed=False)

    def destroy(self) -> None:
        """Gives it back; its connection is reset."""
        if self.state is QpState.RESET:
            return
        self.state = QpState.RESET
        if self.stream is not None:
            self.stream.sender.take_unfinished()
            self.stream.abort()
        self._receives.clear()
        self.send_cq.users.remove(self)
        self.recv_cq.users.remove(self)
        self.domain.queue_pairs.discard(self)
        self.device.keys.give_back(self.sink_stag)
        if self.connection is not None:
            self.connection.over(by_remote=False, confirmed=False)

    # --- the connection manager's side ---

    def attach(self, stream: Stream, *, ready: bool) -> None:
        """INIT to RTR, or to RTS when nothing is waited for."""
        self.stream = stream
        self.initiator_depth = stream.sender.depth
        self.state = _RTS if ready else _RTR

    def ready_to_send(self) -> None:
        """RTR to RTS."""
        if self.state is _RTR:
            self.state = _RTS

    def end(self) -> None:
        """Flushes everything; what becomes of the stream is the caller's matter."""
        self._flush(None)

    def _flush(self, fault: Fault | None) -> None:
        if self.state in (_ERROR, QpState.RESET):
            return
        self.state = _ERROR
        number = self.number
        taken: list[Receive] = []
        if self.stream is not None:
            add = self.send_cq.add
            for request in self.stream.sender.take_unfinished():
                add(Completion(request.wr_id, _FLUSHED, _OPCODES[type(request)], 0, number))
            taken = self.stream.receiver.receives_taken
        add = self.recv_cq.add
        if fault is not None and fault.receive is not None:
            add(Completion(fault.receive.wr_id, fault.status, _RECEIVE, 0, number))
            taken = [receive for receive in taken if receive is not fault.receive]
        for receive in (*taken, *self._receives):
            add(Completion(receive.wr_id, _FLUSHED, _RECEIVE, 0, number))
        self._receives.clear()

    # --- the stream's side ---

    def peer_failed(self, fault: Fault) -> None:
        """The other end broke a rule, or what it sent does not fit."""
        if self.state in (_ERROR, QpState.RESET):
            return
        self._flush(fault)
        if fault.receive is None or fault.status is _FLUSHED:
            of_access = fault.condition in _OF_ACCESS
            self.tell(EventKind.QP_ACCESS_ERROR if of_access else EventKind.QP_REQUEST_ERROR, fault.condition.value)
        self._over(by_remote=False, confirmed=False)

    def disconnected_by_peer(self) -> None:
        """The other end has ended its direction."""
        self.end()
        self._over(by_remote=True, confirmed=True)

    def connection_lost(self, why: str) -> None:
        """The connection broke."""
        self.end()
        self.tell(EventKind.QP_FATAL, why)
        self._over(by_remote=True, confirmed=False)

    def stream_closed(self, *, confirmed: bool) -> None:
        """The last of a stream that this end has left."""
        self._over(by_remote=False, confirmed=confirmed)

    def break_off(self, kind: EventKind, why: str) -> None:
        """Ends the queue pair for a reason that no completion tells."""
        if self.state in (_ERROR, QpState.RESET):
            return
        self.end()
        self.tell(kind, why)
        if self.stream is not None:
            self.stream.terminate(Condition.STREAM_BROKEN)
        self._over(by_remote=False, confirmed=False)

    def tell(self, kind: EventKind, why: str = "") -> None:
        """An event for this queue pair's handler, or the device's."""
        event = AsyncEvent(kind, self, why)
        if self.on_event is not None:
            self.device.notices.append(partial(self.on_event, event))
        else:
            self.device.tell(event)

    def _over(self, *, by_remote: bool, confirmed: bool) -> None:
        if self.connection is not None:
            self.connection.over(by_remote=by_remote, confirmed=confirmed)

    # What the receiver asks and tells; see `receiver.Owner`.

    def grant(self, key: int, va: int, length: int, right: int) -> memoryview | Refusal:
        """The bytes that the other end may touch."""
        return self.domain.grant(key, va, length, right, self)

    def take_receive(self) -> Receive | None:
        """Room for the next message."""
        return self._receives.popleft() if self._receives else None

    def may_fill(self, scatter: Scatter) -> bool:
        """Whether it may be written here."""
        domain = self.domain
        return all(id(entry.obj) in domain.writable or domain.covers(entry, _LOCAL_WRITE) for entry in scatter)

    def invalidate(self, key: int) -> Condition | None:
        """Voids a key for the other end."""
        memory = self.domain.may_be_invalidated(key, self.remote_access)
        if isinstance(memory, Refusal):
            return _INVALIDATE_REFUSED[memory]
        memory.invalidate()
        return None

    def heard(self) -> None:
        """The first message of the other end is good: this one may send as well (RFC 5044 7.1.2, rule 4)."""
        assert self.stream is not None
        self.stream.sender.held = False
        if self.state is _RTR and self.connection is not None:
            self.connection.heard()

    def received(self, receive: Receive, length: int, solicited: bool, invalidated: RKey | None) -> None:
        """A message was delivered."""
        self.recv_cq.add(Completion(receive.wr_id, _SUCCESS, _RECEIVE, length, self.number, solicited, invalidated))

    def respond(self, request: ReadRequest, header: bytes) -> bool:
        """Queues the answer to a Read Request."""
        assert self.stream is not None
        return self.stream.sender.respond(request, header)

    def read_done(self) -> None:
        """The response to the oldest Read was delivered."""
        assert self.stream is not None
        self.stream.sender.read_done()

    def terminated(self, payload: bytes) -> None:
        """The other end ended the stream."""
        assert self.stream is not None
        self.end()
        self.tell(EventKind.QP_FATAL, terminate_text(payload))
        self.stream.leave()
        self._over(by_remote=True, confirmed=True)

    # What the sender asks and tells; see `sender.Owner`.

    def carry_out(self, request: SendRequest) -> Status:
        """Does what concerns this end only, and says whether the memory of a request is in order."""
        if isinstance(request, RdmaRead):
            return _SUCCESS if self.may_fill(request.scatter) else Status.LOCAL_PROTECTION_ERROR
        if isinstance(request, LocalInvalidate):
            memory = self.domain.may_invalidate(request.rkey)
            if isinstance(memory, Refusal):
                return Status.LOCAL_PROTECTION_ERROR
            memory.invalidate()
            return _SUCCESS
        domain = self.domain
        readable = all(
            isinstance(entry, bytes) or id(entry.obj) in domain.readable or domain.covers(entry, 0)
            for entry in request.gather
        )
        return _SUCCESS if readable else Status.LOCAL_PROTECTION_ERROR

    def completed(self, request: SendRequest, byte_len: int) -> None:
        """A request is done."""
        if request.signaled:
            self._unsignaled = 0
            self.send_cq.add(Completion(request.wr_id, _SUCCESS, _OPCODES[type(request)], byte_len, self.number))
        else:
            self._unsignaled += 1

    def failed(self, request: SendRequest, status: Status) -> None:
        """A request could not be carried out."""
        assert self.stream is not None
        self.send_cq.add(Completion(request.wr_id, status, _OPCODES[type(request)], 0, self.number))
        self.end()
        self.stream.terminate(Condition.OUTGOING)
        self._over(by_remote=False, confirmed=False)

    def answer_failed(self, fault: Fault) -> None:
        """An answer to an RDMA Read cannot be given any more."""
        assert self.stream is not None
        self.stream.fault(fault)
