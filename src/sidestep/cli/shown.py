"""Output of results: as JSON or as lines, numbers in few characters, foreign text that cannot move the cursor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

# Versions, by command, of documents that have lost a field, or whose field has another meaning. Others have 1.
_VERSIONS: Final[Mapping[str, int]] = {}
_ELLIPSIS: Final = "\N{HORIZONTAL ELLIPSIS}"


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
