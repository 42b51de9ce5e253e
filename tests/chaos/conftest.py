"""The programs under load, compiled once, and the stages on which they run."""

from __future__ import annotations

from pathlib import Path

import pytest
import toolchain


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here takes its time."""
    here = Path(__file__).resolve().parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def load_program() -> Path:
    """The compiled load.c."""
    return toolchain.build("load", [Path(__file__).with_name("load.c")], ["-O2", "-D_GNU_SOURCE"])
