"""A thousand connections between two hosts; and what comes beyond a limit stays on TCP, unharmed."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from hosts import Host, Make
from talking import PORT, line

from sidestep import limits

pytestmark = pytest.mark.slow

MANY: Final = 1000
AT_ONCE: Final = 50  # as a provider may make links in the time that an offer stands, on a slow machine too
CROWD: Final = [sys.executable, str(Path(__file__).with_name("crowd.py"))]
OFFERED_S: Final = 100.0  # an offer stands: on a busy machine a link takes longer than it does by default
_OFFERED: Final = ("offered", "attached")


class ClientQuota:
    """A program with many connections to another, which echoes."""

    def __init__(self, one: Host, other: Host) -> None:
        self.hosts = (one, other)
        self.server = other.popen([*CROWD, "serve", other.address, str(PORT)], stdout=subprocess.PIPE, text=True)
        assert line(self.server) == "listens"
        self._client = one.popen([*CROWD, "open", other.address, str(PORT)],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)  # fmt: skip
        self.count = 0

    def talk(self, *, more: int = 0, first: int = 0) -> None:
        """Each connection from the first on, and so many new ones, carries its bytes there and back."""
        assert self._client.stdin is not None
        self.count += more
        self._client.stdin.write(f"{more} {first}\n")
        assert line(self._client) == f"right: {self.count - first}"

    def look(self) -> tuple[list[int], int]:
        """Ends that are promoted, at each host; and all that are on their way from TCP."""
        ends = [host.sidestep.connections() for host in self.hosts]
        offered = [found for each in ends for found in each if found.state in _OFFERED or found.reason == "YOUNG"]
        return [sum(found.promoted for found in each) for each in ends], len(offered)

    def end(self) -> None:
        """Every stream ends as it should."""
        assert self._client.stdin is not None
        self._client.stdin.close()
        assert line(self._client) == f"ended: {self.count}"
        for host in self.hosts:
            host.sidestep.wait_for(lambda found: not found)
            assert not host.counter("relay_reset")


def resident_kib(host: Host) -> int:
    """Memory of its provider that is its own."""
    status = Path(f"/proc/{host.sidestep.provider_pid}/status").read_text(encoding="ascii")
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    assert found
    return int(found[1])


@pytest.mark.timeout(900)  # half a minute on an idle machine
def test_a_thousand_are_promoted(make_hosts: Make) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < (needed := 2 * MANY * limits.RELAY_DESCRIPTORS + limits.DESCRIPTORS_SPARE):
        pytest.skip(f"a provider for {MANY} needs {needed} descriptors, and {hard} are allowed")
    two = make_hosts(2, offer_expiry_s=OFFERED_S)
    before = [resident_kib(host) for host in two]
    quota = ClientQuota(*two)
    promoted = [0]
    while min(promoted) < MANY:
        assert quota.count < 2 * MANY, f"of {quota.count} only {promoted} are promoted"
        first, wanted = quota.count, min(promoted) + AT_ONCE
        quota.talk(more=AT_ONCE, first=first)
        while True:
            promoted, offered = quota.look()
            if min(promoted) >= wanted or not offered:
                break
            quota.talk(first=first)
    for _ in range(2):
        quota.talk()
    assert min(quota.look()[0]) >= MANY
    buffers_kib = limits.REMOTE_RECEIVES * limits.REMOTE_RECEIVE_SIZE >> 10
    grown_kib = [(resident_kib(host) - old) / MANY for host, old in zip(two, before, strict=True)]
    print(f"a connection costs each provider {grown_kib} KiB; its private buffers have {buffers_kib}")
    assert max(grown_kib) < buffers_kib + 128
    quota.end()


def test_many_at_once_are_promoted_or_stay_on_tcp(two: tuple[Host, Host]) -> None:
    """Who waits for longer than an offer stands keeps to TCP."""
    quota = ClientQuota(*two)
    quota.talk(more=300)
    while not min(quota.look()[0]):
        quota.talk()
    quota.talk()
    quota.end()


def test_what_a_provider_has_no_memory_for_stays_on_tcp(make_hosts: Make) -> None:
    room, ring_size = 20, 65536
    budget = room * (limits.CHANNEL_HEADER_SIZE + 2 * ring_size)  # of which a user gets a share
    quota = ClientQuota(*make_hosts(2, ring_size=ring_size, budget_bytes=budget))
    quota.talk(more=2 * room)
    while not (min(quota.look()[0]) and quota.hosts[0].counter("offer_refused{NO_BUDGET}")):
        quota.talk()
    quota.talk(more=2 * room)
    promoted, _ = quota.look()
    assert 0 < min(promoted) <= max(promoted) <= room
    quota.end()
