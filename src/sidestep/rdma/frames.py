"""Ethernet and IP around what the two sides of a connection send, as captures of software devices show it."""

from __future__ import annotations

from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from struct import Struct
from typing import Final, TypeAlias

IpAddress: TypeAlias = IPv4Address | IPv6Address

_IPV4: Final = Struct(">BBHHHBBH4s4s")
_IPV6: Final = Struct(">IHBB16s16s")
_TTL: Final = 64


class Side(Enum):
    """Who sends."""

    CONNECTING = 0
    ACCEPTING = 1

    @property
    def other(self) -> Side:
        return Side.ACCEPTING if self is Side.CONNECTING else Side.CONNECTING


def ethernet_header(side: Side, version: int) -> bytes:
    """Of a frame that this side sends, with a packet of this version of IP."""
    return _mac(side.other) + _mac(side) + (b"\x08\x00" if version == 4 else b"\x86\xdd")


def network_header(
    source: IpAddress, destination: IpAddress, protocol: int, length: int, identification: int = 0
) -> bytes:
    if source.version == 6:
        return _IPV6.pack(6 << 28, length, protocol, _TTL, source.packed, destination.packed)
    # RoCE's checksum covers the identification; DF
    fields = (0x45, 0, 20 + length, identification, 0x4000, _TTL, protocol)
    without = _IPV4.pack(*fields, 0, source.packed, destination.packed)
    return _IPV4.pack(*fields, internet_checksum(without), source.packed, destination.packed)


def internet_checksum(data: bytes) -> int:
    """RFC 1071. The sum in ones' complement of 16-bit words is the remainder by 65535, but for which zero it is."""
    if len(data) % 2:
        data += b"\0"
    whole = int.from_bytes(data)
    return ~(whole % 0xFFFF or (0xFFFF if whole else 0)) & 0xFFFF


def _mac(side: Side) -> bytes:
    return b"\x02\0\0\0\0" + bytes([side.value + 1])  # locally administered
