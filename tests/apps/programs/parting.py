"""One end says all it has to say and closes at once; the other must read every byte of it, and then the end.

`parting.py serve PORT WAY` and `parting.py read PORT WAIT`: the two exchange short messages until a line comes on the
reader's stdin. What the reader reads then is printed as its length and digest.
"""

from __future__ import annotations

import hashlib
import random
import select
import socket
import sys

SIZE = 300_000
MESSAGE = 10


def exactly(conn: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = conn.recv(count - len(data))
        assert part, "an early end"
        data += part
    return data


def serve(port: int, way: str) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        print("listening", flush=True)
        conn, _ = listener.accept()
        with conn:
            while (message := exactly(conn, MESSAGE)) != b"e" * MESSAGE:
                conn.sendall(message)
            conn.sendall(random.Random(1).randbytes(SIZE))
            if way == "shutdown":
                conn.shutdown(socket.SHUT_WR)
                assert conn.recv(1) == b"", "the reader sends nothing more"


def read(port: int, wait: str) -> None:
    with socket.create_connection(("127.0.0.1", port)) as conn:
        while not select.select([sys.stdin], [], [], 0)[0]:
            conn.sendall(b"x" * MESSAGE)
            exactly(conn, MESSAGE)
        conn.sendall(b"e" * MESSAGE)
        digest, length = hashlib.sha256(), 0
        poller = select.epoll() if wait == "epoll" else None
        if poller is not None:
            poller.register(conn, select.EPOLLIN | select.EPOLLRDHUP)
        if wait != "blocking":
            conn.setblocking(False)  # what is told ready must be: it raises BlockingIOError if it is not
        while True:
            if poller is not None:
                assert poller.poll(30)
            elif wait == "select":
                assert select.select([conn], [], [], 30)[0]
            data = conn.recv(65536)
            if not data:
                break
            digest.update(data)
            length += len(data)
        print(length, digest.hexdigest(), flush=True)


if __name__ == "__main__":
    {"serve": serve, "read": read}[sys.argv[1]](int(sys.argv[2]), sys.argv[3])
