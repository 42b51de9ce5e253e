"""A TCP connection that is being made, in a loop: to a listener of this host, or from a gateway to another one."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, TypeAlias

from sidestep.loop import WRITE
from sidestep.rdma.iwarp.tcp import RESET
from sidestep.switch.protocol import Endpoint

if TYPE_CHECKING:
    from sidestep.loop import Loop
    from sidestep.routing import Address

Dialled: TypeAlias = Callable[[socket.socket | None, str], object]  # the connection, or None and a half sentence


class Dial:
    """One attempt; `done` is called once, in a turn of the loop, unless it is cancelled.

    Args:
        loop: That watches the socket.
        remote: Where to.
        done: Gets the socket, which is non-blocking and the callee's, or why there is none.
        timeout_s: For the other end's kernel. A listener whose queue is full lets who asks wait.
        source: The address of this host to come from; None leaves it to the kernel.
    """

    def __init__(
        self, loop: Loop, remote: Endpoint, done: Dialled, *, timeout_s: float, source: Address | None = None
    ) -> None:
        self._loop = loop
        self._done = done
        self._over = False
        self._sock: socket.socket | None = None
        self._timer = loop.call_later(timeout_s, lambda: self._finish("it takes no more connections, or is not there"))
        try:
            family = socket.AF_INET if remote.address.version == 4 else socket.AF_INET6
            self._sock = sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            if source is not None:
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_BIND_ADDRESS_NO_PORT, 1)
                sock.bind((str(source), 0))
            code = sock.connect_ex((str(remote.address), remote.port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError as error:
            why = error.strerror or "it cannot be reached"
            loop.soon(lambda: self._finish(why))
        else:
            loop.watch(sock.fileno(), WRITE, self._ready)

    @property
    def local(self) -> Endpoint | None:
        """Where it comes from; None: it has not even begun."""
        try:
            host, port = self._sock.getsockname()[:2] if self._sock is not None else ("", 0)
        except OSError:
            return None
        return Endpoint(ip_address(host), port) if port else None

    def cancel(self) -> None:
        self._stop()
        if self._sock is not None:
            self._sock.close()

    def _ready(self, _events: int) -> None:
        assert self._sock is not None
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._finish(os.strerror(code))
        elif self._sock.getsockname() == self._sock.getpeername():
            self._finish("nobody listens")  # its own port was chosen as the source: TCP has connected it with itself
        else:
            self._finish("")

    def _finish(self, why: str) -> None:
        if self._over:
            return
        self._stop()
        if why and self._sock is not None:
            self._sock.close()
        self._done(None if why else self._sock, why)

    def _stop(self) -> None:
        self._over = True
        self._timer.cancel()
        if self._sock is not None and self._sock.fileno() >= 0:
            self._loop.forget(self._sock.fileno())


def reset(sock: socket.socket) -> None:
    """Closes a connection in a way that its other end hears as an error."""
    with suppress(OSError):  # it may be over by itself
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sock.close()
