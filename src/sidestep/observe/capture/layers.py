"""From a frame to what rides in it: a packet of the InfiniBand transport, or a segment of TCP.

Link types: Ethernet (with VLAN tags), Linux cooked captures, raw IP, loopback, InfiniBand, and ERF around Ethernet or
InfiniBand. Of IP only whole datagrams are read: neither RDMA over UDP nor TCP is sent in fragments. Lengths come from
the headers, not from the frame, which the link may have padded and the capture may have cut: what was cut off is filled
with zeros and counted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Final, TypeAlias

from sidestep.observe.capture.frame import CapturedFrame
from sidestep.rdma.roce.mad import address_of
from sidestep.rdma.roce.packet import ETHERTYPE, ICRC_LEN, UDP_PORT, Bth, icrc

_ETHERTYPE_IPV4: Final = 0x0800
_ETHERTYPE_IPV6: Final = 0x86DD
_ETHERTYPES_VLAN: Final = frozenset({0x8100, 0x88A8, 0x9100})
_PROTOCOL_TCP: Final = 6
_PROTOCOL_UDP: Final = 17
_IPV6_EXTENSIONS: Final = frozenset({0, 43, 60})  # of which the length lies in their second byte
_ERF_ETHERNET: Final = frozenset({2, 16})
_ERF_INFINIBAND: Final = frozenset({21, 25})
_NEXT_BTH: Final = 2  # IBTA 7.7: what follows the local route header
_NEXT_GRH: Final = 3
_GRH_LEN: Final = 40
_NEXT_HEADER_BTH: Final = 0x1B


class Wire(StrEnum):
    """What carried a packet."""

    ROCE_V2 = "RoCEv2"
    ROCE_V1 = "RoCEv1"
    INFINIBAND = "InfiniBand"
    IWARP = "iWARP"


@dataclass(frozen=True, slots=True)
class Lid:
    """An address within an InfiniBand subnet."""

    number: int

    def __str__(self) -> str:
        return f"LID {self.number}"


IpAddress: TypeAlias = IPv4Address | IPv6Address
Address: TypeAlias = IpAddress | Lid


def end_text(address: Address, port: int | None) -> str:
    shown = f"[{address}]" if ":" in str(address) else str(address)
    return f"{shown}:{port}"


@dataclass(frozen=True, slots=True)
class Transport:
    """A packet of the InfiniBand transport, without its checksum."""

    wire: Wire
    source: Address
    destination: Address
    packet: memoryview
    missing: int = 0  # bytes at the end that the capture has cut off
    checksum_wrong: bool = False  # of RoCEv2 only; elsewhere it is not looked at


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of TCP."""

    source: IpAddress
    source_port: int
    destination: IpAddress
    destination_port: int
    sequence: int
    syn: bool
    ack: bool
    payload: memoryview  # as far as it was captured
    missing: int = 0


Layer: TypeAlias = Transport | Segment | None


def dissect(frame: CapturedFrame) -> Layer:
    """What rides in the frame; None if it is neither of the two."""
    reader = _LINKS.get(frame.link_type)
    if reader is None:
        return None
    try:
        return reader(memoryview(frame.data))
    except (struct.error, IndexError, ValueError):  # shorter than its own headers
        return None


def known_link(link_type: int) -> bool:
    return link_type in _LINKS


# ---- links ----


def _ethernet(data: memoryview) -> Layer:
    offset = 12
    ethertype = _u16(data, offset)
    while ethertype in _ETHERTYPES_VLAN:
        offset += 4
        ethertype = _u16(data, offset)
    return _by_ethertype(ethertype, data[offset + 2 :])


def _by_ethertype(ethertype: int, data: memoryview) -> Layer:
    if ethertype in (_ETHERTYPE_IPV4, _ETHERTYPE_IPV6):
        return _ip(data)
    if ethertype == ETHERTYPE:
        return _global_route(data, Wire.ROCE_V1)
    return None


def _infiniband(data: memoryview) -> Layer:
    """IBTA 7.7: the local route header, whose length counts words up to the invariant checksum."""
    following = data[1] & 3
    length = (_u16(data, 4) & 0x7FF) * 4
    destination, source = Lid(_u16(data, 2)), Lid(_u16(data, 6))
    start = 8
    if following == _NEXT_GRH:
        start += _GRH_LEN
    elif following != _NEXT_BTH:
        return None
    packet, missing = _filled(data, start, length - ICRC_LEN)
    return Transport(Wire.INFINIBAND, source, destination, packet, missing)


