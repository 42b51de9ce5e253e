"""What the connection managers of all devices made of software have in common.

A device adds how a connection is asked for, made and ended, and what listening needs of its transport.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from sidestep import limits
from sidestep.errors import Misuse
from sidestep.rdma.cm import (
    REJECT_CONSUMER,
    REJECT_INVALID_SERVICE_ID,
    ConnectionManager,
    ConnectionRequest,
    Listener,
)
from sidestep.rdma.soft.qp import SoftQueuePair
from sidestep.rdma.verbs import QpState

if TYPE_CHECKING:
    from sidestep.rdma.cm import PrivateDataMatch, RequestHandler
    from sidestep.rdma.soft.device import SoftDevice
    from sidestep.rdma.verbs import QueuePair

_Q = TypeVar("_Q", bound=SoftQueuePair)


class SoftListener(Listener):
    """A service id, and perhaps what the private data must have."""

    def __init__(
        self,
        service_id: int,
        handler: RequestHandler,
        match: PrivateDataMatch | None,
        backlog: int,
        closed: Callable[[SoftListener], object],
    ) -> None:
        self.service_id = service_id
        self.handler = handler
        self.match = match
        self.backlog = backlog
        self.closed = False
        self.pending = 0
        self._closed = closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._closed(self)


class SoftRequest(ConnectionRequest):
    """A request: it counts for its listener until it is answered, or who asked has given up."""

    def __init__(self, remote_address: str) -> None:
        self._answered = False
        self._listener: SoftListener | None = None
        self.withdrawn = False  # who asked has given up; it can still be answered, to no effect
        self.remote_address = remote_address
        self.service_id = 0
        self.private_data = b""
        self.responder_resources = self.initiator_depth = 0

    def deliver(self) -> None:
        if self._answered:
            return
        assert self._listener is not None
        if self._listener.closed:
            self.reject(REJECT_INVALID_SERVICE_ID)
        else:
            self._listener.handler(self)

    def withdraw(self) -> None:
        if not self.withdrawn:
            self.withdrawn = True
            if not self._answered:
                self._leave_backlog()

    def _enter_backlog(self, listener: SoftListener) -> None:
        self._listener = listener
        listener.pending += 1

    def _answer(self) -> None:
        if self._answered:
            raise Misuse("the request was answered already")
        self._answered = True
        if not self.withdrawn:
            self._leave_backlog()

    def _leave_backlog(self) -> None:
        self.forget()
        if self._listener is not None:
            self._listener.pending -= 1

    @abstractmethod
    def forget(self) -> None:
        """Takes it out of what its manager has to be answered."""


class ListenerTable(ConnectionManager):
    """The part of a connection manager that keeps listeners and finds the one a request is for."""

    def __init__(self) -> None:
        self.listeners: list[SoftListener] = []

    def listen(
        self,
        service_id: int,
        handler: RequestHandler,
        *,
        match: PrivateDataMatch | None = None,
        backlog: int = limits.RDMA_BACKLOG_DEFAULT,
    ) -> SoftListener:
        if not 0 <= service_id < 1 << 64:
            raise Misuse("a service id has 64 bits")
        if backlog < 1:
            raise Misuse("a listener needs room for a request")
        if any(each.service_id == service_id and each.match == match for each in self.listeners):
            raise Misuse(f"somebody listens on service id {service_id:#018x} already")
        listener = SoftListener(self.open_service(service_id), handler, match, backlog, self.listener_closed)
        self.listeners.append(listener)
        return listener

    def open_service(self, service_id: int) -> int:
        """Gets ready for requests; which service id it is."""
        return service_id

    def listener_closed(self, listener: SoftListener) -> None:
        self.listeners.remove(listener)

    def find_listener(self, service_id: int, private_data: bytes) -> SoftListener | int:
        """Whom a request is for, or the reason why it is rejected; see `ConnectionManager.listen`."""
        candidates = [each for each in self.listeners if each.service_id == service_id]
        if not candidates:
            return REJECT_INVALID_SERVICE_ID
        candidates.sort(key=lambda each: each.match is None)  # stable: the order of listening otherwise
        for listener in candidates:
            if listener.match is None or listener.match.matches(private_data):
                return REJECT_CONSUMER if listener.pending >= listener.backlog else listener
        return REJECT_CONSUMER

    def check_private_data(self, private_data: bytes, most: int) -> None:
        """Raises Misuse if there is too much."""
        if len(private_data) > most:
            raise Misuse(f"{len(private_data)} bytes of private data; {most} have room")


class SoftManager(ListenerTable, Generic[_Q]):
    """The connection manager of one device, whose queue pairs are of one class."""

    device: SoftDevice

    def __init__(self, device: SoftDevice) -> None:
        super().__init__()
        self.device = device

    def check_qp(self, qp: QueuePair) -> _Q:
        """A queue pair that can be connected.

        Raises:
            Misuse: Of another device, or not in INIT.
        """
        if not isinstance(qp, SoftQueuePair) or qp.device is not self.device:
            raise Misuse("a queue pair of another device")
        if qp.state is not QpState.INIT or qp.connection is not None:
            raise Misuse(f"a queue pair in {qp.state.name} that was used before cannot be connected")
        return cast("_Q", qp)  # what the device makes
