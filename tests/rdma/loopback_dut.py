"""The loopback device as the conformance suite wants it."""

from __future__ import annotations

from collections.abc import Callable

from sidestep.rdma.loopback import Fabric
from sidestep.rdma.verbs import Device, DeviceAttributes


class LoopbackUnderTest:
    """Two devices of a fabric."""

    nowhere: str | None = "nowhere"

    def __init__(self, fabric: Fabric, attributes: DeviceAttributes | None = None) -> None:
        self.fabric = fabric
        self.active: Device = fabric.device("active", attributes)
        self.passive: Device = fabric.device("passive", attributes)

    def run(self) -> None:
        self.fabric.run()

    def run_until(self, condition: Callable[[], bool]) -> bool:
        return self.fabric.run_until(condition)

    def close(self) -> None:
        self.active.close()
        self.passive.close()
