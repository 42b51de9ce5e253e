"""A queue pair with its surroundings on any device, and everything that was told about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self

from sidestep.rdma.cm import Connection, ConnectionEvent
from sidestep.rdma.verbs import AsyncEvent, Device, MemoryRegion, ProtectionDomain, QpCapabilities, QueuePair
from sidestep.rdma.work import Access, Completion, Opcode, Receive

ALL: Final = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ


@dataclass
class VerbsEnd:
    """Its queues have handlers: driving the device fills the lists."""

    device: Device
    domain: ProtectionDomain
    qp: QueuePair
    done: list[Completion] = field(default_factory=list)
    told: list[ConnectionEvent] = field(default_factory=list)
    events: list[AsyncEvent] = field(default_factory=list)
    connection: Connection | None = None

    @classmethod
    def of(cls, device: Device, capabilities: QpCapabilities | None = None) -> Self:
        done: list[Completion] = []
        events: list[AsyncEvent] = []
        domain = device.alloc_pd()
        queue = device.create_cq(4096, done.extend)
        qp = domain.create_qp(queue, queue, capabilities, on_event=events.append)
        return cls(device, domain, qp, done, events=events)

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.told]

    def memory(self, content: bytes | int, access: Access = ALL) -> MemoryRegion:
        return self.domain.register(bytearray(content), access)

    def room(self, size: int = 64, wr_id: int = 0) -> MemoryRegion:
        """A receive."""
        region = self.memory(size)
        self.qp.post_recv(Receive(wr_id, (region.view,)))
        return region

    def on_cm(self, connection: Connection, event: ConnectionEvent) -> None:
        """Handler of the connection."""
        self.connection = connection
        self.told.append(event)


class DrivenEnd(VerbsEnd):
    """One whose device moves when a test says so: its lists are looked at afterwards."""

    @property
    def received(self) -> list[Completion]:
        return [each for each in self.done if each.opcode is Opcode.RECEIVE]

    @property
    def sent(self) -> list[Completion]:
        return [each for each in self.done if each.opcode is not Opcode.RECEIVE]
