"""What the provider knows of those who are connected to it, and the arenas they share."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b

from sidestep.provider import rpc
from sidestep.switch.offers import ClientId


class Kind(Enum):
    """What a connection is; its first message decides."""

    NEW = "new"
    SHIM = "shim"
    CONTROL = "control"


@dataclass(slots=True)
class Arena:
    """The connection slots of one process family, kept while a process of it is connected."""

    arena_id: bytes
    sequence: int  # order of arrival; pages of the list of arenas are cut by it
    fd: int  # read-only
    clients: set[ClientId] = field(default_factory=set)

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.fd)


@dataclass(slots=True, eq=False)
class Client:
    """One connection."""

    client_id: ClientId
    sock: socket.socket
    pid: int  # from the kernel, as of its connect()
    uid: int
    accepted_at: float  # monotonic seconds
    kind: Kind = Kind.NEW
    arena: Arena | None = None
    open: bool = True
    secret: bytes = field(default_factory=lambda: os.urandom(16))

    def bell_name(self, bell_page_id: bytes) -> bytes:
        """What others know a bell of this client by, 16 bytes: the same for the same bell, and no other client's.

        A shim keeps one descriptor for each name. By the id as the client chose it, one that has seen another's could
        put its own bell in that place.
        """
        return blake2b(bell_page_id, digest_size=16, key=self.secret).digest()


@dataclass(frozen=True, slots=True)
class Brought:
    """What came with an offer and must be given back or passed on."""

    descriptors: rpc.Descriptors  # segment, bell eventfd, bell page
    bucket: int  # of the registry

    def close(self) -> None:
        """Closes the descriptors."""
        self.descriptors.close()
