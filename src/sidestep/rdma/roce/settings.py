"""What the owner of a software HCA may choose."""

from __future__ import annotations

from dataclasses import dataclass

from sidestep import limits


@dataclass(frozen=True, slots=True, kw_only=True)
class RoceSettings:
    """Times are in seconds, but for codes of the wire: 4.096 us, doubled so often as `..._code` says."""

    mtu: int = 4096  # bytes of payload a packet, at most; the path's is a bound as well
    ack_timeout_code: int = 14  # until what is not acknowledged is sent again: 67 ms
    retry_count: int = 7  # times that it is, without any progress
    rnr_retry: int = 6  # times that the other end comes back for a receive; 7: for ever
    rnr_timer_code: int = 24  # how long it waits each time (IBTA table 45): 41 ms
    cm_timeout_code: int = 18  # until a message of the connection manager is sent again: 1.1 s
    cm_retries: int = 7  # times that it is; then Unreachable, or Disconnected unconfirmed
    patience_code: int = 22  # what who asks again is told to wait for the user's answer: 17 s
    timewait_s: float = 0.5  # from Disconnected to TimewaitExit
    window: int = limits.ROCE_WINDOW  # packets of a queue pair that are not acknowledged
    receive_buffer: int = limits.ROCE_RECEIVE_BUFFER  # bytes asked of the kernel
