"""`sidestep rdma ping`: how long a message takes there and back."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from sidestep.cli.options import json_option
from sidestep.cli.rdma_options import ToolClient, device_options, flush, server_argument, size_option, timeout_option
from sidestep.cli.shown import show
from sidestep.rdma.tools import client
from sidestep.rdma.tools.client import Pinging, Pings
from sidestep.rdma.tools.devices import HostPort, interruptible
from sidestep.rdma.tools.echo import Pinger
from sidestep.rdma.tools.terms import Op, Terms


@click.command()
@server_argument
@click.option("-n", "--count", type=click.IntRange(0), default=10, show_default=True,
              help="Messages; 0: until Ctrl-C.")  # fmt: skip
@size_option("64", "Bytes of a message; with K or M as a suffix.")
@click.option("-i", "--interval", type=click.FloatRange(0, 3600), default=0.1, show_default=True,
              help="Seconds between two messages; 0: at once.")  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Only the summary.")
@click.option("--no-verify", is_flag=True, help="Do not compare what comes back.")
@timeout_option
@device_options
@json_option
def ping(
    server: HostPort, count: int, size: int, interval: float, quiet: bool, no_verify: bool, timeout: float,
    device: str, no_crc: bool, markers: bool, as_json: bool,
) -> None:  # fmt: skip
    """Measure how long RDMA Sends take to `sidestep rdma server` at HOST and back.

    Ctrl-C ends it with the summary. With --json one object for the whole is printed at the end.

    Exit code 1 if there was no connection, no answer, or one with other contents.
    """
    terms = Terms(Op.PING, size, verify=not no_verify)
    if terms.problem:
        raise click.BadParameter(terms.problem, param_hint="--size")
    with ToolClient(device, "sidestep rdma ping", no_crc=no_crc, markers=markers) as made:
        with interruptible(made.loop, made.stop):
            talk = made.connect(server, lambda device, failed: Pinger(device, terms, failed), timeout)
            place = made.place

            def tell(number: int, round_trip_ns: int, wrong: bool) -> None:
                if not (as_json or quiet):
                    text = " CONTENTS DIFFER" if wrong else ""
                    click.echo(f"{size} bytes from {place}: seq={number} time={round_trip_ns / 1e3:.1f} us{text}")
                    flush()

            pings = client.ping(
                made.loop, talk, Pinging(count, size, interval, timeout, not no_verify), made.session, tell
            )
        details = made.details()
    show(_as_json(pings, place, size, details), _lines(pings, place), as_json=as_json)
    if pings.error is not None:
        raise pings.error
    if pings.wrong or not pings.round_trips_ns:
        sys.exit(1)


def _lines(pings: Pings, place: HostPort | None) -> Iterator[str]:
    back = len(pings.round_trips_ns)
    yield f"--- {place}: {pings.sent} sent, {back} came back, {pings.wrong} with other contents ---"
    if found := pings.summary():
        yield "round trip " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()) + " us"


def _as_json(pings: Pings, place: HostPort | None, size: int, details: dict[str, object]) -> dict[str, object]:
    return {
        "server": str(place),
        "size": size,
        "sent": pings.sent,
        "received": len(pings.round_trips_ns),
        "wrong": pings.wrong,
        "round_trip_us": {name: round(value, 3) for name, value in pings.summary().items()},
        "error": pings.error.message if pings.error is not None else None,
        "queue_pair": details,
    }
