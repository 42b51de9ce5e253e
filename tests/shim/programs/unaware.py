"""A thread waits in a set whose first connection is promoted meanwhile, and does not get a processor just then.

`server` prints its port and sends, looking at its set after each byte, until it reads a line; then it prints what its
waiting thread was told. `client PORT` reads, and answers the last byte.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
from pathlib import Path


def is_waiting(thread: int) -> bool:
    return "epoll" in Path(f"/proc/self/task/{thread}/wchan").read_text(encoding="ascii")


def serve() -> None:
    everywhere = os.sched_getaffinity(0)
    told: list[list[tuple[int, int]]] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, select.epoll() as epoll:
        print(listener.getsockname()[1], flush=True)
        conn = listener.accept()[0]
        epoll.register(conn, select.EPOLLIN)
        waiter = threading.Thread(target=lambda: told.append(epoll.poll()))
        waiter.start()
        thread = waiter.native_id or 0
        while not is_waiting(thread):
            os.sched_yield()
        # it gets no processor from here on, so that this thread takes what was to wake it
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        for one in (0, thread):
            os.sched_setaffinity(one, {min(everywhere)})
        while not select.select([sys.stdin], [], [], 0)[0]:
            with contextlib.suppress(BlockingIOError):
                conn.send(b"x", socket.MSG_DONTWAIT)
            epoll.poll(0)
        os.sched_setaffinity(thread, everywhere)
        conn.sendall(b"!")
        waiter.join()
        print([len(events) for events in told], flush=True)
        conn.recv(1)
        conn.close()


def connect(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as conn:
        while not conn.recv(4096).endswith(b"!"):
            pass
        conn.sendall(b"a")
        conn.recv(1)


if sys.argv[1] == "server":
    serve()
else:
    connect(int(sys.argv[2]))
