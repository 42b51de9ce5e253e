"""SDP of the Python API, beside a plain TCP socket on the same path: `python bench/python_sdp.py` (as root).

Two processes in two network namespaces joined by veth. Each way sends whole messages with `sendall` out of one buffer
and receives them with `recv_into` of whole messages into another; the time ends with an answer that all has arrived.
The ways take turns, round after round; printed are the medians, of the figures and of their ratios to TCP's.

    tcp       a socket of the standard library
    bcopy     SDP through private buffers only
    zcopy     SDP as the API does it: a SrcAvail a message, RDMA Read
    asyncio   the same with four sends and four receives outstanding: Pipelined mode

    --seconds S   of one measurement (1)
    --rounds N    of all measurements (5)
"""

from __future__ import annotations

import argparse
import asyncio
import socket as stdlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import sidestep
from sidestep import socket
from sidestep.api import rnic
from sidestep.api.rnic import SETTINGS
from sidestep.api.streams import SdpReader, SdpWriter
from sidestep.demo.machine import Machine
from sidestep.observe.namespaces import Namespace, NetworkBridge
from sidestep.sdp.strategy import bcopy_only

WAYS: Final = ("tcp", "bcopy", "zcopy", "asyncio")
SIZES: Final = (1 << 20, 16 << 20)
PORT: Final = 7480
OUTSTANDING: Final = 4  # at a time, with asyncio


def only_bcopy() -> None:
    """From now on, in this process."""
    vars(rnic)["SETTINGS"] = replace(SETTINGS, strategy=bcopy_only)


# ---- the two ends; all of a way's messages have one size ----


def serve(way: str, address: str, size: int) -> None:
    """Receives messages until the first byte of one says that it is the last, and answers."""
    if way == "asyncio":
        asyncio.run(_serve_async(address, size))
        return
    if way == "bcopy":
        only_bcopy()
    made: Any = (
        stdlib.create_server((address, PORT)) if way == "tcp" else socket.create_server((address, PORT), protocol="sdp")
    )
    with made as listener:
        print("listens", flush=True)
        connection, _ = listener.accept()
        room = bytearray(size)
        with connection:
            while connection.recv_into(room, 0, stdlib.MSG_WAITALL) == size and room[0] != ord("E"):
                pass
            connection.sendall(b"!")
            connection.recv(1)


async def _serve_async(address: str, size: int) -> None:
    over = asyncio.Event()

    async def receive(reader: SdpReader, writer: SdpWriter) -> None:
        rooms = [bytearray(size) for _ in range(OUTSTANDING)]

        async def one(room: bytearray) -> None:
            while await reader.recv_into(room, waitall=True) == size and room[0] != ord("E"):
                pass

        tasks = [asyncio.create_task(one(room)) for room in rooms]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await writer.sendall(b"!")
        await reader.read()
        writer.close()
        over.set()

    async with await sidestep.start_server(receive, address, PORT, protocol="sdp"):
        print("listens", flush=True)
        await over.wait()


def send(way: str, address: str, size: int, seconds: float) -> float:
    """Bytes a second."""
    if way == "asyncio":
        return asyncio.run(_send_async(address, size, seconds))
    if way == "bcopy":
        only_bcopy()
    where, data = (address, PORT), bytearray(size)
    made: Any = (
        stdlib.create_connection(where)
        if way == "tcp"
        else socket.create_connection(where, protocol="sdp", rdma_port=PORT)
    )
    with made as connection:
        return measured(lambda: connection.sendall(data), lambda: connection.recv(1), data, seconds)


def measured(one: Callable[[], object], answer: Callable[[], object], data: bytearray, seconds: float) -> float:
    """Sends for so long, then the last one."""
    count, began = 1, time.perf_counter()
    while time.perf_counter() < began + seconds:
        one()
        count += 1
    data[0] = ord("E")
    one()
    answer()
    return count * len(data) / (time.perf_counter() - began)


async def _send_async(address: str, size: int, seconds: float) -> float:
    reader, writer = await sidestep.open_connection(address, PORT, protocol="sdp", rdma_port=PORT)
    data, last = bytearray(size), bytearray(size)
    last[0] = ord("E")
    began, count = time.perf_counter(), 1

    async def several() -> None:
        nonlocal count
        while time.perf_counter() < began + seconds:
            await writer.sendall(data)
            count += 1

    await asyncio.gather(*(several() for _ in range(OUTSTANDING)))
    await writer.sendall(last)
    assert await reader.readexactly(1) == b"!"
    found = count * size / (time.perf_counter() - began)
    writer.close()
    await writer.wait_closed()
    return found


# ---- turns ----


def measure(two: tuple[Namespace, Namespace], way: str, size: int, seconds: float) -> float:
    """One measurement, in two new processes."""
    words = [sys.executable, __file__, "--way", way, "--size", str(size), "--seconds", str(seconds)]
    with two[1].inside():
        server = subprocess.Popen([*words, "--end", "server"], stdout=subprocess.PIPE, text=True)
    with server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "listens\n"
            with two[0].inside():
                done = subprocess.run([*words, "--end", "client"], check=True, stdout=subprocess.PIPE, text=True)
            return float(done.stdout)
        finally:
            server.kill()


def main() -> None:
    """All of it, or one end of a measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--end", choices=["server", "client"], help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    address = "198.18.9.2"
    if given.end == "server":
        serve(given.way, address, given.size)
        return
    if given.end == "client":
        print(send(given.way, address, given.size, given.seconds))
        return
    print(f"{Machine.now()}\n{Path(__file__).name}, {given.rounds} rounds of {given.seconds} s, medians\n")
    with ExitStack() as stack:
        bridge = NetworkBridge()
        stack.callback(bridge.close)
        two = (Namespace(), Namespace())
        for number, each in enumerate(two, 1):
            stack.callback(each.close)
            bridge.join(number, each, f"198.18.9.{number}/24")
        for size in SIZES:
            figures: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(given.rounds):
                for way in WAYS:
                    figures[way].append(measure(two, way, size, given.seconds))
            for way in WAYS:
                ratio = statistics.median(mine / tcp for mine, tcp in zip(figures[way], figures["tcp"], strict=True))
                low, high = min(figures[way]) / 1e6, max(figures[way]) / 1e6
                print(
                    f"{size >> 20:3} MiB  {way:8} {statistics.median(figures[way]) / 1e6:8.0f} MB/s"
                    f"  ({low:.0f} to {high:.0f})  {ratio:.2f} of tcp"
                )


if __name__ == "__main__":
    main()
