"""What the owner of a software RNIC may choose."""

from __future__ import annotations

from dataclasses import dataclass, field

from sidestep import limits
from sidestep.rdma.iwarp.start_terms import Settings as StartupSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Times are in seconds.

    Between two of these devices a start-up is peer-to-peer: a message of no length tells the end that accepted that it
    may send. `startup` has what else is said there; read depths come from the queue pair.
    """

    startup: StartupSettings = field(default_factory=lambda: StartupSettings(peer_to_peer=True))
    connect_s: float = 20.0  # for TCP's handshake
    close_s: float = limits.IWARP_CLOSE_S  # for the other end's FIN, once ours is out; then RST
    silence_s: float = limits.IWARP_SILENCE_S  # what is not acknowledged so long breaks the connection
    nudges_s: tuple[float, ...] = limits.IWARP_NUDGES_S  # who asked: pauses, as long as the other end says nothing
    half_open_max: int = limits.IWARP_HALF_OPEN_MAX  # connections whose Request is not here; the oldest gives way
