"""Messages between a provider and its workers: one record a packet, descriptors beside some of them.

The two are of one version, one being started by the other, so nothing is negotiated. A worker talks with strangers on
other hosts, which may have taken it over. So its records are checked like a client's, and the provider checks their
meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from struct import Struct
from typing import ClassVar, Final, TypeAlias, dataclass_transform

from sidestep import limits
from sidestep.errors import PeerViolation

FDS_MAX: Final = 3
PACKET_MAX: Final = limits.WORKER_TEXT_MAX + 256

U8: TypeAlias = int
U16: TypeAlias = int
U32: TypeAlias = int
U64: TypeAlias = int
Flag: TypeAlias = bool
Id: TypeAlias = bytes  # 16 of them
Text: TypeAlias = bytes  # any number
_FORMATS: Final = {"U8": "B", "U16": "H", "U32": "I", "U64": "Q", "Flag": "?", "Id": "16s", "Text": ""}


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Record:
    """One message, a dataclass; its fields are packed in order. A `Text` can only be the last."""

    LAYOUT: ClassVar[Struct]
    FDS: ClassVar[int] = 0  # descriptors beside it
    TEXT: ClassVar[bool]  # the last field is one

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
        kinds = [str(field.type) for field in fields(cls)]
        cls.LAYOUT = Struct("=" + "".join(_FORMATS[kind] for kind in kinds))
        cls.TEXT = "Text" in kinds

    def encode(self) -> bytes:
        values = list(vars(self).values())
        text = values.pop() if self.TEXT else b""
        if len(text) > limits.WORKER_TEXT_MAX:
            raise AssertionError(f"a text of {len(text)} bytes")
        return bytes([_CODES[type(self)]]) + self.LAYOUT.pack(*values) + text


def decode(packet: bytes, fds_count: int) -> Record:
    """Record in a packet of `Record.encode`; raises PeerViolation."""
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


class Ways(Record):
    """Name of a connection: its two ends as this host sees them. Addresses as in `proof.mapped_address`."""

    number: U64  # number of this question, chosen by the worker
    local_addr: Id
    local_port: U16
    remote_addr: Id
    remote_port: U16


# ---- the provider's ----


class Delegate(Record):
    """An application's end of a channel, for the worker to make the other end; segment, doorbell, its page."""

    FDS: ClassVar[int] = 3

    number: U64  # number of this end
    search: U64  # the number of the worker's `Await`; 0: the end that opened the connection: reach out
    client: U64  # the client that attached it
    uid: U32
    local_addr: Id
    local_port: U16
    remote_addr: Id
    remote_port: U16
    netns_cookie: U64
    cookie: U64
    side: U8  # our side of the segment
    segment_id: Id
    doorbell_name: Id
    doorbell_index: U32


class Announce(Record):
    """Another doorbell of an end that was lent, as in `hub.NewDoorbell`; the doorbell, its page."""

    FDS: ClassVar[int] = 2

    side: U32
    word: U64
    alone: Flag
    doorbell_name: Id
    doorbell_index: U32


class Missing(Record):
    """The end that the worker looks for is not here, or must not be carried."""

    search: U64


class Drop(Record):
    """Order not to carry an end that was lent: its application has had no answer."""

    number: U64


class Gone(Record):
    """A client is not connected any more."""

    client: U64


class Listen(Record):
    """Question for the port at which other hosts reach the worker at that address."""

    local_addr: Id


class Port(Record):
    """The answer to `Ask`."""

    number: U64
    port: U16  # 0: there is none


class Show(Record):
    """Question for the connections that the worker carries, from number `after` on."""

    number: U64
    after: U32


class Leave(Record):
    """Order to take everything back to TCP, and then to end."""


# ---- the worker's ----


class Ready(Record):
    """The worker works; applications ring it and see its end by these: doorbell, its page, a pipe's reading end."""

    FDS: ClassVar[int] = 3

    doorbell_id: Id


class Carried(Record):
    """An end that was lent has its link: its application is to get the answer."""

    number: U64


class Refused(Record):
    """An end that was lent gets no link."""

    number: U64


class Over(Record):
    """An end that was carried is not any more."""

    number: U64


class Await(Ways):
    """Looks for the end that accepted a connection of another host; `Delegate` or `Missing` answers."""

    transport: Text  # transport that it comes over


class Forget(Record):
    """End of a search, which the worker does not need any more."""

    search: U64


class Ask(Ways):
    """Asks the port mapper for the service at the remote end; `Port` answers."""


class Doubt(Record):
    """No host answers at that port of that service."""

    remote_addr: Id
    remote_port: U16
    port: U16


class Listens(Record):
    """Port at which other hosts reach the worker at that address."""

    local_addr: Id
    port: U16  # 0: nowhere


class Counted(Record):
    """A counter has grown by one."""

    name_len: U8
    text: Text  # a counter's name, and behind it the reason


class Tell(Record):
    """Lines for the provider's log."""

    text: Text


class Shown(Record):
    """The answer to `Show`: JSON, a list of pairs, each the user of a connection and how it is."""

    number: U64
    more: Flag  # true if more follow behind these
    text: Text


TO_WORKER: Final = (Delegate, Announce, Missing, Drop, Gone, Listen, Port, Show, Leave)
TO_PROVIDER: Final = (Ready, Carried, Refused, Over, Await, Forget, Ask, Doubt, Listens, Counted, Tell, Shown)
KINDS: Final[Mapping[int, type[Record]]] = dict(enumerate((*TO_WORKER, *TO_PROVIDER), start=1))
_CODES: Final[Mapping[type[Record], int]] = {kind: code for code, kind in KINDS.items()}
