"""Programs of the tests: an echo server, and a client that checks every byte and says how it ended.

SECONDS is 0 for one that talks until standard input ends, and sends TALKED_ON messages more.

talkers.py serve ADDRESS PORT
talkers.py talk ADDRESS PORT SECONDS SIZE [PAUSE_S]
talkers.py rest ADDRESS PORT SIZE
talkers.py tell ADDRESS PORT SIZE PIECE
talkers.py leave ADDRESS PORT SIZE
talkers.py flow ADDRESS PORT
"""

from __future__ import annotations

import hashlib
import random
import select
import socket
import sys
import threading
import time

TALKED_ON = 20
FLOW_BLOCK = 30_011  # bytes, of which no two lie in a ring in the same way


def serve(address: str, port: int) -> None:
    """Echoes, a thread a connection."""
    with socket.create_server((address, port), family=_family(address), backlog=1024) as listener:
        print("listens", flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _echo(connection: socket.socket) -> None:
    with connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
        except OSError as error:
            print(f"server: {error.strerror}", flush=True)


def talk(address: str, port: int, seconds: float, size: int, pause_s: float = 0.0) -> None:
    """Prints how many messages came back as they were sent, or what went wrong."""
    dice = random.Random(port)
    told = False
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        count, until = 0, time.monotonic() + seconds
        left = TALKED_ON if seconds == 0 else 0  # messages, once standard input has ended
        while time.monotonic() < until or left:
            if left and select.select([sys.stdin], [], [], 0)[0]:
                left -= 1
            message = dice.randbytes(size)
            try:
                connection.sendall(message)
                got = bytearray()
                while len(got) < size:
                    data = connection.recv(1 << 16)
                    if not data:
                        print(f"end after {count} messages and {len(got)} bytes", flush=True)
                        return
                    got += data
            except OSError as error:
                print(f"{error.strerror} after {count} messages", flush=True)
                return
            if got != message:
                print(f"wrong bytes in message {count}", flush=True)
                return
            count += 1
            if not told:
                told = True
                print("talks", flush=True)
            time.sleep(pause_s)  # as asked for: a program that has other things to do as well
        print(f"right: {count}", flush=True)
        connection.shutdown(socket.SHUT_WR)
        rest = connection.recv(100)
        print("the end came" if not rest else f"{len(rest)} bytes too many", flush=True)


def talk_and_rest(address: str, port: int, size: int) -> None:
    """Talks until a line comes from stdin, rests until the next one, and talks on until the last; then as `talk`."""
    dice, count = random.Random(port), 0
    with socket.create_connection((address, port)) as connection:
        for now in ("talks", "rests", "talks on"):
            print(now, flush=True)
            while not select.select([sys.stdin], [], [], 0.001)[0] and now != "rests":
                message, got = dice.randbytes(size), bytearray()
                connection.sendall(message)
                while len(got) < size:
                    got += connection.recv(1 << 16)
                if got != message:
                    print(f"wrong bytes in message {count}", flush=True)
                    return
                count += 1
            sys.stdin.readline()
        print(f"right: {count}", flush=True)
        connection.shutdown(socket.SHUT_WR)
        print("the end came" if not connection.recv(100) else "bytes too many", flush=True)


def tell(address: str, port: int, size: int, piece_len: int) -> None:
    """Single bytes to and fro until a line comes from stdin; then random ones in pieces, of which it prints SHA-256."""
    with socket.create_connection((address, port)) as connection:
        _talk_until_told(connection)
        whole, got = random.Random(port).randbytes(size), bytearray()
        for begin in range(0, size, piece_len):
            connection.sendall(whole[begin : begin + piece_len])
            while len(got) < min(begin + piece_len, size):
                got += connection.recv(1 << 16)
        print(hashlib.sha256(whole).hexdigest(), got == whole, flush=True)


def leave(address: str, port: int, size: int) -> None:
    """The same until a line comes; after the next one all bytes at once, and nobody waits for their coming back."""
    with socket.create_connection((address, port)) as connection:
        _talk_until_told(connection)
        sys.stdin.readline()
        print("is quiet", flush=True)
        sys.stdin.readline()
        connection.sendall(bytes(size))


def flow(address: str, port: int) -> None:
    """Both ways at once, until a line comes from stdin; then as `talk`, with the number of bytes."""
    blocks = [number.to_bytes(4, "big") + random.Random(number).randbytes(FLOW_BLOCK - 4) for number in range(64)]
    told = threading.Event()
    sent = 0

    def send() -> None:
        nonlocal sent
        while not told.is_set():
            connection.sendall(blocks[sent % len(blocks)])
            sent += 1
        connection.shutdown(socket.SHUT_WR)

    def listen() -> None:
        sys.stdin.readline()
        told.set()

    with socket.create_connection((address, port)) as connection:
        sender = threading.Thread(target=send)
        sender.start()
        threading.Thread(target=listen, daemon=True).start()
        print("talks", flush=True)
        count, offset = 0, 0
        while data := connection.recv(1 << 16):
            while data:
                wanted = blocks[count % len(blocks)][offset : offset + len(data)]
                if data[: len(wanted)] != wanted:
                    print(f"wrong bytes in block {count}, behind {offset}", flush=True)
                    return
                data, offset = data[len(wanted) :], offset + len(wanted)
                if offset == FLOW_BLOCK:
                    count, offset = count + 1, 0
        sender.join()
        whole = (count, offset) == (sent, 0)
        print(f"right: {count * FLOW_BLOCK}" if whole else f"{count} of {sent} blocks", flush=True)
        print("the end came", flush=True)


def _talk_until_told(connection: socket.socket) -> None:
    print("talks", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"


if __name__ == "__main__":
    kind, where, number, *rest = sys.argv[1:]
    if kind == "serve":
        serve(where, int(number))
    elif kind == "tell":
        tell(where, int(number), *map(int, rest))
    elif kind == "rest":
        talk_and_rest(where, int(number), *map(int, rest))
    elif kind == "flow":
        flow(where, int(number))
    elif kind == "leave":
        leave(where, int(number), *map(int, rest))
    else:
        talk(where, int(number), float(rest[0]), int(rest[1]), *map(float, rest[2:]))
