"""Request and Reply, the two frames with which an MPA connection begins (RFC 5044 7.1.1, RFC 6581 6 and 9).

Revision 2 may put four bytes in front of the private data, and says so by the flag S: how many RDMA Reads each end
holds and makes at a time, and by which message of no length the initiator tells that it is ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntFlag
from struct import Struct
from typing import ClassVar, Final, Self

from sidestep.errors import Misuse, Rules

PRIVATE_DATA_MAX: Final = 512  # bytes, the enhanced ones included (RFC 5044 7.1.1)
ENHANCED_LEN: Final = 4  # bytes in front of the private data (RFC 6581 9)
DEPTH_MAX: Final = 0x3FFE  # RDMA Reads that the field can tell (RFC 6581 9.1)

_NOT_NEGOTIATED: Final = 0x3FFF  # instead of a number: the users agree about it by themselves

RULES: Final = Rules(
    mpa_key="an MPA connection begins with the key of a Request or a Reply",
    mpa_private_data="private data are 512 bytes at most",
    mpa_enhanced="who sets S puts four bytes in front of the private data, and a Reply has S if the Request had it",
)


class MpaRole(Enum):
    """Whose frame it is, with its key."""

    REQUEST = b"MPA ID Req Frame"
    REPLY = b"MPA ID Rep Frame"


@dataclass(frozen=True, slots=True)
class StartFrame:
    """A Request or a Reply."""

    role: MpaRole
    private_data: bytes = b""  # the enhanced part included
    markers: bool = False  # the sender wants them in what it receives
    crc: bool = True
    rejected: bool = False
    enhanced: bool = False
    revision: int = 1

    _LAYOUT: ClassVar[Struct] = Struct(">16sBBH")
    LENGTH: ClassVar[int] = 20

    def encode(self) -> bytes:
        if len(self.private_data) > PRIVATE_DATA_MAX:
            raise Misuse(f"{len(self.private_data)} bytes of private data")
        flags = self.markers << 7 | self.crc << 6 | self.rejected << 5 | self.enhanced << 4
        return self._LAYOUT.pack(self.role.value, flags, self.revision, len(self.private_data)) + self.private_data

    @classmethod
    def decode(cls, stream: bytes | bytearray) -> tuple[Self, int] | None:
        """The frame at the start of a stream and its length; None if there is not all of it yet."""
        key = bytes(stream[: len(MpaRole.REQUEST.value)])
        if not any(role.value.startswith(key) for role in MpaRole):
            raise RULES.broken("mpa_key", f"it begins with {key.hex()}")
        if len(stream) < cls.LENGTH:
            return None
        _, flags, revision, private_len = cls._LAYOUT.unpack_from(stream)
        if private_len > PRIVATE_DATA_MAX:
            raise RULES.broken("mpa_private_data", f"{private_len} bytes")
        end = cls.LENGTH + private_len
        if len(stream) < end:
            return None
        frame = cls(
            role=MpaRole(key),
            private_data=bytes(stream[cls.LENGTH : end]),
            markers=flags & 0x80 != 0,
            crc=flags & 0x40 != 0,
            rejected=flags & 0x20 != 0,
            enhanced=flags & 0x10 != 0 and revision > 1,
            revision=revision,
        )
        return frame, end

    @property
    def upper_data(self) -> bytes:
        return self.private_data[ENHANCED_LEN:] if self.enhanced else self.private_data

    @property
    def enhanced_data(self) -> Enhanced | None:
        """What revision 2 tells; None without S. `PeerViolation` if it is not all there."""
        return Enhanced.decode(self.private_data) if self.enhanced else None


class Rtr(IntFlag):
    """Messages of no length that tell "ready to receive", by their bits in the enhanced data: B, C and D."""

    SEND = 0x4000_0000  # B; it uses up a receive of the other end's user
    WRITE = 0x0000_8000  # C
    READ = 0x0000_4000  # D


NO_RTR: Final = Rtr(0)


@dataclass(frozen=True, slots=True)
class Enhanced:
    """The four bytes in front of the private data (RFC 6581 9); the numbers are the sender's own."""

    ird: int | None = None  # RDMA Reads of the other end that it holds at a time; None: not negotiated
    ord: int | None = None  # RDMA Reads of its own that it makes at a time; None: not negotiated
    peer_to_peer: bool = False  # A: the initiator sends an RTR, then either end may send
    rtr: Rtr = NO_RTR

    def encode(self) -> bytes:
        """Its bytes; `Misuse` if a number does not fit."""
        for number in (self.ird, self.ord):
            if number is not None and not 0 <= number <= DEPTH_MAX:
                raise Misuse(f"{number} RDMA Reads at a time", remedy=f"0 to {DEPTH_MAX} can be told")
        ird, ord_ = (_NOT_NEGOTIATED if number is None else number for number in (self.ird, self.ord))
        return (self.peer_to_peer << 31 | ird << 16 | ord_ | self.rtr).to_bytes(ENHANCED_LEN)

    @classmethod
    def decode(cls, private_data: bytes) -> Self:
        """Read them from the front of private data; `PeerViolation` if they are not there."""
        if len(private_data) < ENHANCED_LEN:
            raise RULES.broken("mpa_enhanced", f"{len(private_data)} bytes with S")
        word = int.from_bytes(private_data[:ENHANCED_LEN])
        ird, ord_ = (None if number == _NOT_NEGOTIATED else number for number in (word >> 16 & 0x3FFF, word & 0x3FFF))
        return cls(ird, ord_, word >> 31 == 1, Rtr(word & (Rtr.SEND | Rtr.WRITE | Rtr.READ)))
