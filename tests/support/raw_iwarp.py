"""An iWARP end by hand: a blocking socket that sends any FPDU, good or with a chosen defect, and reads the answers.

It decides nothing by itself: a test says every frame. It counts the MSNs of what it sends, and checks of what it
receives all that RFC 5040, 5041 and 5044 fix: checksum, versions, MSN, MO, one message of a kind at a time. Reading has
a time limit; what comes instead of the expected is an AssertionError. It neither sends nor asks for markers.

    with RawPeer(socket.create_connection(...)) as peer:
        peer.ask(request(Depths(ird=1, ord=1)))
        peer.send(Segment(RdmapOp.SEND, last=True, payload=b"hello", msn=9))    # a wrong MSN
        peer.expect_terminate(layer=1, kind=2, code=3)
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from struct import Struct
from types import TracebackType
from typing import ClassVar, Final, Self

from common import PATIENCE_S

from sidestep.rdma.iwarp.ddp import (
    INVALIDATING,
    QUEUE_READ,
    QUEUE_SEND,
    QUEUE_TERMINATE,
    SENDS,
    TAGGED,
    RdmapOp,
    ReadRequest,
    Segment,
)
from sidestep.rdma.iwarp.mpa import CRC_LEN, crc32c, fpdu
from sidestep.rdma.iwarp.startup.frame import ENHANCED_LEN, MpaRole, StartFrame

TIMEOUT_S: Final = PATIENCE_S
PAYLOAD_MAX: Final = 1400  # bytes of a segment that `send_message` makes; below what an Ethernet frame has room for
_QUEUES: Final = {RdmapOp.READ_REQUEST: QUEUE_READ, RdmapOp.TERMINATE: QUEUE_TERMINATE}
_READ_HEADER_LEN: Final = 28
_TAGGED_HEADER_LEN: Final = 14
_UNTAGGED_HEADER_LEN: Final = 18


@dataclass(frozen=True, slots=True)
class Depths:
    """The enhanced data of a Request or a Reply (RFC 6581 9): the sender's own depths, and how to begin."""

    ird: int
    ord: int
    peer_to_peer: bool = False
    rtr_send: bool = False
    rtr_write: bool = False
    rtr_read: bool = False

    _LAYOUT: ClassVar[Struct] = Struct(">HH")

    def encode(self) -> bytes:
        """Its 4 bytes."""
        return self._LAYOUT.pack(
            self.peer_to_peer << 15 | self.rtr_send << 14 | self.ird,
            self.rtr_write << 15 | self.rtr_read << 14 | self.ord,
        )

    @classmethod
    def decode(cls, private_data: bytes) -> Self:
        """Those at the start of the private data."""
        first, second = cls._LAYOUT.unpack_from(private_data)
        return cls(
            first & 0x3FFF, second & 0x3FFF, first >> 15 == 1, first >> 14 & 1 == 1, second >> 15 == 1,
            second >> 14 & 1 == 1,
        )  # fmt: skip


def request(depths: Depths, private_data: bytes = b"", *, crc: bool = True) -> StartFrame:
    """A Request of revision 2."""
    return StartFrame(MpaRole.REQUEST, depths.encode() + private_data, crc=crc, enhanced=True, revision=2)


def reply(depths: Depths, private_data: bytes = b"", *, crc: bool = True, rejected: bool = False) -> StartFrame:
    """A Reply of revision 2."""
    data = depths.encode() + private_data
    return StartFrame(MpaRole.REPLY, data, crc=crc, rejected=rejected, enhanced=True, revision=2)


