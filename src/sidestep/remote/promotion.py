"""What one provider tells another beside SDP's Hello: which TCP connection is meant, and why it is to be believed.

The Hello (docs/wire/sdp.md §5.1) carries the client's addresses and port; the server's port is that of the service.
Where many services share one RDMA port, as behind the port mapper, it is told here. 72 bytes, big-endian:

| offset | size | field |
|---|---|---|
| 0 | 8 | "sidestep" |
| 8 | 1 | version, 1 |
| 9 | 1 | purpose, see `Purpose` |
| 10 | 2 | the server's port |
| 12 | 4 | bits: 1, "the word ROUNDS of a link is known"; who does not know a bit passes over it |
| 16 | 8 | SETTLE, ARRIVED: bytes that have arrived |
| 24 | 16 | name of the link, random, chosen by the client |
| 40 | 32 | HMAC-SHA256 of the Hello and all above, by the key that both have; zeros without one |

Who refuses to carry a connection says why, for people: "why-not:" and a sentence in UTF-8, as private data of the
refusal. It proves nothing, and nothing is decided by it.
"""

from __future__ import annotations

import hmac
import os
import stat
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from struct import Struct
from typing import Final, Self

from sidestep.errors import Misuse, PeerViolation

_MAGIC: Final = b"sidestep"
_WHY_NOT: Final = b"why-not:"
_WHY_NOT_MAX: Final = 240  # bytes of the sentence
_VERSION: Final = 1
_ROUNDS: Final = 1
_LAYOUT: Final = Struct(">8sBBHIQ16s")
_MAC_LEN: Final = 32
SIZE: Final = _LAYOUT.size + _MAC_LEN
KEY_MIN: Final = 32  # bytes
KEY_MAX: Final = 4096


class Purpose(IntEnum):
    """What it is for. No answer reads as a request: it could be sent back to who made it."""

    CARRY = 1  # a request: carry this connection
    RESYNC = 2  # a request: its link is broken; so many bytes have arrived here
    ARRIVED = 3  # the answer: so many bytes have arrived here, and what you miss comes by TCP
    RESYNCED = 4  # a request: what you miss comes by TCP, too
    FAILED = 5  # a request: it is reset
    HEARD = 6  # the answer to these two
    CONTROL = 8  # a request: a control link; its port is 0
    INBOUND = 7  # a request: an ordinary connection to the service at that port; its client is who the Hello says


@dataclass(frozen=True, slots=True)
class Promotion:
    """What stands beside a Hello."""

    purpose: Purpose
    port: int  # the server's
    name: bytes  # of the link, 16 bytes
    arrived: int = 0
    rounds: bool = True  # whether the word ROUNDS is known there

    def encode(self, hello: bytes, key: bytes | None) -> bytes:
        """Its 72 bytes."""
        told = _LAYOUT.pack(_MAGIC, _VERSION, self.purpose, self.port, self.rounds * _ROUNDS, self.arrived, self.name)
        return told + _mac(hello + told, key)

    @classmethod
    def find(cls, private_data: bytes, key: bytes | None) -> Self | None:
        """What stands at the end of private data; None: nothing of ours.

        Raises:
            PeerViolation: It is of another version, or not by who has the key.
        """
        if len(private_data) < SIZE or private_data[-SIZE:][: len(_MAGIC)] != _MAGIC:
            return None
        told, mac = private_data[-SIZE:-_MAC_LEN], private_data[-_MAC_LEN:]
        _, version, purpose, port, bits, arrived, name = _LAYOUT.unpack(told)
        if version != _VERSION:
            raise PeerViolation(f"version {version} of what sidestep says beside a Hello", rule="promotion_version")
        if not hmac.compare_digest(mac, _mac(private_data[:-_MAC_LEN], key)):
            raise PeerViolation("the other provider has not our key", rule="promotion_key")
        try:
            return cls(Purpose(purpose), port, name, arrived, bool(bits & _ROUNDS))
        except ValueError:
            raise PeerViolation(f"purpose {purpose}", rule="promotion_purpose") from None

    @staticmethod
    def port_in(private_data: bytes) -> int | None:
        """The server's port, for who only looks on and believes anybody; None: nothing that can be read."""
        if len(private_data) < SIZE:
            return None
        magic, version, _, port, *_ = _LAYOUT.unpack_from(private_data, len(private_data) - SIZE)
        return port if (magic, version) == (_MAGIC, _VERSION) else None


def why_not(sentence: str) -> bytes:
    """Private data of a refusal."""
    return _WHY_NOT + sentence.encode()[:_WHY_NOT_MAX]


def why_not_in(private_data: bytes) -> str:
    """The sentence in those of another provider, as it may be printed; empty if there is none."""
    if not private_data.startswith(_WHY_NOT):
        return ""
    text = private_data[len(_WHY_NOT) :][:_WHY_NOT_MAX].rstrip(b"\0").decode(errors="replace")
    return "".join(char if char.isprintable() else "?" for char in text)


def _mac(text: bytes, key: bytes | None) -> bytes:
    return hmac.digest(key, text, sha256) if key else bytes(_MAC_LEN)


def read_key(path: Path) -> bytes:
    """The key in a file that nobody else may read.

    Raises:
        Misuse: It cannot be read, is open to others or another user's, or too short.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            key = file.read(KEY_MAX + 1).strip()
    except OSError as error:
        raise Misuse(f"the key {path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
        raise Misuse(f"the key {path} can be read by others", remedy=f"chmod 600 {path}")
    if found.st_uid not in (0, os.geteuid()):
        raise Misuse(f"the key {path} is uid {found.st_uid}'s", remedy=f"chown {os.geteuid()} {path}")
    if not KEY_MIN <= len(key) <= KEY_MAX:
        raise Misuse(
            f"the key {path} has {len(key)} bytes",
            remedy=f"make one: head -c 32 /dev/urandom | base64 > {path}; chmod 600 {path}",
        )
    return key
