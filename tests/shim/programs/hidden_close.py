"""A server closes a connection by a function of a library. The number goes to a file, then to the next connection.

`hidden_close.py serve PATH LIBRARY FUNCTION` prints its port, then "right"; `hidden_close.py ask PORT` talks to it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

MESSAGES = 3000  # to and fro on each connection: it is promoted long before
SIZE = 64
NOTE = b"to the file"


def echo(one: socket.socket) -> None:
    """Sends back each message."""
    for _ in range(MESSAGES):
        one.sendall(one.recv(SIZE, socket.MSG_WAITALL))


def serve(path: str, library: str, function: str) -> None:
    """Takes two connections, one after the other, under the same number."""
    close = getattr(ctypes.CDLL(library), function)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        one, _ = listener.accept()
        echo(one)
        number = one.detach()
        assert close(number) == 0
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
        assert file == number
        assert os.write(file, NOTE) == len(NOTE)
        os.lseek(file, 0, os.SEEK_SET)
        assert os.read(file, 100) == NOTE
        assert close(file) == 0
        one, _ = listener.accept()
        with one:
            assert one.fileno() == number
            echo(one)
    print("right", flush=True)


def ask(port: int) -> None:
    """Sends, and compares what comes back."""
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", port)) as one:
            for _ in range(MESSAGES):
                message = os.urandom(SIZE)
                one.sendall(message)
                assert one.recv(SIZE, socket.MSG_WAITALL) == message
            assert one.recv(100) == b""


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        ask(int(sys.argv[2]))
