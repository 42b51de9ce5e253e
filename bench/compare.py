"""Two checkouts against each other: `python bench/compare.py BEFORE [--rows NAMES]`.

Each row runs under the sidestep of BEFORE and under this one in turns, by this checkout's benchmarks; who begins
changes with each round. Both must be built ('make build'). Kernel TCP is not measured: run.py does that. A gain above 1
means that this one is faster, or needs less; the middle half is that of the gains of the rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click
from harness.apps import as_user
from harness.cli import HERE, ROOT, build_programs, chosen, tell
from harness.model import Row, Settings
from harness.rows import missing
from harness.runner import CROWDED_S, judge, measured
from harness.world import sidestep_world

from sidestep.demo.machine import Machine

ONCE = "--once"  # the word by which this program measures one run, with the interpreter that it is started with


def once(row: Row, seconds: float) -> None:
    """One run under the sidestep of this interpreter, as JSON."""
    seconds = max(seconds, CROWDED_S) if row.load else seconds
    settings = Settings(seconds, warmup_s=0.3, idle_s=5.0, connections_max=2_000, pauses=3)
    with sidestep_world(None, cpus=row.cpus, load=row.load) as world:
        sample = measured(row, world, settings)
    click.echo(json.dumps(asdict(sample) | {"invalid": judge(row, sample)}))


def figure(row: Row, checkout: Path, seconds: float) -> float:
    """The figure of one run; raises ValueError with the reason where it does not count."""
    argv = [str(checkout / ".venv/bin/python"), str(HERE / "compare.py"), ONCE, row.name, str(seconds)]
    if row.user and os.geteuid() == 0:
        argv = as_user(row.user, [])[:-1] + argv  # the interpreter that it ends with is this one's
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd="/")
    if done.returncode:
        raise ValueError(done.stderr.strip().splitlines()[-1])
    found = json.loads(done.stdout)
    if found["invalid"]:
        raise ValueError(found["invalid"])
    return float(found["value"])


def gain(less: bool, then: float, now: float) -> float:
    """How many times better `now` is; with `less` a smaller figure is."""
    above, below = (then, now) if less else (now, then)
    return above / below if below else 1.0 if above == below else float("inf")


@click.command(help=__doc__)
@click.argument("before", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rows", "patterns", metavar="NAMES", help="Only these rows, comma-separated; * and ? match.")
@click.option("--rounds", type=click.IntRange(2), default=6, show_default=True, help="Runs of each checkout.")
@click.option("--seconds", type=click.FloatRange(0.05), default=1.0, show_default=True, help="Measured a run.")
def main(before: Path, patterns: str | None, rounds: int, seconds: float) -> None:
    """Prints a line a row."""
    build_programs()
    click.echo(f"{Machine.now()}\n{'row':20} {'unit':>10} {'before':>12} {'now':>12} {'gain':>7}  middle half")
    for row in chosen(patterns):
        if lacks := missing(row):
            tell(f"{row.name}: skipped: {'; '.join(lacks)}")
            continue
        old: list[float] = []
        new: list[float] = []
        sides = [(old, before.resolve()), (new, ROOT)]
        try:
            for number in range(rounds):
                for figures, checkout in sides[:: -1 if number % 2 else 1]:
                    figures.append(figure(row, checkout, seconds))
        except ValueError as error:
            tell(f"{row.name}: {error}")
            continue
        less = row.lower_is_better or row.absolute
        low, _, high = statistics.quantiles(map(partial(gain, less), old, new), n=4, method="inclusive")
        then, now = statistics.median(old), statistics.median(new)
        total = gain(less, then, now)
        click.echo(f"{row.name:20} {row.unit:>10} {then:12,.2f} {now:12,.2f} {total:6.2f}x  {low:.2f} .. {high:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == [ONCE]:
        once(chosen(sys.argv[2])[0], float(sys.argv[3]))
    else:
        main()
