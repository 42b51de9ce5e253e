"""Routes, interfaces and addresses as the switch knows them: plain records, no I/O.

The kernel decides; `sidestep.provider.network.routes` asks it by netlink and reports every change.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any

from sidestep.errors import Unavailable

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def plain_address(address: Address) -> Address:
    """The address that `address` stands for: IPv4 where it is v4-mapped."""
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


@dataclass(frozen=True, slots=True)
class Route:
    """The kernel's answer to: which way does a packet go there?"""

    destination: Address
    interface: str  # name of the device it leaves by
    interface_index: int
    source: Address | None  # the address it is sent from
    first_hop: Address | None  # the gateway; None: the destination is on the link, or on this host
    local: bool  # the destination is an address of this host

    def as_json(self) -> dict[str, Any]:
        return {
            "interface": self.interface,
            "first_hop": str(self.first_hop) if self.first_hop else None,
            "source": str(self.source) if self.source else None,
            "local": self.local,
        }


class Obstacle(Enum):
    """Reason why the kernel has no way to a destination."""

    UNREACHABLE = "no route leads there"  # no route matches, or one of the type `unreachable` does
    PROHIBITED = "a route or rule prohibits it"
    BLACKHOLE = "a blackhole route swallows it, or such an address cannot be sent to from there"  # EINVAL is both
    NOT_UNICAST = "it is a broadcast or multicast address"
    NO_INTERFACE = "there is no such interface"
    OTHER = "the kernel refused the lookup"


class NoRoute(Unavailable):
    """The kernel has no way there; `errno` is what connect() would fail with."""

    def __init__(self, destination: Address, obstacle: Obstacle, errno: int) -> None:
        super().__init__(f"no way to {destination}: {obstacle.value}", remedy=f"see 'ip route get {destination}'")
        self.destination = destination
        self.obstacle = obstacle
        self.errno = errno


class Change(Enum):
    """Kind of a change."""

    ADDED = "added"  # or changed: the new state follows
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """An interface came, went, or changed; a new name comes with the old index."""

    change: Change
    interface: str
    interface_index: int
    up: bool  # administratively up and with a carrier


@dataclass(frozen=True, slots=True)
class AddressEvent:
    """An interface got or lost an address; one that is still checked for duplicates is not there yet."""

    change: Change
    interface_index: int
    address: Address
    prefix_len: int


class RouteKind(IntEnum):
    """Effect of a route on a packet; the kernel's numbers (RTN_*)."""

    UNICAST = 1  # sends it on
    LOCAL = 2  # takes it for this host
    BROADCAST = 3
    ANYCAST = 4
    MULTICAST = 5
    BLACKHOLE = 6  # drops it in silence
    UNREACHABLE = 7
    PROHIBIT = 8
    THROW = 9  # the next routing rule is asked


@dataclass(frozen=True, slots=True)
class RouteEvent:
    """A route came or went; one with several first hops makes several events.

    The entries that the kernel keeps for each address in its table `local` make none: the address does.
    """

    change: Change
    destination: Network
    first_hop: Address | None
    interface_index: int | None  # index; None: the packet goes nowhere
    kind: RouteKind = RouteKind.UNICAST
    table: int = 254  # RT_TABLE_MAIN
    metric: int = 0


@dataclass(frozen=True, slots=True)
class ChangesLost:
    """Single events cannot report all that has changed: forget all earlier events, the present state follows.

    Only with more interfaces, addresses or routes than `limits.NETWORK_FOLLOWED_MAX`, or when they change without end.
    """


NetworkEvent = LinkEvent | AddressEvent | RouteEvent | ChangesLost
