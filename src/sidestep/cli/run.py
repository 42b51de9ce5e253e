"""`sidestep run`: start a program under the shim."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sidestep.cli.options import promote_after_option, ring_size_option, socket_option
from sidestep.native import defaults

if TYPE_CHECKING:
    from pathlib import Path

    from sidestep.settings import PromoteAfter


@click.command(context_settings={"allow_interspersed_args": False})
@promote_after_option(None, "Promote after so many reads and writes, or bytes (left out: 65536); 0: at once.")
@ring_size_option(None, "Size of a channel in each direction, such as 256K.")
@click.option(
    "--spin-us",
    type=click.IntRange(0, defaults.SPIN_US_MAX),
    help="Microseconds that a wait may spin before it sleeps; 0: never.",
)
@click.option(
    "--no-carry", is_flag=True, help="Leave out the programs that CMD starts with an environment of its own making."
)
@click.option("--require", is_flag=True, help="Do not start CMD where it would run on plain TCP: exit code 125.")
@click.option("--stats", is_flag=True, help="Say on stderr, when CMD has ended, what was saved.")
@socket_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] CMD [ARG]...")
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
    """Run CMD; its TCP connections to other such programs on this host go through shared memory.

    A provider is started if none runs. Where something is missing CMD runs on plain TCP, and stderr says why. Lasting
    causes (CMD is static; root's own provider leaves others out) are shown on a terminal only, and in the file
    SIDESTEP_LOG. Ends as CMD does; 126 if CMD cannot be executed, 127 if it is not found.

    What CMD starts is under sidestep, too. So is a program whose environment its
    starter has made anew, as 'env -i' and nginx's upgrade do, unless --no-carry is given.

    Without --stats this process becomes CMD. With it CMD is its child, and gets its signals. The
    connections of CMD and its forks are counted as far as 'sidestep ss --ended' knows them.
    """
    from sidestep.cli.start import start  # the help page needs neither
    from sidestep.places import ShimSettings

    settings = ShimSettings(socket, promote_after, ring_size, spin_us, carry=not no_carry)
    start([*command], settings, require=require, stats=stats)
