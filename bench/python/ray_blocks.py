"""Blocks that go from one of Ray's nodes to another, both on this host.

``ray_blocks.py --port PORT``: the object manager of the node that fetches listens there. A task at the other node makes
a block, and this program fetches it. Prints "holding" and its result as talk.py does.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time

import ray
from ray.cluster_utils import Cluster
from talk import report, wait_to_close

_STORE_BYTES = 512 << 20


def block(number: int, size: int) -> bytes:
    """The bytes of a block, another for each number."""
    pattern = random.Random(1).randbytes(4093)  # prime: a part that is missing or moved shows
    return number.to_bytes(8, "little") + (pattern * (size // len(pattern) + 1))[: size - 8]


def fetched(size: int, warmup_s: float, seconds: float) -> list[int]:
    """Times of fetching blocks one by one, in ns; each is compared outside of its time."""
    made = ray.remote(resources={"far": 1})(block)  # at the node that has the resource
    times: list[int] = []
    start = time.perf_counter_ns() + int(warmup_s * 1e9)
    end = start + int(seconds * 1e9)
    number = 0
    while time.perf_counter_ns() < end or len(times) < 2:
        reference = made.remote(number, size)
        ray.wait([reference], fetch_local=False)
        began = time.perf_counter_ns()
        found = ray.get(reference)
        took = time.perf_counter_ns() - began
        if found != block(number, size):
            sys.exit(f"block {number} is not what was made")
        if number and began >= start:  # the first connects the nodes
            times.append(took)
        number += 1
        del reference, found
    return times


def main() -> None:
    """Starts both nodes and fetches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--size", type=int, default=30_000_000)
    parser.add_argument("--warmup", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--hold", action="store_true")
    args = parser.parse_args()
    node = {"num_cpus": 1, "object_store_memory": _STORE_BYTES}
    near = node | {"object_manager_port": args.port, "include_dashboard": False}
    with tempfile.TemporaryDirectory(prefix="ray-") as place:
        os.environ["RAY_TMPDIR"] = place
        cluster = Cluster(initialize_head=True, head_node_args=near)
        try:
            cluster.add_node(**node, resources={"far": 1})
            ray.init(address=cluster.address, log_to_driver=False)
            times = fetched(args.size, args.warmup, args.seconds)
            wait_to_close(args.hold)
            report("ray", args.size, times)
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main()
