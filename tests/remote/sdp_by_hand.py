"""An end of SDP over iWARP, written from docs/wire/sdp.md alone: nothing of `sidestep.sdp` is used here.

It is a blocking socket with memory of its own: RDMA of the other end is served while messages are read. What comes is
checked as the standard has it: lengths, sequence numbers, credit, payload where it may be, solicited events, keys. What
goes out is in order unless a test wants it otherwise, so the same peer obeys and violates.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import ip_address
from typing import Final, Self

from raw_iwarp import Depths, Ended, RawPeer, reply, request

from sidestep.rdma.iwarp.ddp import INVALIDATING, SOLICITED, RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.startup.frame import StartFrame

PORT_MAPPER: Final = 3935
BSDH: Final = struct.Struct(">BBHIII")  # §3
HELLO_IB: Final = struct.Struct(">BBBBIIHH16s16s2xH24x")  # §5.1, behind the BSDH
HELLO_ACK_IB: Final = struct.Struct(">B2xBI172x")  # §5.2
HELLO: Final = struct.Struct(">BxHIIHH")  # §23.2, likewise
HELLO_ACK: Final = struct.Struct(">BxHIHH")
SRC_AH: Final = struct.Struct(">IIQ")  # §6, likewise
SINK_AH: Final = struct.Struct(">IIQI")
SIZE: Final = struct.Struct(">I")  # of RdmaWrCompl, RdmaRdCompl, ChRcvBuf and ChRcvBufAck
MODE: Final = struct.Struct(">B3x")
SERVICE: Final = struct.Struct(">Q")
PORT_MAP: Final = struct.Struct(">BB2xHH8s16s16s")  # §23.4

OOB_PRES, OOB_PEND, REQ_PIPE = 1, 2, 4
BUFFERED, COMBINED, PIPELINED = 0x00, 0x10, 0x20  # of ModeChange, by the source
SINK_COMBINED: Final = 0x90
DEPTH: Final = 4  # RDMA Reads at a time
BUFS: Final = 64  # receives that this end always has
BUFFER: Final = 16 << 10  # bytes of each
ADVERTS: Final = 8


class Mid(IntEnum):
    """§4."""

    HELLO = 0x00
    HELLO_ACK = 0x01
    DIS_CONN = 0x02
    ABORT_CONN = 0x03
    SEND_SM = 0x04
    RDMA_WR_COMPL = 0x05
    RDMA_RD_COMPL = 0x06
    MODE_CHANGE = 0x07
    SRC_AVAIL_CANCEL = 0x08
    SINK_AVAIL_CANCEL = 0x09
    SINK_CANCEL_ACK = 0x0A
    CH_RCV_BUF = 0x0B
    CH_RCV_BUF_ACK = 0x0C
    SUSP_COMM = 0x0D
    SUSP_COMM_ACK = 0x0E
    SINK_AVAIL = 0xFD
    SRC_AVAIL = 0xFE
    DATA = 0xFF


EXTENDED: Final[dict[int, struct.Struct]] = {
    Mid.RDMA_WR_COMPL: SIZE, Mid.RDMA_RD_COMPL: SIZE, Mid.MODE_CHANGE: MODE, Mid.CH_RCV_BUF: SIZE,
    Mid.CH_RCV_BUF_ACK: SIZE, Mid.SUSP_COMM: SERVICE, Mid.SINK_AVAIL: SINK_AH, Mid.SRC_AVAIL: SRC_AH,
}  # fmt: skip
SOLICITED_MIDS: Final = frozenset(
    {
        Mid.ABORT_CONN, Mid.SUSP_COMM, Mid.SUSP_COMM_ACK, Mid.SEND_SM, Mid.SRC_AVAIL_CANCEL, Mid.SINK_AVAIL_CANCEL,
        Mid.SINK_CANCEL_ACK, Mid.RDMA_RD_COMPL, Mid.RDMA_WR_COMPL,
    }
)  # fmt: skip  # §17
PAYLOAD_MIDS: Final = frozenset({Mid.DATA, Mid.SRC_AVAIL, Mid.SINK_AVAIL})


@dataclass(frozen=True, slots=True)
class Message:
    """One that was heard."""

    mid: Mid
    flags: int
    bufs: int
    mseq: int
    ack: int
    fields: tuple[int, ...] = ()  # of the extended header
    payload: bytes = b""


def _address(text: str) -> bytes:
    """As the InfiniBand Hello has it: IPv4 in the last four bytes."""
    return ip_address(text).packed.rjust(16, b"\0")


def hello_ib(source: str, target: str, port: int, *, bufs: int = BUFS, size: int = BUFFER) -> bytes:
    """The Hello of 92 bytes, which names the addresses and the client's port."""
    version = ip_address(source).version
    body = HELLO_IB.pack(0x22, version << 4, 0, ADVERTS, size, size, port, 0, _address(source), _address(target), 0)
    return BSDH.pack(Mid.HELLO, 0, bufs, BSDH.size + len(body), 0, 0) + body


