"""What the owner of a device of the kernel may choose."""

from __future__ import annotations

from dataclasses import dataclass

from sidestep import limits


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbsSettings:
    """Times are in seconds, but for those that InfiniBand encodes."""

    resolve_s: float = limits.VERBS_RESOLVE_S  # for an address or a route to be found
    connect_s: float = limits.VERBS_CONNECT_S  # from `connect` to the answer; then Unreachable
    # What the kernel proposes lasts half a minute on a dead path; a broken connection is to be known in seconds.
    # IBTA 9.7.6.1.3: 4.096 us * 2^16 = 268 ms until a request is sent again; a busy host has answered after 67, too.
    ack_timeout: int = 16
    retries: int = 6  # so often; rxe takes 7 for ever, though that is a number like others here (IBTA 9.7.6.1.3)
    rnr_timer: int = 14  # IBTA 9.7.5.2.8, table 45: 1.28 ms until a sender without a receive tries again
    rnr_retries: int = 6  # so often; 7 would be for ever
