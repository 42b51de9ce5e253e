"""What the owner of a software RNIC may choose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from sidestep import limits
from sidestep.rdma.iwarp.startup.terms import MpaSettings

_NUDGES_S: Final = tuple(limits.IWARP_NUDGE_S * 10**number for number in range(limits.IWARP_NUDGES_MAX))


@dataclass(frozen=True, slots=True, kw_only=True)
class IwarpSettings:
    """Times are in seconds.

    Between two of these devices a start-up is peer-to-peer: a message of no length tells the end that accepted that it
    may send. `startup` has what else is said there; read depths come from the queue pair.
    """

    startup: MpaSettings = field(default_factory=lambda: MpaSettings(peer_to_peer=True))
    connect_s: float = 20.0  # for TCP's handshake
    close_s: float = limits.IWARP_CLOSE_S  # for the other end's FIN, once ours is out; then RST
    silence_s: float = limits.IWARP_SILENCE_S  # what is not acknowledged so long breaks the connection
    nudges_s: tuple[float, ...] = _NUDGES_S  # who asked: pauses, as long as the other end says nothing
    half_open_max: int = limits.IWARP_HALF_OPEN_MAX  # connections whose Request is not here; the oldest gives way
