"""What a capture tells, one event after another."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sidestep.errors import PeerViolation
from sidestep.observe.capture.layers import Wire
from sidestep.rdma.frames import Side
from sidestep.sdp import dissect
from sidestep.sdp.header import Header
from sidestep.sdp.wire import decode


class What(StrEnum):
    """What kind of event it is."""

    SDP = "sdp"  # a message
    CM = "cm"  # setting up and taking down the connection beneath: the connection manager, or MPA
    RDMA = "rdma"  # an RDMA Read or Write
    TRANSPORT = "transport"  # something gone wrong beneath: sent again, refused, missing


@dataclass(frozen=True, slots=True)
class Event:
    """One of them."""

    frame: int  # the last one that it took
    time_ns: int  # since the epoch
    wire: Wire
    source: str
    destination: str
    what: What
    text: str = ""  # of all but SDP messages
    connection: int | None = None  # counted from 1; None if its beginning was not seen
    side: Side | None = None  # who sends, if known
    message: bytes = b""
    missing: int = 0  # bytes of the message that the capture has cut off
    solicited: bool = False
    note: str = ""

    def line(self) -> str:
        """What happened, without when and between whom."""
        text = dissect.line_of(dissect.read(self.message, self.missing)) if self.what is What.SDP else self.text
        return f"{text} [{self.note}]" if self.note else text

    def as_json(self) -> dict[str, Any]:
        """As plain values; stable."""
        told: dict[str, Any] = {
            "frame": self.frame,
            "time_ns": self.time_ns,
            "wire": self.wire.value,
            "from": self.source,
            "to": self.destination,
            "connection": self.connection,
            "side": self.side.name.lower() if self.side is not None else None,
            "what": self.what.value,
        }
        if self.note:
            told["note"] = self.note
        if self.what is not What.SDP:
            return told | {"text": self.text}
        return told | {"solicited": self.solicited} | dissect.as_json(dissect.read(self.message, self.missing))


CHECKSUM_NOTE: Final = "its checksum is wrong"


def header_of(message: bytes) -> Header | None:
    """That of a whole SDP message; None if it is none."""
    try:
        return decode(memoryview(message)).header
    except PeerViolation:
        return None
