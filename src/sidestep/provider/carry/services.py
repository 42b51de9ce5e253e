"""What the switch does for offload protocols: watching descriptors, timers, the log."""

from __future__ import annotations

import heapq
import selectors
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final, TypeAlias

from sidestep import limits
from sidestep.config import RemoteSettings
from sidestep.errors import LimitReached
from sidestep.provider.pairing.address_map import AddressMap
from sidestep.provider.pairing.listeners import Listeners
from sidestep.switch.modules import Transports
from sidestep.switch.protocol import (
    Awaited,
    Driven,
    Endpoint,
    Ends,
    Incoming,
    ListenerLease,
    OffloadProtocol,
    OffloadTransport,
    PortMapper,
    Workers,
)

EndFinder: TypeAlias = Callable[
    [OffloadProtocol, Endpoint, Endpoint, Callable[[Incoming], None], Callable[[str], None]], Awaited
]

WorkerStarter: TypeAlias = Callable[[OffloadProtocol, PortMapper], Workers | None]


class ProviderServices:
    """The provider's loop, as a module sees it (`sidestep.switch.protocol.Services`)."""

    def __init__(
        self, selector: selectors.BaseSelector, clock: Callable[[], float], log: Callable[[str], None]
    ) -> None:
        self._selector: Final = selector
        self._clock = clock
        self._log = log
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # a heap; the number keeps equal times apart
        self._numbers = count()
        self.transports_known: Transports | None = None  # set once there are any to ask
        self.remote: RemoteSettings | None = None
        self.port_mapper: PortMapper | None = None  # set in a worker
        self.worker_starter: WorkerStarter | None = None  # set in a provider that may have workers
        self.find_end: EndFinder | None = None  # set once there is a pairing
        self.listeners: Listeners | None = None  # likewise
        self.address_map: AddressMap | None = None
        self._driven: list[Driven] = []

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, on_readable)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Calls once, `delay_s` seconds from now at the earliest; raises LimitReached."""
        if len(self._timers) >= limits.MODULE_TIMERS_MAX:
            raise LimitReached(f"{limits.MODULE_TIMERS_MAX} timers are pending")
        heapq.heappush(self._timers, (self._clock() + delay_s, next(self._numbers), callback))

    def drive(self, driven: Driven) -> None:
        """Lets something take its turns in this loop, until `release_driven`."""
        self._selector.register(driven.fileno(), selectors.EVENT_READ, lambda: driven.turn(0))
        self._driven.append(driven)

    def release_driven(self, driven: Driven) -> None:
        self._driven.remove(driven)
        self._selector.unregister(driven.fileno())

    def start_workers(self, carrier: OffloadProtocol, mapper: PortMapper) -> Workers | None:
        """Workers that run this protocol, too; None: it carries everything itself."""
        return self.worker_starter(carrier, mapper) if self.worker_starter else None

    def await_end(
        self,
        carrier: OffloadProtocol,
        local: Endpoint,
        remote: Endpoint,
        on_found: Callable[[Incoming], None],
        on_failed: Callable[[str], None],
    ) -> Awaited:
        """Looks for the end at `local` that accepted a connection from `remote`; raises Unavailable."""
        assert self.find_end is not None
        return self.find_end(carrier, local, remote, on_found, on_failed)

    def check_listener(self, carrier: OffloadProtocol, local: Endpoint) -> None:
        """Whether another host's connection may go to the listener there; raises Unavailable."""
        assert self.listeners is not None
        self.listeners.check(carrier, local)

    def lease_listener(self, carrier: OffloadProtocol, local: Endpoint) -> ListenerLease:
        assert self.listeners is not None
        return self.listeners.lease_listener(carrier, local)

    def map_addresses(self, ends: Ends, names: Ends) -> Callable[[], None]:
        """What programs see of a connection, until what this gives is called."""
        assert self.address_map is not None
        return self.address_map.add(ends, names)

    def transports(self) -> Iterator[OffloadTransport]:
        return self.transports_known.each() if self.transports_known else iter(())

    def now(self) -> float:
        """Seconds, on the clock of the timers."""
        return self._clock()

    def log(self, text: str) -> None:
        self._log(text)

    def next_deadline(self) -> float | None:
        """When the next timer is due."""
        own = self._timers[0][0] if self._timers else None
        for driven in self._driven:
            if (wait_s := driven.next_in_s) is not None:
                at = self._clock() + wait_s
                own = at if own is None else min(own, at)
        return own

    def poll_due(self, now: float) -> Callable[[], None] | None:
        """The next callback whose time has come; call until None."""
        return heapq.heappop(self._timers)[2] if self._timers and self._timers[0][0] <= now else None

    @property
    def is_driven(self) -> bool:
        """Whether anything takes its turns here, as what goes to other hosts does."""
        return bool(self._driven)

    def driven_due(self) -> list[Driven]:
        """What has something to do without its descriptor being readable."""
        return [driven for driven in self._driven if driven.next_in_s == 0]
