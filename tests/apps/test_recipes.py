"""Each recipe of docs/guides/recipes.md does what it says, and all its programs send by ring; Ray's: tests/fresh."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from recipes import follow, read_recipe, titles
from stage import Mode, staged

from sidestep.testing import Sidestep


@pytest.mark.parametrize("title", [title for title in titles() if title != "Ray"])
def test_recipe(title: str, tmp_path: Path, sidestep: Sidestep) -> None:
    with staged(Mode.NATIVE, tmp_path) as stage:
        follow(read_recipe(title), stage, sidestep, Path(sys.executable).parent)
