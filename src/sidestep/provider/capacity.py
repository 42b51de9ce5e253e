"""Capacity of a provider, by the limits of its process."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from typing import Final

from sidestep import limits

_FDS_PER_CLIENT: Final = 2  # the connection and the arena
_FDS_PER_OFFER: Final = 4  # segment, doorbell, doorbell page, UDP socket
_FDS_PER_CLAIM: Final = 3  # descriptors while its path is proven: doorbell, doorbell page, UDP socket


@dataclass(frozen=True, slots=True)
class Room:
    """Numbers of each kind that the descriptor limit allows."""

    clients: int
    offers: int
    proofs: int
    lineage: int
    leases: int  # binds of explicit sockets
    relays: int  # connections through the provider


def of_descriptors(*, remote: bool) -> Room:
    """Room of this process; `remote`: connections with other hosts are carried."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = max(0, (1 << 20 if soft == resource.RLIM_INFINITY else soft) - limits.DESCRIPTORS_SPARE)
    leases_max = min(limits.EXPLICIT_BINDS_TOTAL_MAX, free // 16)
    for_relays = free // (2 if remote else 4)  # all connections with other hosts are among them there
    relays_max = min(limits.RELAYS_MAX, for_relays // limits.RELAY_DESCRIPTORS)
    free -= leases_max + relays_max * limits.RELAY_DESCRIPTORS
    clients_max = max(1, min(limits.CLIENTS_MAX, free // 4))
    proofs_max = max(1, min(limits.PATH_PROOFS_MAX, free // 64))
    lineage_max = max(1, min(limits.LINEAGE_MAX, free // 64))
    left = free - _FDS_PER_CLIENT * clients_max - _FDS_PER_CLAIM * proofs_max - lineage_max
    offers_max = max(1, min(limits.OFFERS_TOTAL_MAX, left // _FDS_PER_OFFER))
    return Room(clients_max, offers_max, proofs_max, lineage_max, leases_max, relays_max)


def memory_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
