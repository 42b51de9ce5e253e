"""Management datagrams of the connection manager (IBTA volume 1, chapter 12; annex A17 for RoCEv2).

A datagram is 256 bytes: 24 of a common header, then 232 of one message. Every message ends in private data, which has
no length field: who receives it sees all of it, zeros behind. Fields that matter to reliable connections over RoCE are
kept; the others are sent as 0 and not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from struct import Struct
from typing import Any, ClassVar, Final, Self

from sidestep.errors import Misuse, Rules

MAD_LEN: Final = 256
_MESSAGE_LEN: Final = 232
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
    """Base of the messages.

    Args:
        attribute: Which message it is.
        private_offset: Bytes in front of the private data.
        fields: What is there, the highest bit first, as `name:bits`; what is not kept has no name.
    """

    __slots__ = ()
    ATTRIBUTE: ClassVar[int]
    PRIVATE_OFFSET: ClassVar[int]
    PRIVATE_LEN: ClassVar[int]
    FIELDS: ClassVar[tuple[tuple[str, int], ...]]

    local_comm_id: int  # the sender's
    private_data: bytes

    def __init_subclass__(cls, *, attribute: int = 0, private_offset: int = 0, fields: str = "") -> None:
        if attribute:
            cls.ATTRIBUTE = attribute
        if fields:  # not of the copy that a dataclass with slots makes of its class
            cls.PRIVATE_OFFSET, cls.PRIVATE_LEN = private_offset, _MESSAGE_LEN - private_offset
            cls.FIELDS = tuple((name, int(bits)) for name, _, bits in (one.partition(":") for one in fields.split()))

    def encode(self) -> bytes:
        """The 232 bytes; `Misuse` if something does not fit."""
        if len(self.private_data) > self.PRIVATE_LEN:
            raise Misuse(f"{type(self).__name__} with {len(self.private_data)} bytes of private data")
        word = count = 0
        for name, bits in self.FIELDS:
            value = getattr(self, name) if name else 0
            value = int.from_bytes(value) if isinstance(value, bytes) else value
            if value >> bits:
                raise Misuse(f"{self} does not fit its fields: {name} has {bits} bits")
            word, count = word << bits | value, count + bits
        head = word.to_bytes(count // 8).ljust(self.PRIVATE_OFFSET, b"\0")
        return (head + self.private_data).ljust(_MESSAGE_LEN, b"\0")

    @classmethod
    def read(cls, message: bytes) -> Self:
        """What the 232 bytes say: numbers, flags of a bit, and bytes where there are 128."""
        found: dict[str, Any] = {"private_data": message[cls.PRIVATE_OFFSET :]}
        word = int.from_bytes(message[: sum(bits for _, bits in cls.FIELDS) // 8])
        for name, bits in reversed(cls.FIELDS):
            value = word & (1 << bits) - 1
            word >>= bits
            if name:
                found[name] = value == 1 if bits == 1 else value.to_bytes(16) if bits == 128 else value
        return cls(**found)


@dataclass(frozen=True, slots=True)
class Req(
    CmMad, attribute=0x0010, private_offset=140, fields=
        "local_comm_id:32 :32 service_id:64 ca_guid:64 :64 qpn:24 responder_resources:8 :24 initiator_depth:8 :24 "
        "remote_timeout:5 transport:2 flow_control:1 starting_psn:24 local_timeout:5 retry_count:3 pkey:16 mtu_code:4 "
        ":1 rnr_retry:3 cm_retries:4 srq:1 extended_transport:3 local_lid:16 remote_lid:16 local_gid:128 "
        "remote_gid:128 flow_label:20 :12 traffic_class:8 hop_limit:8 :8 ack_timeout:5 :3"
):  # fmt: skip
    """Asks for a connection."""

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
    transport: int = 0  # 0 a reliable connection
    flow_control: bool = True
    retry_count: int = 7
    rnr_retry: int = 7
    cm_retries: int = 15
    mtu_code: int = 3
    srq: bool = False
    extended_transport: int = 0
    pkey: int = 0xFFFF
    local_lid: int = 0xFFFF  # means nothing over RoCE
    remote_lid: int = 0xFFFF
    flow_label: int = 0
    traffic_class: int = 0
    hop_limit: int = 64
    ack_timeout: int = 14


@dataclass(frozen=True, slots=True)
class Rep(
    CmMad, attribute=0x0013, private_offset=36, fields=
        "local_comm_id:32 remote_comm_id:32 :32 qpn:24 :40 starting_psn:24 :8 responder_resources:8 "
        "initiator_depth:8 ack_delay:5 :2 flow_control:1 rnr_retry:3 srq:1 :4 ca_guid:64"
):  # fmt: skip
    """Accepts."""

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


@dataclass(frozen=True, slots=True)
class _OfConnection(CmMad, private_offset=8, fields="local_comm_id:32 remote_comm_id:32"):
    """A message that names its connection and says no more."""

    local_comm_id: int
    remote_comm_id: int
    private_data: bytes = b""


class Rtu(_OfConnection, attribute=0x0014):
    """The asking side is ready."""

    __slots__ = ()


class Drep(_OfConnection, attribute=0x0016):
    """Agrees to the end."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Dreq(CmMad, attribute=0x0015, private_offset=12, fields="local_comm_id:32 remote_comm_id:32 remote_qpn:24 :8"):
    """Ends a connection."""

    local_comm_id: int
    remote_comm_id: int
    remote_qpn: int  # the receiver's own
    private_data: bytes = b""


@dataclass(frozen=True, slots=True)
class Rej(
    CmMad, attribute=0x0012, private_offset=84, fields=
        "local_comm_id:32 remote_comm_id:32 rejected:2 :6 ari_len:7 :1 reason:16 ari_guid:64"
):  # fmt: skip
    """Refuses."""

    local_comm_id: int
    remote_comm_id: int
    reason: int
    rejected: int = 0  # 0 a REQ, 1 a REP, 2 something else
    private_data: bytes = b""
    ari_len: int = 0  # bytes of what else is told of the reason
    ari_guid: int = 0  # the first 8 of them: of reason 4, the GUID of who refuses


@dataclass(frozen=True, slots=True)
class Mra(
    CmMad,
    attribute=0x0011,
    private_offset=10,
    fields="local_comm_id:32 remote_comm_id:32 received:2 :6 service_timeout:5 :3",
):
    """Asks for patience."""

    local_comm_id: int
    remote_comm_id: int
    received: int = 0  # 0 a REQ, 1 a REP, 2 something else
    service_timeout: int = 0
    private_data: bytes = b""


@dataclass(frozen=True, slots=True)
class Lap(CmMad, attribute=0x0019, private_offset=64, fields="local_comm_id:32 remote_comm_id:32 :32 remote_qpn:24 :8"):
    """Offers an alternate path."""

    local_comm_id: int
    remote_comm_id: int
    remote_qpn: int = 0
    private_data: bytes = b""


@dataclass(frozen=True, slots=True)
class Apr(CmMad, attribute=0x001A, private_offset=84, fields="local_comm_id:32 remote_comm_id:32 :8 status:8"):
    """Answers that."""

    local_comm_id: int
    remote_comm_id: int
    status: int = 0  # 0 taken, 1 no such connection, 2 alternate paths are not supported
    private_data: bytes = b""


MESSAGES: Final[dict[int, type[CmMad]]] = {
    record.ATTRIBUTE: record for record in (Req, Mra, Rej, Rep, Rtu, Dreq, Drep, Lap, Apr)
}


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
