"""The devices that come with sidestep, as transports of the switch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sidestep.rdma.iwarp.device import IwarpDevice
from sidestep.switch.protocol import Capabilities, OffloadTransport

if TYPE_CHECKING:
    from sidestep.loop import Loop
    from sidestep.rdma.roce.udp_link import UdpRoceDevice
    from sidestep.routing import Address


class Iwarp(OffloadTransport):
    """The software RNIC: reached by TCP, whose routes it takes, at any address."""

    name: ClassVar[str] = "iwarp"
    wire: ClassVar[str] = "iwarp"
    capabilities: ClassVar[Capabilities] = Capabilities(rdma=True, local=False, remote=True, self_routing=True)

    def open(self, local: Address, loop: Loop) -> IwarpDevice:
        """Its connections come from that address, and it listens there."""
        return IwarpDevice(str(local), loop, name=f"iwarp@{local}")


class Roce(OffloadTransport):
    """The software HCA: InfiniBand's reliable connections by UDP, at any address whose port 4791 is free."""

    name: ClassVar[str] = "roce"
    wire: ClassVar[str] = "rocev2"
    capabilities: ClassVar[Capabilities] = Capabilities(rdma=True, local=False, remote=True, self_routing=True)

    def open(self, local: Address, loop: Loop) -> UdpRoceDevice:
        """Its packets come from that address, and go there."""
        from sidestep.rdma.roce.udp_link import UdpRoceDevice  # few use it

        return UdpRoceDevice(str(local), loop, name=f"roce@{local}")
