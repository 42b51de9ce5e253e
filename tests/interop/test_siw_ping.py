"""`rping` of the guest and our pings understand each other, in both roles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from guest_verbs import WAIT_S, Bench
from lab_guest import Lab

from sidestep.rdma.iwarp.settings import Settings
from sidestep.rdma.iwarp.start_terms import Settings as Startup
from sidestep.rdma.ping import PingClient, PingServer, text_of

_PORT = 7174
_ROUNDS = 10
_SIZES = [23, 64, 4096, 65_535]  # what rping takes at most

pytestmark = pytest.mark.parametrize(
    "settings",
    [Settings(startup=Startup(peer_to_peer=both, crc=crc)) for both in (False, True) for crc in (False, True)],
    ids=["plain", "crc", "peers-plain", "peers-crc"],
)


@pytest.fixture
def rping(lab: Lab) -> Iterator[None]:
    """A server that stays."""
    lab.serve("rping", f"rping -s -P -a {lab.siw_address} -p {_PORT} -S {max(_SIZES)} -v", _PORT)
    yield
    lab.end("rping")


@pytest.mark.usefixtures("rping")
def test_we_ping(bench: Bench, lab: Lab) -> None:
    loop = bench.device.loop
    for size in _SIZES:
        rounds: list[int] = []
        client = PingClient(
            bench.device, lab.siw_address, _PORT, rounds=_ROUNDS, size=size, on_round=rounds.append
        )  # fmt: skip
        assert loop.run_until(lambda: client.ended, WAIT_S), client.error  # noqa: B023 - called in this round
        assert (client.error, rounds) == ("", list(range(_ROUNDS)))
        client.close()


def test_rping_pings(bench: Bench, lab: Lab) -> None:
    texts: list[bytes] = []
    server = PingServer(bench.device, 0, on_text=texts.append)
    for size in _SIZES:
        texts.clear()
        options = f"-a {lab.host_address} -p {server.service_id} -S {size} -C {_ROUNDS} -V"
        log = f"rping-{size}"
        client = lab.background(log, f"rping -c {options}; echo result $?")
        done = server.rounds_done + _ROUNDS
        assert bench.device.loop.run_until(lambda: server.rounds_done >= done and not server.clients, WAIT_S)  # noqa: B023
        assert "result 0" in client.wait_for("^result")
        assert [text[:11] for text in texts] == [text_of(number, size)[:11] for number in range(_ROUNDS)]
        assert {len(text) for text in texts} == {size}
    server.close()
    assert server.errors == []
