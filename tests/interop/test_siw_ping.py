"""`rping` of the guest and our pings understand each other, in both roles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from guest_verbs import Bench
from lab_guest import Lab
from rping_client import RpingClient

from sidestep.rdma.iwarp.device import IwarpSettings
from sidestep.rdma.iwarp.startup.terms import MpaSettings
from sidestep.rdma.tools.server import ToolServer

_PORT = 7174
_ROUNDS = 10
_SIZES = [23, 64, 4096, 65_535]  # what rping takes at most

pytestmark = pytest.mark.parametrize(
    "settings",
    [IwarpSettings(startup=MpaSettings(peer_to_peer=both, crc=crc)) for both in (False, True) for crc in (False, True)],
    ids=["plain", "crc", "peers-plain", "peers-crc"],
)


@pytest.fixture
def rping(lab: Lab) -> Iterator[None]:
    """A server that stays."""
    server = lab.serve("rping", f"exec rping -s -P -a {lab.siw_address} -p {_PORT} -S {max(_SIZES)} -v", _PORT)
    yield
    server.kill()


@pytest.mark.usefixtures("rping")
def test_we_ping(bench: Bench, lab: Lab) -> None:
    for size in _SIZES:
        failures: list[str] = []
        client = RpingClient(bench.device, size, _ROUNDS, failures.append)
        client.connect(lab.siw_address, _PORT)
        bench.until(lambda: client.ended, "ended")  # noqa: B023 - called in this round
        assert (failures, client.messages) == ([], _ROUNDS)
        client.close()


def test_rping_pings(bench: Bench, lab: Lab) -> None:
    """It compares what comes back itself."""
    log: list[str] = []
    server = ToolServer(bench.device, bench.device.loop, 0, log.append)
    for size in _SIZES:
        log.clear()
        options = f"-a {lab.host_address} -p {server.port} -S {size} -C {_ROUNDS} -V"
        client = lab.background(f"rping-{size}", f"rping -c {options}; echo result $?")
        bench.until(lambda: "ended" in "".join(log), "ended")
        assert log == [f"{lab.siw_address}: rping", f"{lab.siw_address}: rping has ended, {_ROUNDS} messages"]
        assert "result 0" in client.wait_for("^result")
    server.close()
