"""The place that a connection moves to: another process, port or device (socket duplication).

    arrival = Arrival(new_stack, port, local=..., remote=..., remote_port=..., arrived=...)
    old_stream.suspend(port)                        # the other end is asked to connect to `port`
    ...                                             # old_stream is told SUSPENDED
    arrival.take_over(old_stream.connection.suspended)
    ...                                             # `arrived` gets the new stream, later told ESTABLISHED

Only the other end of the very connection may come: from its address, to ours, with its port in Hello. It is answered
when what the old place has handed over is here (draft-pinkerton-iwarp-sdp; docs/wire/sdp.md §15), so the two may come
in any order. What the two ends say to each other meanwhile is in `suspend`.
"""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING

from sidestep.errors import Misuse, Unavailable
from sidestep.sdp.private_data import match_address
from sidestep.sdp.settings import Carrier, Settings

if TYPE_CHECKING:
    from sidestep.rdma.cm import ConnectionRequest
    from sidestep.sdp.endpoint import Acceptor
    from sidestep.sdp.requests import Suspended
    from sidestep.sdp.stack import Stack


class Arrival:
    """Waits for one connection.

    Args:
        stack: Where it goes on.
        port: Where the other end will ask, as `Stream.suspend` tells it.
        local: The address that it asks for: that of the connection so far.
        remote: The other end's.
        remote_port: And its port.
        arrived: Called with the stream when the other end has come; sets its `tell`.
        settings: Of the connection; the size of private buffers is that of the old place.

    Raises:
        Misuse: Somebody waits for the same already.
        Unavailable: The carrier's Hello has no addresses.
    """

    def __init__(
        self,
        stack: Stack,
        port: int,
        *,
        local: IPv4Address | IPv6Address,
        remote: IPv4Address | IPv6Address,
        remote_port: int,
        arrived: Acceptor,
        settings: Settings | None = None,
    ) -> None:
        self._stack = stack
        self._port = port
        self._arrived = arrived
        self._settings = settings or stack.settings
        self._suspended: Suspended | None = None
        self._request: ConnectionRequest | None = None
        if self._settings.carrier is Carrier.IWARP:
            raise Unavailable("a Hello of iWARP does not say whose it is")
        match = match_address(local, remote, remote_port)
        self._listener = stack.take_requests(port, self._asked, match=match, backlog=1)

    def take_over(self, suspended: Suspended) -> None:
        """Goes on with what the old place has handed over.

        Raises:
            Misuse: It was handed over before.
        """
        if self._suspended is not None:
            raise Misuse("a connection is taken over once")
        self._suspended = suspended
        self._go_on()

    def close(self) -> None:
        self._listener.close()
        if self._request is not None:
            request, self._request = self._request, None
            request.reject()

    def _asked(self, request: ConnectionRequest) -> None:
        self._request = request
        self._go_on()

    def _go_on(self) -> None:
        request, suspended = self._request, self._suspended
        if request is None or suspended is None:
            return
        self._request = None
        self._listener.close()
        settings = replace(self._settings, receive_size=suspended.receive_size)
        self._stack.serve(request, self._arrived, self._port, settings, suspended)
