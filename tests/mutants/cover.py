#!/usr/bin/env python3
"""Runs tests on an instrumented copy of the tree, and keeps which lines of the library each item touches."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # pytest puts it there by itself

import coverage_build
import coverage_items
from coverage_lines import Statements
from coverage_store import DIRECTORY, KEPT, Row, Store, take_in
from source_copy import ROOT, SourceCopy

EPILOG = """\
examples:
  cover.py run tests/policy tests/switch            the copy is made, tests run, what they touch is added
  cover.py run tests/shim -- -k half_close -n 4     what follows -- goes to pytest
  cover.py report                                   lines and share of each file, over all runs so far
  cover.py items src/sidestep/native/shim/hooks/shim_io.c:120  the items that touch a line

Figures of all runs are kept in build/coverage/items.sqlite; an item that runs again replaces its own. Items count
whether they pass or not: instrumented code is slower, and some have a deadline.
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="Run tests and keep what they touch.")
    run.add_argument("paths", nargs="+", help="Test folders, files or items.")
    commands.add_parser("report", help="Table of files, lines and the share that is covered.")
    items = commands.add_parser("items", help="Items that touch a line.")
    items.add_argument("line", help="FILE:LINE, the file relative to the tree.")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:end])
    given.pytest = words[end + 1 :]
    return given


def run(paths: list[str], more: list[str]) -> int:
    """Runs pytest on the instrumented copy; its exit code."""
    maps, raw = DIRECTORY / "maps", DIRECTORY / coverage_items.RAW
    for place in (maps, raw):
        shutil.rmtree(place, ignore_errors=True)  # of an earlier build
    print("cover: making the instrumented copy", file=sys.stderr)
    tree = SourceCopy("coverage/tree", [f"-Dcoverage={maps}"])
    tree.update()
    Statements(tree.root, maps).write()
    env = tree.environment(**{coverage_build.DIRECTORY: str(maps)})
    env.pop("PYTHONPYCACHEPREFIX", None)  # the instrumented bytecode lies beside the sources
    began = time.monotonic()
    options = more or ["-n", str(os.cpu_count() or 1)]
    done = subprocess.run([tree.python, "-m", "pytest", *options, *paths], cwd=tree.root, env=env, check=False)
    ran = time.monotonic()
    count = take_in(Store(), tree.root, maps)
    print(
        f"cover: {count} items in {ran - began:.0f} s, resolved in {time.monotonic() - ran:.0f} s; kept in {KEPT}",
        file=sys.stderr,
    )
    return done.returncode


def report() -> None:
    """Prints the table, and a total for each language."""
    store = Store()
    store.follow(ROOT)
    rows = list(store.report())
    if not rows:
        sys.exit("cover: nothing is recorded\nhint: tests/mutants/cover.py run tests/policy")
    for title, suffixes in (("Python", (".py",)), ("C", (".c", ".h"))):
        print(f"{title:<56}{'lines':>7}{'covered':>9}")
        several = [row for row in rows if row.file.endswith(suffixes)]
        for row in several:
            print(_row(row))
        print(_row(Row("total", sum(row.lines for row in several), sum(row.covered for row in several))), end="\n\n")


def _row(row: Row) -> str:
    share = 100 * row.covered / row.lines if row.lines else 100.0
    return f"{row.file.removeprefix('src/sidestep/'):<56}{row.lines:>7}{share:>8.1f}%"


def main() -> None:
    given = arguments()
    if given.command == "run":
        sys.exit(run(given.paths, given.pytest))
    if given.command == "report":
        report()
    else:
        file, _, line = given.line.rpartition(":")
        if not file or not line.isdigit():
            sys.exit("cover: items wants FILE:LINE")
        store = Store()
        store.follow(ROOT)
        for nodeid in sorted(store.touching(file, 1 << int(line))):
            print(nodeid)


if __name__ == "__main__":
    main()
