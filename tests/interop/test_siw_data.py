"""Our software RNIC and the kernel's siw move bytes, in both roles, and all of them arrive as they were."""

from __future__ import annotations

from collections.abc import Iterator

import moves
import pytest
from guest_verbs import Bench, End
from lab_guest import Lab

from sidestep.rdma.iwarp.device import IwarpSettings
from sidestep.rdma.iwarp.startup.terms import MpaSettings

MIB = 1 << 20
SIZES = [1, 1437, MIB]
ASKS = ["ours", "siw"]
_PORTS = 7400
PARAMETERS = "/sys/module/siw/parameters"


@pytest.mark.spec("RFC 5040 5.3")
@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("size", SIZES)
def test_sends(bench: Bench, asks: str, size: int) -> None:
    moves.sends(bench, asks, size)


@pytest.mark.spec("RFC 5040 5.1")
@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("size", SIZES)
def test_writes_and_reads(bench: Bench, asks: str, size: int) -> None:
    moves.writes_and_reads(bench, asks, size)


@pytest.mark.spec("RFC 5041 5.2")
@pytest.mark.parametrize("asks", ASKS)
def test_messages_without_bytes(bench: Bench, asks: str) -> None:
    """What pyverbs of the guest cannot send; that siw does is in `test_siw_says_that_it_is_ready`."""
    moves.messages_without_bytes(bench, asks)


@pytest.mark.parametrize("asks", ASKS)
def test_many_at_a_time(bench: Bench, asks: str) -> None:
    moves.many_at_a_time(bench, asks, writes=(True, False))


@pytest.fixture
def siw_settings(lab: Lab, request: pytest.FixtureRequest) -> Iterator[None]:
    """Parameters of siw's, of the test's choice; afterwards as they were."""
    chosen: dict[str, bool] = request.param
    lab.run("; ".join(f"echo {'NY'[value]} > {PARAMETERS}/{name}" for name, value in chosen.items()))
    yield
    lab.run("; ".join(f"echo N > {PARAMETERS}/{name}" for name in chosen))


def _startup(**changes: bool) -> IwarpSettings:
    return IwarpSettings(startup=MpaSettings(**{"peer_to_peer": True, **changes}))  # type: ignore[arg-type]


@pytest.mark.spec("RFC 5044 7.1.1")
@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize(
    ("settings", "siw_settings"),
    [
        pytest.param(_startup(crc=False), {}, id="nobody wants checksums"),
        pytest.param(_startup(crc=False), {"mpa_crc_required": True}, id="siw wants checksums"),
        pytest.param(_startup(peer_to_peer=False), {}, id="client-server"),
        pytest.param(_startup(peer_to_peer=True), {"peer_to_peer": True}, id="peer-to-peer"),
        pytest.param(_startup(peer_to_peer=False, crc=False), {"try_gso": True}, id="long frames"),
    ],
    indirect=["siw_settings"],
)
@pytest.mark.usefixtures("siw_settings")
def test_start_ups(bench: Bench, asks: str) -> None:
    test_writes_and_reads(bench, asks, 100_000)


@pytest.mark.spec("RFC 5044 7.1.2")
@pytest.mark.parametrize(
    "settings",
    [_startup(peer_to_peer=False), _startup(peer_to_peer=True)],
    ids=["client-server", "peer-to-peer"],
)
def test_a_first_message_that_comes_too_early(bench: Bench, lab: Lab) -> None:
    """Without the lab's change siw does not look what has come while it sent its Reply."""
    lab.run(f"echo N > {PARAMETERS}/lab_early_rx")
    try:
        for port in range(_PORTS, _PORTS + 12):
            ours, guest = End.of(bench.device), bench.guest()
            guest.call("listen", port=port)
            ours.connect(lab, port)
            guest.expect("CONNECT_REQUEST")
            guest.call("create_qp")
            theirs = bench.remote(guest, 64)
            guest.call("receive", region=theirs.region, length=64)
            guest.ask("accept")
            ours.established()
            ours.send(b"early")
            guest.answer()
            assert guest.call("received")["completions"] == [["SUCCESS", 5]]
    finally:
        lab.run(f"echo Y > {PARAMETERS}/lab_early_rx")
