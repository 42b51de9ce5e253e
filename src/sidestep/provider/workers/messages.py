"""What a provider and its workers say to each other: one record a packet, descriptors beside some of them.

The two are of one version, one being started by the other, so nothing is negotiated. A worker talks with strangers on
other hosts and may have been talked into anything: its records are checked like a client's, and the provider checks
what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from struct import Struct
from typing import ClassVar, Final

from sidestep import limits
from sidestep.errors import PeerViolation

FDS_MAX: Final = 3
PACKET_MAX: Final = limits.WORKER_TEXT_MAX + 256


@dataclass(frozen=True, slots=True)
class Record:
    """One message; its fields are packed in order, and a text, if it has one, follows the others."""

    LAYOUT: ClassVar[Struct] = Struct("")
    FDS: ClassVar[int] = 0  # descriptors beside it
    TEXT: ClassVar[bool] = False  # whether its last field is a text of any length

    def encode(self) -> bytes:
        values = [getattr(self, field.name) for field in fields(self)]
        text = values[-1] if self.TEXT else b""
        if len(text) > limits.WORKER_TEXT_MAX:
            raise AssertionError(f"a text of {len(text)} bytes")
        return bytes([_CODES[type(self)]]) + self.LAYOUT.pack(*(values[:-1] if self.TEXT else values)) + text


def decode(packet: bytes, fds_count: int) -> Record:
    """What `Record.encode` made; raises PeerViolation."""
    kind = KINDS.get(packet[0]) if packet else None
    if kind is None:
        raise PeerViolation(f"a message that is none: {packet[:1].hex()}", rule="malformed")
    length = len(packet) - 1 - kind.LAYOUT.size
    if length < 0 or (length and not kind.TEXT):
        raise PeerViolation(f"{kind.__name__} of {len(packet)} bytes", rule="malformed")
    if fds_count != kind.FDS:
        raise PeerViolation(f"{kind.__name__} came with {fds_count} descriptors, not {kind.FDS}", rule="malformed")
    make: Callable[..., Record] = kind
    values = kind.LAYOUT.unpack_from(packet, 1)
    return make(*values, packet[1 + kind.LAYOUT.size :]) if kind.TEXT else make(*values)


@dataclass(frozen=True, slots=True)
class Ways(Record):
    """What names a connection: its two ends as this host sees them. Addresses as in `proof.mapped_address`."""

    LAYOUT: ClassVar[Struct] = Struct("=Q16sH16sH")

    number: int  # of this question, chosen by who asks
    local_addr: bytes
    local_port: int
    remote_addr: bytes
    remote_port: int


# ---- the provider's ----


@dataclass(frozen=True, slots=True)
class Delegate(Record):
    """An application's end of a channel, for the worker to make the other end; segment, doorbell, its page."""

    LAYOUT: ClassVar[Struct] = Struct("=QQQI16sH16sHQQB16s16sI")
    FDS: ClassVar[int] = 3

    number: int  # of this end
    search: int  # the number of the worker's `Await`; 0: the end that opened the connection: reach out
    client: int  # who attached it
    uid: int
    local_addr: bytes
    local_port: int
    remote_addr: bytes
    remote_port: int
    netns_cookie: int
    cookie: int
    side: int  # of the segment, ours
    segment_id: bytes
    doorbell_name: bytes
    doorbell_index: int


@dataclass(frozen=True, slots=True)
class Missing(Record):
    """The end that the worker looks for is not here, or must not be carried."""

    LAYOUT: ClassVar[Struct] = Struct("=Q")

    search: int


@dataclass(frozen=True, slots=True)
class Drop(Record):
    """An end that was lent is not to be carried: its application has not been told."""

    LAYOUT: ClassVar[Struct] = Struct("=Q")

    number: int


@dataclass(frozen=True, slots=True)
class Gone(Record):
    """A client is not connected any more."""

    LAYOUT: ClassVar[Struct] = Struct("=Q")

    client: int


