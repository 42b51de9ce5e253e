"""The test vectors of docs/wire/sdp.md §24, read from the page itself, so that they are written down once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "wire" / "sdp.md"
_BLOCK = re.compile(r"^#### (V\d\d) · (.*?)\n\n```hex\n(.*?)```\n(?:\n(.*?))?(?=\n#|\Z)", re.M | re.S)


@dataclass(frozen=True)
class Vector:
    """One message of the page."""

    name: str  # V01
    title: str  # C→A · Hello
    message: bytes
    text: str  # what the page says of it

    @property
    def sender(self) -> str:
        """C, A, or nothing outside the conversation."""
        return self.title[0] if "→" in self.title else ""

    @property
    def view(self) -> memoryview:
        """As a message is received."""
        return memoryview(self.message)

    def number(self, field: str) -> int:
        """A field of the base header, as the page says it in decimal."""
        found = re.search(rf"· {field} `[0-9a-f]+` = (\d+)", self.text)
        assert found is not None, (self.name, field)
        return int(found[1])

    @property
    def credit(self) -> int | None:
        """The sender's credit before it sends this, if the page tells."""
        found = re.search(r"credit before sending: (\d+)", self.text)
        return int(found[1]) if found else None


@cache
def vectors() -> dict[str, Vector]:
    """All of them by name."""
    section = PAGE.read_text().split("\n## 24.")[1].split("\n## 25.")[0]
    return {
        name: Vector(name, title, bytes.fromhex(_expanded(block)), text.strip())
        for name, title, block, text in _BLOCK.findall(section)
    }


def between(first: str, last: str) -> list[Vector]:
    """Those from one name to another."""
    return [vector for name, vector in vectors().items() if first <= name <= last]


def _expanded(block: str) -> str:
    """`00*n` is n zero bytes; blanks and line ends are for reading."""
    return re.sub(r"00\*(\d+)", lambda match: "00" * int(match[1]), block)
