"""TCP sockets: the one file of this device that holds any.

A `Tcp` is a connected socket, or one that is being connected, with its readiness in the device's loop. What the bytes
mean is the business of `manager` (startup) and `stream` (full operation), which take it over one after the other.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, Protocol

from sidestep.accepting import Acceptor, listening
from sidestep.errors import InternalError, Misuse, Unavailable
from sidestep.loop import READ, WRITE
from sidestep.rdma.iwarp.tap import Wire

if TYPE_CHECKING:
    from sidestep.loop import Loop
    from sidestep.rdma.iwarp.tap import Taps

_MSS_UNKNOWN: Final = 1440  # what a path of 1500 bytes leaves, should the kernel not tell
RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST
_DISCARD: Final = 64 << 10  # bytes of one look at what nobody wants any more
_log: Final = logging.getLogger(__name__)


class Handler(Protocol):
    """Whoever a connection belongs to at the moment."""

    def on_readable(self) -> None:
        """There is something to read, or the end."""

    def on_writable(self) -> None:
        """There is room again; only after `watch(write=True)`."""

    def on_broken(self, why: InternalError) -> None:
        """A call of `Tcp.run` failed for a fault of ours; the connection was reset."""


class Tcp:
    """One connection."""

    __slots__ = ("_loop", "_sock", "_watched", "handler", "remote_address", "wire")

    def __init__(self, loop: Loop, sock: socket.socket, handler: Handler, remote_address: str) -> None:
        self._loop = loop
        self._sock = sock
        self._watched = 0
        self.handler = handler
        self.remote_address = remote_address
        self.wire = Wire()

    def opened(self, taps: Taps, *, active: bool) -> None:
        try:
            local, remote = self._sock.getsockname(), self._sock.getpeername()
        except OSError:  # gone again, which reading tells
            local, remote = ("", 0), (self.remote_address, 0)
        self.wire.opened(taps, local[:2], remote[:2], active=active)

    def fileno(self) -> int:
        """-1 once it is closed."""
        return self._sock.fileno()

    @property
    def closed(self) -> bool:
        return self._sock.fileno() < 0

    @property
    def mss(self) -> int:
        """Bytes of a segment (RFC 5044 5.1: EMSS); Linux has taken off the options in use."""
        try:
            return self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) or _MSS_UNKNOWN
        except OSError:
            return _MSS_UNKNOWN

    def watch(self, *, read: bool = True, write: bool = False) -> None:
        events = (READ if read else 0) | (WRITE if write else 0)
        if events != self._watched and not self.closed:
            self._watched = events
            self._loop.watch(self._sock.fileno(), events, self._on_ready)

    def read(self, limit: int) -> bytes | None:
        """What there is; None if nothing, b"" at the end. OSError if the connection broke."""
        try:
            found = self._sock.recv(limit, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            self.wire.reset(outbound=False)
            raise
        if found:
            self.wire.received(found)
        else:
            self.wire.ended(outbound=False)
        return found

    def write(self, data: bytes | memoryview) -> int:
        """How much of it was taken. OSError if the connection broke."""
        try:
            count = self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        self.wire.sent(data[:count])
        return count

    def discard(self) -> bool:
        """Reads what nobody wants any more; True at the end of it. OSError if the connection broke."""
        found = self.read(_DISCARD)
        self.wire.drained += len(found or b"")
        return found is not None and not found

    def end_writing(self) -> None:
        """FIN, behind what was written."""
        self.wire.ended(outbound=True)
        with suppress(OSError):  # it broke meanwhile, which reading tells
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Gives it back; the other end has everything, or will."""
        if not self.closed:
            self.wire.closed()
            self._loop.forget(self._sock.fileno())
            self._sock.close()

    def abort(self) -> None:
        """RST: the other end is told that what comes no more."""
        if not self.closed:
            self.wire.reset(outbound=True)
            with suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.close()

    def run(self, call: Callable[[], object]) -> None:
        """Makes a call for this connection; a fault of ours in it ends this one, not the loop that serves others."""
        try:
            call()
        except Exception as fault:
            _log.exception("the connection with %s is broken by a fault of sidestep", self.remote_address)
            self.abort()
            try:
                self.handler.on_broken(InternalError(f"{type(fault).__name__}: {fault}"))
            except Exception:
                _log.exception("nobody could be told")

    def error(self) -> OSError | None:
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return OSError(code, os.strerror(code)) if code else None

    def _on_ready(self, events: int) -> None:
        if events & WRITE:
            self.run(self.handler.on_writable)
        if events & ~WRITE and not self.closed:
            self.run(self.handler.on_readable)


def _prepared(sock: socket.socket, user_timeout_s: float) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # RFC 5044 5: FPDUs begin segments
    # A host that is gone is noticed although nothing is sent.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(user_timeout_s / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(user_timeout_s / 6)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(user_timeout_s * 1000))
    return sock


def check_address(address: str) -> None:
    """Raises Misuse if it is none of IP's: names are not looked up here."""
    try:
        _family(address)
    except ValueError as why:
        raise Misuse(f"{address!r} is not an IP address") from why


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ip_address(address.partition("%")[0]).version == 6 else socket.AF_INET


def begin_connect(
    loop: Loop, local: str, remote: tuple[str, int], handler: Handler, user_timeout_s: float
) -> tuple[Tcp, OSError | None]:
    """A connection that is being made: writable when it is, or has failed; an error if it fails at once.

    Raises:
        Unavailable: The local address cannot be used, or there is no descriptor left.
    """
    try:
        sock = socket.socket(_family(remote[0]), socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError as why:
        raise Unavailable(f"no socket can be had: {why.strerror}") from why
    _prepared(sock, user_timeout_s)
    tcp = Tcp(loop, sock, handler, remote[0])
    if _family(local) is _family(remote[0]):
        try:
            # The port is chosen when connecting: as many connections as there are pairs of ports.
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_BIND_ADDRESS_NO_PORT, 1)
            sock.bind((local, 0))
        except OSError as why:
            sock.close()
            raise Unavailable(f"{local} cannot be used here: {why.strerror}") from why
    try:
        code = sock.connect_ex(remote)
    except OSError as why:  # an address of an interface that there is not
        return tcp, why
    if code not in (0, errno.EINPROGRESS):
        return tcp, OSError(code, os.strerror(code))
    tcp.watch(read=False, write=True)
    return tcp, None


class TcpListener:
    """A listening socket."""

    def __init__(
        self, loop: Loop, local: tuple[str, int], backlog: int, accept: Callable[[Tcp], object], user_timeout_s: float
    ) -> None:
        """Port 0 is any free one; see `number`.

        Raises:
            Unavailable: The address or the port cannot be had.
        """
        self._loop = loop
        self._accept = accept
        self._user_timeout_s = user_timeout_s
        sock = listening(local, backlog)
        self.number: int = sock.getsockname()[1]
        self._acceptor = Acceptor(loop, sock, self._take_in)

    def close(self) -> None:
        self._acceptor.close()

    def _take_in(self, sock: socket.socket, address: tuple[str, int]) -> None:
        tcp = Tcp(self._loop, _prepared(sock, self._user_timeout_s), _NOBODY, address[0])
        tcp.run(partial(self._accept, tcp))


class _Nobody:
    """A connection that nobody has taken over yet."""

    def on_readable(self) -> None:
        """It is not watched."""

    def on_writable(self) -> None:
        """It is not watched."""

    def on_broken(self, why: InternalError) -> None:
        """Nobody is there to be told."""


_NOBODY: Final = _Nobody()
