"""Sockets of one queue pair: what it sends by, and what it receives by once the engine is to have it.

All packets to a device go to its port 4791. Each queue pair *sends* from a port of its own, always the same, as
adapters do (RoCEv2, for routers that spread flows); so the kernel can tell its packets apart at the other end: a second
socket there, bound to port 4791 as well and connected to that port, gets them all. Only a process of the same user can
have such a socket (SO_REUSEPORT).

The one to send by is never connected, since its packets are to have identification 0 (`datagram`).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from secrets import randbelow
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from sidestep.rdma.roce.packet import UDP_PORT

if TYPE_CHECKING:
    from sidestep.native._engine import Datagrams
    from sidestep.rdma.frames import IpAddress

# Of Linux, and not in Python's socket module.
_IP_MTU_DISCOVER: Final = 10
_IPV6_MTU_DISCOVER: Final = 23
_PROBE: Final = 3  # "don't fragment" always; what is known of a path's MTU does not count
_UDP_GRO: Final = 104
_PORT_FIRST: Final = 0xC000  # RoCEv2, annex A17: ports to send from
_PORTS: Final = 1 << 14
_TRIES: Final = 8  # of ports that may be taken
_DATAGRAM_MAX: Final = 65536
_INT: Final = Struct("=i")


def unfragmented(sock: socket.socket) -> None:
    """Its packets have "don't fragment", and identification 0 if it is not connected."""
    if sock.family is socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PROBE)
    else:
        sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PROBE)


class OwnSockets:
    """They are made when they are first needed; without one the device's does."""

    def __init__(self, address: str, version: int, buffer: int) -> None:
        self._address = address
        self._family = socket.AF_INET6 if version == 6 else socket.AF_INET
        self._buffer = buffer
        self.source_port = UDP_PORT
        self.sending: socket.socket | None = None
        self.receiving: socket.socket | None = None
        self.joined_to: int | None = None  # the other end's port
        self._datagrams: Datagrams | None = None
        self.left: list[bytes] = []  # what the engine has not taken, and nobody else yet
        with suppress(OSError):  # too many descriptors
            self.sending = self._opened()
            self._bind_anywhere(self.sending)

    def join(self, address: str, port: int) -> bool:
        """What comes from there comes here from now on; False: it does not."""
        try:
            self.receiving = self._opened()
            self.receiving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self.receiving.bind((self._address, UDP_PORT))
            self.receiving.connect((address, port))
            self.receiving.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
        except OSError:
            self.part()
            return False
        self.joined_to = port
        return True

    def part(self) -> None:
        """No more."""
        if self.receiving is not None:
            self.receiving.close()
        self.receiving = self.joined_to = self._datagrams = None

    def datagrams(self, local: IpAddress, remote: IpAddress) -> Datagrams | None:
        """Both of them, for the engine."""
        from sidestep.native._engine import Datagrams  # who has no engine does not ask

        if self._datagrams is None and self.sending is not None and self.receiving is not None:
            fds = self.receiving.fileno(), self.sending.fileno()
            self._datagrams = Datagrams(local.packed, remote.packed, *fds)
        return self._datagrams

    def received(self, most: int) -> Iterator[tuple[Any, bytes]]:
        """What has come, and from where; at most so many times what the kernel has put together."""
        for _ in range(most):
            if self.receiving is None:
                return
            try:
                data, control, _, source = self.receiving.recvmsg(_DATAGRAM_MAX, socket.CMSG_SPACE(_INT.size))
            except BlockingIOError:
                return
            except OSError:  # an ICMP error; the timers tell it
                continue
            size = len(data)
            for level, kind, value in control:
                if (level, kind) == (socket.IPPROTO_UDP, _UDP_GRO):
                    (size,) = _INT.unpack_from(value)
            for begin in range(0, len(data), max(1, size)):
                yield source, data[begin : begin + size]

    def close(self) -> None:
        self.part()
        if self.sending is not None:
            self.sending.close()

    def _opened(self) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        unfragmented(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._buffer)
        return sock

    def _bind_anywhere(self, sock: socket.socket) -> None:
        for _ in range(_TRIES):
            with suppress(OSError):
                sock.bind((self._address, _PORT_FIRST + randbelow(_PORTS)))
                break
        else:
            sock.bind((self._address, 0))
        self.source_port = sock.getsockname()[1]
