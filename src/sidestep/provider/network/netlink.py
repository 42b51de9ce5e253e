"""The kernel's rtnetlink messages as records, with the numbers of linux/netlink.h, rtnetlink.h, if.h and if_addr.h.

Every message is checked before it is believed: its lengths, its family, its numbers.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final, NamedTuple

from sidestep.provider.network.state import Hop, Record, RouteChange, RouteKey, Unclear
from sidestep.routing import Address, AddressEvent, Change, LinkEvent, NoRoute, Obstacle, Route, RouteKind

GROUPS: Final = (
    0x1  # RTMGRP_LINK
    | 0x10 | 0x100  # RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR
    | 0x40 | 0x400  # RTMGRP_IPV4_ROUTE, RTMGRP_IPV6_ROUTE
    | 0x80 | 0x40000  # RTMGRP_IPV4_RULE, RTMGRP_IPV6_RULE
)  # fmt: skip
RTNLGRP_NEXTHOP: Final = 32

NLMSG_ERROR: Final = 2
NLM_F_REQUEST: Final = 0x1
NLM_F_DUMP: Final = 0x300
NLM_F_REPLACE: Final = 0x100
RTM_NEWLINK: Final = 16
RTM_DELLINK: Final = 17
RTM_GETLINK: Final = 18
RTM_NEWADDR: Final = 20
RTM_DELADDR: Final = 21
RTM_GETADDR: Final = 22
RTM_NEWROUTE: Final = 24
RTM_DELROUTE: Final = 25
RTM_GETROUTE: Final = 26
RTM_NEWNEXTHOP: Final = 104
RTM_DELNEXTHOP: Final = 105
IFF_UP: Final = 0x1
IFF_LOWER_UP: Final = 0x10000
IFA_F_OPTIMISTIC: Final = 0x04
IFA_F_DADFAILED: Final = 0x08
IFA_F_TENTATIVE: Final = 0x40
RTM_F_CLONED: Final = 0x200
RTNH_F_DEAD: Final = 0x1
RTPROT_KERNEL: Final = 2
RT_TABLE_LOCAL: Final = 255

LINKS: Final[tuple[int, int]] = (RTM_GETLINK, socket.AF_UNSPEC)  # dumps that can be asked for
ADDRESSES: Final[tuple[int, int]] = (RTM_GETADDR, socket.AF_UNSPEC)
ROUTES_4: Final[tuple[int, int]] = (RTM_GETROUTE, socket.AF_INET)
ROUTES_6: Final[tuple[int, int]] = (RTM_GETROUTE, socket.AF_INET6)

_HEADER: Final = struct.Struct("=IHHII")  # struct nlmsghdr: len, type, flags, seq, pid
_ERROR: Final = struct.Struct("=i")
_LINK: Final = struct.Struct("=BxHiII")  # struct ifinfomsg: family, type, index, flags, change
_ADDRESS: Final = struct.Struct("=4BI")  # struct ifaddrmsg: family, length of the prefix, flags, scope, index
_ROUTE: Final = struct.Struct("=8BI")  # struct rtmsg: family, two lengths, tos, table, protocol, scope, type, flags
_HEADS: Final = {RTM_GETLINK: _LINK, RTM_GETADDR: _ADDRESS, RTM_GETROUTE: _ROUTE}
_LINK_LEN: Final = _HEADER.size + _LINK.size
_ADDRESS_LEN: Final = _HEADER.size + _ADDRESS.size
_ROUTE_LEN: Final = _HEADER.size + _ROUTE.size
_ATTRIBUTE: Final = struct.Struct("=HH")  # struct rtattr: len, type
_NEXT_HOP: Final = struct.Struct("=HBBi")  # struct rtnexthop: len, flags, hops, interface
_U32: Final = struct.Struct("=I")
_U16: Final = struct.Struct("=H")
_IFLA_IFNAME: Final = 3
_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2
_IFA_FLAGS: Final = 8
_RTA: Final = {
    "RTA_DST": 1, "RTA_SRC": 2, "RTA_OIF": 4, "RTA_GATEWAY": 5, "RTA_PRIORITY": 6, "RTA_PREFSRC": 7, "RTA_MULTIPATH": 9,
    "RTA_TABLE": 15, "RTA_MARK": 16, "RTA_VIA": 18, "RTA_UID": 25, "RTA_IP_PROTO": 27,
}  # fmt: skip
_TYPE_MASK: Final = 0x3FFF  # type without NLA_F_NESTED and NLA_F_NET_BYTEORDER
_INDEX_MAX: Final = 2**31 - 1
_IFINDEX_LOOPBACK: Final = 1  # the same in every network namespace
_KINDS: Final = frozenset(RouteKind)
_OBSTACLES: Final = {
    errno.ENETUNREACH: Obstacle.UNREACHABLE,
    errno.EHOSTUNREACH: Obstacle.UNREACHABLE,
    errno.EACCES: Obstacle.PROHIBITED,
    errno.EINVAL: Obstacle.BLACKHOLE,
    errno.ENODEV: Obstacle.NO_INTERFACE,
}
_KIND_ERRORS: Final = {
    RouteKind.BROADCAST: errno.ENETUNREACH,
    RouteKind.MULTICAST: errno.ENETUNREACH,
    RouteKind.BLACKHOLE: errno.EINVAL,
    RouteKind.UNREACHABLE: errno.EHOSTUNREACH,
    RouteKind.PROHIBIT: errno.EACCES,
    RouteKind.THROW: errno.ENETUNREACH,
}


class Malformed(Exception):
    """A netlink message that breaks its own format."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a datagram, not decoded yet."""

    kind: int
    flags: int
    sequence: int
    data: bytes  # length with its header

    @property
    def error(self) -> int | None:
        """The errno of an error message, 0 in an acknowledgement; None if it is none."""
        if self.kind != NLMSG_ERROR:
            return None
        if len(self.data) < _HEADER.size + _ERROR.size:
            raise Malformed("an error without a number")
        return -int(_ERROR.unpack_from(self.data, _HEADER.size)[0])


