"""Our software RNIC and the kernel's siw move bytes, in both roles, and all of them arrive as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from guest_verbs import Bench, End, pattern
from lab_guest import Lab

from sidestep.rdma.iwarp.settings import IwarpSettings
from sidestep.rdma.iwarp.startup.terms import MpaSettings
from sidestep.rdma.verbs import QpCapabilities
from sidestep.rdma.work import RdmaRead, RdmaWrite, Status

MIB = 1 << 20
SIZES = [1, 1437, MIB]
ASKS = ["ours", "siw"]
COUNT = 64  # messages at a time
_PORTS = 7400
PARAMETERS = "/sys/module/siw/parameters"


@pytest.mark.spec("RFC 5040 5.3")
@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("size", SIZES)
def test_sends(bench: Bench, asks: str, size: int) -> None:
    ours, guest = bench.pair(asks)
    theirs = bench.remote(guest, size)
    guest.call("receive", region=theirs.region, length=size)
    room = ours.room(size)
    ours.send(pattern(1, size))
    assert ours.sent(1) == [Status.SUCCESS]
    assert guest.call("received")["completions"] == [["SUCCESS", size]]
    assert guest.call("holds", region=theirs.region, seed=1, length=size)["holds"]
    guest.call("send", region=bench.remote(guest, size, seed=2).region, length=size)
    (completion,) = ours.received(1)
    assert (completion.status, completion.byte_len) == (Status.SUCCESS, size)
    assert room.view == pattern(2, size)
    assert guest.call("sent")["completions"][0][0] == "SUCCESS"


@pytest.mark.spec("RFC 5040 5.1")
@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("size", SIZES)
def test_writes_and_reads(bench: Bench, asks: str, size: int) -> None:
    ours, guest = bench.pair(asks)
    source, sink = ours.memory(pattern(3, size)), ours.memory(size)
    theirs, empty = bench.remote(guest, size, seed=4), bench.remote(guest, size)
    # by us
    ours.qp.post_send(RdmaRead(0, (sink.view,), theirs.address, theirs.key))
    ours.qp.post_send(RdmaWrite(1, (source.view,), empty.address, empty.key))
    # a Read behind the Write returns when the Write has been placed (RFC 5040 5.5)
    back = ours.memory(size)
    ours.qp.post_send(RdmaRead(2, (back.view,), empty.address, empty.key))
    assert ours.sent(3) == [Status.SUCCESS] * 3
    assert sink.view == pattern(4, size)
    assert back.view == pattern(3, size)
    assert guest.call("holds", region=empty.region, seed=3, length=size)["holds"]
    # by siw
    target, again = ours.memory(size), bench.remote(guest, size)
    guest.call("write", region=theirs.region, length=size, address=target.va, key=target.rkey)
    guest.call("read", region=again.region, length=size, address=source.va, key=source.rkey)
    assert [status for status, _ in guest.call("sent", count=2)["completions"]] == ["SUCCESS"] * 2
    assert guest.call("holds", region=again.region, seed=3, length=size)["holds"]
    assert target.view == pattern(4, size)


@pytest.mark.spec("RFC 5041 5.2")
@pytest.mark.parametrize("asks", ASKS)
def test_messages_without_bytes(bench: Bench, asks: str) -> None:
    """What pyverbs of the guest cannot send; that siw does is in `test_siw_says_that_it_is_ready`."""
    ours, guest = bench.pair(asks)
    theirs = bench.remote(guest, 64, seed=5)
    guest.call("receive", region=theirs.region, length=64, count=2)
    ours.qp.post_send(RdmaWrite(0, (), 1, theirs.key))
    ours.send(b"")
    ours.qp.post_send(RdmaRead(1, (ours.memory(1).view[:0],), theirs.address, theirs.key))
    ours.send(b"x")
    assert ours.sent(4) == [Status.SUCCESS] * 4
    assert guest.call("received", count=2)["completions"] == [["SUCCESS", 0], ["SUCCESS", 1]]


@pytest.mark.parametrize("asks", ASKS)
def test_many_at_a_time(bench: Bench, asks: str) -> None:
    """Sends, Writes and Reads of both ends at once, more Reads than either end holds at a time."""
    size = 10_000
    ours, guest = bench.pair(asks, QpCapabilities(initiator_depth=4, responder_resources=4))
    rooms = [ours.room(size, number) for number in range(COUNT)]
    theirs, inbox = bench.remote(guest, size, seed=6), bench.remote(guest, size)
    fetched, target = bench.remote(guest, size), bench.remote(guest, size)
    source, sinks = ours.memory(pattern(7, size)), [ours.memory(size) for _ in range(COUNT)]
    written = ours.memory(size)
    guest.call("receive", region=inbox.region, length=size, count=COUNT)
    for verb in ("send", "write", "read"):
        more = {} if verb == "send" else {"address": written.va, "key": written.rkey}
        if verb == "read":
            more = {"address": source.va, "key": source.rkey}
        region = fetched.region if verb == "read" else theirs.region
        guest.ask(verb, region=region, length=size, count=COUNT, **more)
    for number in range(COUNT // 2):
        ours.qp.post_send(RdmaRead(0, (sinks[number].view,), theirs.address, theirs.key))
        ours.send(pattern(7, size))
        ours.qp.post_send(RdmaWrite(0, (source.view,), target.address, target.key))
    assert ours.sent(3 * COUNT // 2) == [Status.SUCCESS] * (3 * COUNT // 2)
    for number in range(COUNT // 2, COUNT):
        ours.qp.post_send(RdmaRead(0, (sinks[number].view,), theirs.address, theirs.key))
        ours.send(pattern(7, size))
    assert ours.sent(COUNT) == [Status.SUCCESS] * COUNT
    completions = ours.received(COUNT)
    assert [(each.wr_id, each.status, each.byte_len) for each in completions] == [
        (number, Status.SUCCESS, size) for number in range(COUNT)
    ]
    for _ in range(3):
        guest.answer()
    assert {status for status, _ in guest.call("sent", count=3 * COUNT)["completions"]} == {"SUCCESS"}
    assert guest.call("received", count=COUNT)["completions"] == [["SUCCESS", size]] * COUNT
    for filled in (inbox, fetched, target):
        assert guest.call("holds", region=filled.region, seed=7, length=size)["holds"]
    for memory in (written, *rooms, *sinks):
        assert memory.view == pattern(6, size)


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
