"""Runs once more the folders that took twice their budget of CPU seconds, and fails where they do so again.

usage: budget.py SET ROW     after a run of that set; what is left of build/twice.json decides
"""

from __future__ import annotations

import subprocess
import sys

import durations


def main(name: str, row: str) -> int:
    """Returns 0, or 1 if a folder took twice its budget in two runs."""
    again = dict[str, float]()
    for folder, share in durations.twice_over().items():
        print(f"tests/{folder} took {share:.1f} times its budget: once more", flush=True)
        options = [f"--set={name}", *([f"--row={row}"] if row else []), "-q"]
        subprocess.run([sys.executable, "-m", "pytest", f"tests/{folder}", *options], cwd=durations.ROOT, check=False)
        again.update(durations.twice_over())
    for folder, share in again.items():
        print(
            f"tests/{folder} took {share:.1f} times its budget in two runs\n"
            f"hint: make its tests cheaper, or raise its line in tests/budget.toml and say why"
        )
    return int(bool(again))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
