"""Known state of the network, and the events that lead from one state to another. No I/O.

A state is made of the kernel's announcements, or of a snapshot; comparing the two shows missed changes. The kernel does
not announce all. IPv4 routes vanish in silence with their interface, their source address or their next hop object. A
route that replaces one of several like it does not say which. Then the state is `doubtful`, and a snapshot is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from sidestep import limits
from sidestep.routing import (
    Address,
    AddressEvent,
    Change,
    ChangesLost,
    LinkEvent,
    Network,
    NetworkEvent,
    RouteEvent,
    RouteKind,
)


@dataclass(frozen=True, slots=True)
class RouteKey:
    """Key by which the kernel distinguishes routes."""

    destination: Network
    source: Network  # other than everything only in IPv6's source routing
    table: int
    metric: int
    tos: int


@dataclass(frozen=True, slots=True)
class Hop:
    """One way that a route leads."""

    kind: RouteKind
    first_hop: Address | None
    interface_index: int | None


@dataclass(frozen=True, slots=True)
class RouteChange:
    """Change of a route, as the kernel announces it."""

    change: Change
    key: RouteKey
    hops: frozenset[Hop]
    replaces: bool  # the route of the same key


@dataclass(frozen=True, slots=True)
class Unclear:
    """Announcement from which changes of routes may follow in silence."""


Record = LinkEvent | AddressEvent | RouteChange | Unclear
AddressKey = tuple[int, Address, int]
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


@dataclass(slots=True)
class NetworkState:
    """Interfaces, addresses and routes; `limits.NETWORK_FOLLOWED_MAX` of each.

    `full` names the kinds of which there are more. Of these nothing is remembered: announced changes become events, any
    others are reported as ChangesLost.
    """

    links: dict[int, LinkEvent] = field(default_factory=dict)
    addresses: dict[AddressKey, AddressEvent] = field(default_factory=dict)
    routes: dict[RouteKey, frozenset[Hop]] = field(default_factory=dict)
    full: set[type[Record]] = field(default_factory=set)
    doubtful: bool = False

    def handle(self, record: Record) -> list[NetworkEvent]:
        """Takes in a record of the kernel; returns the events that follow from it."""
        if isinstance(record, LinkEvent):
            return list(self._handle_link(record))
        if isinstance(record, AddressEvent):
            return list(self._handle_address(record))
        if isinstance(record, RouteChange):
            return list(self._handle_route(record))
        self.doubtful = True
        return []

    def present(self) -> Iterator[NetworkEvent]:
        """Events of the whole known state, as if it came now."""
        yield from self.links.values()
        yield from self.addresses.values()
        for key, hops in self.routes.items():
            yield from _route_events(Change.ADDED, key, hops)

    def lost(self) -> Iterator[NetworkEvent]:
        """Events for a protocol that cannot get the changes one by one."""
        yield ChangesLost()
        yield from self.present()

    def becomes(self, later: NetworkState) -> Iterator[NetworkEvent]:
        """The events that lead to a later state: first all that went, and what depends on something before it."""
        if self.full or later.full:
            yield from later.lost()
            return
        for key, hops in self.routes.items():
            yield from _route_events(Change.REMOVED, key, hops - later.routes.get(key, frozenset()))
        for address_key, address in self.addresses.items():
            if address_key not in later.addresses:
                yield replace(address, change=Change.REMOVED)
        for index, link in self.links.items():
            if index not in later.links:
                yield replace(link, change=Change.REMOVED, up=False)
        for index, link in later.links.items():
            if self.links.get(index) != link:
                yield link
        for address_key, address in later.addresses.items():
            if address_key not in self.addresses:
                yield address
        for key, hops in later.routes.items():
            yield from _route_events(Change.ADDED, key, hops - self.routes.get(key, frozenset()))

    def _handle_link(self, link: LinkEvent) -> Iterator[NetworkEvent]:
        removed = link.change is Change.REMOVED
        before = self.links.get(link.interface_index)
        if removed:
            self.links.pop(link.interface_index, None)
        else:
            self._put(LinkEvent, self.links, link.interface_index, link)
        if LinkEvent in self.full:
            self.doubtful = True
            yield link
        elif before != (None if removed else link):
            # IPv4 routes by this interface come and go in silence
            self.doubtful |= before is not None and (removed or before.up != link.up)
            yield link

    def _handle_address(self, address: AddressEvent) -> Iterator[NetworkEvent]:
        removed = address.change is Change.REMOVED
        key = (address.interface_index, address.address, address.prefix_len)
        known = key in self.addresses
        if removed:
            self.addresses.pop(key, None)
        else:
            self._put(AddressEvent, self.addresses, key, address)
        if known is removed or AddressEvent in self.full:
            self.doubtful |= removed  # IPv4 routes with this source go in silence
            yield address

    def _handle_route(self, route: RouteChange) -> Iterator[NetworkEvent]:
        before = self.routes.get(route.key, frozenset())
        if RouteChange in self.full:
            yield from _route_events(route.change, route.key, route.hops)
        elif route.change is Change.REMOVED:
            self._put_route(route.key, before - route.hops)
            yield from _route_events(Change.REMOVED, route.key, before & route.hops)
        else:
            replaced: frozenset[Hop] = frozenset()
            if route.replaces and len(before) == 1:
                replaced = before - route.hops
            elif route.replaces and not before <= route.hops:
                self.doubtful = True
            self._put_route(route.key, (before - replaced) | route.hops)
            yield from _route_events(Change.REMOVED, route.key, replaced)
            yield from _route_events(Change.ADDED, route.key, route.hops - before)

    def _put_route(self, key: RouteKey, hops: frozenset[Hop]) -> None:
        if hops:
            self._put(RouteChange, self.routes, key, hops)
        else:
            self.routes.pop(key, None)

    def _put(self, kind: type[Record], table: dict[KeyT, ValueT], key: KeyT, value: ValueT) -> None:
        if key not in table and len(table) >= limits.NETWORK_FOLLOWED_MAX:
            self.full.add(kind)
            table.clear()
        if kind not in self.full:
            table[key] = value


def _route_events(change: Change, key: RouteKey, hops: frozenset[Hop]) -> Iterator[RouteEvent]:
    for hop in sorted(hops, key=str):  # the same order in every run
        yield RouteEvent(change, key.destination, hop.first_hop, hop.interface_index, hop.kind, key.table, key.metric)
