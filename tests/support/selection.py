"""Plugin of pytest: which tests a run takes, by a set and a row.

A set is one of `check`, `test`, `ci` and `full`; each holds those before it. sets.toml says from which set on a file
takes part, and the marker `least` says it of a test. Where conditions multiply, `rotate` takes a share of them that the
row decides, so that runs with different rows take different ones. pytest without options takes everything: a failure
is repeated by the test's name alone.
"""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final, TypeVar

import pytest

TESTS: Final = Path(__file__).parents[1]
FAILURES: Final = TESTS.parent / "build" / "failures.txt"  # of all runs since a target of the Makefile began
ROWS: Final = 60  # a multiple of most numbers of conditions
_T = TypeVar("_T")


class Set(IntEnum):
    """How much a run takes."""

    CHECK = 0
    TEST = 1
    CI = 2
    FULL = 3


class Part(IntEnum):
    """Tests that stand others beside them, those that need the machine for themselves, or both."""

    ALL = 0
    BESIDE = 1
    ALONE = 2


@dataclass(frozen=True, slots=True)
class Table:
    """sets.toml: paths below tests/, a folder's ending with a slash; the longest that fits a file decides."""

    first: dict[str, Set]
    alone: frozenset[str]
    long: tuple[str, ...] = ()  # begins first
    one_in: dict[str, int] = field(default_factory=dict)  # in the sets test and ci

    @classmethod
    def read(cls) -> Table:
        """Raises KeyError where a set has another name."""
        found = tomllib.loads((TESTS / "sets.toml").read_text(encoding="utf-8"))
        first = {place: Set[name.upper()] for name in ("check", "test", "ci", "full") for place in found[name]}
        return cls(first, frozenset(found["alone"]), tuple(found.get("long", ())), found.get("one_in", {}))

    def set_of(self, file: str) -> Set:
        """The set from which on a file takes part; `full` where nothing is said of it."""
        fitting = [place for place in self.first if file == place or (place.endswith("/") and file.startswith(place))]
        return self.first[max(fitting, key=len)] if fitting else Set.FULL

    def is_alone(self, file: str) -> bool:
        """Whether a file's tests want no others beside them."""
        return file.startswith(tuple(self.alone))

    def share_of(self, test: str) -> str | None:
        """The line of `one_in` that a test belongs to."""
        return max((place for place in self.one_in if test.startswith(place)), key=len, default=None)


@dataclass(slots=True)
class Selection:
    """What this run takes."""

    set: Set = Set.FULL
    row: int = 0
    part: Part = Part.ALL


NOW: Final = Selection()  # pytest_configure fills it before any test file is imported


def row_of_commit() -> int:
    """The row that the commit's hash decides; 0 outside a repository."""
    asked = ["git", "-C", str(TESTS), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(done.stdout[:8], 16) % ROWS


def rotate(values: Sequence[_T], group: int = 0, *, test: int = 1, ci: int | None = None) -> list[_T]:
    """So many of `values`, evenly apart: `test` of them in the sets check and test, `ci` in ci, all in full.

    `group` counts what the values are combined with: neighbours take different ones, so that all are taken in each run.
    """
    share = {Set.CI: test if ci is None else ci, Set.FULL: len(values)}.get(NOW.set, test)
    count = len(values)
    if share >= count:
        return list(values)
    taken = {(group + NOW.row + turn * count // share) % count for turn in range(share)}
    return [value for at, value in enumerate(values) if at in taken]


def at_least(name: str) -> bool:
    """Whether this run takes the tests of the set `name`."""
    return NOW.set >= Set[name.upper()]


def _file_of(item: pytest.Item) -> str:
    """Below tests/."""
    return item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""


def _first_of(item: pytest.Item) -> Set:
    """The set from which on an item takes part, by its markers."""
    marked = [Set[mark.args[0].upper()] for mark in item.iter_markers("least")]
    return max(marked, default=Set.TEST if item.get_closest_marker("slow") else Set.CHECK)


def _keep_failure(text: str) -> None:
    FAILURES.parent.mkdir(exist_ok=True)
    with FAILURES.open("a", encoding="utf-8") as kept:
        kept.write(f"{text}\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the Makefile's targets."""
    group = parser.getgroup("sidestep's own tests")
    sets, parts = ([one.name.lower() for one in kind] for kind in (Set, Part))
    group.addoption("--set", choices=sets, default="full", help="which tests (default: full)")
    group.addoption("--row", type=int, help=f"which conditions, 0 to {ROWS - 1} (default: by the commit's hash)")
    group.addoption(
        "--part", choices=parts, default="all", help="tests that run beside others, or alone (default: all)"
    )


class Selecting:
    """The hooks."""

    def __init__(self, config: pytest.Config) -> None:
        row = config.getoption("row")
        NOW.set = Set[config.getoption("set").upper()]
        NOW.part = Part[config.getoption("part").upper()]
        NOW.row = (row_of_commit() if row is None else row) % ROWS
        self._table = Table.read()
        self._is_ours = config.rootpath == TESTS.parent  # not a run that a test made

    def pytest_report_header(self) -> str:
        """How to take the same again."""
        return f"set {NOW.set.name.lower()}, row {NOW.row} (again: ROW={NOW.row})"

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Files of later sets, or of the other part, are not even imported."""
        if collection_path.suffix != ".py" or not collection_path.is_relative_to(TESTS):
            return None
        file = collection_path.relative_to(TESTS).as_posix()
        if self._table.set_of(file) > NOW.set:
            return True
        if NOW.part is not Part.ALL and self._table.is_alone(file) != (NOW.part is Part.ALONE):
            return True
        return None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out single tests of later sets; those that take seconds are none of the smallest."""
        later = {item for item in items if _first_of(item) > NOW.set}
        if NOW.set in (Set.TEST, Set.CI):
            later.update(self._others_turn([item for item in items if item not in later]))
        if later:
            config.hook.pytest_deselected(items=list(later))
            items[:] = [item for item in items if item not in later]

    def _others_turn(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        """Those that other rows take. Not by the row's remainder, as what rotates would go with it.

        Each turn is shifted by one, so that of a pair of conditions a row does not take the same one in all tests.
        """
        of_line = dict[str, int]()
        for item in items:
            if line := self._table.share_of(_file_of(item) + item.nodeid[item.nodeid.find("::") :]):
                count = self._table.one_in[line]
                at = of_line[line] = of_line.get(line, len(line)) + 1  # so that not all lines of one test have one row
                if (at + at // count) % count != NOW.row * count // ROWS:
                    yield item

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """The command that repeats each failure alone, last, where it is seen; kept for the end of several runs."""
        failed = [report for kind in ("failed", "error") for report in terminalreporter.getreports(kind)]
        if not failed:
            return
        lines = list(dict.fromkeys(f"again: .venv/bin/pytest '{report.nodeid}'" for report in failed))
        for line in lines:
            terminalreporter.write_line(line)
        if not self._is_ours or hasattr(config, "workerinput"):  # a worker's failures are the controller's, too
            return
        for report in failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else str(report.longrepr)
            _keep_failure(f"again: .venv/bin/pytest '{report.nodeid}'\n    {' '.join(said.split())[:300]}")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """An end before the last test, of a worker or of the whole run: no failed test tells of it."""
        self._keep_early_end(excinfo)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Likewise."""
        self._keep_early_end(excinfo)

    def _keep_early_end(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if self._is_ours:
            now = os.environ.get("PYTEST_CURRENT_TEST", "no test")
            _keep_failure(f"pytest ended early, in {now}\n{excinfo.getrepr(style='short')}")
