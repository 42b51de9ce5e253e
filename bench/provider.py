"""What pairing costs the provider: `python bench/provider.py`.

Two clients, as shims are, offer and claim over real TCP connections, `--rate` a second. Printed are the provider's CPU
time for each pair, its resident memory, and the time from an offer to its CLAIMED; then the highest rate it takes.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from harness.machine import cpu_time_ns

from sidestep import testing
from sidestep.demo.machine import Machine
from sidestep.native.layout import Rpc, State
from sidestep.provider import rpc

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from shim_client import Channel, ShimClient

RING = 4096
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Figures:
    """One run."""

    pairs_per_s: float
    cpu_us_per_pair: float
    latency_us: float  # median, offer to CLAIMED
    resident_mib: float

    def __str__(self) -> str:
        return (
            f"{self.pairs_per_s:8.0f} pairs/s {self.cpu_us_per_pair:8.1f} us of CPU a pair "
            f"{self.latency_us:8.0f} us from offer to pair {self.resident_mib:8.1f} MiB resident"
        )


def tcp_pairs(count: int, stack: ExitStack) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0), backlog=count) as listener:
        for _ in range(count):
            active = stack.enter_context(socket.create_connection(listener.getsockname()))
            yield active, stack.enter_context(listener.accept()[0])


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * PAGE / (1 << 20)


def live_slots(count: int) -> list[dict[str, object]]:
    """Slots of promoted connections, as `sidestep ss` would list them."""
    return [
        {
            "generation": 1, "state": State.PROMOTED, "role": 1, "family": socket.AF_INET, "pid": os.getpid(),
            "holders": 1, "local_port": 1 + index % 65535, "segment_id": secrets.token_bytes(16),
        }
        for index in range(count)
    ]  # fmt: skip


def run(path: Path, pid: int, *, seconds: float, rate: float, connections: int, live: int) -> Figures:
    with ExitStack() as stack:
        offerer, claimer = (stack.enter_context(ShimClient(path, slots_max=live + 1)) for _ in range(2))
        offerer.write_arena(live_slots(live))
        for client in (offerer, claimer):
            client.hello()
        channel, doorbell = Channel.make((RING, RING)), Channel.make(None)
        stack.callback(channel.close)
        stack.callback(doorbell.close)
        pairs = list(tcp_pairs(connections, stack))
        offers = [offerer.message_about(Rpc.OFFER, active, channel, 0) for active, _ in pairs]
        claims = [claimer.message_about(Rpc.CLAIM, passive, doorbell, 0) for _, passive in pairs]
        assert channel.segment is not None
        offer_fds = [channel.segment, channel.doorbell, channel.doorbell_page]
        latencies: list[float] = []
        done, cpu_before, began = 0, cpu_time_ns(pid), time.perf_counter()
        while (now := time.perf_counter()) - began < seconds:
            if rate and done > (now - began) * rate:
                time.sleep(0.0005)
                continue
            index = done % len(pairs)
            offer = offers[index]._replace(token=done + 1, segment_id=secrets.token_bytes(16))
            rpc.send(offerer.sock, offer, offer_fds)
            claimer.wait_offer(pairs[index][1])
            rpc.send(claimer.sock, claims[index]._replace(token=done + 1), [doorbell.doorbell, doorbell.doorbell_page])
            for client, wanted in ((claimer, Rpc.ATTACH), (offerer, Rpc.CLAIMED)):
                packet = client.receive()
                packet.descriptors.close()
                if packet.message.type is not wanted:
                    raise RuntimeError(f"{packet.message.type.name} ({packet.message.reason}), not {wanted.name}")
            latencies.append(time.perf_counter() - now)
            done += 1
        spent = time.perf_counter() - began
        cpu_us = (cpu_time_ns(pid) - cpu_before) / done / 1e3
        return Figures(done / spent, cpu_us, statistics.median(latencies) * 1e6, resident_mib(pid))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=2000.0, help="pairs a second in the first run")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--live", type=int, default=10_000, help="promoted connections in the arena meanwhile")
    given = parser.parse_args()
    with testing.Sidestep() as sidestep:
        pid = sidestep.provider_pid
        print(Machine.now())
        print(f"idle: {resident_mib(pid):.1f} MiB resident")
        for rate in (given.rate, 0):
            figures = run(
                sidestep.socket, pid, seconds=given.seconds, rate=rate, connections=given.connections, live=given.live
            )
            print(f"{f'at {rate:.0f}/s' if rate else 'flat out':<12} {figures}")


if __name__ == "__main__":
    main()
