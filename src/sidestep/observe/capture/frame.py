"""One frame of a capture, and the error where a capture ends too early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sidestep.errors import Unavailable


class Readable(Protocol):
    """What frames are read from: files, pipes, and what is unpacked on the way."""

    def read(self, size: int, /) -> bytes:
        """So many bytes; fewer at the end only."""


@dataclass(frozen=True, slots=True)
class CapturedFrame:
    """One frame of a capture."""

    number: int  # from 1, as other tools count
    time_ns: int  # since the epoch
    link_type: int  # LINKTYPE_*
    data: bytes  # as far as it was captured


def damaged(name: str, number: int, what: str) -> Unavailable:
    return Unavailable(
        f"{name}, frame {number}: {what}", remedy="everything before it has been read; capture again for the rest"
    )
