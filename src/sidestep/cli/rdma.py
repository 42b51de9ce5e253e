"""`sidestep rdma`: devices, and tools that use them."""

from __future__ import annotations

from typing import Final

import click

from sidestep.cli.group import LazyGroup

COMMANDS: Final = {
    "list": ("List the RDMA devices of running processes.", "sidestep.cli.rdma_list:list_"),
    "server": ("Serve `sidestep rdma ping` and `bw`, and rping of librdmacm.", "sidestep.cli.rdma_server"),
    "ping": ("Measure how long RDMA Sends take to a server and back.", "sidestep.cli.rdma_ping"),
    "bw": ("Measure the bandwidth of RDMA Writes, Reads or Sends to a server.", "sidestep.cli.rdma_bw"),
    "bench": ("Compare TCP, rsockets, verbs and sidestep between two hosts.", "sidestep.cli.rdma_bench"),
    "profile": ("Measure which connections gain by the way to another host.", "sidestep.cli.rdma_profile"),
}


@click.group(cls=LazyGroup, lazy={"Commands": COMMANDS})
def rdma() -> None:
    """RDMA on any machine: what devices there are, and tools to try them.

    Two devices are RDMA adapters made of software, which need neither privileges nor hardware. `iwarp` speaks iWARP
    over TCP, `roce` InfiniBand's reliable connections over UDP (RoCEv2). `verbs` is one of the kernel's.
    """
