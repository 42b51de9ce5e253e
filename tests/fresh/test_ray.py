"""Ray's recipe of docs/guides/recipes.md, in a .venv of its own: Ray is too large for that of all tests."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "apps"))
from recipes import follow, read_recipe  # type: ignore[import-not-found]
from stage import Mode, staged  # type: ignore[import-not-found]

from sidestep.testing import Sidestep


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of a short name, as Ray makes sockets in it; it is large, and gone at once."""
    with tempfile.TemporaryDirectory(prefix="ray-") as name:
        yield Path(name)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_recipe_of_ray(place: Path, tmp_path: Path, sidestep: Sidestep, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = place / "venv/bin"
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
    subprocess.run([programs / "pip", "--quiet", "install", "ray"], check=True)
    (programs / "sidestep").symlink_to(Path(sys.executable).with_name("sidestep"))
    monkeypatch.setenv("RAY_TMPDIR", str(place))
    with staged(Mode.NATIVE, tmp_path) as stage:
        follow(read_recipe("Ray"), stage, sidestep, programs)
