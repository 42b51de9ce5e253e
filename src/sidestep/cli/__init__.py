"""The `sidestep` command: one file a subcommand, loaded when it is used.

stdout is data, stderr is talk. Exit codes: 0 done, 1 could not be done, 2 wrong usage; `sidestep run` ends as its
program does.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Mapping
from typing import Any, Final

import click

from sidestep import __version__
from sidestep.errors import SidestepError

# Name -> module that defines a click command of that name, or MODULE:NAME of it. In the order of the help page.
COMMANDS: Final = {
    "run": "sidestep.cli.run",
    "ss": "sidestep.cli.ss",
    "explain": "sidestep.cli.explain",
    "top": "sidestep.cli.top",
    "metrics": "sidestep.cli.metrics",
    "demote": "sidestep.cli.demote",
    "promote": "sidestep.cli.demote",
    "policy": "sidestep.cli.policy",
    "check": "sidestep.cli.check",
    "doctor": "sidestep.cli.doctor",
    "provider": "sidestep.cli.provider",
    "gateway": "sidestep.cli.gateway",
    "sdp": "sidestep.cli.sdp",
    "rdma": "sidestep.cli.rdma",
    "capture": "sidestep.cli.capture",
    "demo": "sidestep.cli.demo",
}


class LazyGroup(click.Group):
    """A group that imports a subcommand only when it is asked for: `sidestep run` must not pay for tables."""

    def __init__(self, *args: Any, modules: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        module, _, name = self.modules[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name or cmd_name)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.modules[cmd_name]}.{cmd_name} is not a command")
        return command


@click.group(
    cls=LazyGroup, modules=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="sidestep")
def cli() -> None:
    """Run TCP programs over shared memory, unchanged.

    Exit codes: 0 done, 1 could not be done, 2 wrong usage; `run` ends as its program does.
    """


def main() -> None:
    """The entry point: errors of ours become two lines on stderr and exit code 1."""
    try:
        cli(prog_name="sidestep")
    except SidestepError as error:
        click.echo(f"sidestep: {error.message}", err=True)
        if error.remedy:
            click.echo(f"hint: {error.remedy}", err=True)
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        click.echo(f"sidestep: not all of it could be written: {error.strerror}", err=True)
        click.echo("hint: make room, or write elsewhere", err=True)
        sys.exit(1)
