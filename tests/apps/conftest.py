"""Fixtures of the tests with real programs: one `Stage` for each mode, all marked slow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stage import Mode, Stage, staged


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here runs whole programs."""
    here = Path(__file__).resolve().parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.app)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where several workers share the tests, one of them asks a server all that is asked of it: see test_matrix.py."""
    from xdist.scheduler import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.rpartition("-")[0] if "/test_matrix.py::" in nodeid and "-" in nodeid else nodeid

    if config.option.dist != "load":
        return None
    config.option.loadscopereorder = False  # what takes longest comes first in its file
    return ByServer(config, log)


@pytest.fixture(params=list(Mode), ids=str)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """A stage in each of the four modes, with a provider of its own; ends all its programs."""
    with staged(request.param, tmp_path) as made:
        yield made
