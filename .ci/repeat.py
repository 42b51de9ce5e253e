#!/usr/bin/env python3
"""Run `make ci` in a fresh clone of the last commit, again and again, and keep what came of it.

Each run takes the next row. A line for each is added to build/ci-runs.jsonl: the commit, the row, how many busy
processes stood beside it, seconds, how it ended, and the tests that failed. Several calls, on different days as well,
add to the same file; --show prints all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "build" / "ci-runs.jsonl"
BUSY = "while True: pass"


def known() -> list[dict[str, object]]:
    """The runs so far."""
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def failures(clone: Path) -> list[str]:
    """The tests that failed, by the reports of the clone's runs."""
    found = []
    for report in sorted((clone / "build").glob("junit*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                found.append(f"{case.get('classname')}::{case.get('name')}")
    return found


def one(row: int, busy: int) -> dict[str, object]:
    """Runs it once."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="sidestep-ci-") as place, ExitStack() as stack:
        Path(place).chmod(0o755)  # tests run programs of other users from there
        clone = Path(place) / "sidestep"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        for _ in range(busy):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(process.kill)
        log = KEPT.with_name(f"ci-run-{len(known()) + 1}.log")
        began = time.monotonic()
        with log.open("w") as out:
            env = {**os.environ, "CI": "true", "ROW": str(row)}
            done = subprocess.run(
                ["bash", ".ci/run"], cwd=clone, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False
            )
        return {
            "commit": commit.strip()[:10], "row": row, "busy": busy, "seconds": round(time.monotonic() - began),
            "status": done.returncode, "failed": failures(clone), "log": log.name,
        }  # fmt: skip


def show(runs: list[dict[str, object]]) -> None:
    """Prints a line for each run, and one for each failure."""
    for number, run in enumerate(runs, 1):
        failed = run["failed"]
        assert isinstance(failed, list)
        ended = "passed" if run["status"] == 0 else f"exit status {run['status']}, {len(failed)} tests failed"
        print(f"{number:3}  {run['commit']}  row {run['row']:>2}  {run['busy']} busy  {run['seconds']:>5} s  {ended}")
        for name in failed:
            print(f"     {name}")


def main() -> int:
    """Returns 0 if each of the new runs passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1, help="how many; default 1")
    parser.add_argument("--busy", type=int, default=0, help="busy processes beside them; default 0")
    parser.add_argument("--show", action="store_true", help="print the runs so far, and run nothing")
    options = parser.parse_args()
    new = []
    KEPT.parent.mkdir(exist_ok=True)
    for _ in range(0 if options.show else options.runs):
        new.append(one(len(known()) % 60, options.busy))
        with KEPT.open("a") as file:
            file.write(json.dumps(new[-1]) + "\n")
    show(known())
    return int(any(run["status"] != 0 for run in new))


if __name__ == "__main__":
    sys.exit(main())