def split(datagram: bytes) -> Iterator[Frame]:
    """The messages of a datagram; raises Malformed at the first whose length is impossible."""
    offset = 0
    while offset < len(datagram):
        if len(datagram) - offset < _HEADER.size:
            raise Malformed("a datagram ends within a header")
        length, kind, flags, sequence, _ = _HEADER.unpack_from(datagram, offset)
        if not _HEADER.size <= length <= len(datagram) - offset:
            raise Malformed(f"a message of {length} bytes with {len(datagram) - offset} left")
        yield Frame(kind, flags, sequence, datagram[offset : offset + length])
        offset += length + (-length % 4)


# ---- requests ----


def dump_request(what: tuple[int, int], sequence: int) -> bytes:
    """Asks for all of LINKS, ADDRESSES, ROUTES_4 or ROUTES_6."""
    kind, family = what
    head = bytes((family,)).ljust(_HEADS[kind].size, b"\0")
    return _HEADER.pack(_HEADER.size + len(head), kind, NLM_F_REQUEST | NLM_F_DUMP, sequence, 0) + head


def barrier_request(sequence: int) -> bytes:
    """Asks for one interface: the kernel answers when no process is changing links, addresses or routes."""
    head = _LINK.pack(socket.AF_UNSPEC, 0, _IFINDEX_LOOPBACK, 0, 0)
    return _HEADER.pack(_LINK_LEN, RTM_GETLINK, NLM_F_REQUEST, sequence, 0) + head


def lookup_request(
    destination: Address, source: Address | None, uid: int | None, mark: int, interface_index: int, sequence: int
) -> bytes:
    """Asks which way a TCP packet would go."""
    is_v4 = destination.version == 4
    attributes = [
        _attribute("RTA_DST", destination.packed),
        _attribute("RTA_IP_PROTO", bytes((socket.IPPROTO_TCP,))),  # an attribute of rules
    ]
    if source is not None:
        attributes.append(_attribute("RTA_SRC", source.packed))
    for name, value in (("RTA_OIF", interface_index), ("RTA_MARK", mark), ("RTA_UID", uid)):
        if value or (name == "RTA_UID" and value is not None):
            attributes.append(_attribute(name, _U32.pack(value)))
    body = b"".join(attributes)
    return b"".join((
        _HEADER.pack(_ROUTE_LEN + len(body), RTM_GETROUTE, NLM_F_REQUEST, sequence, 0),
        _ROUTE.pack(
            socket.AF_INET if is_v4 else socket.AF_INET6, destination.max_prefixlen,
            source.max_prefixlen if source is not None else 0, 0, 0, 0, 0, 0, 0,
        ),
        body,
    ))  # fmt: skip


