"""The 40 bytes in front of a received datagram: from where it comes.

RoCEv2 has the IP header there: IPv6's is 40 bytes, IPv4's are the last 20, behind 20 of no meaning (IBTA annex A17).
They are told apart as Linux does it: by the version, and by IPv4's checksum where the other bytes look like IPv6.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from typing import Final

from sidestep.errors import PeerViolation
from sidestep.rdma.frames import IpAddress, internet_checksum, network_header
from sidestep.rdma.work import GRH_LEN

_IPV4_LEN: Final = 20
_IPV4_FIRST: Final = 0x45  # version 4, no options: RoCE has none
_PROTOCOL_UDP: Final = 17


def written(source: IpAddress, destination: IpAddress, udp_len: int) -> bytes:
    """Of a datagram that came by UDP. What a socket does not see has the value that is usual: hop limit, class."""
    return network_header(source, destination, _PROTOCOL_UDP, udp_len).rjust(GRH_LEN, b"\0")


def source_of(grh: bytes | bytearray | memoryview) -> str:
    """The address of who sent it.

    Raises:
        PeerViolation: There is none: an adapter of InfiniBand leaves the bytes as they were where packets have no GRH.
    """
    header = bytes(grh[_IPV4_LEN:GRH_LEN])
    if len(header) == _IPV4_LEN:
        is_v6 = grh[0] >> 4 == 6
        # rxe leaves out the checksum where a packet does not leave its host.
        if header[0] == _IPV4_FIRST and not (is_v6 and internet_checksum(header)):
            return str(IPv4Address(header[12:16]))
        if is_v6:
            found = IPv6Address(bytes(grh[8:24]))
            return str(found.ipv4_mapped or found)
    raise PeerViolation("a datagram tells no address", rule="grh")
