"""Echo on asyncio's own event loop or on uvloop: protocols in the server, streams in the client."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import cast

HOST = "127.0.0.1"
NUDGE = bytes(1000)


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
        self.transport.write_eof()
        return False  # close once all is written


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Echo, HOST, 0, backlog=128)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def talk(port: int, place: Path, number: int) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    while (place / "wait").exists():
        writer.write(NUDGE)
        assert await reader.readexactly(len(NUDGE)) == NUDGE
    data = (place / f"{number}.in").read_bytes()

    async def send() -> None:
        for start in range(0, len(data), 100_000):
            writer.write(data[start : start + 100_000])
            await writer.drain()
        writer.write_eof()

    sending = asyncio.create_task(send())
    got = await reader.read()
    (place / f"{number}.out").write_bytes(got)
    await sending
    writer.close()
    await writer.wait_closed()


async def main() -> None:
    if sys.argv[2] == "server":
        await serve()
    port, connections, place = int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5])
    await asyncio.gather(*(talk(port, place, number) for number in range(connections)))


if __name__ == "__main__":
    if sys.argv[1] == "uvloop":
        import uvloop

        uvloop.run(main())
    else:
        asyncio.run(main())
