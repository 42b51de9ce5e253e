"""SDP over InfiniBand's reliable connections, out of their packets: RoCE of both versions, and InfiniBand itself.

A packet names only the queue pair that it goes to. Which of them carry SDP the connection manager tells: a REQ with an
SDP service ID names the connecting side's queue pair, the REP the accepting side's. Where a capture began too late for
that, a Send that is in every respect an SDP message makes its queue pair count as one of SDP's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.observe.capture.events import CHECKSUM_NOTE, Event, What, header_of
from sidestep.observe.capture.flow import PacketConnection, PacketFlow, PacketReader
from sidestep.observe.capture.frame import CapturedFrame
from sidestep.observe.capture.layers import Address, Transport, end_text
from sidestep.rdma.frames import Side
from sidestep.rdma.roce.mad import REJECT_REASONS, CmMad, Dreq, Mad, Mra, Rej, Rep, Req
from sidestep.rdma.roce.packet import MTU_CODES, QP_GSI, Op, Packet
from sidestep.sdp.hello import Hello, HelloAck, port_of


class ReliableConnections:
    """Follows all connections of a capture."""

    def __init__(self) -> None:
        self._count = 0
        self._flows: OrderedDict[tuple[Address, int], PacketFlow] = OrderedDict()  # by who receives, and queue pair
        self._by_comm_id: OrderedDict[tuple[Address, int], tuple[PacketConnection, Side]] = OrderedDict()

    def feed(self, frame: CapturedFrame, transport: Transport) -> Iterator[Event]:
        try:
            packet = Packet.decode(transport.packet)
        except PeerViolation:
            return
        payload, missing = memoryview(packet.payload), max(0, transport.missing - packet.bth.pad)
        if missing > len(payload):  # its headers are not all there
            return
        packet = replace(packet, payload=payload[: len(payload) - missing])
        template = Event(
            frame.number, frame.time_ns, transport.wire, str(transport.source), str(transport.destination), What.SDP,
            note=CHECKSUM_NOTE if transport.checksum_wrong else "",
        )  # fmt: skip
        if packet.bth.opcode is Op.UD_SEND_ONLY:
            if packet.bth.dest_qp == QP_GSI and not missing:
                yield from self._datagram(template, transport, packet)
            return
        flow = self._flow(transport.destination, packet.bth.dest_qp)
        if flow.sdp is not False:
            yield from PacketReader(flow, _named(template, flow.connection, flow.sender), packet, missing).events()

    def _flow(self, receiver: Address, qpn: int) -> PacketFlow:
        flow = self._flows.get((receiver, qpn))
        return flow if flow is not None else self._add_flow(receiver, qpn, PacketFlow(None, None, None))

    def _add_flow(self, receiver: Address, qpn: int, flow: PacketFlow) -> PacketFlow:
        self._flows[receiver, qpn] = flow
        if len(self._flows) > 2 * limits.CAPTURE_CONNECTIONS_MAX:
            self._flows.popitem(last=False)
        return flow

    def _add_connected(
        self, receiver: Address, qpn: int, connection: PacketConnection, sender: Side, starting_psn: int
    ) -> None:
        flow = PacketFlow(connection, sender, connection.sdp, connection.mtu, next_psn=starting_psn)
        self._add_flow(receiver, qpn, flow)

    # ---- the connection manager ----

    def _datagram(self, template: Event, transport: Transport, packet: Packet) -> Iterator[Event]:
        try:
            message = Mad.decode(packet.payload).message
        except PeerViolation:
            return
        template = replace(template, what=What.CM, text=cm_text(message))
        if isinstance(message, Req):
            yield from self._req(template, transport, message)
        elif isinstance(message, Rep):
            yield from self._rep(template, transport, message)
        else:
            connection, side = self._known(transport, message)
            if connection is not None and connection.sdp:
                yield _named(template, connection, side)

    def _req(self, template: Event, transport: Transport, req: Req) -> Iterator[Event]:
        port = port_of(req.service_id)
        known = self._by_comm_id.get((transport.source, req.local_comm_id))
        flow = self._flows.get((transport.source, req.qpn))
        if known is not None and flow is not None and flow.connection is known[0]:
            if known[0].sdp:
                yield replace(_named(template, *known), what=What.TRANSPORT, text=f"again: {template.text}")
            return
        connection = self._connection(port is not None)
        connection.names = _names(req, transport, port)
        self._remember(transport.source, req.local_comm_id, connection, Side.CONNECTING)
        self._add_connected(transport.source, req.qpn, connection, Side.ACCEPTING, req.starting_psn)
        if connection.sdp:
            template = _named(template, connection, Side.CONNECTING)
            yield template
            yield replace(template, what=What.SDP, text="", message=req.private_data)

    def _rep(self, template: Event, transport: Transport, rep: Rep) -> Iterator[Event]:
        connection, _ = self._by_comm_id.get((transport.destination, rep.remote_comm_id), (None, None))
        if connection is None:
            connection = self._connection(isinstance(header_of(rep.private_data), HelloAck))
            connection.names = {
                Side.CONNECTING: str(transport.destination),
                Side.ACCEPTING: f"{transport.source} QP {rep.qpn:#x}",
            }
        known = self._flows.get((transport.source, rep.qpn))
        again = known is not None and known.connection is connection
        if not again:
            self._remember(transport.source, rep.local_comm_id, connection, Side.ACCEPTING)
            self._add_connected(transport.source, rep.qpn, connection, Side.CONNECTING, rep.starting_psn)
        if connection.sdp:
            template = _named(template, connection, Side.ACCEPTING)
            if again:
                yield replace(template, what=What.TRANSPORT, text=f"again: {template.text}")
                return
            yield template
            yield replace(template, what=What.SDP, text="", message=rep.private_data)

    def _connection(self, sdp: bool) -> PacketConnection:
        if sdp:
            self._count += 1
        return PacketConnection(self._count if sdp else 0, sdp, {})

    def _remember(self, owner: Address, comm_id: int, connection: PacketConnection, side: Side) -> None:
        self._by_comm_id[owner, comm_id] = (connection, side)
        if len(self._by_comm_id) > 2 * limits.CAPTURE_CONNECTIONS_MAX:
            self._by_comm_id.popitem(last=False)

    def _known(self, transport: Transport, message: CmMad) -> tuple[PacketConnection | None, Side | None]:
        """The connection that a message belongs to, and who sends it."""
        local, remote = getattr(message, "local_comm_id", 0), getattr(message, "remote_comm_id", 0)
        if (transport.source, local) in self._by_comm_id:
            return self._by_comm_id[transport.source, local]
        if (transport.destination, remote) in self._by_comm_id:
            connection, side = self._by_comm_id[transport.destination, remote]
            return connection, side.other
        return None, None


def cm_text(message: CmMad) -> str:
    name = f"CM {type(message).__name__.upper()}"
    match message:
        case Req():
            mtu = MTU_CODES.get(message.mtu_code, f"code {message.mtu_code}")
            return (
                f"{name}: service ID {message.service_id:#018x}, QP {message.qpn:#x}, "
                f"starting PSN {message.starting_psn:#08x}, path MTU {mtu}"
            )
        case Rep():
            return f"{name}: QP {message.qpn:#x}, starting PSN {message.starting_psn:#08x}"
        case Rej():
            return f"{name}: reason {message.reason}, {REJECT_REASONS.get(message.reason, 'not one of those known')}"
        case Dreq():
            return f"{name}: QP {message.remote_qpn:#x}"
        case Mra():
            return f"{name}: service timeout {message.service_timeout}"
        case _:
            return name


def _names(req: Req, transport: Transport, port: int | None) -> dict[Side, str]:
    """What the ends call themselves in the Hello, else what the packets say."""
    if isinstance(header := header_of(req.private_data), Hello):
        return {
            Side.CONNECTING: end_text(header.src_ip, header.local_port),
            Side.ACCEPTING: end_text(header.dst_ip, port),
        }
    return {
        Side.CONNECTING: f"{transport.source} QP {req.qpn:#x}",
        Side.ACCEPTING: end_text(transport.destination, port),
    }


def _named(template: Event, connection: PacketConnection | None, side: Side | None) -> Event:
    if connection is None or side is None:
        return template
    return replace(
        template, connection=connection.number, side=side,
        source=connection.names[side], destination=connection.names[side.other],
    )  # fmt: skip
