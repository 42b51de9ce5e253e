"""A queue pair of the loopback device: its receives, its errors, and what the other end may do with it.

What is here is the same in both modes: the checks before a byte is placed, the placing, and the end of a queue pair.
When a request is carried out is decided by `immediate` and `timed`.

Theory of operation: the sending queue pair calls `take_send`, `take_write` or `grant_read` of the receiving one when a
request arrives there; the answer is a `Status`, which becomes that of the request. Whatever goes wrong at the receiving
end is settled there before the answer goes out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from sidestep.errors import LimitReached, Misuse
from sidestep.rdma.address import buffer_address
from sidestep.rdma.loopback.observer import Kind, Placed, QpMessage
from sidestep.rdma.verbs import AsyncEvent, EventKind, QpState, QueuePair
from sidestep.rdma.work import (
    Access,
    Completion,
    LocalInvalidate,
    Opcode,
    RdmaRead,
    RdmaWrite,
    Receive,
    Send,
    Status,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sidestep.rdma.loopback.fabric import Timer
    from sidestep.rdma.loopback.manager import LoopbackConnection
    from sidestep.rdma.loopback.memory import LoopbackDomain
    from sidestep.rdma.loopback.queues import LoopbackQueue
    from sidestep.rdma.verbs import EventHandler, QpCapabilities
    from sidestep.rdma.work import Gather, RKey, Scatter, SendRequest

# Looking up a member of an enum costs as much as copying a header.
RTS: Final = QpState.RTS
RTR: Final = QpState.RTR
ERROR: Final = QpState.ERROR
RESET: Final = QpState.RESET
SUCCESS: Final = Status.SUCCESS
FLUSHED: Final = Status.FLUSHED
OP_SEND: Final = Opcode.SEND
OP_RECEIVE: Final = Opcode.RECEIVE
OPCODES: Final = {
    Send: Opcode.SEND,
    RdmaWrite: Opcode.RDMA_WRITE,
    RdmaRead: Opcode.RDMA_READ,
    LocalInvalidate: Opcode.LOCAL_INVALIDATE,
}
LOCAL_WRITE: Final = int(Access.LOCAL_WRITE)
REMOTE_WRITE: Final = int(Access.REMOTE_WRITE)
REMOTE_READ: Final = int(Access.REMOTE_READ)


class Link:
    """What joins two queue pairs."""

    __slots__ = ("cut", "ends")

    def __init__(self, *ends: LoopbackQueuePair) -> None:
        self.ends = ends
        self.cut = False  # nothing arrives any more


class LoopbackQueuePair(QueuePair):
    """What both modes have in common."""

    __slots__ = (
        "_max_recv_wr",
        "_max_send_wr",
        "_receives",
        "_silence_timer",
        "_slow",
        "_takes_connection_along",
        "capabilities",
        "completes_early",
        "connection",
        "device",
        "domain",
        "fabric",
        "initiator_depth",
        "link",
        "number",
        "peer",
        "recv_cq",
        "remote_access",
        "send_cq",
        "state",
    )

    domain: LoopbackDomain
    send_cq: LoopbackQueue
    recv_cq: LoopbackQueue

    def __init__(
        self,
        domain: LoopbackDomain,
        send_cq: LoopbackQueue,
        recv_cq: LoopbackQueue,
        capabilities: QpCapabilities,
        remote_access: int,
        on_event: EventHandler | None,
    ) -> None:
        self.domain = domain
        self.device = domain.device
        self.fabric = domain.device.fabric
        self.number = self.fabric.next_qp_number()
        self.state = QpState.INIT
        self.capabilities = capabilities
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.remote_access = remote_access
        self.on_event = on_event
        self.initiator_depth = 0
        self.peer: LoopbackQueuePair | None = None
        self.link = Link(self)
        self.connection: LoopbackConnection | None = None
        self._max_send_wr = capabilities.max_send_wr
        self._max_recv_wr = capabilities.max_recv_wr
        self._receives: deque[Receive] = deque()
        self._slow = True  # not in RTS, or somebody watches, or faults are about: the short way is closed
        self._silence_timer: Timer | None = None
        self._takes_connection_along = self.device.attributes.error_disconnects
        self.completes_early = not self.device.attributes.acknowledged  # Sends and Writes, when they leave
        send_cq.users.append(self)
        recv_cq.users.append(self)
        domain.queue_pairs.add(self)
        self.fabric.queue_pairs[self.number] = self

    # The user's side.

    @property
    def receives_posted(self) -> int:
        """Receives that no message has taken yet."""
        return len(self._receives)

    def post_recv(self, receive: Receive) -> None:
        """Posts room for one message."""
        receives = self._receives
        if len(receives) >= self._max_recv_wr:
            raise LimitReached(f"{self._max_recv_wr} receives are posted already")
        if len(receive.scatter) > self.device.attributes.scatter_max:
            raise Misuse(f"a receive of {len(receive.scatter)} entries")
        if self.state is ERROR:
            self.recv_cq.add(Completion(receive.wr_id, FLUSHED, OP_RECEIVE, 0, self.number))
        elif self.state is RESET:
            raise Misuse("the queue pair is destroyed")
        else:
            receives.append(receive)

    def modify_to_error(self) -> None:
        """Flushes everything."""
        was_connected = self.hears
        self.end()
        if was_connected and self._takes_connection_along:
            self._break_connection()

    def end(self) -> None:
        """Flushes everything; what becomes of the connection is the caller's matter."""
        if self.state in (ERROR, RESET):
            return
        self._set_state(ERROR)
        self.stop_waiting()
        add, number = self.send_cq.add, self.number
        for request in self.take_unfinished():
            add(Completion(request.wr_id, FLUSHED, OPCODES[type(request)], 0, number))
        self._flush_receives()

    def destroy(self) -> None:
        """Gives it back."""
        if self.state is RESET:
            return
        self._set_state(RESET)
        self.stop_waiting()
        self.take_unfinished()
        self._receives.clear()
        self.send_cq.users.remove(self)
        self.recv_cq.users.remove(self)
        self.domain.queue_pairs.discard(self)
        self.fabric.queue_pairs.pop(self.number, None)

    # What a mode decides.

    @property
    @abstractmethod
    def awaits_answer(self) -> bool:
        """Whether a request has left and was not answered."""

    @abstractmethod
    def take_unfinished(self) -> list[SendRequest]:
        """Takes out all requests that are not completed, in the order of posting."""

    # The connection manager's side.

    def join(self, peer: LoopbackQueuePair) -> None:
        """Both ends know each other from now on."""
        self.peer, peer.peer = peer, self
        self.link = peer.link = Link(self, peer)

    def ready_to_receive(self) -> None:
        """INIT to RTR: messages may come."""
        self._set_state(RTR)

    def ready_to_send(self) -> None:
        """RTR to RTS."""
        if self.state is RTR:
            self._set_state(RTS)

    def connection_reset(self) -> None:
        """The connection broke, and this end was told."""
        if self.hears:
            self.end()
            self.tell(EventKind.QP_FATAL, "the connection was reset")
            if self.connection is not None:
                self.connection.lost()

    def _break_connection(self) -> None:
        """As a TCP reset does: all that is on its way is lost, and the other end is told."""
        link, fabric = self.link, self.fabric
        if link.cut:
            return
        link.cut = True
        for each in link.ends:
            each.watch_out()
        if self.connection is not None:
            fabric.notices.append(self.connection.lost)
        if self.peer is not None:
            delay_s = 0.0 if fabric.immediate else fabric.draw(fabric.timing.wire_s)
            fabric.arrive(fabric.now + delay_s, self.peer.connection_reset)

    # The other end's side.

    @property
    def hears(self) -> bool:
        """Whether messages arrive here at all."""
        return self.state is RTS or self.state is RTR

    def take_send(self, request: Send, length: int) -> Status:
        """A message arrived: checks, places, completes a receive. What is wrong is settled here."""
        if self.state is RTR:
            self._communication_established()
        if not self._receives:
            if self._takes_connection_along:  # RFC 5041 7.1: no buffer is an error of the stream
                self.break_off(EventKind.QP_REQUEST_ERROR, "a message came for which no receive was posted")
            return Status.RNR_RETRY_EXCEEDED
        receive = self._receives[0]
        scatter = receive.scatter
        if length > sum(map(len, scatter)):
            self._fail_receive(Status.LOCAL_LENGTH_ERROR, "a message was longer than the receive posted for it")
            return Status.REMOTE_INVALID_REQUEST
        revoked = None
        if request.invalidate is not None:
            revoked = self.domain.may_invalidate(request.invalidate)
            if revoked is None:
                self.break_off(EventKind.QP_ACCESS_ERROR, "a message was to void a key that is none")
                return Status.REMOTE_ACCESS_ERROR
        if not self._may_write(scatter) or not self.place(Kind.SEND, request.gather, scatter):
            self._fail_receive(Status.LOCAL_PROTECTION_ERROR, "a posted receive lies in no region")
            return Status.REMOTE_OPERATION_ERROR
        self._receives.popleft()
        if revoked is not None:
            revoked.invalidate()
        self.recv_cq.add(
            Completion(receive.wr_id, SUCCESS, OP_RECEIVE, length, self.number, request.solicited, request.invalidate)
        )
        return SUCCESS

    def take_write(self, request: RdmaWrite, length: int) -> Status:
        """An RDMA Write arrived: checks and places; nobody here is told."""
        if self.state is RTR:
            self._communication_established()
        room = self._grant(request.rkey, request.remote_va, length, REMOTE_WRITE)
        if isinstance(room, Status):
            return room
        if not self.place(Kind.WRITE, request.gather, (room,)):
            return Status.REMOTE_OPERATION_ERROR
        return SUCCESS

    def grant_read(self, request: RdmaRead, length: int) -> memoryview | Status:
        """An RDMA Read arrived: the bytes that it may have."""
        if self.state is RTR:
            self._communication_established()
        return self._grant(request.rkey, request.remote_va, length, REMOTE_READ)

    def regrant(self, request: RdmaRead, length: int) -> memoryview | Status:
        """The same again, when its answer leaves."""
        if self.state is RESET:
            return Status.REMOTE_OPERATION_ERROR
        return self._grant(request.rkey, request.remote_va, length, REMOTE_READ)

    def _grant(self, key: int, va: int, length: int, right: int) -> memoryview | Status:
        if not self.remote_access & right:
            self.break_off(EventKind.QP_REQUEST_ERROR, "the other end may not do this on this queue pair")
            return Status.REMOTE_INVALID_REQUEST
        if not length:
            return memoryview(b"")  # RFC 5041 5.2: neither key nor address of nothing is looked at
        granted = self.domain.grant(key, va, length, right)
        if granted is Status.REMOTE_ACCESS_ERROR:
            self.break_off(EventKind.QP_ACCESS_ERROR, "the other end named memory that it may not use so")
        return granted

    # Sending: what both modes check and complete.

    def check_post(self, request: SendRequest, held: int) -> bool:
        """Whether the request may be queued; False if it was flushed.

        Raises:
            Misuse: Before RTS, or too many entries or bytes.
            LimitReached: The queue is full.
        """
        if self.state is ERROR:
            self.send_cq.add(Completion(request.wr_id, FLUSHED, OPCODES[type(request)], 0, self.number))
            return False
        if self.state is not RTS:
            raise Misuse(f"nothing is sent in {self.state.name}")
        if held >= self._max_send_wr:
            raise LimitReached(f"{self._max_send_wr} requests are outstanding")
        attributes = self.device.attributes
        entries = entries_of(request)
        most = attributes.read_scatter_max if isinstance(request, RdmaRead) else attributes.gather_max
        if len(entries) > most:
            raise Misuse(f"{len(entries)} entries; the device takes {most}")
        if sum(map(len, entries)) > attributes.message_max:
            raise Misuse(f"more than {attributes.message_max} bytes")
        if sum(len(entry) for entry in entries if isinstance(entry, bytes)) > attributes.inline_max:
            raise Misuse(f"more than {attributes.inline_max} bytes of inline data")
        return True

    def begin(self, request: SendRequest) -> Status:
        """What can be said about a request before it leaves: SUCCESS, or how it fails here."""
        if (faults := self.fabric.faults) is not None:
            if (status := faults.error_by_wr_id.pop(request.wr_id, None)) is not None:
                return status
            if self.fabric.chance(faults.complete_with_error):
                return self.fabric.rng.choice(faults.error_statuses)
        if isinstance(request, RdmaRead):
            if not self.initiator_depth:
                return Status.LOCAL_QP_OPERATION_ERROR  # the verbs draft for iWARP 8.2.2: a Read with a depth of zero
            return SUCCESS if self._may_sink(request.scatter) else Status.LOCAL_PROTECTION_ERROR
        if isinstance(request, LocalInvalidate):
            region = self.domain.own(request.rkey)
            if region is None:
                return Status.LOCAL_PROTECTION_ERROR
            region.invalidate()
            return SUCCESS
        return SUCCESS if self._may_read(request.gather) else Status.LOCAL_PROTECTION_ERROR

    def complete(self, request: SendRequest, status: Status, byte_len: int = 0) -> None:
        """Tells how a request ended; anything but success ends the queue pair."""
        if status is not SUCCESS or request.signaled:
            self.send_cq.add(Completion(request.wr_id, status, OPCODES[type(request)], byte_len, self.number))
        if status is not SUCCESS:
            self.modify_to_error()

    def place_read(self, request: RdmaRead, data: memoryview | bytes) -> bool:
        """The answer to an RDMA Read is here: checks once more, since the memory may have been taken back."""
        return self._may_sink(request.scatter) and self.place(Kind.READ_RESPONSE, (data,), request.scatter)

    # Silence and errors.

    def watch_out(self) -> None:
        """Something may be lost from now on: the short way is closed."""
        self._slow = True

    def expect_silence(self) -> None:
        """Something was lost: whatever is outstanding gets no answer, and fails after a while."""
        if self._silence_timer is None and self.state is RTS and (self.awaits_answer or self.completes_early):
            self._silence_timer = self.fabric.call_later(self.fabric.timing.retry_timeout_s, self._give_up)

    def stop_waiting(self) -> None:
        """Nothing is outstanding any more."""
        if self._silence_timer is not None:
            self._silence_timer.cancel()
            self._silence_timer = None

    def _give_up(self) -> None:
        self._silence_timer = None
        unfinished = self.take_unfinished()
        if not unfinished:
            if self.completes_early:
                self.break_off(EventKind.QP_FATAL, "the other end does not answer")
            return
        add, number = self.send_cq.add, self.number
        status = Status.RETRY_EXCEEDED
        for request in unfinished:
            add(Completion(request.wr_id, status, OPCODES[type(request)], 0, number))
            status = FLUSHED
        self.modify_to_error()

    def break_off(self, kind: EventKind, why: str) -> None:
        """Ends the queue pair for a reason that no completion tells."""
        if self.state in (ERROR, RESET):
            return
        self.modify_to_error()
        self.tell(kind, why)

    def tell(self, kind: EventKind, why: str = "") -> None:
        """An event for this queue pair's handler, or the device's."""
        event = AsyncEvent(kind, self, why)
        if self.on_event is not None:
            self.fabric.notices.append(partial(self.on_event, event))
        else:
            self.device.tell(event)

    def _communication_established(self) -> None:
        # IBTA 12.9.6: the first message is as good as the RTU that it overtook.
        self.tell(EventKind.COMMUNICATION_ESTABLISHED)
        if self.connection is not None:
            self.connection.communication_established()

    def _fail_receive(self, status: Status, why: str) -> None:
        receive = self._receives.popleft()
        self.recv_cq.add(Completion(receive.wr_id, status, OP_RECEIVE, 0, self.number))
        self.modify_to_error()

    def _flush_receives(self) -> None:
        add, number = self.recv_cq.add, self.number
        while self._receives:
            add(Completion(self._receives.popleft().wr_id, FLUSHED, OP_RECEIVE, 0, number))

    def _set_state(self, state: QpState) -> None:
        self.state = state
        self._slow = state is not RTS or not self.fabric.plain or self.link.cut

    # Memory.

    def _may_read(self, gather: Gather) -> bool:
        domain = self.domain
        return all(
            isinstance(entry, bytes) or id(entry.obj) in domain.readable or domain.covers(entry, 0) for entry in gather
        )

    def _may_write(self, scatter: Scatter) -> bool:
        domain = self.domain
        return all(id(entry.obj) in domain.writable or domain.covers(entry, LOCAL_WRITE) for entry in scatter)

    def _may_sink(self, scatter: Scatter) -> bool:
        if not self.device.attributes.read_sink_remote_write:
            return self._may_write(scatter)
        return all(self.domain.covers(entry, LOCAL_WRITE | REMOTE_WRITE) for entry in scatter)

    def place(self, kind: Kind, gather: Iterable[memoryview | bytes], scatter: Iterable[memoryview]) -> bool:
        """Copies, once; False if the memory is not what the request says: read-only, not bytes, or released."""
        observer = self.fabric.observer
        rooms = iter(scatter)
        room = next(rooms, None)
        used = 0
        try:
            for part in gather:
                begun, left = 0, len(part)
                while left:
                    while room is not None and used == len(room):
                        room, used = next(rooms, None), 0
                    assert room is not None, "the length was checked"
                    count = min(left, len(room) - used)
                    target, chunk = room[used : used + count], part[begun : begun + count]
                    target[:] = chunk
                    if observer is not None:
                        self._saw_placed(kind, buffer_address(chunk), buffer_address(target), count)
                    begun += count
                    used += count
                    left -= count
        except (TypeError, ValueError, BufferError):
            return False
        return True

    def _saw_placed(self, kind: Kind, source: int, target: int, count: int) -> None:
        assert self.fabric.observer is not None
        self.fabric.observer.placed(
            Placed(
                at=self.fabric.now,
                kind=kind,
                target=self.device.name,
                target_qp=self.number,
                source_address=source,
                target_address=target,
                length=count,
            )
        )

    # Being seen.

    def saw_request(self, request: Send | RdmaWrite | RdmaRead, length: int) -> None:
        """Tells the observer that a request leaves."""
        if self.fabric.observer is None:
            return
        if isinstance(request, Send):
            self._saw(
                Kind.SEND,
                request.gather,
                length,
                solicited=request.solicited,
                invalidate=request.invalidate,
            )
        elif isinstance(request, RdmaWrite):
            self._saw(Kind.WRITE, request.gather, length, remote_va=request.remote_va, rkey=request.rkey)
        else:
            self._saw(Kind.READ_REQUEST, (), length, remote_va=request.remote_va, rkey=request.rkey)

    def saw_response(self, data: memoryview | bytes) -> None:
        """Tells the observer that this end answers an RDMA Read."""
        if self.fabric.observer is not None:
            self._saw(Kind.READ_RESPONSE, (data,), len(data))

    def saw_ack(self, status: Status) -> None:
        """Tells the observer that this end acknowledges or refuses a request."""
        if self.fabric.observer is not None:
            self._saw(Kind.ACK, (), 0, status=status)

    def _saw(
        self,
        kind: Kind,
        payload: Gather,
        length: int,
        *,
        remote_va: int = 0,
        rkey: RKey | None = None,
        solicited: bool = False,
        invalidate: RKey | None = None,
        status: Status | None = None,
    ) -> None:
        assert self.fabric.observer is not None
        assert self.peer is not None
        self.fabric.observer.qp_message(
            QpMessage(
                at=self.fabric.now,
                kind=kind,
                source=self.device.name,
                target=self.peer.device.name,
                source_qp=self.number,
                target_qp=self.peer.number,
                payload=payload,
                length=length,
                remote_va=remote_va,
                rkey=rkey,
                solicited=solicited,
                invalidate=invalidate,
                status=status,
            )
        )


def entries_of(request: SendRequest) -> Gather:
    """The local memory of a request."""
    if isinstance(request, RdmaRead):
        return request.scatter
    return () if isinstance(request, LocalInvalidate) else request.gather


def length_of(request: SendRequest) -> int:
    """Bytes that a request moves."""
    return sum(map(len, entries_of(request)))
