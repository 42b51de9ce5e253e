"""The port mapper of iWARP: which TCP port serves RDMA for a known service (draft-pinkerton-iwarp-sdp, UDP 3935).

A client asks (PMReq), the server names a port (PMAccept) or refuses (PMDeny), and the client confirms (PMAck). All four
are one 48-byte message, big-endian. Unlike in SDP's Hello, an IPv4 address stands in the *first* four of 16 bytes. The
port-mapper daemon of Linux also sends requests of 64 bytes that name a mapped port and address of the client; they are
read, never written. This module is the message only, not the exchange.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address
from struct import Struct
from typing import ClassVar, Final, Self

from sidestep.errors import Misuse, Rules
from sidestep.sdp.hello import IpAddress

UDP_PORT: Final = 3935

RULES: Final = Rules(
    pm_length="a port-mapper message is 48 bytes; a request may also be 64",
    pm_version="the version of the port mapper is 0",
    pm_ip_version="addresses are of IP version 4 or 6",
)


class PortMapKind(IntEnum):
    """What a message is."""

    REQUEST = 0
    ACCEPT = 1
    ACK = 2
    DENY = 3


@dataclass(frozen=True, slots=True)
class PortMap:
    """One message of the port mapper."""

    kind: PortMapKind
    ap_port: int  # request: the service's known port; accept and ack: the mapped one; deny: zero, or as in the request
    cp_port: int  # the client's TCP port
    assoc_handle: int  # chosen by the client
    cp_ip: IpAddress
    ap_ip: IpAddress
    pm_time: int = 0  # in an accept: how long it may be kept, see `lifetime_s`
    mapped_cp: tuple[IpAddress, int] | None = None  # of a 64-byte request

    _LAYOUT: ClassVar[Struct] = Struct(">BBHHHQ16s16s")
    _MAPPED_SIZE: ClassVar[int] = 64

    def encode(self) -> bytes:
        """Its 48 bytes; `Misuse` if a value does not fit or the addresses differ in their version."""
        if self.cp_ip.version != self.ap_ip.version:
            raise Misuse(f"{self.cp_ip} and {self.ap_ip} are of different IP versions")
        try:
            return self._LAYOUT.pack(
                self.kind << 4 | self.cp_ip.version,
                self.pm_time,
                0,
                self.ap_port,
                self.cp_port,
                self.assoc_handle,
                self.cp_ip.packed.ljust(16, b"\0"),
                self.ap_ip.packed.ljust(16, b"\0"),
            )
        except struct.error as error:
            raise Misuse(f"{self} does not fit its fields: {error}") from error

    @classmethod
    def decode(cls, datagram: memoryview) -> Self:
        """Read a datagram; `PeerViolation` if it is not one. Reserved bits are not looked at."""
        size = len(datagram)
        if size < cls._LAYOUT.size:
            raise RULES.broken("pm_length", f"{size} bytes")
        first, pm_time, mapped_port, ap_port, cp_port, handle, cp_ip, ap_ip = cls._LAYOUT.unpack_from(datagram)
        kind, ip_version = PortMapKind(first >> 4 & 3), first & 0xF
        if first >> 6:
            raise RULES.broken("pm_version", f"version {first >> 6}")
        if ip_version not in (4, 6):
            raise RULES.broken("pm_ip_version", f"IP version {ip_version}")
        mapped = None
        if size == cls._MAPPED_SIZE and kind is PortMapKind.REQUEST:
            mapped = (_address(ip_version, bytes(datagram[cls._LAYOUT.size :])), mapped_port)
        elif size != cls._LAYOUT.size:
            raise RULES.broken("pm_length", f"{kind.name} of {size} bytes")
        return cls(
            kind, ap_port, cp_port, handle, _address(ip_version, cp_ip), _address(ip_version, ap_ip), pm_time, mapped
        )

    @property
    def lifetime_s(self) -> float:
        """Seconds that an accepted mapping may be kept: 0 for one connection only, infinity for ever."""
        if self.pm_time == 255:
            return math.inf
        return self.pm_time * (0.25 if self.pm_time < 128 else 1.0)


def pm_time_of(seconds: float) -> int:
    """The PmTime for so many seconds, or a little less: a mapping is not to be used for longer than it is there."""
    quarters = int(seconds * 4)
    return quarters if quarters < 128 else max(127, min(int(seconds), 254))


def _address(ip_version: int, wire: bytes) -> IpAddress:
    return IPv4Address(wire[:4]) if ip_version == 4 else IPv6Address(wire)
