"""Two hosts: a program's TCP connection, and the same carried by SDP over the software RNIC: `python bench/remote.py`.

As root, for namespaces. Two hosts joined by a bridge; a client and a server that know nothing but sockets, over kernel
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
    --works TEXT  only works whose names have this in them
    --save FILE   the figures as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests/support"))

from harness.machine import cpu_time_ns  # noqa: E402 - the path has to be there first
from hosts import NETWORK, NETWORK6, Host, hosts  # noqa: E402
from rnic import tcp  # noqa: E402

from sidestep.config import RemoteSettings  # noqa: E402
from sidestep.demo.machine import Machine  # noqa: E402

CONNECT_S: Final = 10.0
WORKS: Final = {
    "64 B round trip": ("latency", 64),
    "64 B stream": ("write", 64),
    "1 KiB stream": ("write", 1 << 10),
    "4 KiB stream": ("write", 4 << 10),
    "64 KiB stream": ("write", 64 << 10),
    "1 MiB stream": ("write", 1 << 20),
    "1 MiB read": ("read", 1 << 20),
}
TOGETHER: Final = ("4 KiB stream", "64 KiB stream", "1 MiB stream")


@dataclass
class Row:
    """One work: what each round came to."""

    work: str
    unit: str
    tcp: list[float] = field(default_factory=list)
    sdp: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)  # of both providers, a round trip or a MiB

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
    parser.add_argument("--works", default="")
    parser.add_argument("--processes", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--ask", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        tcp.serve(given.serve, given.processes)
    elif given.ask:
        kind, size, local, remote = given.ask
        print(json.dumps(ask(kind, int(size), local, remote, given.seconds)))
    else:
        machine = Machine.now()
        print(machine, flush=True)
        remote = RemoteSettings.parse(f"{NETWORK},{NETWORK6}", engine=given.engine == "on")
        works = [work for work in WORKS if given.works in work]
        saved: dict[str, object] = {"machine": machine.as_json()} | {
            name: getattr(given, name) for name in ("engine", "workers", "connections", "seconds")
        }
        with ExitStack() as stack:
            plain = stack.enter_context(hosts(2, remote=remote))
            spread = stack.enter_context(hosts(2, remote=remote, workers=given.workers)) if given.workers else None
            if spread is None:
                one, other = plain
                rows = [measure(work, one, other, given.rounds, given.seconds) for work in works]
                saved["rows"] = [asdict(row) for row in rows]
            saved["together"] = [
                asdict(measure_together(work, plain, spread, given.connections, given.rounds, given.seconds))
                for work in TOGETHER
                if work in works
            ]
        if given.save:
            given.save.write_text(json.dumps(saved, indent=1))


def ask(kind: str, size: int, local: str, remote: str, seconds: float) -> dict[str, float]:
    """One measurement, in the client's process: the value, and how many round trips or MiB there were."""
    if kind == "latency":
        times = tcp.latency(local, remote, seconds)
        half = times[len(times) // 4 :]  # behind the promotion
        return {"value": statistics.median(half) * 1e6, "count": len(times)}
    rate = tcp.bandwidth(local, remote, size, seconds, write=kind == "write")
    return {"value": rate / 1e6, "count": rate * seconds / (1 << 20)}


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
                row.cpu_us.append(used_us / max(1, found["count"]))
            else:
                row.tcp.append(found["value"])
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
        def median(values: list[float]) -> str:
            return f"{statistics.median(values):9,.1f} ({min(values):,.1f} .. {max(values):,.1f})"

        def ratio(better: list[float], than: list[float]) -> str:
            return f"{statistics.median([b / t for b, t in zip(better, than, strict=True)]):5.2f}x"

        text = (
            f"{self.connections} x {self.work:<14} MB/s  TCP {median(self.tcp):<30} provider {median(self.alone):<26} "
            f"{ratio(self.alone, self.tcp)}  load {min(self.load):.0f} .. {max(self.load):.0f}"
        )
        if self.spread:
            text += f"  workers {median(self.spread):<26} {ratio(self.spread, self.alone)} of the provider"
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
    """MB/s of so many clients, each with a connection and a server's process of its own."""
    one, other = pair
    kind, size = WORKS[work]
    argv = command(["--ask", kind, str(size), one.address, other.address, "--seconds", str(seconds)])
    joined = one.joined("connect")
    with served(other, shim=shim, processes=connections), one.namespace.inside():
        env = one.sidestep.env() if shim else None
        clients = [subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) for _ in range(connections)]
        said = [client.communicate()[0] for client in clients]
    assert not shim or one.joined("connect") == joined + connections, "not all were promoted"
    return sum(float(json.loads(text)["value"]) for text in said)


def provider_ns(*places: Host) -> int:
    """What the providers have used of the processors."""
    return sum(cpu_time_ns(place.sidestep.provider_pid) for place in places)


@contextmanager
def served(host: Host, *, shim: bool, processes: int = 1) -> Iterator[None]:
    """A server that listens."""
    argv = command(["--serve", host.address, "--processes", str(processes)])
    with host.namespace.inside():
        server = subprocess.Popen(argv, env=host.sidestep.env() if shim else None, start_new_session=True)
    try:
        wait = ["sh", "-c", f"until ss -Htln | grep -q :{tcp.TCP_PORT}; do sleep 0.05; done"]
        host.plain(wait)
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
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
