"""What it costs to start the commands: `python bench/start.py`, in CPU time over that of bare Python. And a
Go program of 6 MB.

The installed command runs with a private provider, as it does from the second program on; compiled files are there, as
pip leaves them.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sidestep.demo.machine import Machine
from sidestep.testing import Sidestep

HERE = Path(__file__).parent
COMMANDS = {
    "sidestep run -- true": ["run", "--", "true"],
    "sidestep run --spin-us 0 -- true": ["run", "--spin-us", "0", "--", "true"],
    "sidestep --help": ["--help"],
    "sidestep ss": ["ss"],
}


def cpu_ms(argv: Sequence[str], env: Mapping[str, str], *, check: bool = True) -> float:
    """Of the process and those that it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=check)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    command = str(Path(sys.executable).with_name("sidestep"))
    rows = {"python -c pass": [sys.executable, "-c", "pass"]}
    rows |= {name: [command, *args] for name, args in COMMANDS.items()}
    print(Machine.now())
    with tempfile.TemporaryDirectory() as compiled, Sidestep() as sidestep:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env |= {"PYTHONPYCACHEPREFIX": compiled, "SIDESTEP_SOCKET": str(sidestep.socket)}
        for argv in rows.values():
            cpu_ms(argv, env)  # compiles
        costs = [[cpu_ms(argv, env) for argv in rows.values()] for _ in range(rounds)]  # in turn: a load meets all
    columns = dict(zip(rows, zip(*costs, strict=True), strict=True))
    bare, *_ = columns.values()
    for name, found in columns.items():
        median, over = statistics.median(found), statistics.median(found) - statistics.median(bare)
        print(f"{name:<34} {median:6.1f} ms of CPU, least {min(found):6.1f}   over Python {over:6.1f}")
    if shutil.which("go"):
        go_program(rounds)


def go_program(rounds: int) -> None:
    """Executed by a shell, which is under sidestep or not; it ends at once, as it is given no page."""
    subprocess.run(["make", "-s", "-C", HERE], check=True)
    argv = ["sh", "-c", f"exec {HERE}/build/httpd-go :0 /nonexistent"]
    with Sidestep() as sidestep:
        worlds = [dict(os.environ), dict(sidestep.env())]
        costs = [[cpu_ms(argv, env, check=False) for env in worlds] for _ in range(rounds)]
    plain, ours = (statistics.median(column) for column in zip(*costs, strict=True))
    over = statistics.median(after - before for before, after in costs)
    print(f"a Go program, from a shell: {plain:.1f} ms of CPU, under sidestep {ours:.1f}; {over:.1f} more")


if __name__ == "__main__":
    main()
