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
from functools import partial
from typing import TYPE_CHECKING

from sidestep.loop import READ, WRITE
from sidestep.rdma.iwarp.tcp import RESET
from sidestep.remote.pump import TcpSide

if TYPE_CHECKING:
    from sidestep.loop import Loop
    from sidestep.remote.pump import Pieces


class _Side:
    """One of the two, and what was read from it."""

    def __init__(self, tcp: TcpSide) -> None:
        self.tcp = tcp
        self.count = 0  # bytes read
        self.piece: memoryview | None = None
        self.left = memoryview(b"")  # of the piece, to be written to the other
        self.urgent = False  # the piece is an urgent byte
        self.ended = False  # it sends no more
        self.reported_end = False  # and the other one knows


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
        self._pieces = pieces
        self._on_over = on_over
        self._sides = [_Side(TcpSide(loop, sock, pieces, partial(self._ready, at))) for at, sock in enumerate(sockets)]
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
                side.tcp.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._end()

    def _end(self) -> None:
        self.over = True
        for side in self._sides:
            side.tcp.close()
            self._give_back(side)
        self._on_over(self)

    def _give_back(self, side: _Side) -> None:
        if side.piece is not None:
            self._pieces.give(side.piece)
            side.piece = None

    def _ready(self, at: int, events: int) -> None:
        """Something can be read from that side, or written to it."""
        if self.over:
            return
        side, other = self._sides[at], self._sides[1 - at]
        try:
            if events & select.EPOLLERR:
                code = side.tcp.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                raise OSError(code, os.strerror(code) if code else "reset")
            if events & WRITE:
                self._write(other, side)
            if events & (READ | select.EPOLLHUP) and side.piece is None and not side.ended:
                self._read(side)
                self._write(side, other)
        except OSError as error:
            self.abort(f"TCP: {error.strerror or 'reset'}")
            return
        if all(each.reported_end for each in self._sides):
            self._end()
        else:
            self._watch()

    def _read(self, side: _Side) -> None:
        if (found := side.tcp.read()) is None:
            return
        piece, count, side.urgent = found
        if count:
            side.count += count
            side.piece, side.left = piece, piece[:count]
        else:
            side.ended = True

    def _write(self, source: _Side, target: _Side) -> None:
        if source.left:
            source.left = source.left[target.tcp.send(source.left, urgent=source.urgent) :]
            if not source.left:
                self._give_back(source)
        if source.ended and not source.left and not source.reported_end:
            source.reported_end = True
            target.tcp.sock.shutdown(socket.SHUT_WR)

    def _watch(self) -> None:
        one, two = self._sides
        for side, other in ((one, two), (two, one)):
            reads = side.piece is None and not side.ended
            side.tcp.watch((READ if reads else 0) | (WRITE if other.left else 0))
