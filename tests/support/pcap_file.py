"""Conversations in a classic pcap with nanoseconds; what the product writes is pcapng."""

from __future__ import annotations

from struct import Struct
from typing import BinaryIO, Final

from sidestep.rdma.roce.connection import RoceConnection, RoceEnds, RoceRecord

_MAGIC_NS: Final = 0xA1B2_3C4D
_LINKTYPE_ETHERNET: Final = 1
_SNAPLEN: Final = 262_144
_FILE_HEADER: Final = Struct("<IHHiIII")
_RECORD_HEADER: Final = Struct("<IIII")


class RoceWriter:
    """Writes records as packets of one connection; several of them may write into one `PcapFile`."""

    def __init__(self, file: PcapFile, ends: RoceEnds | None = None) -> None:
        self._file = file
        self._connection = RoceConnection(ends or RoceEnds())

    def write(self, record: RoceRecord) -> None:
        """Add the packets of one record; `Misuse` if it cannot be sent."""
        for frame in self._connection.frames(record):
            self._file.write(record.time_s, frame)


class PcapFile:
    """A classic pcap of Ethernet frames, with nanoseconds."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        stream.write(_FILE_HEADER.pack(_MAGIC_NS, 2, 4, 0, 0, _SNAPLEN, _LINKTYPE_ETHERNET))

    def write(self, time_s: float, frame: bytes) -> None:
        seconds, nanoseconds = divmod(round(time_s * 1_000_000_000), 1_000_000_000)
        self._stream.write(_RECORD_HEADER.pack(seconds, nanoseconds, len(frame), len(frame)) + frame)
