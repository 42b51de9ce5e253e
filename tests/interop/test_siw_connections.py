"""How connections between our software RNIC and the kernel's siw come about and end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from guest_verbs import WAIT_S, Bench, End, Requests
from lab_guest import Lab

from sidestep.rdma.cm import REJECT_CONSUMER, REJECT_INVALID_SERVICE_ID, Disconnected, Rejected
from sidestep.rdma.iwarp.device import IwarpSettings
from sidestep.rdma.iwarp.startup.terms import MpaSettings
from sidestep.rdma.work import Opcode, Status

_PORT = 7500
_ASKS = ["ours", "siw"]
_DATA_MAX = 252  # bytes of a user's private data: siw takes 256, of which S has 4
_SIW_DATA_MAX = 251  # that it sends: it counts all of them in 8 bits
_POSTED = 3  # receives that nobody uses


@pytest.mark.spec("RFC 5044 7.1.1")
@pytest.mark.parametrize("size", [1, 100, _SIW_DATA_MAX])
def test_siw_rejects(bench: Bench, lab: Lab, size: int) -> None:
    ours, guest = End.of(bench.device), bench.guest()
    guest.call("listen", port=_PORT)
    ours.connect(lab, _PORT, bytes(range(size)))
    assert guest.expect("CONNECT_REQUEST") == bytes(range(size))
    guest.call("reject", private_data=bytes(reversed(range(size))).hex())
    ours.ended()
    assert ours.told == [Rejected(REJECT_CONSUMER, bytes(reversed(range(size))))]


@pytest.mark.parametrize("size", [0, 1, 100, _SIW_DATA_MAX])
def test_siw_is_rejected(bench: Bench, lab: Lab, size: int) -> None:
    guest, requests = bench.guest(), Requests(bench.device)
    guest.call("resolve", address=lab.host_address, port=requests.port)
    guest.call("create_qp")
    guest.call("connect", private_data=bytes(range(size)).hex())
    request = requests.next()
    assert request.private_data == bytes(range(size))
    request.reject(private_data=bytes(reversed(range(size))))
    assert guest.expect("REJECTED") == bytes(reversed(range(size)))


@pytest.mark.parametrize("size", [1, _DATA_MAX])
def test_private_data_that_siw_takes(bench: Bench, lab: Lab, size: int) -> None:
    ours, guest = End.of(bench.device), bench.guest()
    guest.call("listen", port=_PORT)
    ours.connect(lab, _PORT, bytes(range(size)))
    assert guest.expect("CONNECT_REQUEST") == bytes(range(size))
    guest.call("create_qp")
    guest.call("accept", private_data=bytes(reversed(range(min(size, _SIW_DATA_MAX)))).hex())
    assert ours.established() == bytes(reversed(range(min(size, _SIW_DATA_MAX))))
    guest.expect("ESTABLISHED")


def test_private_data_that_siw_does_not_take(bench: Bench, lab: Lab) -> None:
    """It closes without a word."""
    ours, guest = End.of(bench.device), bench.guest()
    guest.call("listen", port=_PORT)
    ours.connect(lab, _PORT, bytes(_DATA_MAX + 1))
    ours.until(lambda: bool(ours.told), "told")
    assert ours.kinds == ["Unreachable"]


@pytest.mark.parametrize("size", [1, _SIW_DATA_MAX])
def test_private_data_of_siw(bench: Bench, lab: Lab, size: int) -> None:
    ours, guest, requests = End.of(bench.device), bench.guest(), Requests(bench.device)
    guest.call("resolve", address=lab.host_address, port=requests.port)
    guest.call("create_qp")
    guest.call("connect", private_data=bytes(range(size)).hex(), resources=3, depth=2)
    request = requests.next()
    assert request.private_data == bytes(range(size))
    assert (request.responder_resources, request.initiator_depth) == (3, 2)
    ours.accept(request, bytes(reversed(range(size))))
    assert guest.expect("ESTABLISHED") == bytes(reversed(range(size)))


def test_nobody_listens(bench: Bench, lab: Lab) -> None:
    ours, guest = End.of(bench.device), bench.guest()
    ours.connect(lab, _PORT + 1)
    ours.ended()
    assert ours.told == [Rejected(REJECT_INVALID_SERVICE_ID)]
    requests = Requests(bench.device)
    requests.listener.close()
    guest.call("resolve", address=lab.host_address, port=requests.port)
    guest.call("create_qp")
    guest.ask("connect")
    with pytest.raises(AssertionError, match="Connection refused"):
        guest.answer()


@pytest.mark.spec("RFC 5044 4.3")
@pytest.mark.parametrize("settings", [IwarpSettings(startup=MpaSettings(markers=True))])
def test_siw_refuses_markers(bench: Bench, lab: Lab) -> None:
    """Its program hears of neither attempt."""
    ours, guest = End.of(bench.device), bench.guest()
    guest.call("listen", port=_PORT)
    ours.connect(lab, _PORT)
    ours.ended()
    assert ours.told == [Rejected(REJECT_CONSUMER)]
    asked, other, requests = bench.guest(), End.of(bench.device), Requests(bench.device)
    asked.call("resolve", address=lab.host_address, port=requests.port)
    asked.call("create_qp")
    asked.call("connect")
    other.accept(requests.next())
    asked.expect("REJECTED")
    other.until(lambda: "TimewaitExit" in other.kinds, "the end")
    assert other.kinds == ["Established", "Disconnected", "TimewaitExit"]


@pytest.mark.spec("RFC 5040 6.2")
@pytest.mark.parametrize("asks", _ASKS)
@pytest.mark.parametrize("closes", _ASKS)
def test_either_end_closes(bench: Bench, asks: str, closes: str) -> None:
    """All that is posted is flushed, at both ends."""
    ours, guest = bench.pair(asks)
    region = bench.remote(guest, 64).region
    guest.call("receive", region=region, length=64, count=_POSTED)
    for number in range(_POSTED):
        ours.room(64, number)
    ours.send(b"last")
    assert guest.call("received")["completions"] == [["SUCCESS", 4]]
    if closes == "ours":
        assert ours.connection is not None
        ours.connection.disconnect()
    else:
        guest.call("disconnect")
    ours.ended()
    guest.expect("DISCONNECTED")
    assert ours.told[1] == Disconnected(by_remote=closes == "siw", confirmed=True)
    assert [(each.wr_id, each.status) for each in ours.received(_POSTED)] == [
        (number, Status.FLUSHED) for number in range(_POSTED)
    ]
    assert ours.events == []
    guest.call("disconnect")
    flushed = guest.call("received", count=_POSTED - 1)["completions"]
    assert [status for status, _ in flushed] == ["WR_FLUSH_ERR"] * (_POSTED - 1)


@pytest.mark.parametrize("asks", _ASKS)
def test_the_program_in_the_guest_is_killed(bench: Bench, asks: str) -> None:
    ours, guest = bench.pair(asks)
    ours.room(64, 7)
    guest.ask("kill")
    ours.ended()
    assert ours.kinds == ["Established", "Disconnected", "TimewaitExit"]
    (flushed,) = ours.received(1)
    assert (flushed.wr_id, flushed.status) == (7, Status.FLUSHED)


@pytest.mark.parametrize("asks", _ASKS)
def test_our_device_goes_without_a_word(bench: Bench, asks: str) -> None:
    """RST: siw's program hears of it."""
    ours, guest = bench.pair(asks)
    guest.call("receive", region=bench.remote(guest, 64).region, length=64)
    ours.qp.modify_to_error()
    guest.expect("DISCONNECTED")
    guest.call("disconnect")
    assert guest.call("received")["completions"][0][0] == "WR_FLUSH_ERR"


def _wait_for_the_way(bench: Bench) -> None:
    """The kernel has to find it again."""
    until = time.monotonic() + WAIT_S
    while True:
        try:
            bench.guest().close()
        except OSError:
            assert time.monotonic() < until, "no way to the guest"
        else:
            return


@contextmanager
def _link_down(bench: Bench, lab: Lab) -> Iterator[None]:
    def turn(word: str) -> None:
        with lab.network():
            subprocess.run(["ip", "link", "set", "lt1-0", word], check=True)

    turn("down")
    try:
        yield
    finally:
        turn("up")
        _wait_for_the_way(bench)


@pytest.mark.parametrize("settings", [IwarpSettings(silence_s=3.0)])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_the_link_is_lost(bench: Bench, lab: Lab, busy: bool) -> None:
    """Nothing tells of it but the silence."""
    ours, _ = bench.pair("ours")
    ours.room(64, 7)
    with _link_down(bench, lab):
        if busy:
            ours.send(b"into the void")
        ours.ended()
    assert ours.told[1] == Disconnected(by_remote=True, confirmed=False)
    assert "QP_FATAL: the connection broke" in ours.why
    assert [each.status for each in ours.of_kind(Opcode.RECEIVE)] == [Status.FLUSHED]
