"""The software HCA as the conformance suite wants it: two devices on addresses of the loopback interface."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from itertools import count

from sidestep.loop import Loop
from sidestep.rdma.roce.device import ATTRIBUTES
from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.udp_link import UdpRoceDevice
from sidestep.rdma.verbs import Device, DeviceAttributes

_numbers = count()
QUIET_S = 0.005  # on the loopback interface a datagram is there at once, but for what a busy machine puts off
QUIET_TURNS = 4
WAIT_S = 20.0
QUICK = RoceSettings(cm_timeout_code=14, ack_timeout_code=12, timewait_s=0.01, cm_retries=5)  # 67 and 17 ms


def addresses() -> tuple[str, str, str]:
    """Three that nobody else uses, in what is left of 127.0.0.0/8 by the tests of iWARP."""
    number = (os.getpid() % 4095 + 1) << 10 | next(_numbers) % 1024
    one, two, three = (socket.inet_ntoa((127 << 24 | number << 2 | host).to_bytes(4)) for host in (1, 2, 3))
    return one, two, three


class UdpUnderTest:
    """Two devices on one loop, and an address where nobody answers."""

    def __init__(self, settings: RoceSettings = QUICK, attributes: DeviceAttributes = ATTRIBUTES) -> None:
        self.loop = Loop()
        one, two, three = addresses()
        self.active: Device = UdpRoceDevice(one, self.loop, settings, name="active", attributes=attributes)
        self.passive: Device = UdpRoceDevice(two, self.loop, settings, name="passive", attributes=attributes)
        self.nowhere: str | None = three

    def run(self) -> None:
        quiet = 0
        while quiet < QUIET_TURNS:
            quiet = 0 if self.loop.turn(QUIET_S) else quiet + 1

    def run_until(self, condition: Callable[[], bool]) -> bool:
        return self.loop.run_until(condition, WAIT_S)

    def close(self) -> None:
        self.active.close()
        self.passive.close()
        self.loop.close()
