"""A device under attack: a peer made by hand at one end, and next to it a connection that must not notice.

Everything is on one loop in one thread: the peer's socket lets the loop turn while it waits.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from iwarp_dut import IwarpUnderTest
from loop_dut import WAIT_S
from raw_iwarp import Depths, RawPeer, request

from sidestep.loop import Loop
from sidestep.rdma.cm import ConnectionRequest
from sidestep.rdma.conformance import Bench
from sidestep.rdma.conformance.harness import Side
from sidestep.rdma.iwarp.ddp import RdmapOp, Segment
from sidestep.rdma.iwarp.device import IwarpDevice, IwarpSettings
from sidestep.rdma.iwarp.qp import IwarpQueuePair
from sidestep.rdma.iwarp.startup.terms import MpaSettings
from sidestep.rdma.verbs import MemoryRegion, ProtectionDomain, QpCapabilities
from sidestep.rdma.work import Access, RdmaRead, RdmaWrite

PORT: Final = 5002
SIZE: Final = 256  # bytes of a region
GUARD: Final = 64  # bytes around it that are in no region
OPEN: Final = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
SETTINGS: Final = IwarpSettings(startup=MpaSettings(peer_to_peer=True, crc=False), half_open_max=8)
LONG_S: Final = 60.0  # all times of the start-up and of closing are over then
RTR: Final = Segment(RdmapOp.WRITE, True)


class LeapingLoop(Loop):
    """Its time can be made to pass."""

    leapt_s = 0.0

    @property
    def now(self) -> float:
        return super().now + self.leapt_s


class LoopSocket(socket.socket):
    """A socket whose waiting lets a loop turn."""

    loop: Loop

    def settimeout(self, value: float | None) -> None:
        """It never blocks."""
        super().settimeout(0)

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        until = time.monotonic() + WAIT_S
        while True:
            try:
                return super().recv(bufsize, flags)
            except BlockingIOError:
                assert time.monotonic() < until, "nothing came"
                self.loop.turn(0.01)

    def sendall(self, data: bytes | bytearray, flags: int = 0, /) -> None:  # type: ignore[override]
        view = memoryview(data)
        until = time.monotonic() + WAIT_S
        while view:
            try:
                view = view[super().send(view, flags) :]
            except BlockingIOError:
                assert time.monotonic() < until, "nothing was taken"
                self.loop.turn(0.01)

    def reset(self) -> None:
        """RST."""
        self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, (1).to_bytes(4, "little") + bytes(4))
        self.close()


def loop_socket(sock: socket.socket, loop: Loop) -> LoopSocket:
    made = LoopSocket(fileno=sock.detach())
    made.loop = loop
    made.settimeout(0)
    return made


def descriptors() -> int:
    """Of sockets and event queues; other files are not the device's."""
    gc.collect()  # what others have left to be closed sometime
    found = [target_of(each) for each in Path("/proc/self/fd").iterdir()]
    return sum(target.startswith(("socket:", "anon_inode:[event")) for target in found)


def target_of(path: Path) -> str:
    """Where a descriptor leads; nowhere if it is closed by now."""
    try:
        return str(path.readlink())
    except FileNotFoundError:
        return ""


@dataclass
class Victim:
    """The passive device is attacked; `sides` are its ends of the attacker's connections."""

    settings: IwarpSettings = SETTINGS
    capabilities: QpCapabilities = field(default_factory=QpCapabilities)
    accepts: bool = True
    make_side: Callable[[], Side] | None = None
    sides: list[Side] = field(default_factory=list)
    requests: list[ConnectionRequest] = field(default_factory=list)
    peers: list[RawPeer] = field(default_factory=list)
    buffers: list[bytearray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.descriptors = descriptors()
        self.loop = LeapingLoop()
        self.dut = IwarpUnderTest(self.settings, loop=self.loop)
        self.bench = Bench(self.dut)
        assert isinstance(self.dut.passive, IwarpDevice)
        self.device = self.dut.passive
        self.near, self.far = self.bench.pair()  # bystanders
        self.shared = self.far.memory(8, OPEN)
        self.listener = self.device.cm.listen(PORT, self._on_request)

    def _on_request(self, asked: ConnectionRequest) -> None:
        self.requests.append(asked)
        if self.accepts:
            side = self.make_side() if self.make_side else self.bench.side(self.device, self.capabilities)
            self.sides.append(side)
            side.connection = asked.accept(side.qp, b"", side.on_cm)

    @property
    def side(self) -> Side:
        return self.sides[-1]

    @property
    def qp(self) -> IwarpQueuePair:
        qp = self.side.qp
        assert isinstance(qp, IwarpQueuePair)
        return qp

    def connect(self) -> LoopSocket:
        """A TCP connection that has said nothing."""
        return loop_socket(socket.create_connection((self.device.address, PORT)), self.loop)

    def peer(self, *, begins: bool = True, crc: bool = True) -> RawPeer:
        """One that has started properly."""
        peer = RawPeer(self.connect())
        self.peers.append(peer)
        peer.ask(request(Depths(4, 4, peer_to_peer=True, rtr_write=True), crc=crc))
        if begins:
            peer.send(RTR)
            self.until(lambda: bool(self.side.cm_events))
        return peer

    def region(
        self, access: Access = OPEN, domain: ProtectionDomain | None = None, content: bytes = bytes(SIZE)
    ) -> MemoryRegion:
        whole = bytearray(b"G" * GUARD + content + b"G" * GUARD)
        self.buffers.append(whole)
        return (domain or self.side.domain).register(memoryview(whole)[GUARD:-GUARD], access)

    def content(self) -> list[bytes]:
        return [bytes(each) for each in self.buffers]

    def later(self) -> None:
        """Long enough, and nobody has done anything."""
        self.loop.leapt_s += LONG_S
        self.dut.run()

    def until(self, condition: Callable[[], bool]) -> None:
        assert self.loop.run_until(condition, WAIT_S)

    def bystanders_live(self) -> None:
        """The connection next to it carries all kinds of messages, as before."""
        near, far = self.near, self.far
        done = len(near.completions()), len(far.received)
        content = os.urandom(8)
        far.post_recv(1, 8)
        sink = near.memory(8)
        near.qp.post_send(RdmaWrite(2, (near.memory(content).view,), self.shared.va, self.shared.rkey))
        near.send(3, b"word")
        near.qp.post_send(RdmaRead(4, (sink.view,), self.shared.va, self.shared.rkey))
        self.until(lambda: len(near.completions()) == done[0] + 3 and len(far.received) == done[1] + 1)
        self.bench.all_ok(near, "a bystander")
        self.bench.all_ok(far, "a bystander")
        assert bytes(sink.view) == content

    def close(self) -> None:
        """Everything, and nothing is left of it."""
        for peer in self.peers:
            peer.socket.close()
        self.bystanders_live()
        self.dut.close()
        manager = self.device.cm
        assert not [*manager.device.streams, *manager.connections, *manager.half_open, *manager.requests]
        assert len(self.device.keys) == 0
        self.loop.notices.clear()
        assert self.loop.idle
        assert descriptors() == self.descriptors
