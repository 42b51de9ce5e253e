"""Many connections in one program each side.

crowd.py serve ADDRESS PORT   echoes, by epoll
crowd.py open ADDRESS PORT    for each line "MORE FIRST" of stdin: opens so many more, sends and checks some bytes
                              on all from the FIRST on
"""

from __future__ import annotations

import asyncio
import random
import resource
import socket
import sys

SIZE = 3000


def _allow_all() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(address: str, port: int) -> None:
    """Echoes until it is killed."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, address, port, backlog=4096)
    print("listens", flush=True)
    await server.serve_forever()


def talk(address: str, port: int) -> None:
    """Says how many connections have brought back what was sent; at the end of stdin, how many ended well."""
    held: list[socket.socket] = []
    dice = random.Random(port)
    for line in sys.stdin:
        more, first = map(int, line.split())
        held += [socket.create_connection((address, port)) for _ in range(more)]
        messages = [(connection, dice.randbytes(SIZE)) for connection in held[first:]]
        for connection, message in messages:
            connection.sendall(message)
        right = sum(_read(connection) == message for connection, message in messages)
        print(f"right: {right}", flush=True)
    for connection in held:
        connection.shutdown(socket.SHUT_WR)
    print(f"ended: {sum(not connection.recv(1) for connection in held)}", flush=True)


def _read(connection: socket.socket) -> bytes:
    got = bytearray()
    while len(got) < SIZE and (data := connection.recv(SIZE - len(got))):
        got += data
    return bytes(got)


if __name__ == "__main__":
    _allow_all()
    kind, where, number = sys.argv[1:]
    if kind == "serve":
        asyncio.run(serve(where, int(number)))
    else:
        talk(where, int(number))
