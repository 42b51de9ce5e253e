"""Two hosts: a program's TCP connection, and the same carried by SDP over a software device: `python bench/remote.py`.

As root, for namespaces. Two hosts joined by a bridge; the clients and servers of `bench/c`, over kernel
TCP and under `sidestep run` in turns, round after round. Printed are the medians, their ratio (the median of those of
the rounds), the spread, and what the two providers' processors had to do for a round trip, or a MiB. Then several
connections at once, by the sum.

With `--workers N` several connections alone are measured, and a third time with providers that have N workers, in turns
with the others.

    --seconds S   of one measurement (1)
    --rounds N    (5)
    --workers N   processes of each provider that carry connections
    --connections N   at once (4)
    --engine off  the providers carry all in Python
    --transport NAME  what carries SDP: iwarp, the software RNIC, or roce, the software HCA (iwarp)
    --works TEXT  only works whose names have this in them
    --save FILE   the figures as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests/support"))

from harness.machine import cpu_time_ns  # noqa: E402 - the path has to be there first
from hosts import NETWORK, NETWORK6, Host, hosts  # noqa: E402

from sidestep.demo.machine import Machine  # noqa: E402
from sidestep.demo.world import END_S, START_S, Program, Site, World  # noqa: E402
from sidestep.settings import RemoteSettings  # noqa: E402

WARM_UP_S: Final = 0.5  # in which it is promoted, too
WORKS: Final = {
    "64 B round trip": ("pingpong", 64),
    "64 B stream": ("stream", 64),
    "1 KiB stream": ("stream", 1 << 10),
    "4 KiB stream": ("stream", 4 << 10),
    "64 KiB stream": ("stream", 64 << 10),
    "1 MiB stream": ("stream", 1 << 20),
}
TOGETHER: Final = ("4 KiB stream", "64 KiB stream", "1 MiB stream")


def spread(values: list[float], digits: int = 1) -> str:
    """Their median, and between what they lie."""
    return f"{statistics.median(values):10,.{digits}f} ({min(values):,.{digits}f} .. {max(values):,.{digits}f})"


@dataclass
class Row:
    """One work: what each round came to."""

    work: str
    tcp: list[float] = field(default_factory=list)
    sdp: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)  # of both providers, a round trip or a MiB

    @property
    def unit(self) -> str:
        return "us" if WORKS[self.work][0] == "pingpong" else "MB/s"

    def add(self, values: list[float], found: Found, used_ns: int) -> None:
        """A round of TCP, or of SDP, which used so much of the providers' processors, also before it was measured."""
        size = WORKS[self.work][1]
        values.append(found.p50_ns / 1e3 if self.unit == "us" else found.rate * size / 1e6)
        if values is self.sdp:
            each_us = used_ns / 1e3 / found.unmeasured / found.messages
            self.cpu_us.append(each_us if self.unit == "us" else each_us * (1 << 20) / size)

    @property
    def ratio(self) -> float:
        """How much better than TCP: the median of the rounds."""
        better = [t / s if self.unit == "us" else s / t for t, s in zip(self.tcp, self.sdp, strict=True)]
        return statistics.median(better)

    def __str__(self) -> str:
        return (
            f"{self.work:<16} {self.unit:<5} TCP {spread(self.tcp):<30} SDP {spread(self.sdp):<30} "
            f"{self.ratio:6.2f}x  {statistics.median(self.cpu_us):7.1f} us of the providers a "
            f"{'round trip' if self.unit == 'us' else 'MiB'}"
        )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--engine", choices=("on", "off"), default="on")
    parser.add_argument("--transport", default="iwarp")
    parser.add_argument("--works", default="")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    subprocess.run(["make", "-s", "-C", HERE], check=True)
    machine = Machine.now()
    print(machine, flush=True)
    remote = RemoteSettings.parse(f"{NETWORK},{NETWORK6}", engine=given.engine == "on", transports=given.transport)
    works = [work for work in WORKS if given.works in work]
    saved: dict[str, object] = {"machine": machine.as_json()} | {
        name: getattr(given, name) for name in ("engine", "transport", "workers", "connections", "seconds")
    }
    with ExitStack() as stack:
        plain = stack.enter_context(hosts(2, remote=remote))
        spread = stack.enter_context(hosts(2, remote=remote, workers=given.workers)) if given.workers else None
        if spread is None:
            rows = [measure(work, plain, given.rounds, given.seconds) for work in works]
            saved["rows"] = [asdict(row) for row in rows]
        saved["together"] = [
            asdict(measure_together(work, plain, spread, given.connections, given.rounds, given.seconds))
            for work in TOGETHER
            if work in works
        ]
    if given.save:
        given.save.write_text(json.dumps(saved, indent=1))


