"""The kernel's siw and a peer made by hand understand each other, in both roles: `rping` says so, and its content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from lab_guest import Lab
from raw_iwarp import Depths, RawPeer, depths_of, reply, request
from raw_rping import Advertisement, ping, pong

from sidestep.rdma.iwarp.ddp import RdmapOp, ReadRequest
from sidestep.rdma.iwarp.startup.frame import StartFrame

_PORT = 7174
_ROUNDS = 5
_SIZES = [64, 20_000]  # bytes; the second takes many segments


def _text(number: int, size: int) -> bytes:
    """A text for rping, which takes it for one of C's; different in every round and place."""
    return bytes(97 + (number * 7 + at * at) % 26 for at in range(size - 1)) + b"\0"


@contextmanager
def _served(lab: Lab, size: int) -> Iterator[RawPeer]:
    """A connection to rping in the guest, which ends well when the connection does."""
    command = f"rping -s -a {lab.siw_address} -p {_PORT} -S {size} -v; echo result $?"
    server = lab.serve("rping", command, _PORT)
    with RawPeer(lab.connect(_PORT)) as peer:
        yield peer
        peer.finish()
    assert "result 0" in server.wait_for("^result")


@pytest.mark.spec("RFC 5040 5")
@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("crc", [True, False], ids=["crc", "plain"])
def test_rping_serves_a_client_made_by_hand(lab: Lab, crc: bool, size: int) -> None:
    with _served(lab, size) as peer:
        answer = peer.ask(request(Depths(ird=1, ord=1), crc=crc))
        assert (answer.rejected, answer.revision, answer.crc, answer.markers) == (False, 2, crc, False)
        depths = depths_of(answer)
        assert depths.ird >= 1
        assert depths.ord == 1
        for number in range(_ROUNDS):
            text = _text(number, size)
            source = Advertisement(0x7F00_0000_1000 + number, 0x1200 + number, size)
            sink = Advertisement(0xFFFF_0000_0000_0000 + number, 0x3400 + number, size)
            assert ping(peer, text, source, sink) == text


@pytest.mark.spec("RFC 6581 9")
@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("crc", [True, False], ids=["crc", "plain"])
def test_rping_pings_a_server_made_by_hand(lab: Lab, crc: bool, size: int) -> None:
    with lab.listener() as listener:
        port = listener.getsockname()[1]
        options = f"-a {lab.host_address} -p {port} -S {size} -C {_ROUNDS} -vV"
        client = lab.background("rping", f"rping -c {options}; echo result $?")
        listener.settimeout(60)
        with RawPeer(listener.accept()[0]) as peer:
            asked = peer.answer(lambda _: reply(Depths(ird=1, ord=1), crc=crc))
            assert (asked.revision, asked.crc, asked.markers, asked.rejected) == (2, False, False, False)
            assert depths_of(asked) == Depths(ird=1, ord=1)
            for number in range(_ROUNDS):
                text = pong(peer, 0x5600 + number, 0x1000 * number)
                assert text.startswith(f"rdma-ping-{number}: ".encode())
                assert len(text) == size
            peer.expect_end()
    told = client.wait_for("^result")
    assert f"ping data: rdma-ping-{_ROUNDS - 1}: " in told
    # rping closes its event channel while its own thread may still read there: now and then it calls that a failure
    assert "result 0" in told or "rdma_get_cm_event: Bad file descriptor" in told


@pytest.fixture
def peer_to_peer(lab: Lab) -> Iterator[None]:
    """As initiator siw asks for a connection that either side may begin to use."""
    switch = "/sys/module/siw/parameters/peer_to_peer"
    lab.run(f"echo Y > {switch}")
    yield
    lab.run(f"echo N > {switch}")


@pytest.mark.spec("RFC 6581 9")
@pytest.mark.usefixtures("peer_to_peer")
@pytest.mark.parametrize("read", [False, True], ids=["write", "read"])
def test_siw_says_that_it_is_ready(lab: Lab, read: bool) -> None:
    def decide(asked: StartFrame) -> StartFrame:
        depths = depths_of(asked)
        assert (depths.peer_to_peer, depths.rtr_write, depths.rtr_read) == (True, True, True)
        return reply(Depths(ird=1, ord=1, peer_to_peer=True, rtr_write=not read, rtr_read=read))

    with lab.listener() as listener:
        options = f"-a {lab.host_address} -p {listener.getsockname()[1]} -C 1 -vV"
        client = lab.background("rping", f"rping -c {options}; echo result $?")
        listener.settimeout(60)
        with RawPeer(listener.accept()[0]) as peer:
            peer.answer(decide)
            ready, payload = peer.expect(RdmapOp.READ_REQUEST if read else RdmapOp.WRITE)
            if read:
                asked = ReadRequest.decode(payload)
                assert asked.length == 0
                peer.send_message(RdmapOp.READ_RESPONSE, b"", asked.sink_stag, asked.sink_offset)
            else:
                assert (ready.last, payload) == (True, b"")
            pong(peer, 0x5600, 0)
            peer.expect_end()
    assert "result 0" in client.wait_for("^result")
