"""Every test here runs in a network namespace of its own, in which it changes real interfaces and routes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from netns import Follower, ip, private_netns


@pytest.fixture
def netns() -> Iterator[None]:
    """The test runs in a private network namespace with `lo` up."""
    if os.geteuid() != 0:
        pytest.skip("making a network namespace needs root")
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed; run tests/setup")
    with ExitStack() as stack:
        try:
            stack.enter_context(private_netns())
        except PermissionError as error:
            pytest.skip(f"this root may not make a network namespace: {error}")
        ip("link set lo up")
        yield


@pytest.fixture
def follow(netns: None) -> Iterator[Callable[..., Follower]]:
    """Makes followers, and closes them."""
    made: list[Follower] = []

    def make(**options: int) -> Follower:
        made.append(Follower(**options))
        return made[-1]

    yield make
    for follower in made:
        follower.network.close()
