"""A loopback device: what belongs to it, and what becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidestep.rdma.loopback.manager import LoopbackManager
from sidestep.rdma.loopback.qp import LoopbackQueuePair
from sidestep.rdma.soft.device import SoftDevice
from sidestep.rdma.verbs import AsyncEvent, EventKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidestep.rdma.loopback.fabric import Fabric
    from sidestep.rdma.soft.memory import QpInit
    from sidestep.rdma.verbs import DeviceAttributes


class LoopbackDevice(SoftDevice):
    """One device of a fabric. `Fabric.device` makes it."""

    cm: LoopbackManager

    def __init__(self, fabric: Fabric, name: str, attributes: DeviceAttributes) -> None:
        super().__init__(name, name, attributes, fabric.notices, fabric.key_rng)
        self.fabric = fabric
        self.port_active = True
        self.cm = LoopbackManager(self)
        self._bytes_until = 0.0  # when the last byte given to the port has left

    def close(self) -> None:
        if not self.closed:
            super().close()
            del self.fabric.devices[self.name]

    def end_connections(self) -> None:
        self.cm.close()

    # For what belongs to the device.

    def make_qp(self, init: QpInit) -> LoopbackQueuePair:
        return LoopbackQueuePair(self, init)

    def registration_fails(self) -> bool:
        faults = self.fabric.faults
        if faults is None:
            return False
        if faults.fail_registrations_next > 0:
            faults.fail_registrations_next -= 1
            return True
        return self.fabric.chance(faults.fail_registration)

    def registration_due(self, finish: Callable[[], None]) -> None:
        """After `Timing.registration_s`."""
        fabric = self.fabric
        fabric.arrive(fabric.now + fabric.draw(fabric.timing.registration_s), finish)

    def departs(self, size: int) -> float:
        """When bytes that are sent now have left the port: it sends one message after the other."""
        fabric = self.fabric
        if not fabric.timing.bandwidth:
            return fabric.now
        self._bytes_until = max(fabric.now, self._bytes_until) + size / fabric.timing.bandwidth
        return self._bytes_until

    def set_port(self, *, active: bool) -> None:
        if active == self.port_active:
            return
        self.port_active = active
        self.tell(AsyncEvent(EventKind.PORT_ACTIVE if active else EventKind.PORT_ERROR, self))
        if not active:
            for qp in self._queue_pairs():
                qp.expect_silence()

    def die(self) -> None:
        self.port_active = False  # without a word: who is dead tells nothing of ports
        for qp in self._queue_pairs():
            qp.modify_to_error()
        self.tell(AsyncEvent(EventKind.DEVICE_FATAL, self, "the device failed"))

    def _queue_pairs(self) -> list[LoopbackQueuePair]:
        return [qp for qp in self.fabric.queue_pairs.values() if qp.device is self]
