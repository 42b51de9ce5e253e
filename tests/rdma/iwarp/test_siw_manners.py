"""What Linux siw does in its own way, as our device meets it; tests/interop meets siw itself."""

from __future__ import annotations

import select
import socket

import pytest
from loop_dut import WAIT_S, addresses
from mpa_oracle import Deframer

from sidestep.rdma.cm import ConnectionEvent
from sidestep.rdma.iwarp.ddp import RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.device import IwarpDevice, IwarpSettings
from sidestep.rdma.iwarp.mpa import fpdu
from sidestep.rdma.iwarp.startup.frame import Enhanced, MpaRole, StartFrame
from sidestep.rdma.iwarp.startup.terms import MpaSettings
from sidestep.rdma.iwarp.terminate import Condition, Includes, Terminate

_SEGMENTS = {
    Includes.NOTHING: b"",
    Includes.DDP: Segment(RdmapOp.SEND, True, b"abc", msn=7).encode(),
    Includes.READ: Segment(RdmapOp.READ_REQUEST, True, ReadRequest(1, 2, 3, 4, 5).encode(), queue=1, msn=1).encode(),
}
_AMBIGUOUS = {Condition.START_LOCAL, Condition.START_IRD, Condition.START_RTR}
_AMBIGUOUS |= {Condition.END_TOO_EARLY, Condition.STREAM_BROKEN}  # 0/2/07 without a header


def _mirrored(message: bytes) -> bytes:
    """As a little-endian machine with bit fields has it."""
    flags = int(f"{message[2]:08b}"[::-1], 2)
    return bytes([message[0] >> 4 | message[0] << 4 & 0xF0, message[1], flags, *message[3:]])


@pytest.mark.spec("RFC 5040 4.8")
@pytest.mark.parametrize(
    "condition", [each for each in Condition if each not in _AMBIGUOUS], ids=lambda condition: condition.name
)
def test_a_terminate_of_siw(condition: Condition) -> None:
    told = Terminate.about(condition, _SEGMENTS[condition.includes])
    assert Terminate.decode(told.encode()) == told
    assert Terminate.decode(_mirrored(told.encode())) == told


def _readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def _all(sock: socket.socket) -> bytes:
    """What has come."""
    pieces = []
    while _readable(sock):
        pieces.append(sock.recv(65536))
        if not pieces[-1]:
            break
    return b"".join(pieces)


@pytest.mark.spec("RFC 5044 7.1.2")
@pytest.mark.parametrize("heard", [False, True], ids=["silent", "heard"])
@pytest.mark.parametrize("peer_to_peer", [False, True])
def test_an_initiator_that_hears_nothing_nudges(peer_to_peer: bool, heard: bool) -> None:
    """Writes without a byte, as many as the settings say; none to an end that has said something."""
    own, other, _ = addresses()
    nudges = (0.0, 0.0)
    device = IwarpDevice(own, settings=IwarpSettings(startup=MpaSettings(peer_to_peer=peer_to_peer), nudges_s=nudges))
    told: list[ConnectionEvent] = []
    with socket.create_server((other, 0)) as server:
        queue = device.create_cq(8)
        qp = device.alloc_pd().create_qp(queue, queue)
        device.cm.connect(other, server.getsockname()[1], qp, b"", lambda _, event: told.append(event))
        assert device.loop.run_until(lambda: _readable(server), WAIT_S)
        peer, _ = server.accept()
        with peer:
            assert device.loop.run_until(lambda: _readable(peer), WAIT_S)
            request = StartFrame.decode(peer.recv(24))
            assert request is not None
            asked = request[0].enhanced_data
            assert asked is not None
            mine = Enhanced(4, 4, peer_to_peer=asked.peer_to_peer, rtr=asked.rtr)
            reply = StartFrame(MpaRole.REPLY, mine.encode(), enhanced=True, revision=2).encode()
            first = fpdu(Segment(RdmapOp.WRITE, True, stag=1).encode(), 0) if heard else b""
            peer.sendall(reply + first)
            assert device.loop.run_until(lambda: bool(told), WAIT_S)
            while device.loop.turn(0.0):
                pass
            found = [Segment.decode(each) for each in Deframer(markers=False).feed(_all(peer))]
    device.close()
    assert [(each.op, each.payload) for each in found] == [(RdmapOp.WRITE, b"")] * (
        peer_to_peer + (0 if heard else len(nudges))
    )
