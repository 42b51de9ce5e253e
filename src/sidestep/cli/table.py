"""Tables of text: columns as wide as their widest cell, and the last one folded where a terminal ends."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest
from typing import Final

from click import unstyle

_GAP: Final = "  "
_LAST_MIN: Final = 16  # columns; narrower, a sentence becomes a tower


def table(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), width: int | None = None) -> Iterator[str]:
    """The lines of a table; cells may have several lines, and colours.

    Args:
        rows: The cells, headings among them.
        right: Numbers of the columns that are set to the right.
        width: Columns of the terminal, to which the last column is folded; None: as wide as it is.
    """
    cells = [[cell.split("\n") for cell in row] for row in rows]
    widths = [max(len(unstyle(line)) for cell in column for line in cell) for column in zip(*cells, strict=True)]
    if width is not None:
        widths[-1] = max(width - sum(widths[:-1]) - len(_GAP) * (len(widths) - 1), _LAST_MIN)
        for row in cells:
            row[-1] = [piece for line in row[-1] for piece in textwrap.wrap(line, widths[-1])]
    for row in cells:
        for parts in zip_longest(*row, fillvalue=""):
            spaces = [" " * (room - len(unstyle(part))) for part, room in zip(parts, widths, strict=True)]
            yield _GAP.join(
                space + part if number in right else part + space
                for number, (part, space) in enumerate(zip(parts, spaces, strict=True))
            ).rstrip()
