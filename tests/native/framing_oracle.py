"""What sidestep.native._framing should do, read slowly: DDP headers by struct, frames by rdma/iwarp/mpa.py."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mpa_oracle import Deframer

from sidestep.errors import PeerViolation
from sidestep.rdma.iwarp.mpa import fpdu

TAGGED_LEN, UNTAGGED_LEN = 14, 18
FAULTS = {"mpa_crc": "crc", "mpa_marker": "marker"}


@dataclass(frozen=True)
class Message:
    """A whole message and its headers' fields; of the fields those of its kind mean something."""

    tagged: bool
    rdmap: int
    stag: int
    payload: bytes
    to: int = 0
    queue: int = 0
    msn: int = 0

    def header(self, offset: int, last: bool) -> bytes:
        control = self.tagged << 7 | last << 6 | 1
        if self.tagged:
            return struct.pack(">BBIQ", control, self.rdmap, self.stag, (self.to + offset) % (1 << 64))
        return struct.pack(">BBIIII", control, self.rdmap, self.stag, self.queue, self.msn, offset)

    def segments(self, mulpdu: int, begin: int, end: int, last: bool) -> Iterator[bytes]:
        """Those of a part of it, each with its header."""
        step = mulpdu - (TAGGED_LEN if self.tagged else UNTAGGED_LEN)
        for at in range(begin, end, step) if end > begin else [begin]:
            stop = min(at + step, end)
            yield self.header(at, last and stop == end) + self.payload[at:stop]

    def frames(
        self, position: int, mulpdu: int, begin: int, end: int, last: bool, *, crc: bool, markers: bool
    ) -> bytes:
        """What a part of it is in a stream, from `position` on."""
        out = b""
        for segment in self.segments(mulpdu, begin, end, last):
            out += fpdu(segment, position + len(out), markers=markers, crc=crc)
        return out


@dataclass(frozen=True)
class Found:
    """A run: what _framing.Run says, in its order, and what else can be asked for."""

    control: int
    rdmap: int
    stag: int
    queue: int
    msn: int
    offset: int
    last: bool
    payload: bytes
    headers: tuple[tuple[bytes, int], ...]  # of each segment, with the length of the ULPDU

    @property
    def fields(self) -> tuple[int, ...]:
        """Those of Run but for the number."""
        kind = (self.control, self.rdmap, self.stag, self.queue, self.msn, self.offset)
        return (*kind, len(self.payload), len(self.headers), self.last)

    def goes_on_as(self, other: Found) -> bool:
        """Whether the other one is of the same message and begins where this one ends."""
        same = (self.control, self.rdmap, self.stag, self.queue, self.msn)
        return (
            not self.last
            and same == (other.control, other.rdmap, other.stag, other.queue, other.msn)
            and self.offset + len(self.payload) == other.offset
        )


class Reader:
    """A direction, in any pieces."""

    def __init__(self, *, crc: bool, markers: bool) -> None:
        self._deframer = Deframer(markers=markers, check=True, crc=crc)
        self.fault: str | None = None

    def feed(self, piece: bytes) -> list[Found]:
        """The runs among the frames that this piece completes."""
        runs: list[Found] = []
        if self.fault:
            return runs
        try:
            for payload in self._deframer.feed(piece):
                if len(payload) < header_len(payload):
                    self.fault = "short"
                    break
                segment = found(payload)
                if runs and runs[-1].goes_on_as(segment):
                    runs[-1] = replace(
                        runs[-1],
                        last=segment.last,
                        payload=runs[-1].payload + segment.payload,
                        headers=runs[-1].headers + segment.headers,
                    )
                else:
                    runs.append(segment)
        except PeerViolation as error:
            self.fault = FAULTS[str(error.rule)]
        return runs

    @property
    def pending(self) -> int:
        return 0 if self.fault else self._deframer.pending


def header_len(segment: bytes) -> int:
    return TAGGED_LEN if segment[:1] >= b"\x80" else UNTAGGED_LEN


def found(segment: bytes) -> Found:
    """A run of one segment."""
    control, rdmap = segment[0] & ~0x40, segment[1]
    last = segment[0] & 0x40 != 0
    stag = queue = msn = 0
    if control & 0x80:
        stag, offset = struct.unpack_from(">IQ", segment, 2)
    else:
        stag, queue, msn, offset = struct.unpack_from(">IIII", segment, 2)
    size = header_len(segment)
    headers = ((segment[:size], len(segment)),)
    return Found(control, rdmap, stag, queue, msn, offset, last, segment[size:], headers)
