"""The interpreter, compiled once, and the worlds in which programs are played."""

from __future__ import annotations

from pathlib import Path

import pytest
import toolchain


@pytest.fixture(scope="session")
def interpreter() -> Path:
    """The compiled interpreter.c."""
    return toolchain.build("interpreter", [Path(__file__).with_name("interpreter.c")], ["-O2", "-D_GNU_SOURCE"])
