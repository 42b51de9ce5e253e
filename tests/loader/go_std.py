"""Go's own tests, natively and under sidestep: which of them end otherwise. Not among the tests; takes hours.

usage: go_std.py --go GOROOT [--variant static|cgo]... [--native N] [--rounds N] [--run PATTERN] [--keep DIRECTORY]
                 [--cap SECONDS] [PACKAGE]...

A package such as net/http is built as its variant, and run in its directory with -test.short: N times natively, N times
under sidestep, with promotion at once. What a test came to under sidestep but never natively is printed at each round,
and the output of such a round stays in DIRECTORY; the table in the end counts all rounds. Exits 1 if anything differs.
A round that took far longer than the others has stood still, and is to be looked into.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sidestep.testing import Sidestep, argv_under_shim

PACKAGES: Final = ("os/exec", "os/signal", "syscall", "net", "net/http", "runtime")  # the cheapest first
VARIANTS: Final = {"static": "0", "cgo": "1"}  # CGO_ENABLED
LINE: Final = re.compile(rb"\x16(?:=== (RUN|NAME) +|\s*--- (PASS|FAIL|SKIP): )(\S+)")  # of -test.v=test2json
PROCESS: Final = "(process)"  # how the whole ended, beside the tests' names
ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Side:
    """All rounds of a package, natively or under sidestep."""

    rounds: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    promoted: int = 0
    ends: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # of each test


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", default=PACKAGES)
    parser.add_argument("--go", type=Path, required=True)
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--native", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--run", default="")
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "go-std")
    parser.add_argument("--cap", type=float, default=1800.0)
    return parser.parse_args()


def build(given: argparse.Namespace, package: str, variant: str, env: Mapping[str, str]) -> Path:
    """The package's tests as a program, compiled if that has not been done yet."""
    program: Path = given.keep / f"{package.replace('/', '_')}-{variant}"
    if not program.exists():
        command = [given.go / "bin" / "go", "test", "-c", "-o", program, "."]
        subprocess.run(
            command, cwd=given.go / "src" / package, env={**env, "CGO_ENABLED": VARIANTS[variant]}, check=True
        )
    return program


def ends_of(output: bytes, status: str) -> dict[str, str]:
    """What became of each test; one that has begun only has not ended."""
    ends = {}
    for _, end, name in LINE.findall(output):
        if name and (end or name.decode() not in ends):
            ends[name.decode()] = end.decode() or "UNENDED"
    return ends | {PROCESS: status}


def run(given: argparse.Namespace, package: str, program: Path, env: Mapping[str, str], log: Path) -> dict[str, str]:
    """One round, ended by SIGQUIT (Go shows where it stands) and SIGKILL if it takes too long."""
    directory = given.go / "src" / package
    command = [str(program), "-test.short", "-test.v=test2json", "-test.timeout=0", f"-test.run={given.run}"]
    argv = argv_under_shim(command) if "LD_PRELOAD" in env else command
    with log.open("wb") as output:
        started = subprocess.Popen(
            argv,
            cwd=directory,
            env={**env, "PWD": str(directory)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        status = ""
        for number in (signal.SIGQUIT, signal.SIGKILL):
            try:
                started.wait(10.0 if status else given.cap)
            except subprocess.TimeoutExpired:
                started.send_signal(number)
                status = "HANG"
        started.wait()
    return ends_of(log.read_bytes(), status or f"exit {started.returncode}")


def round_of(
    given: argparse.Namespace, package: str, program: Path, env: Mapping[str, str], side: Side, shimmed: bool
) -> tuple[dict[str, str], Path]:
    log: Path = given.keep / f"{program.name}-{'sidestep' if shimmed else 'native'}-{os.getpid()}-{side.rounds}.log"
    begun = time.monotonic()
    if shimmed:
        with Sidestep(promote_after="0") as sidestep:
            ends = run(given, package, program, sidestep.env(**env), log)
            side.promoted += sidestep.status()["counters"].get("claim_matched", 0)
    else:
        ends = run(given, package, program, {**os.environ, **env}, log)
    took = time.monotonic() - begun
    side.seconds += took
    side.longest = max(side.longest, took)
    side.rounds += 1
    for name, end in ends.items():
        side.ends[name][end] += 1
    return ends, log


def differing(native: Side, shimmed: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Names of tests that came to something they never came to natively, or did not begin."""
    return sorted(
        name
        for name in {*native.ends, *shimmed}
        if not {*shimmed.get(name, ())} or {*shimmed[name]} - {*native.ends.get(name, ())}
    )


def counted(side: Side, name: str) -> str:
    found = side.ends.get(name, Counter())
    return ", ".join(f"{end} {count}" for end, count in found.most_common()) or "nothing"


def compare(given: argparse.Namespace, package: str, variant: str, env: Mapping[str, str]) -> tuple[str, bool]:
    """All rounds of a package; its row of the table, and whether all ended as natively."""
    program = build(given, package, variant, {**os.environ, **env})
    native, shimmed = Side(), Side()
    for _ in range(given.native):
        round_of(given, package, program, env, native, shimmed=False)
    for _ in range(given.rounds):
        ends, log = round_of(given, package, program, env, shimmed, shimmed=True)
        if found := differing(native, {name: {end: 1} for name, end in ends.items()}):
            told = "".join(f"\n  {name}: {ends.get(name, 'nothing')}" for name in found)
            print(f"{package} {variant} round {shimmed.rounds}: see {log}{told}", flush=True)
        else:
            log.unlink()
    found = differing(native, shimmed.ends) if shimmed.rounds else []
    failed = sum("FAIL" in ends for ends in native.ends.values())
    row = (
        f"{package:10} {variant:7} {native.rounds:6} {shimmed.rounds:8} {len(native.ends) - 1:6} {failed:6}"
        f" {native.seconds / max(native.rounds, 1):8.1f} {shimmed.seconds / max(shimmed.rounds, 1):8.1f}"
        f" {shimmed.longest:8.1f} {shimmed.promoted:8}  {len(found) or 'equal'}"
    )
    lines = [f"\n  {name}: {counted(native, name)}; under sidestep {counted(shimmed, name)}" for name in found]
    return row + "".join(lines), not found


def main() -> int:
    given = arguments()
    given.go, given.keep = given.go.resolve(), given.keep.resolve()
    given.keep.mkdir(parents=True, exist_ok=True)
    os.environ["SIDESTEP_CHECKED"] = "1"
    for number in (signal.SIGINT, signal.SIGQUIT):  # a shell's background jobs ignore them, and tests send them
        signal.signal(number, signal.SIG_DFL)
    env = {
        "GOROOT": str(given.go),
        "GOTOOLCHAIN": "local",
        "GOCACHE": str(given.keep / "cache"),
        "PATH": f"{given.go / 'bin'}:{os.environ['PATH']}",
    }
    rows, equal = [], True
    for package in given.packages:
        for variant in given.variant or VARIANTS:
            row, same = compare(given, package, variant, env)
            print(row, flush=True)
            rows.append(row)
            equal &= same
    print(f"\n{'package':10} {'variant':7} {'native':>6} {'sidestep':>8} {'tests':>6} {'failed':>6}", end="")
    print(f" {'seconds':>8} {'sidestep':>8} {'longest':>8} {'promoted':>8}  differ")
    print("\n".join(rows))
    return not equal


if __name__ == "__main__":
    sys.exit(main())
