"""A device carries so many connections: who rests longest makes room for one more, and who is busy stays."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Final

import pytest
from hosts import NETWORK, Host, Make, command
from talking import PORT, TALKERS, ends_well, line, serving, talking

from sidestep import limits
from sidestep.errors import LimitReached
from sidestep.loop import Loop
from sidestep.native.layout import Reason
from sidestep.remote.places import Places
from sidestep.settings import RemoteSettings
from sidestep.testing import Connection

SIZE: Final = 3000


class Resting:
    """A connection, as far as places go."""

    def __init__(self, places: Places, left: list[Resting]) -> None:
        self.moved = 0
        self._left = left
        places.add(self)  # type: ignore[arg-type]

    def leave(self, *, crowded: bool) -> None:
        assert crowded
        self._left.append(self)


class World:
    """A device with so many places."""

    def __init__(self, most: int) -> None:
        self.now = 0.0
        self.loop = Loop(clock=lambda: self.now)
        self.left: list[Resting] = []
        self.carried: list[Resting] = []
        self.places = Places(self.loop, most, lambda: len(self.carried))

    def come(self) -> Resting:
        self.places.need()
        self.carried.append(one := Resting(self.places, self.left))
        return one

    def go(self, one: Resting) -> None:
        self.carried.remove(one)
        self.places.discard(one)  # type: ignore[arg-type]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.loop.run([])


def test_who_has_rested_longest_goes_first() -> None:
    world = World(3)
    first, second, third = (world.come() for _ in range(3))
    for _ in range(10):
        world.pass_time(limits.REMOTE_RESTED_S / 2)
        first.moved += 1
    second.moved += 1
    world.pass_time(limits.REMOTE_RESTED_S)
    with pytest.raises(LimitReached, match="leaving"):
        world.come()
    assert world.left == [third]
    with pytest.raises(LimitReached, match="leaving"):  # one at a time
        world.come()
    assert world.left == [third]
    world.go(third)
    fourth = world.come()
    world.pass_time(limits.REMOTE_RESTED_S)
    first.moved += 1
    with pytest.raises(LimitReached, match="leaving"):
        world.come()
    assert world.left == [third, second]
    world.go(second)
    world.come()
    assert fourth not in world.left
    world.places.close()
    assert world.loop.next_in_s is None


def test_one_that_never_goes_keeps_no_other_from_going() -> None:
    """Its other end does not let go of it."""
    world = World(2)
    first, second = world.come(), world.come()
    world.pass_time(limits.REMOTE_RESTED_S)
    for left in ([first], [first]):
        with pytest.raises(LimitReached, match="leaving"):
            world.come()
        assert world.left == left
        world.pass_time(limits.RELAY_LEAVE_S / 2)
    with pytest.raises(LimitReached, match="leaving"):
        world.come()
    assert world.left == [first, second]
    world.pass_time(limits.RELAY_LEAVE_S)
    with pytest.raises(LimitReached, match="busy"):
        world.come()
    world.places.close()


def test_nobody_who_is_busy_has_to_go() -> None:
    world = World(2)
    busy = [world.come() for _ in range(2)]
    for _ in range(10):
        world.pass_time(limits.REMOTE_RESTED_S / 2)
        for one in busy:
            one.moved += 1
        with pytest.raises(LimitReached, match="all of them busy") as caught:
            world.come()
    assert "--remote-connections" in caught.value.remedy
    assert not world.left
    world.places.close()


# ---- between hosts ----


def remote(most: int, *, engine: bool = True, transports: str = "") -> RemoteSettings:
    return RemoteSettings.parse(NETWORK, engine=engine, transports=transports, connections_max=most)


def resting(host: Host, address: str) -> subprocess.Popen[str]:
    """A client that talks, and rests when it is told."""
    client = host.popen(
        [*TALKERS, "rest", address, str(PORT), str(SIZE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert line(client) == "talks"
    return client


def tell(client: subprocess.Popen[str], answer: str) -> None:
    assert client.stdin is not None
    client.stdin.write("\n")
    client.stdin.flush()
    assert line(client) == answer


def promoted(*hosts: Host) -> None:
    """Waits until all places are taken."""
    for host in hosts:
        host.wait_for(lambda host=host: sum(one.promoted for one in host.sidestep.connections()) == 2)  # type: ignore[misc]


def reasons(host: Host, *wanted: str) -> Callable[[], bool]:
    """Whether these are those of the host's connections that are not promoted."""
    return lambda: sorted(str(one.reason) for one in host.sidestep.connections() if not one.promoted) == sorted(wanted)


def of(host: Host, client: subprocess.Popen[str]) -> Connection:
    (found,) = (one for one in host.sidestep.connections() if one.pid == client.pid)
    return found


WAYS: Final = {
    "engine": remote(2),
    "python": remote(2, engine=False),
    "roce": remote(2, transports="roce"),
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_who_rests_makes_room_and_goes_on_over_tcp(make_hosts: Make, settings: RemoteSettings) -> None:
    one, other = make_hosts(2, remote=settings)
    serving(other)
    rests, talks = resting(one, other.address), talking(one, other.address, size=SIZE)
    promoted(one, other)
    tell(rests, "rests")
    comes = talking(one, other.address, size=SIZE)
    one.wait_for(lambda: of(one, comes).promoted)
    assert of(one, talks).promoted
    tell(rests, "talks on")  # its next call is when it hears of that
    for host in (one, other):
        host.wait_for(reasons(host, Reason.CROWDED.name))
    for client in (rests, talks, comes):
        ends_well(client)
    assert not one.counter("relay_reset") + other.counter("relay_reset")
    assert one.counter("relay_left") == 1


@pytest.mark.slow
def test_where_nobody_rests_one_more_stays_on_tcp(make_hosts: Make) -> None:
    one, other = make_hosts(2, remote=remote(2))
    serving(other)
    busy = [talking(one, other.address, size=SIZE) for _ in range(2)]
    promoted(one, other)
    comes, began = talking(one, other.address, size=SIZE), time.monotonic()
    one.wait_for(lambda: of(one, comes).reason == Reason.NO_RESOURCES.name)
    told = command(one, "explain", f"{other.address}:{PORT}")
    assert "2 connections go over the device, all of them busy" in told
    assert "--remote-connections" in told
    one.wait_for(lambda: time.monotonic() > began + limits.REMOTE_RESTED_S + 1)  # nobody has rested in all that time
    ends_well(comes)
    assert not one.counter("relay_left")
    promoted(one, other)
    for client in busy:
        ends_well(client)
    assert not one.counter("relay_reset") + other.counter("relay_reset")


@pytest.mark.slow
def test_the_accepting_host_makes_room_as_well(make_hosts: Make) -> None:
    """Two hosts have a connection with it each, and one of them wants a second."""
    first, second, other = make_hosts(3, remote=remote(2))
    serving(other)
    rests, talks = resting(first, other.address), talking(second, other.address, size=SIZE)
    promoted(other)
    tell(rests, "rests")
    comes = talking(second, other.address, size=SIZE)
    second.wait_for(lambda: of(second, comes).promoted)
    promoted(other)
    tell(rests, "talks on")
    first.wait_for(reasons(first, Reason.CROWDED.name))
    for client in (rests, talks, comes):
        ends_well(client)
    assert not sum(host.counter("relay_reset") for host in (first, second, other))
