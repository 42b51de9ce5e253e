"""Proof by possession: asks the kernel whether the socket that a client names is the connection it claims to hold.

inet_diag can look one socket up by its four-tuple and compare its cookie, in some ten microseconds however many sockets
there are. A dump of all sockets (NLM_F_DUMP) takes milliseconds with ten thousand of them.
"""

from __future__ import annotations

import errno
import socket
import struct
from ipaddress import IPv6Address
from typing import Final

from sidestep.errors import InternalError, Unavailable
from sidestep.routing import plain_address
from sidestep.switch.offers import ConnectionKey
from sidestep.switch.protocol import Endpoint

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_SO_NETNS_COOKIE: Final = 71  # Linux 5.14
SO_COOKIE: Final = 57

_HEADER: Final = struct.Struct("=IHHII")  # struct nlmsghdr: len, type, flags, seq, pid
_REQUEST: Final = struct.Struct("=BBBxI")  # struct inet_diag_req_v2 up to the id: family, protocol, ext, states
_SOCKET_ID: Final = struct.Struct("!HH16s16s")  # struct inet_diag_sockid: ports and addresses; interface and cookie:
_SOCKET_ID_REST: Final = struct.Struct("=IQ")
_REPLY: Final = struct.Struct("=BBBB")  # struct inet_diag_msg up to the id: family, state, timer, retrans
_REPLY_REST: Final = struct.Struct("=12xII")  # fields behind the id: expires, queues; user and inode
_REQUEST_LEN: Final = _HEADER.size + _REQUEST.size + _SOCKET_ID.size + _SOCKET_ID_REST.size
_MAPPED: Final = bytes(10) + b"\xff\xff"
_LISTEN: Final = 10  # TCP_LISTEN
_ANY_COOKIE: Final = (1 << 64) - 1  # INET_DIAG_NOCOOKIE, twice
_RECORD_LEN: Final = _REPLY.size + _SOCKET_ID.size + _SOCKET_ID_REST.size + _REPLY_REST.size  # attributes follow
_ATTRIBUTE: Final = struct.Struct("=HH")  # struct nlattr: len, type; then its value, padded to 4 bytes
_DIAG_INFO: Final = 2  # INET_DIAG_INFO: struct tcp_info
_BYTES_RECEIVED: Final = struct.Struct("=128xQ")  # part of it

# The states in which a process can hold a connection: not TIME_WAIT (6), CLOSE (7), LISTEN (10), NEW_SYN_RECV (12).
HELD_STATES: Final = frozenset({1, 2, 3, 4, 5, 8, 9, 11})


