"""Two ends of one connection that talk when they are told to.

usage: chat.py server PORT             echoes; prints "listening" first
       chat.py client PORT [urgent]    makes ROUNDS round trips, prints "talked", and goes on for each line it reads;
                                       "urgent": sends a byte of urgent data first
"""

from __future__ import annotations

import socket
import sys
import threading

ROUNDS = 20
MESSAGE = b"x" * 100


def echo(connection: socket.socket) -> None:
    """Sends back what comes."""
    with connection:
        while data := connection.recv(4096):
            connection.sendall(data)


def serve(port: int) -> None:
    """A thread for each connection, until killed."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        print("listening", flush=True)
        while True:
            threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()


def talk(port: int, *, urgent: bool) -> None:
    """Round trips, as many again for each line of standard input."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        if urgent:
            connection.send(b"!", socket.MSG_OOB)
        while True:
            for _ in range(ROUNDS):
                connection.sendall(MESSAGE)
                left = len(MESSAGE)
                while left:
                    left -= len(connection.recv(left))
            print("talked", flush=True)
            if not sys.stdin.readline():
                return


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(int(sys.argv[2]))
    else:
        talk(int(sys.argv[2]), urgent="urgent" in sys.argv)