@dataclass(frozen=True, slots=True)
class Found:
    """What one client found."""

    messages: int  # while it measured
    rate: float  # of them, a second
    p50_ns: float  # of a round trip

    @classmethod
    def said_by(cls, client: Program, seconds: float) -> Found:
        """At its end."""
        said = client.result(WARM_UP_S + seconds + END_S)
        return cls(said["messages"], said["rate"], said.get("p50_ns", 0))

    @property
    def unmeasured(self) -> float:
        """Times as many were in the warm-up, too."""
        return 1 + WARM_UP_S * self.rate / self.messages


def talk(work: str, pair: list[Host], seconds: float, *, shim: bool, connections: int = 1) -> list[Found]:
    """So many connections at once, each of a client and a server of its own."""
    one, other = pair
    joined = one.joined("connect")
    with World(work, site(other, shim=shim), site(one, shim=shim)) as world:
        ports = [served(world, work) for _ in range(connections)]
        clients = [client(world, world.address, port, work, seconds) for port in ports]
        found = [Found.said_by(each, seconds) for each in clients]
    assert not shim or one.joined("connect") == joined + connections, "not all were promoted"
    return found


def measure(work: str, pair: list[Host], rounds: int, seconds: float) -> Row:
    """All rounds of one work; prints the row."""
    row = Row(work)
    for _ in range(rounds):
        for shim, values in ((False, row.tcp), (True, row.sdp)):
            before = provider_ns(pair)
            (found,) = talk(work, pair, seconds, shim=shim)
            row.add(values, found, provider_ns(pair) - before)
    print(row, flush=True)
    return row


@dataclass
class Together:
    """One work on several connections at once: MB/s of them all, each round."""

    work: str
    connections: int
    tcp: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)  # SDP, the provider carries them
    spread: list[float] = field(default_factory=list)  # its workers do
    load: list[float] = field(default_factory=list)  # of the machine, over the last minute

    def __str__(self) -> str:
        def ratio(better: list[float], than: list[float]) -> str:
            return f"{statistics.median([b / t for b, t in zip(better, than, strict=True)]):5.2f}x"

        text = (
            f"{self.connections} x {self.work:<14} MB/s  TCP {spread(self.tcp):<30} provider {spread(self.alone):<26} "
            f"{ratio(self.alone, self.tcp)}  load {min(self.load):.0f} .. {max(self.load):.0f}"
        )
        if self.spread:
            text += f"  workers {spread(self.spread):<26} {ratio(self.spread, self.alone)} of the provider"
        return text


def measure_together(
    work: str, plain: list[Host], spread: list[Host] | None, connections: int, rounds: int, seconds: float
) -> Together:
    """All rounds of one work on so many connections; prints the row."""
    row = Together(work, connections)
    for _ in range(rounds):
        row.tcp.append(together(work, plain, connections, seconds, shim=False))
        row.alone.append(together(work, plain, connections, seconds, shim=True))
        if spread is not None:
            row.spread.append(together(work, spread, connections, seconds, shim=True))
        row.load.append(os.getloadavg()[0])
    print(row, flush=True)
    return row


def together(work: str, pair: list[Host], connections: int, seconds: float, *, shim: bool) -> float:
    """MB/s of all."""
    return (
        sum(each.rate for each in talk(work, pair, seconds, shim=shim, connections=connections)) * WORKS[work][1] / 1e6
    )


def site(host: Host, *, shim: bool) -> Site:
    """Where programs run, under sidestep or not."""
    return Site(host.address, host.sidestep if shim else None, namespace=host.namespace)


def client(world: World, address: str, port: int, work: str, seconds: float) -> Program:
    """One that has begun."""
    program, size = WORKS[work]
    argv = [str(HERE / "build" / program), "client", "-h", address, "-p", str(port), "-s", str(size)]
    return world.start([*argv, "-w", str(WARM_UP_S), "-t", str(seconds)])


def provider_ns(pair: list[Host]) -> int:
    """What the providers have used of the processors."""
    return sum(cpu_time_ns(host.sidestep.provider_pid) for host in pair)


def served(world: World, work: str, port: int = 0) -> int:
    """A server's port."""
    program, size = WORKS[work]
    argv = [str(HERE / "build" / program), "server", "-h", world.address, "-p", str(port), "-s", str(size)]
    return int(world.start(argv, world.server).expect("listening", START_S))


if __name__ == "__main__":
    main()
