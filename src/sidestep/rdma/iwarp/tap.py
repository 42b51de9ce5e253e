"""What goes over the connections of a device, for those who look on: each byte once, in both directions, in order.

    device.taps.add(tap)        # a callable that gets a `Seen` for everything that happens from now on
    device.taps.remove(tap)

A device writes its FPDUs out of its users' memory and nobody sees them pass; while somebody looks on, streams take a
slower way on which their bytes are seen (`Wire.live` is the one thing that is asked otherwise). Who begins to look on
in the middle is told how each connection began, from what its wire remembers, and then of each direction from the next
FPDU on: what lies between was not seen, and offsets say how much it is.

Devices whose connections are packets have wires of their own (`rdma.roce.tap`), which tell packets instead of bytes.

A tap is called from within the device: it must be quick, must not raise, and must not call the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    from sidestep.rdma.iwarp.stream import RdmapStream

Address: TypeAlias = tuple[str, int]
_STARTUP_MAX: Final = 4096  # bytes that a wire remembers; frames of a start-up have 532 each
_numbers = count(1)


class SeenKind(IntEnum):
    """What happened."""

    OPENED = 1  # or had been before anybody looked on: `ends` tells
    BYTES = 2
    END = 3  # of a direction: FIN
    RESET = 4
    LOST = 5  # so many things happened that could not be kept for this tap: `offset` is how many
    PACKET = 6  # of UDP, from its header on
    JOINED = 7  # the two ends were joined by others than the device: `data` is how, as `rdma.roce.tap` writes it


class Speech(Enum):
    """What goes over a connection, and so which kinds of things are told of it."""

    IWARP = "iwarp"  # BYTES of a stream each way
    ROCE = "rocev2"  # PACKETs; the ports of the ends are the numbers of the queue pairs


@dataclass(frozen=True, slots=True)
class WireEnds:
    """A connection."""

    local: Address
    remote: Address
    active: bool  # this end asked for it
    device: str
    began_before: bool  # before the tap
    speaks: Speech = Speech.IWARP


@dataclass(frozen=True, slots=True)
class Seen:
    """One thing that happened."""

    what: SeenKind
    wire: int  # the connection, by a number of this process
    time_ns: int  # since the epoch
    outbound: bool = False
    offset: int = 0  # bytes of this direction before
    acknowledged: int = 0  # bytes of the other direction before
    data: bytes = b""
    ends: WireEnds | None = None


Tap: TypeAlias = Callable[[Seen], object]


class Tapped(Protocol):
    """A connection, as far as its taps ask."""

    number: int
    live: bool  # somebody looks on

    def introduce(self, tap: Tap, *, began_before: bool = True) -> None:
        """Tells a tap how it began, and what it has to know to go on from here."""


def next_wire() -> int:
    """The number of another wire of this process."""
    return next(_numbers)


class Taps:
    """Those who look on at one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.wires: dict[Tapped, None] = {}  # open ones, in the order of opening
        self._taps: dict[Tap, dict[Tapped, int]] = {}  # with the offset from which each sent direction is told

    def __len__(self) -> int:
        return len(self._taps)

    def add(self, tap: Tap) -> None:
        """Tells it everything from now on, and how the connections began that there are."""
        self._taps[tap] = {}
        for wire in list(self.wires):
            wire.introduce(tap)
            wire.live = True

    def remove(self, tap: Tap) -> None:
        self._taps.pop(tap, None)
        for wire in self.wires:
            wire.live = bool(self._taps)

    # For wires.

    def opened(self, wire: Tapped) -> None:
        self.wires[wire] = None
        wire.live = bool(self._taps)
        for tap in list(self._taps):
            wire.introduce(tap, began_before=False)

    def closed(self, wire: Tapped) -> None:
        self.wires.pop(wire, None)
        wire.live = False
        for skipped in self._taps.values():
            skipped.pop(wire, None)

    def tell(self, wire: Tapped, seen: Seen) -> None:
        """To all, but nobody hears of the rest of an FPDU whose beginning he did not see."""
        for tap, skipped in list(self._taps.items()):
            begin = skipped.get(wire, 0) - seen.offset if seen.outbound else 0
            if begin <= 0:
                tap(seen)
            elif begin < len(seen.data):
                at, data = seen.offset + begin, seen.data[begin:]
                tap(Seen(seen.what, seen.wire, seen.time_ns, True, at, seen.acknowledged, data))

    def skip(self, tap: Tap, wire: Tapped, until: int) -> None:
        """The tap is told of what is sent from this offset on."""
        self._taps[tap][wire] = until


