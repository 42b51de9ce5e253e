"""What a check works with: two devices, connections between them, and a way to say what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from sidestep.errors import SidestepError
from sidestep.rdma.cm import ConnectionRequest, Established, Rejected, Unreachable
from sidestep.rdma.verbs import AsyncEvent, EventKind, QpCapabilities, QpState
from sidestep.rdma.work import Access, Opcode, RdmaRead, RdmaWrite, Receive, RKey, Send, Status

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from sidestep.rdma.cm import Connection, ConnectionEvent, Listener
    from sidestep.rdma.conformance.needs import Need, Offer
    from sidestep.rdma.verbs import (
        CompletionQueue,
        Device,
        MemoryRegion,
        ProtectionDomain,
        QueuePair,
        SharedReceiveQueue,
    )
    from sidestep.rdma.work import Completion

READ: Final = Access.REMOTE_READ
WRITE: Final = Access.LOCAL_WRITE | Access.REMOTE_WRITE
LOCAL: Final = Access.LOCAL_WRITE
ALL: Final = WRITE | READ
_E = TypeVar("_E", bound=Exception)


class Violation(AssertionError):
    """The device broke a rule."""


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, and the code that looks whether a device keeps it."""

    name: str
    group: str
    rule: str
    clause: str  # where the rule comes from
    body: Callable[[Bench], None]
    needs: tuple[Need, ...] = ()

    def __str__(self) -> str:
        return self.name

    def why_not(self, offer: Offer) -> str | None:
        """The reason why it does not apply to devices that promise this; None if it does."""
        return next((need.why_not for need in self.needs if not need.met_by(offer)), None)


CHECKS: Final[list[Check]] = []


