"""The man pages that the package brings: one for each command, of which mandoc has nothing to say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import needed
import pytest

from sidestep.cli.group import cli

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("man")
    subprocess.run([sys.executable, ROOT / "docs/reference/make_man.py", place], check=True)
    return place


def shown(page: Path) -> str:
    """As a terminal shows it, without what is bold or underlined there, and its words one space apart."""
    text = subprocess.run(
        [needed.program("mandoc"), "-T", "utf8", page], capture_output=True, text=True, check=True
    ).stdout
    return " ".join(re.sub(".\b", "", text).split())


def commands(path: str, command: click.Command) -> Iterator[str]:
    """A command and all below it, with dashes."""
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(f"{path}-{name}", child)


def test_every_command_has_a_page_that_says_what_it_is(pages: Path) -> None:
    assert {page.name for page in pages.iterdir()} == {f"{name}.1" for name in commands("sidestep", cli)}
    for page in pages.iterdir():
        name, _, what = shown(page).partition("NAME ")[2].partition(" SYNOPSIS ")[0].partition(" - ")
        assert name == page.stem
        assert what[0].isupper()
        assert not what.endswith(".")


def test_the_pages_are_well_formed(pages: Path) -> None:
    subprocess.run([needed.program("mandoc"), "-T", "lint", "-W", "warning", *pages.iterdir()], check=True)


def test_a_page_has_all_that_the_help_says(pages: Path) -> None:
    run = shown(pages / "sidestep-run.1")
    assert "sidestep run [OPTIONS] [--] CMD [ARG]..." in run
    assert "--ring-size BYTES Size of a channel in each direction, such as 256K." in run
    assert "[0<=x<=10000]" in run
    assert "SEE ALSO sidestep(1)" in run
    rules = shown(pages / "sidestep-gateway.1")
    assert "'tcp LISTEN to sdp TARGET [via PORT] [max COUNT] [from NETWORKS] [else tcp]'" in rules
    top = shown(pages / "sidestep.1")
    assert "RDMA and SDP gateway Relay between TCP and SDP, for hosts that know only one." in top
    assert "ENVIRONMENT SIDESTEP_SOCKET" in top
    assert "sidestep-run(1)" in top
