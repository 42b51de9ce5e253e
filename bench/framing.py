"""What iWARP's bytes cost: `python bench/framing.py`.

The checksum, by each implementation. Then 256 KiB messages as tagged FPDUs: framed, parsed and placed in memory, in ns
for each FPDU; and through a TCP connection over loopback, both ends in one thread, beside the same bytes sent and
received plainly. All is CPU time of this thread; medians of runs that take turns, with the spread of their middle half.
"""

from __future__ import annotations

import argparse
import select
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sidestep.demo.machine import Machine
from sidestep.native._framing import CALL_MAX, Inbound, Outbound, crc32c_by, crc32c_implementations

MULPDUS = (1442, 8942, 64768)
HEADER_LEN = 14
SIZES = (64, 1448, 8948, 65536, 1 << 20)


@dataclass
class Costs:
    """Seconds of CPU that one thing took, of each run."""

    runs: list[float] = field(default_factory=list)

    @contextmanager
    def run(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.runs.append(time.thread_time() - began)

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def spread(self) -> float:
        """Of the middle half, as a share of the median."""
        low, _, high = statistics.quantiles(self.runs, n=4)
        return (high - low) / self.median


def checksums(repeats: int) -> None:
    print(f"{'CRC32C, GB/s':<24}" + "".join(f"{size:>14,} B" for size in SIZES))
    data = memoryview(bytearray(range(256)) * (SIZES[-1] // 256))
    for name in crc32c_implementations():
        figures = []
        for size in SIZES:
            view, count, costs = data[:size], max(1, (1 << 20) // size), Costs()
            for _ in range(repeats):
                with costs.run():
                    for _ in range(count):
                        crc32c_by(name, view)
            figures.append(f"{size * count / costs.median / 1e9:9.1f} ±{costs.spread:4.0%}")
        print(f"{name:<24}" + "".join(f"{figure:>16}" for figure in figures))


def fpdus(mulpdu: int) -> int:
    return -(-CALL_MAX // (mulpdu - HEADER_LEN))


def in_memory(mulpdu: int, crc: bool, markers: bool, repeats: int) -> dict[str, Costs]:
    """Framed with and without a copy; parsed; placed."""
    source, sink = bytearray(CALL_MAX), (bytearray(CALL_MAX),)
    out, found = Outbound(mulpdu, crc=crc, markers=markers), Inbound(crc=crc, markers=markers, capacity=1 << 19)
    costs = {name: Costs() for name in ("frame", "copy", "parse", "place")}
    for _ in range(repeats):
        for name in ("copy", "frame"):
            out.clear()
            with costs[name].run():
                out.tagged(0x40, 1, 0, (source,), 0, CALL_MAX, True, name == "copy")
        found.feed(out.take(1 << 20))
        with costs["parse"].run():
            runs = found.parse()
        with costs["place"].run():
            for run in runs:
                found.place(run, 0, sink, run.offset, run.length)
    return costs


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    with left, right:
        for end in (left, right):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setblocking(False)
        yield left, right


@contextmanager
def patience(end: socket.socket) -> Iterator[None]:
    """What the kernel still has on its way is waited for."""
    try:
        yield
    except BlockingIOError:
        select.select([end], [], [])


def plainly(left: socket.socket, right: socket.socket, source: memoryview, sink: memoryview) -> None:
    sent = received = 0
    while received < len(source):
        if sent < len(source):
            sent += left.send(source[sent:])
        with patience(right):
            received += right.recv_into(sink[received:])


def framed(
    left: socket.socket, right: socket.socket, out: Outbound, found: Inbound, source: memoryview, sink: memoryview
) -> None:
    placed = 0
    out.tagged(0x40, 1, 0, (source,), 0, len(source), True)
    while placed < len(source):
        out.send(left.fileno())
        with patience(right):
            found.fill(right.fileno())
        for run in found.parse():
            found.place(run, 0, (sink,), run.offset, run.length)
            placed += run.length


def through_tcp(mulpdu: int, crc: bool, markers: bool, repeats: int) -> dict[str, Costs]:
    source, sink = memoryview(bytearray(CALL_MAX)), memoryview(bytearray(CALL_MAX))
    costs = {"plain": Costs(), "framed": Costs()}
    out, found = Outbound(mulpdu, crc=crc, markers=markers), Inbound(crc=crc, markers=markers)
    with connection() as one, connection() as other:
        ways: dict[str, Callable[[], None]] = {
            "plain": lambda: plainly(*one, source, sink),
            "framed": lambda: framed(*other, out, found, source, sink),
        }
        for _ in range(repeats):
            for name, way in ways.items():
                with costs[name].run():
                    way()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400, help="runs of each")
    parser.add_argument("--markers", action="store_true", help="with markers too")
    options = parser.parse_args()
    print(Machine.now())
    checksums(max(options.repeats // 10, 8))
    print(f"\n{'256 KiB, ns an FPDU':<24}" + "".join(f"{name:>16}" for name in ("frame", "copy", "parse", "place")))
    settings = [(crc, markers) for markers in ((False, True) if options.markers else (False,)) for crc in (False, True)]
    for mulpdu in MULPDUS:
        for crc, markers in settings:
            label = f"MULPDU {mulpdu:<6}" + " crc" * crc + " markers" * markers
            costs = in_memory(mulpdu, crc, markers, options.repeats)
            each = (f"{one.median / fpdus(mulpdu) * 1e9:8.0f} ±{one.spread:4.0%}" for one in costs.values())
            print(f"{label:<24}" + "".join(f"{figure:>16}" for figure in each))
    print(f"\n{'through TCP, GB/s':<24}{'plain':>16}{'framed':>16}{'ratio':>9}  ns an FPDU: plain, framed, added")
    for mulpdu in MULPDUS:
        for crc, markers in settings:
            label = f"MULPDU {mulpdu:<6}" + " crc" * crc + " markers" * markers
            tcp = through_tcp(mulpdu, crc, markers, options.repeats)
            plain, with_frames = tcp["plain"], tcp["framed"]
            rates = (f"{CALL_MAX / one.median / 1e9:8.2f} ±{one.spread:4.0%}" for one in (plain, with_frames))
            each_ns = [one.median / fpdus(mulpdu) * 1e9 for one in (plain, with_frames)]
            print(
                f"{label:<24}" + "".join(f"{rate:>16}" for rate in rates) + f"{plain.median / with_frames.median:9.2f}"
                f"{each_ns[0]:10.0f}{each_ns[1]:10.0f}{each_ns[1] - each_ns[0]:10.0f}"
            )


if __name__ == "__main__":
    main()
