"""Echo with threads and blocking calls: a thread a connection in the server, two a connection in the client."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

NUDGE = bytes(1000)


def echo(conn: socket.socket) -> None:
    with conn:
        while data := conn.recv(16384):
            conn.sendall(data)
        conn.shutdown(socket.SHUT_WR)


def serve() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()


def send(conn: socket.socket, data: bytes) -> None:
    conn.sendall(data)
    conn.shutdown(socket.SHUT_WR)


def talk(port: int, place: Path, number: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as conn:
        while (place / "wait").exists():
            conn.sendall(NUDGE)
            assert conn.recv(len(NUDGE), socket.MSG_WAITALL) == NUDGE
        sender = threading.Thread(target=send, args=(conn, (place / f"{number}.in").read_bytes()), daemon=True)
        sender.start()
        got = bytearray()
        while data := conn.recv(65536):
            got += data
        (place / f"{number}.out").write_bytes(got)
        sender.join()


def main() -> None:
    if sys.argv[1] == "server":
        serve()
    port, connections, place = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    threads = [threading.Thread(target=talk, args=(port, place, number)) for number in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
