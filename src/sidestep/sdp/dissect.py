"""SDP messages in words: one line, or every field with its bytes, for good messages and for broken ones.

A broken message is decoded as far as it goes: what is wrong comes first, then whatever its bytes still say. Field names
are the specification's, so that a line here can be looked up in docs/wire/sdp.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Final

from sidestep.errors import PeerViolation
from sidestep.sdp.fields import (
    PAYLOAD,
    SURPLUS,
    byte_count,
    fields,
    flag_words,
    record_claimed,
    service_text,
    version_text,
)
from sidestep.sdp.hello import Version
from sidestep.sdp.wire import (
    BSDH_LEN,
    AbortConn,
    Bsdh,
    ChRcvBuf,
    ChRcvBufAck,
    DisConn,
    Header,
    Hello,
    HelloAck,
    IwarpHello,
    IwarpHelloAck,
    Mid,
    Mode,
    ModeChange,
    RdmaRdCompl,
    RdmaWrCompl,
    SendSm,
    SinkAvail,
    SinkAvailCancel,
    SinkCancelAck,
    SrcAvail,
    SrcAvailCancel,
    SuspComm,
    SuspCommAck,
    decode,
)

PAYLOAD_SHOWN_MAX: Final = 32  # bytes of payload, or of bytes that belong to no field, in a line


@dataclass(frozen=True)
class Reading:
    """A message as far as it could be read."""

    message: bytes
    name: str  # of the record, or what it is called that has none
    bsdh: Bsdh | None
    header: Header | None
    payload: bytes
    fault: PeerViolation | None  # the first rule that it breaks
    missing: int = 0  # bytes at the end that were sent but are not here


def read(message: bytes | memoryview, missing: int = 0) -> Reading:
    """Whatever can be read; never fails. A message of which bytes are `missing` is not judged."""
    message = bytes(message)
    view = memoryview(message)
    if missing:
        return _read_broken(message, None, missing)
    try:
        bsdh, header, payload = decode(view)
    except PeerViolation as fault:
        return _read_broken(message, fault)
    return Reading(message, type(header).__name__, bsdh, header, bytes(payload), None)


def _read_broken(message: bytes, fault: PeerViolation | None, missing: int = 0) -> Reading:
    if len(message) < BSDH_LEN:
        return Reading(message, "no message" if fault else "cut message", None, None, b"", fault, missing)
    view = memoryview(message)
    bsdh = Bsdh.decode(view)
    record = record_claimed(bsdh)
    if record is None:
        return Reading(message, f"MID {bsdh.mid:#04x}", bsdh, None, message[BSDH_LEN:], fault, missing)
    try:
        header = record.decode(view)
    except PeerViolation:  # too short, or a code that means nothing
        header = None
    payload = message[BSDH_LEN + record.LENGTH :]
    return Reading(message, record.__name__, bsdh, header, payload, fault, missing)


# ---- one line ----


def line(message: bytes | memoryview) -> str:
    """The message in one line."""
    return line_of(read(message))


def line_of(reading: Reading) -> str:
    """What was read, in one line."""
    said = [] if reading.fault is None else [f"broken ({reading.fault.rule}): {reading.fault.message}"]
    if reading.bsdh is not None:
        numbers = f"MSeq {reading.bsdh.mseq}, MSeqAck {reading.bsdh.mseq_ack}, Bufs {reading.bsdh.bufs}"
        flags = "".join(f", {word}" for word in flag_words(reading.bsdh.flags))
        said.append(numbers + flags)
    if reading.header is not None and (says := _SAYS.get(type(reading.header))):
        said.append(says(reading.header))
    if reading.payload:
        said.append(f"{byte_count(len(reading.payload))} {shown(reading.payload)}")
    elif reading.header is not None and reading.header.MID is Mid.DATA and not reading.missing:
        said.append("no payload, credit only")
    if reading.bsdh is None and reading.message:
        said.append(reading.message.hex())
    if reading.missing:
        said.append(f"{byte_count(reading.missing)} more were not captured")
    return f"{reading.name}: {'; '.join(said)}"


def shown(data: bytes) -> str:
    """The first bytes, as text if that is what they are, else in hex; never a control character."""
    head, more = data[:PAYLOAD_SHOWN_MAX], "..." if len(data) > PAYLOAD_SHOWN_MAX else ""
    text = repr(head.decode("latin-1"))[1:-1]
    if all(32 <= byte < 127 or byte in b"\r\n\t" for byte in head):
        return f'"{text}"{more}'
    return head.hex() + more


def _say_advert(header: Any) -> str:
    return f"offers {byte_count(header.length)}, RKey {header.rkey:#010x}, VA {header.va:#x}"


def _say_sink(header: Any) -> str:
    return f"{_say_advert(header)}, NonDiscards {header.non_discards}"


def _say_hello(header: Any) -> str:
    return (
        f"version {version_text(header.version)}, from {_end(header.src_ip, header.local_port)} to {header.dst_ip}, "
        f"LocalRcvSz {header.local_rcv_sz}, DesRemRcvSz {header.des_rem_rcv_sz}, MaxAdverts {header.adverts_max}"
    )


def _say_hello_ack(header: Any) -> str:
    return f"version {version_text(header.version)}, ActRcvSz {header.act_rcv_sz}, MaxAdverts {header.max_adverts}"


def _say_iwarp_hello(header: Any) -> str:
    return (
        f"version {version_text(header.version)}, "
        f"LocalRcvSz {header.local_rcv_sz}, DesRemRcvSz {header.des_rem_rcv_sz}, "
        f"MaxAdverts {header.max_adverts}, LocORD {header.loc_ord}, LocIRD {header.loc_ird}"
    )


def _say_iwarp_hello_ack(header: Any) -> str:
    return f"{_say_hello_ack(header)}, LocORD {header.loc_ord}, LocIRD {header.loc_ird}"


def _say_mode(header: Any) -> str:
    way = "opposite direction" if header.to_send_half else "direction of this message"
    return f"the {way} becomes {header.mode.name.capitalize()}"


_SAYS: Final[dict[type[Header], Callable[[Any], str]]] = {
    Hello: _say_hello,
    HelloAck: _say_hello_ack,
    IwarpHello: _say_iwarp_hello,
    IwarpHelloAck: _say_iwarp_hello_ack,
    DisConn: lambda _: "no more bytes this way",
    AbortConn: lambda _: "reset after DisConn",
    SendSm: lambda _: "the rest of the oldest SrcAvail by Data, please; or a SrcAvailCancel is done",
    RdmaWrCompl: lambda header: f"{byte_count(header.length)} written",
    RdmaRdCompl: lambda header: f"{byte_count(header.length)} read",
    ModeChange: _say_mode,
    SrcAvailCancel: lambda _: "all SrcAvails are withdrawn",
    SinkAvailCancel: lambda _: "all SinkAvails are withdrawn",
    SinkCancelAck: lambda _: "the SinkAvails left are dropped",
    ChRcvBuf: lambda header: f"asks for Private Buffers of {byte_count(header.size)}",
    ChRcvBufAck: lambda header: f"Private Buffers have {byte_count(header.size)}",
    SuspComm: lambda header: f"connect anew to {service_text(header.service_id)}",
    SuspCommAck: lambda _: "quiet now, to connect anew",
    SinkAvail: _say_sink,
    SrcAvail: _say_advert,
}


def _end(address: IPv4Address | IPv6Address, port: int) -> str:
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


# ---- every field ----


def lines(message: bytes | memoryview) -> list[str]:
    """The message, every field in a line of its own."""
    return lines_of(read(message))


def lines_of(reading: Reading) -> list[str]:
    """What was read, every field in a line of its own."""
    of_more = f" of {byte_count(len(reading.message) + reading.missing)}" if reading.missing else ""
    head = [f"{reading.name}, {byte_count(len(reading.message))}{of_more}"]
    if reading.fault is not None:
        head.append(f"  broken ({reading.fault.rule}): {reading.fault.message}")
    record = record_claimed(reading.bsdh) if reading.bsdh is not None else None
    for offset, name, wire, meaning in fields(reading.message, record):
        if name in (PAYLOAD, SURPLUS):
            value = shown(wire)
        else:
            value = "00*" + str(len(wire)) if len(wire) > 16 and not any(wire) else wire.hex()
        head.append(f"  {offset:3}  {name:<13}  {value:<16}  {meaning}".rstrip())
    return head


# ---- for programs ----


def as_json(reading: Reading) -> dict[str, Any]:
    """What was read as plain values; stable."""
    told: dict[str, Any] = {"message": reading.name}
    if reading.bsdh is not None:
        bsdh = reading.bsdh
        told |= {
            "mid": bsdh.mid,
            "flags": flag_words(bsdh.flags),
            "bufs": bsdh.bufs,
            "len": bsdh.length,
            "mseq": bsdh.mseq,
            "mseq_ack": bsdh.mseq_ack,
        }
    if reading.header is not None:
        told["header"] = {name: _plain(getattr(reading.header, name)) for name in _field_names(reading.header)}
    told["payload_len"] = len(reading.payload)
    told["bytes"] = reading.message.hex()
    if reading.missing:
        told["missing"] = reading.missing
    if reading.fault is not None:
        told["fault"] = {"rule": reading.fault.rule, "text": reading.fault.message}
    return told


def _field_names(header: Header) -> list[str]:
    return [field.name for field in dataclasses.fields(header)]


def _plain(value: Any) -> Any:
    if isinstance(value, Version):
        return version_text(value)
    if isinstance(value, Mode):
        return value.name.lower()
    if isinstance(value, IPv4Address | IPv6Address):
        return str(value)
    return value
