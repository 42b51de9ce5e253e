"""Who listens on which service id, and who of them a request is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sidestep.errors import Misuse
from sidestep.rdma.cm import REJECT_CONSUMER, REJECT_INVALID_SERVICE_ID, Listener, PrivateDataMatch

if TYPE_CHECKING:
    from sidestep.rdma.cm import RequestHandler


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
        self._closed = closed
        self._pending = 0

    @property
    def pending(self) -> int:
        return self._pending

    def count(self, change: int) -> None:
        self._pending += change

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._closed(self)


class ServiceListeners:
    """Those of one device."""

    def __init__(self) -> None:
        self._listeners: list[SoftListener] = []

    def __iter__(self) -> Iterator[SoftListener]:
        return iter(list(self._listeners))

    def __len__(self) -> int:
        return len(self._listeners)

    def check(self, service_id: int, match: PrivateDataMatch | None, backlog: int) -> None:
        """Raises Misuse if nobody can listen so."""
        if not 0 <= service_id < 1 << 64:
            raise Misuse("a service id has 64 bits")
        if backlog < 1:
            raise Misuse("a listener needs room for a request")
        if any(each.service_id == service_id and each.match == match for each in self._listeners):
            raise Misuse(f"somebody listens on service id {service_id:#018x} already")

    def add(self, listener: SoftListener) -> None:
        self._listeners.append(listener)

    def remove(self, listener: SoftListener) -> None:
        self._listeners.remove(listener)

    def find(self, service_id: int, private_data: bytes) -> SoftListener | int:
        """Whom a request is for, or the reason why it is rejected; see `ConnectionManager.listen`."""
        candidates = [each for each in self._listeners if each.service_id == service_id]
        if not candidates:
            return REJECT_INVALID_SERVICE_ID
        candidates.sort(key=lambda each: each.match is None)  # stable: the order of listening otherwise
        for listener in candidates:
            if listener.match is None or listener.match.matches(private_data):
                return REJECT_CONSUMER if listener.pending >= listener.backlog else listener
        return REJECT_CONSUMER
