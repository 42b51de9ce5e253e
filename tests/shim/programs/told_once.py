"""Threads wait in one level-triggered set for connections that others use.

`server COUNT` takes so many and prints the looks that told of one twice; `client PORT COUNT` makes them.
"""

from __future__ import annotations

import select
import socket
import sys
import threading

WATCHERS = 4


def echo(conn: socket.socket) -> None:
    with conn:
        while data := conn.recv(100):
            conn.sendall(data)


def watch(epoll: select.epoll, twice: list[list[int]]) -> None:
    """Looks for as long as anything is true: an open connection can be written to."""
    while events := epoll.poll(5, 64):
        fds = [fd for fd, _ in events]
        if len({*fds}) < len(fds):
            twice.append(fds)


def serve(count: int) -> None:
    twice: list[list[int]] = []
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener, select.epoll() as epoll:
        print(listener.getsockname()[1], flush=True)
        watchers = [threading.Thread(target=watch, args=(epoll, twice)) for _ in range(WATCHERS)]
        for number in range(count):
            conn = listener.accept()[0]
            epoll.register(conn, select.EPOLLIN | select.EPOLLOUT)
            threading.Thread(target=echo, args=(conn,), daemon=True).start()
            if number == 0:
                for watcher in watchers:
                    watcher.start()
        for watcher in watchers:
            watcher.join()
    print(twice, flush=True)


def connect(port: int, count: int) -> None:
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port)) as conn:
            for _ in range(50):
                conn.sendall(b"x")
                assert conn.recv(1) == b"x"


if sys.argv[1] == "server":
    serve(int(sys.argv[2]))
else:
    connect(int(sys.argv[2]), int(sys.argv[3]))
