"""What a connection is told when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from ipaddress import IPv4Address, IPv6Address

from sidestep import limits
from sidestep.errors import Misuse
from sidestep.rdma.work import Access
from sidestep.sdp.strategy import Strategy


class Carrier(Enum):
    """Which form Hello and HelloAck have, and where the addresses are."""

    INFINIBAND = "infiniband"  # and RoCE: 92 and 196 bytes, private data of the connection manager
    IWARP = "iwarp"  # 32 and 28 bytes; addresses are those of the TCP connection


@dataclass(frozen=True, slots=True)
class SdpSettings:
    """Sizes in bytes, times in seconds."""

    receive_size: int = limits.SDP_BUFFER_SIZE_DEFAULT  # of a private buffer, headers included: LocalRcvSz
    receive_size_max: int = limits.SDP_RESIZE_MAX  # what it may grow to when the other end asks
    receive_count: int = limits.SDP_BUFFERS_DEFAULT  # private buffers posted while nothing is unread
    remote_size: int = limits.SDP_BUFFER_SIZE_DEFAULT  # what the other end's should be: DesRemRcvSz, a wish
    max_adverts: int = 16  # advertisements the other end may have outstanding: MaxAdverts
    send_queue: int = 128  # work requests that the queue pair takes for sending
    reads_max: int = 4  # RDMA Reads under way at a time (IRD, ORD; responder resources, initiator depth)
    carrier: Carrier = Carrier.INFINIBAND
    version: int | None = None  # None: 2.2 (0x22) as RDMA managers ask for, or 1.1 over iWARP; 0x11 for A4 1.1
    strategy: Callable[[], Strategy] = field(default=Strategy)
    advert_answer_s: float = 1.0  # an unanswered SrcAvail is then withdrawn, and its bytes go by Bcopy
    cancel_answer_s: float = 60.0  # an unanswered withdrawal then ends the connection
    close_s: float = 60.0  # for the other end's DisConn after close(), then the connection is reset
    last_ack_s: float = 1.0  # for the first closer's disconnect, after both have sent DisConn
    probe_s: float = 0.05  # between requests for credit while payload waits and a bare message could go
    refresh_s: float = 0.01  # until credit is told of that mere updates have used up
    keepalive_s: float | None = None  # of silence, until a zero-length RDMA Write asks whether the other end lives
    suspend_s: float = 60.0  # for the new connection of a suspended one
    urgent_inline: bool = False  # SO_OOBINLINE: urgent bytes stay in the stream
    message_max: int = limits.SDP_ADVERT_MAX  # bytes of a message that is sent, where the other end takes more
    local_access: Access | None = None  # what a target of RDMA Reads must be registered for; None: for nothing

    @property
    def wire_version(self) -> int:
        """What Hello says: major in the high half."""
        if self.version is not None:
            return self.version
        return 0x11 if self.carrier is Carrier.IWARP else 0x22

    def __post_init__(self) -> None:
        if not limits.SDP_BUFFER_SIZE_MIN <= self.receive_size <= limits.SDP_BUFFER_SIZE_MAX:
            raise Misuse(
                f"a private buffer of {self.receive_size} bytes",
                remedy=f"choose {limits.SDP_BUFFER_SIZE_MIN} to {limits.SDP_BUFFER_SIZE_MAX}",
            )
        if not limits.SDP_BUFFERS_MIN <= self.receive_count <= limits.SDP_BUFFERS_MAX:
            raise Misuse(
                f"{self.receive_count} private buffers",
                remedy=f"choose {limits.SDP_BUFFERS_MIN} to {limits.SDP_BUFFERS_MAX}",
            )
        if not 1 <= self.max_adverts <= 255:
            raise Misuse(f"MaxAdverts {self.max_adverts}", remedy="choose 1 to 255: it is one byte of the Hello")
        if self.send_queue < limits.SDP_SEND_QUEUE_MIN:
            raise Misuse(
                f"a send queue of {self.send_queue}", remedy=f"choose at least {limits.SDP_SEND_QUEUE_MIN} requests"
            )
        if self.reads_max < 1:
            raise Misuse(f"{self.reads_max} RDMA Reads at a time", remedy="choose at least 1")


@dataclass(frozen=True, slots=True)
class Addresses:
    """The four-tuple of a connection."""

    local: IPv4Address | IPv6Address
    local_port: int
    remote: IPv4Address | IPv6Address
    remote_port: int
