"""TCP through two gateways with SDP between them, and directly: `python bench/gateway.py`.

As root, for namespaces. Four hosts on a bridge: client, two gateways, server. The client reaches the server directly
and through both gateways in turns, round after round. Printed are the medians, their ratio (the median of those of the
rounds), the spread, and what the two gateways' processors had to do for a message.

    --seconds S   of one measurement (1)
    --rounds N    (5)
    --save FILE   the figures as JSON
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

from harness.machine import cpu_time_ns

from remote import HERE, WORKS, Found, Row, client, served, site  # which shows where `hosts` is
from sidestep.demo.machine import Machine
from sidestep.demo.world import World

# isort: split
from hosts import Host, hosts

from sidestep.provider import control

PORT: Final = 7472
RDMA_PORT: Final = 7901
SIDESTEP: Final = Path(sys.executable).with_name("sidestep")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    subprocess.run(["make", "-s", "-C", HERE], check=True)
    machine = Machine.now()
    print(machine)
    with hosts(4) as (asking, first, second, server), ExitStack() as closing:
        for middle in (first, second):
            control.stop(middle.sidestep.socket)
        at = second.address
        gateways = [
            closing.enter_context(
                relaying(second, f"sdp {at}:{PORT} to tcp {server.address}:{PORT} at {RDMA_PORT}"),
            ),
            closing.enter_context(relaying(first, f"tcp {first.address}:{PORT} to sdp {at}:{PORT} via {RDMA_PORT}")),
        ]
        rows = [measure(work, asking, first, server, gateways, given) for work in WORKS]
    if given.save:
        saved = {"machine": machine.as_json(), "rows": [asdict(row) for row in rows]}
        given.save.write_text(json.dumps(saved, indent=1))


@contextmanager
def relaying(host: Host, rule: str) -> Iterator[int]:
    """A gateway there; its process."""
    with host.namespace.inside():
        process = subprocess.Popen([SIDESTEP, "gateway", "--quiet", "--json", rule], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def measure(work: str, asking: Host, first: Host, server: Host, gateways: list[int], given: argparse.Namespace) -> Row:
    """All rounds of one work; prints the row, whose SDP is the way through the gateways."""
    row = Row(work)
    with World(work, site(server, shim=False), site(asking, shim=False)) as world:
        served(world, work, PORT)
        for _ in range(given.rounds):
            for target, values in ((server, row.tcp), (first, row.sdp)):
                before = sum(map(cpu_time_ns, gateways))
                found = Found.said_by(client(world, target.address, PORT, work, given.seconds), given.seconds)
                row.add(values, found, sum(map(cpu_time_ns, gateways)) - before)
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
