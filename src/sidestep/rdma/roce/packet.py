"""Packets of the InfiniBand transport: base header, extension headers, payload (IBTA volume 1, chapter 9).

What is read here is the part between the network header (IP and UDP, or GRH) and the invariant checksum. All fields are
big-endian. Reserved bits are sent as 0 and not looked at.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field, fields
from enum import IntEnum
from struct import Struct
from typing import ClassVar, Final, Self, TypeVar

from sidestep.errors import Misuse, Rules

UDP_PORT: Final = 4791  # RoCEv2
ETHERTYPE: Final = 0x8915  # RoCEv1
ICRC_LEN: Final = 4
_UDP_LEN: Final = 8
PSN_MASK: Final = 0xFF_FFFF
PKEY_DEFAULT: Final = 0xFFFF  # full member of the default partition
QKEY_GSI: Final = 0x8001_0000
QP_GSI: Final = 1  # where management datagrams go
MTU_CODES: Final = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}  # bytes of payload a packet

RULES: Final = Rules(
    ib_short="a packet holds its base header and the headers of its opcode",
    ib_version="the transport header's version is 0",
    ib_opcode="the opcode is one of RC, UD or CNP",
    ib_pad="padding is part of the packet",
)


class Op(IntEnum):
    """Opcodes of reliable connections, of unreliable datagrams and of congestion control."""

    SEND_FIRST = 0x00
    SEND_MIDDLE = 0x01
    SEND_LAST = 0x02
    SEND_LAST_IMM = 0x03
    SEND_ONLY = 0x04
    SEND_ONLY_IMM = 0x05
    WRITE_FIRST = 0x06
    WRITE_MIDDLE = 0x07
    WRITE_LAST = 0x08
    WRITE_LAST_IMM = 0x09
    WRITE_ONLY = 0x0A
    WRITE_ONLY_IMM = 0x0B
    READ_REQUEST = 0x0C
    READ_RESPONSE_FIRST = 0x0D
    READ_RESPONSE_MIDDLE = 0x0E
    READ_RESPONSE_LAST = 0x0F
    READ_RESPONSE_ONLY = 0x10
    ACK = 0x11
    ATOMIC_ACK = 0x12
    CMP_SWAP = 0x13
    FETCH_ADD = 0x14
    SEND_LAST_INV = 0x16
    SEND_ONLY_INV = 0x17
    UD_SEND_ONLY = 0x64
    UD_SEND_ONLY_IMM = 0x65
    CNP = 0x81


SENDS: Final = frozenset(op for op in Op if op.name.startswith("SEND"))
WRITES: Final = frozenset(op for op in Op if op.name.startswith("WRITE"))
READ_RESPONSES: Final = frozenset(op for op in Op if op.name.startswith("READ_RESPONSE"))
STARTS: Final = frozenset(op for op in Op if "FIRST" in op.name or "ONLY" in op.name)
ENDS: Final = frozenset(op for op in Op if "LAST" in op.name or "ONLY" in op.name)


@dataclass(frozen=True, slots=True)
class Bth:
    """The base transport header, in every packet."""

    opcode: Op
    dest_qp: int
    psn: int
    ack_req: bool = False
    solicited: bool = False
    pad: int = 0  # bytes behind the payload
    pkey: int = PKEY_DEFAULT
    migrated: bool = True  # without path migration every queue pair is in this state
    becn: bool = False  # congestion on the way back

    LENGTH: ClassVar[int] = 12
    _LAYOUT: ClassVar[Struct] = Struct(">BBHII")

    def encode(self) -> bytes:
        second = self.solicited << 7 | self.migrated << 6 | self.pad << 4
        return self._LAYOUT.pack(
            self.opcode, second, self.pkey, self.becn << 30 | self.dest_qp, self.ack_req << 31 | self.psn
        )

    @classmethod
    def decode(cls, packet: memoryview) -> Self:
        if len(packet) < cls.LENGTH:
            raise RULES.broken("ib_short", f"{len(packet)} bytes")
        opcode, second, pkey, third, fourth = cls._LAYOUT.unpack_from(packet)
        if opcode not in _OPCODES:
            raise RULES.broken("ib_opcode", f"opcode {opcode:#04x}")
        if second & 0xF:
            raise RULES.broken("ib_version", f"version {second & 0xF}")
        return cls(
            opcode=Op(opcode),
            dest_qp=third & 0xFF_FFFF,
            psn=fourth & PSN_MASK,
            ack_req=fourth >> 31 == 1,
            solicited=second >> 7 == 1,
            pad=second >> 4 & 3,
            pkey=pkey,
            migrated=second >> 6 & 1 == 1,
            becn=third >> 30 & 1 == 1,
        )


class Extension:
    """A header behind the base header; which ones, and in what order, the opcode tells."""

    __slots__ = ()
    LAYOUT: ClassVar[Struct]

    def encode(self) -> bytes:
        return self.LAYOUT.pack(*(getattr(self, one.name) for one in fields(self)))  # type: ignore[arg-type]

    @classmethod
    def decode(cls, packet: memoryview, offset: int) -> Self:
        return cls(*cls.LAYOUT.unpack_from(packet, offset))


@dataclass(frozen=True, slots=True)
class Reth(Extension):
    """Where an RDMA Read or Write goes; of a Write in the first packet only."""

    va: int
    rkey: int
    length: int  # bytes of the whole message

    LAYOUT: ClassVar[Struct] = Struct(">QII")


@dataclass(frozen=True, slots=True)
class Aeth(Extension):
    """An acknowledgement."""

    word: int

    LAYOUT: ClassVar[Struct] = Struct(">I")

    @classmethod
    def of(cls, syndrome: int, msn: int) -> Self:
        return cls(syndrome << 24 | msn & PSN_MASK)

    @property
    def syndrome(self) -> int:
        """ACK, RNR NAK or NAK, with its code."""
        return self.word >> 24

    @property
    def msn(self) -> int:
        """Messages that the responder has completed."""
        return self.word & PSN_MASK


@dataclass(frozen=True, slots=True)
class ImmDt(Extension):
    """Immediate data."""

    data: bytes

    LAYOUT: ClassVar[Struct] = Struct(">4s")


@dataclass(frozen=True, slots=True)
class Ieth(Extension):
    """The key that a Send with Invalidate voids."""

    rkey: int

    LAYOUT: ClassVar[Struct] = Struct(">I")


@dataclass(frozen=True, slots=True)
class Deth(Extension):
    """Of a datagram: the key of the receiver's queue, and who sends."""

    qkey: int
    source_qp: int

    LAYOUT: ClassVar[Struct] = Struct(">II")


