"""`sidestep run`: start a program under the shim."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from sidestep import config
from sidestep.cli.options import promote_after_option, ring_size_option, socket_option
from sidestep.config import PromoteAfter, ProviderSettings, ShimSettings
from sidestep.errors import Unavailable
from sidestep.observe import preload_check as reach
from sidestep.provider import control

EXIT_NOT_EXECUTABLE = 126  # as env and the shell have it
EXIT_NOT_FOUND = 127


@click.command(context_settings={"allow_interspersed_args": False})
@promote_after_option(None, "Promote after so many reads and writes, or bytes (left out: 65536); 0: at once.")
@ring_size_option(None, "Size of a channel in each direction, such as 256K.")
@click.option(
    "--spin-us", type=click.IntRange(0, config.SPIN_US_MAX), help="How long a wait may spin before it sleeps; 0: never."
)
@socket_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] CMD [ARG]...")
def run(
    promote_after: PromoteAfter | None,
    ring_size: int | None,
    spin_us: int | None,
    socket: Path | None,
    command: tuple[str, ...],
) -> None:
    """Run CMD; its TCP connections to other such programs on this host go through shared memory.

    A provider is started if none runs. Where something is missing CMD runs on plain TCP, and stderr says why. Ends as
    CMD does; 126 if CMD cannot be executed, 127 if it is not found.
    """
    path = config.socket_path(socket)
    settings = ShimSettings(path, promote_after, ring_size, spin_us)
    env = dict(os.environ)
    try:
        env = settings.environment(env)
        control.start(ProviderSettings(path, policy=config.policy_places(os.environ)))
    except Unavailable as error:
        _warn(f"plain TCP for now: {error}")
    program = shutil.which(command[0])
    obstacles = reach.obstacles(Path(program)) if program else ()
    for obstacle in obstacles:
        _warn(f"{command[0]} {obstacle.verdict}; {obstacle.remedy}")
    try:
        os.execvpe(command[0], command, env)  # noqa: S606 - starting the user's program is the job
    except OSError as error:
        if isinstance(error, FileNotFoundError) and program is None:
            _warn(f"{command[0]} is not found")
            sys.exit(EXIT_NOT_FOUND)
        if not any(obstacle.stops_it for obstacle in obstacles):
            why = "its loader is not found" if isinstance(error, FileNotFoundError) else error.strerror
            _warn(f"{command[0]} cannot be executed: {why}")
        sys.exit(EXIT_NOT_EXECUTABLE)


def _warn(text: str) -> None:
    click.echo(f"sidestep: {text}", err=True)
