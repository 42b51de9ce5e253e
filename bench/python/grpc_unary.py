"""Unary calls by gRPC's Python, one after the other: an echo of large messages.

``grpc_unary.py server|client``; speaks with who runs it as talk.py does.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from talk import report, tell, wait_to_close

_UNBOUNDED = [("grpc.max_receive_message_length", -1)]


def serve() -> None:
    """Echoes until the process ends."""
    server = grpc.server(ThreadPoolExecutor(4), options=_UNBOUNDED)
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Echo", {"Unary": handler})])
    tell(f"listening {server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    server.wait_for_termination()


def ask(port: int, size: int, warmup_s: float, seconds: float, hold: bool) -> list[int]:
    """Calls one by one; returns the measured times in ns. Each answer is compared outside of its time."""
    times: list[int] = []
    body = random.Random(1).randbytes(size - 8)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=_UNBOUNDED) as channel:
        call = channel.unary_unary("/Echo/Unary")
        start = time.perf_counter_ns() + int(warmup_s * 1e9)
        end = start + int(seconds * 1e9)
        number = 0
        while (sent := time.perf_counter_ns()) < end or not times:
            message = number.to_bytes(8, "little") + body
            began = time.perf_counter_ns()
            answer = call(message, wait_for_ready=True)
            took = time.perf_counter_ns() - began
            if answer != message:
                sys.exit("the answer is not what was sent")
            number += 1
            if sent >= start:
                times.append(took)
        wait_to_close(hold)
    return times


def main() -> None:
    """Runs one role."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["server", "client"])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--warmup", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--hold", action="store_true")
    args = parser.parse_args()
    if args.role == "server":
        serve()
    else:
        report("grpc", args.size, ask(args.port, args.size, args.warmup, args.seconds, args.hold))


if __name__ == "__main__":
    main()
