"""SDP messages field by field: where each one lies, what its bytes are and what they mean.

Names are the specification's (docs/wire/sdp.md §3, §5, §6). A message that ends too early is shown as far as it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv6Address
from typing import Final, NamedTuple, TypeAlias

from sidestep.sdp.hello import Version
from sidestep.sdp.wire import (
    BSDH_LEN,
    MESSAGES,
    OOB_PEND,
    OOB_PRES,
    REQ_PIPE,
    Bsdh,
    ChRcvBuf,
    ChRcvBufAck,
    Header,
    Hello,
    HelloAck,
    IwarpHello,
    IwarpHelloAck,
    Mode,
    ModeChange,
    RdmaRdCompl,
    RdmaWrCompl,
    SinkAvail,
    SrcAvail,
    SuspComm,
    port_of,
)

PAYLOAD: Final = "payload"
SURPLUS: Final = "surplus"  # bytes where the message has none

_FLAG_WORDS: Final = {OOB_PRES: "OOB_PRES", OOB_PEND: "OOB_PEND", REQ_PIPE: "REQ_PIPE"}


class Field(NamedTuple):
    """A field of a message as it was found."""

    offset: int
    name: str
    wire: bytes  # fewer than the field has if the message ends in it
    meaning: str


def record_claimed(bsdh: Bsdh) -> type[Header] | None:
    """What a message says that it is; of two forms of a Hello, the one whose length it names."""
    for short in (IwarpHello, IwarpHelloAck):
        if bsdh.mid == short.MID and bsdh.length == BSDH_LEN + short.LENGTH:
            return short
    return MESSAGES.get(bsdh.mid)


def byte_count(count: int) -> str:
    """A number of bytes."""
    return "1 byte" if count == 1 else f"{count} bytes"


def version_text(version: Version) -> str:
    """As people write it."""
    return f"{version.major}.{version.minor}"


def service_text(service: int) -> str:
    """A service ID, and its port."""
    port = port_of(service)
    return f"service ID {service:#018x}" + (f", port {port}" if port is not None else ", not one of SDP's")


def flag_words(flags: int) -> list[str]:
    """The names of the flags that are set; reserved ones as one number."""
    words = [word for bit, word in _FLAG_WORDS.items() if flags & bit]
    reserved = flags & ~sum(_FLAG_WORDS)
    return [*words, f"reserved {reserved:#04x}"] if reserved else words


_Meaning: TypeAlias = Callable[[bytes], str]
_Layout: TypeAlias = tuple[tuple[str, int, _Meaning], ...]


def _number(wire: bytes) -> str:
    return str(int.from_bytes(wire))


def _size(wire: bytes) -> str:
    return byte_count(int.from_bytes(wire))


def _silent(wire: bytes) -> str:
    return "" if not any(wire) else "reserved, not looked at"


def _flags(wire: bytes) -> str:
    return ", ".join(flag_words(wire[0])) or "none"


def _mid(wire: bytes) -> str:
    if record := MESSAGES.get(wire[0]):
        return record.__name__
    return "experimental" if 0x40 <= wire[0] <= 0x7F else "reserved"


def _version_byte(wire: bytes) -> str:
    return f"version {version_text(Version.of_byte(wire[0]))}"


def _family(wire: bytes) -> str:
    return f"IP version {wire[0] >> 4}, Cap {wire[0] & 0xF}"


def _ipv4(wire: bytes) -> str:
    return str(IPv4Address(wire[12:]))


def _ipv6(wire: bytes) -> str:
    return str(IPv6Address(wire))


def _mode(wire: bytes) -> str:
    code = wire[0] >> 4 & 7
    word = Mode(code).name.capitalize() if code <= Mode.PIPELINED else f"code {code}, reserved"
    return f"S={wire[0] >> 7}, {word}"


def _nothing(_wire: bytes) -> str:
    return ""


_BASE: Final[_Layout] = (
    ("MID", 1, _mid),
    ("Flags", 1, _flags),
    ("Bufs", 2, _number),
    ("Len", 4, _size),
    ("MSeq", 4, _number),
    ("MSeqAck", 4, _number),
)
_ADVERT: Final[_Layout] = (("Len", 4, _size), ("RKey", 4, _nothing), ("VA", 8, _nothing))
_FIELDS: Final[dict[type[Header], _Layout]] = {
    Hello: (
        ("MajV/MinV", 1, _version_byte),
        ("IPV/Cap", 1, _family),
        ("reserved", 1, _silent),
        ("MaxAdverts", 1, _number),
        ("DesRemRcvSz", 4, _size),
        ("LocalRcvSz", 4, _size),
        ("LocalPort", 2, _number),
        ("reserved", 2, _silent),
        ("SrcIP", 16, _ipv4),
        ("DstIP", 16, _ipv4),
        ("reserved", 2, _silent),
        ("ExtMaxAdverts", 2, _number),
        ("reserved", 24, _silent),
    ),
    HelloAck: (
        ("MajV/MinV", 1, _version_byte),
        ("reserved", 2, _silent),
        ("MaxAdverts", 1, _number),
        ("ActRcvSz", 4, _size),
        ("reserved", 172, _silent),
    ),
    IwarpHello: (
        ("MajV/MinV", 1, _version_byte),
        ("reserved", 1, _silent),
        ("MaxAdverts", 2, _number),
        ("DesRemRcvSz", 4, _size),
        ("LocalRcvSz", 4, _size),
        ("LocORD", 2, _number),
        ("LocIRD", 2, _number),
    ),
    IwarpHelloAck: (
        ("MajV/MinV", 1, _version_byte),
        ("reserved", 1, _silent),
        ("MaxAdverts", 2, _number),
        ("ActRcvSz", 4, _size),
        ("LocORD", 2, _number),
        ("LocIRD", 2, _number),
    ),
    RdmaWrCompl: (("Len", 4, _size),),
    RdmaRdCompl: (("Len", 4, _size),),
    ModeChange: (("S/Mode", 1, _mode), ("reserved", 3, _silent)),
    ChRcvBuf: (("DesSz", 4, _size),),
    ChRcvBufAck: (("ActSz", 4, _size),),
    SuspComm: (("ServiceID", 8, lambda wire: service_text(int.from_bytes(wire))),),
    SinkAvail: (*_ADVERT, ("NonDiscards", 4, _number)),
    SrcAvail: _ADVERT,
}
_HELLO_OF_IPV6: Final[_Layout] = tuple(
    (name, size, _ipv6 if meaning is _ipv4 else meaning) for name, size, meaning in _FIELDS[Hello]
)


def fields(message: bytes, record: type[Header] | None) -> Iterator[Field]:
    """Every field of a message, those that are missing or cut off too, then payload or surplus."""
    offset = 0
    for name, size, meaning in (*_BASE, *_layout(message, record)):
        wire = message[offset : offset + size]
        missing = size - len(wire)
        yield Field(offset, name, wire, f"{byte_count(missing)} missing" if missing else meaning(wire))
        offset += size
    if rest := message[offset:]:
        yield Field(offset, PAYLOAD if record is not None and record.PAYLOAD else SURPLUS, rest, byte_count(len(rest)))


def _layout(message: bytes, record: type[Header] | None) -> _Layout:
    if record is Hello and message[17:18] >= b"\x60":
        return _HELLO_OF_IPV6
    return _FIELDS.get(record, ()) if record is not None else ()
