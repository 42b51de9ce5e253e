"""The test vectors of SDP, from docs/wire/sdp-vectors.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).parents[2] / "docs/wire/sdp-vectors.toml"


@dataclass(frozen=True)
class Vector:
    """One message of the file."""

    name: str  # V01
    title: str  # Hello
    message: bytes
    sender: str  # C, A, or nothing outside the conversation
    base: dict[str, int]  # Bufs, Len, MSeq, MSeqAck of the BSDH, in decimal; nothing where the file does not decode it
    credit: int | None  # the sender's credit before it sends this

    @property
    def view(self) -> memoryview:
        """The message, as a receiver gets it."""
        return memoryview(self.message)


@cache
def vectors() -> dict[str, Vector]:
    """All vectors by name."""
    records = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: Vector(
            name,
            record["title"],
            bytes.fromhex(_expanded(record["bytes"])),
            record.get("sender", ""),
            record.get("base", {}),
            record.get("credit"),
        )
        for name, record in records.items()
    }


def between(first: str, last: str) -> list[Vector]:
    """Vectors from one name to another."""
    return [vector for name, vector in vectors().items() if first <= name <= last]


def _expanded(block: str) -> str:
    """Hex without the notation `00*n`, which stands for n zero bytes."""
    return re.sub(r"00\*(\d+)", lambda match: "00" * int(match[1]), block)
