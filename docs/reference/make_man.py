"""Writes a man page for each command: `python docs/reference/make_man.py DIRECTORY`.

click-man, which makes such pages, knows no commands that are loaded when they are used, and escapes too little.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
from make import comments_of, walk

from sidestep import __version__, config, places
from sidestep.cli.group import LazyGroup, cli

ESCAPES: Final = str.maketrans({
    "\\": r"\e", "-": r"\-", "'": r"\(aq", "^": r"\(ha", "~": r"\(ti", '"': r"\(dq",
})  # fmt: skip


def page(path: str, command: click.Command) -> str:
    """The page of a command, in the language of man(7)."""
    name = path.replace(" ", "-")
    context = click.Context(command, info_name=path, help_option_names=["-h", "--help"])
    date = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))))
    lines = [
        f'.TH {name.upper()} 1 {date} "sidestep {__version__}" "User Commands"',
        ".SH NAME",
        rf"{escaped(name)} \- {escaped(command.get_short_help_str(limit=200).rstrip('.'))}",
        ".SH SYNOPSIS",
        rf"\fB{escaped(path)}\fP {escaped(' '.join(command.collect_usage_pieces(context)))}",
        ".SH DESCRIPTION",
        *paragraphs(inspect.cleandoc(command.help or "")),
        ".SH OPTIONS",
        *listed(options(command, context)),
        *commands(command, context),
    ]
    if command is cli:
        variables = [(getattr(places, each), text) for each, text in comments_of(Path(places.__file__), "ENV_")]
        lines += [".SH ENVIRONMENT", *listed(iter(variables))]
        lines += [".SH FILES", *listed(iter([(str(config.SYSTEM_POLICY), "The system's policy, read by providers.")]))]
    related = [path.rpartition(" ")[0], *(f"{path} {each}" for each in names(command, context))]
    lines += [".SH SEE ALSO", ",\n".join(rf"\fB{escaped(each.replace(' ', '-'))}\fP(1)" for each in related if each)]
    return "\n".join(lines) + "\n"


def options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """As the help shows them."""
    for each in command.get_params(context):
        if isinstance(each, click.Option) and (record := each.get_help_record(context)):
            yield record


def names(command: click.Command, context: click.Context) -> list[str]:
    """Of the commands below it."""
    return command.list_commands(context) if isinstance(command, click.Group) else []


def commands(command: click.Command, context: click.Context) -> Iterator[str]:
    """The commands below it, in its sections if it has some."""
    if isinstance(command, LazyGroup):
        yield ".SH COMMANDS"
        for title, section in command.sections.items():
            yield f".SS {escaped(title)}"
            yield from listed((name, text) for name, (text, _) in section.items())
    elif isinstance(command, click.Group):
        yield ".SH COMMANDS"
        yield from listed((name, each.get_short_help_str(limit=200)) for name, each in command.commands.items())


def paragraphs(text: str) -> Iterator[str]:
    """Help as click lays it out: paragraphs, of which those behind a \\b keep their lines."""
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield ".PP"
        if paragraph.startswith("\b"):
            yield from (".nf", *map(escaped, paragraph.splitlines()[1:]), ".fi")
        else:
            yield escaped(" ".join(paragraph.split()))


def listed(rows: Iterator[tuple[str, str]]) -> Iterator[str]:
    """Terms, bold but for what stands for a value, and what they mean."""
    for term, text in rows:
        yield from (".TP", re.sub(r"^[^ ]+|(?<= )\\-[^ ]+", r"\\fB\g<0>\\fP", escaped(term)), escaped(text))


def escaped(text: str) -> str:
    """Text of which nothing is taken for a request or a character of another kind; `code` is bold."""
    return re.sub(r"`(.+?)`", r"\\fB\1\\fP", re.sub(r"^\.", r"\&.", text.translate(ESCAPES)))


def main() -> None:
    """Writes the pages."""
    (directory,) = map(Path, sys.argv[1:])
    directory.mkdir(parents=True, exist_ok=True)
    for path, command in walk("sidestep", cli, None):
        (directory / f"{path.replace(' ', '-')}.1").write_text(page(path, command), encoding="utf-8")


if __name__ == "__main__":
    main()
