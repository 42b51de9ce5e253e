"""Frames out of capture files: pcap in all its byte orders and resolutions, pcapng, and both compressed by gzip.

Frames are given as they are read, so that of a file that is cut off or damaged everything before that place is seen.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

from sidestep import limits
from sidestep.errors import Misuse, Unavailable

if TYPE_CHECKING:
    from pcapng.blocks import BasePacketBlock, InterfaceDescription

_NS: Final = 1_000_000_000
_GZIP: Final = b"\x1f\x8b"
_PCAPNG: Final = b"\x0a\x0d\x0d\x0a"
# Magic as a big-endian number -> byte order, units of a second, bytes of a frame's header.
_PCAP: Final = {
    0xA1B2C3D4: (">", 1_000_000, 16),
    0xD4C3B2A1: ("<", 1_000_000, 16),
    0xA1B23C4D: (">", _NS, 16),
    0x4D3CB2A1: ("<", _NS, 16),
    0xA1B2CD34: (">", 1_000_000, 24),  # of a patched libpcap: eight more bytes a frame
    0x34CDB2A1: ("<", 1_000_000, 24),
}
_PCAP_HEADER_LEN: Final = 24


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a capture."""

    number: int  # from 1, as other tools count
    time_ns: int  # since the epoch
    link_type: int  # LINKTYPE_*
    data: bytes
    length: int  # bytes on the wire; more than there are if the capture has cut it


def is_capture(start: bytes) -> bool:
    """Whether a file that begins so is a capture, or is compressed and might be one."""
    return start[:2] == _GZIP or start[:4] == _PCAPNG or int.from_bytes(start[:4]) in _PCAP


def read_frames(stream: BinaryIO, name: str, start: bytes = b"") -> Iterator[Frame]:
    """The frames of a capture; `name` is for errors, `start` what has been read of it already: four bytes at most.

    `Misuse` if it is no capture. `Unavailable` at the place where it is cut off or damaged.
    """
    start += stream.read(4 - len(start))
    if start[:2] == _GZIP:
        stream = _unpacked(start + stream.read(), name)
        start = stream.read(4)
    if start == _PCAPNG:
        yield from _read_pcapng(io.BytesIO(start + stream.read()), name)
    elif int.from_bytes(start) in _PCAP:
        yield from _read_pcap(stream, int.from_bytes(start), name)
    else:
        raise Misuse(
            f"{name} is no capture: it begins with {start.hex() or 'nothing'}",
            remedy="give a pcap or pcapng file, or a message in hex",
        )


def _unpacked(packed: bytes, name: str) -> BinaryIO:
    """As much of a compressed file as can be unpacked."""
    found = bytearray()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            while len(found) < limits.CAPTURE_UNPACKED_MAX and (piece := file.read(1 << 16)):
                found += piece
    except (EOFError, OSError, zlib.error) as error:
        if not found:
            raise Unavailable(f"{name} cannot be unpacked: {error}", remedy="unpack it by hand") from error
    return io.BytesIO(bytes(found))


def _damaged(name: str, number: int, what: str) -> Unavailable:
    return Unavailable(
        f"{name}, frame {number}: {what}", remedy="everything before it has been read; capture again for the rest"
    )


# ---- pcap ----


def _read_pcap(stream: BinaryIO, magic: int, name: str) -> Iterator[Frame]:
    order, units, header_len = _PCAP[magic]
    header = stream.read(_PCAP_HEADER_LEN - 4)
    if len(header) < _PCAP_HEADER_LEN - 4:
        raise _damaged(name, 1, "the file ends in its own header")
    link_type = struct.unpack_from(order + "I", header, 16)[0] & 0xFFFF  # above it: how long a check sequence is
    number = 0
    while head := stream.read(header_len):
        number += 1
        if len(head) < header_len:
            raise _damaged(name, number, "the file ends in the frame's header")
        seconds, fraction, captured, length = struct.unpack_from(order + "IIII", head)
        if captured > limits.CAPTURE_FRAME_MAX:
            raise _damaged(name, number, f"a frame of {captured} bytes cannot be")
        data = stream.read(captured)
        yield Frame(number, seconds * _NS + fraction * (_NS // units), link_type, data, max(length, captured))
        if len(data) < captured:
            raise _damaged(name, number, f"the file ends after {len(data)} of {captured} bytes")


# ---- pcapng ----


def _read_pcapng(stream: io.BytesIO, name: str) -> Iterator[Frame]:
    from pcapng import FileScanner
    from pcapng.blocks import BasePacketBlock
    from pcapng.exceptions import PcapngException

    size = len(stream.getbuffer())
    number = 0
    blocks = iter(FileScanner(stream))
    while (block_start := stream.tell()) < size:
        try:
            block = next(blocks, None)
            frame = _frame_of(block, number + 1) if isinstance(block, BasePacketBlock) else None
        except (PcapngException, ValueError, KeyError, struct.error, RuntimeError, AttributeError) as error:
            raise _damaged(name, number + 1, f"the block at byte {block_start} is damaged: {error}") from error
        if block is None:  # the scanner takes an end within a block for the end of the file
            raise _damaged(name, number + 1, f"the file ends in the block at byte {block_start}")
        if frame is not None:
            number += 1
            yield frame


def _frame_of(block: BasePacketBlock, number: int) -> Frame:
    interface = block.section.interfaces[getattr(block, "interface_id", 0)]
    data = bytes(block.packet_data)
    return Frame(number, _time_ns(block, interface), interface.link_type, data, max(block.packet_len, len(data)))


def _time_ns(block: BasePacketBlock, interface: InterfaceDescription) -> int:
    """Whole numbers throughout: a float is too short for nanoseconds since the epoch."""
    if not hasattr(block, "timestamp_high"):
        return 0  # of a Simple Packet
    units = 1_000_000
    if "if_tsresol" in interface.options:
        code = interface.options["if_tsresol"][0]
        units = (2 if code & 0x80 else 10) ** (code & 0x7F)
    offset = interface.options["if_tsoffset"] if "if_tsoffset" in interface.options else 0  # noqa: SIM401
    stamp: int = (block.timestamp_high << 32 | block.timestamp_low) * _NS // units + offset * _NS
    return stamp
