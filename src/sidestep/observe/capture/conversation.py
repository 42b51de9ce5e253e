"""What SDP connections of software RNICs say, as the packets that InfiniBand would carry it in.

    writer = ConversationWriter(stream, places=[("192.0.2.7", 6379)])

Dissectors know SDP over InfiniBand, not over iWARP. So what devices tell of their iWARP connections, segment by
segment, is put together to the messages of RDMAP, and these are written as RoCEv2 (`writer`): Sends, RDMA Writes and
Reads with the very bytes, keys and addresses, at their times, between the real IP addresses. MPA's Request and Reply
become the exchange of InfiniBand's connection manager, with the Hello and HelloAck that they carry, so that dissectors
take the queue pairs for SDP's. A device remembers how its connections began: that comes first also where the capture
begins in the middle.

Made up are the numbers of queue pairs, packets and transactions, UDP's ports, and that there is no TCP beneath. A Hello
of iWARP's short form becomes one of InfiniBand's. Messages lie in one packet each unless a path MTU is asked for:
dissectors do not put them together. Such packets exceed the path MTU of the REQ, which cannot state more than 4096.
Acknowledgements are not written. What is missing is told in comments.

Other connections than SDP's are left out, and those that nobody has asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from sidestep import limits
from sidestep.errors import Misuse, PeerViolation
from sidestep.observe.capture.cutter import Cutter, Piece
from sidestep.observe.capture.devices import DeviceWriter
from sidestep.observe.capture.packets import Wire
from sidestep.observe.capture.places import Named, Place, first_message
from sidestep.rdma.frames import Side
from sidestep.rdma.iwarp.ddp import INVALIDATING, SENDS, SOLICITED, TAGGED, RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.startup.frame import DEPTH_MAX, MpaRole, StartFrame
from sidestep.rdma.iwarp.tap import Seen, SeenKind
from sidestep.rdma.iwarp.terminate import terminate_text
from sidestep.rdma.roce.connection import RecordKind, RoceConnection, RoceEnds, RoceRecord
from sidestep.rdma.roce.mad import Rej
from sidestep.rdma.roce.packet import MTU_CODES
from sidestep.sdp.header import Bsdh, Header
from sidestep.sdp.hello import Hello, HelloAck, IwarpHello, IwarpHelloAck, service_id
from sidestep.sdp.wire import Decoded, encode

if TYPE_CHECKING:
    from sidestep.rdma.iwarp import tap

PACKET_MAX: Final = 65_468  # bytes of a message in one packet, without a path MTU: the length of IP has 16 bits
_MTU_LARGEST: Final = 5  # code of 4096
_QPN_FIRST, _QPN_COUNT = 0x100, 1 << 20
_PSN_STEP: Final = 1 << 12  # packets of two connections are not to be taken for each other's
_PSN_MASK: Final = 0xFF_FFFF
_REMOTE_OPERATION_ERROR: Final = 0x63  # syndrome: a Terminate says more than any of them
_MADE: Final = (
    "sidestep: of devices that speak iWARP these frames are synthetic. SDP messages, RDMA Writes and Reads, their "
    "bytes, keys, times and IP addresses are what software RNICs sent and received over iWARP; InfiniBand's packets "
    "around them, and the connection manager's, are made up so that dissectors of SDP over InfiniBand can read them. "
    "The true bytes: sidestep capture --as iwarp. Of devices that speak RoCEv2 the packets are those that they sent "
    "and received"
)
_BEFORE: Final = (
    "sidestep: this connection began before the capture; REQ, REP and RTU are made from what its device remembers"
)


@dataclass(slots=True)
class _Moved:
    """A Write or a Read Response that is not complete: where its first byte goes, and what there is of it."""

    stag: int = 0
    begin: int = 0
    data: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class _Half:
    """One direction."""

    cutter: Cutter
    message: bytearray = field(default_factory=bytearray)  # of a Send that is not complete
    moved: dict[RdmapOp, _Moved] = field(default_factory=lambda: {op: _Moved() for op in TAGGED})
    # Asked for and not answered: STag and offset they go to.
    reads: deque[tuple[int, int]] = field(default_factory=deque)
    missing: int = 0  # bytes of the stream that could not be written, not told yet

    @property
    def parts(self) -> list[bytearray]:
        return [self.message, *(moved.data for moved in self.moved.values())]


@dataclass(slots=True)
class _Talk(Wire):
    """One connection."""

    halves: dict[bool, _Half]  # by `outbound`
    packets: RoceConnection | None = None  # once a Hello was seen
    rejected: bool = False
    ended: set[bool] = field(default_factory=set)

    def side(self, outbound: bool) -> Side:
        return Side.CONNECTING if outbound is self.ends.active else Side.ACCEPTING


class _Unwanted(Exception):
    """The connection is not SDP's, or not one that was asked for."""


