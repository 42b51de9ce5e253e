"""A conversation as it was: every message, every RDMA operation, and what the users did and were told.

It is read as lines in words, drawn as a ladder, or given as plain values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sidestep.rdma.loopback import CmKind, CmMessage, Kind, Placed, QpMessage
from sidestep.rdma.work import Status
from sidestep.sdp import dissect

LEFT: Final = "left"
_ARROWS: Final = {True: "-->", False: "<--"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened."""

    at: float  # virtual time
    end: str  # that sends it, or where it happens
    what: str  # "message", "rdma", "cm" or "user"
    text: str
    message: bytes = b""  # of SDP


class Trace:
    """An observer of the fabric that also takes notes of the users."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def qp_message(self, message: QpMessage) -> None:
        if message.kind is Kind.SEND:
            body = b"".join(message.payload)
            self._add(message.at, message.source, "message", dissect.line(body), body)
        elif message.kind is Kind.WRITE:
            self._add(message.at, message.source, "rdma", f"RDMA Write of {message.length} at {message.remote_va:#x}")
        elif message.kind is Kind.READ_REQUEST:
            self._add(message.at, message.source, "rdma", f"RDMA Read of {message.length} at {message.remote_va:#x}")
        elif message.kind is Kind.READ_RESPONSE:
            self._add(message.at, message.source, "rdma", f"answer to RDMA Read, {message.length} bytes")
        elif message.status is not Status.SUCCESS:
            self._add(message.at, message.source, "rdma", f"refusal: {message.status}")

    def cm_message(self, message: CmMessage) -> None:
        text = message.kind.name
        body = b""
        if message.kind in (CmKind.REQ, CmKind.REP):
            body = message.private_data
            text += f": {dissect.line(body)}"
        elif message.kind is CmKind.REJ:
            text += f": reason {message.reason}"
        self._add(message.at, message.source, "cm", text, body)

    def placed(self, placed: Placed) -> None:
        """Bytes were written: the messages tell enough."""

    def note(self, at: float, end: str, text: str) -> None:
        """A user did something, or was told something."""
        self._add(at, end, "user", text)

    def _add(self, at: float, end: str, what: str, text: str, message: bytes = b"") -> None:
        self.entries.append(Entry(at, end, what, text, message))

    # --- to be read ---

    def lines(self) -> Iterator[str]:
        for entry in self.entries:
            arrow = _ARROWS[entry.end == LEFT] if entry.what != "user" else f"{entry.end}:"
            yield f"{entry.at * 1e6:12.2f} us  {arrow} {entry.text}"

    def ladder(self, width: int = 120) -> Iterator[str]:
        """A diagram: the ends are the sides, time goes down."""
        inner = max(40, width - 15)  # behind the time
        yield f"{'time, us':>12}   left{' ' * (inner - 9)}right"
        for entry in self.entries:
            yield from _rungs(entry, inner)

    def as_json(self) -> list[dict[str, Any]]:
        told = []
        for entry in self.entries:
            row: dict[str, Any] = {"at_s": entry.at, "end": entry.end, "what": entry.what, "text": entry.text}
            if entry.message:
                row["sdp"] = dissect.as_json(dissect.read(entry.message))
            told.append(row)
        return told


def _rungs(entry: Entry, inner: int) -> Iterator[str]:
    time = f"{entry.at * 1e6:12.2f}   "
    text = entry.text if len(entry.text) <= inner - 8 else entry.text[: inner - 11] + "..."
    if entry.what == "user":
        yield f"{time}* {text}" if entry.end == LEFT else f"{time}|{text:>{inner - 3}} *"
        return
    line = "=" if entry.what == "rdma" else "." if entry.what == "cm" else "-"
    body = f" {text} ".center(inner - 4, line)
    yield f"{time}|{line}{body}>|" if entry.end == LEFT else f"{time}|<{body}{line}|"
