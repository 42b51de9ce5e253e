"""The software HCA as the conformance suite wants it: two devices on a wire in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from sidestep.rdma.roce.device import ATTRIBUTES
from sidestep.rdma.roce.settings import RoceSettings
from sidestep.rdma.roce.wire import Wire, WireFaults
from sidestep.rdma.verbs import Device, DeviceAttributes

SETTLE_S = 10.0  # virtual, on a wire that loses something: for all that is lost to be sent again, often enough


class WireUnderTest:
    """Two devices, and an address where nobody is."""

    nowhere: str | None = "10.0.0.3"

    def __init__(
        self, seed: int, faults: WireFaults | None = None, settings: RoceSettings | None = None,
        attributes: DeviceAttributes = ATTRIBUTES, addresses: tuple[str, str] = ("10.0.0.1", "10.0.0.2"),
    ) -> None:  # fmt: skip
        self.wire = Wire(Random(seed), faults, settle_s=SETTLE_S if faults else 0.0)
        self.active: Device = self.wire.device(addresses[0], settings, attributes)
        self.passive: Device = self.wire.device(addresses[1], settings, attributes)

    def run(self) -> None:
        self.wire.run()

    def run_until(self, condition: Callable[[], bool]) -> bool:
        return self.wire.run_until(condition)

    def close(self) -> None:
        self.active.close()
        self.passive.close()
