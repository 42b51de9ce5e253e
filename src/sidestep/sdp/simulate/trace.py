"""Record of a conversation: every message and RDMA operation, and the users' actions and events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sidestep.rdma.loopback import CmKind, CmMessage, Kind, Placed, QpMessage
from sidestep.rdma.work import Status
from sidestep.sdp import dissect

LEFT: Final = "left"
_RDMA: Final = {
    Kind.WRITE: "RDMA Write of {0.length} at {0.remote_va:#x}",
    Kind.READ_REQUEST: "RDMA Read of {0.length} at {0.remote_va:#x}",
    Kind.READ_RESPONSE: "answer to RDMA Read, {0.length} bytes",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One event."""

    at: float  # virtual time
    end: str  # that sends it, or where it happens
    what: str  # "message", "rdma", "cm" or "user"
    text: str
    message: bytes = b""  # of SDP


class Trace:
    """Observer of the fabric that also takes notes of the users."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def qp_message(self, message: QpMessage) -> None:
        if message.kind is Kind.SEND:
            body = b"".join(message.payload)
            self.entries.append(Entry(message.at, message.source, "message", dissect.line(body), body))
        elif message.kind in _RDMA:
            self._add(message, "rdma", _RDMA[message.kind].format(message))
        elif message.status is not Status.SUCCESS:
            self._add(message, "rdma", f"refusal: {message.status}")

    def cm_message(self, message: CmMessage) -> None:
        text, body = message.kind.name, b""
        if message.kind in (CmKind.REQ, CmKind.REP):
            body = message.private_data
            text += f": {dissect.line(body)}"
        elif message.kind is CmKind.REJ:
            text += f": reason {message.reason}"
        self._add(message, "cm", text, body)

    def placed(self, placed: Placed) -> None:
        """Bytes were written: the messages tell enough."""

    def note(self, at: float, end: str, text: str) -> None:
        self.entries.append(Entry(at, end, "user", text))

    def _add(self, message: QpMessage | CmMessage, what: str, text: str, body: bytes = b"") -> None:
        self.entries.append(Entry(message.at, message.source, what, text, body))

    def lines(self) -> Iterator[str]:
        for entry in self.entries:
            arrow = f"{entry.end}:" if entry.what == "user" else "-->" if entry.end == LEFT else "<--"
            yield f"{entry.at * 1e6:12.2f} us  {arrow} {entry.text}"

    def ladder(self, width: int = 120) -> Iterator[str]:
        """A diagram: the ends are the sides, time goes down."""
        inner = max(40, width - 15)  # behind the time
        yield f"{'time, us':>12}   left{' ' * (inner - 9)}right"
        for entry in self.entries:
            yield f"{entry.at * 1e6:12.2f}   {_rung(entry, inner)}"

    def as_json(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for entry in self.entries:
            rows.append({"at_s": entry.at, "end": entry.end, "what": entry.what, "text": entry.text})
            if entry.message:
                rows[-1]["sdp"] = dissect.as_json(dissect.read(entry.message))
        return rows


def _rung(entry: Entry, inner: int) -> str:
    text = entry.text if len(entry.text) <= inner - 8 else entry.text[: inner - 11] + "..."
    if entry.what == "user":
        return f"* {text}" if entry.end == LEFT else f"|{text:>{inner - 3}} *"
    line = {"rdma": "=", "cm": "."}.get(entry.what, "-")
    body = f" {text} ".center(inner - 4, line)
    return f"|{line}{body}>|" if entry.end == LEFT else f"|<{body}{line}|"
