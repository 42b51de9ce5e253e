"""A queue pair whose requests wait, leave and are completed in the order of posting.

A posted request waits in `_waiting` until it may leave: behind an RDMA Read or atomic operation when too many are under
way, or when it is fenced. What has left is in `_sent` until its answer is back; answers may come in any order,
completions do not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from sidestep.rdma.soft.qp import FETCHES, LOCAL_KINDS, RTR, RTS, SUCCESS, SoftQueuePair, length_of
from sidestep.rdma.work import LocalInvalidate, Status

if TYPE_CHECKING:
    from sidestep.rdma.soft.device import SoftDevice
    from sidestep.rdma.soft.memory import QpInit
    from sidestep.rdma.work import SendRequest


class Sent:
    """A request that has left, and its answer once that is back."""

    __slots__ = ("length", "request", "status")

    def __init__(self, request: SendRequest, length: int) -> None:
        self.request = request
        self.length = length
        self.status: Status | None = None


class OrderedQueuePair(SoftQueuePair):
    """A device adds how a request leaves, and sets the status of what was sent when its answer is here."""

    __slots__ = ("_reads", "_sent", "_unsignaled", "_waiting")

    def __init__(self, number: int, device: SoftDevice, init: QpInit) -> None:
        super().__init__(number, device, init)
        self._waiting: deque[SendRequest] = deque()
        self._sent: deque[Sent] = deque()
        self._reads = 0  # among those sent, and atomic operations
        self._unsignaled = 0  # done, and in the queue until a signaled one is

    @property
    def sends_outstanding(self) -> int:
        return len(self._waiting) + len(self._sent) + self._unsignaled

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

    # The connection manager's side.

    def ready_to_receive(self) -> None:
        self.state = RTR

    def ready_to_send(self) -> None:
        if self.state is RTR:
            self.state = RTS

    # Sending.

    def _go_on(self) -> None:
        while self._waiting and self._may_leave(self._waiting[0]):
            request = self._waiting.popleft()
            sent = Sent(request, length_of(request))
            self._sent.append(sent)
            status = self.begin(request)
            if status is not SUCCESS or isinstance(request, LOCAL_KINDS):
                sent.status = status  # told in its turn, behind what left before it
                self._complete_answered()
            else:
                if isinstance(request, FETCHES):
                    self._reads += 1
                self._leave(sent)

    def _may_leave(self, request: SendRequest) -> bool:
        if self._sent and self._sent[-1].status not in (None, SUCCESS):
            return False  # behind a request that failed here nothing is begun
        if isinstance(request, FETCHES) and self._reads >= max(self.initiator_depth, 1):
            return False
        if isinstance(request, LocalInvalidate):
            return not self._sent  # the verbs draft for iWARP 8.2.2.2: it waits for all before it
        return not (request.fence and self._reads)

    @abstractmethod
    def _leave(self, sent: Sent) -> None:
        """Sends a request, which `begin` has found good."""

    def _complete_answered(self) -> None:
        while self._sent and (status := self._sent[0].status) is not None:
            sent = self._sent.popleft()
            is_fetch = isinstance(sent.request, FETCHES)
            if is_fetch and self._reads:
                self._reads -= 1
            self._unsignaled = 0 if sent.request.signaled else self._unsignaled + 1
            self.complete(sent.request, status, sent.length if is_fetch and status is SUCCESS else 0)
