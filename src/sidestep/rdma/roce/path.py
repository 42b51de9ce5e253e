"""What the two ends of a reliable connection have agreed on, as one of them sees it."""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.rdma.frames import IpAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A connection's other end and the way there."""

    address: str  # of the other end, as sockets take it
    remote: IpAddress  # the same, as it is on the wire
    remote_qp: int
    mtu: int  # bytes of payload a packet
    send_psn: int  # of the first request of this end
    receive_psn: int  # of the first request of the other end
    timeout_s: float  # until what is not acknowledged is sent again
    retry_count: int
    rnr_retry: int
    rnr_timer_code: int  # what this end tells the other one to wait for a receive
    window: int  # packets not acknowledged
