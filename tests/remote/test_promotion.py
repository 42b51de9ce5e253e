"""Connections between two hosts under unmodified programs: promoted in flight, and every byte accounted for."""

from __future__ import annotations

import pytest
from hosts import Host, Make
from talking import ends_well, promoted, serving, talking

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_a_live_connection_is_promoted(two: tuple[Host, Host], family: str) -> None:
    one, other = two
    address = other.address if family == "IPv4" else other.address6
    serving(other, address)
    client = talking(one, address)
    promoted(one, other)
    ends_well(client)
    assert (one.joined("connect"), other.joined("accept")) == (1, 1)
    assert not one.counter("relay_reset") + other.counter("relay_reset")


def test_many_sizes(two: tuple[Host, Host]) -> None:
    one, other = two
    serving(other)
    for size in (1, 100, 70_000, 1_000_000):
        client = talking(one, other.address, size=size)
        promoted(one, other)
        ends_well(client)
    assert one.joined("connect") == 4


def test_hosts_that_are_not_trusted_stay_on_tcp(make_hosts: Make) -> None:
    one, other = make_hosts(2, remote=None)
    serving(other)
    client = talking(one, other.address, seconds=1)
    ends_well(client)
    assert not one.counter("relay_opened") + other.counter("relay_opened")
    assert [each.promoted for each in one.sidestep.connections()] == []
