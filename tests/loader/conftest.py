"""The loader, and whether this machine can have it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from sidestep import installation

HWCAP2_FSGSBASE: Final = 2  # asm/hwcap2.h
AT_HWCAP2: Final = 26


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On another machine there is nothing to test."""
    missing = _missing()
    for item in items:
        if missing and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=missing))


def _missing() -> str | None:
    if os.uname().machine != "x86_64":
        return "the loader is for x86-64"
    auxiliary = memoryview(Path("/proc/self/auxv").read_bytes()).cast("N")
    found = dict(zip(auxiliary[::2], auxiliary[1::2], strict=True))
    return None if found.get(AT_HWCAP2, 0) & HWCAP2_FSGSBASE else "this machine lacks FSGSBASE"


@pytest.fixture(scope="session")
def loader() -> Path:
    found = installation.loader()
    assert found is not None, "run 'make build'"
    return found