@dataclass(frozen=True, slots=True)
class Terminate:
    """What a Terminate says (RFC 5040 4.8)."""

    layer: int
    kind: int
    code: int
    segment_len: int | None = None  # bytes of the segment that it complains of
    ddp_header: bytes = b""  # of that segment
    rdmap_header: bytes = b""
    payload: bytes = field(default=b"", compare=False)  # as it came

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Read it; headers that its bits announce and that are not there are empty."""
        assert len(payload) >= 4, f"a Terminate of {len(payload)} bytes"
        layer, kind, code, bits = payload[0] >> 4, payload[0] & 0xF, payload[1], payload[2]
        if not bits & 0x40:
            return cls(layer, kind, code, payload=payload)
        segment_len = int.from_bytes(payload[4:6]) if bits & 0x80 else None
        rest = payload[6:]
        header_len = _TAGGED_HEADER_LEN if rest and rest[0] & 0x80 else _UNTAGGED_HEADER_LEN
        rdmap_header = rest[header_len : header_len + _READ_HEADER_LEN] if bits & 0x20 else b""
        return cls(layer, kind, code, segment_len, rest[:header_len], rdmap_header, payload)

    @classmethod
    def decode_mirrored(cls, payload: bytes) -> Self:
        """Read one of siw on a little-endian machine: within a byte its bit fields lie in the opposite order."""
        assert len(payload) >= 4, f"a Terminate of {len(payload)} bytes"
        first, bits = payload[0] << 4 & 0xF0 | payload[0] >> 4, 0
        for shift in range(3):
            bits |= (payload[2] >> shift & 1) << 7 - shift
        return replace(cls.decode(bytes((first, payload[1], bits)) + payload[3:]), payload=payload)

    def __str__(self) -> str:
        return f"{self.layer}/{self.kind}/{self.code:02x}"


def frame(
    segment: Segment,
    *,
    crc: bool = True,
    control: int | None = None,
    rdmap: int | None = None,
    keep: int | None = None,
    extra: bytes = b"",
    crc_flip: int = 0,
) -> bytes:
    """An FPDU, and what may be wrong with it.

    Args:
        segment: What is in it. Its fields may have any values that fit.
        crc: Whether the checksum is that of the frame, or nothing.
        control: The byte of DDP's that stands at the segment's start, instead of the right one.
        rdmap: The byte of RDMAP's behind it, likewise.
        keep: So many bytes of the segment are sent; the frame's length and checksum are right for those.
        extra: Bytes behind the segment, counted in.
        crc_flip: Bits that are wrong in the checksum.
    """
    whole = bytearray(segment.encode())
    if control is not None:
        whole[0] = control
    if rdmap is not None:
        whole[1] = rdmap
    made = fpdu(bytes(whole[:keep]) + extra, 0, crc=crc)
    return made[:-CRC_LEN] + (int.from_bytes(made[-CRC_LEN:]) ^ crc_flip).to_bytes(CRC_LEN)


class Ended(AssertionError):
    """The other end has closed the connection where a frame was expected; `left` are bytes of one that came."""

    def __init__(self, left: int, *, reset: bool) -> None:
        super().__init__(f"the connection has ended by {'RST' if reset else 'FIN'}, {left} bytes of a frame came")
        self.left = left
        self.reset = reset


class RawPeer:
    """One end of a connection."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        timeout_s: float = TIMEOUT_S,
        terminate: Callable[[bytes], Terminate] = Terminate.decode,
    ) -> None:
        self.socket = connection
        self._terminate = terminate  # how the other end writes them
        self.crc = False  # both send checksums that are right; settled by Request and Reply
        self.next_msn = {QUEUE_SEND: 1, QUEUE_READ: 1, QUEUE_TERMINATE: 1}  # of what is sent
        self._their_msn = {QUEUE_SEND: 1, QUEUE_READ: 1, QUEUE_TERMINATE: 1}
        self.was_reset = False  # how the connection has ended, once it has
        self._untagged: Segment | None = None  # of a message that is not complete, the last segment
        self._tagged: Segment | None = None
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.socket.close()

    # ---- startup ----

    def ask(self, start: StartFrame) -> StartFrame:
        """Sends a Request; the Reply."""
        self.socket.sendall(start.encode())
        answer = self.read_start(MpaRole.REPLY)
        self.crc = start.crc or answer.crc
        return answer

    def answer(self, decide: Callable[[StartFrame], StartFrame]) -> StartFrame:
        """Waits for a Request and sends the Reply that is decided on; the Request."""
        asked = self.read_start(MpaRole.REQUEST)
        start = decide(asked)
        self.socket.sendall(start.encode())
        self.crc = asked.crc or start.crc
        return asked

    def read_start(self, role: MpaRole) -> StartFrame:
        """The frame that begins the other direction, and no byte of what follows."""
        head = self._take(StartFrame.LENGTH)
        found = StartFrame.decode(head + self._take(int.from_bytes(head[-2:])))
        assert found is not None
        assert found[0].role is role
        return found[0]

    # ---- sending ----

    def send(
        self,
        segment: Segment,
        *,
        control: int | None = None,
        rdmap: int | None = None,
        keep: int | None = None,
        extra: bytes = b"",
        crc_flip: int = 0,
    ) -> None:
        """One FPDU, with defects as `frame` makes them."""
        self.socket.sendall(
            frame(segment, crc=self.crc, control=control, rdmap=rdmap, keep=keep, extra=extra, crc_flip=crc_flip)
        )

    def untagged(self, op: RdmapOp, payload: bytes, stag: int = 0) -> Segment:
        """The only segment of the next message of the queue of that operation."""
        queue = _QUEUES.get(op, QUEUE_SEND)
        msn = self.next_msn[queue]
        self.next_msn[queue] = (msn + 1) % 2**32
        return Segment(op, last=True, payload=payload, stag=stag, queue=queue, msn=msn)

    def send_message(self, op: RdmapOp, payload: bytes, stag: int = 0, offset: int = 0) -> None:
        """A message as it should be, in as many segments as it takes, in one piece of the stream."""
        first = Segment(op, True, payload, stag, offset) if op in TAGGED else self.untagged(op, payload, stag)
        made = bytearray()
        for at in range(0, max(1, len(payload)), PAYLOAD_MAX):
            piece = payload[at : at + PAYLOAD_MAX]
            last = at + len(piece) == len(payload)
            segment = replace(first, last=last, payload=piece)
            segment = replace(segment, offset=offset + at) if op in TAGGED else replace(segment, mo=at)
            made += frame(segment, crc=self.crc)
        self.socket.sendall(made)

    def read_remote(self, read: ReadRequest) -> bytes:
        """What the other end's memory holds: sends a Read Request and collects the Response."""
        self.send_message(RdmapOp.READ_REQUEST, read.encode())
        first, payload = self.message()
        assert (first.op, first.stag, first.offset) == (RdmapOp.READ_RESPONSE, read.sink_stag, read.sink_offset)
        assert len(payload) == read.length
        return payload

    # ---- receiving ----

    def read(self) -> Segment:
        """The next segment; `Ended` if there is none."""
        head = self._take(2)
        ulpdu_len = int.from_bytes(head)
        rest = self._take(ulpdu_len + -(2 + ulpdu_len) % 4 + CRC_LEN)
        if self.crc:
            found = int.from_bytes(rest[-CRC_LEN:], "little")
            assert found == crc32c(head + rest[:-CRC_LEN]), f"checksum {found:#x} (RFC 5044 4.4)"
        segment = Segment.decode(rest[:ulpdu_len])
        self._check(segment)
        return segment

    def message(self) -> tuple[Segment, bytes]:
        """The next message: its first segment, and all its payload. Nothing may come between its segments."""
        first = segment = self.read()
        payload = bytearray(segment.payload)
        while not segment.last:
            segment = self.read()
            assert segment.op is first.op, f"{segment.op.name} within a {first.op.name}"
            payload += segment.payload
        return first, bytes(payload)

    def expect(self, op: RdmapOp) -> tuple[Segment, bytes]:
        """The next message, which is of that operation."""
        first, payload = self.message()
        if first.op is RdmapOp.TERMINATE and op is not RdmapOp.TERMINATE:
            raise AssertionError(f"Terminate {self._terminate(payload)} instead of {op.name}")
        assert first.op is op, f"{first.op.name} instead of {op.name}"
        return first, payload

    def terminated(self) -> Terminate | None:
        """The Terminate that the other end sends, reading over what comes before it; None if it ends without one.

        The connection is at its end after it.
        """
        found = None
        while (segment := self._read_or_end()) is not None:
            assert found is None, f"{segment} behind a Terminate (RFC 5040 5.4)"
            if segment.op is RdmapOp.TERMINATE:
                found = self._terminate(segment.payload)
        return found

    def expect_terminate(self, layer: int, kind: int, code: int) -> Terminate:
        """The other end sends this Terminate and closes."""
        found = self.terminated()
        assert found is not None, f"no Terminate, where {layer}/{kind}/{code:02x} was expected"
        assert (found.layer, found.kind, found.code) == (layer, kind, code), str(found)
        return found

    def finish(self) -> None:
        """An orderly close: this direction ends, and then the other one ends without another frame."""
        self.socket.shutdown(socket.SHUT_WR)
        self.expect_end()

    def expect_end(self) -> None:
        """The other end closes, in order and with nothing before that."""
        segment = self._read_or_end()
        assert segment is None, f"{segment} instead of the end"
        assert not self.was_reset, "RST instead of FIN"

    def _read_or_end(self) -> Segment | None:
        """The next segment; None if the connection has ended behind a whole frame."""
        try:
            return self.read()
        except Ended as end:
            self.was_reset = end.reset
            if end.left:
                raise
        return None

    def _check(self, segment: Segment) -> None:
        """What a segment must be like after those before it (RFC 5041 4, RFC 5040 4)."""
        if segment.op in TAGGED:
            before = self._tagged
            if before is not None:
                assert (segment.op, segment.stag) == (before.op, before.stag), f"{segment} within {before}"
                assert segment.offset == before.offset + len(before.payload), f"{segment} behind {before}"
            self._tagged = None if segment.last else segment
            return
        queue = _QUEUES.get(segment.op, QUEUE_SEND)
        assert (segment.queue, segment.msn) == (queue, self._their_msn[queue]), str(segment)
        before = self._untagged
        assert segment.mo == (0 if before is None else before.mo + len(before.payload)), str(segment)
        assert before is None or before.op is segment.op, f"{segment} within {before}"
        assert segment.op in INVALIDATING or segment.stag == 0, str(segment)
        assert segment.last or segment.op in SENDS, str(segment)
        self._untagged = None if segment.last else segment
        if segment.last:
            self._their_msn[queue] = (self._their_msn[queue] + 1) % 2**32

    def _take(self, count: int) -> bytes:
        """Exactly so many bytes."""
        taken = bytearray()
        while len(taken) < count:
            try:
                piece = self.socket.recv(count - len(taken))
            except ConnectionResetError as error:
                raise Ended(len(taken), reset=True) from error
            if not piece:
                raise Ended(len(taken), reset=False)
            taken += piece
        return bytes(taken)


def depths_of(start: StartFrame) -> Depths:
    """The depths that a Request or a Reply carries."""
    assert start.enhanced, f"{start} is not of revision 2 with S"
    assert len(start.private_data) >= ENHANCED_LEN
    return Depths.decode(start.private_data)
