"""Frames out of pcapng, and into it (draft-ietf-opsawg-pcapng): blocks with a length at both ends, in sections.

A section has a byte order and interfaces of its own; an interface has a link type and a resolution of time. Other
blocks than those of interfaces and packets are passed over. Written here because no library fits: of those in Python
one reads the first interface only and rounds times to floats, one takes the end within a block for the end of the file
and stumbles over repeated options, and the others are under the GPL, large, or compiled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from sidestep import limits
from sidestep.observe.capture.frame import Frame, damaged

SECTION: Final = 0x0A0D0D0A  # the same in both byte orders
_INTERFACE: Final = 1
_PACKET_OLD: Final = 2
_PACKET_SIMPLE: Final = 3
_PACKET: Final = 6
_BYTE_ORDER_MAGIC: Final = 0x1A2B3C4D
_BLOCK_MIN: Final = 12  # bytes: type, length, and the length again
_OPTION_RESOLUTION: Final = 9
_OPTION_OFFSET: Final = 14
_STATISTICS: Final = 5
_OPTION_COMMENT: Final = 1
_OPTION_NAME: Final = 2  # of an interface
_OPTION_DESCRIPTION: Final = 3  # likewise
_OPTION_APPLICATION: Final = 4  # of a section
_OPTION_FLAGS: Final = 2  # of a packet
_OPTION_DROPPED: Final = 4  # likewise: packets lost since the one before
_OPTION_STATISTICS_RECEIVED: Final = 4
_OPTION_STATISTICS_DROPPED: Final = 5
_NANOSECONDS: Final = 9  # a resolution of 10^-9
_LENGTH_UNKNOWN: Final = 0xFFFF_FFFF_FFFF_FFFF
_LINKTYPE_ETHERNET: Final = 1
_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Interface:
    link_type: int
    snap_len: int  # bytes of a frame that are kept; 0: all
    units: int = 1_000_000  # of a second
    offset_s: int = 0  # what all times are counted from

    def time_ns(self, high: int, low: int) -> int:
        """In whole numbers: a float is too short for nanoseconds since the epoch."""
        return (high << 32 | low) * _NS // self.units + self.offset_s * _NS


class _Wrong(Exception):
    """A block that says what cannot be."""


def read_pcapng(stream: BinaryIO, name: str) -> Iterator[Frame]:
    """The frames of a file whose first four bytes have been read; `Unavailable` where it is cut off or damaged."""
    order, interfaces, number = "<", list[_Interface](), 0
    head = SECTION.to_bytes(4)
    while head:
        try:
            if head == SECTION.to_bytes(4):
                order, interfaces = _byte_order(start := stream.read(8)), []
                _block(stream, start, order, taken=4)
            else:
                kind = _unpack(order + "I", head)[0]
                body = _block(stream, stream.read(4), order)
                if kind == _INTERFACE:
                    interfaces.append(_interface(body, order))
                elif (frame := _frame(kind, body, order, interfaces, number + 1)) is not None:
                    number += 1
                    yield frame
        except (_Wrong, struct.error) as error:
            raise damaged(name, number + 1, str(error)) from error
        head = stream.read(4)


def _byte_order(start: bytes) -> str:
    """Length and magic of a section header, of which the magic tells how to read the length."""
    for order in "<>":
        if len(start) == 8 and struct.unpack_from(order + "I", start, 4)[0] == _BYTE_ORDER_MAGIC:
            return order
    raise _Wrong("a section does not begin as it must" if len(start) == 8 else "the file ends in a section header")


def _block(stream: BinaryIO, start: bytes, order: str, *, taken: int = 0) -> bytes:
    """The body of a block whose length, and so many bytes of the body, have been read."""
    (length,) = _unpack(order + "I", start)
    if length % 4 or length < _BLOCK_MIN + taken or length > limits.CAPTURE_FRAME_MAX:
        raise _Wrong(f"a block of {length} bytes cannot be")
    rest = stream.read(length - 8 - taken)
    if len(rest) < length - 8 - taken:
        raise _Wrong(f"the file ends in a block, {length - 8 - taken - len(rest)} bytes before it does")
    if struct.unpack_from(order + "I", rest, len(rest) - 4)[0] != length:
        raise _Wrong("the two lengths of a block differ")
    return rest[:-4]


def _interface(body: bytes, order: str) -> _Interface:
    link_type, _, snap_len = _unpack(order + "HHI", body)
    units, offset_s = 1_000_000, 0
    for code, value in _options(body[8:], order):
        if code == _OPTION_RESOLUTION and value:
            units = (2 if value[0] & 0x80 else 10) ** (value[0] & 0x7F)
        elif code == _OPTION_OFFSET:
            (offset_s,) = _unpack(order + "q", value)
    return _Interface(link_type, snap_len, units, offset_s)


def _options(data: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + 4 <= len(data):
        code, length = struct.unpack_from(order + "HH", data, offset)
        if code == 0:
            return
        yield code, data[offset + 4 : offset + 4 + length]
        offset += 4 + length + -length % 4


def _frame(kind: int, body: bytes, order: str, interfaces: list[_Interface], number: int) -> Frame | None:
    """The frame of a block; None if it is of another kind."""
    if kind == _PACKET:
        which, high, low, captured, length = _unpack(order + "IIIII", body)
    elif kind == _PACKET_OLD:
        which, _, high, low, captured, length = _unpack(order + "HHIIII", body)
    elif kind == _PACKET_SIMPLE:
        (length,) = _unpack(order + "I", body)
        which, high, low, captured = 0, 0, 0, length
        if interfaces and interfaces[0].snap_len:
            captured = min(length, interfaces[0].snap_len)
    else:
        return None
    if which >= len(interfaces):
        raise _Wrong(f"interface {which} of {len(interfaces)}")
    start = 4 if kind == _PACKET_SIMPLE else 20
    data = body[start : start + captured]
    if len(data) < captured:
        raise _Wrong(f"{captured} bytes of a frame in a block with {len(data)}")
    interface = interfaces[which]
    return Frame(number, interface.time_ns(high, low), interface.link_type, data, max(length, captured))


def _unpack(layout: str, data: bytes) -> tuple[int, ...]:
    """The numbers at the start of the data."""
    if len(data) < struct.calcsize(layout):
        raise _Wrong("the file or a block ends too early")
    return struct.unpack_from(layout, data)


class PcapngWriter:
    """Writes one section of Ethernet frames; close it to have the interfaces' statistics in the file.

    Args:
        stream: Where to; it stays open.
        application: Who writes.
    """

    def __init__(self, stream: BinaryIO, application: str) -> None:
        self._stream = stream
        self._counts: list[tuple[int, int]] = []  # frames and losses, by interface
        section = struct.pack("<IHHQ", _BYTE_ORDER_MAGIC, 1, 0, _LENGTH_UNKNOWN)
        self._write_block(SECTION, section + _put(_OPTION_APPLICATION, application.encode()) + _END)

    def interface(self, name: str, description: str) -> int:
        """Another one; its number."""
        options = _put(_OPTION_NAME, name.encode()) + _put(_OPTION_DESCRIPTION, description.encode())
        options += _put(_OPTION_RESOLUTION, bytes([_NANOSECONDS])) + _END
        self._write_block(_INTERFACE, struct.pack("<HHI", _LINKTYPE_ETHERNET, 0, 0) + options)
        self._counts.append((0, 0))
        return len(self._counts) - 1

    def write(
        self, interface: int, time_ns: int, frame: bytes, *, outbound: bool, comment: str = "", dropped: int = 0
    ) -> None:
        """A frame, with what is to be said about it, and how many were lost before it."""
        frames, losses = self._counts[interface]
        self._counts[interface] = frames + 1, losses + dropped
        head = struct.pack("<IIIII", interface, time_ns >> 32, time_ns & 0xFFFF_FFFF, len(frame), len(frame))
        options = _put(_OPTION_FLAGS, struct.pack("<I", 2 if outbound else 1))
        if comment:
            options += _put(_OPTION_COMMENT, comment.encode())
        if dropped:
            options += _put(_OPTION_DROPPED, struct.pack("<Q", dropped))
        self._write_block(_PACKET, head + frame + bytes(-len(frame) % 4) + options + _END)

    def lost(self, interface: int, count: int) -> None:
        """So many frames of this interface were lost, behind its last one."""
        frames, losses = self._counts[interface]
        self._counts[interface] = frames, losses + count

    def close(self, time_ns: int) -> None:
        """Writes what the interfaces have seen and lost."""
        for interface, (frames, losses) in enumerate(self._counts):
            head = struct.pack("<III", interface, time_ns >> 32, time_ns & 0xFFFF_FFFF)
            options = _put(_OPTION_STATISTICS_RECEIVED, struct.pack("<Q", frames + losses))
            options += _put(_OPTION_STATISTICS_DROPPED, struct.pack("<Q", losses))
            self._write_block(_STATISTICS, head + options + _END)
        self._stream.flush()

    def _write_block(self, kind: int, body: bytes) -> None:
        length = struct.pack("<I", _BLOCK_MIN + len(body))
        self._stream.write(struct.pack("<I", kind) + length + body + length)


_END: Final = bytes(4)  # of options


def _put(code: int, value: bytes) -> bytes:
    value = value[:0xFFFF]
    return struct.pack("<HH", code, len(value)) + value + bytes(-len(value) % 4)
