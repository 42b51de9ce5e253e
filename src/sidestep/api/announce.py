"""What this process tells other hosts of its SDP services: its own part in the port mapper.

While it listens it answers the port mapper's question (UDP 3935) for its services, whatever event loop or thread
serves them, unless another program has that port. If that is another one of this API, it names the service's own number
for what it does not know, which is right. A provider with `--remote` knows TCP's listeners only: then the services of
this process are found by who names their RDMA port, which is that number, too.
"""

from __future__ import annotations

import logging
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.remote.peers import Peers
from sidestep.switch.protocol import Endpoint

if TYPE_CHECKING:
    from sidestep.loop import Loop
    from sidestep.routing import Address

log: Final = logging.getLogger("sidestep")
_ANY: Final[dict[int, Address]] = {4: IPv4Address(0), 6: IPv6Address(0)}


class Announcer:
    """The services of one process; for the one thread that has the loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._services: set[Endpoint] = set()
        self._peers: Peers | None = None

    def add(self, local: Endpoint) -> None:
        """Somebody listens there now."""
        self._services.add(local)
        if self._peers is None:
            self._peers = Peers(self._loop, self._port_for, log.info)

    def remove(self, local: Endpoint) -> None:
        """Nobody does any more."""
        self._services.discard(local)
        if not self._services and self._peers is not None:
            self._peers.close()
            self._peers = None

    @property
    def heard(self) -> bool:
        """Whether the port mapper's questions come here."""
        return self._peers is not None and not self._peers.blind

    def _port_for(self, local: Address, host: Address, port: int) -> tuple[int, float] | None:
        del host  # whoever may connect may ask
        known = {Endpoint(local, port), Endpoint(_ANY[local.version], port)}
        if known & self._services:
            return port, limits.SERVICE_TOLD_S
        return (port, 0.0) if port else None  # another program of this host may listen there, of which nothing is known
