"""Connections of software RNICs as captures: what a device tells of its wires, as frames with TCP segments.

    with capture(device, stream):       # of this process; those of others: `sidestep capture`
        ...

Addresses, ports, bytes and times are the real ones. What the kernel keeps to itself is made up: sequence numbers begin
at 0 in each direction, the handshake is written when the connection is first seen, acknowledgements ride on data, and a
segment has one FPDU, as RFC 5044 5 wants them (with markers, dissectors need it). A connection that began before the
capture has the frames of its start-up first, as the device remembers them, so that dissectors know it; a gap in the
sequence numbers and a comment tell what is missing then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from struct import Struct
from typing import TYPE_CHECKING, BinaryIO, Final, TypeAlias

from sidestep.errors import Misuse, PeerViolation, Unavailable
from sidestep.observe.capture.cutter import Cutter, Piece
from sidestep.observe.capture.devices import DeviceWriter
from sidestep.observe.capture.packets import Wire
from sidestep.observe.capture.places import Named, Place
from sidestep.rdma.frames import IpAddress, Side, ethernet_header, internet_checksum, network_header
from sidestep.rdma.iwarp.startup.frame import MpaRole, StartFrame
from sidestep.rdma.iwarp.tap import Seen, SeenKind, WireEnds

if TYPE_CHECKING:
    from sidestep.rdma.control import Observed

_End: TypeAlias = tuple[IpAddress, int]
_TCP: Final = Struct("!HHIIBBHHH")
_PROTOCOL_TCP: Final = 6
_FIN, _SYN, _RST, _PSH, _ACK = 0x01, 0x02, 0x04, 0x08, 0x10
_SEQUENCE: Final = 0xFFFF_FFFF
_WINDOW: Final = 0xFFFF
_SEGMENT_MAX: Final = 65535 - 60  # bytes of payload: an IPv4 packet has 65535 with its headers
_BEFORE: Final = (
    "sidestep: this connection began before the capture. Its handshake is made up; its MPA Request and Reply are "
    "as they were"
)


@dataclass(slots=True)
class _Wire(Wire):
    """One connection in the file."""

    local: _End
    remote: _End
    halves: dict[bool, Cutter]  # by `outbound`
    ended: set[bool] = field(default_factory=set)
    early: list[Seen] | None = None  # until it is known whether it is wanted


class SegmentWriter(DeviceWriter[_Wire]):
    """Turns what devices tell into frames of one file."""

    def __init__(self, stream: BinaryIO, *, places: Sequence[Place] | None = None, snaplen: int = 0) -> None:
        super().__init__(stream, places, snaplen=snaplen)

    def close(self) -> None:
        for (_, number), wire in list(self._wires.items()):
            for outbound, half in wire.halves.items():
                back = wire.halves[not outbound].end
                if half.pending:
                    seen = Seen(SeenKind.BYTES, number, time.time_ns(), outbound, half.end, back)
                    self._write_pieces(wire, seen, half.finish())
        super().close()

    def _handle(self, wire: _Wire, seen: Seen) -> bool:
        if wire.early is not None:
            return self._judge(wire, seen)
        self._follow(wire, seen)
        return True

    def _open(self, source: str, seen: Seen, ends: WireEnds) -> _Wire | None:
        halves = {outbound: Cutter(begins_late=ends.began_before) for outbound in (True, False)}
        try:
            (local, local_port), (remote, remote_port) = ends.local, ends.remote
            wire = _Wire(
                source,
                ends,
                self._interface(source, ends.device),
                (ip_address(local.partition("%")[0]), local_port),
                (ip_address(remote.partition("%")[0]), remote_port),
                halves,
            )
        except ValueError:  # it was gone before its addresses could be asked for
            return None
        # A dissector would take what the second end tells for retransmissions.
        if not self._owns(source, ends, seen.time_ns):
            return None
        if self._places is None:
            self._begin(wire, seen)
        else:
            wire.early = [seen]
        return wire

    def _judge(self, wire: _Wire, seen: Seen) -> bool:
        """Whether a connection is wanted is known with its MPA Request, or if it has none."""
        early = wire.early
        assert early is not None
        early.append(seen)
        said = b"".join(each.data for each in early if each.outbound is wire.ends.active)
        try:
            found = StartFrame.decode(said)
        except PeerViolation:
            found = StartFrame(MpaRole.REQUEST), 0  # the devices' own ends are all that is known
        if found is None and seen.what is SeenKind.BYTES:
            return True
        wire.early = None
        if found is None or not Named.of(wire.ends, found[0].upper_data).at(self._places):
            self._forget(wire, seen)
            return False
        self._begin(wire, early[0])
        for each in early[1:]:
            self._follow(wire, each)
        return True

    def _begin(self, wire: _Wire, seen: Seen) -> None:
        self.connections += 1
        comment = _BEFORE if wire.ends.began_before else ""
        first = wire.ends.active
        self._frame(wire, seen.time_ns, first, _SYN, (0, 0), b"", comment)
        self._frame(wire, seen.time_ns, not first, _SYN | _ACK, (0, 1), b"")
        self._frame(wire, seen.time_ns, first, _ACK, (1, 1), b"")

    def _follow(self, wire: _Wire, seen: Seen) -> None:
        outbound, at, back = seen.outbound, 1 + seen.offset, 1 + seen.acknowledged
        half = wire.halves[outbound]
        pieces = half.feed(seen, wire.halves[not outbound].start) if seen.what is SeenKind.BYTES else half.finish()
        self._write_pieces(wire, seen, pieces)
        if seen.what is SeenKind.BYTES:
            return
        ends = seen.what is SeenKind.RESET
        if seen.what is SeenKind.END:
            ends = (not outbound) in wire.ended
            back += (not outbound) in wire.ended  # the other FIN takes a number as well
            wire.ended.add(outbound)
        flags = _FIN | _ACK if seen.what is SeenKind.END else _RST | _ACK
        self._frame(wire, seen.time_ns, outbound, flags, (at, back), b"")
        if ends:
            self._forget(wire, seen)

    def _write_pieces(self, wire: _Wire, seen: Seen, pieces: list[Piece]) -> None:
        for piece in pieces:
            comment = f"sidestep: {piece.missing} bytes before this are not in the capture" if piece.missing else ""
            for begin in range(0, len(piece.data), _SEGMENT_MAX):
                part = piece.data[begin : begin + _SEGMENT_MAX]
                numbers = 1 + piece.offset + begin, 1 + seen.acknowledged
                self._frame(wire, seen.time_ns, seen.outbound, _PSH | _ACK, numbers, part, comment)
                comment = ""

    def _frame(
        self, wire: _Wire, time_ns: int, outbound: bool, flags: int, numbers: tuple[int, int],
        payload: bytes, comment: str = "",
    ) -> None:  # fmt: skip
        side = Side.CONNECTING if outbound is wire.ends.active else Side.ACCEPTING
        (address, port), (to, to_port) = (wire.local, wire.remote) if outbound else (wire.remote, wire.local)
        segment = tcp_segment((address, port), (to, to_port), numbers, flags, payload)
        head = ethernet_header(side, address.version) + network_header(address, to, _PROTOCOL_TCP, len(segment))
        self._write(wire, time_ns, head + segment, outbound=outbound, comment=comment)


def tcp_segment(source: _End, destination: _End, numbers: tuple[int, int], flags: int, payload: bytes) -> bytes:
    """A segment with its checksum (RFC 9293 3.1); `numbers` are sequence and acknowledgement."""
    (address, port), (to, to_port) = source, destination
    sequence, acknowledged = (number & _SEQUENCE for number in numbers)
    fields = (port, to_port, sequence, acknowledged, 5 << 4, flags, _WINDOW)
    length = _TCP.size + len(payload)
    pseudo = address.packed + to.packed + length.to_bytes(4) + _PROTOCOL_TCP.to_bytes(4)
    checksum = internet_checksum(pseudo + _TCP.pack(*fields, 0, 0) + payload)
    return _TCP.pack(*fields, checksum, 0) + payload


@contextmanager
def capture(device: Observed, stream: BinaryIO) -> Iterator[SegmentWriter]:
    """Captures a device of this process while the block runs; the stream stays open.

    Raises:
        Misuse: Nobody can look on at this device.
        Unavailable: At the end, if the stream could not be written: the device was not disturbed by that.
    """
    taps = device.taps
    if taps is None:
        raise Misuse(f"what passes over {device.name} cannot be seen")
    writer = SegmentWriter(stream)
    failed: list[OSError] = []

    def see(seen: Seen) -> None:
        try:
            writer.see("", seen)
        except OSError as error:
            failed.append(error)
            taps.remove(see)

    taps.add(see)
    try:
        yield writer
    finally:
        taps.remove(see)
    if failed:
        raise Unavailable(f"the capture cannot be written: {failed[0].strerror}") from failed[0]
    writer.close()
