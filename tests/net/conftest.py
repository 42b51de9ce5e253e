"""Every test here runs in a network namespace of its own, in which it changes real interfaces and routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hosts import need_namespaces
from netns import Follower, ip, private_netns


@pytest.fixture
def netns() -> Iterator[None]:
    """The test runs in a private network namespace with `lo` up."""
    need_namespaces()
    with private_netns():
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
