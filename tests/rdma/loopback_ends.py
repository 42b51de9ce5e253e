"""Two connected ends on a loopback fabric, and everything that was told to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from sidestep.rdma.cm import ConnectionEvent, ConnectionRequest
from sidestep.rdma.loopback import Fabric, LoopbackDevice
from sidestep.rdma.loopback.manager import LoopbackConnection
from sidestep.rdma.loopback.qp import LoopbackQueuePair
from sidestep.rdma.verbs import AsyncEvent, DeviceAttributes, MemoryRegion, ProtectionDomain, QpCapabilities
from sidestep.rdma.work import Access, Completion, Opcode, Receive

SERVICE = 0x1_1389
ALL = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ


@dataclass
class End:
    """One end; its queues have handlers, so `fabric.run` fills the lists."""

    device: LoopbackDevice
    domain: ProtectionDomain
    qp: LoopbackQueuePair
    done: list[Completion] = field(default_factory=list)
    told: list[ConnectionEvent] = field(default_factory=list)
    events: list[AsyncEvent] = field(default_factory=list)
    connection: LoopbackConnection | None = None

    @classmethod
    def of(cls, device: LoopbackDevice, capabilities: QpCapabilities | None = None) -> End:
        done: list[Completion] = []
        events: list[AsyncEvent] = []
        domain = device.alloc_pd()
        queue = device.create_cq(4096, done.extend)
        qp = domain.create_qp(queue, queue, capabilities, on_event=events.append)
        assert isinstance(qp, LoopbackQueuePair)
        return cls(device, domain, qp, done, events=events)

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.told]

    @property
    def received(self) -> list[Completion]:
        return [each for each in self.done if each.opcode is Opcode.RECEIVE]

    @property
    def sent(self) -> list[Completion]:
        return [each for each in self.done if each.opcode is not Opcode.RECEIVE]

    def memory(self, content: bytes | int, access: Access = ALL) -> MemoryRegion:
        return self.domain.register(bytearray(content), access)

    def room(self, wr_id: int, size: int = 64) -> MemoryRegion:
        region = self.memory(size)
        self.qp.post_recv(Receive(wr_id, (region.view,)))
        return region

    def disconnect(self) -> None:
        assert self.connection is not None
        self.connection.disconnect()


def ends(
    fabric: Fabric, capabilities: QpCapabilities | None = None, attributes: DeviceAttributes | None = None
) -> tuple[End, End]:
    """Two ends that are not connected; the second one accepts."""
    number = len(fabric.devices)
    active = End.of(fabric.device(f"device{number}", attributes), capabilities)
    passive = End.of(fabric.device(f"device{number + 1}", attributes), capabilities)

    def on_request(request: ConnectionRequest) -> None:
        connection = request.accept(passive.qp, b"", lambda _, event: passive.told.append(event))
        assert isinstance(connection, LoopbackConnection)
        passive.connection = connection

    passive.device.cm.listen(SERVICE, on_request)
    return active, passive


def connect(active: End, passive: End) -> None:
    """Asks; what comes of it needs a run of the fabric."""
    active.connection = active.device.cm.connect(
        passive.device.address, SERVICE, active.qp, b"", lambda _, event: active.told.append(event)
    )


def connected(
    fabric: Fabric, capabilities: QpCapabilities | None = None, attributes: DeviceAttributes | None = None
) -> tuple[End, End]:
    active, passive = ends(fabric, capabilities, attributes)
    connect(active, passive)
    fabric.run()
    assert (active.kinds, passive.kinds) == (["Established"], ["Established"])
    return active, passive
