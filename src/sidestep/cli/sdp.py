"""`sidestep sdp`: the Sockets Direct Protocol, looked at."""

from __future__ import annotations

from typing import Final

import click

from sidestep.cli import LazyGroup

COMMANDS: Final = {"decode": "sidestep.cli.sdp_decode", "simulate": "sidestep.cli.sdp_simulate"}


@click.group(cls=LazyGroup, modules=COMMANDS)
def sdp() -> None:
    """The Sockets Direct Protocol: messages and captures in words, and conversations to look at."""
