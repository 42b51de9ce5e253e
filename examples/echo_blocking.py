"""An echo server and its client with blocking sockets: `socket` of the standard library, replaced by sidestep's.

python examples/echo_blocking.py server 7000 &
python examples/echo_blocking.py client 7000
sidestep ss
"""

from __future__ import annotations

import sys
import threading

from sidestep import socket

ROUNDS = 10_000


def serve(port: int) -> None:
    """Echoes until killed, a thread for each connection."""
    with socket.create_server(("127.0.0.1", port)) as server:
        print("listening", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=echo, args=(connection,), daemon=True).start()


def echo(connection: socket.socket) -> None:
    """Sends back what comes, until the other end has finished."""
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)


def talk(port: int) -> None:
    """Lines there and back."""
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as lines:
        for number in range(ROUNDS):
            lines.write(f"line {number}\n")
            lines.flush()
            assert lines.readline() == f"line {number}\n"
    print(f"{ROUNDS} lines came back")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["server" | "client" as role, port] if port.isdecimal():
            {"server": serve, "client": talk}[role](int(port))
        case _:
            sys.exit("usage: echo_blocking.py server PORT | client PORT")
