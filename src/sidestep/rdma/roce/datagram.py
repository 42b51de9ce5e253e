"""A packet as the payload of a UDP datagram: its checksum, made and checked with what a socket knows.

The invariant checksum covers the IP header but for what routers change (IBTA annex A17.3.4): of IPv4 also the
identification and the flags, which a UDP socket neither chooses nor sees.

- **Sent** packets count on Linux putting identification 0 and "don't fragment" on datagrams of an unconnected socket
  that has path MTU discovery set to DO or PROBE.
- **Received** packets may have any identification: rxe and adapters count them. The checksum is linear, so those of
  all 65,536 identifications are one affine space; a packet is good if its checksum lies in it. What is left of the
  checksum's strength is 16 bits of 32: a packet that was damaged at random passes once in 65,536 times, and UDP's own
  checksum, where the sender made one, stands beside it. The flags must be "don't fragment". Over IPv6 all fields are
  known, and the checksum has its full strength.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from ipaddress import ip_address
from struct import Struct
from typing import Final

from sidestep.rdma.frames import IpAddress, network_header
from sidestep.rdma.roce.packet import ICRC_LEN, UDP_PORT, begin_icrc, finish_icrc

DATAGRAM_MAX: Final = 65536  # bytes, of many packets that are cut or come together
_UDP: Final = Struct(">HHHH")
_PROTOCOL_UDP: Final = 17
_IDENTIFICATION: Final = 4  # offset in the header of IPv4
_IPV4_LEN: Final = 20


def seal(transport: bytes, source: IpAddress, destination: IpAddress, source_port: int = UDP_PORT) -> bytes:
    """The payload of the datagram that carries a packet."""
    return transport + _checksum(transport, source, destination, source_port)


def is_intact(
    payload: bytes | bytearray | memoryview, source: IpAddress, destination: IpAddress, source_port: int
) -> bool:
    """Whether the last four bytes of a datagram's payload are the checksum of what is before them."""
    return identification_of(payload, source, destination, source_port) is not None


def identification_of(
    payload: bytes | bytearray | memoryview, source: IpAddress, destination: IpAddress, source_port: int
) -> int | None:
    """The identification of IPv4 with which a datagram's checksum is right; None: there is none."""
    transport = payload[:-ICRC_LEN]
    made = int.from_bytes(_checksum(transport, source, destination, source_port), "little")
    difference = made ^ int.from_bytes(payload[-ICRC_LEN:], "little")
    found = 0
    if source.version == 4:
        for high, vector, bits in _identifications(len(transport)):
            if difference >> high & 1:
                difference ^= vector
                found ^= bits
    return None if difference else found


def udp_header(source_port: int, payload_len: int) -> bytes:
    """Of a datagram with a packet; without UDP's checksum."""
    return _UDP.pack(source_port, UDP_PORT, _UDP.size + payload_len, 0)


@lru_cache(maxsize=1024)
def known_address(text: str) -> IpAddress:
    """An address as sockets tell it; a zone is of this host only, and not on the wire."""
    address = ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _checksum(
    transport: bytes | bytearray | memoryview, source: IpAddress, destination: IpAddress, source_port: int
) -> bytes:
    return finish_icrc(_begun(len(transport), source, destination, source_port), transport)


@lru_cache(maxsize=4096)  # of each connection few lengths are frequent
def _begun(transport_len: int, source: IpAddress, destination: IpAddress, source_port: int) -> int:
    """The checksum over the headers in front of a packet, which are the same for all of this length."""
    udp_len = _UDP.size + transport_len + ICRC_LEN
    udp = udp_header(source_port, transport_len + ICRC_LEN)
    return begin_icrc(network_header(source, destination, _PROTOCOL_UDP, udp_len) + udp)


@lru_cache(maxsize=2048)  # lengths are multiples of 4, up to the largest MTU and its headers
def _identifications(transport_len: int) -> tuple[tuple[int, int, int], ...]:
    """What each bit of the identification does to the checksum of a packet of this length, as a reduced basis.

    Each vector has a highest bit that the ones behind it have not, and the bits that it stands for.
    """
    size = _IPV4_LEN - _IDENTIFICATION + _UDP.size + transport_len
    zero = zlib.crc32(bytes(size))
    basis: list[tuple[int, int, int]] = []
    for bit in range(16):
        vector, bits = zlib.crc32((1 << bit).to_bytes(2).ljust(size, b"\0")) ^ zero, 1 << bit
        for high, other, of_other in basis:
            if vector >> high & 1:
                vector ^= other
                bits ^= of_other
        assert vector, "CRC-32 tells all words of 16 bits apart"
        basis.append((vector.bit_length() - 1, vector, bits))
    return tuple(basis)
