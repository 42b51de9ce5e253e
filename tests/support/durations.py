"""Plugin of pytest: what each test and each folder costs.

Wall seconds are those of set-up, call and tear-down. CPU seconds are those of the worker and of the child processes
that it has waited for; a process that outlives its test counts for the test that ends it. `build/durations.json` keeps
the last figure of every item; the run's end shows the ten dearest folders, and those that are over their budget.
"""

from __future__ import annotations

import fcntl
import json
import resource
import time
import tomllib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from selection import Table

ROOT: Final = Path(__file__).parents[2]
KEPT: Final = ROOT / "build" / "durations.json"
TWICE: Final = ROOT / "build" / "twice.json"  # folders of this run that took twice their budget, for budget.py
BUDGETS: Final = ROOT / "tests" / "budget.toml"  # CPU seconds of each folder in each set
SHOWN: Final = 10
SHOWN_OVER: Final = 1.2
_START: Final = pytest.StashKey["Spent"]()


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by the clock and of processors: a moment, or the distance of two."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Spent:
        """This moment, as this process counts."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(time.monotonic(), sum(one.ru_utime + one.ru_stime for one in used))

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)


NONE: Final = Spent(0, 0)
LONG: Final = Spent(60, 60)  # of an item of such a file whose figures nobody has yet


def folder(nodeid: str) -> str:
    """The room of an item: the folder below tests/, or the file."""
    return nodeid.removeprefix("tests/").partition("::")[0].split("/")[0]


def kept() -> dict[str, Spent]:
    """The last figures of each item; empty before the first run, or where the file cannot be read."""
    try:
        items = json.loads(KEPT.read_text(encoding="utf-8"))["items"]
        return {name: Spent(*figures) for name, figures in items.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def by_folder(items: dict[str, Spent]) -> dict[str, Spent]:
    """The sum of each folder, the dearest first."""
    sums: dict[str, Spent] = {}
    for name, spent in items.items():
        sums[folder(name)] = sums.get(folder(name), NONE) + spent
    return dict(sorted(sums.items(), key=lambda one: -one[1].cpu_s))


def over(sums: dict[str, Spent], budgets: dict[str, float], times: float) -> dict[str, float]:
    """The folders that took more than so many times their budget, with its multiple; one without a budget is not in."""
    found = {name: one.cpu_s / budgets[name] for name, one in sums.items() if name in budgets}
    return {name: share for name, share in found.items() if share > times}


def budgets_of(name: str) -> dict[str, float]:
    """CPU seconds of each folder in the set `name`; empty for a set that has none."""
    found: dict[str, dict[str, float]] = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    return found.get(name, {})


def twice_over() -> dict[str, float]:
    """The folders of the last run that took twice their budget."""
    try:
        found: dict[str, float] = json.loads(TWICE.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


def keep(items: dict[str, Spent]) -> None:
    """Adds a run's figures to those of earlier runs."""
    KEPT.parent.mkdir(exist_ok=True)
    with KEPT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        every = kept() | items
        rounded = {name: [round(one.wall_s, 3), round(one.cpu_s, 3)] for name, one in sorted(every.items())}
        folders = {name: [round(one.wall_s, 1), round(one.cpu_s, 1)] for name, one in by_folder(items).items()}
        whole = KEPT.with_suffix(".new")
        whole.write_text(json.dumps({"folders": folders, "items": rounded}), encoding="utf-8")
        whole.replace(KEPT)


def longest_first(items: list[pytest.Item]) -> None:
    """Puts files with a long test before others, by the last figures, so that none is left alone at the end."""
    last, longest = kept(), dict[str, float]()
    long = tuple(f"tests/{place}" for place in Table.read().long)
    for item in items:
        file = item.nodeid.partition("::")[0]
        unknown = LONG if file.startswith(long) else NONE
        longest[file] = max(longest.get(file, 0.0), last.get(item.nodeid, unknown).wall_s)
    items.sort(key=lambda item: -longest[item.nodeid.partition("::")[0]])


class Durations:
    """Measures in the process that runs the tests; keeps and shows in the one that was started."""

    def __init__(self) -> None:
        self._items: dict[str, Spent] = {}
        self._began = time.monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """What takes long begins first."""
        longest_first(items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Where workers share the tests, each gets one after the other; a server of the matrix stays with one."""
        from xdist.scheduler import LoadScopeScheduling

        class ByServer(LoadScopeScheduling):  # type: ignore[misc]
            def _split_scope(self, nodeid: str) -> str:
                return nodeid.rpartition("-")[0] if "/test_matrix.py::" in nodeid and "-" in nodeid else nodeid

        if config.option.dist != "load":
            return None
        config.option.loadscopereorder = False
        return ByServer(config, log)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """The beginning of an item."""
        item.stash[_START] = Spent.now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """The last report of an item carries what it took, from a worker as well."""
        report: Any = yield
        if call.when == "teardown":
            spent = Spent.now() - item.stash[_START]
            report.spent = [spent.wall_s, spent.cpu_s]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes the figures in; the controller hears of those of all workers."""
        if found := getattr(report, "spent", None):
            self._items[report.nodeid] = Spent(*found)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keeps the figures."""
        if self._items and not hasattr(session.config, "workerinput"):
            keep(self._items)
            twice = over(by_folder(self._items), budgets_of(session.config.getoption("set")), 2)
            if session.config.getoption("part") == "alone":  # the second half of a run
                twice |= twice_over()
            TWICE.write_text(json.dumps(twice), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """The dearest folders, and those over their budget."""
        if not self._items:
            return
        sums = by_folder(self._items)
        total = sum((one.cpu_s for one in sums.values()), 0.0)
        terminalreporter.section(f"{total:.0f} CPU seconds in {time.monotonic() - self._began:.0f} s")
        for name, one in list(sums.items())[:SHOWN]:
            count = sum(folder(item) == name for item in self._items)
            terminalreporter.line(f"{one.cpu_s:8.1f} CPU s {one.wall_s:9.1f} s {count:6} items  tests/{name}")
        for name, share in over(sums, budgets_of(config.getoption("set")), SHOWN_OVER).items():
            terminalreporter.line(
                f"over its budget: tests/{name} took {share:.1f} times what tests/budget.toml gives it"
            )
