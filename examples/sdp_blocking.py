"""A large array there and back by SDP with blocking sockets: read out of its memory, and written into it, by RDMA.

python examples/sdp_blocking.py server 7000 &
python examples/sdp_blocking.py client 7000 [HOST]
"""

from __future__ import annotations

import array
import sys
import threading

from sidestep import socket

COUNT = 4_000_000  # of numbers with 8 bytes


def serve(port: int) -> None:
    """Echoes until killed, a thread for each connection."""
    with socket.create_server(("", port), protocol="sdp") as server:
        print("listening", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=echo, args=(connection,), daemon=True).start()


def echo(connection: socket.SdpSocket) -> None:
    """Sends back what comes, out of the memory that it has come into."""
    room = bytearray(8 * COUNT)
    with connection:
        while connection.recv_into(room, flags=socket.MSG_WAITALL) == len(room):
            connection.sendall(room)


def talk(host: str, port: int) -> None:
    """One array: any buffer will do, such as numpy's."""
    numbers, back = array.array("Q", range(COUNT)), array.array("Q", bytes(8 * COUNT))
    with socket.create_connection((host, port), protocol="sdp") as connection:
        connection.sendall(numbers)  # ends when the other end has read it
        connection.recv_into(back, flags=socket.MSG_WAITALL)
    assert back == numbers
    print(f"{COUNT} numbers came back")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["server", port] if port.isdecimal():
            serve(int(port))
        case ["client", port, *host] if port.isdecimal() and len(host) < 2:
            talk(host[0] if host else "127.0.0.1", int(port))
        case _:
            sys.exit("usage: sdp_blocking.py server PORT | client PORT [HOST]")
