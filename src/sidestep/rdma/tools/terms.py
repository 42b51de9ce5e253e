"""What the two ends of a tool tell each other: the terms of a conversation as private data, and short messages.

    client                                    server
    Request with Terms          -->
                                <--           Reply with Terms: the same, but for the server's own region
    Sends, Writes or Reads      -->
    Note STOP                   -->           in order behind them
                                <--           Note DONE: what was seen here

Notes are Sends with solicited event, payload is without, so that a Send of any length is told from a Note.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from random import Random
from struct import Struct
from typing import ClassVar, Final, Self

from sidestep import limits
from sidestep.errors import PeerViolation

DEFAULT_PORT: Final = 7174  # rping's
_MAGIC: Final = b"SSRT"
_VERSION: Final = 1


class Op(IntEnum):
    """What the client does."""

    PING = 1  # Sends that come back
    SEND = 2
    WRITE = 3
    READ = 4


@dataclass(frozen=True, slots=True)
class Terms:
    """What a client asks for, and the server agrees to by saying the same."""

    op: Op
    size: int  # bytes of a message
    depth: int = 1  # messages under way
    both: bool = False  # the server does the same
    verify: bool = True  # contents are compared
    rkey: int = 0  # of the region of who says it, which the other end writes or reads
    va: int = 0

    _LAYOUT: ClassVar[Struct] = Struct("!4sBBBBIIIQ")

    def encode(self) -> bytes:
        flags = self.both | self.verify << 1
        return self._LAYOUT.pack(_MAGIC, _VERSION, self.op, flags, 0, self.size, self.depth, self.rkey, self.va)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """What private data says; raises PeerViolation also for more than a conversation may ask for."""
        if not speaks(data) or len(data) < cls._LAYOUT.size:
            raise PeerViolation("the private data is not of these tools", rule="malformed")
        _, version, op, flags, _, size, depth, rkey, va = cls._LAYOUT.unpack_from(data)
        if version != _VERSION:
            raise PeerViolation(f"version {version} of these tools, not {_VERSION}", rule="version")
        if op not in set(Op):
            raise PeerViolation(f"operation {op} is unknown", rule="malformed")
        terms = cls(Op(op), size, depth, bool(flags & 1), bool(flags & 2), rkey, va)
        if problem := terms.problem:
            raise PeerViolation(problem, rule="limits")
        return terms

    @property
    def problem(self) -> str:
        """What is too much; empty if nothing is."""
        if self.size > limits.RDMA_TOOL_MESSAGE_MAX or (not self.size and self.op is not Op.PING):
            return f"messages of {self.size} bytes; 1 to {limits.RDMA_TOOL_MESSAGE_MAX} are possible"
        if not 1 <= self.depth <= limits.RDMA_TOOL_DEPTH_MAX:
            return f"a depth of {self.depth}; 1 to {limits.RDMA_TOOL_DEPTH_MAX} are possible"
        if self.memory_len > limits.RDMA_TOOL_MEMORY_MAX:
            most = limits.RDMA_TOOL_MEMORY_MAX >> 20
            return f"{self.depth} messages of {self.size} bytes at a time need more memory than {most} MiB"
        return ""

    @property
    def memory_len(self) -> int:
        """Bytes that an end needs, about."""
        slots = 2 * self.depth + 2 if self.op in (Op.SEND, Op.PING) else self.depth + 2
        return slots * self.size


def speaks(private_data: bytes) -> bool:
    return private_data[: len(_MAGIC)] == _MAGIC


class NoteKind(IntEnum):
    """What a note says."""

    CREDIT = 1  # so many receives are posted again
    STOP = 2  # that was all; what it took at the client
    DONE = 3  # likewise; what was seen at the server


@dataclass(frozen=True, slots=True)
class Note:
    """A short message beside the payload."""

    kind: NoteKind
    count: int = 0  # credits; messages sent by who says it
    wrong: int = 0  # messages with other contents than they should have
    cpu_us: int = 0  # microseconds of processor time

    _LAYOUT: ClassVar[Struct] = Struct("!4sB3xQQQ")
    LENGTH: ClassVar[int] = _LAYOUT.size

    def encode(self) -> bytes:
        return self._LAYOUT.pack(_MAGIC, self.kind, self.count, self.wrong, self.cpu_us)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises PeerViolation."""
        if len(data) != cls.LENGTH or not speaks(data):
            raise PeerViolation(f"{len(data)} bytes are no note", rule="malformed")
        _, kind, count, wrong, cpu_us = cls._LAYOUT.unpack(data)
        if kind not in set(NoteKind):
            raise PeerViolation(f"a note of kind {kind}", rule="malformed")
        return cls(NoteKind(kind), count, wrong, cpu_us)


@lru_cache(maxsize=2)
def pattern(size: int) -> bytes:
    """The contents of messages: both ends can make them, and no part is like another."""
    return Random(size).randbytes(size)  # noqa: S311 - to be known, not to be secret
