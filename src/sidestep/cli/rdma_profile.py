"""`sidestep rdma profile`: what the way to another host gains and loses over TCP."""

from __future__ import annotations

import sys

import click

from sidestep.cli.options import json_option
from sidestep.cli.shown import show
from sidestep.demo.profile import measure


@click.command()
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Of which the medians count.")
@click.option("--seconds", type=click.FloatRange(0.1, 60), default=0.5, show_default=True, help="Of one measurement.")
@click.option("--transport", default="iwarp", metavar="NAME", show_default=True, help="Transport that carries SDP.")
@json_option
def profile(rounds: int, seconds: float, transport: str, as_json: bool) -> None:
    """Measure by what figures connections with other hosts leave TCP, on this machine.

    Two hosts are made of network namespaces, which takes root, and joined by a bridge. A stream of 64-byte messages,
    one of 64 KiB pieces, and a conversation pass between them over TCP and by SDP, in turns. From that come three
    figures in microseconds: what each message gains, and what each MiB and each turn of a conversation lose. Give them
    to the provider, which judges by those of the machine that sidestep was measured on otherwise; given ones count for
    all transports.

    Exit code 1 if this user may make no namespaces, or nothing was carried.
    """
    tell = (lambda _: None) if as_json or not sys.stderr.isatty() else lambda text: click.echo(text, err=True)
    found = measure(rounds=rounds, seconds=seconds, tell=tell, transports=transport)
    lines = [
        f"each message gains  {found.message_us:10,.1f} us",
        f"each MiB loses      {found.mib_us:10,.1f} us",
        f"each turn loses     {found.turn_us:10,.1f} us",
        f"sidestep provider start --remote NETWORKS --remote-promote {found}",
    ]
    show(found._asdict() | {"option": f"--remote-promote={found}"}, lines, as_json=as_json)
