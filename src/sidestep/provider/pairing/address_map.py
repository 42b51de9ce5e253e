"""Real addresses of connections between a provider and programs.

Such a connection stands for one with another host: it leads from the program to the provider. Programs under the shim
ask for its real addresses by showing the socket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from ipaddress import ip_address
from typing import Final

from sidestep import limits
from sidestep.provider.proof import lookup as proof
from sidestep.provider.proof.duplicate import as_socket
from sidestep.routing import plain_address
from sidestep.switch.protocol import Endpoint, Ends


class AddressMap:
    """Addresses of one provider's connections, and of some that are over, whose programs may still ask."""

    def __init__(self, netns_cookie: int) -> None:
        self._netns_cookie: Final = netns_cookie
        self._live: dict[Ends, Ends] = {}
        self._past: OrderedDict[Ends, Ends] = OrderedDict()

    def add(self, ends: Ends, names: Ends) -> Callable[[], None]:
        """The program's socket has `ends`; to be called once the connection is over."""
        self._live[ends] = names
        self._past.pop(ends, None)

        def over() -> None:
            if self._live.get(ends) is names:
                del self._live[ends]
                self._past[ends] = names
                while len(self._past) > limits.NAMES_PAST_MAX:
                    self._past.popitem(last=False)

        return over

    def of(self, fd: int) -> Ends | None:
        """The true addresses of a socket, None if none are known; `fd` is closed.

        Raises:
            PeerViolation: It is no socket of the Internet families.
        """
        with as_socket(fd, "socket to be named") as sock:
            try:
                ends = Ends(_endpoint(sock.getsockname()), _endpoint(sock.getpeername()))
            except OSError:  # a socket that is not connected, or not any more
                return None
            if proof.netns_cookie_of(sock) != self._netns_cookie:
                return None  # another network has the same addresses
        return self._live.get(ends) or self._past.get(ends)


def _endpoint(address: tuple[str, int]) -> Endpoint:
    return Endpoint(plain_address(ip_address(address[0].partition("%")[0])), address[1])
