"""`sidestep sdp simulate`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from sidestep.cli.group import cli
from sidestep.errors import Misuse
from sidestep.sdp.simulate.trace import Entry, Trace


def run(*arguments: str, columns: int | None = None) -> Result:
    """The command as it is called."""
    env = None if columns is None else {"COLUMNS": str(columns)}
    return CliRunner().invoke(cli, ["sdp", "simulate", *arguments], env=env)


def test_a_line_for_each_of_several() -> None:
    result = run("--seed", "3", "--count", "2", "--kind", "clean")
    assert result.exit_code == 0
    assert [line.split(";")[0] for line in result.stdout.splitlines()] == ["seed 3: clean", "seed 4: clean"]
    assert result.stderr == "2 conversations: 2 clean; 0 failed\n"


def test_for_programs() -> None:
    rows = [json.loads(line) for line in run("--seed", "3", "--count", "2", "--json").stdout.splitlines()]
    assert [row["seed"] for row in rows] == [3, 4]
    assert all(row["fault"] is None and row["entries"] for row in rows)


@pytest.mark.parametrize("columns", [56, 80, 120])
def test_a_diagram_fits_the_terminal(columns: int) -> None:
    lines = run("--seed", "3", "--draw", columns=columns).stdout.splitlines()[:-1]
    assert max(map(len, lines)) == columns


def test_the_sides_of_a_diagram_are_straight() -> None:
    trace = Trace()
    trace.entries = [
        Entry(0.0, "left", "message", "there"),
        Entry(0.0, "right", "message", "back"),
        Entry(0.0, "right", "user", "told"),
    ]
    head, *lines = trace.ladder(80)
    assert {len(line) for line in (head, *lines)} == {80}


def test_what_cannot_be_asked_for() -> None:
    both = run("--draw", "--json").exception
    assert isinstance(both, Misuse)
    assert both.remedy
    for wrong in (["--count", "0"], ["--seed", "-1"], ["--kind", "nice"]):
        assert run(*wrong).exit_code == 2
