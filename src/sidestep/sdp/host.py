"""A stack as programs see it: with IP addresses and ports, and a way to find other hosts.

SDP has ports of its own, the same numbers as TCP's and another space (docs/wire/sdp.md §2.3). A `Host` gives them out
and takes them back, knows its addresses, and is told by a function which device an address is reached at. No names are
looked up here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from sidestep.errors import LimitReached, Misuse
from sidestep.sdp.listening import Listening
from sidestep.sdp.settings import Addresses, Carrier

if TYPE_CHECKING:
    from sidestep.sdp.endpoint import SdpStream, StreamHandler
    from sidestep.sdp.hello import IpAddress
    from sidestep.sdp.stack import Stack

EPHEMERAL: Final = range(32768, 61000)  # as SDP stacks have them (docs/wire/sdp.md §21)
_PORTS: Final = range(1, 1 << 16)


class Host:
    """One stack with its addresses.

    Args:
        stack: Its connections.
        addresses: Its own; the first of a family is what its connections come from.
        resolve: The address, as devices have it, of an IP address: what `ConnectionManager.connect` is given.
        kick: Called when something was asked of the stack, for a driver of its device that does not see that by itself.
    """

    def __init__(
        self,
        stack: Stack,
        addresses: Sequence[str | IpAddress],
        *,
        resolve: Callable[[IpAddress], str] = str,
        kick: Callable[[], None] = lambda: None,
    ) -> None:
        self.stack = stack
        self.addresses = tuple(ip_address(address) for address in addresses)
        self.kick = kick
        self._resolve = resolve
        self._ports: dict[int, int] = {}  # users of each
        self._next = 0  # of the ephemeral ones

    # --- ports ---

    def take_port(self, port: int = 0) -> int:
        """Takes a port, or a free one for 0; each is to be given back.

        Raises:
            Misuse: It is none.
            LimitReached: All ephemeral ports are in use.
        """
        port = port or self.free_port()
        if port not in _PORTS:
            raise Misuse(f"{port} is not a port", remedy="choose 1 to 65535")
        self._ports[port] = self._ports.get(port, 0) + 1
        return port

    def free_port(self) -> int:
        """An ephemeral port that nobody has taken.

        Raises:
            LimitReached: All are in use.
        """
        for _ in EPHEMERAL:
            free = EPHEMERAL[self._next]
            self._next = (self._next + 1) % len(EPHEMERAL)
            if free not in self._ports:
                return free
        raise LimitReached(f"{len(EPHEMERAL)} ephemeral ports are in use")

    def give_port(self, port: int) -> None:
        self._ports[port] -= 1
        if not self._ports[port]:
            del self._ports[port]

    @property
    def ports_in_use(self) -> int:
        """Ports that somebody has taken."""
        return len(self._ports)

    # --- connections ---

    def serves(self, address: IpAddress | None) -> bool:
        """Whether connections to that address come here; None and unspecified ones stand for all there are."""
        return address is None or address.is_unspecified or address in self.addresses

    def address_for(self, remote: IpAddress) -> IpAddress:
        """The own address for connections to that one.

        Raises:
            Misuse: There is none of its family.
        """
        for address in self.addresses:
            if address.version == remote.version:
                return address
        raise Misuse(f"no address of this host is of the family of {remote}")

    def connect(self, local: tuple[IpAddress, int], remote: tuple[IpAddress, int], tell: StreamHandler) -> SdpStream:
        """Begins a connection; ports are the caller's to take and to give back.

        Raises:
            Misuse, LimitReached, Unavailable: As `Stack.connect` does.
        """
        stream = self.stack.connect(self._resolve(remote[0]), Addresses(*local, *remote), tell)
        self.kick()
        return stream

    def listen(
        self, address: IpAddress | None, port: int, *, backlog: int, ready: Callable[[], None] | None = None
    ) -> Listening:
        """Takes connections; see `Listening`.

        Raises:
            Misuse: The address is not one of this host, or it is taken with this port.
        """
        if not self.serves(address):
            raise Misuse(f"{address} is not an address of this host")
        if self.stack.settings.carrier is Carrier.IWARP and len(self.addresses) == 1:
            address = None  # its Hello has no addresses, and whatever comes is for this one
        return Listening(self.stack, port, address=address, backlog=backlog, ready=ready)


def release(view: memoryview) -> None:
    """Frees a user's buffer when a call ends, whoever still names the view: an exception's traceback, perhaps."""
    with suppress(BufferError):
        view.release()
