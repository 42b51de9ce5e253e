"""How large packets of RoCE may be: path MTUs by their codes, and what a route lets through."""

from __future__ import annotations

import socket
from typing import Final

from sidestep.rdma.roce.packet import MTU_CODES, UDP_PORT

PACKET_OVERHEAD: Final = 80  # bytes of a packet beside its payload, as Linux's rxe counts them
ROUTE_MTU_UNKNOWN: Final = 1500
# Of Linux, and not in Python's socket module.
_IP_MTU: Final = 14
_IPV6_MTU: Final = 24


def route_mtu(local: str, remote: str, *, ipv6: bool) -> int:
    """Bytes of an IP packet that goes there whole, as far as the kernel knows."""
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if ipv6 else (socket.IPPROTO_IP, _IP_MTU)
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.bind((local, 0))
            probe.connect((remote, UDP_PORT))  # nothing is sent
            return probe.getsockopt(level, option)
    except OSError:
        return ROUTE_MTU_UNKNOWN


def largest_code(payload_max: int) -> int:
    """Of the path MTUs that are not larger than so many bytes; the smallest one if none is."""
    return max((code for code, mtu in MTU_CODES.items() if mtu <= payload_max), default=1)
