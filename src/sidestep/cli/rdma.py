"""`sidestep rdma`: devices, and tools that use them."""

from __future__ import annotations

from typing import Final

import click

from sidestep.cli import LazyGroup

COMMANDS: Final = {
    "list": "sidestep.cli.rdma_list:list_",
    "server": "sidestep.cli.rdma_server",
    "ping": "sidestep.cli.rdma_ping",
    "bw": "sidestep.cli.rdma_bw",
}


@click.group(cls=LazyGroup, modules=COMMANDS)
def rdma() -> None:
    """RDMA on any machine: what devices there are, and tools to try them.

    The device `iwarp` is an RDMA adapter made of software: it speaks iWARP over TCP and needs neither privileges nor
    hardware.
    """
