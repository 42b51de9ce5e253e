"""What the switch does for offload protocols: the loop, the ends of connections, the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from sidestep.config import RemoteSettings
from sidestep.loop import Loop
from sidestep.provider.pairing.address_map import AddressMap
from sidestep.provider.pairing.listeners import Listeners
from sidestep.switch.modules import Transports
from sidestep.switch.protocol import (
    Awaited,
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
    """The provider, as a module sees it (`sidestep.switch.protocol.Services`)."""

    def __init__(self, loop: Loop, log: Callable[[str], None]) -> None:
        self.loop = loop
        self.log = log
        self.transports_known: Transports | None = None  # set once there are any to ask
        self.remote: RemoteSettings | None = None
        self.port_mapper: PortMapper | None = None  # set in a worker
        self.worker_starter: WorkerStarter | None = None  # set in a provider that may have workers
        self.find_end: EndFinder | None = None  # set once there is a pairing
        self.listeners: Listeners | None = None  # likewise
        self.address_map: AddressMap | None = None

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
