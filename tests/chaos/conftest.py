"""The programs under load, compiled once, and the stages on which they run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here takes its time."""
    here = Path(__file__).resolve().parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def load_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled load.c."""
    program = tmp_path_factory.mktemp("chaos") / "load"
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    flags = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-pthread"]
    subprocess.run([compiler, *flags, Path(__file__).with_name("load.c"), "-o", program], check=True)
    return program
