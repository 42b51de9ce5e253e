"""SDP over iWARP, out of TCP connections (RFC 5040, 5041, 5044; draft-pinkerton-iwarp-sdp).

A connection is one of SDP's if its MPA Request carries a Hello of iWARP's form as private data; or if, as in the draft
of 2003 that knows no MPA start-up, it begins with the Hello itself. Connections of which the capture lacks the first
bytes cannot be told from others and are left out. Checksums are not looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from sidestep import limits
from sidestep.errors import PeerViolation
from sidestep.observe.capture import layers
from sidestep.observe.capture.events import Event, What, header_of
from sidestep.observe.capture.frame import CapturedFrame
from sidestep.observe.capture.layers import IpAddress, Wire, end_text
from sidestep.observe.capture.tcp import Direction
from sidestep.rdma.frames import Side
from sidestep.rdma.iwarp.ddp import INVALIDATING, SENDS, SOLICITED, RdmapOp, ReadRequest, Segment
from sidestep.rdma.iwarp.mpa import next_frame, payload_of
from sidestep.rdma.iwarp.startup.frame import MpaRole, StartFrame
from sidestep.rdma.iwarp.terminate import terminate_text
from sidestep.sdp.hello import IwarpHello
from sidestep.sdp.wire import BSDH_LEN

_HELLO_LEN: Final = BSDH_LEN + IwarpHello.LENGTH
_End: TypeAlias = tuple[IpAddress, int]


@dataclass
class _Half:
    """One direction of a connection."""

    tcp: Direction = field(default_factory=Direction)
    unread: bytearray = field(default_factory=bytearray)  # of the start-up, or of a frame that is not complete
    position: int = 0  # of what is unread, counted from the first frame
    markers: bool = False
    message: bytearray = field(default_factory=bytearray)  # of a Send that is not complete
    tagged: int = 0  # bytes of a Write or a Read Response that is not complete
    failed: bool = False


@dataclass
class _Connection:
    number: int
    ends: dict[Side, _End]
    halves: dict[Side, _Half]
    request: StartFrame | None = None
    started: bool = False  # RDMA mode


class IwarpConnections:
    """Follows all TCP connections of a capture."""

    def __init__(self) -> None:
        self._count = 0
        self._connections: OrderedDict[frozenset[_End], _Connection | None] = OrderedDict()  # None: not SDP's

    def feed(self, frame: CapturedFrame, segment: layers.Segment) -> Iterator[Event]:
        sender = (segment.source, segment.source_port)
        receiver = (segment.destination, segment.destination_port)
        key = frozenset((sender, receiver))
        if segment.syn:
            self._syn(key, *((receiver, sender) if segment.ack else (sender, receiver)))
        elif key not in self._connections:
            if not segment.payload:
                return
            self._add(key, sender, receiver)  # its beginning is missing, or this is it: `_start` will see
        connection = self._connections[key]
        if connection is None:
            return
        side = Side.CONNECTING if connection.ends[Side.CONNECTING] == sender else Side.ACCEPTING
        half = connection.halves[side]
        half.unread += half.tcp.feed(segment)
        template = Event(frame.number, frame.time_ns, Wire.IWARP, "", "", What.SDP)
        try:
            if not connection.started:
                yield from self._start(connection, template)
            if connection.started:
                for one in Side:
                    yield from _run(connection, _between(template, connection, one))
        except _NotSdp:
            self._connections[key] = None

    def finish(self, last: CapturedFrame | None) -> Iterator[Event]:
        """What can be told only at the end: bytes that never came."""
        for connection in self._connections.values():
            if connection is None or not connection.number or last is None:
                continue
            template = Event(last.number, last.time_ns, Wire.IWARP, "", "", What.TRANSPORT)
            for side, half in connection.halves.items():
                if half.tcp.gap or half.tcp.lost:
                    count = f"{half.tcp.gap} bytes" if half.tcp.gap else "bytes"
                    text = f"{count} of TCP are not in the capture: what lies behind them cannot be read"
                    yield replace(_between(template, connection, side), text=text)

    def _syn(self, key: frozenset[_End], connecting: _End, accepting: _End) -> None:
        """The first of a connection; or one of a later connection between the same ends."""
        known = self._connections.get(key)
        if known is None or known.request is not None or known.started:
            self._add(key, connecting, accepting)

    def _add(self, key: frozenset[_End], connecting: _End, accepting: _End) -> None:
        ends = {Side.CONNECTING: connecting, Side.ACCEPTING: accepting}
        self._connections.pop(key, None)
        self._connections[key] = _Connection(0, ends, {side: _Half() for side in Side})
        if len(self._connections) > limits.CAPTURE_CONNECTIONS_MAX:
            self._connections.popitem(last=False)

    # ---- before RDMA mode ----

    def _start(self, connection: _Connection, template: Event) -> Iterator[Event]:
        if connection.request is None:
            yield from self._begin(connection, template)
        if connection.request is not None and connection.halves[Side.ACCEPTING].unread:
            yield from self._reply(connection, connection.request, template)
        if any(len(half.unread) > limits.CAPTURE_AHEAD_MAX for half in connection.halves.values()):
            raise _NotSdp

    def _begin(self, connection: _Connection, template: Event) -> Iterator[Event]:
        """The first bytes of the connecting side: an MPA Request, or a Hello."""
        half = connection.halves[Side.CONNECTING]
        if not half.unread:
            if connection.halves[Side.ACCEPTING].unread:
                raise _NotSdp  # the accepting side speaks first, or the beginning is missing
            return
        if _may_be_hello(half.unread):
            if len(half.unread) >= _HELLO_LEN:
                yield from self._begin_by_hello(connection, template)
            return
        if (found := _start_frame(half.unread, MpaRole.REQUEST)) is None:
            return
        request, length = found
        if not isinstance(header_of(request.upper_data), IwarpHello):
            raise _NotSdp
        del half.unread[:length]
        connection.request = request
        self._number(connection)
        yield from _start_events(_between(template, connection, Side.CONNECTING), request)

    def _begin_by_hello(self, connection: _Connection, template: Event) -> Iterator[Event]:
        """As the draft has it: the Hello in streaming mode, then RDMA mode without any agreement; so no markers."""
        half = connection.halves[Side.CONNECTING]
        self._number(connection)
        yield replace(_between(template, connection, Side.CONNECTING), message=bytes(half.unread[:_HELLO_LEN]))
        del half.unread[:_HELLO_LEN]
        connection.started = True

    def _reply(self, connection: _Connection, request: StartFrame, template: Event) -> Iterator[Event]:
        half = connection.halves[Side.ACCEPTING]
        if (found := _start_frame(half.unread, MpaRole.REPLY)) is None:
            return
        reply, length = found
        del half.unread[:length]
        yield from _start_events(_between(template, connection, Side.ACCEPTING), reply)
        if reply.rejected:
            raise _NotSdp
        # Whoever wants markers gets them: each frame speaks of what its sender receives (RFC 5044 7.1.1).
        connection.halves[Side.CONNECTING].markers = reply.markers
        half.markers = request.markers
        connection.started = True

    def _number(self, connection: _Connection) -> None:
        self._count += 1
        connection.number = self._count


class _NotSdp(Exception):
    """The connection is of no interest."""


def _between(template: Event, connection: _Connection, side: Side) -> Event:
    ends = connection.ends
    return replace(
        template, connection=connection.number, side=side,
        source=end_text(*ends[side]), destination=end_text(*ends[side.other]),
    )  # fmt: skip


def _run(connection: _Connection, template: Event) -> Iterator[Event]:
    """What one direction says in RDMA mode."""
    assert template.side is not None
    half = connection.halves[template.side]
    while not half.failed and (size := next_frame(half.unread, half.position, markers=half.markers)):
        payload = payload_of(bytes(half.unread[:size]), half.position, markers=half.markers)
        del half.unread[:size]
        half.position += size
        try:
            yield from list(_segment_events(half, Segment.decode(payload), template))
        except PeerViolation as broken:
            half.failed = True
            yield replace(template, what=What.TRANSPORT, text=f"no more can be read this way: {broken.message}")
    if half.failed:
        half.unread.clear()


def _segment_events(half: _Half, segment: Segment, template: Event) -> Iterator[Event]:
    where = f"STag {segment.stag:#010x}, TO {segment.offset:#x}"
    if segment.op in SENDS:
        yield from _send_events(half, segment, template)
    elif segment.op is RdmapOp.TERMINATE:
        yield replace(template, what=What.TRANSPORT, text=terminate_text(segment.payload))
    elif segment.op is RdmapOp.READ_REQUEST:
        read = ReadRequest.decode(segment.payload)
        source = f"STag {read.source_stag:#010x}, TO {read.source_offset:#x}"
        yield replace(template, what=What.RDMA, text=f"RDMA Read Request: {read.length} bytes from {source}")
    else:
        half.tagged += len(segment.payload)
        if segment.last:
            count, half.tagged = half.tagged, 0
            name = "RDMA Write" if segment.op is RdmapOp.WRITE else "RDMA Read Response"
            text = f"{name}: {count} bytes, the last at {where}" if count else f"{name} of 0 bytes"
            yield replace(template, what=What.RDMA, text=text)


def _send_events(half: _Half, segment: Segment, template: Event) -> Iterator[Event]:
    if segment.mo == 0:
        half.message.clear()
    if segment.mo != len(half.message) or segment.mo + len(segment.payload) > limits.CAPTURE_MESSAGE_MAX:
        yield replace(template, what=What.TRANSPORT, text=f"part of a Send at {segment.mo}, its beginning is missing")
        return
    half.message += segment.payload
    if segment.last:
        message = bytes(half.message)
        half.message.clear()
        note = f"invalidates STag {segment.stag:#010x}" if segment.op in INVALIDATING else ""
        yield replace(template, message=message, solicited=segment.op in SOLICITED, note=note)


def _start_events(template: Event, frame: StartFrame) -> Iterator[Event]:
    said = [
        f"revision {frame.revision}",
        "markers" if frame.markers else "no markers",
        "CRC" if frame.crc else "no CRC",
        *(["rejected"] if frame.rejected else []),
    ]
    yield replace(template, what=What.CM, text=f"MPA {frame.role.name.capitalize()}: {', '.join(said)}")
    if frame.upper_data:
        yield replace(template, message=frame.upper_data)


def _start_frame(stream: bytearray, role: MpaRole) -> tuple[StartFrame, int] | None:
    try:
        found = StartFrame.decode(stream)
    except PeerViolation as broken:
        raise _NotSdp from broken
    if found is not None and found[0].role is not role:
        raise _NotSdp
    return found


def _may_be_hello(stream: bytearray) -> bool:
    """Whether a stream begins, as far as it is there, with a Hello in streaming mode."""
    if len(stream) >= _HELLO_LEN:
        return isinstance(header_of(bytes(stream[:_HELLO_LEN])), IwarpHello)
    return b"\0\0".startswith(bytes(stream[:2])) and _HELLO_LEN.to_bytes(4).startswith(bytes(stream[4:8]))