def netns_cookie() -> int:
    """The cookie of this process's network namespace; 0 where the kernel has none (before 5.14)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return netns_cookie_of(sock)


def netns_cookie_of(sock: socket.socket) -> int:
    """The cookie of the network namespace in which a socket was made; 0 where the kernel has none (before 5.14)."""
    try:
        return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8), "little")
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        return 0


def socket_cookie(sock: socket.socket) -> int:
    return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), "little")


def mapped_address(host: str) -> bytes:
    """An address as the records hold it: 16 bytes, IPv4 v4-mapped."""
    if ":" in host:
        return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return _MAPPED + socket.inet_pton(socket.AF_INET, host)


def endpoint_of(address: bytes, port: int) -> Endpoint:
    return Endpoint(plain_address(IPv6Address(address)), port)


def connection_key(sock: socket.socket, netns: int) -> ConnectionKey:
    """A connected TCP socket of this process as its end sees it."""
    local, remote = sock.getsockname(), sock.getpeername()
    return ConnectionKey(netns, mapped_address(local[0]), local[1], mapped_address(remote[0]), remote[1])


class SocketProver:
    """Looks TCP sockets of this process's network namespace up in the kernel."""

    def __init__(self) -> None:
        try:
            self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
        except OSError as error:
            raise Unavailable(f"cannot ask the kernel about sockets: {error.strerror}") from error
        self._netlink.setblocking(False)  # the kernel answers within the send, so nothing is ever waited for
        self._sequence = 0

    def close(self) -> None:
        self._netlink.close()

    def holds(self, key: ConnectionKey, cookie: int) -> bool:
        """True if the kernel has that very connection, with that cookie, in a state in which a process can hold it."""
        return self._look_up_held(key, cookie) is not None

    def received(self, key: ConnectionKey, cookie: int) -> int | None:
        """Bytes that TCP has brought to that connection, with its FIN or without; None: no process holds it."""
        found = self._look_up_held(key, cookie, 1 << _DIAG_INFO - 1)
        at = _RECORD_LEN
        while found is not None and at + _ATTRIBUTE.size <= len(found):
            length, what = _ATTRIBUTE.unpack_from(found, at)
            if what == _DIAG_INFO and length >= _ATTRIBUTE.size + _BYTES_RECEIVED.size:
                return int(_BYTES_RECEIVED.unpack_from(found, at + _ATTRIBUTE.size)[0])
            at += max(length + 3 & ~3, _ATTRIBUTE.size)
        return None

    def listener(self, host: str, port: int) -> tuple[int, int] | None:
        """The inode and the user of the socket that a connection to that address would be accepted by; None: none."""
        anybody = mapped_address("::" if ":" in host else "0.0.0.0")  # noqa: S104 - no address, nothing is bound
        found = self._look_up(ConnectionKey(0, mapped_address(host), port, anybody, 0), _ANY_COOKIE)
        if found is None or _REPLY.unpack_from(found)[1] != _LISTEN:
            return None
        uid, inode = _REPLY_REST.unpack_from(found, _REPLY.size + _SOCKET_ID.size + _SOCKET_ID_REST.size)
        return inode, uid

    def _look_up_held(self, key: ConnectionKey, cookie: int, extensions: int = 0) -> bytes | None:
        found = self._look_up(key, cookie, extensions)
        if found is None:
            return None  # errors: no such socket, or another cookie
        # The lookup falls back to a listener of the same port. It also finds sockets that no process holds: those have
        # no inode. The kernel may keep one in FIN-WAIT-2 for a minute, or until all its bytes are sent.
        _, state, _, _ = _REPLY.unpack_from(found)
        _, found_cookie = _SOCKET_ID_REST.unpack_from(found, _REPLY.size + _SOCKET_ID.size)
        _, inode = _REPLY_REST.unpack_from(found, _REPLY.size + _SOCKET_ID.size + _SOCKET_ID_REST.size)
        return found if state in HELD_STATES and found_cookie == cookie and inode else None

    def _look_up(self, key: ConnectionKey, cookie: int, extensions: int = 0) -> bytes | None:
        """The kernel's record (struct inet_diag_msg) of the socket for packets of that connection."""
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        self._netlink.send(self._request(key, cookie, extensions))
        while True:
            try:
                reply = self._netlink.recv(4096)
            except BlockingIOError as error:
                raise InternalError("the kernel did not answer a sock_diag request") from error
            if _HEADER.unpack_from(reply)[3] == self._sequence:
                break  # else a leftover of an earlier request
        return reply[_HEADER.size :] if _HEADER.unpack_from(reply)[1] == _SOCK_DIAG_BY_FAMILY else None

    def _request(self, key: ConnectionKey, cookie: int, extensions: int) -> bytes:
        local, remote = key.local_addr, key.remote_addr
        is_v4 = local.startswith(_MAPPED) and remote.startswith(_MAPPED)
        if is_v4:  # v4-mapped IPv6 sockets live in the same table
            local, remote = local[12:], remote[12:]
        return b"".join((
            _HEADER.pack(_REQUEST_LEN, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, self._sequence, 0),
            _REQUEST.pack(socket.AF_INET if is_v4 else socket.AF_INET6, socket.IPPROTO_TCP, extensions, 0xFFFFFFFF),
            _SOCKET_ID.pack(key.local_port, key.remote_port, local, remote),
            _SOCKET_ID_REST.pack(0, cookie),  # two 32-bit words, low first: the host's order on little-endian machines
        ))  # fmt: skip
