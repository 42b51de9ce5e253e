"""A client that streams small messages or converses, as it is told, and a server: `serve` or `turn` ADDRESS PORT.

Messages are of 64 bytes; the server sends those back that begin with "P". The client does what its last line of input
says, "stream" or "talk", until the next one comes, and says "right" at the end if every answer was.
"""

from __future__ import annotations

import select
import socket
import sys
from typing import Final

SIZE: Final = 64
AT_ONCE: Final = 20


def serve(address: str, port: int) -> None:
    with socket.create_server((address, port)) as listener:
        print("listens", flush=True)
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            kept = b""
            while data := connection.recv(1 << 16):
                kept += data
                whole = len(kept) - len(kept) % SIZE
                for at in range(0, whole, SIZE):
                    if kept[at] == ord("P"):
                        connection.sendall(kept[at : at + SIZE])
                kept = kept[whole:]
    print("over", flush=True)


def turn(address: str, port: int) -> None:
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number, doing = 0, ""
        while True:
            if not doing or select.select([sys.stdin], [], [], 0)[0]:
                doing = sys.stdin.readline().strip()
                if not doing:
                    break
            for _ in range(AT_ONCE):
                number += 1
                message = b"%s %d" % (b"P" if doing == "talk" else b"S", number)
                connection.sendall(message.ljust(SIZE))
                if doing == "talk":
                    answer = b""
                    while len(answer) < SIZE:
                        answer += connection.recv(SIZE - len(answer))
                    assert answer == message.ljust(SIZE)
    print("right", flush=True)


if __name__ == "__main__":
    {"serve": serve, "turn": turn}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
