"""The devices that come with sidestep, as transports of the switch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sidestep import gain, limits
from sidestep.errors import SidestepError
from sidestep.rdma.iwarp.device import IwarpDevice
from sidestep.switch.protocol import Capabilities, OffloadTransport, Request, Services

if TYPE_CHECKING:
    from sidestep.gain import Profiles
    from sidestep.loop import Loop
    from sidestep.rdma.kernel.device import KernelDevice
    from sidestep.rdma.kernel.sysfs import KernelDeviceView
    from sidestep.rdma.roce.udp_link import UdpRoceDevice
    from sidestep.routing import Address


class Iwarp(OffloadTransport):
    """The software RNIC: reached by TCP, whose routes it takes, at any address."""

    name: ClassVar[str] = "iwarp"
    wire: ClassVar[str] = "iwarp"
    profiles: ClassVar[Profiles] = gain.IWARP
    capabilities: ClassVar[Capabilities] = Capabilities(rdma=True, local=False, remote=True, self_routing=True)

    def open(self, local: Address, loop: Loop) -> IwarpDevice:
        """Its connections come from that address, and it listens there."""
        return IwarpDevice(str(local), loop, name=f"iwarp@{local}")


class Roce(OffloadTransport):
    """The software HCA: InfiniBand's reliable connections by UDP, at any address whose port 4791 is free."""

    name: ClassVar[str] = "roce"
    wire: ClassVar[str] = "rocev2"
    profiles: ClassVar[Profiles] = gain.ROCE
    capabilities: ClassVar[Capabilities] = Capabilities(rdma=True, local=False, remote=True, self_routing=True)

    def open(self, local: Address, loop: Loop) -> UdpRoceDevice:
        """Its packets come from that address, and go there."""
        from sidestep.rdma.roce.udp_link import UdpRoceDevice  # few use it

        return UdpRoceDevice(str(local), loop, name=f"roce@{local}")


class Verbs(OffloadTransport):
    """The kernel's RDMA devices: adapters that speak RoCE v2, and Linux's rxe, at addresses that their GIDs have."""

    name: ClassVar[str] = "verbs"
    wire: ClassVar[str] = "rocev2"
    profiles: ClassVar[Profiles] = gain.VERBS
    capabilities: ClassVar[Capabilities] = Capabilities(rdma=True, local=False, remote=True)

    def start(self, services: Services) -> None:
        super().start(services)
        from sidestep.rdma.kernel.pinned import PinnedMemory  # few use it

        most = services.remote.pinned_max if services.remote is not None else limits.REMOTE_PINNED_BYTES
        self._pinned = PinnedMemory(most, services.share)
        self._devices: list[KernelDeviceView] = []
        self._looked_at = -limits.VERBS_LOOK_S

    def refusal(self, request: Request) -> str | None:
        from sidestep.rdma.kernel.finding import devices  # few use it
        from sidestep.rdma.kernel.libraries import libraries
        from sidestep.rdma.kernel.sysfs import why_not_joined

        route = request.route
        local = request.local.address if request.local is not None else None
        if local is None or local.is_unspecified:
            local = route.source if route is not None else None
        if local is None:
            return "the kernel does not say from which address it would leave"
        now = self.services.loop.now
        if now - self._looked_at >= limits.VERBS_LOOK_S:
            self._devices, self._looked_at = devices(libraries()), now
        return why_not_joined(str(local), self._devices)

    def open(self, local: Address, loop: Loop) -> KernelDevice:
        """A context of the device that has the address."""
        from sidestep.rdma.kernel.device import KernelDevice

        device = KernelDevice(str(local), loop, name=f"verbs@{local}", by_number=True, pinned=self._pinned)
        try:
            device.check_joins()
            device.own_gid()
        except SidestepError:
            device.close()
            raise
        return device
