"""Docstrings, comments, help texts, reasons and the changelog keep the rules of plain English that a machine can judge.

As a script it prints each offender: its place, the rule, and the words.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
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

# The files that serve connections between hosts; all others serve one host.
BETWEEN: Final = (
    "rdma/", "sdp/", "remote/", "observe/capture/", "observe/rdma", "observe/device_totals", "observe/doctor_rdma",
    "provider/carry/remote_relay", "provider/carry/lending", "demo/hosts", "cli/rdma", "cli/sdp", "cli/capture",
    "cli/gateway",
    "native/engine/", "native/wire/", "native/_engine", "native/_framing",
)  # fmt: skip


class Rule(StrEnum):
    OPENING = "opens with neither noun nor verb"
    LENGTH = f"has a sentence of more than {WORDS_MAX} words"
    WORD = "has a word that the field does not use"


# How many texts of the one-host side, and between hosts, break a rule. These numbers only fall.
CEILINGS: Final = {Rule.OPENING: (0, 635), Rule.LENGTH: (0, 117), Rule.WORD: (0, 209)}
COMMENT_CEILINGS: Final = {Rule.OPENING: (69, 851), Rule.LENGTH: (22, 18), Rule.WORD: (1, 119)}
SLACK: Final = 10  # further below its ceiling a count asks for a lower one

_NEVER: Final = (
    "what|whatever|who|whoever|whom|whose|which|whichever|whether|how|however|where|wherever|when|whenever|why|"
    "it|its|he|his|they|their|our|your|there|here|nobody|somebody|anybody|everybody|nothing|something|anything|"
    "everything|so|such|as|because|since|if|unless|until|while|once|of|by|for|with|without|within|from|in|into|at|on|"
    "onto|to|behind|between|before|after|over|under|around|beside|besides|up|down|not|then|now|also"
)
_BEFORE_A_NOUN: Final = (
    "a|an|the|one|that|this|these|those|all|both|each|every|any|some|no|another|either|neither|several|more|two|three"
)
_VERBS: Final = "and|or|that|is|are|was|were|has|have|had|may|can|must"
_OPENING: Final = re.compile(
    rf"(?!nothing to do\b)(?:{_NEVER})\b(?!-)"
    rf"|(?:{_BEFORE_A_NOUN})(?:[,;:.]| (?:{_NEVER}|{_VERBS})\b)"
    r"|(?:none|true|false)\b(?! (?:if|when|while|once|unless)\b)",
    re.IGNORECASE,
)
_BANNED: Final = re.compile(r"\b(?:told|said|heard|rest|third|given (?:back|up)|whoever|whom)\b(?!-)", re.IGNORECASE)


class Text(NamedTuple):
    place: str
    words: str
    between: bool = False


def broken(text: str) -> Iterator[Rule]:
    """The rules that a text breaks, each once."""
    if _OPENING.match(text):
        yield Rule.OPENING
    if any(len(sentence.split()) > WORDS_MAX for sentence in sentences(text)):
        yield Rule.LENGTH
    if _BANNED.search(text):
        yield Rule.WORD


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text: code is none, and items of lists and of sections begin one, too."""
    for paragraph in re.split(r"\n\s*\n", text):
        if not all(line.startswith(" ") for line in paragraph.splitlines()):
            for part in re.split(r"\n\s*(?=[-*] |[\w.]+: )", paragraph):
                yield from re.split(r"(?<=[.?!])[)`'\"]?\s+", part)


def docstrings() -> Iterator[Text]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
                text := ast.get_docstring(node)
            ):
                yield Text(f"{name} {getattr(node, 'name', '')}", text, name.startswith(BETWEEN))


