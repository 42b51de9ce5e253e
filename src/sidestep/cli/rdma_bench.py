"""`sidestep rdma bench` and `profile`: RDMA, rsockets, TCP and sidestep between two hosts, in figures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from sidestep import config
from sidestep.cli.options import json_option, parsed, socket_option
from sidestep.cli.rdma_options import flush
from sidestep.cli.shown import printable, show, table
from sidestep.demo import hosts_server
from sidestep.demo.hosts import DEFAULT_PORT, Way, Work
from sidestep.demo.hosts_client import Client, Report, Row
from sidestep.demo.profile import measure
from sidestep.errors import Misuse
from sidestep.rdma.tools.devices import HostPort, resolve

_UNITS = {Work.LATENCY: "us", Work.MESSAGES: "/s", Work.BANDWIDTH: "MB/s"}


@click.command()
@click.argument(
    "server", metavar="[HOST[:PORT]]", required=False,
    callback=parsed(lambda text: HostPort.parse(text, DEFAULT_PORT)),
)  # fmt: skip
@click.option("--serve", is_flag=True, help="Be the other host, for one client at a time, until Ctrl-C.")
@click.option("--address", metavar="ADDRESS", default="0.0.0.0", show_default=True,  # noqa: S104 - as it says
              help="Address to listen at, with --serve.")  # fmt: skip
@click.option("--port", type=click.IntRange(1, 65534), default=DEFAULT_PORT, show_default=True,
              help="Port to listen at, with --serve; the next one is used as well.")  # fmt: skip
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    help="Number of rounds; the median is reported.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 60),
    default=1,
    show_default=True,
    help="Length of one measurement, in seconds.",
)
@socket_option
@json_option
def bench(
    server: HostPort | None, serve: bool, address: str, port: int, rounds: int, seconds: float, socket: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Compare TCP, rsockets, verbs and sidestep between two hosts: a round trip, small messages, large pieces.

    On one host start it with --serve, on the other with the address of the first that leads over the adapter. rstream
    (Debian: rdmacm-utils) measures TCP, rsockets, and TCP under sidestep, by the provider of each host, which has to
    run with --remote; ib_send_lat and ib_send_bw (Debian: perftest) measure verbs. What cannot be measured says why.
    Let the two ports through; who reaches the first may have this host measure.

    With --json figures of every round are printed, with machines, devices and firmware.

    Exit code 1 if the other host does not answer, or nothing was measured.
    """
    if serve == (server is not None):
        raise Misuse("either --serve, or the host that has been started with it", remedy="sidestep rdma bench --help")
    if server is None:
        _serve(address, port, config.socket_path(socket))
        return
    tell = (lambda _: None) if as_json or not sys.stderr.isatty() else lambda text: click.echo(text, err=True)
    with Client(resolve(server.host)[0], server.port, config.socket_path(socket)) as client:
        report = client.measure(rounds=rounds, seconds=seconds, tell=tell)
    show(_as_json(report), map(printable, _lines(report)), as_json=as_json)
    if not any(row.microseconds for row in report.rows):
        sys.exit(1)


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


def _serve(address: str, port: int, provider: Path) -> None:
    with hosts_server.listening(address, port) as listener:
        click.echo(f"listening at {HostPort(address, port)}")
        flush()
        try:
            hosts_server.serve(listener, provider, lambda line: click.echo(printable(line), err=True))
        except KeyboardInterrupt:
            return


def _as_json(report: Report) -> dict[str, Any]:
    rows = [
        {
            "way": row.way,
            "problem": row.problem,
            "round_trip_us": row.value(Work.LATENCY),
            "messages_per_s": row.value(Work.MESSAGES),
            "mb_per_s": row.value(Work.BANDWIDTH),
            "message_us": {str(work): found for work, found in row.microseconds.items()},
            "carried": {str(work): found for work, found in row.carried.items()},
        }
        for row in report.rows
    ]
    return {"client": report.here, "server": report.there, "rows": rows}


def _lines(report: Report) -> Iterator[str]:
    for name, host in (("client", report.here), ("server", report.there)):
        machine = host["machine"]
        yield f"{name}: {machine['processor']}, {machine['cpus']} CPUs, {machine['kernel']}, sidestep {host['version']}"
        for device in host["devices"]:
            ports = ", ".join(f"{each['link_layer']} {each['rate']} {each['state']}" for each in device["ports"])
            yield f"  {device['name']}, firmware {device['firmware'] or 'unknown'}: {ports}"
    base = next(row for row in report.rows if row.way is Way.TCP)
    heads = ["", "round trip of 64 B", "64 B messages", "64 KiB pieces"]
    yield from table(
        [heads, *([row.way, *(_cell(row, base, work) for work in Work)] for row in report.rows)], right={1, 2, 3}
    )
    for row in report.rows:
        if row.problem:
            yield f"{row.way}: {row.problem}"
        for work, carried in row.carried.items():
            yield f"{row.way}, {work}: {carried}"


def _cell(row: Row, base: Row, work: Work) -> str:
    """The figure, and how many times better than TCP it is."""
    value, median, tcp = row.value(work), row.median(work), base.median(work)
    if value is None or median is None:
        return "-"
    ratio = f"  {tcp / median:.2f}x" if tcp is not None and row is not base else ""
    return f"{value:,.1f} {_UNITS[work]}{ratio}" if value < 1000 else f"{value:,.0f} {_UNITS[work]}{ratio}"
