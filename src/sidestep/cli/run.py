"""`sidestep run`: start a program under the shim."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sidestep.cli.options import promote_after_option, ring_size_option, socket_option
from sidestep.cli.run_help import ABOUT, OPTIONS, USAGE, page
from sidestep.native import defaults

if TYPE_CHECKING:
    from pathlib import Path

    from sidestep.settings import PromoteAfter


class _Run(click.Command):
    """The command, whose help page needs no click."""

    def get_help(self, ctx: click.Context) -> str:
        return page()


def _words(name: str) -> Any:
    value, text = OPTIONS[name]
    return {"metavar": value or None, "help": text}


@click.command(cls=_Run, context_settings={"allow_interspersed_args": False}, help=ABOUT)
@promote_after_option(None, OPTIONS["--promote-after"][1])
@ring_size_option(None, OPTIONS["--ring-size"][1])
@click.option("--spin-us", type=click.IntRange(0, defaults.SPIN_US_MAX), **_words("--spin-us"))
@click.option("--no-carry", is_flag=True, **_words("--no-carry"))
@click.option("--require", is_flag=True, **_words("--require"))
@click.option("--stats", is_flag=True, **_words("--stats"))
@socket_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar=USAGE)
def run(
    promote_after: PromoteAfter | None,
    ring_size: int | None,
    spin_us: int | None,
    no_carry: bool,
    require: bool,
    stats: bool,
    socket: Path,
    command: tuple[str, ...],
) -> None:
    from sidestep.cli.start import start  # wrong usage needs neither
    from sidestep.places import ShimSettings

    settings = ShimSettings(socket, promote_after, ring_size, spin_us, carry=not no_carry)
    start([*command], settings, require=require, stats=stats)