def _attribute(name: str, payload: bytes) -> bytes:
    length = _ATTRIBUTE.size + len(payload)
    return _ATTRIBUTE.pack(length, _RTA[name]) + payload + bytes(-length % 4)


# ---- replies and notifications ----


def record_of(frame: Frame) -> Record | None:
    """Record in a notification, or in a piece of a dump; None: nothing that is followed.

    Raises:
        Malformed: It cannot be decoded.
    """
    decode = _DECODERS.get(frame.kind)
    if decode is None:
        return None
    try:
        return decode(frame)
    except ValueError as error:  # an error of an address, or a network
        raise Malformed(f"a message of type {frame.kind}: {error!r}") from error


def route_of(frame: Frame, destination: Address, source: Address | None) -> Route:
    """The answer to `lookup_request`; of the interface it knows only the index.

    Raises:
        NoRoute: There is no way.
        Malformed: It cannot be decoded.
    """
    if code := frame.error:
        raise NoRoute(destination, _OBSTACLES.get(code, Obstacle.OTHER), code)
    if frame.kind != RTM_NEWROUTE:
        raise Malformed(f"a message of type {frame.kind} as the answer to a lookup")
    try:
        head = _route_head(frame)
        attributes = _attributes(frame.data, _ROUTE_LEN)
        kind = RouteKind(head.kind)
        own = attributes.get(_RTA["RTA_PREFSRC"])
        route = Route(
            destination=destination,
            interface="",
            interface_index=_u32(attributes, _RTA["RTA_OIF"], 0),
            source=_address_of(head.family, own) if own else source,
            first_hop=_first_hop(head.family, attributes),
            local=kind is RouteKind.LOCAL,
        )
    except ValueError as error:
        raise Malformed(f"the answer to a lookup: {error}") from error
    if number := _KIND_ERRORS.get(kind):
        cast = kind in (RouteKind.BROADCAST, RouteKind.MULTICAST)
        raise NoRoute(destination, Obstacle.NOT_UNICAST if cast else _OBSTACLES[number], number)
    return route


def _link(frame: Frame) -> Record | None:
    family, _, index, flags, _ = _head(frame, _LINK)
    if family != socket.AF_UNSPEC:
        return None  # a bridge reports its ports; the interface itself remains
    name = _attributes(frame.data, _LINK_LEN).get(_IFLA_IFNAME, b"").partition(b"\0")[0]
    if not name or index <= 0:
        raise Malformed("an interface without a name or number")
    removed = frame.kind == RTM_DELLINK
    up = not removed and bool(flags & IFF_UP) and bool(flags & IFF_LOWER_UP)
    return LinkEvent(Change.REMOVED if removed else Change.ADDED, os.fsdecode(name), index, up)


def _address(frame: Frame) -> Record | None:
    family, prefix_len, flags, _, index = _head(frame, _ADDRESS)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    attributes = _attributes(frame.data, _ADDRESS_LEN)
    # IFA_ADDRESS is the other end on a point-to-point link.
    own = _address_of(family, attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS, b""))
    if prefix_len > own.max_prefixlen or not 0 < index <= _INDEX_MAX:
        raise Malformed(f"the address {own}/{prefix_len} of interface {index}")
    flags = _u32(attributes, _IFA_FLAGS, flags)
    usable = not flags & IFA_F_DADFAILED and (not flags & IFA_F_TENTATIVE or flags & IFA_F_OPTIMISTIC)
    there = frame.kind == RTM_NEWADDR and usable
    return AddressEvent(Change.ADDED if there else Change.REMOVED, index, own, prefix_len)


def _route(frame: Frame) -> Record | None:
    head = _route_head(frame)
    made_for_an_address = head.table == RT_TABLE_LOCAL and head.protocol == RTPROT_KERNEL
    removed = frame.kind == RTM_DELROUTE
    if head.family not in (socket.AF_INET, socket.AF_INET6) or made_for_an_address or head.kind not in _KINDS:
        return None
    if head.flags & RTM_F_CLONED:
        return None  # the memory of a path, not a route
    if head.flags & RTNH_F_DEAD and not removed:
        return None  # a route whose interface is down goes, or comes back, with it
    attributes = _attributes(frame.data, _ROUTE_LEN)
    return RouteChange(
        Change.REMOVED if removed else Change.ADDED,
        _route_key(head, attributes),
        frozenset(_hops(head, attributes, with_dead=removed)),
        replaces=bool(frame.flags & NLM_F_REPLACE),
    )


def _next_hop(_frame: Frame) -> Record:
    return Unclear()


