"""Threads that close promoted connections, and threads whose files get their numbers: prints how many calls failed."""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import os
import socket
import sys
import tempfile
import threading

CONNECTIONS = int(sys.argv[1])
MESSAGES = 12  # to and fro, until it is promoted


def serve(listener: socket.socket) -> None:
    """Echoes, a connection at a time."""
    for _ in range(CONNECTIONS):
        one, _ = listener.accept()
        with one:
            while message := one.recv(100):
                one.sendall(message)


def connect(port: int, ended: threading.Event) -> None:
    """Makes the connections, one after another."""
    for _ in range(CONNECTIONS):
        with socket.create_connection(("127.0.0.1", port)) as one:
            for _ in range(MESSAGES):
                one.sendall(b"x")
                one.recv(1)
    ended.set()


def write(path: str, ended: threading.Event, failed: list[OSError]) -> None:
    """Opens, writes and closes until the others have done."""
    while not ended.is_set():
        number = os.open(path, os.O_WRONLY)
        try:
            os.write(number, b"x")
            os.close(number)
        except OSError as error:
            failed.append(error)


def write_unseen(path: str, ended: threading.Event, failed: list[OSError]) -> None:
    """The same with numbers that no call of the shim's returns: the C library opens them by itself."""
    name = f"/sidestep-{os.getpid()}-{threading.get_ident()}"
    while not ended.is_set():
        number = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT)
        try:
            os.write(number, b"x")
            os.close(number)
        except OSError as error:
            failed.append(error)
    _posixshmem.shm_unlink(name)


def main() -> None:
    """All at once."""
    ended, failed = threading.Event(), list[OSError]()
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.NamedTemporaryFile() as file:
        threads = [
            threading.Thread(target=serve, args=(listener,)),
            threading.Thread(target=connect, args=(listener.getsockname()[1], ended)),
            *(threading.Thread(target=each, args=(file.name, ended, failed)) for each in WRITERS),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(len(failed), *failed[:3])


WRITERS = [write, write_unseen, write_unseen]

if __name__ == "__main__":
    main()
