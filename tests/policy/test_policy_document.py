"""docs/guides/policy.md says what the code does: its samples are read, its examples decided."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sidestep.cli.policy import parse_endpoint
from sidestep.config import SYSTEM_POLICY
from sidestep.policy import Policy, Role, Subject, grammar, model
from sidestep.policy.grammar import parse

DOCUMENT = (Path(__file__).parents[2] / "docs/guides/policy.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(
    r"^\| (?P<rules>.*?) ?\| `(?P<role>\w+) (?P<program>\S+) (?P<endpoint>\S+)`"
    r"(?: as (?P<uid>\d+))?(?: in (?P<gid>\d+))? \| `(?P<target>\w+)` \|$", DOCUMENT, re.M,
)  # fmt: skip


def test_the_examples_are_found() -> None:
    section = DOCUMENT.partition("## Examples")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(EXAMPLES) == len(rows) - 2 > 10


@pytest.mark.parametrize(("rules", "role", "program", "endpoint", "uid", "gid", "target"), EXAMPLES)
def test_an_example_goes_where_it_says(
    rules: str, role: str, program: str, endpoint: str, uid: str, gid: str, target: str
) -> None:
    document = parse("\n".join(re.findall(r"`([^`]+)`", rules)).encode())
    assert document.problems == ()
    subject = Subject((program,), int(uid or 0), frozenset([int(gid)] if gid else []))
    where = parse_endpoint(endpoint)
    assert Policy(document.statements).decide(Role(role), subject, where.address, where.port).target == target


def test_the_sample_is_a_policy() -> None:
    (sample,) = re.findall(r"```conf\n(.*?)```", DOCUMENT, re.S)
    document = parse(sample.encode())
    assert document.problems == ()
    kinds = {type(statement) for statement in document.statements}
    assert kinds == {model.Rule, model.Pair, model.Rings, model.Include}


def test_the_sample_of_a_bad_line_is_what_check_shows() -> None:
    (sample,) = re.findall(r"```text\n(.*?)```", DOCUMENT, re.S)
    (problem,) = parse(b"\n\nuse sdp conect * *:*\n", "policy.conf").problems
    assert sample == problem.report() + "\n"


def test_the_grammar_names_every_word_of_the_language() -> None:
    (text,) = re.findall(r"```ebnf\n(.*?)```", DOCUMENT, re.S)
    words = set(re.findall(r'"([a-z-]{2,})"', text))
    assert words == {
        *grammar._STATEMENT_WORDS, *grammar._CLAUSES, *grammar._LOG_WORDS, *grammar._DESTINATIONS, *model.ROLE_WORDS,
        *grammar._RING_WORDS, model.BOTH, model.TCP, grammar.OVER,
    }  # fmt: skip


def test_the_places_are_the_ones_that_are_read() -> None:
    assert f"`{SYSTEM_POLICY}`" in DOCUMENT
