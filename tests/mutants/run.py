#!/usr/bin/env python3
"""Puts each fault of tests/mutants back, and runs the tests that touch its lines until one finds it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # pytest puts it there by itself

from coverage_store import Store
from mutant_choice import chosen, seconds, still_needed
from mutant_patch import Mutant, mutants
from mutant_trial import Trial, batches, items_of, options_of
from source_copy import ROOT, SourceCopy

KEPT: Final = ROOT / "build" / "mutants" / "found.json"
EPILOG: Final = """\
Items are chosen by the record that `make coverage` or tests/mutants/cover.py keeps: without one only those run that
the mutant names itself. A failure is believed if the same item passes on a tree without the fault. An item that
hangs has found the fault.

Several rows cost one build of each mutant and one run of each item: what an item comes to counts in every row that
has it. Results are kept in build/mutants/found.json. A run that was interrupted goes on where it stopped.

examples:
  run.py                                  all mutants, all tests
  run.py end_unseen ring_overrun          two of them
  run.py --set ci --rows 1,2,3            what three rotations of `make ci` find
  run.py --list end_unseen                the items that would run, in their order
"""


@dataclass
class Result:
    """What is known of a mutant."""

    digest: str
    killers: dict[str, str] = field(default_factory=dict)  # item: the end of what it said; in any set
    distrusted: list[str] = field(default_factory=list)  # fail without the fault as well
    passed: list[str] = field(default_factory=list)
    seconds: float = 0.0  # for all sets so far

    def open_items(self, wanted: dict[str, list[str]]) -> list[str]:
        """Those worth a run, of the items of some sets."""
        return still_needed(wanted, self.killers, {*self.passed, *self.distrusted})

    def row(self, items: list[str], why: str) -> dict[str, Any]:
        """What the table says of a set of these items; `why` the search ended before the last one."""
        found = next((nodeid for nodeid in items if nodeid in self.killers), None)
        done = {*self.passed, *self.distrusted, found}
        return {
            "found": found,
            "items": sum(nodeid in done for nodeid in items),
            "of": len(items),
            "seconds": round(self.seconds, 1),
            "why": "" if found else why,
        }


class Results:
    """All that is known, kept after every batch."""

    def __init__(self, again: bool) -> None:
        self._again = again
        self._read: set[str] = set()
        self._kept: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}

    def of(self, mutant: Mutant) -> Result:
        """Of a mutant; nothing if its patch has changed since."""
        found = self._kept.get(mutant.name)
        forgotten = self._again and mutant.name not in self._read
        self._read.add(mutant.name)
        if forgotten or found is None or found["digest"] != mutant.digest:
            return Result(mutant.digest)
        return Result(**found)

    def keep(self, mutant: Mutant, result: Result) -> None:
        self._kept[mutant.name] = asdict(result)
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        whole = KEPT.with_suffix(".new")
        whole.write_text(json.dumps(self._kept, indent=1), encoding="utf-8")
        whole.replace(KEPT)


class Search:
    """Looks for the items that find mutants, in a copy of the tree for the fault and one without."""

    def __init__(self, results: Results, limit_s: float) -> None:
        self._results, self._limit_s = results, limit_s
        self._store = Store()
        self._store.follow(ROOT)
        self._sets: dict[str, set[str]] = {}
        self._clean = SourceCopy("mutants/clean")
        self._faulty = SourceCopy("mutants/tree", source=self._clean.root)  # our own tree may change meanwhile

    def prepare(self, sets: dict[str, list[str]]) -> None:
        """Both copies, up to date, and the items of each set, of which the options of pytest are given."""
        for copy in (self._clean, self._faulty):
            copy.update()
        self._sets = {what: set(items_of(self._clean, options)) for what, options in sets.items()}

    def items(self, mutant: Mutant) -> dict[str, list[str]]:
        """What would run of each set, in this order."""
        order = chosen(self._store, mutant, sorted(set().union(*self._sets.values())))
        return {what: [nodeid for nodeid in order if nodeid in held] for what, held in self._sets.items()}

    def look(self, mutant: Mutant) -> dict[str, dict[str, Any]]:
        """Runs items until each set has one that finds the mutant; rows of the table."""
        result, wanted = self._results.of(mutant), self.items(mutant)
        began = time.monotonic()
        why = self._with_fault(mutant, result, wanted) if result.open_items(wanted) else ""
        result.seconds += time.monotonic() - began
        self._results.keep(mutant, result)
        return {what: result.row(items, why) for what, items in wanted.items()}

    def _with_fault(self, mutant: Mutant, result: Result, wanted: dict[str, list[str]]) -> str:
        """Why the search ended before the last item."""
        try:
            mutant.apply(self._faulty.root)
            if any(file.endswith((".c", ".h", "layout.py", ".build")) for file in mutant.changed):
                self._faulty.compile()
            return self._try(mutant, result, wanted)
        except (ValueError, RuntimeError) as error:
            print(f"run: {mutant.name}: {error}", file=sys.stderr)
            return "does not fit the tree" if isinstance(error, ValueError) else "does not compile"
        finally:
            self._faulty.update()  # takes the fault out

    def _try(self, mutant: Mutant, result: Result, wanted: dict[str, list[str]]) -> str:
        items = result.open_items(wanted)
        costs, began = seconds(self._store, items), time.monotonic()
        faulty, clean = Trial(self._faulty), Trial(self._clean)
        waiting = list(batches(items, costs))
        while waiting:
            needed = set(result.open_items(wanted))
            batch = [nodeid for nodeid in waiting.pop(0) if nodeid in needed]
            if not batch:
                continue
            if time.monotonic() - began > self._limit_s:
                return "out of time"
            outcome = faulty.run(batch, sum(costs[nodeid] for nodeid in batch))
            result.passed.extend(outcome.ended)
            for nodeid, said in outcome.failed.items():
                if clean.run([nodeid], costs[nodeid]).failed:
                    result.distrusted.append(nodeid)
                else:
                    result.killers[nodeid] = said
            self._results.keep(mutant, result)
            waiting.insert(0, batch)  # what is left of it
        return ""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="Mutants by the names of their files; all by default.")
    parser.add_argument("--set", default="full", choices=("check", "test", "ci", "full"), help="Set of tests.")
    parser.add_argument("--rows", default="", metavar="N,N", help="Rows of the set's rotation.")
    parser.add_argument("--limit", type=float, default=1200, metavar="S", help="Time for one mutant, in seconds.")
    parser.add_argument("--again", action="store_true", help="Forgets what is known of these mutants.")
    parser.add_argument("--json", action="store_true", help="The table as JSON.")
    parser.add_argument("--list", action="store_true", help="The items that would run, without running them.")
    return parser.parse_args()


def wanted(names: list[str]) -> list[Mutant]:
    every = {mutant.name: mutant for mutant in mutants()}
    names = [Path(name).stem for name in names]
    if unknown := [name for name in names if name not in every]:
        sys.exit(f"run: there is no tests/mutants/{unknown[0]}.patch")
    return [every[name] for name in names] if names else list(every.values())


def show(rows: list[dict[str, Any]]) -> None:
    """Table of mutants, then the share that each set finds."""
    width = max(len(row["mutant"]) for row in rows)
    print(f"{'mutant':<{width}}  {'set':<9} {'items':>11} {'seconds':>8}  found by")
    for row in rows:
        by = row["found"] or (f"nothing so far: {row['why']}" if row["why"] else "nothing")
        of = f"{row['items']}/{row['of']}"
        print(f"{row['mutant']:<{width}}  {row['set']:<9} {of:>11} {row['seconds']:>8.1f}  {by}")
    for what in dict.fromkeys(row["set"] for row in rows):
        several = [row for row in rows if row["set"] == what]
        count = sum(row["found"] is not None for row in several)
        print(f"{what}: {count} of {len(several)} found, {100 * count / len(several):.0f} %")


def main() -> None:
    given = arguments()
    several = wanted(given.names)
    search = Search(Results(given.again), given.limit)
    print("run: making the copies of the tree", file=sys.stderr)
    numbers = given.rows.split(",") if given.rows else [None]
    search.prepare({given.set if row is None else f"{given.set} {row}": options_of(given.set, row) for row in numbers})
    rows: list[dict[str, Any]] = []
    for mutant in several:
        if given.list:
            print(*dict.fromkeys(chain.from_iterable(search.items(mutant).values())), sep="\n")
            continue
        for what, said in search.look(mutant).items():
            rows.append({"mutant": mutant.name, "set": what, **said})
            print(f"run: {mutant.name}: {what}: {said['found'] or 'not found'}", file=sys.stderr)
    if given.json:
        print(json.dumps(rows, indent=1))
    elif rows:
        show(rows)


if __name__ == "__main__":
    main()
