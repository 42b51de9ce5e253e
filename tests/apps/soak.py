"""The matrix of servers and clients, at random, for as long as wanted.

usage: soak.py [--minutes N | --rounds N] [--server NAME] [--client NAME] [--connections N] [--bytes N] [--seed N]
               [--after default|0|...] [--ring-size N] [--warm | --cold] [--load N] [--native] [--keep DIRECTORY] [--stop-at FAULTS]

What is not given is drawn anew for each round, servers every twenty. Prints a line for each fault, with the command that
runs it again, and in the end how many connections were made and how many failed; exits 1 if any did. What a failed round
left (bytes sent and received, logs of programs and shims) stays in DIRECTORY.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import matrix
from matrix import AFTERS, ENDS, SHAPES, Cell, Outcome, Server

ROUNDS_A_SERVER = 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--server", action="append", choices=ENDS)
    parser.add_argument("--client", action="append", choices=ENDS)
    parser.add_argument("--connections", type=int)
    parser.add_argument("--bytes", type=int)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--after")
    parser.add_argument("--ring-size", type=int)
    parser.add_argument("--load", type=int, default=matrix.LOAD)
    parser.add_argument("--warm", action="store_true", default=None)
    parser.add_argument("--cold", action="store_false", dest="warm")
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--stop-at", type=int, default=0)
    given = parser.parse_args()
    if given.minutes is None and given.rounds is None:
        given.minutes = 10.0
    return given


class Soak:
    """Counts what comes of the rounds."""

    def __init__(self, given: argparse.Namespace, place: Path) -> None:
        self.given, self.place = given, place
        self.random = random.Random(given.seed)
        self.connections = self.rounds = self.bytes = self.failed = 0
        self.promoted = [0, 0]
        self.by_pair: Counter[tuple[str, str]] = Counter()
        self.end = None if given.minutes is None else time.monotonic() + 60 * given.minutes

    @property
    def over(self) -> bool:
        if self.given.stop_at and self.failed >= self.given.stop_at:
            return True
        if self.given.rounds is not None and self.rounds >= self.given.rounds:
            return True
        return self.end is not None and time.monotonic() >= self.end

    def cell(self, server: str, after: str) -> Cell:
        given = self.given
        connections, size = self.random.choice(SHAPES)
        return Cell(
            server, self.random.choice(given.client or ENDS), given.connections or connections, given.bytes or size,
            self.random.randrange(1 << 32), after, given.ring_size,
            self.random.random() < 0.5 if given.warm is None else given.warm, given.native,
        )  # fmt: skip

    def run(self) -> None:
        built = self.place / "built"
        built.mkdir(parents=True)
        programs = {name: matrix.prepare(name, built) for name in {*(self.given.server or ENDS), *(self.given.client or ENDS)}}
        turn = 0
        while not self.over:
            turn += 1
            server_name = self.random.choice(self.given.server or ENDS)
            after = self.given.after or self.random.choice(AFTERS)
            workdir = self.place / f"turn{turn}"
            workdir.mkdir()
            with matrix.staged(workdir, after, self.given.ring_size, native=self.given.native) as stage:
                server = Server(stage, server_name, programs[server_name])
                for number in range(ROUNDS_A_SERVER):
                    if self.over:
                        break
                    cell = self.cell(server_name, after)
                    outcome = matrix.exchange(stage, server, programs[cell.client], cell, workdir / str(number))
                    self.note(outcome)
                    if outcome.faults:
                        break  # with a server that nothing has happened to
    
    def note(self, outcome: Outcome) -> None:
        self.rounds += 1
        self.connections += outcome.cell.connections
        self.bytes += 2 * outcome.cell.connections * outcome.cell.size
        for side in (0, 1):
            self.promoted[side] += outcome.promoted[side]
        if outcome.faults:
            self.failed += 1
            self.by_pair[outcome.cell.server, outcome.cell.client] += 1
            print(f"FAULT {self.failed} in round {self.rounds}, {outcome.seconds} s, left in {outcome.place}\n"
                  f"  {outcome.cell.command}", flush=True)  # fmt: skip
            for fault in outcome.faults[:8]:
                print("  " + fault.replace("\n", "\n    "), flush=True)

    def report(self) -> None:
        print(f"{self.rounds} rounds, {self.connections} connections, {self.bytes / 1e9:.2f} GB, promoted "
              f"{self.promoted[0]} from the client and {self.promoted[1]} from the server; {self.failed} rounds failed")  # fmt: skip
        for (server, client), count in self.by_pair.most_common():
            print(f"  {count} with server {server}, client {client}")


def main() -> None:
    given = arguments()
    os.environ["CI"] = "true"  # a program that is missing is a failure
    place = given.keep or Path(tempfile.mkdtemp(prefix="sidestep-soak-"))
    soak = Soak(given, place)
    with ExitStack() as stack:
        stack.callback(soak.report)
        stack.enter_context(matrix.busy(given.load))
        soak.run()
    sys.exit(soak.failed > 0)


if __name__ == "__main__":
    main()
