"""Sockets of one queue pair: what it sends by, and what it receives by once the engine is to have it.

All packets to a device go to its port 4791. Each queue pair *sends* from a port of its own, always the same, as
adapters do (RoCEv2, for routers that spread flows); so the kernel can tell its packets apart at the other end: a second
socket there, bound to port 4791 as well and connected to that port, gets them all. Only a process of the same user can
have such a socket (SO_REUSEPORT).

The one to send by is never connected, since its packets are to have identification 0 (`datagram`).
"""

from __future__ import annotations

import socket
from contextlib import suppress
from secrets import randbelow
from struct import Struct
from typing import Final

from sidestep.rdma.roce.packet import UDP_PORT

# Of Linux, and not in Python's socket module.
_IP_MTU_DISCOVER: Final = 10
_IPV6_MTU_DISCOVER: Final = 23
_PROBE: Final = 3  # "don't fragment" always; what is known of a path's MTU does not count
_UDP_SEGMENT: Final = 103
_UDP_GRO: Final = 104
_PORT_FIRST: Final = 0xC000  # RoCEv2, annex A17: ports to send from
_PORTS: Final = 1 << 14
_TRIES: Final = 8  # of ports that may be taken
_INT: Final = Struct("=i")
_SHORT: Final = Struct("=H")
CONTROL_LEN: Final = socket.CMSG_SPACE(_INT.size)


def unfragmented(sock: socket.socket) -> None:
    """Its packets have "don't fragment", and identification 0 if it is not connected."""
    if sock.family is socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PROBE)
    else:
        sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PROBE)


def join_received(sock: socket.socket) -> None:
    """Datagrams of one sender come together, where they are of one length."""
    sock.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)


def segment_of(control: list[tuple[int, int, bytes]]) -> int:
    """Bytes of each datagram but the last, of those that came together; 0: it was one."""
    for level, kind, value in control:
        if (level, kind) == (socket.IPPROTO_UDP, _UDP_GRO):
            return int(_INT.unpack_from(value)[0])
    return 0


def cut_into(segment: int) -> tuple[int, int, bytes]:
    """For `sendmsg`: into datagrams of so many bytes."""
    return socket.IPPROTO_UDP, _UDP_SEGMENT, _SHORT.pack(segment)


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
        self.left = b"", 0  # what the engine has not taken, and nobody else yet; bytes of each datagram of it
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
            join_received(self.receiving)
        except OSError:
            self.part()
            return False
        self.joined_to = port
        return True

    def part(self) -> None:
        """No more."""
        if self.receiving is not None:
            self.receiving.close()
        self.receiving = self.joined_to = None

    @property
    def fds(self) -> tuple[int, int] | None:
        """Both of them, to receive and to send by."""
        if self.sending is None or self.receiving is None:
            return None
        return self.receiving.fileno(), self.sending.fileno()

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
