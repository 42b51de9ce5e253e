"""The matrix of servers and clients, at random, for as long as wanted.

usage: soak.py [--minutes N | --rounds N] [--server NAME]... [--client NAME]... [--connections N] [--bytes N] [--seed N]
               [--after default|0|CALLS] [--ring-size N] [--warm | --cold] [--load N] [--native]
               [--keep DIRECTORY] [--stop-at FAULTS]

A server is an echo server (see matrix.py) or a chain of HTTP servers such as nginx/haproxy/apache (see web.py). What
is not given is drawn anew, clients each round and servers every twenty. Prints a line for each fault, with the
command that runs it again, and in the end how many connections and downloads were made and how many failed; exits 1
if any did. What a failed round left (bytes sent and received, the logs of programs and shims, the state of the
connections) stays in DIRECTORY.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # pytest puts it there by itself

import matrix
import web
from busy import busy
from matrix import AFTERS, ENDS, SHAPES, Cell, Echo, Outcome, Server
from stage import Stage

ROUNDS_A_SERVER = 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--server", action="append")
    parser.add_argument("--client", action="append", choices=sorted({*ENDS, *web.CLIENTS}))
    parser.add_argument("--connections", type=int)
    parser.add_argument("--bytes", type=int)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    parser.add_argument("--after")
    parser.add_argument("--ring-size", type=int)
    parser.add_argument("--warm", action="store_true", default=None)
    parser.add_argument("--cold", action="store_false", dest="warm")
    parser.add_argument("--load", type=int, default=matrix.LOAD)
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--stop-at", type=int, default=0)
    given = parser.parse_args()
    if given.minutes is None and given.rounds is None:
        given.minutes = 10.0
    return given


class Soak:
    """Runs the rounds and counts what comes of them."""

    def __init__(self, given: argparse.Namespace, place: Path) -> None:
        self.given, self.place = given, place
        self.built = place / "built"
        self.built.mkdir(parents=True)
        self.random = random.Random(given.seed)
        self.rounds = self.failed = self.connections = self.downloads = self.bytes = self.switched = 0
        self.by_pair: Counter[tuple[str, str]] = Counter()
        self.end = None if given.minutes is None else time.monotonic() + 60 * given.minutes

    @property
    def over(self) -> bool:
        """Whether it is enough."""
        if self.given.stop_at and self.failed >= self.given.stop_at:
            return True
        if self.given.rounds is not None and self.rounds >= self.given.rounds:
            return True
        return self.end is not None and time.monotonic() >= self.end

    def run(self) -> None:
        """Rounds, until it is enough."""
        turn = 0
        while not self.over:
            turn += 1
            after = self.given.after or self.random.choice(AFTERS)
            workdir = self.place / f"turn{turn}"
            workdir.mkdir()
            with ExitStack() as stack:
                stage = stack.enter_context(
                    matrix.staged(workdir, after, self.given.ring_size, native=self.given.native)
                )
                server = self.server(stage)
                stack.callback(server.close)
                for number in range(ROUNDS_A_SERVER):
                    if not self.round(stage, server, after, workdir / str(number)):
                        break  # go on with a server that nothing has happened to
                    if self.over:
                        break

    def server(self, stage: Stage) -> Server:
        """One that is given, or any."""
        name = self.random.choice(self.given.server) if self.given.server else self.any_server()
        if "/" in name:
            return web.Chain(stage, name)
        return Echo(stage, name, matrix.prepare(name, self.built))

    def any_server(self) -> str:
        """Echo servers, and as many chains of three."""
        if self.random.random() < 0.5:
            return self.random.choice(ENDS)
        return "/".join([*self.random.choices(web.PROXIES, k=2), self.random.choice(web.ORIGINS)])

    def round(self, stage: Stage, server: Server, after: str, place: Path) -> bool:
        """One exchange; whether all was right."""
        given = self.given
        chain = "/" in server.name
        known = web.CLIENTS if chain else ENDS
        client = self.random.choice([name for name in known if not given.client or name in given.client])
        connections, size = self.random.choice(web.SHAPES if chain else SHAPES)
        warm = self.random.random() < 0.5 if given.warm is None else given.warm
        cell = Cell(
            server.name, client, given.connections or connections, given.bytes or size, self.random.randrange(1 << 32),
            after, given.ring_size, warm, given.native,
        )  # fmt: skip
        argv = (web if chain else matrix).prepare(client, self.built)
        outcome = matrix.exchange(stage, server, argv, cell, place)
        self.rounds += 1
        self.connections += cell.connections
        self.downloads += 2 * cell.connections if chain else 0
        self.bytes += sum(len(data) for data in server.expected([bytes(cell.size)] * cell.connections).values())
        self.switched += sum(outcome.promoted)
        if outcome.faults:
            self.failed += 1
            self.by_pair[server.name, client] += 1
            self.tell(outcome)
        return not outcome.faults

    def tell(self, outcome: Outcome) -> None:
        """A fault, as it happens."""
        print(f"FAULT {self.failed} in round {self.rounds}, {outcome.seconds} s, left in {outcome.place}\n"
              f"  {outcome.cell.command}", flush=True)  # fmt: skip
        for fault in outcome.faults[:8]:
            print("  " + fault.replace("\n", "\n    "), flush=True)

    def report(self) -> None:
        """What was done in all."""
        print(f"{self.rounds} rounds (seed {self.given.seed}): {self.connections} connections, "
              f"{self.downloads} downloads, {self.bytes / 1e9:.2f} GB received, {self.switched} ends moved to a ring; "
              f"{self.failed} rounds failed")  # fmt: skip
        for (server, client), count in self.by_pair.most_common():
            print(f"  {count} with server {server}, client {client}")


def main() -> None:
    given = arguments()
    os.environ["CI"] = "true"  # a program that is missing is a failure
    place = given.keep or Path(tempfile.mkdtemp(prefix="sidestep-soak-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    soak = Soak(given, place)
    with ExitStack() as stack:
        stack.callback(soak.report)
        stack.enter_context(busy(given.load))
        soak.run()
    if not soak.switched and not given.native:
        print("nothing went by ring: that shows nothing")
    sys.exit(soak.failed > 0 or (not soak.switched and not given.native))


if __name__ == "__main__":
    main()
