"""What the loader's entry adds to a call of a static program: `python bench/entry.py`.

The programs of the row `static-untouched`, dynamic and static, each alone and under sidestep. A hooked call is a poll:
what the static program pays for it under sidestep, less what the dynamic one pays. What goes straight to the kernel is
a call on a descriptor that is no connection, and one that the shim has no part in. Least costs of alternating rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess

from harness.talks import BUILD

from sidestep.demo.machine import Machine
from sidestep.testing import Sidestep

CALLS = {"call_ns": "a call on no connection", "poll_ns": "a hooked call", "other_ns": "a call of no interest"}


def costs(program: str, sidestep: Sidestep | None) -> dict[str, float]:
    argv = [str(BUILD / program), "client", "-p", "1", "-w", "0.1", "-t", "0.4"]
    ended = (sidestep.run if sidestep else subprocess.run)(argv, capture_output=True, check=True)
    found: dict[str, float] = json.loads(ended.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    subprocess.run(["make", "-s", "-C", str(BUILD.parent)], check=True)
    print(Machine.now())
    added: dict[str, list[float]] = {name: [] for name in CALLS}
    with Sidestep() as sidestep:
        for _ in range(rounds):
            plain, under = costs("untouched-static", None), costs("untouched-static", sidestep)
            dynamic_plain, dynamic_under = costs("untouched", None), costs("untouched", sidestep)
            for name, list_ in added.items():
                shim = dynamic_under[name] - dynamic_plain[name] if name == "poll_ns" else 0
                list_.append(under[name] - plain[name] - shim)
    for name, title in CALLS.items():
        low, *_, high = statistics.quantiles(added[name], n=4)
        median = statistics.median(added[name])
        print(f"{title:<28} {median:6.1f} ns more   half of the rounds: {low:.0f} .. {high:.0f}")


if __name__ == "__main__":
    main()
