"""Programs of the tests that use SDP by the Python API: an echo server, and a client that checks what comes back.

python_sdp.py serve|serve-async ADDRESS PORT
python_sdp.py talk|talk-async ADDRESS PORT RDMA_PORT SIZE...       (RDMA_PORT 0: the port mapper is asked)
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading

import sidestep
from sidestep import socket
from sidestep.api.streams import SdpReader, SdpWriter

_ROOM = 1 << 20
_WAIT_S = 40.0


def serve(address: str, port: int) -> None:
    """Echoes, a thread a connection."""
    with socket.create_server((address, port), family=_family(address), protocol="sdp") as listener:
        print("listens", listener.announced, flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.SdpSocket) -> None:
    room = bytearray(_ROOM)
    with connection, memoryview(room) as view:
        try:
            while count := connection.recv_into(room):
                connection.sendall(view[:count])
        except OSError as error:
            print(f"server: {error.strerror}", flush=True)


async def serve_async(address: str, port: int) -> None:
    """Echoes, a task a connection."""

    async def echo(reader: SdpReader, writer: SdpWriter) -> None:
        room = bytearray(_ROOM)
        with memoryview(room) as view:
            while count := await reader.recv_into(room):
                await writer.sendall(view[:count])
        writer.close()
        await writer.wait_closed()

    async with await sidestep.start_server(echo, address, port, protocol="sdp") as server:
        print("listens", server.announced, flush=True)
        await server.serve_forever()


def talk(address: str, port: int, rdma_port: int | None, sizes: list[int]) -> None:
    """Sends from a thread, and receives into its own memory."""
    made = socket.create_connection((address, port), _WAIT_S, protocol="sdp", rdma_port=rdma_port)
    with made as connection:
        assert connection.getpeername()[:2] == (address, port)
        for size in sizes:
            data, room = random.Random(size).randbytes(size), bytearray(size)
            sending = threading.Thread(target=connection.sendall, args=(data,))
            sending.start()
            assert connection.recv_into(room, 0, socket.MSG_WAITALL) == size
            sending.join()
            assert room == data, f"{size} bytes came back wrong"
        moved = connection.details()["queue_pair"]
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    _tell(moved, sizes)


async def talk_async(address: str, port: int, rdma_port: int | None, sizes: list[int]) -> None:
    """Sends several at a time."""
    reader, writer = await sidestep.open_connection(address, port, protocol="sdp", rdma_port=rdma_port)
    for size in sizes:
        blocks = [random.Random(size + number).randbytes(size) for number in range(4)]
        rooms = [bytearray(size) for _ in blocks]
        sends = [writer.sendall(block) for block in blocks]
        await asyncio.gather(*sends, *(reader.recv_into(room, waitall=True) for room in rooms))
        assert rooms == blocks, f"{size} bytes came back wrong"
    moved = writer.get_extra_info("details")["queue_pair"]
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    _tell(moved, sizes)


def _tell(moved: object, sizes: list[int]) -> None:
    """How it went, and what the other end has read out of our memory, or was written into its."""
    assert isinstance(moved, dict)
    placed = moved.get("bytes_sent{read_response}", 0) + moved.get("bytes_sent{write}", 0)
    print(f"right: {len(sizes)}, {placed} placed", flush=True)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


if __name__ == "__main__":
    kind, where, number, *rest = sys.argv[1:]
    if kind == "serve":
        serve(where, int(number))
    elif kind == "serve-async":
        asyncio.run(serve_async(where, int(number)))
    elif kind == "talk":
        talk(where, int(number), int(rest[0]) or None, list(map(int, rest[1:])))
    else:
        asyncio.run(talk_async(where, int(number), int(rest[0]) or None, list(map(int, rest[1:]))))