@dataclass(frozen=True, slots=True)
class AtomicEth(Extension):
    """Operands of an atomic operation."""

    va: int
    rkey: int
    swap_or_add: int
    compare: int

    LAYOUT: ClassVar[Struct] = Struct(">QIQQ")


@dataclass(frozen=True, slots=True)
class AtomicAckEth(Extension):
    """The value before an atomic operation."""

    original: int

    LAYOUT: ClassVar[Struct] = Struct(">Q")


EXTENSIONS: Final[dict[Op, tuple[type[Extension], ...]]] = {
    Op.SEND_LAST_IMM: (ImmDt,),
    Op.SEND_ONLY_IMM: (ImmDt,),
    Op.WRITE_FIRST: (Reth,),
    Op.WRITE_LAST_IMM: (ImmDt,),
    Op.WRITE_ONLY: (Reth,),
    Op.WRITE_ONLY_IMM: (Reth, ImmDt),
    Op.READ_REQUEST: (Reth,),
    Op.READ_RESPONSE_FIRST: (Aeth,),
    Op.READ_RESPONSE_LAST: (Aeth,),
    Op.READ_RESPONSE_ONLY: (Aeth,),
    Op.ACK: (Aeth,),
    Op.ATOMIC_ACK: (Aeth, AtomicAckEth),
    Op.CMP_SWAP: (AtomicEth,),
    Op.FETCH_ADD: (AtomicEth,),
    Op.SEND_LAST_INV: (Ieth,),
    Op.SEND_ONLY_INV: (Ieth,),
    Op.UD_SEND_ONLY: (Deth,),
    Op.UD_SEND_ONLY_IMM: (Deth, ImmDt),
}
_OPCODES: Final = frozenset(int(op) for op in Op)
_Found = TypeVar("_Found", bound=Extension)


