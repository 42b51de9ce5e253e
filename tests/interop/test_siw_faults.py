"""What one end does wrong on purpose the other one refuses, and both hear of it: our software RNIC and siw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
from guest_verbs import Bench, End, GuestVerbs, Remote

from sidestep.rdma.work import Access, RdmaRead, RdmaWrite, RKey, Status

_LEN: Final = 4096
_TRIES: Final = 6  # siw leaves a Terminate out now and then: see docs/internals/devices.md
_ASKS = ["ours", "siw"]


# ---- what we do wrong ----


def _write(ours: End, remote: Remote, at: int = 0, key: int = 0) -> None:
    ours.qp.post_send(RdmaWrite(1, (ours.memory(bytes(64)).view,), remote.address + at, RKey(remote.key ^ key)))


def _read(ours: End, remote: Remote, at: int = 0, key: int = 0) -> None:
    ours.qp.post_send(RdmaRead(1, (ours.memory(64).view,), remote.address + at, RKey(remote.key ^ key)))


def _revoked(ours: End, guest: GuestVerbs, remote: Remote) -> None:
    guest.call("revoke", region=remote.region)
    _write(ours, remote)


_OURS: Final[dict[str, tuple[Callable[[End, GuestVerbs, Remote], object], str]]] = {
    "Write with another key": (lambda ours, _, remote: _write(ours, remote, key=1), "invalid STag (1/1/00), about a"),
    "Write to no region": (lambda ours, _, remote: _write(ours, remote, key=1 << 30), "invalid STag (1/1/00)"),
    "Write out of bounds": (lambda ours, _, remote: _write(ours, remote, at=_LEN - 1), "bounds violation (1/1/01)"),
    "Write to a revoked region": (_revoked, "invalid STag (1/1/00)"),
    "Read with another key": (lambda ours, _, remote: _read(ours, remote, key=1), "invalid STag (0/1/00)"),
    "Read out of bounds": (lambda ours, _, remote: _read(ours, remote, at=-1), "bounds violation (0/1/01)"),
    "no receive": (lambda ours, *_: ours.send(b"nobody waits"), "no buffer for this MSN (1/2/02), about a SEND"),
}  # fmt: skip


@pytest.mark.spec("RFC 5040 5.4")
@pytest.mark.parametrize("asks", _ASKS)
@pytest.mark.parametrize("name", _OURS)
def test_siw_ends_it_and_we_know_why(bench: Bench, name: str, asks: str) -> None:
    commit, words = _OURS[name]
    for number in range(_TRIES):
        ours, guest = bench.pair(asks, port=7600 + number)
        room = ours.room(64, 7)
        commit(ours, guest, bench.remote(guest, _LEN))
        ours.ended()
        assert [each.status for each in ours.received(1)] == [Status.FLUSHED]
        guest.expect("DISCONNECTED")
        guest.close()
        room.deregister()
        if ours.events:
            break
    assert words in ours.why
    assert ours.why.startswith("QP_FATAL: Terminate: ")


def test_siw_ends_it_for_a_send_longer_than_the_receive(bench: Bench) -> None:
    for number in range(_TRIES):
        ours, guest = bench.pair("ours", port=7600 + number)
        guest.call("receive", region=bench.remote(guest, 64).region, length=63)
        ours.send(bytes(64))
        ours.ended()
        assert guest.call("received")["completions"][0][0] != "SUCCESS"
        if ours.events:
            break
    assert "(1/2/02)" in ours.why  # the standard has 1/2/05


# ---- what siw does wrong ----

_THEIRS: Final[dict[str, tuple[str, dict[str, int], str]]] = {
    "Write with another key": ("write", {"key": 1}, "QP_ACCESS_ERROR: Write or Read Response with an STag"),
    "Write out of bounds": ("write", {"at": _LEN - 1}, "QP_ACCESS_ERROR: Write or Read Response out of bounds"),
    "Write without the right": ("write", {"access": Access.REMOTE_READ}, "QP_ACCESS_ERROR: Write without the right"),
    "Write to a revoked region": ("write", {"revoke": 1}, "QP_ACCESS_ERROR: Write or Read Response with an STag"),
    "Read with another key": ("read", {"key": 1}, "QP_ACCESS_ERROR: Read Request with an STag that is unknown"),
    "Read out of bounds": ("read", {"at": -1}, "QP_ACCESS_ERROR: Read Request out of bounds"),
    "Read without the right": (
        "read", {"access": Access.LOCAL_WRITE | Access.REMOTE_WRITE}, "QP_ACCESS_ERROR: Read Request without the right"
    ),
    "Read from a revoked region": ("read", {"revoke": 1}, "QP_ACCESS_ERROR: Read Request with an STag that is unknown"),
}  # fmt: skip


@pytest.mark.spec("RFC 5040 7.2")
@pytest.mark.parametrize("asks", _ASKS)
@pytest.mark.parametrize("name", _THEIRS)
def test_we_end_it_and_siw_notices(bench: Bench, name: str, asks: str) -> None:
    verb, wrong, words = _THEIRS[name]
    ours, guest = bench.pair(asks)
    before = bytes(range(256)) * (_LEN // 256)
    access = wrong.get("access", Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ)
    target = ours.memory(before, Access(access))
    key, address = target.rkey ^ wrong.get("key", 0), target.va + wrong.get("at", 0)
    if "revoke" in wrong:
        target.deregister()
    mine = bench.remote(guest, 64, seed=1)
    guest.call("receive", region=mine.region, length=64)
    guest.call(verb, region=mine.region, length=64, address=address, key=key)
    ours.ended()
    guest.expect("DISCONNECTED")
    guest.call("disconnect")
    assert words in ours.why
    assert target.view == before
    # a Write is done when TCP has it, unless siw hears our Terminate before it has said so
    status = guest.call("sent")["completions"][0][0]
    assert status in {"write": ("SUCCESS", "LOC_QP_OP_ERR", "WR_FLUSH_ERR"), "read": ("WR_FLUSH_ERR",)}[verb]
    assert guest.call("received")["completions"][0][0] == "WR_FLUSH_ERR"


def test_siw_sends_and_we_have_no_receive(bench: Bench) -> None:
    ours, guest = bench.pair("ours")
    guest.call("send", region=bench.remote(guest, 64).region, length=64)
    ours.ended()
    guest.expect("DISCONNECTED")
    assert ours.why == "QP_REQUEST_ERROR: Send for which no receive is posted"


def test_siw_sends_more_than_the_receive_takes(bench: Bench) -> None:
    ours, guest = bench.pair("ours")
    room = ours.room(63)
    guest.call("send", region=bench.remote(guest, 64, seed=1).region, length=64)
    (completion,) = ours.received(1)
    assert completion.status is Status.LOCAL_LENGTH_ERROR
    ours.ended()
    guest.expect("DISCONNECTED")
    assert not any(room.view)
