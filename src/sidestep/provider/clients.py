"""The provider's records of its clients, and the arenas they share."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Final

from sidestep.native.layout import LAYOUT_VERSION
from sidestep.policy import Subject
from sidestep.provider import rpc
from sidestep.provider.proof.evidence import Evidence
from sidestep.switch.offers import ClientId
from sidestep.switch.protocol import Request

NOBODY: Final = Subject((), -1, frozenset())


class Kind(Enum):
    """Kind of a connection; its first message decides."""

    NEW = "new"
    SHIM = "shim"
    CONTROL = "control"


@dataclass(slots=True)
class Arena:
    """The connection slots of one process family, kept while a process of it is connected."""

    arena_id: bytes
    sequence: int  # order of arrival; pages of the list of arenas are cut by it
    fd: int  # read-only
    uid: int  # user of the first client; a process that drops privileges afterwards stays in the family
    pid: int  # group of the first client
    from_root: bool = False  # the first client was root's, or a process that root's family became
    clients: set[ClientId] = field(default_factory=set)
    family_id: bytes = bytes(16)  # name for its peers; zero: they use none

    def is_of(self, fd: int) -> bool:
        """True if `fd` is this very arena. Its id is no secret: every process of the family knows it."""
        given, known = os.fstat(fd), os.fstat(self.fd)
        return (given.st_dev, given.st_ino) == (known.st_dev, known.st_ino)

    def close(self) -> None:
        os.close(self.fd)


@dataclass(slots=True, eq=False)
class Client:
    """One connection."""

    client_id: ClientId
    sock: socket.socket
    pid: int  # credentials from the kernel, as of its connect()
    uid: int
    accepted_at: float  # monotonic seconds
    at_home: bool = (
        False  # the client is in no container: a socket of our network namespace, and its number, have shown it
    )
    subject: Subject = NOBODY  # program as policies see it; known from its HELLO on
    kind: Kind = Kind.NEW
    version: int = LAYOUT_VERSION  # version of its layout
    arena: Arena | None = None
    guests: dict[bytes, Arena] = field(default_factory=dict)  # arenas of other families, whose connections it was given
    open: bool = True
    secret: bytes = field(default_factory=lambda: os.urandom(16))

    def worded(self, message: rpc.Message) -> rpc.Message:
        """A message as this client reads it."""
        return message if self.version == message.version else message._replace(version=self.version)

    def doorbell_name(self, doorbell_page_id: bytes) -> bytes:
        """The name, 16 bytes, that others know a doorbell of this client by: no other client's has it.

        A shim keeps one descriptor for each name. By the id as the client chose it, one that has seen another's could
        put its own doorbell in that place.
        """
        return blake2b(doorbell_page_id, digest_size=16, key=self.secret).digest()


@dataclass(frozen=True, slots=True)
class Brought:
    """Content of an offer, which must be closed or passed on."""

    descriptors: rpc.Descriptors  # segment, doorbell eventfd, doorbell page
    bucket: int  # bucket of the registry
    evidence: Evidence
    request: Request  # request as its protocol has been asked

    def close(self) -> None:
        self.descriptors.close()
        self.evidence.close()