_C: Final = re.compile(r"/\*(.*?)\*/|//([^\n]*)|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)


def comments() -> Iterator[Text]:
    for path in sorted(one for one in SOURCE.rglob("*") if one.suffix in {".c", ".h", ".S", ".py", ".pyi"}):
        name = str(path.relative_to(SOURCE))
        source = path.read_text(encoding="utf-8")
        for line, words in (_of_python if path.suffix in {".py", ".pyi"} else _of_c)(source):
            yield Text(f"{name}:{line}", words, name.startswith(BETWEEN))


def _of_c(source: str) -> Iterator[tuple[int, str]]:
    for found in _C.finditer(source):
        if words := found[1] or found[2]:
            lines = (re.sub(r"^\s*\*?[ \t]?", "", line) for line in words.strip().splitlines())
            yield source.count("\n", 0, found.start()) + 1, "\n".join(lines)


def _of_python(source: str) -> Iterator[tuple[int, str]]:
    """Comments of a file; lines below each other are one."""
    blocks: list[tuple[int, int, list[str]]] = []  # line, column, words
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            (line, column), words = token.start, token.string.lstrip("# ")
            alone = not token.line[:column].strip()
            if alone and blocks and blocks[-1][1] == column and line == blocks[-1][0] + len(blocks[-1][2]):
                blocks[-1][2].append(words)
            else:
                blocks.append((line, column if alone else -1, [words]))
    yield from ((line, " ".join(words)) for line, _, words in blocks)


def helps(command: click.Command = cli, name: str = "sidestep") -> Iterator[Text]:
    """The help texts of options, and of commands where they are no docstrings."""
    module = getattr(command.callback, "__module__", "").removeprefix("sidestep.").replace(".", "/")
    if command.help and command.callback and not command.callback.__doc__:
        yield Text(name, command.help, module.startswith(BETWEEN))
    for option in command.params:
        if text := getattr(option, "help", None):
            yield Text(f"{name} {option.opts[0]}", text, module.startswith(BETWEEN))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for one in command.list_commands(context):
            child = command.get_command(context, one)
            assert child is not None
            yield from helps(child, f"{name} {one}")


def explanations() -> Iterator[Text]:
    for table in (REASON_TEXT, reasons.REMEDY, reasons.REFUSAL_TEXT):
        for code, text in table.items():
            yield Text(f"reason {code.name}", text)
    for one in Outside:
        yield from (Text(f"reason {one.name}", one.text), Text(f"remedy {one.name}", one.remedy))
    for name, text in NAMES.items():
        yield Text(f"counter {name}", text)


def changes() -> Iterator[Text]:
    for text in re.findall(r"(?ms)^- (.*?)(?=\n\n|\n- |\n#|\Z)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")):
        yield Text("CHANGELOG", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text))


def offenders() -> Iterator[tuple[Rule, Text]]:
    shared = {text.words: text for text in reversed([*helps()])}  # an option of several commands counts once
    for text in chain(docstrings(), shared.values(), explanations(), changes()):
        for rule in broken(text.words):
            yield rule, text


@pytest.fixture(scope="module")
def counts() -> Counter[tuple[Rule, bool]]:
    return Counter((rule, text.between) for rule, text in offenders())


@pytest.mark.slow
@pytest.mark.parametrize("between", [False, True], ids=["one_host", "between_hosts"])
@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name.lower())
def test_prose_gets_plainer(rule: Rule, between: bool, counts: Counter[tuple[Rule, bool]]) -> None:
    """On a failure run this file: it prints the offenders. A ceiling is lowered, never raised."""
    ceiling = CEILINGS[rule][between]
    assert ceiling - SLACK <= counts[rule, between] <= ceiling, f"that {rule}"


@pytest.fixture(scope="module")
def comment_counts() -> Counter[tuple[Rule, bool]]:
    return Counter((rule, text.between) for text in comments() for rule in broken(text.words))


@pytest.mark.slow
@pytest.mark.parametrize("between", [False, True], ids=["one_host", "between_hosts"])
@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name.lower())
def test_comments_get_plainer(rule: Rule, between: bool, comment_counts: Counter[tuple[Rule, bool]]) -> None:
    ceiling = COMMENT_CEILINGS[rule][between]
    assert ceiling - SLACK <= comment_counts[rule, between] <= ceiling, f"that {rule}"


def test_comments_are_found() -> None:
    source = 'x = "# no"  # one\n# two\n# and on\ny = 1\n'
    assert [*_of_python(source)] == [(1, "one"), (2, "two and on")]
    assert [*_of_c('a("/* no */"); /* one */\n/*\n * two\n */ // last')] == [
        (1, "one"),
        (2, "two"),
        (4, "last"),
    ]


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("Path MTU of the route to `address`.", []),
        ("Cancels the timer.", []),
        ("True if the peer has closed.", []),
        ("None: any.", [Rule.OPENING]),
        ("What the peer sends.", [Rule.OPENING]),
        ("Whether it ends.", [Rule.OPENING]),
        ("Those of all devices.", [Rule.OPENING]),
        ("One that waits.", [Rule.OPENING]),
        ("One connection that waits.", []),
        ("Its address.", [Rule.OPENING]),
        ("nothing to do: the peer promotes it", []),
        ("Bytes that the peer was told of.", [Rule.WORD]),
        ("Loads a third-party protocol.", []),
        ("Ends. " + "word " * 26, [Rule.LENGTH]),
        ("Ends.\n\n    code " + "word " * 26, []),
        ("Ends.\n\nRaises:\n    OSError: " + "word " * 20 + "\n    Misuse: " + "word " * 20, []),
    ],
)
def test_the_rules_are_those_of_the_guide(text: str, rules: list[Rule]) -> None:
    assert [*broken(text)] == rules


if __name__ == "__main__":
    for rule, text in offenders():
        print(f"{'between hosts: ' * text.between}{text.place} {rule}: {' '.join(text.words.split())}")
    for text in comments():
        for rule in broken(text.words):
            print(f"{'between hosts: ' * text.between}comment {text.place} {rule}: {' '.join(text.words.split())}")
