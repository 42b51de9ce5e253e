"""Management datagrams of the connection manager (IBTA volume 1, chapter 12; annex A17 for RoCEv2).

A datagram is 256 bytes: 24 of a common header, then 232 of one message. Every message ends in private data, which has
no length field: who receives it sees all of it, zeros behind. Fields that matter to reliable connections over RoCE are
kept; the others are sent as 0 and not looked at.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from struct import Struct
from typing import ClassVar, Final, Self

from sidestep.errors import Misuse, Rules

MAD_LEN: Final = 256
_HEADER: Final = Struct(">BBBBHHQHHI")
_CLASS_CM: Final = 0x07
_METHOD_SEND: Final = 0x03

RULES: Final = Rules(
    mad_length="a management datagram is 256 bytes",
    mad_class="it is one of the connection manager: class 7, version 2, method Send",
    mad_attribute="its attribute is a message of the connection manager",
)

REJECT_REASONS: Final = {
    1: "no queue pair", 3: "no resources", 4: "timeout", 5: "unsupported request", 6: "invalid communication ID",
    7: "invalid communication instance", 8: "invalid service ID", 9: "invalid transport type", 10: "stale connection",
    12: "invalid primary GID", 13: "invalid primary LID", 24: "port and CM redirect", 25: "port redirect",
    26: "invalid path MTU", 27: "insufficient responder resources", 28: "consumer reject",
    29: "invalid RNR retry count", 30: "duplicate local communication ID", 31: "invalid class version",
    32: "invalid flow label",
}  # fmt: skip


def gid(address: IPv4Address | IPv6Address) -> bytes:
    return address.packed if address.version == 6 else b"\0" * 10 + b"\xff\xff" + address.packed


def address_of(wire: bytes) -> IPv4Address | IPv6Address:
    address = IPv6Address(wire)
    return address.ipv4_mapped or address


class CmMad:
    """Base of the messages."""

    __slots__ = ()
    ATTRIBUTE: ClassVar[int]
    PRIVATE_OFFSET: ClassVar[int]  # in the message
    PRIVATE_LEN: ClassVar[int]  # bytes

    private_data: bytes

    def head(self) -> bytes:
        raise NotImplementedError

    @classmethod
    def read(cls, message: bytes) -> Self:
        raise NotImplementedError

    def encode(self) -> bytes:
        """The 232 bytes; `Misuse` if something does not fit."""
        if len(self.private_data) > self.PRIVATE_LEN:
            raise Misuse(f"{type(self).__name__} with {len(self.private_data)} bytes of private data")
        try:
            head = self.head()
        except struct.error as error:
            raise Misuse(f"{self} does not fit its fields: {error}") from error
        return head.ljust(self.PRIVATE_OFFSET, b"\0") + self.private_data.ljust(self.PRIVATE_LEN, b"\0")

    @classmethod
    def private_of(cls, message: bytes) -> bytes:
        return message[cls.PRIVATE_OFFSET : cls.PRIVATE_OFFSET + cls.PRIVATE_LEN]


@dataclass(frozen=True, slots=True)
class Req(CmMad):
    """Asks for a connection."""

    ATTRIBUTE: ClassVar[int] = 0x0010
    PRIVATE_OFFSET: ClassVar[int] = 140
    PRIVATE_LEN: ClassVar[int] = 92

    local_comm_id: int
    service_id: int
    qpn: int
    starting_psn: int  # of packets to the sender of this message
    local_gid: bytes
    remote_gid: bytes
    private_data: bytes = b""
    ca_guid: int = 0
    responder_resources: int = 4  # RDMA Reads that the sender serves at a time
    initiator_depth: int = 4  # RDMA Reads that the sender has under way at a time
    remote_timeout: int = 20  # 4.096 us * 2^n
    local_timeout: int = 20
    flow_control: bool = True
    retry_count: int = 7
    rnr_retry: int = 7
    cm_retries: int = 15
    mtu_code: int = 3
    srq: bool = False
    pkey: int = 0xFFFF
    local_lid: int = 0xFFFF  # means nothing over RoCE
    remote_lid: int = 0xFFFF
    flow_label: int = 0
    traffic_class: int = 0
    hop_limit: int = 64
    ack_timeout: int = 14

    _LAYOUT: ClassVar[Struct] = Struct(">I4xQQ8xIIIIHBBHH16s16sIBBxB")  # up to the end of the primary path

    def head(self) -> bytes:
        return self._LAYOUT.pack(
            self.local_comm_id, self.service_id, self.ca_guid, self.qpn << 8 | self.responder_resources,
            self.initiator_depth, self.remote_timeout << 3 | self.flow_control,
            self.starting_psn << 8 | self.local_timeout << 3 | self.retry_count, self.pkey,
            self.mtu_code << 4 | self.rnr_retry, self.cm_retries << 4 | self.srq << 3, self.local_lid, self.remote_lid,
            self.local_gid, self.remote_gid, self.flow_label << 12, self.traffic_class, self.hop_limit,
            self.ack_timeout << 3,
        )  # fmt: skip

    @classmethod
    def read(cls, message: bytes) -> Self:
        (
            comm_id, service_id, ca_guid, qpn, depth, timeout, psn, pkey, mtu, retries, local_lid, remote_lid,
            local_gid, remote_gid, flow_label, traffic_class, hop_limit, ack_timeout,
        ) = cls._LAYOUT.unpack_from(message)  # fmt: skip
        return cls(
            comm_id, service_id, qpn >> 8, psn >> 8, local_gid, remote_gid, cls.private_of(message), ca_guid,
            responder_resources=qpn & 0xFF, initiator_depth=depth & 0xFF, remote_timeout=timeout >> 3 & 0x1F,
            local_timeout=psn >> 3 & 0x1F, flow_control=timeout & 1 == 1, retry_count=psn & 7, rnr_retry=mtu & 7,
            cm_retries=retries >> 4, mtu_code=mtu >> 4, srq=retries >> 3 & 1 == 1, pkey=pkey, local_lid=local_lid,
            remote_lid=remote_lid, flow_label=flow_label >> 12, traffic_class=traffic_class, hop_limit=hop_limit,
            ack_timeout=ack_timeout >> 3,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rep(CmMad):
    """Accepts."""

    ATTRIBUTE: ClassVar[int] = 0x0013
    PRIVATE_OFFSET: ClassVar[int] = 36
    PRIVATE_LEN: ClassVar[int] = 196

    local_comm_id: int
    remote_comm_id: int
    qpn: int
    starting_psn: int  # of packets to the sender of this message
    private_data: bytes = b""
    ca_guid: int = 0
    responder_resources: int = 4
    initiator_depth: int = 4
    ack_delay: int = 14
    flow_control: bool = True
    rnr_retry: int = 7
    srq: bool = False

    _LAYOUT: ClassVar[Struct] = Struct(">II4xI4xIBBBBQ")

    def head(self) -> bytes:
        return self._LAYOUT.pack(
            self.local_comm_id, self.remote_comm_id, self.qpn << 8, self.starting_psn << 8, self.responder_resources,
            self.initiator_depth, self.ack_delay << 3 | self.flow_control, self.rnr_retry << 5 | self.srq << 4,
            self.ca_guid,
        )  # fmt: skip

    @classmethod
    def read(cls, message: bytes) -> Self:
        local, remote, qpn, psn, resources, depth, delay, retry, ca_guid = cls._LAYOUT.unpack_from(message)
        return cls(
            local, remote, qpn >> 8, psn >> 8, cls.private_of(message), ca_guid, resources, depth, delay >> 3,
            delay & 1 == 1, retry >> 5, retry >> 4 & 1 == 1,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _OfConnection(CmMad):
    """A message that names its connection and says no more."""

    PRIVATE_OFFSET: ClassVar[int] = 8
    PRIVATE_LEN: ClassVar[int] = 224

    local_comm_id: int
    remote_comm_id: int
    private_data: bytes = b""

    def head(self) -> bytes:
        return struct.pack(">II", self.local_comm_id, self.remote_comm_id)

    @classmethod
    def read(cls, message: bytes) -> Self:
        local, remote = struct.unpack_from(">II", message)
        return cls(local, remote, cls.private_of(message))


class Rtu(_OfConnection):
    """The asking side is ready."""

    __slots__ = ()
    ATTRIBUTE: ClassVar[int] = 0x0014


class Drep(_OfConnection):
    """Agrees to the end."""

    __slots__ = ()
    ATTRIBUTE: ClassVar[int] = 0x0016


@dataclass(frozen=True, slots=True)
class Dreq(CmMad):
    """Ends a connection."""

    ATTRIBUTE: ClassVar[int] = 0x0015
    PRIVATE_OFFSET: ClassVar[int] = 12
    PRIVATE_LEN: ClassVar[int] = 220

    local_comm_id: int
    remote_comm_id: int
    remote_qpn: int  # the receiver's own
    private_data: bytes = b""

    def head(self) -> bytes:
        return struct.pack(">III", self.local_comm_id, self.remote_comm_id, self.remote_qpn << 8)

    @classmethod
    def read(cls, message: bytes) -> Self:
        local, remote, qpn = struct.unpack_from(">III", message)
        return cls(local, remote, qpn >> 8, cls.private_of(message))


@dataclass(frozen=True, slots=True)
class Rej(CmMad):
    """Refuses."""

    ATTRIBUTE: ClassVar[int] = 0x0012
    PRIVATE_OFFSET: ClassVar[int] = 84
    PRIVATE_LEN: ClassVar[int] = 148

    local_comm_id: int
    remote_comm_id: int
    reason: int
    rejected: int = 0  # 0 a REQ, 1 a REP, 2 something else
    private_data: bytes = b""

    def head(self) -> bytes:
        """The fields in front of the private data, without additional information."""
        return struct.pack(">IIBBH", self.local_comm_id, self.remote_comm_id, self.rejected << 6, 0, self.reason)

    @classmethod
    def read(cls, message: bytes) -> Self:
        local, remote, rejected, _, reason = struct.unpack_from(">IIBBH", message)
        return cls(local, remote, reason, rejected >> 6, cls.private_of(message))


@dataclass(frozen=True, slots=True)
class Mra(CmMad):
    """Asks for patience."""

    ATTRIBUTE: ClassVar[int] = 0x0011
    PRIVATE_OFFSET: ClassVar[int] = 10
    PRIVATE_LEN: ClassVar[int] = 222

    local_comm_id: int
    remote_comm_id: int
    received: int = 0  # 0 a REQ, 1 a REP, 2 something else
    service_timeout: int = 0
    private_data: bytes = b""

    def head(self) -> bytes:
        return struct.pack(
            ">IIBB", self.local_comm_id, self.remote_comm_id, self.received << 6, self.service_timeout << 3
        )

    @classmethod
    def read(cls, message: bytes) -> Self:
        local, remote, received, timeout = struct.unpack_from(">IIBB", message)
        return cls(local, remote, received >> 6, timeout >> 3, cls.private_of(message))


MESSAGES: Final[dict[int, type[CmMad]]] = {record.ATTRIBUTE: record for record in (Req, Mra, Rej, Rep, Rtu, Dreq, Drep)}


@dataclass(frozen=True, slots=True)
class Mad:
    """A datagram: the message, and the transaction that it belongs to."""

    transaction_id: int
    message: CmMad

    def encode(self) -> bytes:
        header = _HEADER.pack(
            1, _CLASS_CM, 2, _METHOD_SEND, 0, 0, self.transaction_id, self.message.ATTRIBUTE, 0, 0
        )  # fmt: skip
        return header + self.message.encode()

    @classmethod
    def decode(cls, datagram: bytes | memoryview) -> Self:
        """Read a datagram; `PeerViolation` if it is not one of the connection manager."""
        datagram = bytes(datagram)
        if len(datagram) != MAD_LEN:
            raise RULES.broken("mad_length", f"{len(datagram)} bytes")
        _, management, version, method, _, _, transaction_id, attribute, _, _ = _HEADER.unpack_from(datagram)
        if (management, version, method) != (_CLASS_CM, 2, _METHOD_SEND):
            raise RULES.broken("mad_class", f"class {management:#04x} version {version}, method {method:#04x}")
        if attribute not in MESSAGES:
            raise RULES.broken("mad_attribute", f"attribute {attribute:#06x}")
        return cls(transaction_id, MESSAGES[attribute].read(datagram[_HEADER.size :]))
