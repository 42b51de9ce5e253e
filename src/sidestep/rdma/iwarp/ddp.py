"""DDP segments and the RDMAP operations in them (RFC 5040, RFC 5041).

A segment is either tagged, and names the memory that it goes into, or untagged, and goes into the next buffer of a
queue. Which operation it belongs to stands in a byte of RDMAP's within the header of DDP.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import ClassVar, Final, Self

from sidestep.errors import Misuse, Rules

RULES: Final = Rules(
    ddp_short="a segment holds the header of its kind",
    ddp_version="DDP and RDMAP are of version 1",
    rdmap_opcode="the opcode is one of RDMAP's, and tagged or not as it asks",
)


class RdmapOp(IntEnum):
    """Operations."""

    WRITE = 0
    READ_REQUEST = 1
    READ_RESPONSE = 2
    SEND = 3
    SEND_INV = 4
    SEND_SE = 5
    SEND_SE_INV = 6
    TERMINATE = 7


TAGGED: Final = frozenset({RdmapOp.WRITE, RdmapOp.READ_RESPONSE})
SENDS: Final = frozenset({RdmapOp.SEND, RdmapOp.SEND_INV, RdmapOp.SEND_SE, RdmapOp.SEND_SE_INV})
SOLICITED: Final = frozenset({RdmapOp.SEND_SE, RdmapOp.SEND_SE_INV})
INVALIDATING: Final = frozenset({RdmapOp.SEND_INV, RdmapOp.SEND_SE_INV})
QUEUE_SEND: Final = 0
QUEUE_READ: Final = 1
QUEUE_TERMINATE: Final = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment; of the fields those of its kind mean something."""

    op: RdmapOp
    last: bool
    payload: bytes = b""
    stag: int = 0  # tagged: of the memory it goes into; of a Send with Invalidate: the one that becomes void
    offset: int = 0  # tagged: where in that memory
    queue: int = 0
    msn: int = 0  # message of the queue
    mo: int = 0  # bytes of the message before this segment

    _TAGGED: ClassVar[Struct] = Struct(">BBIQ")
    _UNTAGGED: ClassVar[Struct] = Struct(">BBIIII")

    def encode(self) -> bytes:
        """Its bytes; `Misuse` if something does not fit."""
        tagged = self.op in TAGGED
        control, rdmap = tagged << 7 | self.last << 6 | 1, 0x40 | self.op
        try:
            if tagged:
                return self._TAGGED.pack(control, rdmap, self.stag, self.offset) + self.payload
            return self._UNTAGGED.pack(control, rdmap, self.stag, self.queue, self.msn, self.mo) + self.payload
        except struct.error as error:
            raise Misuse(f"{self} does not fit its fields: {error}") from error

    @classmethod
    def decode(cls, whole: bytes) -> Self:
        """Read a segment; `PeerViolation` if it is none."""
        if len(whole) < 2:
            raise RULES.broken("ddp_short", f"{len(whole)} bytes")
        control, rdmap = whole[0], whole[1]
        if control & 3 != 1 or rdmap >> 6 != 1:
            raise RULES.broken("ddp_version", f"DDP version {control & 3}, RDMAP version {rdmap >> 6}")
        tagged, last, code = control >> 7 == 1, control >> 6 & 1 == 1, rdmap & 0xF
        if code > RdmapOp.TERMINATE or (RdmapOp(code) in TAGGED) != tagged:
            raise RULES.broken("rdmap_opcode", f"opcode {code}, {'tagged' if tagged else 'untagged'}")
        layout = cls._TAGGED if tagged else cls._UNTAGGED
        if len(whole) < layout.size:
            raise RULES.broken("ddp_short", f"{len(whole)} bytes")
        payload = whole[layout.size :]
        if tagged:
            _, _, stag, offset = layout.unpack_from(whole)
            return cls(RdmapOp(code), last, payload, stag, offset)
        _, _, stag, queue, msn, mo = layout.unpack_from(whole)
        return cls(RdmapOp(code), last, payload, stag, queue=queue, msn=msn, mo=mo)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What an RDMA Read asks for: the payload of its segment."""

    sink_stag: int
    sink_offset: int
    length: int  # bytes
    source_stag: int
    source_offset: int

    _LAYOUT: ClassVar[Struct] = Struct(">IQIIQ")
    LENGTH: ClassVar[int] = 28

    def encode(self) -> bytes:
        return self._LAYOUT.pack(
            self.sink_stag, self.sink_offset, self.length, self.source_stag, self.source_offset
        )  # fmt: skip

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Read it; `PeerViolation` if it is not exactly 28 bytes."""
        if len(payload) != cls._LAYOUT.size:
            raise RULES.broken("ddp_short", f"a Read Request of {len(payload)} bytes")
        return cls(*cls._LAYOUT.unpack(payload))
