"""An echo server and its clients with asyncio: `open_connection` and `start_server`, sidestep's instead of asyncio's.

python examples/echo_asyncio.py server 7000 &
python examples/echo_asyncio.py client 7000
sidestep ss
"""

from __future__ import annotations

import asyncio
import sys

import sidestep

CLIENTS = 10
ROUNDS = 1000


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends back what comes, until the other end has finished."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def serve(port: int) -> None:
    """Echoes until killed."""
    async with await sidestep.start_server(echo, "127.0.0.1", port) as server:
        print("listening", flush=True)
        await server.serve_forever()


async def talk(port: int) -> None:
    """Lines there and back."""
    reader, writer = await sidestep.open_connection("127.0.0.1", port)
    for number in range(ROUNDS):
        writer.write(b"line %d\n" % number)
        assert await reader.readline() == b"line %d\n" % number
    writer.close()
    await writer.wait_closed()


async def talk_at_once(port: int) -> None:
    """Several clients."""
    await asyncio.gather(*(talk(port) for _ in range(CLIENTS)))
    print(f"{CLIENTS * ROUNDS} lines came back")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["server" | "client" as role, port] if port.isdecimal():
            asyncio.run({"server": serve, "client": talk_at_once}[role](int(port)))
        case _:
            sys.exit("usage: echo_asyncio.py server PORT | client PORT")
