"""Every test here has hosts of its own: network namespaces joined by a bridge."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hosts import Host, Make, hosts

from namespaces import thread_in_netns


@pytest.fixture
def make_hosts() -> Iterator[Make]:
    """Makes hosts; they go with the test."""
    if os.geteuid() != 0:
        pytest.skip("making a network namespace needs root")
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed; run tests/setup")
    try:
        with thread_in_netns(None):
            pass
    except PermissionError as error:
        pytest.skip(f"this root may not make a network namespace: {error}")
    with ExitStack() as stack:

        def make(count: int, **options: Any) -> list[Host]:
            return stack.enter_context(hosts(count, **options))

        yield make


@pytest.fixture
def two(make_hosts: Make) -> tuple[Host, Host]:
    """Two hosts that promote at once."""
    one, other = make_hosts(2)
    return one, other
