"""How results are shown: as JSON or as lines, numbers in few characters, foreign text that cannot move the cursor."""

from __future__ import annotations

import json
from collections.abc import Iterable

import click


def show(
    document: object, lines: Iterable[str], *, as_json: bool, indent: int | None = None, talk: bool = False
) -> None:
    """One JSON document, or else lines of text, which go to stderr if they are talk."""
    if as_json:
        click.echo(json.dumps(document, indent=indent))
    else:
        for line in lines:
            click.echo(line, err=talk)


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


def printable(text: str) -> str:
    """One line of text as it is, or escaped: programs name themselves, and may not write to the terminal by that."""
    return text if text.isprintable() else ascii(text)[1:-1]