class ConversationWriter(DeviceWriter[_Talk]):
    """Turns what devices tell of their SDP connections into frames of one file.

    Args:
        path_mtu: Bytes of a message in one packet, as InfiniBand has them; None: whole messages.
    """

    def __init__(
        self, stream: BinaryIO, *, places: Sequence[Place] | None = None, path_mtu: int | None = None, snaplen: int = 0
    ) -> None:
        kind = ": SDP over iWARP, shown as RoCEv2"
        super().__init__(stream, places, comment=_MADE, kind=kind, snaplen=snaplen, sdp_only=True)
        self._packet_max = 0 if path_mtu else PACKET_MAX
        self._mtu_code = _mtu_code(path_mtu) if path_mtu else _MTU_LARGEST
        self._held = 0  # bytes of messages that are not complete

    def _handle(self, talk: _Talk, seen: Seen) -> bool:
        try:
            self._follow(talk, seen)
        except _Unwanted:
            self._forget(talk, seen)
            return False
        return True

    def _open(self, source: str, seen: Seen, ends: tap.WireEnds) -> _Talk | None:
        if not (ends.local[0] and ends.remote[0] and self._owns(source, ends, seen.time_ns)):
            return None
        halves = {outbound: _Half(Cutter(begins_late=ends.began_before)) for outbound in (True, False)}
        return _Talk(source, ends, self._interface(source, ends.device), halves)

    def _forget(self, wire: Wire, seen: Seen) -> None:
        if isinstance(wire, _Talk):
            for half in wire.halves.values():
                self._drop_parts(half)
        super()._forget(wire, seen)

    def _follow(self, talk: _Talk, seen: Seen) -> None:
        half, other = talk.halves[seen.outbound], talk.halves[not seen.outbound]
        if seen.what is SeenKind.BYTES:
            for piece in half.cutter.feed(seen, other.cutter.start):
                self._take(talk, seen, half, piece)
            return
        if talk.packets is None:
            self._forget(talk, seen)  # it ended before it said what it is
            return
        reset = seen.what is SeenKind.RESET
        comment = "sidestep: the connection was reset" if reset else ""
        if not talk.rejected:
            self._put(talk, seen, RecordKind.DREP if talk.ended else RecordKind.DREQ, comment=comment)
        talk.ended.add(seen.outbound)
        if reset or len(talk.ended) == len(talk.halves):
            self._forget(talk, seen)

    def _take(self, talk: _Talk, seen: Seen, half: _Half, piece: Piece) -> None:
        half.missing += piece.missing
        start, other = half.cutter.start, talk.halves[not seen.outbound].cutter.start
        if piece.missing:
            self._drop_parts(half)
        if piece.whole and start is not None and piece.offset == 0:
            self._begin(talk, seen, start)
        elif talk.packets is None:
            raise _Unwanted
        elif piece.whole and other is not None:
            try:
                segment = Segment.decode(half.cutter.payload(piece, other))
            except PeerViolation:
                half.missing += len(piece.data)
            else:
                self._say(talk, seen, half, segment)
        else:
            half.missing += len(piece.data)
            self._drop_parts(half)

    # ---- the beginning ----

    def _begin(self, talk: _Talk, seen: Seen, start: StartFrame) -> None:
        if start.role is MpaRole.REQUEST:
            self._request(talk, seen, start.upper_data)
            return
        if talk.packets is None:
            raise _Unwanted
        if start.rejected:
            talk.rejected = True
            self._put(talk, seen, RecordKind.REJ, start.upper_data[: Rej.PRIVATE_LEN])
            return
        self._put(talk, seen, RecordKind.REP, _reply_data(start.upper_data))
        self._put(talk, seen, RecordKind.RTU, outbound=not seen.outbound)

    def _request(self, talk: _Talk, seen: Seen, private_data: bytes) -> None:
        try:
            named = Named.of(talk.ends, private_data)
        except ValueError:
            raise _Unwanted from None
        if named.hello is None or not named.at(self._places):
            raise _Unwanted
        self.connections += 1
        number = 2 * self.connections % _QPN_COUNT
        first_psn = number * _PSN_STEP & _PSN_MASK
        talk.packets = RoceConnection(
            RoceEnds(
                named.source, named.destination, service_id(named.program_ports[1]),
                qpn=(_QPN_FIRST + number, _QPN_FIRST + number + 1), comm_id=(number, number + 1),
                starting_psn=(first_psn, first_psn + _PSN_STEP & _PSN_MASK), mtu_code=self._mtu_code,
                transaction_id=number, packet_max=self._packet_max,
            )
        )  # fmt: skip
        hello = _request_data(named, named.hello)
        self._put(talk, seen, RecordKind.REQ, hello, comment=_BEFORE if talk.ends.began_before else "")

    # ---- messages ----

    def _say(self, talk: _Talk, seen: Seen, half: _Half, segment: Segment) -> None:
        if segment.op in SENDS:
            self._send(talk, seen, half, segment)
        elif segment.op is RdmapOp.TERMINATE:
            syndrome, text = _REMOTE_OPERATION_ERROR, terminate_text(segment.payload)
            self._put(talk, seen, RecordKind.REFUSAL, syndrome=syndrome, comment=f"sidestep: Terminate: {text}")
        elif segment.op is RdmapOp.READ_REQUEST:
            try:
                read = ReadRequest.decode(segment.payload)
            except PeerViolation:
                half.missing += len(segment.payload)
                return
            if read.length:  # else it only tells that it is ready (RFC 6581 8)
                half.reads.append((read.sink_stag, read.sink_offset))
                if len(half.reads) > DEPTH_MAX:  # some answers were not seen
                    self._skip_read(talk, seen.outbound)
                where: dict[str, Any] = {"rkey": read.source_stag, "va": read.source_offset, "length": read.length}
                self._put(talk, seen, RecordKind.READ_REQUEST, **where)
        else:
            self._move(talk, seen, half, segment)

    def _send(self, talk: _Talk, seen: Seen, half: _Half, segment: Segment) -> None:
        if segment.mo != len(half.message):  # its beginning is not there
            self._held -= len(half.message)
            half.message.clear()
        if segment.mo != len(half.message) or not self._has_room(half.message, segment):
            half.missing += len(segment.payload)
            return
        half.message += segment.payload
        self._held += len(segment.payload)
        if segment.last:
            message = self._whole(half.message)
            if message:  # else it only tells that it is ready
                self._put(
                    talk, seen, RecordKind.SEND, message, solicited=segment.op in SOLICITED,
                    invalidate=segment.stag if segment.op in INVALIDATING else None,
                )  # fmt: skip

    def _move(self, talk: _Talk, seen: Seen, half: _Half, segment: Segment) -> None:
        """A Write or a Read Response: segments of one follow one another (RFC 5041 5.2)."""
        moved = half.moved[segment.op]
        if not moved.data:
            moved.stag, moved.begin = segment.stag, segment.offset
        follows = (segment.stag, segment.offset) == (moved.stag, moved.begin + len(moved.data))
        if not follows or not self._has_room(moved.data, segment):
            half.missing += len(self._whole(moved.data)) + len(segment.payload)
            return
        moved.data += segment.payload
        self._held += len(segment.payload)
        if not segment.last or not (data := self._whole(moved.data)):
            return
        if segment.op is RdmapOp.WRITE:
            self._put(talk, seen, RecordKind.WRITE, data, rkey=moved.stag, va=moved.begin)
            return
        reads = talk.halves[not seen.outbound].reads
        if (moved.stag, moved.begin) not in reads:  # it was asked for before the capture, or what did is lost
            half.missing += len(data)
            return
        while reads[0] != (moved.stag, moved.begin):
            self._skip_read(talk, not seen.outbound)
        reads.popleft()
        self._put(talk, seen, RecordKind.READ_RESPONSE, data)

    def _skip_read(self, talk: _Talk, outbound: bool) -> None:
        """The oldest one's answer was not seen."""
        assert talk.packets is not None
        talk.halves[outbound].reads.popleft()
        talk.packets.skip_read(talk.side(outbound))

    def _has_room(self, message: bytearray, segment: Segment) -> bool:
        more = len(segment.payload)
        return len(message) + more <= limits.CAPTURE_MESSAGE_MAX and self._held + more <= limits.CAPTURE_HELD_MAX

    def _whole(self, message: bytearray) -> bytes:
        found = bytes(message)
        self._held -= len(found)
        message.clear()
        return found

    def _drop_parts(self, half: _Half) -> None:
        """There is a gap: what was begun before it stays incomplete."""
        half.missing += sum(len(self._whole(part)) for part in half.parts)

    def _put(
        self, talk: _Talk, seen: Seen, kind: RecordKind, data: bytes = b"", *, outbound: bool | None = None,
        comment: str = "", **fields: Any,
    ) -> None:  # fmt: skip
        """Writes what was said; `fields` are those of `RoceRecord` that not every kind has."""
        assert talk.packets is not None
        way = seen.outbound if outbound is None else outbound
        record = RoceRecord(seen.time_ns / 1e9, talk.side(way), kind, data, **fields)
        half = talk.halves[way]
        try:
            frames = list(talk.packets.frames(record))
        except Misuse:  # a Read Response of another length than was asked for
            half.missing += len(data)
            return
        if half.missing:
            comment += f"{'; ' if comment else 'sidestep: '}{half.missing} bytes before this are not in the capture"
            half.missing = 0
        for frame in frames:
            self._write(talk, seen.time_ns, frame, outbound=way, comment=comment)
            comment = ""


