"""The loader, and whether this machine can have it."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_programs import loader_missing

from sidestep import installation


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On another machine there is nothing to test."""
    missing = loader_missing()
    for item in items:
        if missing and Path(__file__).parent in item.path.parents:
            # the CPU, or the kernel, lacks what the loader is made of: programs run as without it there
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def loader() -> Path:
    found = installation.loader()
    assert found is not None, "run 'make build'"
    return found
