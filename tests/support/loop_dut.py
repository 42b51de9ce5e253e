"""Devices on addresses of the loopback interface, as the conformance suite wants them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from itertools import count

from sidestep.loop import Loop
from sidestep.rdma.verbs import Device

_numbers = count()
QUIET_S = 0.005  # on the loopback interface a packet is there at once, but for what a busy machine puts off
QUIET_TURNS = 4
WAIT_S = 20.0


def addresses() -> tuple[str, str, str]:
    """Three that nobody else uses: each has all ports to itself."""
    number = (os.getpid() % 4095 + 1) << 10 | next(_numbers) % 1024
    one, two, three = (socket.inet_ntoa((127 << 24 | number << 2 | host).to_bytes(4)) for host in (1, 2, 3))
    return one, two, three


class LoopUnderTest:
    """Two devices on one loop, and an address where nobody answers."""

    active: Device
    passive: Device

    def __init__(self, nowhere: str, loop: Loop | None = None) -> None:
        self.loop = loop or Loop()
        self.nowhere: str | None = nowhere

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
