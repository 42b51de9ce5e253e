"""Tables of text: columns as wide as their widest cell, and what is long folded where a terminal ends."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest
from typing import Final

GAP: Final = "  "
_INDENT: Final = "    "  # width of a note


def table(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), notes: Sequence[str] = (), width: int | None = None
) -> Iterator[str]:
    """The lines of a table; cells may have several lines, and colours.

    Args:
        rows: The cells, headings among them.
        right: Numbers of the columns that are set to the right.
        notes: A text below each row, for all rows or none; an empty one takes no line.
        width: Columns of the terminal, to which notes are folded, or without notes the last column; None: as wide as
            it is.
    """
    cells = [[cell.split("\n") for cell in row] for row in rows]
    widths = [width_of(column) for column in zip(*rows, strict=True)]
    if width is not None and not notes:
        widths[-1] = max(width - sum(widths[:-1]) - len(GAP) * (len(widths) - 1), 1)
        for row in cells:
            row[-1] = [piece for line in row[-1] for piece in _folded(line, widths[-1])]
    for row, note in zip(cells, notes or [""] * len(cells), strict=True):
        for parts in zip_longest(*row, fillvalue=""):
            spaces = [" " * (room - len(_bare(part))) for part, room in zip(parts, widths, strict=True)]
            yield GAP.join(
                space + part if number in right else part + space
                for number, (part, space) in enumerate(zip(parts, spaces, strict=True))
            ).rstrip()
        room = None if width is None else max(width - len(_INDENT), 1)
        yield from (_INDENT + piece for piece in (_folded(note, room) if room else [note] if note else []))


def _folded(text: str, room: int) -> list[str]:
    import textwrap  # tables in a pipe need none

    return textwrap.wrap(text, room)


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None: it is another file."""
    if not sys.stdout.isatty():
        return None
    import shutil

    return shutil.get_terminal_size().columns


def width_of(column: Sequence[str]) -> int:
    """The columns that its cells take."""
    return max((len(line) for cell in column for line in _bare(cell).split("\n")), default=0)


def _bare(text: str) -> str:
    """`text` without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text) if "\x1b" in text else text
