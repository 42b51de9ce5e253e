"""Blocks that a client of Dask fetches from a worker.

``dask_blocks.py --scheduler PORT``, beside `dask scheduler` and a worker. Prints "holding" and its result as talk.py
does.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from distributed import Client
from talk import report, wait_to_close


def block(number: int, size: int) -> bytes:
    """The bytes of a block, another for each number."""
    pattern = random.Random(1).randbytes(4093)  # prime: a part that is missing or moved shows
    return number.to_bytes(8, "little") + (pattern * (size // len(pattern) + 1))[: size - 8]


def fetched(client: Client, size: int, warmup_s: float, seconds: float) -> list[int]:
    """Times of fetching blocks one by one from the worker itself, in ns; each is compared outside of its time."""
    times: list[int] = []
    start = time.perf_counter_ns() + int(warmup_s * 1e9)
    end = start + int(seconds * 1e9)
    number = 0
    while time.perf_counter_ns() < end or not times:
        future = client.submit(block, number, size, pure=False)
        future.exception()  # waits until it is made
        began = time.perf_counter_ns()
        found = client.gather(future, direct=True)
        took = time.perf_counter_ns() - began
        if found != block(number, size):
            sys.exit(f"block {number} is not what was made")
        if number and began >= start:  # the first connects to the worker
            times.append(took)
        number += 1
    return times


def main() -> None:
    """Fetches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheduler", type=int, required=True)
    parser.add_argument("--size", type=int, default=30_000_000)
    parser.add_argument("--warmup", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--hold", action="store_true")
    args = parser.parse_args()
    with Client(f"tcp://127.0.0.1:{args.scheduler}", timeout=60) as client:
        times = fetched(client, args.size, args.warmup, args.seconds)
        wait_to_close(args.hold)
        report("dask", args.size, times)


if __name__ == "__main__":
    main()
