"""The file of a capture of RDMA devices: an interface for each device of each process, and what was lost.

What frames there are for what a device tells is decided by who writes into it: `segments`, `conversation`; for RoCE it
is what was on the wire, whoever writes (`packets`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING, BinaryIO, Final, Generic, TypeVar

from sidestep import __version__, limits
from sidestep.observe.capture.packets import Packets, PacketWire, Wire
from sidestep.rdma.iwarp.tap import SeenKind, Speech

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidestep.observe.capture.places import Place
    from sidestep.rdma.iwarp.tap import Address, Seen, WireEnds

_NAME: Final = "sidestep"


WireT = TypeVar("WireT", bound=Wire)


class DeviceWriter(ABC, Generic[WireT]):
    """Turns what devices tell into frames of one file.

    Args:
        stream: Where to; it stays open.
        places: Only connections with one of these at either end: of the programs, as far as that is known, or of the
            connection beneath. None: all.
        comment: What is to be known of all frames.
        kind: What is said of each interface besides.
        snaplen: Bytes that are kept of a frame; 0: all.
        sdp_only: Of RoCE, only connections that carry SDP.
    """

    def __init__(
        self, stream: BinaryIO, places: Sequence[Place] | None, *, comment: str = "", kind: str = "", snaplen: int = 0,
        sdp_only: bool = False,
    ) -> None:  # fmt: skip
        from sidestep.observe.capture.pcapng import PcapngWriter  # needs the extra `capture`; the help does not

        self._places = places
        self._packets = Packets(places, sdp_only=sdp_only)
        self._file = PcapngWriter(stream, f"{_NAME} {__version__}", comment=comment, snaplen=snaplen)
        self._kind = kind
        self._wires: dict[tuple[str, int], WireT] = {}  # by process and number
        self._packet_wires: dict[tuple[str, int], PacketWire] = {}  # likewise
        self._interfaces: dict[tuple[str, str], int] = {}
        self._owners: dict[frozenset[Address], tuple[str, Address]] = {}  # which end of a connection is in the file
        # By whom those that ended were owned, and when that was.
        self._ended: OrderedDict[frozenset[Address], tuple[tuple[str, Address], int]] = OrderedDict()
        self._lost: dict[str, int] = {}  # by source, not told yet
        self.connections = self.frames = 0
        self.dropped = 0  # things that devices told and that were lost on their way

    def see(self, source: str, seen: Seen) -> bool:
        """One thing; `source` is the process that tells it, in words. False: its connection is not wanted, once."""
        if seen.what is SeenKind.LOST:
            self._lost[source] = self._lost.get(source, 0) + seen.offset
            self.dropped += seen.offset
        elif seen.what is SeenKind.OPENED:
            assert seen.ends is not None
            if seen.ends.speaks is Speech.ROCE:
                self._open_packets(source, seen, seen.ends)
            elif (opened := self._open(source, seen, seen.ends)) is not None:
                self._wires[source, seen.wire] = opened
        elif (wire := self._wires.get((source, seen.wire))) is not None:
            return self._handle(wire, seen)
        elif (packet_wire := self._packet_wires.get((source, seen.wire))) is not None:
            return self._handle_packets(packet_wire, seen)
        return True

    def _open_packets(self, source: str, seen: Seen, ends: WireEnds) -> None:
        # A dissector would take what the second end tells for packets that were sent again.
        if self._owns(source, ends, seen.time_ns):
            wire = self._packets.wire(source, ends, self._interface(source, ends.device, ""))
            self._packet_wires[source, seen.wire] = wire

    def _handle_packets(self, wire: PacketWire, seen: Seen) -> bool:
        known = wire.wanted
        for outbound, frame, comment in self._packets.frames(wire, seen):
            self._write(wire, seen.time_ns, frame, outbound=outbound, comment=comment)
        self.connections += bool(wire.wanted and not known)
        if seen.what is SeenKind.END or wire.wanted is False:
            self._forget(wire, seen)
        return wire.wanted is not False

    @abstractmethod
    def _open(self, source: str, seen: Seen, ends: WireEnds) -> WireT | None:
        """A connection is there; None: it is not written."""

    @abstractmethod
    def _handle(self, wire: WireT, seen: Seen) -> bool:
        """Something was said or has ended on a connection; False: that is not wanted."""

    def _forget(self, wire: Wire, seen: Seen) -> None:
        """It has ended, or is not wanted."""
        self._wires.pop((wire.source, seen.wire), None)
        self._packet_wires.pop((wire.source, seen.wire), None)
        key = _both(wire.ends)
        if (owner := self._owners.pop(key, None)) is not None:
            self._ended[key] = owner, seen.time_ns
            self._ended.move_to_end(key)
            if len(self._ended) > limits.CAPTURE_CONNECTIONS_MAX:
                self._ended.popitem(last=False)

    def _interface(self, source: str, device: str, kind: str | None = None) -> int:
        key = source, device
        if key not in self._interfaces:
            about = f"{device} of {source}" if source else device
            self._interfaces[key] = self._file.interface(device, about + (self._kind if kind is None else kind))
        return self._interfaces[key]

    def _owns(self, source: str, ends: WireEnds, opened_ns: int) -> bool:
        """Whether a connection is written from this end. Both may be told: once is enough, and twice confuses."""
        key, end = _both(ends), (source, ends.local)
        before, ended_ns = self._ended.get(key, (end, 0))
        if before != end and opened_ns < ended_ns:  # the other end was told, and read, to its end already
            return False
        return self._owners.setdefault(key, end) == end

    def _write(self, wire: Wire, time_ns: int, frame: bytes, *, outbound: bool, comment: str = "") -> None:
        """A frame; what was lost before it is told with it."""
        dropped = self._lost.pop(wire.source, 0)
        if dropped:
            comment += f"{'; ' if comment else 'sidestep: '}{dropped} pieces before this were lost: too slowly read"
        self._file.write(wire.interface, time_ns, frame, outbound=outbound, comment=comment, dropped=dropped)
        self.frames += 1

    def close(self) -> None:
        for source, count in self._lost.items():
            first = next((found for (each, _), found in self._interfaces.items() if each == source), None)
            if first is not None:
                self._file.lost(first, count)
        self._lost.clear()
        self._file.close(time.time_ns())


def _both(ends: WireEnds) -> frozenset[Address]:
    """The same for either end, whatever interface it names."""
    return frozenset((address.partition("%")[0], port) for address, port in (ends.local, ends.remote))
