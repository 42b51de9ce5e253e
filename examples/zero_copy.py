"""Bytes that are made and read where they lie, in shared memory: no call copies them.

The client makes data in the ring itself, the server takes its checksum there, and answers with it at the end.

    python examples/zero_copy.py server 7000 &
    python examples/zero_copy.py client 7000
"""

from __future__ import annotations

import sys
import zlib

from sidestep import socket

SIZE = 100_000_000
PATTERN = bytes(range(256)) * 256
ANSWER_LEN = 4


def serve(port: int) -> None:
    """Takes the checksum of all that one client sends."""
    with socket.create_server(("127.0.0.1", port)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
    checksum = 0
    with connection:
        while True:
            with connection.peek() as seen:  # waits until there is something; empty at the end
                checksum = zlib.crc32(seen, checksum)
                seen_len = len(seen)
            if not seen_len:
                break
            connection.consume(seen_len)
        connection.sendall(checksum.to_bytes(ANSWER_LEN, "big"))


def talk(port: int) -> None:
    """Makes the data and compares the checksums."""
    checksum, left = 0, SIZE
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while left:
            with connection.reserve(min(left, len(PATTERN))) as room:  # as much as there is room for
                room[:] = PATTERN[: len(room)]
                checksum = zlib.crc32(room, checksum)
                made_len = len(room)
            connection.commit(made_len)
            left -= made_len
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(ANSWER_LEN, socket.MSG_WAITALL)
    assert int.from_bytes(answer, "big") == checksum
    print(f"{SIZE} bytes, and the checksum is right")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["server" | "client" as role, port] if port.isdecimal():
            {"server": serve, "client": talk}[role](int(port))
        case _:
            sys.exit("usage: zero_copy.py server PORT | client PORT")
