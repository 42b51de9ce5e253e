"""Plugin of pytest: writes what each item comes to into the file MUTANT_EVENTS, at once: a run may be killed."""

from __future__ import annotations

import json
import os

import pytest

NAME = "MUTANT_EVENTS"
_is_worker = False


def pytest_configure(config: pytest.Config) -> None:
    global _is_worker
    _is_worker = hasattr(config, "workerinput")


def _write(nodeid: str, outcome: str, text: str = "") -> None:
    if not _is_worker:
        with open(os.environ[NAME], "a", encoding="utf-8") as file:
            file.write(json.dumps([nodeid, outcome, text[-600:]]) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(nodeid, "started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _write(report.nodeid, "failed", report.longreprtext)
    elif report.when == "teardown":
        _write(report.nodeid, "ended")
