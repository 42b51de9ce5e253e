"""Two ends of one connection that talk to each other, in turns, until each has said all; prints `done`."""

from __future__ import annotations

import socket
import threading

TURNS = 3000


def answers(listener: socket.socket) -> None:
    """Sends back what comes, until the end."""
    with listener.accept()[0] as sock:
        while data := sock.recv(100):
            sock.sendall(data)


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = threading.Thread(target=answers, args=(listener,))
        other.start()
        with socket.create_connection(listener.getsockname()) as sock:
            for turn in range(TURNS):
                said = b"%8d" % turn
                sock.sendall(said)
                assert sock.recv(8, socket.MSG_WAITALL) == said
        other.join()
    print("done")


if __name__ == "__main__":
    main()
