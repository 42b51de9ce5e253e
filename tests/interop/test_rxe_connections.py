"""How connections between our software HCA and the kernel's rxe come about and end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from guest_verbs import End, RxeBench
from lab_guest import Lab

from sidestep.rdma.cm import REJECT_CONSUMER, REJECT_INVALID_SERVICE_ID, Disconnected, Rejected
from sidestep.rdma.roce.ip_cm import TCP_SERVICE
from sidestep.rdma.work import Status

_PORT = 7600
_ASKS = ["ours", "rxe"]
_REQUEST_MAX, _REPLY_MAX, _REJECT_MAX = 56, 196, 148  # bytes; of a request 36 are rdma_cm's
_POSTED = 3  # receives that nobody uses


@pytest.mark.spec("IBTA 12.6.5, 12.6.7, A11")
@pytest.mark.parametrize("size", [1, _REQUEST_MAX])
def test_rxe_rejects(rxe_bench: RxeBench, size: int) -> None:
    ours, guest = End.of(rxe_bench.device), rxe_bench.guest()
    guest.call("listen", port=_PORT)
    ours.ask(rxe_bench.guest_address, TCP_SERVICE + _PORT, bytes(range(size)))
    assert guest.expect("CONNECT_REQUEST") == bytes(range(size)).ljust(_REQUEST_MAX, b"\0")
    guest.call("reject", private_data=bytes(range(1, _REJECT_MAX + 1)).hex())
    ours.ended()
    assert ours.told == [Rejected(REJECT_CONSUMER, bytes(range(1, _REJECT_MAX + 1)))]


@pytest.mark.parametrize("size", [0, 1, _REQUEST_MAX])
def test_rxe_is_rejected(rxe_bench: RxeBench, size: int) -> None:
    guest, requests = rxe_bench.guest(), rxe_bench.requests()
    guest.call("resolve", address=rxe_bench.device.address, port=requests.port)
    guest.call("create_qp")
    guest.call("connect", private_data=bytes(range(size)).hex())
    request = requests.next()
    assert request.private_data == bytes(range(size)).ljust(_REQUEST_MAX, b"\0")
    request.reject(private_data=b"no, thanks")
    assert guest.expect("REJECTED") == b"no, thanks".ljust(_REJECT_MAX, b"\0")


def test_private_data_both_ways(rxe_bench: RxeBench) -> None:
    ours, guest = End.of(rxe_bench.device), rxe_bench.guest()
    guest.call("listen", port=_PORT)
    ours.ask(rxe_bench.guest_address, TCP_SERVICE + _PORT, b"hello")
    assert guest.expect("CONNECT_REQUEST").rstrip(b"\0") == b"hello"
    guest.call("create_qp")
    guest.call("accept", private_data=bytes(range(_REPLY_MAX)).hex())
    assert ours.established() == bytes(range(_REPLY_MAX))
    guest.expect("ESTABLISHED")
    other, asked, requests = End.of(rxe_bench.device), rxe_bench.guest(), rxe_bench.requests()
    asked.call("resolve", address=rxe_bench.device.address, port=requests.port)
    asked.call("create_qp")
    asked.call("connect", private_data=b"hello".hex(), resources=3, depth=2)
    request = requests.next()
    assert (request.responder_resources, request.initiator_depth) == (3, 2)
    other.accept(request, bytes(range(_REPLY_MAX)))
    assert asked.expect("ESTABLISHED") == bytes(range(_REPLY_MAX))


def test_nobody_listens(rxe_bench: RxeBench) -> None:
    """Linux's rdma_cm says so for itself by the consumer's reason, and so may a device without a listener."""
    ours, guest = End.of(rxe_bench.device), rxe_bench.guest()
    ours.ask(rxe_bench.guest_address, TCP_SERVICE + _PORT + 1)
    ours.ended()
    (rejected,) = ours.told
    assert isinstance(rejected, Rejected)
    assert rejected.reason in (REJECT_INVALID_SERVICE_ID, REJECT_CONSUMER)
    guest.call("resolve", address=rxe_bench.device.address, port=_PORT + 2)
    guest.call("create_qp")
    guest.call("connect")
    guest.expect("REJECTED")


@pytest.mark.spec("IBTA 12.6.9, 12.6.10")
@pytest.mark.parametrize("asks", _ASKS)
@pytest.mark.parametrize("closes", _ASKS)
def test_either_end_closes(rxe_bench: RxeBench, asks: str, closes: str) -> None:
    """All that is posted is flushed, at both ends."""
    ours, guest = rxe_bench.pair(asks)
    region = rxe_bench.remote(guest, 64).region
    guest.call("receive", region=region, length=64, count=_POSTED)
    for number in range(_POSTED):
        ours.room(64, number)
    ours.send(b"last")
    assert guest.call("received")["completions"] == [["SUCCESS", 4]]
    if closes == "ours":
        assert ours.connection is not None
        ours.connection.disconnect()
        guest.expect("DISCONNECTED")
    guest.call("disconnect")  # rdma_cm leaves the answer to a DREQ to its user
    ours.ended()
    if closes == "rxe":
        guest.expect("DISCONNECTED")
    assert ours.told[1] == Disconnected(by_remote=closes == "rxe", confirmed=True)
    flushed = [(each.wr_id, each.status) for each in ours.received(_POSTED)]
    assert flushed == [(number, Status.FLUSHED) for number in range(_POSTED)]
    assert ours.events == []


@pytest.mark.parametrize("asks", _ASKS)
def test_the_program_there_dies(rxe_bench: RxeBench, asks: str) -> None:
    """Its kernel says so for it."""
    ours, guest = rxe_bench.pair(asks)
    guest.ask("kill")
    ours.ended()
    assert ours.told[1] == Disconnected(by_remote=True, confirmed=True)


@pytest.mark.parametrize("asks", _ASKS)
def test_our_device_is_closed(rxe_bench: RxeBench, asks: str) -> None:
    _, guest = rxe_bench.pair(asks)
    rxe_bench.device.cm.close()
    guest.expect("DISCONNECTED")


def test_connections_at_the_same_time(rxe_bench: RxeBench) -> None:
    pairs = [rxe_bench.pair("ours", port=_PORT + 10 + number) for number in range(4)]
    for number, (ours, guest) in enumerate(pairs):
        theirs = rxe_bench.remote(guest, 64)
        guest.call("receive", region=theirs.region, length=64)
        ours.send(bytes(number + 1))
    for number, (_, guest) in enumerate(pairs):
        assert guest.call("received")["completions"] == [["SUCCESS", number + 1]]


@pytest.fixture
def rough_link(lab: Lab) -> Iterator[None]:
    """Loses one packet in five, to and fro, of those that make connections as well."""
    lab.run("modprobe sch_netem; tc qdisc add dev eth1 root netem loss 20%")
    yield
    lab.run("tc qdisc del dev eth1 root")


@pytest.mark.usefixtures("rough_link")
def test_connections_are_made_and_ended_over_a_bad_link(rxe_bench: RxeBench) -> None:
    for number in range(3):
        ours, guest = rxe_bench.pair("ours", port=_PORT + 20 + number)
        assert ours.connection is not None
        ours.connection.disconnect()
        guest.expect("DISCONNECTED")
        guest.call("disconnect")
        ours.ended()
        assert isinstance(ours.told[1], Disconnected)
