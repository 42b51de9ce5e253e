"""SDP, the consumer that devices here are made for, runs over the software HCA, by InfiniBand's own private data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from random import Random

import pytest
from common import pattern
from endpoint_world import (
    End,
    addresses,
    done,
    eager,
    pipelined,
    read_zcopy,
    take,
)

from sidestep.rdma.roce.schedule import Delay
from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.wire import Wire, WireDevice, WireFaults
from sidestep.sdp.requests import SdpEventKind
from sidestep.sdp.settings import Carrier, SdpSettings
from sidestep.sdp.stack import Stack
from sidestep.sdp.strategy import Strategy

LEFT, RIGHT, PORT = "10.0.0.1", "10.0.0.2", 5001
SIZE = 300_000


def stack_on(device: WireDevice, strategy: Callable[[], Strategy]) -> Stack:
    timer: Delay | None = None

    def wake_at(at: float) -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
        timer = device.delays.call_later(max(0.0, at - device.wire.now), stack.handle_timeouts)
        device.wake()

    settings = SdpSettings(strategy=strategy, carrier=Carrier.INFINIBAND)
    stack = Stack(device, lambda: device.wire.now, settings, wake_at=wake_at)
    return stack


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [eager, read_zcopy, pipelined])
@pytest.mark.parametrize("faults", [None, WireFaults(loss=0.01, duplicate=0.01, late=0.01)], ids=["perfect", "rough"])
def test_bytes_both_ways(strategy: Callable[[], Strategy], faults: WireFaults | None) -> None:
    wire = Wire(Random(5), faults)
    settings = RoceSettings(mtu=1024)
    stacks = [stack_on(wire.device(address, settings), strategy) for address in (LEFT, RIGHT)]
    left, right = End(), End()
    listener = stacks[1].listen(PORT, partial(take, right))
    left.stream = stacks[0].connect(RIGHT, addresses(), left.tell)
    established = SdpEventKind.ESTABLISHED
    assert wire.run_until(lambda: left.got(established) and right.got(established))
    listener.close()
    assert right.to.connection.addresses is not None
    assert right.to.connection.addresses.remote == ip_address(LEFT)
    rooms = [bytearray(SIZE), bytearray(SIZE)]
    contents = [pattern(SIZE, 1), pattern(SIZE, 2)]
    receives = [end.to.receive(memoryview(room), waitall=True) for end, room in zip((right, left), rooms, strict=True)]
    for end, content in zip((left, right), contents, strict=True):
        end.to.send(memoryview(content))
    assert wire.run_until(done(*receives))
    assert [bytes(room) for room in rooms] == contents
    for stack in stacks:
        stack.close()
