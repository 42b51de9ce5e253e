"""Frames out of capture files: pcap in all its byte orders and resolutions, pcapng, and both compressed by gzip.

Frames are given as they are read, so that of a file that is cut off or damaged everything before that place is seen.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, Final

from sidestep import limits
from sidestep.errors import Misuse, Unavailable
from sidestep.observe.capture.frame import Frame, damaged
from sidestep.observe.capture.pcapng import read_pcapng

_NS: Final = 1_000_000_000
_GZIP: Final = b"\x1f\x8b"
_PIECE: Final = 1 << 16  # bytes that are unpacked at a time; those before damage are not lost
_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS  # zlib's way to ask for the format of gzip
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
        yield from read_pcapng(stream, name)
    elif int.from_bytes(start) in _PCAP:
        yield from _read_pcap(stream, int.from_bytes(start), name)
    else:
        raise Misuse(
            f"{name} is no capture: it begins with {start.hex() or 'nothing'}",
            remedy="give a pcap or pcapng file, or a message in hex",
        )


def _unpacked(packed: bytes, name: str) -> BinaryIO:
    """As much of a compressed file as can be unpacked: what is cut off or damaged shows where its frames end."""
    found = bytearray()
    member = zlib.decompressobj(_GZIP_WINDOW)
    try:
        for offset in range(0, len(packed), _PIECE):
            piece = packed[offset : offset + _PIECE]
            while piece and len(found) < limits.CAPTURE_UNPACKED_MAX:
                found += member.decompress(piece)
                piece = member.unused_data
                if member.eof:
                    member = zlib.decompressobj(_GZIP_WINDOW)
    except zlib.error as error:
        if not found:
            raise Unavailable(f"{name} cannot be unpacked: {error}", remedy="unpack it by hand") from error
    return io.BytesIO(bytes(found))


def _read_pcap(stream: BinaryIO, magic: int, name: str) -> Iterator[Frame]:
    order, units, header_len = _PCAP[magic]
    header = stream.read(_PCAP_HEADER_LEN - 4)
    if len(header) < _PCAP_HEADER_LEN - 4:
        raise damaged(name, 1, "the file ends in its own header")
    link_type = struct.unpack_from(order + "I", header, 16)[0] & 0xFFFF  # above it: how long a check sequence is
    number = 0
    while head := stream.read(header_len):
        number += 1
        if len(head) < header_len:
            raise damaged(name, number, "the file ends in the frame's header")
        seconds, fraction, captured, length = struct.unpack_from(order + "IIII", head)
        if captured > limits.CAPTURE_FRAME_MAX:
            raise damaged(name, number, f"a frame of {captured} bytes cannot be")
        data = stream.read(captured)
        yield Frame(number, seconds * _NS + fraction * (_NS // units), link_type, data, max(length, captured))
        if len(data) < captured:
            raise damaged(name, number, f"the file ends after {len(data)} of {captured} bytes")
