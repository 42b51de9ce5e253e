"""Which of a port's addresses goes with an IP address.

A port of RoCE has a table of GIDs: for each address of its interface one for RoCE v1 and one for v2, in no fixed order,
and link-local ones first. An IPv4 address is in it as `::ffff:a.b.c.d` (IBTA annex A17.4.5). Index 0 is therefore right
by luck alone: the entry is found by its address and its type.
"""

from __future__ import annotations

from ctypes import byref, sizeof
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final

from sidestep import limits
from sidestep.rdma.kernel import abi

if TYPE_CHECKING:
    from sidestep.rdma.kernel.libraries import Libraries

_MAPPED: Final = 0xFFFF << 32


@dataclass(frozen=True, slots=True)
class GidEntry:
    """One entry of the table."""

    index: int
    gid: IPv6Address
    kind: int  # enum ibv_gid_type


def wanted(address: str) -> IPv6Address:
    """The GID that an IP address has on RoCE."""
    found = ip_address(address.partition("%")[0])
    return found if isinstance(found, IPv6Address) else IPv6Address(_MAPPED | int(found))


def address_of(gid: bytes) -> str:
    """The IP address that a GID of RoCE has."""
    found = IPv6Address(gid)
    return str(found.ipv4_mapped or found)


def written(gid: IPv6Address) -> str:
    """As `sidestep rdma list` shows it."""
    return f"::ffff:{gid.ipv4_mapped}" if gid.ipv4_mapped is not None else str(gid)


def entries(libraries: Libraries, context: int, port: int) -> list[GidEntry]:
    """All of a port that are in use: one call of the kernel's, as a table may have a thousand places."""
    room = (abi.GidEntry * limits.VERBS_GIDS_MAX)()
    count = libraries._ibv_query_gid_table(context, room, limits.VERBS_GIDS_MAX, 0, sizeof(abi.GidEntry))
    return [
        GidEntry(each.gid_index, IPv6Address(bytes(each.gid.raw)), each.gid_type)
        for each in room[:count]
        if each.port_num == port
    ]


def entry(libraries: Libraries, context: int, port: int, index: int) -> GidEntry | None:
    """One; None: the place is empty."""
    record = abi.GidEntry()
    try:
        libraries._ibv_query_gid_ex(context, port, index, byref(record), 0, sizeof(record))
    except OSError:  # ENODATA
        return None
    return GidEntry(index, IPv6Address(bytes(record.gid.raw)), record.gid_type)


def choose(table: list[GidEntry], address: str) -> GidEntry | None:
    """The entry of RoCE v2 with this address, or None."""
    gid = wanted(address)
    return next((each for each in table if each.gid == gid and each.kind == abi.GID_ROCE_V2), None)
