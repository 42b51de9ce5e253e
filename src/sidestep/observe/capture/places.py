"""Which connections a capture is about: those with an end at one of some places.

The ends are those of the connection between the devices and, where it carries one of programs to another host, those of
the programs' TCP connection, as its Hello and what stands beside it tell (`sidestep.remote.promotion`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, TypeAlias

from sidestep.errors import PeerViolation
from sidestep.remote.promotion import Promotion
from sidestep.sdp.hello import Hello, IpAddress, IwarpHello
from sidestep.sdp.wire import Decoded, decode

if TYPE_CHECKING:
    from sidestep.rdma.iwarp.tap import WireEnds

Place: TypeAlias = tuple[str, int | None]  # an address, and a port if only one is wanted


@dataclass(frozen=True, slots=True)
class Named:
    """The ends of a connection, by what an MPA Request says."""

    source: IpAddress  # of the end that connected
    destination: IpAddress
    ports: tuple[int, int]  # the devices'
    program_ports: tuple[int, int]  # the programs', as far as they are known
    hello: Decoded | None  # what the Request begins with, if it asks for an SDP connection

    @classmethod
    def of(cls, ends: WireEnds, private_data: bytes) -> Named:
        """Raises ValueError if an address is none: the connection was gone before it could be asked for."""
        (address, port), (to, to_port) = (ends.local, ends.remote) if ends.active else (ends.remote, ends.local)
        hello = first_message(private_data)
        program_port, served = port, to_port
        if hello is None or not isinstance(hello.header, Hello | IwarpHello):
            hello = None
        else:
            program_port = hello.header.local_port if isinstance(hello.header, Hello) else port
            served = Promotion.port_in(private_data) or to_port
        source, destination = ip_address(address.partition("%")[0]), ip_address(to.partition("%")[0])
        return cls(source, destination, (port, to_port), (program_port, served), hello)

    def at(self, places: Sequence[Place] | None) -> bool:
        """Whether one end is at one of these; None: any will do."""
        if places is None:
            return True
        ports = (self.ports, self.program_ports)
        found = {(str(self.source), one) for one, _ in ports} | {(str(self.destination), one) for _, one in ports}
        return any(address == wanted and port in (None, one) for address, one in found for wanted, port in places)


def first_message(private_data: bytes) -> Decoded | None:
    """The SDP message that private data begin with; other things may stand behind it."""
    try:
        return decode(memoryview(private_data)[: int.from_bytes(private_data[4:8])])
    except PeerViolation:
        return None
