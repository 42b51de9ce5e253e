"""Ordinary SDP connections of other hosts for programs of this one, which know only TCP.

Who obeys nothing but the standard asks the port mapper for a service, that is a TCP port, and gets an RDMA port, where
it sends its Hello: that of iWARP (docs/wire/sdp.md §23.2), which names neither address nor port, or the longer one of
InfiniBand (§5.1). So each service that is asked for has an RDMA port of its own, for as long as who asked may use it.
Other providers ask at another port, the provider's own, for any service: the `Promotion` beside their Hello says which.

A request is answered once TCP has connected with the listener, at the very address that was asked for: nobody listens,
or its queue is full, and the request is rejected. Then a `Pump` joins the two. To the kernel it is a connection from
this host. A listener under the shim is told who it really is: it recognises such connections by the address that they
come from, of `TRANSLATED_ADDRESS`'s network, or, with IPv6, the listener's own, and asks the provider.

Who may come in: hosts that are trusted, to listeners that the policy leaves to SDP; to those that do not see who comes
only if a rule says so. Where providers have a key it must be shown, which ordinary requests cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, ip_address
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.errors import LimitReached, Misuse, PeerViolation, SidestepError, Unavailable
from sidestep.native.layout import TRANSLATED_ADDRESS
from sidestep.remote.inbound import Inbound, settings_for
from sidestep.remote.pump import Pieces
from sidestep.switch.protocol import Endpoint, Ends, Row

if TYPE_CHECKING:
    from sidestep.rdma.cm import ConnectionRequest, Listener
    from sidestep.remote.protocol import Sdp
    from sidestep.routing import Address
    from sidestep.sdp.settings import SdpSettings
    from sidestep.sdp.stack import Stack

NAMED: Final = IPv4Address(TRANSLATED_ADDRESS)


@dataclass(slots=True)
class _Service:
    """One that has an RDMA port."""

    listener: Listener
    until: float  # it is given back then, unless somebody asks


class Serving:
    """The services at one address of this host."""

    def __init__(self, sdp: Sdp, transport: str, stack: Stack, address: Address) -> None:
        self._sdp = sdp
        self._transport = transport
        self._stack = stack
        self._address = address
        self._pieces = Pieces()
        self._services: dict[int, _Service] = {}
        self._inbound: dict[Inbound, tuple[int, Ends]] = {}  # each with the user that listens, and both ends

    def close(self) -> None:
        for service in self._services.values():
            service.listener.close()
        self._services.clear()
        for inbound in list(self._inbound):
            inbound.abandon("the provider stops")

    def links(self) -> Iterator[Row]:
        """Those that are established, each with the user that listens."""
        for inbound, (uid, ends) in self._inbound.items():
            if inbound.pump is not None:
                yield uid, {"protocol": self._sdp.name} | ends.as_json() | inbound.pump.details()

    def port_for(self, service: int) -> tuple[int, float] | None:
        """The RDMA port of a service and for how long it may be used; None: there is none.

        Raises:
            LimitReached, Unavailable: Too many services; nobody listens, or it is not to be reached by SDP.
        """
        loop = self._sdp.loop
        if self._sdp.key is not None:
            raise Unavailable("ordinary SDP cannot show that it has the key")
        self._sdp.services.check_listener(self._sdp, self._transport, Endpoint(self._address, service))
        known = self._services.get(service)
        if known is None:
            if len(self._services) >= limits.SERVICE_PORTS_MAX:
                raise LimitReached(f"{limits.SERVICE_PORTS_MAX} services have an RDMA port")
            listener = self._stack.take_requests(0, partial(self._requested, service))
            self._services[service] = known = _Service(listener, 0.0)
            loop.call_later(limits.SERVICE_KEPT_S, partial(self._look_after, service))
        known.until = loop.now + limits.SERVICE_KEPT_S
        return known.listener.service_id & 0xFFFF, limits.SERVICE_PORT_S

    def _look_after(self, service: int) -> None:
        """Gives the port of a service back that nobody has asked for in a while."""
        known = self._services.get(service)
        if known is None:
            return
        left_s = known.until - self._sdp.loop.now
        if left_s > 0:
            self._sdp.loop.call_later(left_s, partial(self._look_after, service))
        else:
            del self._services[service]
            known.listener.close()

    def _requested(self, service: int, request: ConnectionRequest) -> None:
        try:
            port = request.transport[1][1] if request.transport is not None else 0
            client = Endpoint(ip_address(request.remote_address.partition("%")[0]), port)
            settings = self._judge(request, client.address)
        except (PeerViolation, Unavailable, Misuse, LimitReached) as why:
            self._refuse(request, service, why)
        else:
            self.take(request, service, client, settings)

    def take(
        self,
        request: ConnectionRequest,
        service: int,
        client: Endpoint,
        settings: SdpSettings,
        *,
        beside_hello: int = 0,
    ) -> None:
        """Joins a request that is in order, of that client, with the service; or rejects it."""
        local = Endpoint(self._address, service)
        try:
            if len(self._inbound) >= limits.SERVED_MAX:
                raise LimitReached(f"{limits.SERVED_MAX} connections are served")
            visited = self._sdp.services.lease_listener(self._sdp, self._transport, local)
        except (PeerViolation, Unavailable, Misuse, LimitReached) as why:
            self._refuse(request, service, why)
            return

        def over(inbound: Inbound) -> None:
            self._inbound.pop(inbound, None)
            visited.leave()

        def name(comes_from: Endpoint) -> Callable[[], None]:
            return self._sdp.services.map_addresses(Ends(local, comes_from), Ends(local, client))

        inbound = Inbound(
            self._sdp.loop, self._stack, self._pieces, request, settings, local, over,
            partial(self.log, request, service), timeout_s=limits.SERVICE_CONNECT_S, beside_hello=beside_hello,
            name=name if visited.named else None,
            source=NAMED if visited.named and self._address.version == NAMED.version else self._address,
        )  # fmt: skip
        self._inbound[inbound] = visited.uid, Ends(local, client)

    def _judge(self, request: ConnectionRequest, host: Address) -> SdpSettings:
        """Whether an ordinary request is in order and believed, and the settings for its kind of Hello."""
        if not self._sdp.trusts(host):
            raise PeerViolation("it is none of the hosts given with --remote", rule="service_host")
        if self._sdp.key is not None:
            raise Unavailable("ordinary SDP cannot show that it has the key")
        return settings_for(request.private_data, host, self._address)

    def _refuse(self, request: ConnectionRequest, service: int, why: SidestepError) -> None:
        self.log(request, service, f"is refused: {why}")
        request.reject()

    def log(self, request: ConnectionRequest, service: int, what: str) -> None:
        self._sdp.services.log(f"SDP from {request.remote_address} for port {service} {what}")
