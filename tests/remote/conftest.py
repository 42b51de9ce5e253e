"""Every test here has hosts of its own: network namespaces joined by a bridge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hosts import Host, Make, hosts, need_namespaces


@pytest.fixture
def make_hosts() -> Iterator[Make]:
    """Makes hosts; they go with the test."""
    need_namespaces()
    with ExitStack() as stack:

        def make(count: int, **options: Any) -> list[Host]:
            return stack.enter_context(hosts(count, **options))

        yield make


@pytest.fixture
def two(make_hosts: Make) -> tuple[Host, Host]:
    """Two hosts that promote at once."""
    one, other = make_hosts(2)
    return one, other
