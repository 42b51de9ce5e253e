"""An asyncio echo server (a protocol) and its client (streams), on asyncio's own loop or on uvloop.

usage: echo.py asyncio|uvloop server PORT
       echo.py asyncio|uvloop client PORT CONNECTIONS
ECHO_ADDRESS: where the server is, if not on this host
Each connection echoes many small messages one at a time, then megabytes in full duplex; the client prints one JSON line
and keeps its connections open until its standard input ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sys
from collections.abc import Coroutine
from typing import Any, cast

HOST = os.environ.get("ECHO_ADDRESS", "127.0.0.1")
ROUNDS = 300
BULK = 3_000_000


class Echo(asyncio.Protocol):
    """Echoes, and stops reading while the other end does not read."""

    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)

    def pause_writing(self) -> None:
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()

    def eof_received(self) -> bool:
        return False  # close once all is written


async def serve(port: int) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(Echo, HOST, port)
    async with server:
        await server.serve_forever()


async def converse(port: int, number: int) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
    """One connection's conversation; "whole" if every echo was right."""
    reader, writer = await asyncio.open_connection(HOST, port)
    source = random.Random(number)
    for _ in range(ROUNDS):
        message = source.randbytes(source.randrange(1, 2000))
        writer.write(message)
        assert await reader.readexactly(len(message)) == message
    bulk = source.randbytes(BULK)

    async def send() -> None:
        for start in range(0, BULK, 100_000):
            writer.write(bulk[start : start + 100_000])
            await writer.drain()

    sending = asyncio.create_task(send())
    got = await reader.readexactly(BULK)
    await sending
    whole = hashlib.sha256(got).digest() == hashlib.sha256(bulk).digest()
    return ("whole" if whole else "corrupt"), reader, writer


async def talk(port: int, connections: int) -> None:
    """All conversations at once, then the end of each: half-close, and EOF in answer."""
    loop = asyncio.get_running_loop()
    done = await asyncio.gather(*(converse(port, number) for number in range(connections)))
    timeouts = 0
    try:  # a read that times out leaves the connection fit for use
        await asyncio.wait_for(done[0][1].read(1), 0.01)
    except TimeoutError:
        timeouts += 1
    print(json.dumps({"verdicts": [verdict for verdict, _, _ in done], "timeouts": timeouts}), flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        for _, reader, writer in done:
            writer.write(b"nudge")
            assert await reader.readexactly(5) == b"nudge"
        print("nudged", flush=True)
    for _, reader, writer in done:
        writer.write(b"bye")
        writer.write_eof()
        assert await reader.read() == b"bye"
        writer.close()
        await writer.wait_closed()
    print(json.dumps("closed"), flush=True)


def run(loop: str, main: Coroutine[Any, Any, None]) -> None:
    """Run `main` on the loop named."""
    if loop == "uvloop":
        import uvloop

        uvloop.run(main)
    else:
        asyncio.run(main)


if __name__ == "__main__":
    if sys.argv[2] == "server":
        run(sys.argv[1], serve(int(sys.argv[3])))
    else:
        run(sys.argv[1], talk(int(sys.argv[3]), int(sys.argv[4])))
