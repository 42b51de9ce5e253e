"""`sidestep metrics`: for Prometheus."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from sidestep.cli.options import parsed, socket_option
from sidestep.observe.metrics import Exporter, MetricsServer, parse_listen


@click.command()
@click.option(
    "--listen",
    metavar="[ADDRESS:]PORT|unix:PATH",
    callback=parsed(parse_listen),
    help="Serve them there by HTTP until a signal comes; without ADDRESS for this host only (127.0.0.1).",
)
@socket_option
def metrics(listen: tuple[str, int] | Path | None, socket: Path) -> None:
    """Print metrics in Prometheus' text format, or serve them.

    Connections by state and reason, bytes and messages by path and direction, and the provider's counters. Counts of
    connections that have ended are kept while this command serves, so its counters never go down. Of connections that
    come and go between two scrapes, those are lost whose place in their program's memory was used again. A UNIX socket
    is for this user only. The provider may come and go.

    Exit code 1 if it cannot listen there.
    """
    exporter = Exporter(socket)
    if listen is None:
        click.echo(exporter.text(), nl=False)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with MetricsServer(listen, exporter) as server:
        click.echo(f"metrics at {server.url}", err=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
