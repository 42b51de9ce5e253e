"""Proof by possession: the connection that the sender of a duplicate TCP socket holds.

The duplicate is asked and closed at once: an open one hides the end of the stream from the peer. Within one network
namespace no two sockets have an established connection of the same four addresses and ports. (Those bound to an
interface do, and are not taken for proof.) So two duplicates that mirror each other are the two ends of one connection.
Across namespaces that says nothing; see `path.py`.

A stranger's descriptor is asked nothing that its file system would have to answer.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from dataclasses import dataclass
from typing import Final

from sidestep.errors import PeerViolation
from sidestep.provider.proof import lookup as proof
from sidestep.switch.offers import ConnectionKey

_INTERFACE_NAME_MAX: Final = 16
_TCP_INFO_LEN: Final = 232  # length up to and with tcpi_bytes_retrans, Linux 4.19
_OPTIONS_AGREED: Final = 1 | 2 | 4  # TCPI_OPT_TIMESTAMPS, _SACK, _WSCALE: both ends have them, or neither
_SEQUENCE_SLACK: Final = 2  # SYN and FIN are counted as bytes by some fields and not by others


@dataclass(frozen=True, slots=True)
class TcpFacts:
    """Facts of TCP_INFO with which the other end of a connection must agree."""

    options: int
    snd_wscale: int
    rcv_wscale: int
    bytes_acked: int
    bytes_received: int
    bytes_sent: int

    def agrees(self, later: TcpFacts) -> bool:
        """True if `later`, asked later, can be the other end."""
        return (
            self.options & _OPTIONS_AGREED == later.options & _OPTIONS_AGREED
            and (self.snd_wscale, self.rcv_wscale) == (later.rcv_wscale, later.snd_wscale)
            and self.bytes_acked <= later.bytes_received + _SEQUENCE_SLACK
            and self.bytes_received <= later.bytes_sent + _SEQUENCE_SLACK
        )


@dataclass(frozen=True, slots=True)
class Held:
    """A connection, as the holder of one end shows it."""

    key: ConnectionKey
    cookie: int
    facts: TcpFacts


def examine(fd: int) -> Held | None:
    """Closes the duplicate `fd`; returns its connection, None if it has none (any more) or is bound to an interface.

    Raises:
        PeerViolation: It is no TCP socket.
    """
    with as_socket(fd, "duplicate") as sock:
        if (sock.type, sock.proto) != (socket.SOCK_STREAM, socket.IPPROTO_TCP):
            raise PeerViolation("the duplicate is not of a TCP socket", rule="descriptor")
        try:
            key = proof.connection_key(sock, proof.netns_cookie_of(sock))
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_LEN)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EINVAL):
                raise
            return None
        if not key.netns_cookie or info[0] not in proof.HELD_STATES or bound_to_interface(sock):
            return None  # 0: a kernel that cannot distinguish namespaces
        return Held(key, proof.socket_cookie(sock), _facts(info))


def made_in(fd: int, netns_cookie: int) -> bool:
    """True if `fd`, which stays the caller's, is a socket made in that network namespace; raises PeerViolation."""
    with as_socket(os.dup(fd), "socket") as sock:
        return bool(netns_cookie) and proof.netns_cookie_of(sock) == netns_cookie


def as_socket(fd: int, what: str) -> socket.socket:
    """A socket of the Internet families over `fd`, which it owns from now on; raises PeerViolation and closes it."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.ENOTSOCK:
            raise
        raise PeerViolation(f"the {what} is not a socket", rule="descriptor") from error
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        sock.close()
        raise PeerViolation(f"the {what} is a socket of family {int(sock.family)}", rule="descriptor")
    return sock


def bound_to_interface(sock: socket.socket) -> bool:
    """True if a socket sees one interface only, by SO_BINDTODEVICE or a link-local address."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _INTERFACE_NAME_MAX).rstrip(b"\0"))


def _facts(info: bytes) -> TcpFacts:
    """linux/tcp.h, struct tcp_info."""
    padded = info.ljust(_TCP_INFO_LEN, b"\0")
    acked, received = struct.unpack_from("=QQ", padded, 120)
    (sent,) = struct.unpack_from("=Q", padded, 200)
    return TcpFacts(padded[5], padded[6] & 15, padded[6] >> 4, acked, received, sent)
