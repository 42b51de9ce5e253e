"""The queue pair of timed mode: requests and answers travel, and take their time.

Theory of operation. A posted request waits in `_waiting` until it may leave: behind an RDMA Read when too many are
under way, or when it is fenced. What has left is in `_sent` until its answer is back. Requests arrive in the order in
which they left, and answers leave and return in the order of their requests (IBTA 9.7.3), an acknowledgement behind the
answer to an earlier RDMA Read. But a request is carried out when it arrives, whatever answers are still to go: that is
how a Send overtakes the bytes of an earlier RDMA Read.

The memory of a request is read when it arrives at the other end, as a retransmission would: who changes it before the
completion sends something else. What is on its way when its queue pair ends is lost.

Where requests are not acknowledged (iWARP) Sends and Writes are copied and complete when they leave; what goes wrong
with them later is told by the end of the connection.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sidestep.rdma.loopback.qp import LoopbackQueuePair
from sidestep.rdma.soft.qp import LOCAL_KINDS, RTS, SUCCESS, length_of
from sidestep.rdma.work import LocalInvalidate, RdmaRead, Send, Status

if TYPE_CHECKING:
    from sidestep.rdma.loopback.device import LoopbackDevice
    from sidestep.rdma.soft.init import QpInit
    from sidestep.rdma.work import RdmaWrite, SendRequest

HEADERS: Final = 60  # bytes of a message besides its payload, about: IP, UDP, BTH, RETH, ICRC


class _Sent:
    """A request that has left, and its answer once that is back."""

    __slots__ = ("length", "request", "status")

    def __init__(self, request: SendRequest, length: int) -> None:
        self.request = request
        self.length = length
        self.status: Status | None = None


class TimedQueuePair(LoopbackQueuePair):
    """Requests and answers travel."""

    __slots__ = (
        "_answers_leave", "_answers_pending", "_answers_until", "_reads", "_refusing", "_requests_until", "_sent",
        "_unsignaled", "_waiting",
    )  # fmt: skip

    peer: TimedQueuePair | None

    def __init__(self, device: LoopbackDevice, init: QpInit) -> None:
        super().__init__(device, init)
        self._waiting: deque[SendRequest] = deque()
        self._sent: deque[_Sent] = deque()
        self._reads = 0  # among those sent
        self._unsignaled = 0  # done, and in the queue until a signaled one is
        self._requests_until = 0.0  # when the last request of this end arrives
        self._answers_leave = 0.0  # when the last answer of this end leaves
        self._answers_until = 0.0  # and when it arrives
        self._answers_pending = 0  # answers that did not leave yet
        self._refusing = False  # in error for a request of the other end, which is to be told

    @property
    def sends_outstanding(self) -> int:
        return len(self._waiting) + len(self._sent) + self._unsignaled

    @property
    def awaits_answer(self) -> bool:
        return bool(self._sent)

    def take_unfinished(self) -> list[SendRequest]:
        unfinished = [sent.request for sent in self._sent]
        unfinished += self._waiting
        self._sent.clear()
        self._waiting.clear()
        self._reads = 0
        return unfinished

    def post_send(self, request: SendRequest) -> None:
        """Queues the request; it leaves at once if nothing is in its way."""
        if self.check_post(request, self.sends_outstanding):
            self._waiting.append(request)
            self._go_on()

    # At this end.

    def _go_on(self) -> None:
        while self._waiting and self._may_leave(self._waiting[0]):
            request = self._waiting.popleft()
            sent = _Sent(request, length_of(request))
            self._sent.append(sent)
            status = self.begin(request)
            if status is not SUCCESS or isinstance(request, LOCAL_KINDS):
                sent.status = status  # told in its turn, behind what left before it
                self._complete_answered()
            else:
                self._leave(sent)

    def _may_leave(self, request: SendRequest) -> bool:
        if self._sent and self._sent[-1].status not in (None, SUCCESS):
            return False  # behind a request that failed here nothing is begun
        if isinstance(request, RdmaRead) and self._reads >= max(self.initiator_depth, 1):
            return False
        if isinstance(request, LocalInvalidate):
            return not self._sent  # the verbs draft for iWARP 8.2.2.2: it waits for all before it
        return not (request.fence and self._reads)

    def _leave(self, sent: _Sent) -> None:
        request = sent.request
        assert not isinstance(request, LOCAL_KINDS)
        size = HEADERS + sent.length
        if isinstance(request, RdmaRead):
            self._reads += 1
            size = HEADERS
        self.saw_request(request, sent.length)
        if self.completes_early and not isinstance(request, RdmaRead):
            request = replace(request, gather=(b"".join(request.gather),))
            sent.status = SUCCESS
        if self._passes():
            self._requests_until = max(self._travels(size), self._requests_until)
            self.fabric.arrive(self._requests_until, self._arrived, sent, request)
        else:
            self.expect_silence()
        if sent.status is SUCCESS:
            self._complete_answered()

    def _answered(self, sent: _Sent, status: Status, data: bytes) -> None:
        if self.state is not RTS:
            return
        if self.link.cut or not self.device.port_active:
            self.expect_silence()
            return
        if isinstance(sent.request, RdmaRead) and status is SUCCESS and not self.place_read(sent.request, data):
            status = Status.LOCAL_PROTECTION_ERROR
        sent.status = status
        self._complete_answered()
        if self.state is RTS:
            self._go_on()

    def _complete_answered(self) -> None:
        while self._sent and (status := self._sent[0].status) is not None:
            sent = self._sent.popleft()
            is_read = isinstance(sent.request, RdmaRead)
            if is_read and self._reads:
                self._reads -= 1
            self._unsignaled = 0 if sent.request.signaled else self._unsignaled + 1
            self.complete(sent.request, status, sent.length if is_read and status is SUCCESS else 0)

    # At the other end.

    def _arrived(self, sent: _Sent, request: Send | RdmaWrite | RdmaRead) -> None:
        if self.state is not RTS:
            return
        peer = self.peer
        assert peer is not None
        if self.link.cut or not peer.hears or not peer.device.port_active:
            self.expect_silence()
            return
        fabric = self.fabric
        delay_s = 0.0
        if isinstance(request, RdmaRead):
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
            fabric.arrive(peer._answers_leave, self._answer_due, sent, status)
        else:
            self._answer(sent, status)

    def _answer_due(self, sent: _Sent, status: Status) -> None:
        assert self.peer is not None
        self.peer._answers_pending -= 1
        self._answer(sent, status)

    def _answer(self, sent: _Sent, status: Status) -> None:
        peer, request = self.peer, sent.request
        assert peer is not None
        if self.state is not RTS:
            return
        if not (peer.hears or peer._refusing):
            self.expect_silence()
            return
        data = b""
        if isinstance(request, RdmaRead) and status is SUCCESS:
            # The memory is read when the answer leaves; the key may have been withdrawn since the request was checked.
            granted = peer.regrant(request, sent.length)
            if isinstance(granted, Status):
                status = granted
            else:
                data = bytes(granted)
                peer.saw_response(granted)
        else:
            peer.saw_ack(status)
        if not peer._passes():
            self.expect_silence()
            return
        peer._answers_until = max(peer._travels(HEADERS + len(data)), peer._answers_until)
        self.fabric.arrive(peer._answers_until, self._answered, sent, status, data)

    # Both ways.

    def _passes(self) -> bool:
        fabric = self.fabric
        if fabric.faults is not None and fabric.chance(fabric.faults.lose_connection):
            fabric.cut(self)
        return not self.link.cut and self.device.port_active

    def _travels(self, size: int) -> float:
        fabric = self.fabric
        return self.device.departs(size) + fabric.draw(fabric.timing.wire_s)
