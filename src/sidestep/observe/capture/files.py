"""Frames out of capture files: pcap in all its byte orders and resolutions, pcapng, and both compressed by gzip.

Frames are given as they are read, so that of a file that is cut off or damaged everything before that place is seen.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, Final

from sidestep import limits
from sidestep.errors import Misuse, Unavailable
from sidestep.observe.capture.frame import CapturedFrame, Readable, damaged

_NS: Final = 1_000_000_000
_GZIP: Final = b"\x1f\x8b"
_UNPACK: Final = "unpack it by hand"
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


def read_frames(stream: BinaryIO, name: str, start: bytes = b"") -> Iterator[CapturedFrame]:
    """The frames of a capture; `name` is for errors, `start` what has been read of it already: four bytes at most.

    `Misuse` if it is no capture. `Unavailable` at the place where it is cut off or damaged.
    """
    start += stream.read(4 - len(start))
    if start[:2] != _GZIP:
        yield from _frames(stream, start, name)
        return
    unpacked = _Unpacked(start, stream, name)
    start = unpacked.read(4)
    if unpacked.damage is None:
        yield from _frames(unpacked, start, name)
    if unpacked.damage is not None:
        raise Unavailable(f"{name} cannot be unpacked to its end: {unpacked.damage}", remedy=_UNPACK)


def _frames(stream: Readable, start: bytes, name: str) -> Iterator[CapturedFrame]:
    if start == _PCAPNG:
        from sidestep.observe.capture.pcapng import read_pcapng  # needs the extra `capture`, which the others do not

        yield from read_pcapng(stream, name)
    elif int.from_bytes(start) in _PCAP:
        yield from _read_pcap(stream, int.from_bytes(start), name)
    else:
        raise Misuse(
            f"{name} is no capture: it begins with {start.hex() or 'nothing'}",
            remedy="give a pcap or pcapng file, or a message in hex",
        )


class _Chained(io.RawIOBase):
    """What has been read of a stream already, and the rest of it."""

    def __init__(self, start: bytes, stream: BinaryIO) -> None:
        super().__init__()
        self._start = start
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        """So many bytes at most; none at the end only."""
        piece, self._start = self._start[:size], self._start[size:]
        return piece or self._stream.read(size)


class _Unpacked:
    """A compressed file, unpacked as it is read; what is cut off or damaged ends it, so that all before it is seen."""

    def __init__(self, start: bytes, stream: BinaryIO, name: str) -> None:
        self._file = gzip.GzipFile(mode="rb", fileobj=_Chained(start, stream))
        self._name = name
        self._left = limits.CAPTURE_UNPACKED_MAX
        self.damage: Exception | None = None

    def read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.damage = error
            return b""
        self._left -= len(data)
        if self._left < 0:
            raise Unavailable(f"{self._name} has more than {limits.CAPTURE_UNPACKED_MAX} bytes in it", remedy=_UNPACK)
        return data


def _read_pcap(stream: Readable, magic: int, name: str) -> Iterator[CapturedFrame]:
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
        seconds, fraction, captured = struct.unpack_from(order + "III", head)
        if captured > limits.CAPTURE_FRAME_MAX:
            raise damaged(name, number, f"a frame of {captured} bytes cannot be")
        data = stream.read(captured)
        yield CapturedFrame(number, seconds * _NS + fraction * (_NS // units), link_type, data)
        if len(data) < captured:
            raise damaged(name, number, f"the file ends after {len(data)} of {captured} bytes")
