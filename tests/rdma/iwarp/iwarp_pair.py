"""Two software RNICs in this process with a connection between them, for tests."""

from __future__ import annotations

from loop_dut import WAIT_S, addresses

from sidestep.loop import Loop
from sidestep.rdma.cm import Connection, ConnectionEvent, ConnectionRequest, Disconnected
from sidestep.rdma.iwarp.device import IwarpDevice, IwarpSettings
from sidestep.rdma.iwarp.startup.terms import MpaSettings
from sidestep.rdma.verbs import MemoryRegion, QpState
from sidestep.rdma.work import Access, Completion, Receive, SendRequest

PORT = 5001
EVERYTHING = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE


class End:
    """One of them, with a queue pair."""

    def __init__(self, address: str, loop: Loop, name: str, *, markers: bool) -> None:
        settings = IwarpSettings(startup=MpaSettings(peer_to_peer=True, markers=markers), nudges_s=())
        self.device = IwarpDevice(address, loop, settings, name=name)
        self.domain = self.device.alloc_pd()
        self.completions: list[Completion] = []
        self.cq = self.device.create_cq(1024, self.completions.extend)
        self.qp = self.domain.create_qp(self.cq, self.cq)
        self.connection: Connection | None = None
        self.events: list[ConnectionEvent] = []
        self.buffers: list[bytearray] = []

    def region(self, buffer: bytearray, access: Access = EVERYTHING) -> MemoryRegion:
        """Memory that the other end may use."""
        return self.domain.register(buffer, access)

    def receives(self, count: int, size: int) -> None:
        """Room for so many messages."""
        for _ in range(count):
            self.buffers.append(bytearray(size))
            self.domain.register(self.buffers[-1], Access.LOCAL_WRITE)
            self.qp.post_recv(Receive(len(self.buffers) - 1, (memoryview(self.buffers[-1]),)))

    def handle(self, connection: Connection, event: ConnectionEvent) -> None:
        """What the connection manager tells."""
        self.connection = connection
        self.events.append(event)


class IwarpPair:
    """Both; connected once `connect` returns."""

    def __init__(self, *, markers: bool = False, size: int = 1 << 16) -> None:
        self.loop = Loop()
        one, two, _ = addresses()
        self.active = End(one, self.loop, "active", markers=markers)
        self.passive = End(two, self.loop, "passive", markers=markers)
        for end in (self.active, self.passive):
            end.receives(16, size)
        self.passive.device.cm.listen(PORT, self._requested)

    def _requested(self, request: ConnectionRequest) -> None:
        request.accept(self.passive.qp, b"welcome", self.passive.handle)

    def connect(self) -> None:
        """Makes the connection."""
        active, passive = self.active, self.passive
        active.device.cm.connect(passive.device.address, PORT, active.qp, b"hello", active.handle)
        self.until(lambda: active.qp.state is QpState.RTS and passive.qp.state is QpState.RTS)

    def until(self, condition: object) -> None:
        """Lets things happen until it is so."""
        assert callable(condition)
        assert self.loop.run_until(condition, WAIT_S)

    def do(self, end: End, request: SendRequest, *, arrives: End | None = None) -> None:
        """One request, until it is completed here, and has made a completion at the other end if it does that."""
        before = len(end.completions)
        there = len(arrives.completions) if arrives is not None else 0
        end.qp.post_send(request)
        self.until(lambda: len(end.completions) > before and (arrives is None or len(arrives.completions) > there))

    def disconnect(self) -> None:
        """Ends the connection in order."""
        assert self.active.connection is not None
        self.active.connection.disconnect()
        ends = (self.active, self.passive)
        self.until(lambda: all(any(isinstance(one, Disconnected) for one in end.events) for end in ends))
        self.until(lambda: not self.active.device.taps.wires and not self.passive.device.taps.wires)

    def close(self) -> None:
        """Gives everything back."""
        self.active.device.close()
        self.passive.device.close()
        self.loop.close()
