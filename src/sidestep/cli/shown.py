"""Output of results: as JSON, lines or tables, numbers in few characters, foreign text that cannot move the cursor."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

# Versions, by command, of documents that have lost a field, or whose field has another meaning. Others have 1.
_VERSIONS: Final[Mapping[str, int]] = {}
_ELLIPSIS: Final = "\N{HORIZONTAL ELLIPSIS}"
GAP: Final = "  "  # space between columns of a table
_INDENT: Final = "    "  # width of a note


def show(
    document: Mapping[str, Any],
    lines: Iterable[str],
    *,
    as_json: bool,
    indent: int | None = None,
    talk: bool = False,
) -> None:
    """One JSON document, which names its schema, or else lines of text, which go to stderr if they are talk."""
    import click  # the table of `ss` does without

    if as_json:
        click.echo(json.dumps({"schema": schema(), **document}, indent=indent))
    else:
        for line in lines:
            click.echo(line, err=talk)


def schema() -> str:
    """Schema of the running command's --json; docs/reference/schemas has a file for each command."""
    import click

    names: list[str] = []
    context = click.get_current_context()
    while context.parent is not None:
        names.insert(0, context.info_name or "")
        context = context.parent
    return schema_name(".".join(names))


def schema_name(command: str) -> str:
    """`command` is its words, joined by dots."""
    return f"sidestep.{command}/{_VERSIONS.get(command, 1)}"


def short(number: float) -> str:
    """A number in at most five characters; 1K is 1000."""
    for unit in ("", "K", "M", "G", "T", "P"):
        if number < 999.5:
            return (
                f"{number:.0f}{unit}"
                if number >= 99.5 or (not unit and number == int(number))
                else f"{number:.1f}{unit}"
            )
        number /= 1000
    return f"{number:.0f}E"


def percent(share: float | None) -> str:
    """A share, rounded so that 100% means all and 0% none; empty for nothing."""
    if share is None:
        return ""
    whole = round(100 * share)
    return f"{min(max(whole, 1), 99) if 0 < share < 1 else whole}%"


def per_message(number: float | None) -> str:
    """A count for each message; empty if there were none."""
    return "" if number is None else f"{number:.2f}" if number < 10 else short(number)


def cut(text: str, room: int) -> str:
    """One line of text that can be printed, of so many characters at most."""
    shown = printable(text)
    return shown if len(shown) <= room else shown[: max(0, room - 1)] + _ELLIPSIS


def printable(text: str) -> str:
    """One line of text as it is, or escaped: programs name themselves, and may not write to the terminal by that."""
    return text if text.isprintable() else ascii(text)[1:-1]


def table(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), notes: Sequence[str] = (), width: int | None = None
) -> Iterator[str]:
    """The lines of a table: columns as wide as their widest cell; cells may have several lines, and colours.

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
