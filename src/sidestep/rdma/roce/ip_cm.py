"""Private data of rdma_cm's port spaces: 36 bytes that tell the IP addresses, before those of the consumer.

IBTA annex A11: service ids that begin with 0x0000000001, the protocol and the port. SDP's own, 0x000000000001 and the
port, have no such header: the Hello says the same.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from sidestep.errors import Rules
from sidestep.rdma.frames import IpAddress

TCP_SERVICE: Final = 0x0000_0000_0106_0000  # and the port
HEADER_LEN: Final = 36
_SERVICES: Final = 0x0000_0000_01  # the upper 40 bits of a service id of the IP CM service
_LAYOUT: Final = Struct(">BBH16s16s")

RULES: Final = Rules(
    ip_cm_version="the IP addressing header of a request has version 0 and IP version 4 or 6",
)


def has_header(service_id: int) -> bool:
    """Whether requests for it carry the header."""
    return service_id >> 24 == _SERVICES


def encode(source: IpAddress, source_port: int, destination: IpAddress) -> bytes:
    """The header of a request."""
    return _LAYOUT.pack(0, source.version << 4, source_port, _wide(source), _wide(destination))


def check(private_data: bytes) -> None:
    """Raises PeerViolation if it does not begin with a header; who is told there is known by the datagram."""
    version, ip_version, *_ = _LAYOUT.unpack_from(private_data)
    if version or ip_version >> 4 not in (4, 6):
        raise RULES.broken("ip_cm_version", f"version {version:#04x}, IP version {ip_version >> 4}")


def _wide(address: IpAddress) -> bytes:
    return address.packed.rjust(16, b"\0")  # IPv4 behind zeros, unlike in a GID
