"""Between two hosts to TCP by an order, and to the ring again, and all that again, while megabytes flow both ways."""

from __future__ import annotations

import signal
import subprocess
from typing import Any, Final

import pytest
from common import PATIENCE_S
from hosts import NETWORK, NETWORK6, Host, Make
from talking import PORT, TALKERS, ends_well, promoted, serving

from sidestep.observe.demotion import Result
from sidestep.settings import RemoteSettings
from sidestep.testing import Connection

pytestmark = pytest.mark.slow

ROUNDS = 6
ORDER_S = PATIENCE_S
WAYS: Final[dict[str, dict[str, Any]]] = {
    "engine": {},
    "worker": {"workers": 1},
    "small rings": {"ring_size": 4096},
    "without an engine": {"remote": RemoteSettings.parse(f"{NETWORK},{NETWORK6}", engine=False)},
}


def flowing(host: Host, address: str) -> subprocess.Popen[str]:
    """A client that sends and compares all the time."""
    client = host.popen(
        [*TALKERS, "flow", address, str(PORT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "talks\n"
    return client


def stops(client: subprocess.Popen[str]) -> None:
    assert client.stdin is not None
    client.stdin.write("\n")
    client.stdin.flush()


def gone_further(host: Host) -> None:
    """Waits until its end has moved some bytes since now."""

    def moved() -> int:
        return sum(way.ring_bytes + way.tcp_bytes for each in host.sidestep.connections() for way in (each.tx, each.rx))

    before = moved()
    host.wait_for(lambda: moved() > before + 100_000)


def only(host: Host) -> Connection:
    (found,) = host.sidestep.connections()
    return found


def to_tcp(host: Host) -> None:
    """One end of the connection is ordered to go back, and goes."""
    (demoted,) = host.sidestep.demote(timeout_s=ORDER_S)
    assert demoted.result is Result.TCP
    gone_further(host)


def arrived(one: Host, other: Host) -> None:
    """Waits until each end has what the other sent by ring: after a cut, an end on TCP cannot send that again."""

    def has_all(here: Host, there: Host) -> bool:
        return bool((only(here).link or {})["arrived"] == only(there).tx.ring_bytes)

    one.wait_for(lambda: has_all(one, other) and has_all(other, one))


def and_back(host: Host, timeout_s: float = ORDER_S) -> None:
    """The order is taken back."""
    host.sidestep.promote(timeout_s=timeout_s)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_rounds_in_a_row(make_hosts: Make, options: dict[str, Any]) -> None:
    one, other = make_hosts(2, **options)
    serving(other)
    client = flowing(one, other.address)
    promoted(one, other)
    for turn in range(ROUNDS):
        host = (one, other)[turn % 2]
        to_tcp(host)
        and_back(host)
        promoted(one, other)
        gone_further(host)
    assert [only(host).promotions for host in (one, other)] == [ROUNDS + 1] * 2
    stops(client)
    ends_well(client, 1_000_000)
    assert not one.counter("relay_reset") + other.counter("relay_reset")
    assert (one.joined("connect"), other.joined("accept")) == (1, 1)  # all of that over one link


@pytest.mark.parametrize("amid", [False, True], ids=["in it", "as it begins"])
@pytest.mark.parametrize("how", ["its link is cut", "a provider leaves"])
def test_a_later_round_that_ends_otherwise(two: tuple[Host, Host], how: str, *, amid: bool) -> None:
    one, other = two
    serving(other)
    client = flowing(one, other.address)
    promoted(one, other)
    to_tcp(one)
    and_back(one)
    promoted(one, other)
    to_tcp(other)
    arrived(one, other)
    and_back(other, 0 if amid else ORDER_S)
    if how == "its link is cut":
        one.cut_rdma(spared_port=PORT)
    else:
        one.sidestep.kill_provider(signal.SIGTERM)
    other.wait_for(lambda: not only(other).promoted)
    gone_further(other)
    stops(client)
    ends_well(client, 1_000_000)
    assert not other.counter("relay_reset")
