"""The page about the software HCA names what the code counts."""

from __future__ import annotations

import re
from pathlib import Path

from sidestep.rdma.roce.counting import EVENTS

PAGE = (Path(__file__).parents[3] / "docs" / "internals" / "roce.md").read_text()


def test_counters() -> None:
    section = PAGE.split("## What a device counts", 1)[1]
    assert dict(re.findall(r"(?m)^\| `(\w+)` \| (.*) \|$", section)) == EVENTS


def test_files() -> None:
    folder = Path(__file__).parents[3] / "src" / "sidestep" / "rdma" / "roce"
    named = set(re.findall(r"`(\w+\.py)`", PAGE.split("## How it is built", 1)[1].split("`soft/", 1)[0]))
    left_out = {
        "__init__.py",
        "connection.py",
        "counting.py",
        "numbers.py",
        "path.py",
        "pieces.py",
        "schedule.py",
        "settings.py",
    }
    assert named == {path.name for path in folder.glob("*.py")} - left_out
