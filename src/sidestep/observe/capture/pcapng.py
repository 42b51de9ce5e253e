"""Frames out of pcapng, and into it (draft-ietf-opsawg-pcapng), with python-pcapng.

A section has a byte order and interfaces of its own; an interface has a link type and a resolution of time. Other
blocks than those of interfaces and packets are passed over.

The library knows the layout of blocks and options. Of its reader the lower half is used, for three reasons: its scanner
takes the end within a block for the end of the file; it rejects whole files for options that nobody here asks for (an
IPv6 address of an interface, a comment that is not UTF-8, an unknown one that is repeated); and its times are floats,
too short for nanoseconds since the epoch. Lengths are checked before the library reads by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO, Final

from pcapng import FileWriter
from pcapng.blocks import (
    EnhancedPacket,
    InterfaceDescription,
    InterfaceStatistics,
    ObsoletePacket,
    SectionHeader,
    SimplePacket,
)
from pcapng.exceptions import BadMagic, CorruptedFile, PcapngLoadError, StreamEmpty, TruncatedFile
from pcapng.structs import TYPE_U8, Option, read_block_data, read_int, read_options, read_section_header, struct_decode

from sidestep import limits
from sidestep.observe.capture.frame import CapturedFrame, Readable, damaged

# The fields of a packet's block up to its bytes, which the options follow.
_PACKETS: Final = {
    kind.magic_number: [field for field in kind.schema if field[0] not in ("packet_data", "options")]
    for kind in (EnhancedPacket, ObsoletePacket, SimplePacket)
}
_INTERFACE: Final = [field for field in InterfaceDescription.schema if field[0] != "options"]
_RESOLUTION: Final = Option(9, "if_tsresol", TYPE_U8)  # the library's has no type, and it warns of that
_OPTION_OFFSET: Final = 14
_TEXT_MAX: Final = 0xFFFF // 4  # characters of an option, which has 16 bits for its bytes
_LINKTYPE_ETHERNET: Final = 1
_NANOSECONDS: Final = 9  # a resolution of 10^-9
_NS: Final = 1_000_000_000
# What the library finds, in the words of this program.
_WORDS: Final[dict[type[Exception], str]] = {
    BadMagic: "a section does not begin as it must",
    CorruptedFile: "the two lengths of a block differ",
    StreamEmpty: "the file ends in a block, or a block in its fields",
    TruncatedFile: "the file ends in a block, or a block in its fields",
}


class _Wrong(Exception):
    """A block that says what cannot be."""


class _Bounded:
    """A file as the library reads it: no more at a time than a frame may have, whatever a block says."""

    def __init__(self, stream: Readable, offset: int) -> None:
        self._stream = stream
        self._offset = offset

    def tell(self) -> int:
        """Where the next byte is; a pipe could not say."""
        return self._offset

    def read(self, size: int) -> bytes:
        if not 0 <= size <= limits.CAPTURE_FRAME_MAX:
            raise _Wrong(f"a block with {size} bytes in it cannot be")
        data = self._stream.read(size)
        self._offset += len(data)
        return data


@dataclass(frozen=True, slots=True)
class _Interface:
    link_type: int
    snap_len: int  # bytes of a frame that are kept; 0: all
    units: int = 1_000_000  # of a second
    offset_s: int = 0  # what all times are counted from

    def time_ns(self, ticks: int) -> int:
        """In whole numbers: a float is too short for nanoseconds since the epoch."""
        return ticks * _NS // self.units + self.offset_s * _NS


def read_pcapng(stream: Readable, name: str) -> Iterator[CapturedFrame]:
    """The frames of a file whose first four bytes have been read; `Unavailable` where it is cut off or damaged."""
    interfaces, number = list[_Interface](), 0
    try:
        for order, kind, body in _blocks(stream):
            if kind == SectionHeader.magic_number:
                interfaces = []
            elif kind == InterfaceDescription.magic_number:
                if len(interfaces) == limits.CAPTURE_INTERFACES_MAX:
                    raise _Wrong(f"a section with more than {len(interfaces)} interfaces")
                interfaces.append(_interface(body, order))
            elif kind in _PACKETS:
                frame = _frame(kind, body, order, interfaces, number + 1)
                number += 1
                yield frame
    except (_Wrong, PcapngLoadError) as error:
        raise damaged(name, number + 1, _WORDS.get(type(error)) or str(error)) from error


def _blocks(stream: Readable) -> Iterator[tuple[str, int, BytesIO]]:
    """Byte order, type and body of each; the type of a section header is the same in both orders."""
    file, order, kind = _Bounded(stream, 4), "<", SectionHeader.magic_number
    while True:
        if kind == SectionHeader.magic_number:
            section = read_section_header(file)
            order, body = section["endianness"], section["data"]
        else:
            body = read_block_data(file, order)
        yield order, kind, BytesIO(body)
        try:
            kind = read_int(file, 32, endianness=order)
        except StreamEmpty:  # elsewhere than between two blocks it is damage
            return


def _interface(body: BytesIO, order: str) -> _Interface:
    fields = struct_decode(_INTERFACE, body, order)
    units, offset_s = 1_000_000, 0
    for code, value in read_options(body, order):
        if code == _RESOLUTION.code and value:
            units = (2 if value[0] & 0x80 else 10) ** (value[0] & 0x7F)
        elif code == _OPTION_OFFSET and len(value) == 8:
            offset_s = int.from_bytes(value, "big" if order == ">" else "little", signed=True)
    return _Interface(fields["link_type"], fields["snaplen"], units, offset_s)


def _frame(code: int, body: BytesIO, order: str, interfaces: list[_Interface], number: int) -> CapturedFrame:
    fields = struct_decode(_PACKETS[code], body, order)
    which = fields.get("interface_id", 0)  # a simple packet has none, and no time either
    if which >= len(interfaces):
        raise _Wrong(f"interface {which} of {len(interfaces)}")
    interface = interfaces[which]
    length = fields["packet_len"]
    captured = fields.get("captured_len", min(length, interface.snap_len or length))
    data = body.read(captured)
    if len(data) < captured:
        raise _Wrong(f"{captured} bytes of a frame in a block with {len(data)}")
    ticks = fields.get("timestamp_high", 0) << 32 | fields.get("timestamp_low", 0)
    return CapturedFrame(number, interface.time_ns(ticks), interface.link_type, data)


class PcapngWriter:
    """Writes one section of Ethernet frames; close it to have the interfaces' statistics in the file.

    Args:
        stream: Where to; it stays open.
        application: Who writes.
        comment: What is to be known of all of it.
        snaplen: Bytes that are kept of a frame; 0: all.
    """

    def __init__(self, stream: BinaryIO, application: str, *, comment: str = "", snaplen: int = 0) -> None:
        self._stream = stream
        self._snaplen = snaplen
        self._counts: list[tuple[int, int]] = []  # frames and losses, by interface
        options = {"shb_userappl": application} | ({"opt_comment": comment[:_TEXT_MAX]} if comment else {})
        self._section = SectionHeader("<", options=options)
        self._file = FileWriter(stream, self._section)

    def interface(self, name: str, description: str) -> int:
        """Another one; its number."""
        options = {"if_name": name[:_TEXT_MAX], "if_description": description[:_TEXT_MAX]}
        found = self._section.new_member(
            InterfaceDescription, link_type=_LINKTYPE_ETHERNET, snaplen=self._snaplen, options=options
        )
        found.options.schema[_RESOLUTION.code] = _RESOLUTION
        found.options[_RESOLUTION.name] = _NANOSECONDS
        self._file.write_block(found)
        self._counts.append((0, 0))
        return len(self._counts) - 1

    def write(
        self, interface: int, time_ns: int, frame: bytes, *, outbound: bool, comment: str = "", dropped: int = 0
    ) -> None:
        """A frame, with what is to be said about it, and how many were lost before it."""
        frames, losses = self._counts[interface]
        self._counts[interface] = frames + 1, losses + dropped
        options: dict[str, int | str] = {"epb_flags": 2 if outbound else 1}
        if comment:
            options["opt_comment"] = comment[:_TEXT_MAX]
        if dropped:
            options["epb_dropcount"] = dropped
        kept = frame[: self._snaplen] if self._snaplen else frame
        self._put(EnhancedPacket, interface, time_ns, options, packet_len=len(frame), packet_data=kept)

    def lost(self, interface: int, count: int) -> None:
        frames, losses = self._counts[interface]
        self._counts[interface] = frames, losses + count

    def close(self, time_ns: int) -> None:
        for interface, (frames, losses) in enumerate(self._counts):
            counts = {"isb_ifrecv": frames + losses, "isb_ifdrop": losses}
            self._put(InterfaceStatistics, interface, time_ns, counts)
        self._stream.flush()

    def _put(
        self, kind: type, interface: int, time_ns: int, options: Mapping[str, int | str], **more: bytes | int
    ) -> None:
        high, low = time_ns >> 32, time_ns & 0xFFFF_FFFF
        times = {"timestamp_high": high, "timestamp_low": low}
        self._file.write_block(self._section.new_member(kind, interface_id=interface, options=options, **times, **more))
