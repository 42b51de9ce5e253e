"""Two hosts on a loopback fabric, sockets on them, and an observer that knows where bytes lie."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from random import Random
from typing import Any

from virtual_time import OneHost, VirtualTime

from sidestep import limits
from sidestep.api.driver import Driver
from sidestep.api.sockets import SdpSocket
from sidestep.rdma.address import buffer_address
from sidestep.rdma.loopback import CmMessage, Fabric, Faults, Kind, LoopbackDevice, Placed, QpMessage
from sidestep.rdma.loopback.qp import LoopbackQueuePair
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.host import Host
from sidestep.sdp.requests import SdpEvent, SdpEventKind, StreamEvent, StreamReceive, StreamSend
from sidestep.sdp.settings import Addresses, SdpSettings
from sidestep.sdp.stack import stack_on
from sidestep.sdp.strategy import Strategy
from sidestep.sdp.wire import Mid

LEFT, RIGHT = "10.0.0.1", "10.0.0.2"
PORT = 5001
LENIENT = DeviceAttributes(checks_local_memory=False)
CHECKING = DeviceAttributes(checks_local_memory=True)


@dataclass(frozen=True)
class Range:
    """Bytes of this process's memory."""

    start: int
    length: int

    @classmethod
    def of(cls, buffer: Any) -> Range:
        view = memoryview(buffer)
        return cls(buffer_address(view), view.nbytes)

    def holds(self, other: Range) -> bool:
        return self.start <= other.start and other.start + other.length <= self.start + self.length


