"""Plain TCP by the same method: one connection, `sendall` and `recv_into` of whole messages."""

from __future__ import annotations

import socket
import struct
import time
from typing import Final

from rnic.method import SMALL

TCP_PORT: Final = 7472
_ASK: Final = struct.Struct("!cQ")  # what, and the bytes of a message


def serve(address: str) -> None:
    """Takes messages, answers them, or sends them, as each connection asks; one at a time."""
    with socket.create_server((address, TCP_PORT)) as listener:
        while True:
            sock, _ = listener.accept()
            with sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                what, size = _ASK.unpack(_exactly(sock, bytearray(_ASK.size)))
                room = bytearray(size)
                try:
                    while True:
                        if what == b"r":
                            sock.sendall(room)
                            continue
                        _exactly(sock, room)
                        if what == b"p" or room[0] == ord("E"):
                            sock.sendall(room[:SMALL])
                except OSError:
                    continue


def _exactly(sock: socket.socket, room: bytearray) -> bytearray:
    view = memoryview(room)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionResetError("the other end has closed")
        view = view[count:]
    return room


def bandwidth(local: str, remote: str, size: int, seconds: float, *, write: bool) -> float:
    """Bytes per second."""
    with _connection(local, remote, b"w" if write else b"r", size) as sock:
        room = bytearray(size)
        count = 0
        began = time.perf_counter()
        until = began + seconds
        while time.perf_counter() < until:
            if write:
                sock.sendall(room)
            else:
                _exactly(sock, room)
            count += 1
        if write:
            room[0] = ord("E")
            sock.sendall(room)
            count += 1
            _exactly(sock, bytearray(min(size, SMALL)))
        return count * size / (time.perf_counter() - began)


def latency(local: str, remote: str, seconds: float) -> list[float]:
    """Seconds of each round trip."""
    with _connection(local, remote, b"p", SMALL) as sock:
        message, room = b"P" * SMALL, bytearray(SMALL)
        times = []
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            sock.sendall(message)
            _exactly(sock, room)
            times.append(time.perf_counter() - began)
        return times


def rate(local: str, remote: str, seconds: float) -> float:
    """Messages per second, one call each."""
    return bandwidth(local, remote, SMALL, seconds, write=True) / SMALL


def _connection(local: str, remote: str, what: bytes, size: int) -> socket.socket:
    sock = socket.create_connection((remote, TCP_PORT), 20, (local, 0))
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(_ASK.pack(what, size))
    return sock
