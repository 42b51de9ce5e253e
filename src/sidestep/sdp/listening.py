"""A port that connections come to, and where they wait until the program accepts them.

The other end is answered as soon as it asks, before the program accepts, as SDP stacks do and as the backlog of a TCP
socket works: the handshake is over when the connection comes out of the queue. The backlog bounds those in the queue
and those on their way into it; who asks then is refused (docs/wire/sdp.md §2.4).

Listeners of one port on different addresses are told apart by what Hello says (§2.3), so they may coexist, and one for
any address takes what they leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Final

from sidestep.errors import Unavailable
from sidestep.sdp.private_data import family_of, match_address
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent
from sidestep.sdp.settings import Carrier

if TYPE_CHECKING:
    from sidestep.rdma.cm import ConnectionRequest
    from sidestep.sdp.endpoint import SdpStream, StreamHandler
    from sidestep.sdp.stack import Stack

_BOTH: Final = frozenset({4, 6})


class Listening:
    """Takes connections to a port until it is closed.

    Args:
        stack: Whose device they come to.
        port: Where they ask for.
        address: The one address to serve; an unspecified one serves all of its family, None all.
        backlog: Connections that wait, in the queue or on their way into it; the next one is refused.
        ready: Called whenever one can be accepted.

    Raises:
        Misuse: There is one for this port and address already.
        Unavailable: The carrier's Hello has no addresses.
    """

    def __init__(
        self,
        stack: Stack,
        port: int,
        *,
        address: IPv4Address | IPv6Address | None = None,
        backlog: int,
        ready: Callable[[], None] | None = None,
    ) -> None:
        self.port = port
        self.address = address
        self.backlog = max(1, backlog)
        self.refused = 0  # for lack of room
        self._ready = ready
        self._families = _BOTH if address is None else frozenset({address.version})
        self._carrier = stack.settings.carrier
        self._opening: dict[SdpStream, list[StreamEvent]] = {}  # and what they were told so far
        self._queue: deque[tuple[SdpStream, list[StreamEvent]]] = deque()
        self._closed = False
        match = None
        if address is not None and not address.is_unspecified:
            if self._carrier is Carrier.IWARP:
                raise Unavailable("a Hello of iWARP does not say for which address it is", remedy="listen on all")
            match = match_address(address)
        self._listener = stack.listen(port, self._asked, match=match, backlog=self.backlog, admit=self._admits)

    @property
    def waiting(self) -> int:
        """Connections that can be accepted."""
        return len(self._queue)

    def accept(self, tell: StreamHandler) -> SdpStream | None:
        """The connection that has waited the longest; `tell` gets what it was told meanwhile, and all that follows."""
        if not self._queue:
            return None
        stream, told = self._queue.popleft()
        stream.tell = tell
        for event in told:
            tell(stream, event)
        return stream

    def close(self) -> None:
        """Takes no more; those that nobody has accepted are reset."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        left = [*self._opening, *(stream for stream, _ in self._queue)]
        self._opening.clear()
        self._queue.clear()
        for stream in left:
            stream.abort()

    def _admits(self, request: ConnectionRequest) -> bool:
        if len(self._opening) + len(self._queue) >= self.backlog:
            self.refused += 1
            return False
        return self._carrier is Carrier.IWARP or family_of(request.private_data) in self._families

    def _asked(self, stream: SdpStream) -> None:
        self._opening[stream] = []
        stream.tell = self._tell

    def _tell(self, stream: SdpStream, event: StreamEvent) -> None:
        told = self._opening.get(stream)
        if told is None:
            told = next((told for waits, told in self._queue if waits is stream), None)
            if told is not None and event not in told:  # each thing once: the other end may go on for ever
                told.append(event)
            return
        told.append(event)
        kind = event.kind if isinstance(event, SdpEvent) else None
        if kind is SdpEventKind.ESTABLISHED:
            self._queue.append((stream, self._opening.pop(stream)))
            if self._ready is not None:
                self._ready()
        elif kind is SdpEventKind.CLOSED:
            del self._opening[stream]  # it never came to be