def check(clause: str, needs: tuple[Need, ...] = ()) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Adds a function to the list; the first line of its docstring is the rule."""

    def add(body: Callable[[Bench], None]) -> Callable[[Bench], None]:
        rule = (body.__doc__ or "").strip().splitlines()[0]
        CHECKS.append(Check(body.__name__, body.__module__.rpartition(".")[2], rule, clause, body, needs))
        return body

    return add


class DeviceUnderTest(Protocol):
    """Two devices that reach each other, and how their time goes on. Each check gets new ones."""

    active: Device  # connects
    passive: Device  # listens
    nowhere: str | None  # an address where nobody answers; None: that is not tried

    def run(self) -> None:
        """Lets everything happen that was begun: afterwards nothing is on its way, completed or not."""

    def run_until(self, condition: Callable[[], bool]) -> bool:
        """Lets things happen, timeouts too, until something is so; False if it does not become so."""

    def close(self) -> None:
        """Ends both devices."""


@dataclass(slots=True)
class Side:
    """One end of a connection, with everything that was told to it, in order."""

    device: Device
    domain: ProtectionDomain
    send_cq: CompletionQueue
    recv_cq: CompletionQueue
    qp: QueuePair
    connection: Connection | None = None
    cm_events: list[ConnectionEvent] = field(default_factory=list)
    events: list[AsyncEvent] = field(default_factory=list)
    handled: bool = False  # the completion queues have a handler
    log: list[object] = field(default_factory=list)  # connection events and batches of completions, as they came
    batches: list[list[Completion]] = field(default_factory=list)  # of queues with a handler
    taken: list[Completion] = field(default_factory=list)  # out of queues that are polled

    def on_cm(self, connection: Connection, event: ConnectionEvent) -> None:
        self.connection = connection
        self.cm_events.append(event)
        self.log.append(event)

    def on_completions(self, batch: list[Completion]) -> None:
        self.batches.append(batch)
        self.log.append(batch)

    def completions(self) -> list[Completion]:
        """All completions up to now, in order; those of the send queue before those of the receive queue."""
        for queue in (self.send_cq, self.recv_cq):
            if not self.handled:
                while found := queue.poll(16):
                    self.taken += found
        return self.taken + [each for batch in self.batches for each in batch]

    def of(self, *opcodes: Opcode) -> list[Completion]:
        """Completions of some kinds."""
        return [each for each in self.completions() if each.opcode in opcodes]

    @property
    def sent(self) -> list[Completion]:
        return [each for each in self.completions() if each.opcode is not Opcode.RECEIVE]

    @property
    def received(self) -> list[Completion]:
        return self.of(Opcode.RECEIVE)

    def memory(self, content: Buffer | int, access: Access | None = None) -> MemoryRegion:
        """Registered memory with this content, or so many zeros; unless told otherwise an RDMA Read may fill it."""
        if access is None:
            access = WRITE if self.device.attributes.read_sink_remote_write else LOCAL
        return self.domain.register(bytearray(content), access)

    def post_recv(self, wr_id: int, size: int) -> MemoryRegion:
        region = self.memory(size)
        self.qp.post_recv(Receive(wr_id, (region.view,)))
        return region

    def post_recvs(self, count: int, size: int = 8) -> None:
        for wr_id in range(count):
            self.post_recv(wr_id, size)

    def disconnect(self) -> None:
        assert self.connection is not None
        self.connection.disconnect()

    def send(self, wr_id: int, content: bytes, *, signaled: bool = True, solicited: bool = False) -> None:
        region = self.memory(content) if content else None
        self.qp.post_send(Send(wr_id, (region.view,) if region else (), signaled, solicited))


class Bench:
    """Two devices on a bench, and what checks do with them again and again."""

    SERVICE: Final = 0x0000_0000_0001_1389  # SDP, port 5001

    def __init__(self, dut: DeviceUnderTest) -> None:
        self.dut = dut
        self.active = dut.active
        self.passive = dut.passive

    # Saying what is wrong.

    def expect(self, condition: bool, rule: str, found: object = None) -> None:
        """Says that a rule is broken, unless it is kept."""
        if not condition:
            raise Violation(rule if found is None else f"{rule}; found: {found}")

    def equal(self, found: object, wanted: object, rule: str) -> None:
        """Says that a rule is broken, unless what was found is what was wanted."""
        if found != wanted:
            raise Violation(f"{rule}; wanted {wanted}, found {found}")

    def refused(self, error: type[_E], call: Callable[[], object], rule: str) -> _E:
        """Says that a rule is broken, unless the call raises this error."""
        try:
            call()
        except error as raised:
            return raised
        except SidestepError as raised:
            raise Violation(f"{rule}; wanted {error.__name__}, got {type(raised).__name__}: {raised}") from raised
        raise Violation(f"{rule}; nothing was raised")

    def eventually(self, condition: Callable[[], bool], rule: str) -> None:
        """Says that a rule is broken, unless something becomes so."""
        if not self.dut.run_until(condition):
            raise Violation(f"{rule}: it did not happen")

    # Making things.

    def side(
        self, device: Device, capabilities: QpCapabilities | None = None, *, handled: bool = False,
        domain: ProtectionDomain | None = None, capacity: int = 1024, remote_access: Access | None = None,
        like: Side | None = None, srq: SharedReceiveQueue | None = None,
    ) -> Side:  # fmt: skip
        """A queue pair with its surroundings; `like` gives domain and completion queues of another one."""
        side: Side
        domain = domain or (like.domain if like else device.alloc_pd())
        if like is not None:
            send_cq, recv_cq = like.send_cq, like.recv_cq
        else:
            handler = (lambda batch: side.on_completions(batch)) if handled else None
            send_cq, recv_cq = device.create_cq(capacity, handler), device.create_cq(capacity, handler)
        events: list[AsyncEvent] = []
        qp = domain.create_qp(
            send_cq, recv_cq, capabilities, remote_access=remote_access, srq=srq, on_event=events.append
        )
        side = Side(device, domain, send_cq, recv_cq, qp, events=events, handled=handled)
        return side

    def pair(
        self,
        active: Side | None = None,
        passive: Side | None = None,
        *,
        capabilities: QpCapabilities | None = None,
        handled: bool = False,
        service_id: int = SERVICE,
    ) -> tuple[Side, Side]:
        """Two connected queue pairs: the one that asked, the one that was asked."""
        asks = active or self.side(self.active, capabilities, handled=handled)
        asked = passive or self.side(self.passive, capabilities, handled=handled)
        listener = self.listen(asked, service_id=service_id)
        self.connect(asks, service_id=service_id)
        self.eventually(
            lambda: bool(asks.cm_events) and bool(asked.cm_events), "a connection that both ends want is made"
        )
        for side in (asks, asked):
            self.expect(isinstance(side.cm_events[0], Established), "both ends are told Established", side.cm_events)
            self.equal(side.qp.state, QpState.RTS, "a queue pair of a connection is in RTS")
        listener.close()
        self.dut.run()
        return asks, asked

    def listen(self, side: Side, reply: bytes = b"", *, service_id: int = SERVICE) -> Listener:
        def on_request(request: ConnectionRequest) -> None:
            side.connection = request.accept(side.qp, reply, side.on_cm)

        return side.device.cm.listen(service_id, on_request)

    def connect(
        self,
        side: Side,
        private_data: bytes = b"",
        *,
        service_id: int = SERVICE,
        address: str | None = None,
        check_reply: Callable[[bytes], bool] | None = None,
    ) -> Connection:
        side.connection = side.device.cm.connect(
            address or self.passive.address, service_id, side.qp, private_data, side.on_cm, check_reply=check_reply
        )
        return side.connection

    def padded(self, private_data: bytes, size: int) -> bytes:
        """Private data as it must arrive."""
        return private_data.ljust(size, b"\0") if self.passive.attributes.private_data_padded else private_data

    # Rules that many checks ask for.

    def all_ok(self, side: Side, rule: str) -> None:
        failed = [each for each in side.completions() if each.status is not Status.SUCCESS]
        self.expect(not failed, rule, failed)

    def is_refused(
        self, asks: Side, asked: Side, wr_id: int, status: Status, event: EventKind | None, rule: str
    ) -> None:
        """A request was refused by the other end: its status, or at least an end of the connection, and no success.

        A device that completes requests when its own transport has them (iWARP) cannot give the status, but must not
        leave the queue pair as if nothing had been.
        """
        self.eventually(lambda: asks.qp.state is QpState.ERROR, f"{rule}: the queue pair that asked is in ERROR")
        if asks.device.attributes.acknowledged:
            mine = [each for each in asks.sent if each.wr_id == wr_id]
            self.equal([each.status for each in mine], [status], f"{rule}: the request tells it")
        if event is not None and asked.device.attributes.access_errors_reported:
            self.eventually(lambda: asked.qp.state is QpState.ERROR, f"{rule}: the one that was asked is too")
            if asked.device.attributes.acknowledged:
                self.dut.run()
                kinds = [each.kind for each in asked.events if each.kind is event]
                self.equal(kinds, [event], f"{rule}: the end that was asked is told once")

    def write(self, side: Side, content: bytes, va: int, key: int) -> None:
        """A Write that succeeds, alone on its way; what it brought is placed."""
        before = len(side.sent)
        side.qp.post_send(RdmaWrite(70, (side.memory(content).view,), va, RKey(key)))
        self.eventually(lambda: len(side.sent) > before, "the Write completes")
        self.dut.run()
        self.equal(side.sent[-1].status, Status.SUCCESS, "the Write succeeds")

    def write_refused(self, target: MemoryRegion, sides: tuple[Side, Side], va: int, key: int, rule: str) -> None:
        """A Write of four bytes is refused, and the memory is as it was."""
        active, passive = sides
        before = bytes(target.view)
        word = active.memory(b"EVIL")
        active.qp.post_send(RdmaWrite(66, (word.view,), va, RKey(key)))
        self.is_refused(active, passive, 66, Status.REMOTE_ACCESS_ERROR, EventKind.QP_ACCESS_ERROR, rule)
        self.equal(bytes(target.view), before, f"{rule}: nothing is placed")

    def read_refused(self, sides: tuple[Side, Side], va: int, key: int, rule: str) -> None:
        active, passive = sides
        sink = active.memory(4)
        active.qp.post_send(RdmaRead(66, (sink.view,), va, RKey(key)))
        self.is_refused(active, passive, 66, Status.REMOTE_ACCESS_ERROR, EventKind.QP_ACCESS_ERROR, rule)
        self.equal(bytes(sink.view), bytes(4), f"{rule}: nothing is read")


def refusals(events: list[ConnectionEvent]) -> list[int | None]:
    """The reasons of rejections among events; None for what never was answered."""
    return [
        each.reason if isinstance(each, Rejected) else None
        for each in events
        if isinstance(each, Rejected | Unreachable)
    ]
