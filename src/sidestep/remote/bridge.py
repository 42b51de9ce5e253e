"""Two TCP connections that are joined: what a gateway falls back to where there is no SDP.

As `pump` does with SDP: a piece of memory a direction, read only while there is nothing left to write of it; ends,
resets and urgent bytes are handed on.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from fcntl import ioctl
from typing import TYPE_CHECKING, Final

from sidestep.loop import READ, WRITE
from sidestep.rdma.iwarp.tcp import RESET

if TYPE_CHECKING:
    from sidestep.loop import Loop
    from sidestep.remote.pump import Pieces

_SIOCATMARK: Final = 0x8905  # asm-generic/sockios.h
_NO_MARK: Final = bytes(4)
_SEND: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class _Side:
    """One of the two, and what was read from it."""

    __slots__ = ("count", "ended", "hung_up", "left", "piece", "sock", "told_end", "urgent", "watched")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.count = 0  # bytes read
        self.piece: memoryview | None = None
        self.left = memoryview(b"")  # of the piece, to be written to the other
        self.urgent = False  # the piece is an urgent byte
        self.ended = False  # it sends no more
        self.told_end = False  # and the other one knows
        self.hung_up = False
        self.watched: int | None = None


class Bridge:
    """One pair; both sockets are connected, and belong to it from now on. `on_over` is called once."""

    def __init__(
        self,
        loop: Loop,
        sockets: tuple[socket.socket, socket.socket],
        pieces: Pieces,
        on_over: Callable[[Bridge], object],
    ) -> None:
        self.why = ""  # what reset it
        self.over = False
        self._loop = loop
        self._pieces = pieces
        self._on_over = on_over
        self._sides = _Side(sockets[0]), _Side(sockets[1])
        for side in self._sides:
            side.sock.setblocking(False)
            side.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            side.sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
            side.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._watch()

    @property
    def counts(self) -> tuple[int, int]:
        """Bytes read from the first, and from the second."""
        return self._sides[0].count, self._sides[1].count

    def abort(self, why: str) -> None:
        if self.over:
            return
        self.why = why
        for side in self._sides:
            with suppress(OSError):  # it may be over by itself
                side.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._end()

    def _end(self) -> None:
        self.over = True
        for side in self._sides:
            if side.watched is not None:
                self._loop.forget(side.sock.fileno())
            side.sock.close()
            if side.piece is not None:
                self._pieces.give(side.piece)
                side.piece = None
        self._on_over(self)

    def _ready(self, side: _Side, other: _Side, events: int) -> None:
        """Something can be read from `side`, or written to it."""
        if self.over:
            return
        try:
            if events & select.EPOLLERR:
                code = side.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                raise OSError(code, os.strerror(code) if code else "reset")
            if events & select.EPOLLHUP:
                side.hung_up = True
            if events & WRITE:
                self._write(other, side)
            if events & (READ | select.EPOLLHUP) and side.piece is None and not side.ended:
                self._read(side)
                self._write(side, other)
        except OSError as error:
            self.abort(f"TCP: {error.strerror or 'reset'}")
            return
        if all(each.told_end for each in self._sides):
            self._end()
        else:
            self._watch()

    def _read(self, side: _Side) -> None:
        piece = self._pieces.take()
        try:
            side.urgent = ioctl(side.sock, _SIOCATMARK, _NO_MARK) != _NO_MARK
            count = side.sock.recv_into(piece[:1] if side.urgent else piece, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._pieces.give(piece)
            return
        except OSError:
            self._pieces.give(piece)
            raise
        if not count:
            self._pieces.give(piece)
            side.ended = True
            return
        side.count += count
        side.piece, side.left = piece, piece[:count]

    def _write(self, source: _Side, target: _Side) -> None:
        if source.left:
            try:
                count = target.sock.send(source.left, _SEND | socket.MSG_OOB if source.urgent else _SEND)
            except BlockingIOError:
                return
            source.left = source.left[count:]
            if not source.left and source.piece is not None:
                self._pieces.give(source.piece)
                source.piece = None
        if source.ended and not source.left and not source.told_end:
            source.told_end = True
            target.sock.shutdown(socket.SHUT_WR)

    def _watch(self) -> None:
        one, two = self._sides
        for side, other in ((one, two), (two, one)):
            wanted = (READ if side.piece is None and not side.ended else 0) | (WRITE if other.left else 0)
            if not wanted and side.hung_up:  # the kernel would tell that all the time
                if side.watched is not None:
                    self._loop.forget(side.sock.fileno())
                    side.watched = None
            elif wanted != side.watched:
                handler = self._ready_one if side is one else self._ready_two
                self._loop.watch(side.sock.fileno(), wanted, handler)
                side.watched = wanted

    def _ready_one(self, events: int) -> None:
        one, two = self._sides
        self._ready(one, two, events)

    def _ready_two(self, events: int) -> None:
        one, two = self._sides
        self._ready(two, one, events)
