"""Frames out of pcapng (draft-ietf-opsawg-pcapng): blocks with a length at both ends, in sections.

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
