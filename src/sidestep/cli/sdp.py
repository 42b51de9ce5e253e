"""`sidestep sdp`: the Sockets Direct Protocol, looked at."""

from __future__ import annotations

from typing import Final

import click

from sidestep.cli.group import LazyGroup

COMMANDS: Final = {
    "decode": ("Show SDP messages in words.", "sidestep.cli.sdp_decode"),
    "simulate": ("Play a conversation of two SDP ends and print its messages.", "sidestep.cli.sdp_simulate"),
}


@click.group(cls=LazyGroup, lazy={"Commands": COMMANDS})
def sdp() -> None:
    """The Sockets Direct Protocol: messages and captures in words, and conversations to look at."""
