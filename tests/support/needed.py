"""What a test needs of this machine: where it is missing, the test fails with the command that installs it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path
from typing import Final, NoReturn

import pytest

SETUP: Final = Path(__file__).parents[1] / "setup"
SEARCH_PATH: Final = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
COMES_BY: Final = {  # set of tests/setup -> what installs it
    "demo": "make setup-test",
    "core": "make setup-test",
    "all": "make setup-ci",
}


def in_setup() -> dict[str, str]:
    """Program or file -> the set of tests/setup that it is in."""
    lines = re.findall(r"^(demo|core|all) (\S+) \S+$", SETUP.read_text(), re.M)
    return {name: which for which, name in lines}


def missing(what: str, name: str = "") -> NoReturn:
    """Fails the test for want of something that tests/setup or pip brings; `name` is what the former calls it."""
    pytest.fail(f"{what} is not installed: {COMES_BY[in_setup().get(name or what, 'all')]}", pytrace=False)


def program(*names: str) -> str:
    """Path of the first of `names` that is installed."""
    for name in names:
        if found := shutil.which(name, path=SEARCH_PATH):
            return found
    return missing(" or ".join(names), names[0])


def programs(*names: str) -> None:
    """All of `names` must be there."""
    for name in names:
        program(name)


def module(name: str) -> None:
    """A Python module must be there; what the package "test" of Python lacks comes by Debian."""
    if importlib.util.find_spec(name) is None:
        core = name == "uvloop" or name.startswith("test.")
        missing(f"the Python module {name}", "redis-server" if core else "")


def postgresql() -> Path:
    """Directory of the newest PostgreSQL's programs, which Debian keeps off the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(re.sub(r"\D", "", path.parts[-2])))
    return found[-1] if found else missing("PostgreSQL", "/usr/lib/postgresql/*/bin/postgres")