class Wire:
    """One connection: where it is, how it began, and how many bytes went over it."""

    __slots__ = (
        "_base", "_local", "_received", "_remote", "_sent", "_startup", "_stream", "_taps", "active", "drained", "live",
        "number",
    )  # fmt: skip

    def __init__(self) -> None:
        self.number = next_wire()
        self.live = False  # somebody looks on
        self.active = False
        self.drained = 0  # bytes that were read and thrown away behind the stream
        self._taps: Taps | None = None
        self._local: Address = ("", 0)
        self._remote: Address = ("", 0)
        self._sent = self._received = 0  # bytes, as far as they went through here
        self._startup: list[Seen] = []
        self._stream: RdmapStream | None = None
        self._base = (0, 0)  # bytes sent and received before the stream

    # --- the connection's side ---

    def opened(self, taps: Taps, local: Address, remote: Address, *, active: bool) -> None:
        self._taps, self._local, self._remote, self.active = taps, local, remote, active
        taps.opened(self)

    @property
    def ends(self) -> tuple[Address, Address]:
        return self._local, self._remote

    def streams(self, stream: RdmapStream, leftover_len: int) -> None:
        """The start-up is over; so many bytes behind it were read along with it."""
        self._stream = stream
        self._base = self._sent, self._received - leftover_len
        for at, seen in enumerate(self._startup):
            if not seen.outbound and seen.offset + len(seen.data) > self._base[1]:
                data = seen.data[: max(0, self._base[1] - seen.offset)]
                self._startup[at] = Seen(
                    SeenKind.BYTES, seen.wire, seen.time_ns, False, seen.offset, seen.acknowledged, data
                )

    def sent(self, data: bytes | memoryview) -> None:
        self._pass(SeenKind.BYTES, bytes(data), outbound=True)
        self._sent += len(data)

    def received(self, data: bytes) -> None:
        self._pass(SeenKind.BYTES, data, outbound=False)
        self._received += len(data)

    def ended(self, *, outbound: bool) -> None:
        self._pass(SeenKind.END, b"", outbound=outbound)

    def reset(self, *, outbound: bool) -> None:
        self._pass(SeenKind.RESET, b"", outbound=outbound)

    def closed(self) -> None:
        if self._taps is not None:
            self._taps.closed(self)
            self._taps = None

    def _pass(self, what: SeenKind, data: bytes, *, outbound: bool) -> None:
        remembered = self._stream is None and self._sent + self._received < _STARTUP_MAX and what is SeenKind.BYTES
        if self._taps is None or not (self.live or remembered):
            return
        before, other = (self._sent, self._received) if outbound else (self._received, self._sent)
        seen = Seen(what, self.number, time.time_ns(), outbound, before, other, data)
        if remembered:
            self._startup.append(seen)
        if self.live:
            self._taps.tell(self, seen)

    # --- who looks on ---

    def introduce(self, tap: Tap, *, began_before: bool = True) -> None:
        """Tells a tap how it began, and what it has to know to go on from here."""
        taps = self._taps
        assert taps is not None
        begun = self._startup[0].time_ns if self._startup else time.time_ns()
        ends = WireEnds(self._local, self._remote, self.active, taps.device, began_before)
        tap(Seen(SeenKind.OPENED, self.number, begun, ends=ends))
        for seen in self._startup:
            if seen.data:
                tap(seen)
        if self._stream is None:
            return
        (sent, rest), (received, staged) = self._stream.sent_len(), self._stream.received_len()
        self._sent = self._base[0] + sent
        self._received = self._base[1] + received + self.drained
        if rest:
            taps.skip(tap, self, self._sent + rest)
        if staged:
            at = self._received - len(staged)
            tap(Seen(SeenKind.BYTES, self.number, time.time_ns(), False, at, self._sent, staged))
