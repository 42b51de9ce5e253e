"""Packets of RoCEv2 that a device tells, as frames: Ethernet and IP around UDP's datagrams as they were.

What is on the wire is what dissectors of SDP over InfiniBand read, so nothing is put together or cut here. Which queue
pairs carry SDP, and for which programs, the connection manager's REQ tells. Where two providers have joined queue pairs
without it, REQ, REP and RTU are made of what they said, and a comment tells that.

The identification of IPv4, which sockets do not see, is the one with which the packet's checksum is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from struct import Struct
from typing import TYPE_CHECKING, Final, TypeAlias

from sidestep.errors import PeerViolation
from sidestep.observe.capture.places import Named
from sidestep.rdma.frames import IpAddress, Side, ethernet_header, network_header
from sidestep.rdma.iwarp.tap import SeenKind
from sidestep.rdma.roce.connection import RecordKind, RoceConnection, RoceEnds, RoceRecord
from sidestep.rdma.roce.datagram import identification_of
from sidestep.rdma.roce.ip_cm import HEADER_LEN, has_header
from sidestep.rdma.roce.mad import Mad, Req
from sidestep.rdma.roce.packet import ICRC_LEN, MTU_CODES, QP_GSI, Packet
from sidestep.rdma.roce.tap import Joined
from sidestep.sdp.hello import service_id

if TYPE_CHECKING:
    from sidestep.observe.capture.places import Place
    from sidestep.rdma.iwarp.tap import Seen, WireEnds

_UDP: Final = Struct(">HHHH")
_PROTOCOL_UDP: Final = 17
_PORT_MASK: Final = 0xFFFF
_BEFORE: Final = "this connection began before the capture"
_MADE: Final = (
    "REQ, REP and RTU are made up: these queue pairs were joined by what two providers told each other, and their "
    "private data are the same"
)
_Frame: TypeAlias = tuple[bool, bytes, str]  # sent by this end, bytes, comment


@dataclass(slots=True)
class Wire:
    """A connection that is written."""

    source: str  # the process that tells it, in words
    ends: WireEnds
    interface: int


@dataclass(slots=True)
class PacketWire(Wire):
    """One of RoCE."""

    local: IpAddress
    remote: IpAddress
    wanted: bool | None = None  # None: it has not said yet what it is

    def frame(self, udp: bytes, *, outbound: bool) -> bytes:
        side = Side.CONNECTING if outbound is self.ends.active else Side.ACCEPTING
        source, destination = (self.local, self.remote) if outbound else (self.remote, self.local)
        port, payload = _UDP.unpack_from(udp)[0], udp[_UDP.size :]
        identification = identification_of(payload, source, destination, port) or 0
        head = network_header(source, destination, _PROTOCOL_UDP, len(udp), identification)
        return ethernet_header(side, source.version) + head + udp


class Packets:
    """Makes frames of what devices tell.

    Args:
        places: Only connections with one of these at either end; None: all.
        sdp_only: Only those that carry SDP.
    """

    def __init__(self, places: Sequence[Place] | None, *, sdp_only: bool) -> None:
        self._places = places
        self._sdp_only = sdp_only

    def wire(self, source: str, ends: WireEnds, interface: int) -> PacketWire:
        local, remote = (ip_address(address.partition("%")[0]) for address, _ in (ends.local, ends.remote))
        return PacketWire(source, ends, interface, local, remote)

    def frames(self, wire: PacketWire, seen: Seen) -> Iterator[_Frame]:
        """Of one thing that was told; none before it is known that the connection is wanted, nor if it is not."""
        if seen.what is SeenKind.JOINED:
            yield from self._joined(wire, seen)
        elif seen.what is SeenKind.PACKET:
            first = wire.wanted is None
            if first:
                self._judge(wire, *_asked(seen.data))
            if wire.wanted:
                comment = f"sidestep: {_BEFORE}; its handshake is as it was" if first and wire.ends.began_before else ""
                yield seen.outbound, wire.frame(seen.data, outbound=seen.outbound), comment

    def _joined(self, wire: PacketWire, seen: Seen) -> Iterator[_Frame]:
        try:
            joined = Joined.decode(seen.data)
        except PeerViolation:
            wire.wanted = False
            return
        named = self._judge(wire, joined.service_id, joined.request)
        if not wire.wanted:
            return
        asking, asked = (wire.local, wire.remote) if wire.ends.active else (wire.remote, wire.local)
        one, other = joined.qp
        program = service_id(named.program_ports[1]) if named.hello is not None else joined.service_id
        made = RoceConnection(
            RoceEnds(
                asking, asked, program, joined.qp, comm_id=(one, other), starting_psn=joined.psn,
                mtu_code=next((code for code, mtu in MTU_CODES.items() if mtu == joined.mtu), 1), transaction_id=one,
            )
        )  # fmt: skip
        comment = f"sidestep: {f'{_BEFORE}; ' if wire.ends.began_before else ''}{_MADE}"
        for side, kind, data in (
            (Side.CONNECTING, RecordKind.REQ, joined.request[: Req.PRIVATE_LEN]),
            (Side.ACCEPTING, RecordKind.REP, joined.reply),
            (Side.CONNECTING, RecordKind.RTU, b""),
        ):
            for frame in made.frames(RoceRecord(seen.time_ns / 1e9, side, kind, data)):
                yield (side is Side.CONNECTING) is wire.ends.active, frame, comment
                comment = ""

    def _judge(self, wire: PacketWire, service: int, private_data: bytes) -> Named:
        """Decides whether it is wanted."""
        ends = wire.ends
        named = Named.of(ends, private_data)
        if service and named.hello is None:  # the port that was asked for is better known than a queue pair
            there = (ends.remote if ends.active else ends.local)[0], service & _PORT_MASK
            ends = replace(ends, remote=there) if ends.active else replace(ends, local=there)
            named = Named.of(ends, private_data)
        wire.wanted = named.at(self._places) and (named.hello is not None or not self._sdp_only)
        return named


def _asked(udp: bytes) -> tuple[int, bytes]:
    """What a REQ asks for, and its private data; nothing if this packet is none."""
    try:
        packet = Packet.decode(memoryview(udp)[_UDP.size : -ICRC_LEN])
        message = Mad.decode(packet.payload).message if packet.bth.dest_qp == QP_GSI else None
    except PeerViolation:
        message = None
    if not isinstance(message, Req):
        return 0, b""
    data = message.private_data
    return message.service_id, data[HEADER_LEN:] if has_header(message.service_id) else data
