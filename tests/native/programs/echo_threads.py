"""An echo with a thread a connection. usage: echo_threads.py server | client PORT CONNECTIONS ROUNDS.

The server prints its port and runs until it is killed. The client checks every byte, prints "holding" and keeps
its connections open until its standard input ends.
"""

import random
import socket
import sys
import threading


def serve_one(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)


def serve() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        threading.Thread(target=serve_one, args=(listener.accept()[0],), daemon=True).start()


def ask(connection: socket.socket, seed: int, rounds: int) -> None:
    dice = random.Random(seed)
    for _ in range(rounds):
        message = dice.randbytes(dice.choice([1, 10, 100, 1000, 10_000]))
        connection.sendall(message)
        answer = b""
        while len(answer) < len(message):
            part = connection.recv(len(message) - len(answer))
            assert part, "the server closed"
            answer += part
        assert answer == message, "the answer differs"


def main() -> None:
    if sys.argv[1] == "server":
        serve()
        return
    port, count, rounds = map(int, sys.argv[2:5])
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    failures: list[threading.ExceptHookArgs] = []
    threading.excepthook = failures.append
    threads = [threading.Thread(target=ask, args=(c, i, rounds)) for i, c in enumerate(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        sys.exit(f"{len(failures)} threads failed: {failures[0].exc_value!r}")
    print("holding", flush=True)
    sys.stdin.read()


main()
