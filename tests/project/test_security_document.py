"""docs/internals/security.md: every claim names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/internals/security.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)


def test_every_test_that_is_named_exists() -> None:
    missing = [
        f"{path}::{name}"
        for path, name in NAMED
        if not (ROOT / path).is_file() or not re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
    ]
    assert len(NAMED) > 40
    assert missing == []


def test_every_claim_names_a_test() -> None:
    tables = re.findall(r"^\| claim \| test \|\n\|[- |]+\|\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 30
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::\w+`", row)] == []


def test_every_test_of_hostile_clients_is_claimed() -> None:
    """A test that tries to break something belongs to a claim."""
    hostile = ("system/test_hostile.py", "remote/test_violations.py", "remote/test_link_violations.py")
    text = "".join((ROOT / "tests" / path).read_text() for path in hostile)
    names = set(re.findall(r"^def (test_\w+)\(", text, re.MULTILINE))
    assert names - {name for _, name in NAMED} == set()
