"""Software RNICs of a program: one for each local address that it uses, with SDP on top, all in one loop.

The owner of a `Rnics` drives its loop from one thread at a time. `service` does so from a thread of its own, `engine`
from an asyncio event loop.

Finding a service. A listener takes RDMA at the TCP port of the service's own number. A connecting end asks the port
mapper of the other host for the service (docs/wire/sdp.md §23.4). If the answer is an RDMA port, it connects to that.
If the answer is that there is none, the connection is refused. Without an answer it takes the service's own number, at
which a program of this API listens. With `rdma_port` it does not ask.

While this process listens it answers the port mapper's question (UDP 3935), unless another program has that port. It
answers for the services of all its event loops and threads. If the other program is one of this API, it names the
service's own number for services it does not know, which is right. A provider with `--remote` knows TCP's listeners
only. Then a peer finds the services of this process by their RDMA port, which is that number, too.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from socket import AF_INET, AF_INET6, SOCK_STREAM, socket
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.api.driver import Found, Hosts
from sidestep.errors import InternalError, Misuse, SidestepError, Unavailable
from sidestep.loop import Loop
from sidestep.rdma.control import Control
from sidestep.rdma.iwarp.device import IwarpDevice
from sidestep.rdma.iwarp.qp import IwarpQueuePair
from sidestep.rdma.tools.devices import source_for
from sidestep.remote.peers import Peers
from sidestep.sdp.connection import SdpCause
from sidestep.sdp.endpoint import ignore_event
from sidestep.sdp.errnos import os_error
from sidestep.sdp.host import Host
from sidestep.sdp.settings import Carrier, SdpSettings
from sidestep.sdp.stack import Node
from sidestep.switch.protocol import Endpoint

if TYPE_CHECKING:
    from sidestep.routing import Address
    from sidestep.sdp.endpoint import SdpStream

log: Final = logging.getLogger("sidestep")
_ANY: Final[dict[int, Address]] = {4: IPv4Address(0), 6: IPv6Address(0)}
SETTINGS: Final = SdpSettings(carrier=Carrier.IWARP, cancel_answer_s=limits.API_CANCEL_S)


class Rnics(Hosts):
    """The devices of one loop; `kick` is called when something was asked of one from outside of a turn."""

    def __init__(self, kick: Callable[[], None]) -> None:
        self.loop = Loop()
        self._kick = kick
        self._at: dict[Address, _Rnic] = {}
        self._peers: Peers | None = None  # port mappers of other hosts
        self._services: set[Endpoint] = set()  # the port of a listener
        self._answers: Peers | None = None  # this process's part in the port mapper, while there is one
        self._forsaken = False

    def at(self, address: Address) -> Host:
        if address not in self._at:
            if len(self._at) >= limits.REMOTE_ADDRESSES_MAX:
                raise Unavailable(f"{limits.REMOTE_ADDRESSES_MAX} addresses are in use")
            self._at[address] = _Rnic(self.loop, address, self._kick)
        return self._at[address].host

    def towards(self, remote: Address, local: Address | None) -> Host:
        if local is None or local.is_unspecified:
            local = ip_address(source_for(str(remote)))
        elif local.version != remote.version:
            raise Misuse(f"{local} and {remote} are of different families")
        return self.at(local)

    def free_port(self, address: Address) -> int:
        """A TCP port that no socket has at the moment."""
        family = AF_INET if address.version == 4 else AF_INET6
        with socket(family, SOCK_STREAM) as probe:
            probe.bind((str(address), 0))
            return int(probe.getsockname()[1])

    def find(self, host: Host, remote: Endpoint, found: Found) -> None:
        if self._peers is None:
            self._peers = Peers(self.loop, None, log.debug)
        peers = self._peers

        def answered(port: int | None) -> None:
            if not self._forsaken:
                found(port if port is not None or peers.denied(remote) else remote.port)

        peers.ask(Endpoint(host.addresses[0], 0), remote, answered)
        self._kick()

    def announce(self, local: Endpoint) -> bool:
        self._services.add(local)
        if self._answers is None:
            self._answers = Peers(self.loop, self._port_for, log.info)
        return not self._answers.blind

    def withdraw(self, local: Endpoint) -> None:
        self._services.discard(local)
        if not self._services and self._answers is not None:
            self._answers.close()
            self._answers = None

    def _port_for(self, local: Address, host: Address, port: int) -> tuple[int, float] | None:
        del host  # a host that may connect may ask
        known = {Endpoint(local, port), Endpoint(_ANY[local.version], port)}
        if known & self._services:
            return port, limits.SERVICE_PORT_S
        return (port, 0.0) if port else None  # another program of this host may listen there, of which nothing is known

    def hide(self) -> None:
        """Removes all devices from `sidestep rdma list` and `capture`, as the process ends."""
        for at in self._at.values():
            at.hide()

    def streams(self) -> list[SdpStream]:
        """All connections that are not over."""
        return [stream for at in self._at.values() for stream in at.stack.streams.values()]

    def turn(self) -> bool:
        """Lets what is due happen; returns whether anything did. A fault of ours breaks all connections."""
        try:
            return self.loop.turn(0)
        except Exception as fault:
            log.exception("a turn of the RDMA devices has failed")
            error = InternalError(f"{type(fault).__name__}: {fault}")
            for stream in self.streams():
                stream.fail(error, SdpCause.TRANSPORT)
            return True

    def counters(self) -> dict[str, int]:
        """Counters of all devices, added up; see `sidestep rdma list`."""
        whole: dict[str, int] = {}
        for at in self._at.values():
            for name, value in at.device.counters().items():
                whole[name] = whole.get(name, 0) + value
        return whole

    def forsake(self) -> None:
        """Drops the callbacks of all streams: their event loop is closed."""
        self._forsaken = True
        for stream in self.streams():
            stream.tell = ignore_event

    def close(self) -> None:
        """Ends everything at once."""
        if self._peers is not None:
            self._peers.close()
        for at in self._at.values():
            at.close()
        self.loop.close()


class _Rnic(Node[IwarpDevice]):
    """The device at one address."""

    def __init__(self, loop: Loop, address: Address, kick: Callable[[], None]) -> None:
        super().__init__(loop, IwarpDevice(str(address), loop, name=f"iwarp@{address}"), SETTINGS)
        self.host = Host(self.stack, [address], kick=kick)
        self.observed: Control | None = None
        program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
        try:
            self.observed = Control(loop, [self.device], program)
        except (SidestepError, OSError) as why:
            log.debug("%s cannot be listed or captured: %s", self.device.name, why)

    def hide(self) -> None:
        """`sidestep rdma list` and `capture` do not see it any more."""
        if self.observed is not None:
            self.observed.close()

    def close(self) -> None:
        """Ends everything at once."""
        self.hide()
        super().close()


def details(stream: SdpStream) -> dict[str, object]:
    """A connection at the moment: mode, mechanism, credit, advertisements, and what its queue pair has moved."""
    qp = stream.qp
    moved = qp.details() if isinstance(qp, IwarpQueuePair) else {}
    return {**stream.connection.details(), "queue_pair": moved}


def not_there(remote: Endpoint) -> OSError:
    """Error of a connection if the other host knows no such service."""
    return os_error(errno.ECONNREFUSED, f"the port mapper of {remote.address} knows no RDMA port for {remote.port}")
