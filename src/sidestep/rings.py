"""Views of ring memory, behind `peek`, `consume`, `reserve` and `commit` of `sidestep.socket.socket`.

A `Window` maps the rings of one connection a second time, each twice in a row, so that a view is contiguous wherever it
lies. The mapping stays for as long as there is a view of it, also after the socket is closed. `consume` and `commit`
refuse while there is a view of the bytes that they would release. While room is reserved, any other send by that ring
waits as if the ring were full.

While a connection is on TCP, or goes back to it, the same calls work on copies.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import time
from typing import TYPE_CHECKING, Final

from sidestep import embed, limits
from sidestep.errors import Misuse
from sidestep.native import layout

if TYPE_CHECKING:
    from sidestep.native._channel import Ring


_WORD: Final = {"I": ctypes.c_uint32, "Q": ctypes.c_uint64}


class _Piece(ctypes.Structure):
    """A piece of a ring, as the shim returns it."""

    _fields_ = tuple((name, _WORD[code]) for name, code, _ in layout.RECORDS["sidestep_piece"])
    serial: int
    position: int
    offset: int
    len: int
    size: int


class Window:
    """Views and reserved room of one socket; for one reading and one writing thread."""

    def __init__(self) -> None:
        self._receiving: tuple[int, Ring] | None = None  # serial of the connection, and its mapping
        self._sending: tuple[int, Ring] | None = None
        self._front = _Piece()  # first piece of the bytes peeked at
        self._peeked_len = 0
        self._room: _Piece | None = None  # reserved on the ring
        self._copy: bytearray | None = None  # reserved beside it

    # ---- receiving ----
    def peek(self, sock: socket.socket, size: int) -> memoryview:
        """See `sidestep.socket.socket.peek`."""
        if size == 0:
            raise Misuse("peek(0) sees nothing", remedy="leave the size out to see all that is there")
        view = self._look(sock, size)
        if view is None:
            # recv() knows how to wait, what has ended and what is an error; then what is there is looked at again
            view = self._look(sock, size) if sock.recv(1, socket.MSG_PEEK) else memoryview(b"")
        if view is None:
            copy_len = limits.PEEK_COPY_MAX if size < 0 else min(size, limits.PEEK_COPY_MAX)
            view = memoryview(sock.recv(copy_len, socket.MSG_PEEK))
        self._peeked_len = len(view)
        return view

    def consume(self, sock: socket.socket, size: int) -> None:
        """See `sidestep.socket.socket.consume`."""
        if not 0 <= size <= self._peeked_len:
            raise Misuse(f"{size} bytes cannot be consumed", remedy=f"the last peek() showed {self._peeked_len}")
        if self._receiving is not None and self._receiving[1].exports:
            raise BufferError("a view of peek() is still in use; release it, or leave its with block, first")
        shim = embed.loaded()
        failed = shim.sidestep_consume(sock.fileno(), ctypes.byref(self._front), ctypes.c_size_t(size)) if shim else 1
        if failed == -errno.ESTALE:
            self._peeked_len = 0
            raise Misuse("other bytes have been received since peek()", remedy="use one or the other in one thread")
        if failed:
            self._throw_away(sock, size)
        self._peeked_len -= size
        self._front.position += size

    def _look(self, sock: socket.socket, size: int) -> memoryview | None:
        """The front of the ring; None if nothing comes from there now."""
        shim = embed.loaded()
        if shim is None or shim.sidestep_look(sock.fileno(), ctypes.byref(self._front)):
            return None
        self._receiving = _mapped(self._receiving, sock, self._front, sending=False)
        return _piece_of(self._receiving, self._front, self._front.len if size < 0 else min(size, self._front.len))

    @staticmethod
    def _throw_away(sock: socket.socket, size: int) -> None:
        """Takes `size` bytes from TCP, where they are or, if the connection is going back to it, will be at once."""
        while size:
            try:
                got = sock.recv(size, socket.MSG_TRUNC)  # recv(2): TCP throws them away
            except BlockingIOError:
                _wait(sock, select.POLLIN, None)
                continue
            if not got:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            size -= len(got)

    # ---- sending ----
    def reserve(self, sock: socket.socket, size: int) -> memoryview:
        """See `sidestep.socket.socket.reserve`."""
        if size <= 0:
            raise Misuse(f"{size} bytes cannot be reserved")
        if self._room is not None or self._copy is not None:
            raise Misuse("room is reserved already", remedy="commit() it; commit(0) gives it back")
        if sock.fileno() < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        shim = embed.loaded()
        timeout = sock.gettimeout()
        deadline = None if timeout is None else time.monotonic() + timeout
        room = _Piece()
        while shim is not None:
            failed = shim.sidestep_reserve(sock.fileno(), ctypes.c_size_t(size), ctypes.byref(room))
            if not failed:
                self._room = room
                self._sending = _mapped(self._sending, sock, room, sending=True)
                if (view := _piece_of(self._sending, room, room.len)) is not None:
                    return view
                self.give_back(sock)
                break
            if failed == -errno.EAGAIN:
                _wait_for_room(sock, deadline)
            elif failed == -errno.EDEADLK:
                raise OSError(errno.EDEADLK, os.strerror(errno.EDEADLK))
            else:
                break
        if deadline is not None:  # a caller that must not wait long waits here, not in commit()
            _wait_for_room(sock, deadline)
        self._copy = bytearray(min(size, limits.RESERVE_COPY_MAX))
        return memoryview(self._copy)

    def commit(self, sock: socket.socket, size: int) -> None:
        """See `sidestep.socket.socket.commit`."""
        reserved_len = self._room.len if self._room is not None else len(self._copy or b"")
        if not 0 <= size <= reserved_len:
            raise Misuse(f"{size} bytes cannot be committed", remedy=f"{reserved_len} are reserved")
        if self._room is None:
            if self._copy is not None:
                del self._copy[size:]  # BufferError while there is a view, as below
                data, self._copy = self._copy, None
                _send_all(sock, memoryview(data))
            return
        if self._sending is not None and self._sending[1].exports:
            raise BufferError("a view of reserve() is still in use; release it, or leave its with block, first")
        shim = embed.loaded()
        if shim is not None and size:
            if not shim.sidestep_commit(sock.fileno(), ctypes.byref(self._room), ctypes.c_size_t(size)):
                self._room = None
                return
            # The connection left the ring. The bytes are ours until the room is released.
            view = _piece_of(self._sending, self._room, size)
            data = bytearray(view or b"")
            self.give_back(sock)
            _send_all(sock, memoryview(data))
        else:
            self.give_back(sock)

    def give_back(self, sock: socket.socket) -> None:
        """Ends the reservation, if there is one, with nothing sent; what was written there is lost."""
        room, self._room, self._copy = self._room, None, None
        shim = embed.loaded()
        if room is not None and shim is not None and sock.fileno() >= 0:
            shim.sidestep_unreserve(sock.fileno(), ctypes.byref(room))


def _mapped(
    known: tuple[int, Ring] | None, sock: socket.socket, piece: _Piece, *, sending: bool
) -> tuple[int, Ring] | None:
    """The mapping of the connection that `piece` is of; None if there can be none, and copies have to do."""
    if known is not None and known[0] == piece.serial:
        return known
    shim = embed.loaded()
    try:
        from sidestep.native._channel import Ring
    except ImportError:  # built without Python's headers
        return None
    if shim is None:
        return None
    shim.sidestep_map.restype = ctypes.c_void_p
    address = shim.sidestep_map(sock.fileno(), ctypes.c_uint64(piece.serial), int(sending))
    return (piece.serial, Ring(address, 2 * piece.size, not sending)) if address else None


def _piece_of(mapped: tuple[int, Ring] | None, piece: _Piece, size: int) -> memoryview | None:
    if mapped is None:
        return None
    with memoryview(mapped[1]) as ring:
        return ring[piece.offset : piece.offset + size]


def _wait(sock: socket.socket, events: int, deadline: float | None) -> None:
    """Waits until the socket is ready; TimeoutError at the deadline."""
    poller = select.poll()
    poller.register(sock, events)
    left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    if not poller.poll(left_ms):
        raise TimeoutError("timed out")


def _wait_for_room(sock: socket.socket, deadline: float | None) -> None:
    """Waits for room as `send` would: BlockingIOError where the socket does not block, TimeoutError at the deadline."""
    try:
        _wait(sock, select.POLLOUT, deadline)
    except TimeoutError:
        if sock.gettimeout() == 0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        raise


def _send_all(sock: socket.socket, data: memoryview) -> None:
    """Sends all, also by a socket that does not block: `commit` has no way to report a part."""
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            _wait(sock, select.POLLOUT, None)
