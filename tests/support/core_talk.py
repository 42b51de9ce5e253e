"""A conversation of the real core over the loopback device, seen by an observer."""

from __future__ import annotations

import random
from collections.abc import Callable
from ipaddress import IPv4Address

from sidestep.rdma.loopback import CmMessage, Fabric, Observer, Placed, QpMessage
from sidestep.rdma.verbs import DeviceAttributes
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.requests import StreamEvent, StreamReceive, StreamSend
from sidestep.sdp.settings import Addresses, SdpSettings
from sidestep.sdp.stack import Stack
from sidestep.sdp.strategy import Strategy
from sidestep.sdp.wire import Mode

ADDRESSES = Addresses(IPv4Address("10.0.0.1"), 40000, IPv4Address("10.0.0.2"), 5001)
BUFFER_SIZE = 4096  # bytes of a private buffer; smaller than what is offered


class Several:
    """Observers, one after the other."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def qp_message(self, message: QpMessage) -> None:
        for one in self._observers:
            one.qp_message(message)

    def cm_message(self, message: CmMessage) -> None:
        for one in self._observers:
            one.cm_message(message)

    def placed(self, placed: Placed) -> None:
        for one in self._observers:
            one.placed(placed)


def talk(observer: Observer, *, seed: int = 0) -> None:
    """Bcopy, both kinds of Zcopy, an urgent byte, and a graceful end; what arrives is compared."""
    fabric = Fabric(random.Random(seed), observer=observer)
    settings = SdpSettings(
        receive_size=BUFFER_SIZE,
        urgent_inline=True,
        strategy=lambda: Strategy(bcopy_max=2048, read_min=1, sink_min=8192, payload=64),
    )
    attributes = DeviceAttributes(checks_local_memory=False)  # as of a device made of software
    stacks = [Stack(fabric.device(name, attributes), lambda: fabric.now, settings) for name in "ab"]
    accepted: list[SdpStream] = []
    received = {"a": bytearray(), "b": bytearray()}

    def told_to(name: str) -> Callable[[SdpStream, StreamEvent], None]:
        def told(stream: SdpStream, event: StreamEvent) -> None:
            if isinstance(event, StreamReceive):
                received[name] += event.view[: event.filled]
                if event.error is None and event.filled:
                    stream.receive(memoryview(bytearray(40_000)))
            elif isinstance(event, StreamSend):
                assert event.error is None

        return told

    def take(stream: SdpStream) -> None:
        stream.tell = told_to("b")
        accepted.append(stream)

    stacks[1].listen(5001, take)
    left = stacks[0].connect("b", ADDRESSES, told_to("a"))
    fabric.run()
    right = accepted[0]
    sent = {"a": bytearray(), "b": bytearray()}
    generator = random.Random(seed)

    def send(name: str, size: int, *, urgent: bool = False) -> None:
        data = generator.randbytes(size)
        sent["b" if name == "a" else "a"] += data
        (left if name == "a" else right).send(memoryview(data), urgent=urgent)

    for stream in (left, right):
        stream.receive(memoryview(bytearray(40_000)))
    for size in (1, 100, 2048, 3000):  # the last one by Read Zcopy, Combined
        send("a", size)
        send("b", size + 1)
        fabric.run()
    send("a", 3, urgent=True)
    fabric.run()
    left.connection.want_send_mode(Mode.PIPELINED, fabric.now)
    left.run()
    fabric.run()
    for _ in range(4):  # by Write Zcopy, once the other end has offered room
        send("a", 20_000)
        fabric.run()
    send("b", 2000)
    left.shutdown_write()
    fabric.run()
    right.shutdown_write()
    fabric.run()
    assert received == sent