class _RouteHead(NamedTuple):
    """struct rtmsg."""

    family: int
    destination_len: int
    source_len: int
    tos: int
    table: int
    protocol: int
    scope: int
    kind: int
    flags: int


def _route_head(frame: Frame) -> _RouteHead:
    return _RouteHead(*_head(frame, _ROUTE))


def _head(frame: Frame, layout: struct.Struct) -> tuple[int, ...]:
    """Fields between the header of a message and its attributes."""
    if len(frame.data) < _HEADER.size + layout.size:
        raise Malformed(f"a message of type {frame.kind} with {len(frame.data)} bytes")
    found: tuple[int, ...] = layout.unpack_from(frame.data, _HEADER.size)
    return found


def _attributes(data: bytes, offset: int) -> dict[int, bytes]:
    """The attributes from `offset` to the end, by type; of several of a type the last."""
    found = {}
    while len(data) - offset >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if not _ATTRIBUTE.size <= length <= len(data) - offset:
            raise Malformed(f"an attribute of {length} bytes with {len(data) - offset} left")
        found[kind & _TYPE_MASK] = data[offset + _ATTRIBUTE.size : offset + length]
        offset += length + (-length % 4)
    return found


def _u32(attributes: dict[int, bytes], kind: int, default: int) -> int:
    value = attributes.get(kind)
    if value is None:
        return default
    if len(value) != _U32.size:
        raise Malformed(f"attribute {kind} of {len(value)} bytes")
    return int(_U32.unpack(value)[0])


def _address_of(family: int, packed: bytes) -> Address:
    """ValueError for a wrong length."""
    return IPv4Address(packed) if family == socket.AF_INET else IPv6Address(packed)


def _route_key(head: _RouteHead, attributes: dict[int, bytes]) -> RouteKey:
    made, anything = (IPv4Network, bytes(4)) if head.family == socket.AF_INET else (IPv6Network, bytes(16))
    return RouteKey(
        made((attributes.get(_RTA["RTA_DST"], anything), head.destination_len)),
        made((attributes.get(_RTA["RTA_SRC"], anything), head.source_len)),
        _u32(attributes, _RTA["RTA_TABLE"], head.table),
        _u32(attributes, _RTA["RTA_PRIORITY"], 0),
        head.tos,
    )


def _hops(head: _RouteHead, attributes: dict[int, bytes], *, with_dead: bool) -> Iterator[Hop]:
    kind = RouteKind(head.kind)
    if kind in (RouteKind.BLACKHOLE, RouteKind.UNREACHABLE, RouteKind.PROHIBIT, RouteKind.THROW):
        yield Hop(kind, None, None)  # IPv6 names the loopback interface
        return
    several = attributes.get(_RTA["RTA_MULTIPATH"])
    if not several:
        yield Hop(kind, _first_hop(head.family, attributes), _u32(attributes, _RTA["RTA_OIF"], 0) or None)
        return
    offset = 0
    while len(several) - offset >= _NEXT_HOP.size:
        length, flags, _, index = _NEXT_HOP.unpack_from(several, offset)
        if not _NEXT_HOP.size <= length <= len(several) - offset:
            raise Malformed(f"a next hop of {length} bytes with {len(several) - offset} left")
        if with_dead or not flags & RTNH_F_DEAD:  # a hop whose interface is down comes back with it
            own = _attributes(several[offset : offset + length], _NEXT_HOP.size)
            yield Hop(kind, _first_hop(head.family, own), index)
        offset += length + (-length % 4)


def _first_hop(family: int, attributes: dict[int, bytes]) -> Address | None:
    if gateway := attributes.get(_RTA["RTA_GATEWAY"]):
        return _address_of(family, gateway)
    via = attributes.get(_RTA["RTA_VIA"])  # IPv4 by way of an IPv6 router
    if not via:
        return None
    if len(via) < _U16.size:
        raise Malformed(f"RTA_VIA of {len(via)} bytes")
    return _address_of(_U16.unpack_from(via)[0], via[_U16.size :])


_DECODERS: Final = {
    RTM_NEWLINK: _link,
    RTM_DELLINK: _link,
    RTM_NEWADDR: _address,
    RTM_DELADDR: _address,
    RTM_NEWROUTE: _route,
    RTM_DELROUTE: _route,
    RTM_NEWNEXTHOP: _next_hop,
    RTM_DELNEXTHOP: _next_hop,
}
