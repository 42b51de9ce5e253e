"""The software RNIC as the conformance suite wants it: two devices on addresses of the loopback interface."""

from __future__ import annotations

import socket

from loop_dut import LoopUnderTest, addresses

from sidestep.loop import Loop
from sidestep.rdma.iwarp.device import ATTRIBUTES, IwarpDevice, IwarpSettings
from sidestep.rdma.verbs import DeviceAttributes


class IwarpUnderTest(LoopUnderTest):
    """Where nobody answers TCP does, and nobody else."""

    def __init__(
        self, settings: IwarpSettings, attributes: DeviceAttributes = ATTRIBUTES, loop: Loop | None = None
    ) -> None:
        one, two, three = addresses()
        super().__init__(three, loop)
        self.active = IwarpDevice(one, self.loop, settings, name="active", attributes=attributes)
        self.passive = IwarpDevice(two, self.loop, settings, name="passive", attributes=attributes)
        self._silent = socket.create_server((three, 5001))

    def close(self) -> None:
        self._silent.close()
        super().close()
