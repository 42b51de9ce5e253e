"""What the connection managers of all devices made of software have in common.

A device adds how a connection is asked for, made and ended, and what listening needs of its transport.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from sidestep import limits
from sidestep.errors import Misuse
from sidestep.rdma.cm import REJECT_INVALID_SERVICE_ID, ConnectionManager, ConnectionRequest
from sidestep.rdma.soft.listeners import ServiceListeners, SoftListener
from sidestep.rdma.soft.qp import SoftQueuePair
from sidestep.rdma.verbs import QpState

if TYPE_CHECKING:
    from sidestep.rdma.cm import PrivateDataMatch, RequestHandler
    from sidestep.rdma.soft.device import SoftDevice
    from sidestep.rdma.verbs import QueuePair

_Q = TypeVar("_Q", bound=SoftQueuePair)


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
        listener.count(1)

    def _answer(self) -> None:
        if self._answered:
            raise Misuse("the request was answered already")
        self._answered = True
        if not self.withdrawn:
            self._leave_backlog()

    def _leave_backlog(self) -> None:
        self.forget()
        if self._listener is not None:
            self._listener.count(-1)

    @abstractmethod
    def forget(self) -> None:
        """Takes it out of what its manager has to be answered."""


class SoftManager(ConnectionManager, Generic[_Q]):
    """The connection manager of one device, whose queue pairs are of one class."""

    device: SoftDevice

    def __init__(self, device: SoftDevice) -> None:
        self.device = device
        self.listeners = ServiceListeners()

    def listen(
        self,
        service_id: int,
        handler: RequestHandler,
        *,
        match: PrivateDataMatch | None = None,
        backlog: int = limits.RDMA_BACKLOG_DEFAULT,
    ) -> SoftListener:
        self.listeners.check(service_id, match, backlog)
        listener = SoftListener(self.open_service(service_id), handler, match, backlog, self.listener_closed)
        self.listeners.add(listener)
        return listener

    def open_service(self, service_id: int) -> int:
        """Gets ready for requests; which service id it is."""
        return service_id

    def listener_closed(self, listener: SoftListener) -> None:
        self.listeners.remove(listener)

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

    def check_private_data(self, private_data: bytes, most: int) -> None:
        """Raises Misuse if there is too much."""
        if len(private_data) > most:
            raise Misuse(f"{len(private_data)} bytes of private data; {most} have room")
