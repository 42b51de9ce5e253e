"""An echo over explicit sockets, in Python.

    sidestep run -- python3 explicit.py serve 7007 &
    sidestep run -- python3 explicit.py talk 7007 100000
    python3 explicit.py talk 7007 100000   # `sidestep.socket` does not need it

The server takes whoever comes, by whatever way; the client wants an offload protocol and takes TCP where there is none.
"""

from __future__ import annotations

import selectors
import sys

from sidestep import socket


def serve(port: int) -> None:
    """One accept queue and one loop for all."""
    with socket.socket(socket.AF_INET_OFFLOAD) as listener, selectors.DefaultSelector() as selector:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        print("port", listener.getsockname()[1], flush=True)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is listener:
                    client, address = listener.accept()
                    selector.register(client, selectors.EVENT_READ)
                    print("accepted", address[1], flush=True)
                elif data := sock.recv(4096):
                    sock.sendall(data)
                else:
                    selector.unregister(sock)
                    sock.close()


def talk(port: int, rounds: int) -> None:
    """Asks and hears the same again."""
    with socket.socket(socket.AF_INET_OFFLOAD) as sock:
        sock.connect(("127.0.0.1", port))
        print("port", sock.getsockname()[1], flush=True)
        for _ in range(rounds):
            sock.sendall(b"question")
            if sock.recv(8, socket.MSG_WAITALL) != b"question":
                sys.exit("wrong answer")
    print(rounds, "rounds")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", port] if port.isdecimal():
            serve(int(port))
        case ["talk", port, rounds] if port.isdecimal() and rounds.isdecimal():
            talk(int(port), int(rounds))
        case _:
            sys.exit("usage: explicit.py serve PORT | talk PORT ROUNDS")
