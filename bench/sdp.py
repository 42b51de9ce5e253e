"""What the SDP core costs: `python bench/sdp.py`.

Two ends in one process over the loopback device, which carries a request out when it is posted: nothing is waited for,
so what is measured is Python at work, for both ends, the endpoint and the device together. Mechanisms and sizes take
turns, round after round; printed are the medians and the spread of the rounds.

    --plot FILE   the crossover of the mechanisms as an SVG (needs the `bench` extra: matplotlib)
    --profile     where the time of a small Bcopy message goes, by module
    --save FILE   the figures as JSON
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from ipaddress import IPv4Address
from pathlib import Path

from sidestep.demo.machine import Machine
from sidestep.rdma.loopback import NO_DELAY, Fabric
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import StreamEvent, StreamReceive, StreamSend
from sidestep.sdp.settings import Addresses, SdpSettings
from sidestep.sdp.stack import Stack
from sidestep.sdp.strategy import Strategy, bcopy_only
from sidestep.sdp.wire import Mode

SIZES = (64, 4 << 10, 64 << 10, 1 << 20)
PLOTTED = tuple(1 << power for power in range(10, 23))
ADDRESSES = Addresses(IPv4Address("10.0.0.1"), 40000, IPv4Address("10.0.0.2"), 5001)
MUST_US, AIM_US = 25.0, 10.0
PARTS = ("connection", "outgoing", "updates", "flow", "halves", "source", "sink", "resize", "requests", "endpoint")
OURS = (*(f"sdp/{part}" for part in PARTS), "rdma/")


def never_pipelined() -> Strategy:
    return Strategy(bcopy_max=0, read_min=0, sink_min=None, transactions=False, pipelined=False)


def pipelined_reads() -> Strategy:
    return Strategy(bcopy_max=0, read_min=0, sink_min=None, transactions=False)


def writes() -> Strategy:
    return Strategy(bcopy_max=0, read_min=0, sink_min=0, transactions=False)


@dataclass(frozen=True)
class Mechanism:
    """How the bytes go."""

    name: str
    strategy: Callable[[], Strategy]
    pipelined: bool  # both ends keep several requests outstanding
    smallest: int  # bytes for which it can be used at all


# SinkAvail must offer more than a private buffer holds
MECHANISMS = (
    Mechanism("Bcopy", bcopy_only, False, 1),
    Mechanism("Read Zcopy, Combined", never_pipelined, False, 128),
    Mechanism("Read Zcopy, Pipelined", pipelined_reads, True, 128),
    Mechanism("Write Zcopy", writes, True, 64 << 10),
)


@dataclass(frozen=True)
class Row:
    """One mechanism at one size."""

    mechanism: str
    size: int  # bytes of a send
    us: float  # CPU time of a send and its receive, both ends together: the median of the rounds
    us_least: float
    us_most: float
    messages: float  # SDP messages of both ends for a send

    @property
    def us_per_message(self) -> float:
        return self.us / self.messages

    def __str__(self) -> str:
        return (
            f"{self.mechanism:<22} {self.size:>9,} B {self.us:9.1f} us ({self.us_least:.1f} .. {self.us_most:.1f}) "
            f"{1e6 / self.us:10,.0f} sends/s {self.us / self.size * 1e6:11.0f} us/MB {self.messages:6.2f} messages "
            f"{self.us_per_message:6.1f} us each"
        )


class Pair:
    """Two connected streams: one sends, the other receives."""

    def __init__(self, mechanism: Mechanism, size: int) -> None:
        self.fabric = Fabric(random.Random(0), timing=NO_DELAY)
        attributes = DeviceAttributes(checks_local_memory=False)  # as of a device made of software
        settings = SdpSettings(strategy=mechanism.strategy)
        ends = [Stack(self.fabric.device(name, attributes), lambda: self.fabric.now, settings) for name in "ab"]
        accepted: list[SdpStream] = []

        def take(stream: SdpStream) -> None:
            stream.tell = self.told
            accepted.append(stream)

        ends[1].listen(ADDRESSES.remote_port, take)
        self.source = ends[0].connect("b", ADDRESSES, self.told)
        self.fabric.run()
        self.sink = accepted[0]
        self.size, self.depth = size, 4 if mechanism.pipelined else 1
        self.data = memoryview(random.Random(1).randbytes(size))
        self.rooms = [memoryview(bytearray(size)) for _ in range(self.depth)]
        self.sent = self.received = self.turn = 0
        if mechanism.pipelined:
            self.source.connection.want_send_mode(Mode.PIPELINED, 0.0)
            self.source.run()
            self.fabric.run()
        self.waitall = not mechanism.pipelined  # one receive for each send; what waits for all is never advertised
        for room in self.rooms:
            self.sink.receive(room, waitall=self.waitall)
        self.fabric.run()

    def told(self, stream: SdpStream, event: StreamEvent) -> None:
        if isinstance(event, StreamReceive):
            self.received += event.filled
            if event.error is None and event.filled:
                stream.receive(self.rooms[self.turn % self.depth], waitall=self.waitall)
                self.turn += 1
        elif isinstance(event, StreamSend):
            self.sent += 1

    def messages(self) -> int:
        return sum(one.connection.messages_sent for one in (self.source, self.sink))

    def run(self, count: int) -> tuple[float, float]:
        """CPU seconds, and SDP messages, for so many sends."""
        sent, received, messages = self.sent, self.received, self.messages()
        start = time.process_time()
        for _ in range(count // self.depth):
            for _ in range(self.depth):
                self.source.send(self.data)
            self.fabric.run()
        spent = time.process_time() - start
        count = count // self.depth * self.depth
        assert self.sent - sent == count, (self.sent - sent, count)
        assert self.received - received == count * self.size
        return spent / count, (self.messages() - messages) / count

    def whole(self) -> bool:
        return all(room == self.data for room in self.rooms)


def measure(sizes: tuple[int, ...], rounds: int, seconds: float) -> list[Row]:
    """All mechanisms at all sizes, taking turns."""
    cases = [(mechanism, size) for size in sizes for mechanism in MECHANISMS if size >= mechanism.smallest]
    pairs = [Pair(mechanism, size) for mechanism, size in cases]
    counts = [max(4, int(seconds / pair.run(40)[0])) for pair in pairs]
    figures: list[list[tuple[float, float]]] = [[] for _ in cases]
    for _ in range(rounds):
        for index, pair in enumerate(pairs):
            figures[index].append(pair.run(counts[index]))
    rows = []
    for (mechanism, size), pair, found in zip(cases, pairs, figures, strict=True):
        assert pair.whole(), (mechanism.name, size)
        times = [spent * 1e6 for spent, _ in found]
        messages = statistics.median(count for _, count in found)
        rows.append(Row(mechanism.name, size, statistics.median(times), min(times), max(times), messages))
    return rows


def profile(count: int = 40_000) -> None:
    """Where the time of a 64 B Bcopy message goes."""
    pair = Pair(MECHANISMS[0], 64)
    pair.run(1000)
    profiler = cProfile.Profile()
    profiler.enable()
    pair.run(count)
    profiler.disable()
    spent: dict[str, float] = {}
    for (file, _, _), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        part = next((part for part in OURS if f"sidestep/{part}" in file), "the interpreter's own functions")
        spent[part] = spent.get(part, 0.0) + own
    whole = sum(spent.values())
    print(f"where the time of {count:,} Bcopy messages of 64 B goes (under the profiler):")
    for part, own in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"  {100 * own / whole:5.1f} %  {part}")


def plot(rows: list[Row], path: Path) -> None:
    """CPU time of a send by its size, one line a mechanism."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sidestep"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for mechanism in MECHANISMS:
        mine = [row for row in rows if row.mechanism == mechanism.name]
        axes.plot([row.size for row in mine], [row.us for row in mine], marker="o", label=mechanism.name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes of a send")
    axes.set_ylabel("CPU time of a send and its receive, both ends, us")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.15, help="of each mechanism and size in a round")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    if options.profile:
        profile()
        return 0
    before = Machine.now()
    rows = measure(SIZES if options.plot is None else PLOTTED, options.rounds, options.seconds)
    for row in rows:
        print(row)
    small = rows[0].us_per_message
    verdict = "aim reached" if small <= AIM_US else "must met, aim missed" if small <= MUST_US else "MUST MISSED"
    print(f"a Bcopy message costs {small:.1f} us, both ends: {verdict} (must {MUST_US:.0f} us, aim {AIM_US:.0f} us)")
    if options.plot is not None:
        plot(rows, options.plot)
    if options.save is not None:
        options.save.write_text(
            json.dumps({"machine": asdict(before), "rows": [asdict(row) for row in rows]}, indent=1)
        )
    return 0 if small <= MUST_US else 1


if __name__ == "__main__":
    sys.exit(main())
