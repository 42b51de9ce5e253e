"""The loader, and whether this machine can have it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from common import ECHO
from foreign_programs import loader_missing

from sidestep import installation
from sidestep.testing import Sidestep, free_port


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On another machine there is nothing to test."""
    missing = loader_missing()
    for item in items:
        if missing and Path(__file__).parent in item.path.parents:
            # the CPU, or the kernel, lacks what the loader is made of: programs run as without it there
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def loader() -> Path:
    found = installation.loader()
    assert found is not None, "run 'make build'"
    return found


@pytest.fixture(scope="module")
def provider() -> Iterator[Sidestep]:
    with Sidestep(promote_after="0") as one:
        yield one


@pytest.fixture
def echo(provider: Sidestep) -> int:
    """The port of a server that a promoted connection leads to."""
    port = free_port()
    server = provider.popen([sys.executable, "-c", ECHO, str(port)], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return port
