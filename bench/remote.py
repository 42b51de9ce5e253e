"""Two hosts: a program's TCP connection, and the same carried by SDP over the software RNIC: `python bench/remote.py`.

As root, for namespaces. Two hosts joined by a bridge; a client and a server that know nothing but sockets, over kernel
TCP and under `sidestep run` in turns, round after round. Printed are the medians, their ratio (the median of those of
the rounds), the spread, and what the two providers' processors had to do for a message. A software RNIC rides on kernel
TCP: below 1 is what it must be.

    --seconds S   of one measurement (1)
    --rounds N    (5)
    --save FILE   the figures as JSON
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests"))

from harness.machine import Machine, cpu_time_ns  # noqa: E402 - the path has to be there first
from rnic import tcp  # noqa: E402

from hosts import Host, hosts  # noqa: E402

CONNECT_S: Final = 10.0
WORKS: Final = {
    "64 B round trip": ("latency", 64),
    "write 4 KiB": ("write", 4 << 10),
    "write 64 KiB": ("write", 64 << 10),
    "write 1 MiB": ("write", 1 << 20),
    "read 1 MiB": ("read", 1 << 20),
}


@dataclass
class Row:
    """One work: what each round came to."""

    work: str
    unit: str
    tcp: list[float] = field(default_factory=list)
    sdp: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)  # of both providers, a message

    @property
    def ratio(self) -> float:
        """How much better than TCP: the median of the rounds."""
        better = [t / s if self.unit == "us" else s / t for t, s in zip(self.tcp, self.sdp, strict=True)]
        return statistics.median(better)

    def __str__(self) -> str:
        def spread(values: list[float]) -> str:
            return f"{statistics.median(values):9,.1f} ({min(values):,.1f} .. {max(values):,.1f})"

        return (
            f"{self.work:<16} {self.unit:<5} TCP {spread(self.tcp):<30} SDP {spread(self.sdp):<30} "
            f"{self.ratio:5.2f}x  {statistics.median(self.cpu_us):7.1f} us of the providers a message"
        )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--ask", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        tcp.serve(given.serve)
    elif given.ask:
        kind, size, local, remote = given.ask
        print(json.dumps(ask(kind, int(size), local, remote, given.seconds)))
    else:
        machine = Machine.now()
        print(machine)
        with hosts(2) as (one, other):
            rows = [measure(work, one, other, given.rounds, given.seconds) for work in WORKS]
        if given.save:
            given.save.write_text(
                json.dumps({"machine": machine.as_json(), "rows": [asdict(row) for row in rows]}, indent=1)
            )


def ask(kind: str, size: int, local: str, remote: str, seconds: float) -> dict[str, float]:
    """One measurement, in the client's process: the value, and how many messages there were."""
    if kind == "latency":
        times = tcp.latency(local, remote, seconds)
        half = times[len(times) // 4 :]  # behind the promotion
        return {"value": statistics.median(half) * 1e6, "messages": 2 * len(times)}
    rate = tcp.bandwidth(local, remote, size, seconds, write=kind == "write")
    return {"value": rate / 1e6, "messages": rate * seconds / size}


def measure(work: str, one: Host, other: Host, rounds: int, seconds: float) -> Row:
    """All rounds of one work; prints the row."""
    kind, size = WORKS[work]
    row = Row(work, "us" if kind == "latency" else "MB/s")
    for _ in range(rounds):
        for shim in (False, True):
            with served(other, shim=shim):
                before = provider_ns(one, other)
                argv = ["--ask", kind, str(size), one.address, other.address, "--seconds", str(seconds)]
                joined = one.joined("connect")
                found = json.loads(run(one, argv, shim=shim))
                used_us = (provider_ns(one, other) - before) / 1e3
            if shim:
                assert one.joined("connect") > joined, "it was not promoted"
                row.sdp.append(found["value"])
                row.cpu_us.append(used_us / max(1, found["messages"]))
            else:
                row.tcp.append(found["value"])
    print(row, flush=True)
    return row


def provider_ns(*places: Host) -> int:
    """What the providers have used of the processors."""
    return sum(cpu_time_ns(place.sidestep.provider_pid) for place in places)


@contextmanager
def served(host: Host, *, shim: bool) -> Iterator[None]:
    """A server that listens."""
    with host.namespace.inside():
        server = subprocess.Popen(command(["--serve", host.address]), env=host.sidestep.env() if shim else None)
    try:
        wait = ["sh", "-c", f"until ss -Htln | grep -q :{tcp.TCP_PORT}; do sleep 0.05; done"]
        host.plain(wait)
        yield
    finally:
        server.kill()
        server.wait()


def run(host: Host, argv: list[str], *, shim: bool) -> str:
    """What the client says."""
    with host.namespace.inside():
        return subprocess.run(
            command(argv), env=host.sidestep.env() if shim else None, check=True, stdout=subprocess.PIPE, text=True
        ).stdout


def command(argv: list[str]) -> list[str]:
    """This program, in another process."""
    return [sys.executable, str(HERE / "remote.py"), *argv]


if __name__ == "__main__":
    main()
