"""One end of a stream without a socket: what it is fed is what arrived, what it makes is taken out of its `Outbound`.

Memory is that of a real device, so rights, bounds and keys are the real ones. What a queue pair would be told is kept
in `told`, in order.
"""

from __future__ import annotations

from collections import deque
from typing import Final, cast

from raw_iwarp import frame

from sidestep.native._framing import Inbound, Outbound
from sidestep.rdma.iwarp.ddp import ReadRequest, Segment
from sidestep.rdma.iwarp.device import IwarpDevice
from sidestep.rdma.iwarp.qp import IwarpQueuePair
from sidestep.rdma.iwarp.receiver import Fault, Receiver
from sidestep.rdma.iwarp.sender import Sender
from sidestep.rdma.iwarp.terminate import Condition, terminate_text
from sidestep.rdma.soft.memory import AccessRefusal
from sidestep.rdma.soft.qp import SoftQueuePair
from sidestep.rdma.verbs import MemoryRegion, ProtectionDomain
from sidestep.rdma.work import Access, Receive, RKey, Scatter, SendRequest, Status

ALL: Final = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
MULPDU: Final = 1400
GUARD: Final = 64  # bytes on either side of a region that are in none


class WireEnd:
    """One end, as its receiver and its sender see it."""

    def __init__(self, remote_access: Access = ALL) -> None:
        self.device = IwarpDevice("127.0.0.1")
        self.domain = self.device.alloc_pd()
        self.told: list[tuple[object, ...]] = []
        self.inbound = Inbound(crc=True, markers=False)
        self.outbound = Outbound(MULPDU, crc=True, markers=False)
        self.qp = self.queue_pair()
        self.receives: deque[Receive] = deque()
        queue_pair = cast("IwarpQueuePair", self)  # what they ask and tell is below
        self.sender = Sender(self.outbound, queue_pair, self.qp.sink_stag)
        self.sender.held = False
        self.sender.resources = self.sender.depth = 2
        self.receiver = Receiver(queue_pair, int(remote_access), self.sender.reads, self.sender.tally)
        self.buffers: list[bytearray] = []

    def close(self) -> None:
        self.device.close()

    def queue_pair(self, domain: ProtectionDomain | None = None) -> IwarpQueuePair:
        domain = domain or self.domain
        qp = domain.create_qp(self.device.create_cq(8), self.device.create_cq(8))
        assert isinstance(qp, IwarpQueuePair)
        return qp

    def region(self, size: int, access: Access = ALL, domain: ProtectionDomain | None = None) -> MemoryRegion:
        """Zeros, with bytes on either side that nobody may touch."""
        whole = bytearray(size + 2 * GUARD)
        self.buffers.append(whole)
        return (domain or self.domain).register(memoryview(whole)[GUARD : GUARD + size], access)

    def content(self) -> list[bytes]:
        """All memory, guards included."""
        return [bytes(each) for each in self.buffers]

    def post_recv(self, wr_id: int, size: int) -> MemoryRegion:
        region = self.region(size, Access.LOCAL_WRITE)
        self.receives.append(Receive(wr_id, (region.view,)))
        return region

    # The wire.

    def feed(self, *pieces: bytes | Segment) -> Fault | None:
        """Bytes, or segments without a fault in them."""
        for piece in pieces:
            view = memoryview(piece if isinstance(piece, bytes) else frame(piece))
            while view and self.receiver.take_all(self.inbound) is None:
                view = view[self.inbound.feed(view) :]
            self.receiver.take_all(self.inbound)
        return self.receiver.fault

    def taken(self, limit: int = 1 << 30) -> bytes:
        """What its sender has made, as if the transport had taken it."""
        made = bytearray()
        while True:
            self.sender.pump()
            piece = self.outbound.take(limit - len(made))
            if not piece:
                return bytes(made)
            made += piece
            self.sender.written()

    # What receiver and sender ask and tell.

    def grant(self, key: int, va: int, length: int, right: int) -> memoryview | AccessRefusal:
        return self.qp.grant(key, va, length, right)

    @property
    def receives_left(self) -> int:
        return len(self.receives)

    def take_receive(self) -> Receive:
        return self.receives.popleft()

    def may_receive(self, scatter: Scatter) -> bool:
        return self.qp.may_receive(scatter)

    def may_sink(self, scatter: Scatter) -> bool:
        return self.qp.may_sink(scatter)

    def may_read(self, gather: tuple[memoryview | bytes, ...]) -> bool:
        return self.qp.may_read(gather)

    def invalidate(self, key: int, *, only_check: bool = False) -> Condition | None:
        return self.qp.invalidate(key, only_check=only_check)

    def heard(self) -> None:
        self.told.append(("heard",))
        self.sender.held = False

    def received(self, receive: Receive, length: int, solicited: bool, invalidated: RKey | None) -> None:
        content = b"".join(receive.scatter)[:length]
        self.told.append(("received", receive.wr_id, content, solicited, invalidated))

    def respond(self, request: ReadRequest, header: bytes) -> bool:
        self.told.append(("asked", request, header[:2]))
        return self.sender.respond(request, header)

    def read_done(self) -> None:
        self.told.append(("read done", self.sender.reads[0].arrived))
        self.sender.read_done()

    def terminated(self, payload: bytes) -> None:
        self.told.append(("terminated", terminate_text(payload)))

    def begin(self, request: SendRequest) -> Status:
        self.qp.initiator_depth = self.sender.depth
        return SoftQueuePair.begin(self.qp, request)

    def completed(self, request: SendRequest, byte_len: int) -> None:
        self.told.append(("completed", request.wr_id, byte_len))

    def failed(self, request: SendRequest, status: Status) -> None:
        self.told.append(("failed", request.wr_id, status))

    def answer_failed(self, fault: Fault) -> None:
        self.told.append(("answer failed", fault))
        self.sender.take_unfinished()
