"""Every command that a hint, a help text or a document names is there, with the options that it is shown with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from sidestep.cli.group import cli
from sidestep.native import layout

ROOT = Path(layout.__file__).parents[3]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
DOCUMENTS = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / "examples").rglob("*.md")]
HOLE = "\N{BULLET}"  # stands for what a format string fills in
# A command in quotes, at the beginning of a sentence, or behind the colon of what went wrong.
QUOTED = re.compile(r"(['`])(?:[A-Z_]+=\S+ )?sidestep ([a-z].*?)\1", re.DOTALL)
BARE = re.compile(r"(?:^|: |; |, as root: )sidestep ([a-z][^'`;,]*)")


@pytest.mark.least("ci")
def test_commands_in_texts_of_the_code_exist() -> None:
    shown = [(f"{path.relative_to(ROOT)}: {text}", text) for path in SOURCES for text in _of_code(path)]
    assert len(shown) > 100
    assert {place: wrong for place, text in shown if (wrong := _wrong(text))} == {}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_documents_exist(document: Path) -> None:
    assert {text: wrong for text in _of_document(document) if (wrong := _wrong(text))} == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("modules", "modules"),
        ("provider module", "module"),
        ("ss --stat x", "--stat"),
        ("run --spin-us 0 -- ss --stat", ""),
        ("ss [--ended]", ""),
        ("policy check|tset|trace", "tset"),
        ("run --stats -n", "-n"),
    ],
)
def test_what_is_not_there_is_found(text: str, wrong: str) -> None:
    assert _wrong(text) == wrong


def _of_code(path: Path) -> Iterator[str]:
    source = path.read_text()
    for text in _strings(ast.parse(source)) if re.search(r"sidestep\s+[a-z]", source) else ():
        flat = " ".join(text.split())
        yield from (found for _, found in QUOTED.findall(flat))
        for found in BARE.findall(flat):
            if found.split()[0] in cli.list_commands(click.Context(cli)):  # else prose about sidestep itself
                yield found


def _strings(tree: ast.AST) -> Iterator[str]:
    """The string constants; of those with places to fill in, the whole with a hole at each."""
    nodes = [*ast.walk(tree)]
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else HOLE for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def _of_document(path: Path) -> Iterator[str]:
    text = path.read_text()
    for language, block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```", text):
        if language != "python":
            yield from re.findall(r"(?<![\w/.-])sidestep ([a-z][^#'`|;&\n]*)", block)
    for span in re.findall(r"`([^`]+)`", re.sub(r"(?ms)^```.*?^```", "", text)):
        yield from re.findall(r"^(?:[A-Z_]+=\S+ )?sidestep ([a-z].*)", " ".join(span.split()))


def _wrong(text: str) -> str:
    """The first word that names a command or an option that is not there; empty: none."""
    command: click.Command = cli
    words = text.split(" -- ")[0].split()
    while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z][a-z|-]*", words[0]):
        children = {name: command.get_command(click.Context(command), name) for name in words[0].split("|")}
        for name, child in children.items():
            if child is None:
                return name
        if len(children) > 1:
            return ""  # several at once, with the arguments of any
        (only,) = children.values()
        assert only is not None
        command = only
        words.pop(0)
    for word in words:
        option = re.match(r"\[?(--?[a-z][a-z-]*)", word)
        if option and option[1] not in _options(command):
            return option[1]
    return ""


@cache
def _options(command: click.Command) -> frozenset[str]:
    found = {name for one in command.get_params(click.Context(command)) for name in (*one.opts, *one.secondary_opts)}
    return frozenset(found)
