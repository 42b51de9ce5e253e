"""Who may import what: the protocol has no sockets, no clock and no threads, and knows nothing above it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import sidestep.sdp

FOLDER = Path(sidestep.sdp.__file__).parent
OUTSIDE = {"asyncio", "selectors", "socket", "threading", "time", "random", "os", "multiprocessing"}
ALLOWED = {
    "aio.py": {"asyncio"},
    "blocking.py": {"socket"},
    "driver.py": {"threading", "time"},
    "errnos.py": {"os"},  # strerror
}
ABOVE = {"switch", "provider", "observe", "cli"}


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


def test_the_protocol_does_not_need_its_faces() -> None:
    faces = {f"sidestep.sdp.{name.removesuffix('.py')}" for name in ("aio.py", "blocking.py", "driver.py", "host.py")}
    for path in FOLDER.glob("*.py"):
        if f"sidestep.sdp.{path.stem}" not in faces:
            assert not imported(path) & faces, path.name