@dataclass(frozen=True, slots=True)
class Listen(Record):
    """Where other hosts reach the worker at that address is wanted."""

    LAYOUT: ClassVar[Struct] = Struct("=16s")

    local_addr: bytes


@dataclass(frozen=True, slots=True)
class Port(Record):
    """The answer to `Ask`."""

    LAYOUT: ClassVar[Struct] = Struct("=QH")

    number: int
    port: int  # 0: there is none


@dataclass(frozen=True, slots=True)
class Show(Record):
    """What it carries is wanted, from so many on."""

    LAYOUT: ClassVar[Struct] = Struct("=QI")

    number: int
    after: int


@dataclass(frozen=True, slots=True)
class Leave(Record):
    """Everything goes back to TCP; then the worker ends."""


# ---- the worker's ----


@dataclass(frozen=True, slots=True)
class Ready(Record):
    """It works; what applications need to ring it and to hear it die: doorbell, its page, a pipe's reading end."""

    LAYOUT: ClassVar[Struct] = Struct("=16s")
    FDS: ClassVar[int] = 3

    doorbell_id: bytes


@dataclass(frozen=True, slots=True)
class Carried(Record):
    """An end that was lent has its link: its application is to be told."""

    LAYOUT: ClassVar[Struct] = Struct("=Q")

    number: int


@dataclass(frozen=True, slots=True)
class Refused(Record):
    """An end that was lent gets no link."""

    LAYOUT: ClassVar[Struct] = Struct("=Q")

    number: int


@dataclass(frozen=True, slots=True)
class Over(Record):
    """An end that was carried is not any more."""

    LAYOUT: ClassVar[Struct] = Struct("=Q")

    number: int


@dataclass(frozen=True, slots=True)
class Await(Ways):
    """Looks for the end that accepted a connection of another host; `Delegate` or `Missing` answers."""


@dataclass(frozen=True, slots=True)
class Forget(Record):
    """Nobody looks any more."""

    LAYOUT: ClassVar[Struct] = Struct("=Q")

    search: int


@dataclass(frozen=True, slots=True)
class Ask(Ways):
    """Asks the port mapper for the service at the remote end; `Port` answers."""


@dataclass(frozen=True, slots=True)
class Doubt(Record):
    """Nobody answers at that port of that service."""

    LAYOUT: ClassVar[Struct] = Struct("=16sHH")

    remote_addr: bytes
    remote_port: int
    port: int


@dataclass(frozen=True, slots=True)
class Listens(Record):
    """Where other hosts reach it at that address."""

    LAYOUT: ClassVar[Struct] = Struct("=16sH")

    local_addr: bytes
    port: int  # 0: nowhere


@dataclass(frozen=True, slots=True)
class Counted(Record):
    """A counter has grown by one."""

    LAYOUT: ClassVar[Struct] = Struct("=B")
    TEXT: ClassVar[bool] = True

    name_len: int
    text: bytes  # its name, and behind it the reason


@dataclass(frozen=True, slots=True)
class Tell(Record):
    """Lines for the provider's log."""

    TEXT: ClassVar[bool] = True

    text: bytes


@dataclass(frozen=True, slots=True)
class Shown(Record):
    """The answer to `Show`: JSON, a list of pairs, each the user of a connection and how it is."""

    LAYOUT: ClassVar[Struct] = Struct("=Q?")
    TEXT: ClassVar[bool] = True

    number: int
    more: bool  # behind these
    text: bytes


TO_WORKER: Final = (Delegate, Missing, Drop, Gone, Listen, Port, Show, Leave)
TO_PROVIDER: Final = (Ready, Carried, Refused, Over, Await, Forget, Ask, Doubt, Listens, Counted, Tell, Shown)
KINDS: Final[Mapping[int, type[Record]]] = dict(enumerate((*TO_WORKER, *TO_PROVIDER), start=1))
_CODES: Final[Mapping[type[Record], int]] = {kind: code for code, kind in KINDS.items()}