@dataclass
class Watch:
    """An observer that keeps where the bytes lay, not what they were."""

    placed_ranges: list[tuple[Kind, str, Range, Range]] = field(default_factory=list)  # kind, device, from, to
    gathered: list[tuple[Kind, str, list[Range], Mid | None]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # of those messages

    def qp_message(self, message: QpMessage) -> None:
        mid = None
        if message.kind is Kind.SEND and isinstance(message.payload[0], bytes):
            mid = Mid(message.payload[0][0])
        views = [part for part in message.payload if isinstance(part, memoryview)]
        self.sizes.append(message.length)
        self.gathered.append((message.kind, message.source, [Range.of(view) for view in views], mid))

    def cm_message(self, message: CmMessage) -> None:
        pass

    def placed(self, placed: Placed) -> None:
        source, target = Range(placed.source_address, placed.length), Range(placed.target_address, placed.length)
        self.placed_ranges.append((placed.kind, placed.target, source, target))

    def count(self, kind: Kind) -> int:
        return sum(each[0] is kind for each in self.gathered)

    def mids(self, source: str) -> list[Mid]:
        return [mid for _, device, _, mid in self.gathered if device == source and mid is not None]


class World:
    """Two devices, a stack and a host on each."""

    def __init__(
        self,
        *,
        seed: int = 7,
        attributes: DeviceAttributes = LENIENT,
        settings: SdpSettings | None = None,
        faults: Faults | None = None,
        watch: Watch | None = None,
        kick: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        self.watch = watch
        self.fabric = Fabric(Random(seed), faults=faults, observer=watch)
        self.driver = VirtualTime(self.fabric)
        self.devices = [self.fabric.device(name, attributes) for name in (LEFT, RIGHT)]
        settings = settings or SdpSettings(strategy=eager)
        self.stacks = [stack_on(self.fabric, device, settings, **options) for device in self.devices]
        self.left, self.right = (
            Host(stack, [name], kick=kick) for stack, name in zip(self.stacks, (LEFT, RIGHT), strict=True)
        )

    def settle(self) -> None:
        """Lets everything happen that is left to happen."""
        while self.fabric.step():
            pass

    def assert_nothing_left(self) -> None:
        """Queue pairs, regions and memory are all given back."""
        self.settle()
        assert self.fabric.queue_pairs == {}
        for host in (self.left, self.right):
            stack = host.stack
            assert stack.streams == {}
            assert stack.buffers.lent == 0
            assert stack.buffers.waiting == 0
            assert stack.next_deadline() is None
            assert host.ports_in_use == 0
            stack.close()
        for device in self.devices:
            assert_empty(device)


def assert_empty(device: LoopbackDevice) -> None:
    assert len(device.keys) == 0
    assert [domain for domain in device.domains if domain.regions or domain.queue_pairs] == []
    assert device.cm.connections == {}
    assert device.cm.requests == {}


@dataclass
class End:
    """A raw stream, and what it was told."""

    stream: SdpStream | None = None
    told: list[StreamEvent] = field(default_factory=list)

    def tell(self, stream: SdpStream, event: StreamEvent) -> None:
        self.told.append(event)

    def kinds(self) -> list[SdpEventKind]:
        return [event.kind for event in self.told if isinstance(event, SdpEvent)]

    def ended(self) -> list[StreamSend | StreamReceive]:
        return [event for event in self.told if not isinstance(event, SdpEvent)]

    def got(self, kind: SdpEventKind) -> bool:
        return kind in self.kinds()

    @property
    def to(self) -> SdpStream:
        assert self.stream is not None
        return self.stream


# --- sockets ---


def socket_on(host: Host, driver: Driver, address: str = "") -> SdpSocket:
    """One of the family of that address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return SdpSocket(family, driver=driver, hosts=OneHost(host))


def create_connection(
    host: Host,
    driver: Driver,
    address: tuple[str, int],
    timeout: float | None = None,
    source_address: tuple[str, int] | None = None,
) -> SdpSocket:
    made = socket_on(host, driver, address[0])
    try:
        made.settimeout(timeout)
        if source_address is not None:
            made.bind(source_address)
        made.connect(address)
    except BaseException:
        made.close()
        raise
    return made


def create_server(
    host: Host, driver: Driver, address: tuple[str, int], *, backlog: int = limits.RDMA_BACKLOG_DEFAULT
) -> SdpSocket:
    made = socket_on(host, driver, address[0])
    try:
        made.bind(address)
        made.listen(backlog)
    except BaseException:
        made.close()
        raise
    return made


# --- streams ---


def done(*requests: StreamSend | StreamReceive) -> Callable[[], bool]:
    """Whether all of them have ended."""
    return lambda: all(request.done for request in requests)


def take(end: End, stream: SdpStream) -> None:
    end.stream = stream
    stream.tell = end.tell


def join(world: World, *, settings: SdpSettings | None = None) -> tuple[End, End]:
    """A connection from left to right, raw."""
    left, right = End(), End()
    listener = world.stacks[1].listen(PORT, partial(take, right), settings=settings)
    left.stream = world.stacks[0].connect(RIGHT, addresses(), left.tell, settings)
    assert world.fabric.run_until(lambda: left.got(SdpEventKind.ESTABLISHED) and right.got(SdpEventKind.ESTABLISHED))
    listener.close()
    return left, right


def addresses(local_port: int = 40000, port: int = PORT) -> Addresses:
    return Addresses(ip_address(LEFT), local_port, ip_address(RIGHT), port)


def eager() -> Strategy:
    """What goes by RDMA does so at sizes that are handy for tests, whatever the defaults are."""
    return Strategy(bcopy_max=64 << 10, read_min=16 << 10, sink_min=64 << 10)


def read_zcopy() -> Strategy:
    """Everything that can goes by RDMA Read, in Combined mode."""
    return Strategy(bcopy_max=0, read_min=0, sink_min=None, transactions=False, pipelined=False)


def pipelined() -> Strategy:
    """Everything that can goes by RDMA, in Pipelined mode."""
    return Strategy(bcopy_max=0, read_min=0, sink_min=0)


def qp_of(end: End) -> LoopbackQueuePair:
    assert isinstance(end.to.qp, LoopbackQueuePair)
    return end.to.qp
