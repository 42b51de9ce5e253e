"""Many large blocks there and back by SDP with asyncio, several at a time: Pipelined mode.

python examples/sdp_asyncio.py server 7000 &
python examples/sdp_asyncio.py client 7000 [HOST]
"""

from __future__ import annotations

import asyncio
import os
import sys

import sidestep
from sidestep.api.streams import SdpReader, SdpWriter

COUNT = 16
SIZE = 2_000_000


async def echo(reader: SdpReader, writer: SdpWriter) -> None:
    """Sends back what comes, while the next blocks are on their way."""
    rooms = [bytearray(SIZE) for _ in range(COUNT)]

    async def one(room: bytearray) -> None:
        count = await reader.recv_into(room, waitall=True)
        await writer.sendall(room[:count] if count < SIZE else room)

    await asyncio.gather(*map(one, rooms))
    writer.close()
    await writer.wait_closed()


async def serve(port: int) -> None:
    """Echoes until killed."""
    async with await sidestep.start_server(echo, "0.0.0.0", port, protocol="sdp") as server:
        print("listening", flush=True)
        await server.serve_forever()


async def talk(host: str, port: int) -> None:
    """All blocks at once: none of them is copied, and each is the other end's to read when it has room."""
    blocks = [os.urandom(SIZE) for _ in range(COUNT)]
    rooms = [bytearray(SIZE) for _ in range(COUNT)]
    reader, writer = await sidestep.open_connection(host, port, protocol="sdp")
    receiving = asyncio.gather(*(reader.recv_into(room, waitall=True) for room in rooms))
    await asyncio.gather(*(writer.sendall(block) for block in blocks))
    await receiving
    mode = writer.get_extra_info("details")["send_mode"]
    writer.close()
    assert rooms == blocks
    print(f"{COUNT} blocks came back, {mode}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["server", port] if port.isdecimal():
            asyncio.run(serve(int(port)))
        case ["client", port, *host] if port.isdecimal() and len(host) < 2:
            asyncio.run(talk(host[0] if host else "127.0.0.1", int(port)))
        case _:
            sys.exit("usage: sdp_asyncio.py server PORT | client PORT [HOST]")