def _erf(data: memoryview) -> Layer:
    """Endace's header: time, type, flags, lengths; then extension headers as long as a top bit is set."""
    kind = data[8] & 0x7F
    start = 16
    more = data[8] & 0x80
    while more:
        more = data[start] & 0x80
        start += 8
    if kind in _ERF_INFINIBAND:
        return _infiniband(data[start:])
    if kind in _ERF_ETHERNET:
        return _ethernet(data[start + 2 :])
    return None


# ---- networks ----


def _ip(data: memoryview) -> Layer:
    version = data[0] >> 4
    if version == 4:
        return _ipv4(data)
    return _ipv6(data) if version == 6 else None


def _ipv4(data: memoryview) -> Layer:
    header_len = (data[0] & 0xF) * 4
    length = _u16(data, 2)
    if _u16(data, 6) & 0x3FFF:  # more fragments, or not the first
        return None
    source, destination = IPv4Address(bytes(data[12:16])), IPv4Address(bytes(data[16:20]))
    return _above_ip(data, header_len, length, data[9], source, destination)


def _ipv6(data: memoryview) -> Layer:
    payload_len = _u16(data, 4)
    length = _GRH_LEN + payload_len if payload_len else 0
    source, destination = IPv6Address(bytes(data[8:24])), IPv6Address(bytes(data[24:40]))
    following, offset = data[6], _GRH_LEN
    while following in _IPV6_EXTENSIONS:
        following, offset = data[offset], offset + 8 + data[offset + 1] * 8
    return _above_ip(data, offset, length, following, source, destination)


def _above_ip(
    data: memoryview, offset: int, length: int, protocol: int, source: IpAddress, destination: IpAddress
) -> Layer:
    if protocol == _PROTOCOL_TCP:
        return _tcp(data, offset, length, source, destination)
    if protocol != _PROTOCOL_UDP or _u16(data, offset + 2) != UDP_PORT:
        return None
    end = offset + _u16(data, offset + 4)
    packet, missing = _filled(data, offset + 8, end - ICRC_LEN)
    wrong = False
    if not missing and len(data) >= end and len(packet) >= Bth.LENGTH:
        wrong = icrc(data[: end - ICRC_LEN]) != bytes(data[end - ICRC_LEN : end])
    return Transport(Wire.ROCE_V2, source, destination, packet, missing, wrong)


def _tcp(data: memoryview, offset: int, length: int, source: IpAddress, destination: IpAddress) -> Layer:
    source_port, destination_port, sequence, _, header, flags = struct.unpack_from(">HHIIBB", data, offset)
    start = offset + (header >> 4) * 4
    if length == 0:  # segmentation offload: captured before the length was known
        length = len(data)
    return Segment(
        source, source_port, destination, destination_port, sequence,
        syn=flags & 2 != 0, ack=flags & 16 != 0,
        payload=data[start:length], missing=max(0, length - max(start, len(data))),
    )  # fmt: skip


def _global_route(data: memoryview, wire: Wire) -> Layer:
    """IBTA 8.3: the global route header is laid out as that of IPv6."""
    if data[6] != _NEXT_HEADER_BTH:
        return None
    source, destination = address_of(bytes(data[8:24])), address_of(bytes(data[24:40]))
    packet, missing = _filled(data, _GRH_LEN, _GRH_LEN + _u16(data, 4) - ICRC_LEN)
    return Transport(wire, source, destination, packet, missing)


def _filled(data: memoryview, start: int, end: int) -> tuple[memoryview, int]:
    """The bytes from start to end, zeros where the capture has none, and how many those are."""
    there = data[start : max(start, end)]
    missing = max(0, end - start) - len(there)
    return (memoryview(bytes(there) + bytes(missing)) if missing else there), missing


def _u16(data: memoryview, offset: int) -> int:
    return data[offset] << 8 | data[offset + 1]


_LINKS: Final[dict[int, Callable[[memoryview], Layer]]] = {
    1: _ethernet,
    # of the loopback device: the family's number differs between systems, and the IP header says its own version
    **dict.fromkeys((0, 108), lambda data: _ip(data[4:])),
    **dict.fromkeys((12, 14, 101, 228, 229), _ip),
    113: lambda data: _by_ethertype(_u16(data, 14), data[16:]),  # Linux cooked captures, and their second form
    276: lambda data: _by_ethertype(_u16(data, 0), data[20:]),
    197: _erf,
    247: _infiniband,
}
