"""The interpreter, compiled once, and the worlds in which programs are played."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled interpreter.c."""
    program = tmp_path_factory.mktemp("differential") / "interpreter"
    source = Path(__file__).with_name("interpreter.c")
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    flags = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]
    subprocess.run([compiler, *flags, source, "-o", program], check=True)
    return program
