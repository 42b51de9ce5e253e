"""Plugin of pytest: what each item touches of the library's C and Python, for tests/mutants.

Instrumented code notes in maps which parts of it have run, one directory of maps a worker. Before an item the worker's
maps are cleared; what they hold after it goes into a file of the worker, which tests/mutants/cover.py reads.
"""

from __future__ import annotations

import mmap
import os
import sqlite3
import time
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

RAW: Final = "raw"  # beside the directory of the maps
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS item (id INTEGER PRIMARY KEY, nodeid TEXT, wall_s REAL, outcome TEXT);
CREATE TABLE IF NOT EXISTS seen (item INTEGER, map TEXT, bytes BLOB);
"""


class Maps:
    """The maps of one worker."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o777)  # programs of other users make files in it
        self._open: dict[str, mmap.mmap] = {}

    def take(self) -> dict[str, bytes]:
        """What was noted since the last time; the maps are cleared."""
        found = {}
        with os.scandir(self._directory) as entries:
            new = [entry for entry in entries if entry.name not in self._open and entry.stat().st_size]
        for entry in new:
            with open(entry.path, "r+b") as file:
                self._open[entry.name] = mmap.mmap(file.fileno(), 0)
        for name, shared in self._open.items():
            content = shared[:]
            if content.count(0) != len(content):
                shared[:] = bytes(len(content))
                found[name] = content
        return found


class Recorder:
    """Keeps, for each item that this process runs, what its worker's maps hold after it."""

    def __init__(self, directory: Path) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "none")
        self._maps = Maps(directory / worker)
        raw = directory.parent / RAW
        raw.mkdir(exist_ok=True)
        self._kept = sqlite3.connect(raw / f"{os.getpid()}.sqlite", isolation_level=None)
        self._kept.executescript(SCHEMA + "PRAGMA synchronous = OFF;")
        self._outcome = "passed"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """All of an item, with the set-up and tear-down of what it is the first or the last to use."""
        self._maps.take()
        self._outcome = "passed"
        began = time.monotonic()
        done = yield
        found = self._maps.take()
        self._kept.execute("BEGIN")
        row = (item.nodeid, time.monotonic() - began, self._outcome)
        key = self._kept.execute("INSERT INTO item (nodeid, wall_s, outcome) VALUES (?, ?, ?)", row).lastrowid
        rows = [(key, name, zlib.compress(content, 1)) for name, content in found.items()]
        self._kept.executemany("INSERT INTO seen VALUES (?, ?, ?)", rows)
        self._kept.execute("COMMIT")
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """The worst that an item came to."""
        report: Any = yield
        if report.outcome != "passed" and self._outcome != "failed":
            self._outcome = report.outcome
        return report
