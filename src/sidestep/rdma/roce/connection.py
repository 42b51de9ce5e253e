"""One reliable connection as frames of RoCEv2: what a wire between two hosts would have carried.

Datagrams of the connection manager, Sends in as many packets as the path MTU asks for, RDMA Reads and Writes, and every
packet with its sequence number, padding and checksum. A conversation over another device is shown to Wireshark and
other tools in this form.

Not made: acknowledgements and anything lost, late or sent twice. A packet is sent when the record says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import ip_address
from struct import Struct
from typing import Final

from sidestep.errors import Misuse
from sidestep.rdma.frames import IpAddress, Side, ethernet_header, network_header
from sidestep.rdma.roce.mad import CmMad, Drep, Dreq, Mad, Rej, Rep, Req, Rtu, gid
from sidestep.rdma.roce.numbers import packets_of
from sidestep.rdma.roce.packet import (
    ACK_NO_CREDITS,
    ICRC_LEN,
    MTU_CODES,
    PSN_MASK,
    QKEY_GSI,
    QP_GSI,
    UDP_PORT,
    Aeth,
    Bth,
    Deth,
    Extension,
    Ieth,
    Op,
    Packet,
    Reth,
    icrc,
)

_UDP: Final = Struct(">HHHH")
_SOURCE_PORT: Final = 0xC000
_PROTOCOL_UDP: Final = 17


class RecordKind(Enum):
    """What is sent."""

    REQ = "CM REQ"  # data: Hello
    REP = "CM REP"  # data: HelloAck
    RTU = "CM RTU"
    REJ = "CM REJ"  # data: private data; of a REQ, or of a REP if the connecting side sends it; `reason`
    DREQ = "CM DREQ"
    DREP = "CM DREP"
    SEND = "Send"  # data: an SDP message
    WRITE = "RDMA Write"  # data: what is written; `rkey`, `va`
    READ_REQUEST = "RDMA Read Request"  # `length`, `rkey`, `va`
    READ_RESPONSE = "RDMA Read Response"  # data: what was read, for the oldest request that has no response yet
    REFUSAL = "NAK"  # of the last request of the other side; `syndrome`


@dataclass(frozen=True, slots=True)
class RoceRecord:
    """One thing that was sent."""

    time_s: float  # since the epoch, or since whatever the conversation began with
    side: Side
    kind: RecordKind
    data: bytes | memoryview = b""
    rkey: int = 0
    va: int = 0
    length: int = 0  # bytes to read
    reason: int = 28  # of a REJ
    solicited: bool = False  # of a Send
    invalidate: int | None = None  # of a Send: the receiver's key that becomes void
    syndrome: int = 0x62  # of a refusal: remote access error


@dataclass
class RoceEnds:
    """Who talks to whom."""

    connecting: IpAddress = field(default_factory=lambda: ip_address("10.0.0.1"))
    accepting: IpAddress = field(default_factory=lambda: ip_address("10.0.0.2"))
    service_id: int = 0x0001_1389
    qpn: tuple[int, int] = (0x111, 0x222)  # of the connecting and of the accepting side, as all pairs here
    comm_id: tuple[int, int] = (0xC0C0C0C0, 0xA0A0A0A0)
    starting_psn: tuple[int, int] = (0x100, 0x200)  # of packets to that side
    mtu_code: int = 3
    transaction_id: int = 0x1122334455667788
    packet_max: int = 0  # bytes of a message in one packet; 0: as the path MTU has it

    def __post_init__(self) -> None:
        if self.connecting.version != self.accepting.version:
            raise Misuse(f"{self.connecting} and {self.accepting} are of different IP versions")

    def address(self, side: Side) -> IpAddress:
        return self.connecting if side is Side.CONNECTING else self.accepting


class RoceConnection:
    """Turns records into packets of one connection."""

    def __init__(self, ends: RoceEnds) -> None:
        self._ends = ends
        self._mtu = self._ends.packet_max or MTU_CODES[self._ends.mtu_code]
        # Packets of one side are numbered as the other side has asked.
        self._psn = {side: self._ends.starting_psn[side.other.value] for side in Side}
        self._datagrams = dict.fromkeys(Side, 0)
        self._completed = dict.fromkeys(Side, 0)  # requests of that side
        self._reads: dict[Side, deque[tuple[int, int]]] = {side: deque() for side in Side}  # PSN and bytes

    def frames(self, record: RoceRecord) -> Iterator[bytes]:
        """The packets of one record, as frames of Ethernet; `Misuse` if it cannot be sent."""
        for packet in self._packets(record):
            yield _frame(packet, record.side, self._ends)

    def skip_read(self, side: Side) -> None:
        """The oldest of this side's RDMA Reads gets no answer here."""
        if self._reads[side]:
            self._reads[side].popleft()
            self._completed[side] += 1

    def _packets(self, record: RoceRecord) -> Iterator[Packet]:
        if record.kind is RecordKind.SEND:
            return self._send(record)
        if record.kind is RecordKind.WRITE:
            return self._rdma_write(record)
        if record.kind is RecordKind.READ_REQUEST:
            return self._read_request(record)
        if record.kind is RecordKind.READ_RESPONSE:
            return self._read_response(record)
        if record.kind is RecordKind.REFUSAL:
            return self._refusal(record)
        return self._datagram(record)

    def _datagram(self, record: RoceRecord) -> Iterator[Packet]:
        mad = Mad(self._ends.transaction_id, self._cm_message(record)).encode()
        bth = Bth(Op.UD_SEND_ONLY, QP_GSI, self._datagrams[record.side])
        self._datagrams[record.side] += 1
        yield Packet(bth, (Deth(QKEY_GSI, QP_GSI),), mad)

    def _cm_message(self, record: RoceRecord) -> CmMad:
        ends, me, data = self._ends, record.side, bytes(record.data)
        local, remote = ends.comm_id[me.value], ends.comm_id[me.other.value]
        match record.kind:
            case RecordKind.REQ:
                return Req(
                    local_comm_id=local, service_id=ends.service_id, qpn=ends.qpn[me.value],
                    starting_psn=ends.starting_psn[me.value], local_gid=gid(ends.address(me)),
                    remote_gid=gid(ends.address(me.other)), private_data=data, mtu_code=ends.mtu_code,
                )  # fmt: skip
            case RecordKind.REP:
                return Rep(local, remote, ends.qpn[me.value], ends.starting_psn[me.value], data)
            case RecordKind.RTU:
                return Rtu(local, remote, data)
            case RecordKind.REJ:
                return Rej(local, remote, record.reason, int(me is Side.CONNECTING), data)
            case RecordKind.DREQ:
                return Dreq(local, remote, ends.qpn[me.other.value], data)
            case _:
                return Drep(local, remote, data)

    # ---- the data path ----

    def _send(self, record: RoceRecord) -> Iterator[Packet]:
        data = memoryview(record.data)
        if record.invalidate is None:
            ops = (Op.SEND_FIRST, Op.SEND_MIDDLE, Op.SEND_LAST, Op.SEND_ONLY)
            return self._request(record.side, ops, data, solicited=record.solicited)
        ops = (Op.SEND_FIRST, Op.SEND_MIDDLE, Op.SEND_LAST_INV, Op.SEND_ONLY_INV)
        return self._request(record.side, ops, data, last=(Ieth(record.invalidate),), solicited=record.solicited)

    def _rdma_write(self, record: RoceRecord) -> Iterator[Packet]:
        ops = (Op.WRITE_FIRST, Op.WRITE_MIDDLE, Op.WRITE_LAST, Op.WRITE_ONLY)
        where = Reth(record.va, record.rkey, len(record.data))
        return self._request(record.side, ops, memoryview(record.data), first=(where,))

    def _request(
        self, side: Side, ops: tuple[Op, Op, Op, Op], data: memoryview, *, first: tuple[Extension, ...] = (),
        last: tuple[Extension, ...] = (), solicited: bool = False,
    ) -> Iterator[Packet]:  # fmt: skip
        for op, piece in self._pieces(ops, data):
            begins, ends = op in (ops[0], ops[3]), op in (ops[2], ops[3])
            extensions = (first if begins else ()) + (last if ends else ())
            yield self._packet(
                side, op, self._next_psn(side, 1), extensions, piece, ack_req=ends, solicited=ends and solicited
            )
        self._completed[side] += 1

    def _read_request(self, record: RoceRecord) -> Iterator[Packet]:
        psn = self._next_psn(record.side, packets_of(record.length, self._mtu))  # of its responses
        self._reads[record.side].append((psn, record.length))
        where = Reth(record.va, record.rkey, record.length)
        yield self._packet(record.side, Op.READ_REQUEST, psn, (where,), ack_req=True)

    def _read_response(self, record: RoceRecord) -> Iterator[Packet]:
        reader = record.side.other
        if not self._reads[reader]:
            raise Misuse("an RDMA Read Response without a request")
        psn, length = self._reads[reader].popleft()
        if len(record.data) != length:
            raise Misuse(f"an RDMA Read Response of {len(record.data)} bytes for {length}")
        self._completed[reader] += 1
        acknowledged = Aeth.of(ACK_NO_CREDITS, self._completed[reader])
        ops = (Op.READ_RESPONSE_FIRST, Op.READ_RESPONSE_MIDDLE, Op.READ_RESPONSE_LAST, Op.READ_RESPONSE_ONLY)
        for index, (op, piece) in enumerate(self._pieces(ops, memoryview(record.data))):
            extensions = () if op is Op.READ_RESPONSE_MIDDLE else (acknowledged,)
            yield self._packet(record.side, op, psn + index & PSN_MASK, extensions, piece)

    def _refusal(self, record: RoceRecord) -> Iterator[Packet]:
        requester = record.side.other
        refused = Aeth.of(record.syndrome, self._completed[requester])
        yield self._packet(record.side, Op.ACK, self._psn[requester] - 1 & PSN_MASK, (refused,))

    def _pieces(self, ops: tuple[Op, Op, Op, Op], data: memoryview) -> Iterator[tuple[Op, memoryview]]:
        """Cut at the path MTU: first, middle, last; or only one."""
        starts = range(0, max(1, len(data)), self._mtu)
        for start in starts:
            op = ops[1]
            if len(starts) == 1:
                op = ops[3]
            elif start == 0:
                op = ops[0]
            elif start == starts[-1]:
                op = ops[2]
            yield op, data[start : start + self._mtu]

    def _next_psn(self, side: Side, count: int) -> int:
        psn = self._psn[side]
        self._psn[side] = psn + count & PSN_MASK
        return psn

    def _packet(
        self, side: Side, op: Op, psn: int, extensions: tuple[Extension, ...] = (), payload: memoryview | bytes = b"",
        *, ack_req: bool = False, solicited: bool = False,
    ) -> Packet:  # fmt: skip
        dest_qp = self._ends.qpn[side.other.value]
        bth = Bth(op, dest_qp, psn, ack_req=ack_req, solicited=solicited, pad=-len(payload) % 4)
        return Packet(bth, extensions, payload)


def _frame(packet: Packet, side: Side, ends: RoceEnds) -> bytes:
    transport = packet.encode()
    source, destination = ends.address(side), ends.address(side.other)
    udp_len = _UDP.size + len(transport) + ICRC_LEN
    udp = _UDP.pack(_SOURCE_PORT, UDP_PORT, udp_len, 0)
    whole = network_header(source, destination, _PROTOCOL_UDP, udp_len) + udp + transport
    return ethernet_header(side, source.version) + whole + icrc(whole)
