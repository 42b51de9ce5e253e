"""Both ends of a connection are passed on in the same moment, one with bytes unread: both_passed.py ROUNDS.

Prints of each round how many bytes came to who was given the reading end, or the error.
"""

from __future__ import annotations

import os
import socket
import sys
import time

LEN = 100_000
WARM_S = 0.2  # of conversation, in which the connection is promoted
DATA = bytes(index * 7 % 251 for index in range(LEN))


def take(one: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := one.recv(count - len(data))):
        data += piece
    return data


def pass_on(one: socket.socket, then: str) -> None:
    """To a child that has no descriptor of it yet, which does what is said and ends."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        one.close()
        _, numbers, _, _ = socket.recv_fds(theirs, 1, 1)
        given = socket.socket(fileno=numbers[0])
        if then == "write":
            given.sendall(DATA)
            given.close()
            os._exit(0)
        try:
            got = take(given, 2 * LEN + 1)
            print("whole" if got == DATA + DATA else f"{len(got)} bytes", flush=True)
        except OSError as error:
            print(error, flush=True)
        os._exit(0)
    socket.send_fds(ours, [b"x"], [one.fileno()])
    one.close()
    ours.close()
    os.waitpid(child, 0)


for _ in range(int(sys.argv[1])):
    listener = socket.create_server(("127.0.0.1", 0))
    writer = os.fork()
    if writer == 0:
        one = socket.create_connection(listener.getsockname())
        listener.close()
        until = time.monotonic() + WARM_S
        while time.monotonic() < until:
            one.sendall(b"p" * 64)
            take(one, 64)
        one.sendall(b"q" * 64)
        take(one, 64)
        one.sendall(DATA)
        pass_on(one, "write")
        os._exit(0)
    one, _ = listener.accept()
    listener.close()
    while (record := take(one, 64))[:1] == b"p":
        one.sendall(record)
    one.sendall(record)
    one.recv(1, socket.MSG_PEEK)
    pass_on(one, "read")
    os.waitpid(writer, 0)
