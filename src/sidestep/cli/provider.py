"""`sidestep provider`: start, stop, status."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from sidestep import config, limits
from sidestep.cli.options import json_option, promote_after_option, ring_size_option, socket_option
from sidestep.config import PromoteAfter, ProviderSettings
from sidestep.provider import control, daemon


@click.group()
def provider() -> None:
    """Start, stop or look at the provider, which pairs the two ends of a connection.

    `sidestep run` starts one by itself. Ending it, even by kill -9, disturbs no connection.
    """


@provider.command()
@promote_after_option(
    str(PromoteAfter()),
    "The shims' default: promote after so many reads and writes, or bytes; CALLS alone means CALLS:65536.",
)
@ring_size_option(f"{limits.RING_SIZE_DEFAULT >> 10}K", "The shims' default: size of a channel in each direction.")
@click.option("--offer-expiry", type=click.FloatRange(0.01, 3600), default=limits.OFFER_EXPIRY_S, show_default=True,
              help="Seconds until an offer that nobody claims is refused.")  # fmt: skip
@click.option("--idle-exit", type=click.FloatRange(0), default=limits.IDLE_EXIT_S, show_default=True,
              help="Seconds without programs until the provider leaves; 0: never.")  # fmt: skip
@click.option("--budget", type=click.IntRange(0), default=0,
              help="Bytes of all channels together (default: the machine's memory).")  # fmt: skip
@click.option("--foreground", is_flag=True, help="Serve in this process, until a signal or `stop`.")
@socket_option
@json_option
def start(
    promote_after: PromoteAfter,
    ring_size: int,
    offer_expiry: float,
    idle_exit: float,
    budget: int,
    foreground: bool,
    socket: Path | None,
    as_json: bool,
) -> None:
    """Start a provider, and return once it listens. Exit code 0 also if one runs already.

    With --foreground, return once it has ended, and fail if one runs already.
    """
    path = config.socket_path(socket)
    settings = ProviderSettings(path, promote_after, ring_size, offer_expiry, idle_exit, budget)

    def tell(pid: int, started: bool, text: str) -> None:
        if as_json:
            click.echo(json.dumps({"pid": pid, "started": started, "socket": str(path)}))
        else:
            click.echo(f"provider {pid} {text} {path}", err=True)

    if foreground:
        daemon.serve(settings, on_ready=lambda: tell(os.getpid(), True, "serves"))
        return
    started = control.start(settings)
    with control.ControlConnection(path) as connection:
        pid = connection.status()["pid"]
    tell(pid, started, "started at" if started else "runs already at")


@provider.command()
@socket_option
@json_option
def stop(socket: Path | None, as_json: bool) -> None:
    """Stop the provider. Promoted connections go on; new ones stay on TCP until the next provider."""
    pid = control.stop(config.socket_path(socket))
    if as_json:
        click.echo(json.dumps({"pid": pid, "stopped": True}))
    else:
        click.echo(f"provider {pid} stopped", err=True)


@provider.command()
@socket_option
@json_option
def status(socket: Path | None, as_json: bool) -> None:
    """Show the provider's settings and counters. Exit code 1 if none answers."""
    with control.ControlConnection(config.socket_path(socket)) as connection:
        found = connection.status()
    if as_json:
        click.echo(json.dumps(found))
        return
    counters = found.pop("counters")
    width = max(map(len, [*found, *counters]))
    for name, value in [*found.items(), *counters.items()]:
        click.echo(f"{name:<{width}}  {value}")
