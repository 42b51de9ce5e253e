"""The invariant checksum of RoCEv2: what routers may change counts as ones (IBTA volume 1 annex A17, and 7.8.1).

It is the CRC-32 of Ethernet over a pseudo packet: eight bytes of ones in place of the local routing header, the IP and
UDP headers and the base transport header with what may change set to ones, then all up to the checksum itself.
"""

from __future__ import annotations

import zlib
from typing import Final

_BTH_RESERVED: Final = 4  # of the base transport header: congestion bits and reserved ones
_UDP_LEN: Final = 8


def icrc(packet: bytes | memoryview) -> bytes:
    """The four bytes for a packet from its IP header on, without the checksum; its lengths already count them."""
    masked = bytearray(packet)
    if masked[0] >> 4 == 4:
        udp = (masked[0] & 0xF) * 4
        masked[1] = 0xFF  # type of service
        masked[8] = 0xFF  # time to live
        masked[10:12] = b"\xff\xff"  # header checksum
    else:
        udp = 40
        masked[0:4] = b"\x6f\xff\xff\xff"  # traffic class and flow label
        masked[7] = 0xFF  # hop limit
    masked[udp + 6 : udp + 8] = b"\xff\xff"  # UDP checksum
    masked[udp + _UDP_LEN + _BTH_RESERVED] = 0xFF
    return zlib.crc32(masked, zlib.crc32(b"\xff" * 8)).to_bytes(4, "little")