@dataclass(frozen=True, slots=True)
class Packet:
    """A packet without its network header and its checksum."""

    bth: Bth
    extensions: tuple[Extension, ...] = ()
    payload: bytes | memoryview = field(default=b"")

    def encode(self) -> bytes:
        """Its bytes, padding included; `Misuse` if the padding or the headers are not the opcode's."""
        if tuple(type(one) for one in self.extensions) != EXTENSIONS.get(self.bth.opcode, ()):
            raise Misuse(f"{self.bth.opcode.name} with {self.extensions}")
        if (len(self.payload) + self.bth.pad) % 4:
            raise Misuse(f"{len(self.payload)} bytes of payload with {self.bth.pad} of padding")
        try:
            headers = self.bth.encode() + b"".join(one.encode() for one in self.extensions)
        except struct.error as error:
            raise Misuse(f"{self} does not fit its fields: {error}") from error
        return headers + bytes(self.payload) + bytes(self.bth.pad)

    @classmethod
    def decode(cls, packet: memoryview) -> Self:
        """Read a packet; `PeerViolation` if it is none."""
        bth = Bth.decode(packet)
        offset = Bth.LENGTH
        found = []
        for header in EXTENSIONS.get(bth.opcode, ()):
            if len(packet) < offset + header.LAYOUT.size:
                raise RULES.broken("ib_short", f"{bth.opcode.name} of {len(packet)} bytes")
            found.append(header.decode(packet, offset))
            offset += header.LAYOUT.size
        if len(packet) < offset + bth.pad:
            raise RULES.broken("ib_pad", f"{bth.pad} bytes of padding, {len(packet) - offset} behind the headers")
        return cls(bth, tuple(found), packet[offset : len(packet) - bth.pad])

    def find(self, kind: type[_Found]) -> _Found | None:
        for one in self.extensions:
            if isinstance(one, kind):
                return one
        return None


# Syndromes of an Aeth.
ACK_NO_CREDITS: Final = 0x1F  # an acknowledgement that says nothing of credits
_NAKS: Final = {
    0x60: "PSN sequence error",
    0x61: "invalid request",
    0x62: "remote access error",
    0x63: "remote operational error",
    0x64: "invalid RD request",
}


def nak_text(syndrome: int) -> str | None:
    """What a syndrome complains of; None if it is a plain acknowledgement."""
    kind = syndrome >> 5 & 3
    if kind == 0:
        return None
    if kind == 1:
        return f"RNR NAK, timer code {syndrome & 0x1F}"
    return f"NAK: {_NAKS.get(syndrome, f'syndrome {syndrome:#04x}')}"


def icrc(packet: bytes | memoryview) -> bytes:
    """The invariant checksum of RoCEv2: what routers may change counts as ones (IBTA volume 1 annex A17, and 7.8.1).

    It is the CRC-32 of Ethernet over a pseudo packet: eight bytes of ones in place of the local routing header, the IP
    and UDP headers and the base transport header with what may change set to ones, then all up to the checksum itself.
    These are the four bytes for a packet from its IP header on, without the checksum; its lengths already count them.
    """
    head_len = (packet[0] & 0xF) * 4 if packet[0] >> 4 == 4 else 40
    head_len += _UDP_LEN
    return finish_icrc(begin_icrc(packet[:head_len]), packet[head_len:])


def begin_icrc(head: bytes | memoryview) -> int:
    """The checksum so far, over the headers of IP and UDP."""
    masked = bytearray(head)
    if masked[0] >> 4 == 4:
        masked[1] = 0xFF  # type of service
        masked[8] = 0xFF  # time to live
        masked[10:12] = b"\xff\xff"  # header checksum
    else:
        masked[0:4] = b"\x6f\xff\xff\xff"  # traffic class and flow label
        masked[7] = 0xFF  # hop limit
    masked[-2:] = b"\xff\xff"  # UDP checksum
    return zlib.crc32(masked, zlib.crc32(b"\xff" * 8))


def finish_icrc(begun: int, transport: bytes | bytearray | memoryview) -> bytes:
    """The checksum of all, over what follows from the base transport header on."""
    begun = zlib.crc32(transport[:4], begun)
    begun = zlib.crc32(b"\xff", begun)  # congestion bits and reserved ones
    return zlib.crc32(transport[5:], begun).to_bytes(4, "little")
