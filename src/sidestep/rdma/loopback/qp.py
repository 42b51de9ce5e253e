"""A queue pair of the loopback device: requests and answers travel, and take their time.

Theory of operation. Requests wait, leave and are completed as `soft.ordered` says. They arrive in the order in
which they left, and answers leave and return in the order of their requests (IBTA 9.7.3), an acknowledgement behind the
answer to an earlier RDMA Read. But a request is carried out when it arrives, whatever answers are still to go: that is
how a Send overtakes the bytes of an earlier RDMA Read. Of an atomic operation the number before it travels back.

The memory of a request is read when it arrives at the other end, as a retransmission would: who changes it before the
completion sends something else. What is on its way when its queue pair ends is lost.

Where requests are not acknowledged (iWARP) Sends and Writes are copied and complete when they leave; what goes wrong
with them later is told by the end of the connection.

When a request arrives the sending queue pair calls `take_send`, `take_write` or `grant_read` of the receiving one; the
answer is a `Status`, which becomes that of the request. Whatever goes wrong at the receiving end is settled there
before the answer goes out.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from sidestep.errors import Misuse, Unavailable
from sidestep.rdma.address import buffer_address
from sidestep.rdma.loopback.observer import Kind, Placed, QpMessage
from sidestep.rdma.soft.memory import AccessRefusal
from sidestep.rdma.soft.ordered import OrderedQueuePair, Sent
from sidestep.rdma.soft.qp import (
    ATOMICS,
    FETCHES,
    FLUSHED,
    INIT,
    OP_RECEIVE,
    OPCODES,
    REMOTE_ATOMIC,
    REMOTE_READ,
    REMOTE_WRITE,
    RESET,
    RTR,
    RTS,
    SUCCESS,
)
from sidestep.rdma.verbs import EventKind, JoinedBy, QpEndpoint
from sidestep.rdma.work import (
    ATOMIC_LEN,
    BindWindow,
    CompareSwap,
    Completion,
    FetchAdd,
    LocalInvalidate,
    RdmaRead,
    RdmaWrite,
    Send,
    Status,
    UdSend,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sidestep.rdma.loopback.device import LoopbackDevice
    from sidestep.rdma.loopback.fabric import Timer
    from sidestep.rdma.soft.memory import QpInit
    from sidestep.rdma.work import Gather, SendRequest


_ATOMIC_MASK: Final = (1 << 8 * ATOMIC_LEN) - 1
HEADERS: Final = 60  # bytes of a message besides its payload, about: IP, UDP, BTH, RETH, ICRC


class LoopbackLink:
    """What joins two queue pairs."""

    def __init__(self, *ends: LoopbackQueuePair) -> None:
        self.ends = ends
        self.cut = False  # nothing arrives any more


_MTU: Final = 4096  # bytes: of no meaning here


class LoopbackQueuePair(OrderedQueuePair):
    """One end, whose requests and answers travel."""

    __slots__ = (
        "_answers_leave", "_answers_pending", "_answers_until", "_refusing", "_requests_until", "_silence_timer",
        "_takes_connection_along", "completes_early", "fabric", "link", "peer",
    )  # fmt: skip

    device: LoopbackDevice
    connection: JoinedBy | None

    def __init__(self, device: LoopbackDevice, init: QpInit) -> None:
        super().__init__(device.fabric.next_qp_number(), device, init)
        self.fabric = device.fabric
        self.peer: LoopbackQueuePair | None = None
        self.link = LoopbackLink(self)
        self._silence_timer: Timer | None = None
        self._takes_connection_along = self.device.attributes.error_disconnects
        self.completes_early = not self.device.attributes.acknowledged  # Sends and Writes, when they leave
        self.fabric.queue_pairs[self.number] = self
        self._requests_until = 0.0  # when the last request of this end arrives
        self._answers_leave = 0.0  # when the last answer of this end leaves
        self._answers_until = 0.0  # and when it arrives
        self._answers_pending = 0  # answers that did not leave yet
        self._refusing = False  # in error for a request of the other end, which is to be told

    # The user's side.

    def modify_to_error(self) -> None:
        was_connected = self.hears
        self.end()
        if was_connected and self._takes_connection_along:
            self._break_connection()

    def destroy(self) -> None:
        super().destroy()
        self.fabric.queue_pairs.pop(self.number, None)

    # The connection manager's side.

    def endpoint(self, address: str) -> QpEndpoint:
        del address
        return QpEndpoint(bytes(16), self.number, 0, _MTU)

    def join(self, other: QpEndpoint, owner: JoinedBy, *, initiator_depth: int, responder_resources: int) -> None:
        if self.state is not INIT or self.connection is not None:
            raise Misuse(f"a queue pair in {self.state.name} that was used before cannot be joined")
        peer = self.fabric.queue_pairs.get(other.number)
        if peer is None:
            raise Unavailable(f"there is no queue pair {other.number:#x}")
        self.connection = owner
        if peer.peer is not self:
            self.pair_with(peer)
        self.initiator_depth = initiator_depth
        self.ready_to_receive()

    def pair_with(self, peer: LoopbackQueuePair) -> None:
        self.peer, peer.peer = peer, self
        self.link = peer.link = LoopbackLink(self, peer)

    def connection_reset(self) -> None:
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
        if self.connection is not None:
            fabric.notices.append(self.connection.lost)
        if self.peer is not None:
            fabric.arrive(fabric.now + fabric.draw(fabric.timing.wire_s), self.peer.connection_reset)

    # The other end's side.

    @property
    def hears(self) -> bool:
        """Whether messages arrive here at all."""
        return self.state is RTS or self.state is RTR

    def take_send(self, request: Send, length: int) -> Status:
        """A message arrived: checks, places, completes a receive. What is wrong is settled here."""
        if self.state is RTR:
            self._communication_established()
        receive = self.next_receive()
        if receive is None:
            if self._takes_connection_along:  # RFC 5041 7.1: no buffer is an error of the stream
                self.break_off(EventKind.QP_REQUEST_ERROR, "a message came for which no receive was posted")
            return Status.RNR_RETRY_EXCEEDED
        scatter = receive.scatter
        if length > sum(map(len, scatter)):
            self._fail_receive(Status.LOCAL_LENGTH_ERROR, "a message was longer than the receive posted for it")
            return Status.REMOTE_INVALID_REQUEST
        revoked = None
        if request.invalidate is not None:
            found = self.domain.may_be_invalidated(request.invalidate, self)
            revoked = None if isinstance(found, AccessRefusal) else found
            if revoked is None:
                self.break_off(EventKind.QP_ACCESS_ERROR, "a message was to void a key that is none")
                return Status.REMOTE_ACCESS_ERROR
        if not self.may_receive(scatter) or not self.place(Kind.SEND, request.gather, scatter):
            self._fail_receive(Status.LOCAL_PROTECTION_ERROR, "a posted receive lies in no region")
            return Status.REMOTE_OPERATION_ERROR
        self.take_receive()
        if revoked is not None:
            revoked.invalidate()
        self.recv_cq.add(
            Completion(
                receive.wr_id, SUCCESS, OP_RECEIVE, length, self.number, request.solicited, request.invalidate,
                request.immediate,
            )
        )  # fmt: skip
        return SUCCESS

    def take_write(self, request: RdmaWrite, length: int) -> Status:
        if self.state is RTR:
            self._communication_established()
        room = self._grant(request.rkey, request.remote_va, length, REMOTE_WRITE)
        if isinstance(room, Status):
            return room
        receive = self.next_receive()
        if request.immediate is not None and receive is None:
            return Status.RNR_RETRY_EXCEEDED
        if not self.place(Kind.WRITE, request.gather, (room,)):
            return Status.REMOTE_OPERATION_ERROR
        if request.immediate is not None and receive is not None:
            self.take_receive()
            self.recv_cq.add(
                Completion(
                    receive.wr_id, SUCCESS, OP_RECEIVE, length, self.number, request.solicited, None, request.immediate
                )
            )
        return SUCCESS

    def take_atomic(self, request: CompareSwap | FetchAdd) -> bytes | Status:
        """Carries it out; the number before it, as the memory had it."""
        if self.state is RTR:
            self._communication_established()
        if request.remote_va % ATOMIC_LEN:  # IBTA 9.4.5
            self.break_off(EventKind.QP_REQUEST_ERROR, "an atomic operation at an address that is no multiple of 8")
            return Status.REMOTE_INVALID_REQUEST
        room = self._grant(request.rkey, request.remote_va, ATOMIC_LEN, REMOTE_ATOMIC)
        if isinstance(room, Status):
            return room
        before = int.from_bytes(room, sys.byteorder)
        if isinstance(request, FetchAdd):
            now = before + request.add
        else:
            now = request.swap if before == request.compare & _ATOMIC_MASK else before
        if not self.place(Kind.ATOMIC, ((now & _ATOMIC_MASK).to_bytes(ATOMIC_LEN, sys.byteorder),), (room,)):
            return Status.REMOTE_OPERATION_ERROR
        return before.to_bytes(ATOMIC_LEN, sys.byteorder)

    def grant_read(self, request: RdmaRead, length: int) -> memoryview | Status:
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
        granted = self.domain.grant(key, va, length, right, self)
        if isinstance(granted, AccessRefusal):
            why = f"the other end named memory that it may not use so: {granted.name}"
            self.break_off(EventKind.QP_ACCESS_ERROR, why)
            return Status.REMOTE_ACCESS_ERROR
        return granted

    # Sending.

    def begin(self, request: SendRequest) -> Status:
        """As for every queue pair, unless a fault wants something else."""
        if (faults := self.fabric.faults) is not None:
            if (status := faults.error_by_wr_id.pop(request.wr_id, None)) is not None:
                return status
            if self.fabric.chance(faults.complete_with_error):
                return self.fabric.rng.choice(faults.error_statuses)
        return super().begin(request)

    def place_read(self, request: RdmaRead | CompareSwap | FetchAdd, data: memoryview | bytes) -> bool:
        """The answer to what brings bytes is here: checks once more, since the memory may have been taken back."""
        return self.may_sink(request.scatter) and self.place(Kind.READ_RESPONSE, (data,), request.scatter)

    def _leave(self, sent: Sent) -> None:
        request = sent.request
        assert not isinstance(request, LocalInvalidate | BindWindow | UdSend)
        size = HEADERS + sent.length
        if isinstance(request, FETCHES):
            size = HEADERS
        self.saw_request(request, sent.length)
        if self.completes_early and isinstance(request, Send | RdmaWrite):
            request = replace(request, gather=(b"".join(request.gather),))
            sent.status = SUCCESS
        if self._passes():
            self._requests_until = max(self._travels(size), self._requests_until)
            self.fabric.arrive(self._requests_until, self._arrived, sent, request)
        else:
            self.expect_silence()
        if sent.status is SUCCESS:
            self._complete_answered()

    def _answered(self, sent: Sent, status: Status, data: bytes) -> None:
        if self.state is not RTS:
            return
        if self.link.cut or not self.device.port_active:
            self.expect_silence()
            return
        if isinstance(sent.request, FETCHES) and status is SUCCESS and not self.place_read(sent.request, data):
            status = Status.LOCAL_PROTECTION_ERROR
        sent.status = status
        self._complete_answered()
        if self.state is RTS:
            self._go_on()

    # What arrives at the other end, and comes back.

    def _arrived(self, sent: Sent, request: Send | RdmaWrite | RdmaRead | CompareSwap | FetchAdd) -> None:
        if self.state is not RTS:
            return
        peer = self.peer
        assert peer is not None
        if self.link.cut or not peer.hears or not peer.device.port_active:
            self.expect_silence()
            return
        fabric = self.fabric
        delay_s, data = 0.0, b""
        if isinstance(request, ATOMICS):
            done = peer.take_atomic(request)
            status, data = (done, b"") if isinstance(done, Status) else (SUCCESS, done)
        elif isinstance(request, RdmaRead):
            granted = peer.grant_read(request, sent.length)
            status = granted if isinstance(granted, Status) else SUCCESS
            delay_s = fabric.draw(fabric.timing.read_s)
        elif isinstance(request, Send):
            status = peer.take_send(request, sent.length)
        else:
            status = peer.take_write(request, sent.length)
        if sent.status is not None:
            return  # it is completed; what was wrong with it ends the connection
        peer._refusing = peer._refusing or status is not SUCCESS
        peer._answers_leave = max(fabric.now + delay_s, peer._answers_leave)
        if peer._answers_pending or peer._answers_leave > fabric.now:
            peer._answers_pending += 1
            fabric.arrive(peer._answers_leave, self._answer_due, sent, status, data)
        else:
            self._answer(sent, status, data)

    def _answer_due(self, sent: Sent, status: Status, data: bytes) -> None:
        assert self.peer is not None
        self.peer._answers_pending -= 1
        self._answer(sent, status, data)

    def _answer(self, sent: Sent, status: Status, data: bytes) -> None:
        peer, request = self.peer, sent.request
        assert peer is not None
        if self.state is not RTS:
            return
        if not (peer.hears or peer._refusing):
            self.expect_silence()
            return
        if isinstance(request, RdmaRead) and status is SUCCESS:
            # The memory is read when the answer leaves; the key may have been withdrawn since the request was checked.
            granted = peer.regrant(request, sent.length)
            if isinstance(granted, Status):
                status = granted
            else:
                data = bytes(granted)
                peer.saw_response(granted)
        elif data:
            peer.saw_response(data)
        else:
            peer.saw_ack(status)
        if not peer._passes():
            self.expect_silence()
            return
        peer._answers_until = max(peer._travels(HEADERS + len(data)), peer._answers_until)
        self.fabric.arrive(peer._answers_until, self._answered, sent, status, data)

    def _passes(self) -> bool:
        fabric = self.fabric
        if fabric.faults is not None and fabric.chance(fabric.faults.lose_connection):
            fabric.cut(self)
        return not self.link.cut and self.device.port_active

    def _travels(self, size: int) -> float:
        fabric = self.fabric
        return self.device.departs(size) + fabric.draw(fabric.timing.wire_s)

    # Silence and errors.

    def expect_silence(self) -> None:
        """Something was lost: whatever is outstanding gets no answer, and fails after a while."""
        if self._silence_timer is None and self.state is RTS and (self._sent or self.completes_early):
            self._silence_timer = self.fabric.call_later(self.fabric.timing.retry_timeout_s, self._give_up)

    def stop_waiting(self) -> None:
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

    def _communication_established(self) -> None:
        # IBTA 12.9.6: the first message is as good as the RTU that it overtook.
        self.tell(EventKind.COMMUNICATION_ESTABLISHED)
        if self.connection is not None:
            self.connection.communication_established()

    def _fail_receive(self, status: Status, why: str) -> None:
        receive = self.take_receive()
        self.recv_cq.add(Completion(receive.wr_id, status, OP_RECEIVE, 0, self.number))
        self.modify_to_error()

    # Memory.

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
                at=self.fabric.now, kind=kind, target=self.device.name, target_qp=self.number, source_address=source,
                target_address=target, length=count,
            )
        )  # fmt: skip

    # Being seen.

    def saw_request(self, request: Send | RdmaWrite | RdmaRead | CompareSwap | FetchAdd, length: int) -> None:
        if self.fabric.observer is None:
            return
        if isinstance(request, Send):
            self._saw(Kind.SEND, request.gather, length, solicited=request.solicited, invalidate=request.invalidate)
        elif isinstance(request, RdmaWrite):
            self._saw(Kind.WRITE, request.gather, length, remote_va=request.remote_va, rkey=request.rkey)
        elif isinstance(request, ATOMICS):
            self._saw(Kind.ATOMIC, (), length, remote_va=request.remote_va, rkey=request.rkey)
        else:
            self._saw(Kind.READ_REQUEST, (), length, remote_va=request.remote_va, rkey=request.rkey)

    def saw_response(self, data: memoryview | bytes) -> None:
        if self.fabric.observer is not None:
            self._saw(Kind.READ_RESPONSE, (data,), len(data))

    def saw_ack(self, status: Status) -> None:
        """This end acknowledges or refuses a request."""
        if self.fabric.observer is not None:
            self._saw(Kind.ACK, (), 0, status=status)

    def _saw(self, kind: Kind, payload: Gather, length: int, **fields: Any) -> None:
        """Tells the observer; `fields` are those of `QpMessage` that not every kind has."""
        assert self.fabric.observer is not None
        assert self.peer is not None
        self.fabric.observer.qp_message(
            QpMessage(
                at=self.fabric.now, kind=kind, source=self.device.name, target=self.peer.device.name,
                source_qp=self.number, target_qp=self.peer.number, payload=payload, length=length, **fields,
            )
        )  # fmt: skip