def hello_iwarp(*, bufs: int = BUFS, size: int = BUFFER, adverts: int = ADVERTS) -> bytes:
    """The Hello of 32 bytes."""
    body = HELLO.pack(0x11, adverts, size, size, DEPTH, DEPTH)
    return BSDH.pack(Mid.HELLO, 0, bufs, BSDH.size + len(body), 0, 0) + body


def ask_port(source: str, target: str, service: int, *, tries: int = 40) -> int:
    """The RDMA port for a service there, as its port mapper says; 0: it denies. Repeats an identical request."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((source, 0))
        sock.settimeout(0.5)
        handle = secrets.token_bytes(8)
        here, there = (ip_address(each).packed.ljust(16, b"\0") for each in (source, target))
        for _ in range(tries):
            sock.sendto(PORT_MAP.pack(0x04, 0, service, 40000, handle, here, there), (target, PORT_MAPPER))
            try:
                data, where = sock.recvfrom(256)
            except TimeoutError:
                continue
            kind, _, port, client, echoed, client_ip, _ = PORT_MAP.unpack(data)
            assert (where, kind & 0xCF, client, echoed, client_ip) == ((target, PORT_MAPPER), 4, 40000, handle, here)
            if kind >> 4 & 3 == 3:
                return 0
            assert kind >> 4 & 3 == 1
            sock.sendto(PORT_MAP.pack(0x24, 0, port, 40000, handle, here, there), where)
            return int(port)
    raise TimeoutError(f"no port mapper at {target}")


class RefusedError(Exception):
    """The other end does not want the connection."""


class HandPeer:
    """One end. `stream` is all payload that has come."""

    def __init__(self, raw: RawPeer, *, bufs: int, size: int) -> None:
        self.raw = raw
        self.bufs = bufs  # that it says it has
        self.size = size  # of each
        self.stream = bytearray()
        self.tx_mseq = 0
        self.rx_mseq = 0
        self.ended = False  # DisConn has come
        self.refreshes = True  # grants credit by itself when there is little left
        self.serves = True  # RDMA Reads of the other end; else they are kept
        self.unserved: list[ReadRequest] = []
        self.urgent: list[int] = []  # offsets in `stream` of urgent bytes
        self.pending = 0  # OOB_PEND without OOB_PRES so far
        self.reads = 0  # RDMA Reads of this end's memory
        self.writes = 0  # RDMA Writes with bytes
        self.regions: dict[int, tuple[int, bytearray]] = {}  # by key: address, memory
        self.voided: list[int] = []  # keys that the other end has invalidated
        self.payloads = 0  # messages with payload that have not used up a SinkAvail: NonDiscards (§12.1)
        self.written = 0  # bytes of which RdmaWrCompl has told
        self.last_resize: int | None = None  # what ChRcvBufAck has told
        self.asked_size: int | None = None  # of ChRcvBuf
        self.refuses_size = True  # answers that its buffers stay as they are
        self._sinks = 0  # SinkAvails that are outstanding
        self.remote_size = 0  # bytes of the other end's private buffers
        self._remote_limit = 0  # the MSeq up to which the other end has receives
        self._limit = bufs  # the MSeq up to which this end has told of receives
        self._next_key = 0xA100
        self._answered = True  # the last RDMA Read
        self._inbox: deque[Message] = deque()
        self.terminated = False  # the other end's device has said so

    # ---- setting up ----

    @classmethod
    def connect(
        cls, source: str, where: tuple[str, int], hello: bytes | None = None, *, bufs: int = BUFS, size: int = BUFFER
    ) -> Self:
        """Opens one; raises RefusedError."""
        raw = RawPeer(socket.create_connection(where, 30, (source, 0)))
        depths = Depths(DEPTH, DEPTH, peer_to_peer=True, rtr_write=True)
        try:
            answer = raw.ask(request(depths, hello if hello is not None else hello_iwarp(bufs=bufs, size=size)))
        except Ended as end:
            raw.socket.close()
            raise RefusedError("closed") from end
        if answer.rejected:
            raw.socket.close()
            raise RefusedError(answer.private_data[4:])
        self = cls(raw, bufs=bufs, size=size)
        self._introduced(answer.private_data[4:])
        raw.send(Segment(RdmapOp.WRITE, last=True))  # RFC 6581 5: ready to receive
        return self

    def _introduced(self, private_data: bytes) -> None:
        """HelloAck, of either kind."""
        mid, flags, bufs, length, mseq, ack = BSDH.unpack_from(private_data)
        assert (mid, flags, mseq, ack) == (Mid.HELLO_ACK, 0, 0, 0)
        assert length == len(private_data) or length == 196 > len(private_data)
        if length == BSDH.size + HELLO_ACK.size:
            version, adverts, size, reads_out, reads_in = HELLO_ACK.unpack_from(private_data, BSDH.size)
            assert version >> 4 == 1
            assert reads_out >= 1
            assert reads_in >= 1
        else:
            version, adverts, size = HELLO_ACK_IB.unpack_from(private_data.ljust(196, b"\0"), BSDH.size)
            assert version >> 4 == 2
        assert adverts >= 1
        assert bufs >= 3
        self.remote_size, self._remote_limit = size, bufs

    @classmethod
    def accept(cls, listener: socket.socket, *, bufs: int = BUFS, size: int = BUFFER) -> Self:
        """Takes the next connection that comes there, with either Hello."""
        connection, _ = listener.accept()
        raw = RawPeer(connection)
        self = cls(raw, bufs=bufs, size=size)

        def decide(start: StartFrame) -> StartFrame:
            told, private_data = Depths.decode(start.private_data), start.private_data[4:]
            mid, flags, count, length, mseq, ack = BSDH.unpack_from(private_data)
            assert (mid, flags, mseq, ack) == (Mid.HELLO, 0, 0, 0)
            assert length == len(private_data)
            if length == BSDH.size + HELLO.size:
                version, adverts, _, remote_size, reads_out, reads_in = HELLO.unpack_from(private_data, BSDH.size)
                assert version >> 4 == 1
                assert min(reads_out, reads_in) >= 1
                body = HELLO_ACK.pack(0x11, ADVERTS, size, DEPTH, DEPTH)
            else:
                version, _, _, adverts, _, remote_size, *_ = HELLO_IB.unpack_from(private_data, BSDH.size)
                assert version >> 4 == 2
                body = HELLO_ACK_IB.pack(0x22, ADVERTS, size)
            assert count >= 3
            assert adverts >= 1
            assert remote_size >= 37
            self.remote_size, self._remote_limit = remote_size, count
            answer = BSDH.pack(Mid.HELLO_ACK, 0, bufs, BSDH.size + len(body), 0, 0) + body
            return reply(Depths(DEPTH, DEPTH, peer_to_peer=told.peer_to_peer, rtr_write=told.rtr_write), answer)

        raw.answer(decide)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.socket.close()

    # ---- saying ----

    @property
    def credit(self) -> int:
        """Messages that the other end has receives for."""
        return self._remote_limit - self.tx_mseq

    def say(
        self,
        mid: int,
        *fields: int,
        payload: bytes = b"",
        flags: int = 0,
        bufs: int | None = None,
        mseq: int | None = None,
        ack: int | None = None,
        length: int | None = None,
        body: bytes | None = None,
        stag: int | None = None,
    ) -> None:
        """The next message, with whatever is to be wrong with it; `stag` voids a key of the other end's."""
        self.tx_mseq += 1
        if body is None:
            known = EXTENDED.get(mid)
            body = known.pack(*fields) if known is not None else b""
        body += payload
        told_bufs = self.bufs if bufs is None else bufs
        told_ack = self.rx_mseq if ack is None else ack
        self._limit = max(self._limit, told_bufs + told_ack)
        self._sinks += mid == Mid.SINK_AVAIL
        message = BSDH.pack(
            mid, flags, told_bufs, BSDH.size + len(body) if length is None else length,
            (self.tx_mseq if mseq is None else mseq) % 2**32, told_ack % 2**32,
        ) + body  # fmt: skip
        asked = mid in SOLICITED_MIDS or flags & (OOB_PRES | OOB_PEND)
        op = RdmapOp.SEND_SE if asked else RdmapOp.SEND
        if stag is not None:
            op = RdmapOp.SEND_SE_INV
        self.raw.send_message(op, message, stag or 0)

    def send(self, data: bytes) -> None:
        """By Bcopy, as the other end's receives allow it (§9.3)."""
        room = self.remote_size - BSDH.size
        for start in range(0, len(data), room):
            while self.credit < 3:
                self.hear()
            self.say(Mid.DATA, payload=data[start : start + room])

    def offer(self, memory: bytearray) -> tuple[int, int]:
        """Memory that the other end may read or write from now on: its key and address."""
        self._next_key += 0x100
        va = (self._next_key << 16) + 5  # any byte may be the first
        self.regions[self._next_key] = va, memory
        return self._next_key, va

    def write_remote(self, stag: int, va: int, data: bytes) -> None:
        """An RDMA Write."""
        self.raw.send_message(RdmapOp.WRITE, data, stag, va)

    def read_remote(self, stag: int, va: int, length: int) -> bytes:
        """An RDMA Read."""
        memory = bytearray(length)
        key, here = self.offer(memory)
        self.raw.send_message(RdmapOp.READ_REQUEST, ReadRequest(key, here, length, stag, va).encode())
        self._answered = False
        while not self._answered:
            self._next()
        del self.regions[key]
        return bytes(memory)

    # ---- hearing ----

    def hear(self) -> Message:
        """The next message; RDMA before it is served. Raises `Ended` at the end of the transport connection."""
        while not self._inbox:
            self._next()
        return self._inbox.popleft()

    def _next(self) -> None:
        first, payload = self.raw.message()
        if first.op is RdmapOp.READ_REQUEST:
            self._serve(ReadRequest.decode(payload))
        elif first.op in (RdmapOp.WRITE, RdmapOp.READ_RESPONSE):
            self._place(first.stag, first.offset, payload)
            self._answered |= first.op is RdmapOp.READ_RESPONSE
            self.writes += first.op is RdmapOp.WRITE and bool(payload)
        elif first.op is RdmapOp.TERMINATE:
            self.terminated = True
        else:
            self._inbox.append(self._heard(first, payload))

    def until(self, *mids: Mid) -> Message:
        """The next message of one of these kinds."""
        while (message := self.hear()).mid not in mids:
            """Its payload is in `stream`."""
        return message

    def until_bytes(self, count: int) -> bytes:
        """Waits for so many bytes of the stream in all; all there are."""
        while len(self.stream) < count:
            self.hear()
        return bytes(self.stream)

    def left(self) -> tuple[list[Mid], bool]:
        """Reads to the end of the transport connection: the messages that come before it, and whether it was a RST."""
        found = []
        try:
            while True:
                found.append(self.hear().mid)
        except Ended as end:
            return found, end.reset

    def _heard(self, first: Segment, whole: bytes) -> Message:
        mid, flags, bufs, length, mseq, ack = BSDH.unpack_from(whole)
        assert length == len(whole) <= self.size, f"Len {length} of {len(whole)} bytes"
        assert mseq == self.rx_mseq + 1, f"MSeq {mseq} after {self.rx_mseq}"
        assert ack <= self.tx_mseq, f"MSeqAck {ack}, where {self.tx_mseq} was the last"
        known = EXTENDED.get(Mid(mid))
        fields = known.unpack_from(whole, BSDH.size) if known is not None else ()
        payload = whole[BSDH.size + (known.size if known is not None else 0) :]
        assert not payload or mid in PAYLOAD_MIDS
        needs = 3 if payload else 1
        assert mseq + needs - 1 <= self._limit, f"{Mid(mid).name} {mseq} where receives end at {self._limit} (§9.3)"
        solicited = mid in SOLICITED_MIDS or (mid == Mid.DATA and flags & (OOB_PRES | OOB_PEND))
        assert bool(flags & OOB_PEND) or (first.op in SOLICITED) is bool(solicited), (
            f"{Mid(mid).name} by {first.op.name}"
        )
        if first.op in INVALIDATING:
            assert mid in (Mid.RDMA_RD_COMPL, Mid.RDMA_WR_COMPL)
            assert self.regions.pop(first.stag, None) is not None, f"key {first.stag:#x} is voided, which is not shown"
            self.voided.append(first.stag)
        self.rx_mseq = mseq
        self._remote_limit = bufs + ack
        self.pending += flags & OOB_PEND != 0
        self.stream += payload
        if flags & OOB_PRES and payload:
            assert self.pending, "OOB_PRES without OOB_PEND"
            self.pending -= 1
            self.urgent.append(len(self.stream) - 1)
        assert not (payload and self.ended), "payload behind DisConn"
        self.ended |= mid == Mid.DIS_CONN
        self._account(Mid(mid), fields, payload)
        if self.refreshes and self._limit - mseq <= 1 and not self.ended:
            self.say(Mid.DATA)  # §9.4: who is about to run out is told of new receives
        return Message(Mid(mid), flags, bufs, mseq, ack, fields, payload)

    def _account(self, mid: Mid, fields: tuple[int, ...], payload: bytes) -> None:
        """What a message means for the SinkAvails that are outstanding (§12.1, §10.3, §12.4), and for the sizes."""
        if payload:
            if self._sinks:
                self._sinks -= 1
            else:
                self.payloads += 1
        elif mid is Mid.RDMA_WR_COMPL:
            assert self._sinks, "RdmaWrCompl without a SinkAvail"
            self._sinks -= 1
            self.written += fields[0]
        elif mid is Mid.SINK_CANCEL_ACK:
            assert self._sinks, "SinkCancelAck with nothing to withdraw"
            self._sinks = 0
        elif mid is Mid.CH_RCV_BUF:
            self.asked_size = fields[0]
            if self.refuses_size:
                self.say(Mid.CH_RCV_BUF_ACK, self.size)  # §14: unchanged
        elif mid is Mid.CH_RCV_BUF_ACK:
            self.last_resize = fields[0]

    def next_read(self) -> ReadRequest:
        """The next RDMA Read of the other end, which it waits for in vain."""
        self.serves = False
        while not self.unserved:
            self._next()
        return self.unserved.pop()

    def _serve(self, read: ReadRequest) -> None:
        if not self.serves:
            self.unserved.append(read)
            return
        va, memory = self.regions[read.source_stag]
        at = read.source_offset - va
        assert 0 <= at <= at + read.length <= len(memory), f"an RDMA Read of {read} beyond what is offered"
        self.reads += bool(read.length)
        data = bytes(memory[at : at + read.length])
        self.raw.send_message(RdmapOp.READ_RESPONSE, data, read.sink_stag, read.sink_offset)

    def _place(self, stag: int, offset: int, data: bytes) -> None:
        if not data:
            return  # a keepalive, or ready to receive
        va, memory = self.regions[stag]
        at = offset - va
        assert 0 <= at <= at + len(data) <= len(memory), "an RDMA Write beyond what is offered"
        memory[at : at + len(data)] = data

    # ---- together ----

    def offer_source(self, data: bytes, payload: int = 1) -> None:
        """Read Zcopy of these bytes, of which so many go along; all else as the sink wants it (§10.2)."""
        payload = min(payload, self.remote_size - BSDH.size - SRC_AH.size)
        key, va = self.offer(bytearray(data))
        while self.credit < 3:
            self.hear()
        self.say(Mid.SRC_AVAIL, len(data), key, va, payload=data[:payload])
        told = payload
        while told < len(data):
            message = self.until(Mid.RDMA_RD_COMPL, Mid.SEND_SM)
            if message.mid is Mid.SEND_SM:
                self.regions.pop(key, None)
                self.send(data[told:])
                return
            told += message.fields[0]
        assert told == len(data), f"{told} bytes of {len(data)} were read"
