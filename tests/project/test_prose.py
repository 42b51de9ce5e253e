"""Plain words in docstrings, help texts, reasons and the changelog, by the rules that a machine can judge.

Run as a script, this file prints every offender: its place, the broken rule, and the words.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

import click
import pytest

from sidestep.cli.group import cli
from sidestep.counters import NAMES
from sidestep.native import reasons
from sidestep.native.layout import REASON_TEXT
from sidestep.observe.sockets import Outside

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src" / "sidestep"
WORDS_MAX: Final = 25  # of a sentence

# The side that serves connections between hosts; all other files serve one host.
BETWEEN: Final = (
    "rdma/", "sdp/", "remote/", "observe/capture/", "observe/rdma", "observe/device_totals", "observe/doctor_rdma",
    "provider/carry/remote_relay", "provider/carry/lending", "demo/hosts", "cli/rdma", "cli/sdp", "cli/capture",
    "cli/gateway",
)  # fmt: skip

# A text begins with a noun, or a docstring with its verb: none of these is either.
_NEVER: Final = frozenset(
    "what whatever who whoever whom whose which whichever whether how however where wherever when whenever why "
    "it its he his they their our your there here nobody somebody anybody everybody nothing something anything "
    "everything so such as because since if unless until while once of by for with without within from in into at on "
    "onto to behind between before after over under around beside besides up down not then now also".split()
)
# These stand before a noun, not for one.
_BEFORE_A_NOUN: Final = frozenset(
    "a an the one that this these those all both each every any some no none another either neither several more "
    "two three true false".split()
)
_NO_NOUN: Final = _NEVER | frozenset("and or that is are was were has have had may can must".split())
_CONSTANTS: Final = frozenset(("none", "true", "false"))
_BANNED: Final = re.compile(r"\b(told|said|heard|rest|third|given (?:back|up)|whoever|whom)\b(?!-)", re.I)


class Rule(StrEnum):
    OPENING = "opens without a noun"
    LENGTH = f"a sentence of more than {WORDS_MAX} words"
    WORD = "a word that the field does not use"


# Offenders of each rule on the one-host side, and between hosts. A number here only falls.
CEILINGS: Final = {Rule.OPENING: (0, 0), Rule.LENGTH: (0, 0), Rule.WORD: (0, 0)}


class Text(NamedTuple):
    place: str
    words: str
    between: bool = False


def broken(text: str) -> list[Rule]:
    """Rules that `text` breaks, each once."""
    found = []
    if opens_badly(text):
        found.append(Rule.OPENING)
    if any(len(sentence.split()) > WORDS_MAX for sentence in sentences(text)):
        found.append(Rule.LENGTH)
    if _BANNED.search(text):
        found.append(Rule.WORD)
    return found


def opens_badly(text: str) -> bool:
    words = re.findall(r"[\w`'<>*./:-]+|[,;:.]", re.sub(r"([,;:.])(?=\s|$)", r" \1", text.lower()))
    first, second = (*words, ".", ".")[:2]
    if first in _BEFORE_A_NOUN:
        return second in ",;:." or (second in _NO_NOUN and not (first in _CONSTANTS and second in ("if", "when", "while", "once", "unless")))
    return first in _NEVER


def sentences(text: str) -> list[str]:
    """Sentences of a text; code is none, and blank lines, items of a list and sections end one, too."""
    paragraphs = re.split(r"\n\s*\n", text)
    prose = [one for one in paragraphs if not all(line.startswith(" ") for line in one.splitlines())]
    parts = [part for one in prose for part in re.split(r"\n\s*(?=[-*] |[\w.]+: )|(?<=:)\n\s{4}", one)]
    return [one for part in parts for one in re.split(r"(?<=[.?!])[)`'\"]?\s+(?=[A-Z`(*\"])", part)]


def docstrings() -> Iterator[Text]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{name} {getattr(node, 'name', '')}".strip()
                if text := ast.get_docstring(node):
                    yield Text(place, text.replace("\b\n", ""), name.startswith(BETWEEN))


def helps(command: click.Command = cli, name: str = "sidestep") -> Iterator[Text]:
    """Help texts of options; those of commands are docstrings."""
    module = getattr(command.callback, "__module__", "").removeprefix("sidestep.").replace(".", "/")
    for option in command.params:
        if text := getattr(option, "help", None):
            yield Text(f"{name} {option.opts[0]}", text, module.startswith(BETWEEN))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for one in command.list_commands(context):
            child = command.get_command(context, one)
            assert child is not None
            yield from helps(child, f"{name} {one}")


def reason_texts() -> Iterator[Text]:
    tables = (REASON_TEXT, reasons.REMEDY, reasons.REFUSAL_TEXT)
    for code, text in chain.from_iterable(table.items() for table in tables):
        yield Text(f"reason {code.name}", text)
    for one in Outside:
        yield Text(f"reason {one.name}", one.text)
        yield Text(f"remedy {one.name}", one.remedy)
    for name, text in NAMES.items():
        yield Text(f"counter {name}", text)


def changes() -> Iterator[Text]:
    for text in re.findall(r"(?ms)^- (.*?)(?=\n\n|\n- |\n#|\Z)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")):
        yield Text("CHANGELOG", re.sub(r"\[(.*?)\]\(\S*?\)", r"\1", text))


def offenders() -> Iterator[tuple[Rule, Text]]:
    for text in chain(docstrings(), helps(), reason_texts(), changes()):
        for rule in broken(text.words):
            yield rule, text


if __name__ == "__main__":
    for rule, text in offenders():
        print(f"{'between ' if text.between else ''}{text.place}: {rule}: {' '.join(text.words.split())}")
