"""Who may import what: the protocol has no sockets, no clock and no threads, and knows nothing above it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import sidestep.sdp

FOLDER = Path(sidestep.sdp.__file__).parent
OUTSIDE = {"asyncio", "selectors", "socket", "threading", "time", "random", "os", "multiprocessing"}
ALLOWED = {"errnos.py": {"os"}}  # strerror
ABOVE = {"switch", "provider", "observe", "api", "cli"}


@cache
def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_protocol_files_touch_nothing_outside(path: Path) -> None:
    modules = imported(path)
    assert {module.split(".")[0] for module in modules} & OUTSIDE <= ALLOWED.get(path.name, set())
    assert not {module.split(".")[1] for module in modules if module.startswith("sidestep.")} & ABOVE


def test_the_protocol_does_not_need_hosts() -> None:
    for path in FOLDER.glob("*.py"):
        assert "sidestep.sdp.host" not in imported(path), path.name