def _mtu_code(path_mtu: int) -> int:
    for code, size in MTU_CODES.items():
        if size == path_mtu:
            return code
    known = ", ".join(str(size) for size in MTU_CODES.values())
    raise Misuse(f"{path_mtu} is no path MTU of InfiniBand", remedy=f"one of: {known}")


def _request_data(named: Named, hello: Decoded) -> bytes:
    header = hello.header
    if isinstance(header, IwarpHello):
        header = Hello(
            min(header.max_adverts, 0xFF), header.des_rem_rcv_sz, header.local_rcv_sz, named.program_ports[0],
            named.source, named.destination, header.version, named.source.version,
        )  # fmt: skip
    return _again(hello.bsdh, header)


def _reply_data(private_data: bytes) -> bytes:
    found = first_message(private_data)
    if found is None or not isinstance(found.header, HelloAck | IwarpHelloAck):
        return b""
    header = found.header
    if isinstance(header, IwarpHelloAck):
        header = HelloAck(min(header.max_adverts, 0xFF), header.act_rcv_sz, header.version)
    return _again(found.bsdh, header)


def _again(bsdh: Bsdh, header: Header) -> bytes:
    return encode(header, flags=bsdh.flags, bufs=bsdh.bufs, mseq=bsdh.mseq, mseq_ack=bsdh.mseq_ack)
