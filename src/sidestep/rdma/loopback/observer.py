"""What can be seen of a fabric: every message in the order of the wire, and every range of memory that was written."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sidestep.rdma.loopback.settings import CmKind
    from sidestep.rdma.work import Gather, RKey, Status


class Kind(Enum):
    """Messages between queue pairs."""

    SEND = "send"
    WRITE = "write"
    READ_REQUEST = "read request"
    ATOMIC = "atomic"
    READ_RESPONSE = "read response"  # to an atomic operation as well
    ACK = "ack"  # with a status other than SUCCESS: the refusal of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class QpMessage:
    """One message between queue pairs, as it leaves. `payload` is the sender's memory, not a copy of it."""

    at: float  # virtual time
    kind: Kind
    source: str  # device
    target: str
    source_qp: int
    target_qp: int
    payload: Gather = ()
    length: int = 0  # bytes of payload; of a READ_REQUEST: bytes wanted
    remote_va: int = 0  # of a WRITE or READ_REQUEST
    rkey: RKey | None = None
    solicited: bool = False
    invalidate: RKey | None = None
    status: Status | None = None  # of an ACK


@dataclass(frozen=True, slots=True, kw_only=True)
class CmMessage:
    """One message of the connection manager, as it leaves."""

    at: float
    kind: CmKind
    source: str  # device
    target: str
    local_id: int  # communication id of the source
    remote_id: int  # of the target; 0 where the source does not know it
    service_id: int = 0
    qp_number: int = 0
    responder_resources: int = 0
    initiator_depth: int = 0
    reason: int = 0  # of a REJ
    private_data: bytes = b""  # as long as the message carries it


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Contiguous bytes that went from one memory to another with a single copy."""

    at: float
    kind: Kind  # SEND, WRITE or READ_RESPONSE
    target: str  # device whose memory was written
    target_qp: int
    source_address: int  # as `buffer_address` tells it
    target_address: int
    length: int


class Observer(Protocol):
    """Given to a fabric, it sees everything. It must not call back into the fabric."""

    def qp_message(self, message: QpMessage) -> None:
        """A message leaves; whether it arrives is another matter."""

    def cm_message(self, message: CmMessage) -> None:
        """A message of the connection manager leaves."""

    def placed(self, placed: Placed) -> None:
        """Bytes were written."""


@dataclass(slots=True)
class Recorder:
    """An observer that keeps everything. The payload is copied, since its memory is used again."""

    qp_messages: list[QpMessage] = field(default_factory=list)
    cm_messages: list[CmMessage] = field(default_factory=list)
    placements: list[Placed] = field(default_factory=list)

    def qp_message(self, message: QpMessage) -> None:
        copied = (b"".join(message.payload),) if message.payload else ()
        self.qp_messages.append(replace(message, payload=copied))

    def cm_message(self, message: CmMessage) -> None:
        self.cm_messages.append(message)

    def placed(self, placed: Placed) -> None:
        self.placements.append(placed)

    def kinds(self) -> list[Kind]:
        """The kinds of all messages between queue pairs, but for acknowledgements."""
        return [message.kind for message in self.qp_messages if message.kind is not Kind.ACK]
