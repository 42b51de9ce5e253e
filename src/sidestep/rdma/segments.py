"""Messages cut into datagrams and put together again: the datagram service without its queue pair.

A message goes in segments, a datagram each. No standard has a header for that, so this is ours, in front of each:

    bytes    field
    0        version, 1
    1        reserved, 0
    2..3     segment size: bytes of the message in every segment but the last one, 240 at least
    4..7     number of the message, of its sender's queue pair; the first one is any
    8..11    length of the message in bytes, 65536 at most
    12..15   offset of this segment in the message, a multiple of the segment size

So a segment has one place, and one length there; two that are not equal never overlap. A message is delivered once,
whole, or not at all; messages may overtake each other. Theory of operation:

- The first segment to come reserves room for all of the message. What says otherwise about the same message later is
  dropped, and so is what is here already.
- A message that is not whole some seconds after its first segment is lost.
- All messages that are not whole have a bound in bytes together, each counted with a page at least. Beyond it goes the
  oldest one of the sender who has the most: who floods loses his own first.
- Messages that were delivered or lost are remembered, so that a late copy of a segment begins nothing; the oldest are
  forgotten beyond a bound.

Anybody who may send to the queue pair may claim to be another sender: datagrams know no authentication.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from struct import Struct
from typing import ClassVar, Final, Self, TypeAlias

from sidestep import limits
from sidestep.counters import Counters
from sidestep.errors import Misuse, PeerViolation, Rules

SEGMENT_MIN: Final = 240  # bytes: the smallest path MTU without the header
_VERSION: Final = 1
_PAGE: Final = 4096  # bytes that a message counts at least

RULES: Final = Rules(
    segment_short="a segment has a header of 16 bytes",
    segment_version="the version is 1",
    segment_size="segments have 240 bytes at least",
    segment_message="a message has 65536 bytes at most",
    segment_place="a segment begins at a multiple of the segment size, within its message",
    segment_length="a segment is as long as its place says",
)
EVENTS: Final = {
    "messages_delivered": "messages that came whole",
    "message_lost": "messages that began to come and did not come whole, by reason",
    "segment_dropped": "segments that were dropped, by reason: a rule, or what they were",
}
Sender: TypeAlias = "tuple[str, int]"  # address, number of the queue pair


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Where a segment belongs."""

    size: int  # bytes in every segment but the last one
    message: int  # its number
    length: int  # bytes of the message
    offset: int  # bytes

    LAYOUT: ClassVar[Struct] = Struct(">BxHIII")

    def encode(self) -> bytes:
        return self.LAYOUT.pack(_VERSION, self.size, self.message, self.length, self.offset)

    @classmethod
    def decode(cls, segment: memoryview) -> Self:
        """Reads and checks the header of a segment, which is all that came; raises PeerViolation."""
        if len(segment) < cls.LAYOUT.size:
            raise RULES.broken("segment_short", f"{len(segment)} bytes")
        version, size, message, length, offset = cls.LAYOUT.unpack_from(segment)
        if version != _VERSION:
            raise RULES.broken("segment_version", f"version {version}")
        if size < SEGMENT_MIN:
            raise RULES.broken("segment_size", f"{size} bytes")
        if length > limits.DATAGRAM_MESSAGE_MAX:
            raise RULES.broken("segment_message", f"{length} bytes")
        if offset % size or offset > max(0, length - 1):
            raise RULES.broken("segment_place", f"offset {offset} of {length} in steps of {size}")
        if len(segment) - cls.LAYOUT.size != min(size, length - offset):
            raise RULES.broken("segment_length", f"{len(segment)} bytes at {offset} of {length}")
        return cls(size, message, length, offset)


HEADER_LEN: Final = SegmentHeader.LAYOUT.size


def segments(message: bytes, number: int, mtu: int) -> Iterator[tuple[bytes, memoryview]]:
    """Header and bytes of each segment, where a datagram has `mtu` bytes at most; raises Misuse for a long message."""
    if len(message) > limits.DATAGRAM_MESSAGE_MAX:
        raise Misuse(f"a message of {len(message)} bytes; {limits.DATAGRAM_MESSAGE_MAX} are the most")
    size = mtu - HEADER_LEN
    assert size >= SEGMENT_MIN
    view = memoryview(message)
    return (
        (SegmentHeader(size, number, len(view), offset).encode(), view[offset : offset + size])
        for offset in range(0, max(1, len(view)), size)
    )


