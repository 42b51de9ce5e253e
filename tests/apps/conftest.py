"""Fixtures of the tests with real programs: one `Stage` for each mode, all marked slow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from busy import busy
from matrix import LOAD
from selection import rotate
from stage import Mode, Stage, staged


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here runs whole programs."""
    here = Path(__file__).resolve().parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.app)


@pytest.fixture(scope="module")
def load() -> Iterator[None]:
    """The machine has other things to do; the workers of a run share it."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with busy(max(0, LOAD - workers + 1) // workers):  # what else runs is a load, too
        yield


@pytest.fixture(params=rotate(list(Mode), test=2), ids=str)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """a stage in each of the modes of this row, with a provider of its own; ends all its programs."""
    with staged(request.param, tmp_path) as made:
        yield made
