"""Taking in the connections that come to a listening socket, as many as one turn of a loop may."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sidestep.errors import Unavailable
from sidestep.loop import READ

if TYPE_CHECKING:
    from sidestep.loop import Loop, Timer

_PAUSE_S: Final = 0.1
_PER_TURN: Final = 64
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def listening(local: tuple[str, int], backlog: int) -> socket.socket:
    """A TCP socket that listens; port 0 is any free one.

    Raises:
        Unavailable: The address or the port cannot be had.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in local[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(local)
        sock.listen(backlog)
    except OSError as why:
        sock.close()
        raise Unavailable(
            f"nobody can listen on {local[0]} port {local[1]}: {why.strerror}",
            remedy="choose another port, or stop the program that has it",
        ) from why
    return sock


class Acceptor:
    """Acceptor of one listening socket, while it is `wanted`; other connections wait.

    When the kernel has no descriptor or no memory for another connection it pauses, since the listener would be ready
    all the time. `on_exhausted` gets the reason.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        take: Callable[[socket.socket, Any], object],
        on_exhausted: Callable[[str], object] = lambda _why: None,
    ) -> None:
        """`take` gets each connection with its address, and may close the listener."""
        self._loop = loop
        self._sock = sock
        self._take = take
        self._on_exhausted = on_exhausted
        self._wanted = True
        self._pause: Timer | None = None
        sock.setblocking(False)
        self._watch()

    def want(self, wanted: bool) -> None:
        if wanted is not self._wanted:
            self._wanted = wanted
            self._watch()

    def close(self) -> None:
        """Closes the socket, too."""
        if self._pause is not None:
            self._pause.cancel()
        if self._sock.fileno() >= 0:
            self._loop.forget(self._sock.fileno())
            self._sock.close()

    def _watch(self) -> None:
        fd = self._sock.fileno()
        if fd >= 0 and self._wanted and self._pause is None:
            self._loop.watch(fd, READ, self._on_ready)
        elif fd >= 0:
            self._loop.forget(fd)

    def _on_ready(self, _events: int) -> None:
        for _ in range(_PER_TURN):
            if not self._wanted or self._sock.fileno() < 0:
                return
            try:
                found = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._on_exhausted(error.strerror or "")
                    self._pause = self._loop.call_later(_PAUSE_S, self._go_on)
                    self._watch()
                    return
                continue  # accept(2): an error of the connection that was to be accepted; the next one may be good
            self._take(*found)

    def _go_on(self) -> None:
        self._pause = None
        self._watch()
