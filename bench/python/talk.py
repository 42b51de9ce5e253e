"""Ping-pong in Python, as most programs write it: blocking sockets, or asyncio streams; and large transfers.

``talk.py server|client --mode blocking|asyncio|transfer``. Speaks with who runs it as the C programs do: a server
prints "listening PORT", a client prints one JSON object, and with ``--hold`` says "holding" and keeps its connection
open until standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import time
from typing import NoReturn


def tell(line: str) -> None:
    """Writes a line to standard output at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def read_exactly(sock: socket.socket, size: int) -> bytes:
    """The next `size` bytes, or fewer where the stream ends first."""
    parts = b""
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            break
        parts += part
    return parts


def serve_blocking(size: int) -> NoReturn:
    """Echoes one client after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tell(f"listening {listener.getsockname()[1]}")
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with sock:
                while len(message := read_exactly(sock, size)) == size:
                    sock.sendall(message)


def ask_blocking(port: int, size: int, warmup_s: float, seconds: float, hold: bool) -> list[int]:
    """Sends and awaits messages one by one; returns the measured times in ns."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times: list[int] = []
        now = time.perf_counter_ns()
        start = now + int(warmup_s * 1e9)
        end = start + int(seconds * 1e9)
        number = 0
        while now < end:
            sent = now
            message = number.to_bytes(size, "little")
            sock.sendall(message)
            if read_exactly(sock, size) != message:
                sys.exit("the answer is not what was sent")
            number += 1
            now = time.perf_counter_ns()
            if sent >= start:
                times.append(now - sent)
        wait_to_close(hold)
    return times


def block(size: int) -> bytearray:
    """What a transfer sends, but for the number in its first bytes."""
    return bytearray(random.Random(1).randbytes(size))


def serve_transfers(size: int) -> NoReturn:
    """Answers each block with its number. The first is compared whole, of others both ends."""
    wanted, found = block(size), bytearray(size)
    view = memoryview(found)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tell(f"listening {listener.getsockname()[1]}")
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with sock:
                number = 0
                while (got := sock.recv_into(found)) > 0:
                    while got < size:
                        got += sock.recv_into(view[got:]) or sys.exit("the stream ended within a block")
                    wanted[:8] = number.to_bytes(8, "little")
                    looked = size if number == 0 else 64
                    if found[:looked] != wanted[:looked] or found[-looked:] != wanted[-looked:]:
                        sys.exit(f"block {number} is not what was sent")
                    sock.sendall(wanted[:8])
                    number += 1


def ask_transfers(port: int, size: int, warmup_s: float, seconds: float, hold: bool) -> list[int]:
    """As ask_blocking, with blocks that are acknowledged."""
    message = block(size)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times: list[int] = []
        now = time.perf_counter_ns()
        start = now + int(warmup_s * 1e9)
        end = start + int(seconds * 1e9)
        number = 0
        while now < end or not times:
            sent = now
            message[:8] = number.to_bytes(8, "little")
            sock.sendall(message)
            if read_exactly(sock, 8) != message[:8]:
                sys.exit("the answer is not the number of what was sent")
            number += 1
            now = time.perf_counter_ns()
            if sent >= start:
                times.append(now - sent)
        wait_to_close(hold)
    return times


async def serve_asyncio(size: int) -> None:
    """Echoes any number of clients."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(await reader.readexactly(size))
                await writer.drain()
        except asyncio.IncompleteReadError:
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    tell(f"listening {server.sockets[0].getsockname()[1]}")
    async with server:
        await server.serve_forever()


async def ask_asyncio(port: int, size: int, warmup_s: float, seconds: float, hold: bool) -> list[int]:
    """As ask_blocking, with asyncio streams."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times: list[int] = []
    now = time.perf_counter_ns()
    start = now + int(warmup_s * 1e9)
    end = start + int(seconds * 1e9)
    number = 0
    while now < end:
        sent = now
        message = number.to_bytes(size, "little")
        writer.write(message)
        await writer.drain()
        if await reader.readexactly(size) != message:
            sys.exit("the answer is not what was sent")
        number += 1
        now = time.perf_counter_ns()
        if sent >= start:
            times.append(now - sent)
    wait_to_close(hold)
    writer.close()
    await writer.wait_closed()
    return times


def ask_in_loop(port: int, size: int, warmup_s: float, seconds: float, hold: bool) -> list[int]:
    """ask_asyncio, to its end."""
    return asyncio.run(ask_asyncio(port, size, warmup_s, seconds, hold))


ASK = {"blocking": ask_blocking, "asyncio": ask_in_loop, "transfer": ask_transfers}


def wait_to_close(hold: bool) -> None:
    """Keeps the caller's connection open until standard input ends."""
    if hold:
        tell("holding")
        sys.stdin.read()


def report(mode: str, size: int, times: list[int]) -> None:
    """Prints the result as one JSON object."""
    if not times:
        sys.exit("nothing was measured; give it more seconds")
    seconds = sum(times) / 1e9
    times.sort()

    def at(quantile: float) -> int:
        return times[int(quantile * (len(times) - 1))]

    result = {"program": "talk.py", "mode": mode, "size": size, "messages": len(times), "seconds": seconds}
    result |= {"rate": len(times) / seconds, "p50_ns": at(0.5), "p99_ns": at(0.99), "p999_ns": at(0.999)}
    tell(json.dumps(result | {"max_ns": times[-1]}))


def main() -> None:
    """Runs one role."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["server", "client"])
    parser.add_argument("--mode", choices=list(ASK), default="blocking")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--warmup", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--hold", action="store_true")
    args = parser.parse_args()
    if args.size < 8:
        parser.error("--size is at least 8: a message carries its number")
    if args.role == "server":
        if args.mode == "asyncio":
            asyncio.run(serve_asyncio(args.size))
        elif args.mode == "transfer":
            serve_transfers(args.size)
        serve_blocking(args.size)
    if not args.port:
        parser.error("a client needs the server's port: --port")
    report(args.mode, args.size, ASK[args.mode](args.port, args.size, args.warmup, args.seconds, args.hold))


if __name__ == "__main__":
    main()
