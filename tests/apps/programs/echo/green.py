"""Echo with gevent: a greenlet a connection in the server, two a connection in the client."""

from __future__ import annotations

import sys
from pathlib import Path

import gevent
from gevent import socket
from gevent.server import StreamServer

HOST = "127.0.0.1"
NUDGE = bytes(1000)


def echo(conn: socket.socket, _address: object) -> None:
    while data := conn.recv(16384):
        conn.sendall(data)
    conn.shutdown(socket.SHUT_WR)
    conn.close()


def serve() -> None:
    server = StreamServer((HOST, 0), echo, backlog=128)
    server.start()
    print(server.server_port, flush=True)
    server.serve_forever()


def send(conn: socket.socket, data: bytes) -> None:
    conn.sendall(data)
    conn.shutdown(socket.SHUT_WR)


def talk(port: int, place: Path, number: int) -> None:
    conn = socket.create_connection((HOST, port))
    while (place / "wait").exists():
        conn.sendall(NUDGE)
        back = 0
        while back < len(NUDGE):
            back += len(conn.recv(len(NUDGE) - back)) or sys.exit("an early end")
    sender = gevent.spawn(send, conn, (place / f"{number}.in").read_bytes())
    got = bytearray()
    while data := conn.recv(65536):
        got += data
    (place / f"{number}.out").write_bytes(got)
    sender.get()
    conn.close()


def main() -> None:
    if sys.argv[1] == "server":
        serve()
    port, connections, place = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    gevent.joinall([gevent.spawn(talk, port, place, number) for number in range(connections)], raise_error=True)


if __name__ == "__main__":
    main()
