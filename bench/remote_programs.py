"""Real programs on two hosts, over kernel TCP and under `sidestep run` in turns: `python bench/remote_programs.py`.

As root, for namespaces, who goes on as the user `postgres`, since PostgreSQL does not run as root. What leaves TCP is
what gains by it, the default of `sidestep provider start --remote`. Printed are the medians, their ratio (the median of
those of the rounds), the spread, and how many connections left TCP.

    --seconds S   of one measurement (2)
    --rounds N    (5)
    --promote HOW   as the provider's --remote-promote: gain, always, or three figures (gain)
    --rows NAMES  of redis-1, redis-50, nginx, pgbench-1, pgbench-8
    --save FILE   the figures as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from harness.apps import as_user
from harness.model import Settings
from harness.rows import ROWS
from harness.runner import measured
from harness.world import CountedWorld

from remote import site, spread  # which shows where `hosts` is
from sidestep.demo.machine import Machine
from sidestep.demo.world import Program
from sidestep.settings import RemoteSettings

# isort: split
from hosts import NETWORK, NETWORK6, Host, hosts

NAMES: Final = ("redis-1", "redis-50", "nginx", "pgbench-1", "pgbench-8")
USER: Final = "postgres"
CAPABILITIES: Final = ("sys_admin", "net_admin", "net_raw", "net_bind_service", "sys_ptrace")  # of namespaces


class UnseenWorld(CountedWorld):
    """A world whose connections may stay on TCP."""

    def evidence(self, _port: int, _ends: int, *_programs: Program) -> None:
        """None."""


@dataclass
class Row:
    """What each round of one came to."""

    name: str
    unit: str
    tcp: list[float] = field(default_factory=list)
    sidestep: list[float] = field(default_factory=list)
    left_tcp: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        ratio = statistics.median(ours / tcp for ours, tcp in zip(self.sidestep, self.tcp, strict=True))
        return (
            f"{self.name:<10} {self.unit:<11} TCP {spread(self.tcp, 0):<32} sidestep {spread(self.sidestep, 0):<32} "
            f"{ratio:5.2f}x  {max(self.left_tcp)} left TCP"
        )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--promote", default="gain")
    parser.add_argument("--rows", default=",".join(NAMES))
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    if os.geteuid() == 0:
        sys.exit(subprocess.run(as_user(USER, sys.argv, *CAPABILITIES), check=False).returncode)
    machine = Machine.now()
    print(machine, flush=True)
    settings = RemoteSettings.parse(f"{NETWORK},{NETWORK6}", promote=given.promote)
    with hosts(2, remote=settings, promote_after=None) as (client, server):
        rows = [measure(name, client, server, given) for name in given.rows.split(",")]
    if given.save:
        saved = {"machine": machine.as_json(), "promote": given.promote, "rows": [asdict(row) for row in rows]}
        given.save.write_text(json.dumps(saved, indent=1))


def measure(name: str, client: Host, server: Host, given: argparse.Namespace) -> Row:
    """All rounds of one row; prints it."""
    (found,) = [row for row in ROWS if row.name == name]
    row = Row(name, found.unit)
    settings = Settings(given.seconds, 0.3, 0)
    for _ in range(given.rounds):
        for kind, values in (("tcp", row.tcp), ("sidestep", row.sidestep)):
            before = client.joined("connect")
            with UnseenWorld(kind, *(site(host, shim=kind == "sidestep") for host in (server, client))) as world:
                values.append(measured(found, world, settings).value)
        row.left_tcp.append(client.joined("connect") - before)
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