@dataclass(slots=True)
class _Partial:
    """A message of which not all is here."""

    size: int
    room: bytearray
    deadline: float
    missing: int  # bytes
    here: set[int] = field(default_factory=set)  # offsets

    @property
    def cost(self) -> int:
        return max(len(self.room), _PAGE)


@dataclass(slots=True)
class _Share:
    """What one sender has there."""

    cost: int = 0
    numbers: dict[int, None] = field(default_factory=dict)  # of messages, the oldest first


class Reassembly:
    """Puts messages together, of any number of senders.

    Args:
        bytes_max: Of all messages that are not whole.
        timeout_s: From the first segment of a message to the last one.
        done_max: Messages that are remembered.
    """

    def __init__(
        self, *, bytes_max: int = limits.DATAGRAM_REASSEMBLY_BYTES, timeout_s: float = limits.DATAGRAM_REASSEMBLY_S,
        done_max: int = limits.DATAGRAM_DONE_MAX,
    ) -> None:  # fmt: skip
        self.events = Counters(EVENTS)
        self.held = 0  # bytes that count against the bound
        self._bytes_max = bytes_max
        self._timeout_s = timeout_s
        self._done_max = done_max
        self._partials: dict[tuple[Sender, int], _Partial] = {}  # the oldest first
        self._shares: dict[Sender, _Share] = {}
        self._done: OrderedDict[tuple[Sender, int], None] = OrderedDict()

    def __len__(self) -> int:
        """Messages that are not whole."""
        return len(self._partials)

    def handle_segment(self, sender: Sender, segment: memoryview, now: float) -> bytes | bytearray | None:
        """Takes in what a datagram brought; the message that is whole by it."""
        self.handle_timeout(now)
        try:
            header = SegmentHeader.decode(segment)
        except PeerViolation as broken:
            self.events.add("segment_dropped", broken.rule)
            return None
        key = sender, header.message
        payload = segment[HEADER_LEN:]
        partial = self._partials.get(key)
        if partial is None:
            if key in self._done:
                self.events.add("segment_dropped", "late")
                return None
            if len(payload) == header.length:  # all of it
                self._remember(key)
                self.events.add("messages_delivered")
                return bytes(payload)
            partial = self._begin(key, header, now)
        elif partial.size != header.size or len(partial.room) != header.length:
            self.events.add("segment_dropped", "other")
            return None
        elif header.offset in partial.here:
            self.events.add("segment_dropped", "duplicate")
            return None
        partial.room[header.offset : header.offset + len(payload)] = payload
        partial.here.add(header.offset)
        partial.missing -= len(payload)
        if partial.missing:
            return None
        self._end(key)
        self.events.add("messages_delivered")
        return partial.room

    def next_deadline(self) -> float | None:
        """When `handle_timeout` finds something; until then nothing is amiss if it is not called."""
        return next((partial.deadline for partial in self._partials.values()), None)

    def handle_timeout(self, now: float) -> None:
        """Time has passed."""
        while (due := self.next_deadline()) is not None and due <= now:
            self._lose(next(iter(self._partials)), "timeout")

    def _begin(self, key: tuple[Sender, int], header: SegmentHeader, now: float) -> _Partial:
        partial = _Partial(header.size, bytearray(header.length), now + self._timeout_s, header.length)
        while self.held + partial.cost > self._bytes_max and self._shares:
            heaviest = max(self._shares, key=lambda sender: self._shares[sender].cost)
            self._lose((heaviest, next(iter(self._shares[heaviest].numbers))), "room")
        self._partials[key] = partial
        share = self._shares.setdefault(key[0], _Share())
        share.cost += partial.cost
        share.numbers[key[1]] = None
        self.held += partial.cost
        return partial

    def _end(self, key: tuple[Sender, int]) -> None:
        partial = self._partials.pop(key)
        share = self._shares[key[0]]
        share.cost -= partial.cost
        del share.numbers[key[1]]
        if not share.numbers:
            del self._shares[key[0]]
        self.held -= partial.cost
        self._remember(key)

    def _lose(self, key: tuple[Sender, int], reason: str) -> None:
        self._end(key)
        self.events.add("message_lost", reason)

    def _remember(self, key: tuple[Sender, int]) -> None:
        self._done[key] = None
        if len(self._done) > self._done_max:
            self._done.popitem(last=False)
