"""The software RNIC as the conformance suite wants it: two devices on addresses of the loopback interface."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from itertools import count

from sidestep.loop import Loop
from sidestep.rdma.iwarp.device import ATTRIBUTES, IwarpDevice
from sidestep.rdma.iwarp.settings import IwarpSettings
from sidestep.rdma.verbs import Device, DeviceAttributes

_numbers = count()
QUIET_S = 0.005  # on the loopback interface a segment is there at once, but for what a busy machine puts off
QUIET_TURNS = 4
WAIT_S = 20.0


def addresses() -> tuple[str, str, str]:
    """Three that nobody else uses: each has all ports to itself."""
    number = (os.getpid() % 4095 + 1) << 10 | next(_numbers) % 1024
    net = number << 2
    one, two, three = (socket.inet_ntoa((127 << 24 | net | host).to_bytes(4)) for host in (1, 2, 3))
    return one, two, three


class IwarpUnderTest:
    """Two devices on one loop, and an address where TCP answers and nobody else."""

    def __init__(
        self, settings: IwarpSettings, attributes: DeviceAttributes = ATTRIBUTES, loop: Loop | None = None
    ) -> None:
        self.loop = loop or Loop()
        one, two, three = addresses()
        self.active: Device = IwarpDevice(one, self.loop, settings, name="active", attributes=attributes)
        self.passive: Device = IwarpDevice(two, self.loop, settings, name="passive", attributes=attributes)
        self.nowhere: str | None = three
        self._silent = socket.create_server((three, 5001))

    def run(self) -> None:
        quiet = 0
        while quiet < QUIET_TURNS:
            quiet = 0 if self.loop.turn(QUIET_S) else quiet + 1

    def run_until(self, condition: Callable[[], bool]) -> bool:
        return self.loop.run_until(condition, WAIT_S)

    def close(self) -> None:
        self.active.close()
        self.passive.close()
        self._silent.close()
        self.loop.close()
