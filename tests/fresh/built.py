"""The wheels of `make wheels`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]


def wheel(machine: str) -> Path:
    found = sorted((ROOT / "dist").glob(f"sidestep-*manylinux*{machine}.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        pytest.skip("there are no wheels; make test-fresh builds them")
    return found[-1]


def with_all_it_needs(machine: str, place: Path) -> None:
    """Puts the wheel, and those of what it depends on, into a directory."""
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--only-binary=:all:", "--dest", str(place)]
    subprocess.run([*pip, str(wheel(machine))], check=True)
