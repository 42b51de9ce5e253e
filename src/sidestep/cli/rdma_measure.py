"""`sidestep rdma ping` and `bw`: time of a message there and back, and how much goes through."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from sidestep.cli.options import json_option
from sidestep.cli.rdma_options import ToolClient, device_options, flush, server_argument, size_option, timeout_option
from sidestep.cli.shown import show
from sidestep.rdma.tools import client
from sidestep.rdma.tools.bandwidth import Bandwidth
from sidestep.rdma.tools.client import Measured, Pinging, Pings
from sidestep.rdma.tools.devices import HostPort, interruptible
from sidestep.rdma.tools.talk import Pinger
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
    show(_ping_json(pings, place, size, details), _ping_lines(pings, place), as_json=as_json)
    if pings.error is not None:
        raise pings.error
    if pings.wrong or not pings.round_trips_ns:
        sys.exit(1)


def _ping_lines(pings: Pings, place: HostPort | None) -> Iterator[str]:
    back = len(pings.round_trips_ns)
    yield f"--- {place}: {pings.sent} sent, {back} came back, {pings.wrong} with other contents ---"
    if found := pings.summary():
        yield "round trip " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()) + " us"


def _ping_json(pings: Pings, place: HostPort | None, size: int, details: dict[str, object]) -> dict[str, object]:
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


@click.command()
@server_argument
@click.option("--op", "operation", type=click.Choice(["write", "read", "send"]), default="write", show_default=True,
              help="Operation for each message.")  # fmt: skip
@size_option("1M", "Bytes of a message; with K or M as a suffix.")
@click.option("--duration", type=click.FloatRange(0.01, 86400), default=5.0, show_default=True, help="Seconds.")
@click.option("--depth", type=click.IntRange(1), default=16, show_default=True, help="Messages under way at a time.")
@click.option("--both", is_flag=True, help="The server does the same at the same time.")
@click.option("--no-verify", is_flag=True, help="Do not compare contents.")
@timeout_option
@device_options
@json_option
def bw(
    server: HostPort, operation: str, size: int, duration: float, depth: int, both: bool, no_verify: bool,
    timeout: float, device: str, no_crc: bool, markers: bool, as_json: bool,
) -> None:  # fmt: skip
    """Measure the bandwidth of RDMA Writes, Reads or Sends to `sidestep rdma server` at HOST.

    Contents are compared: each message that is sent or read, and of Writes, which all go to the same place, what lies
    there at the end. MB are 10^6 bytes, payload only, and with --both of the two directions together; CPU is
    processor time of the client's and of the server's process, in percent of one processor. Ctrl-C ends it with the
    summary.

    Exit code 1 if there was no connection, it broke, or contents differ.
    """
    terms = Terms(Op[operation.upper()], size, depth, both, not no_verify)
    if terms.problem:
        raise click.UsageError(terms.problem)
    with ToolClient(device, "sidestep rdma bw", no_crc=no_crc, markers=markers) as made:
        with interruptible(made.loop, made.stop):
            talk = made.connect(server, lambda device, failed: Bandwidth(device, terms, failed, active=True), timeout)
            measured = client.measure(made.loop, talk, made.session, duration, timeout)
        place, details = made.place, made.details()
    show(_bw_json(measured, terms, place, details), _bw_lines(measured, terms, place, details), as_json=as_json)
    if not measured.complete:
        click.echo(f"sidestep: the server did not say within {timeout:g} seconds that it has everything", err=True)
    if measured.wrong:
        click.echo(f"sidestep: contents of {measured.wrong} messages differ", err=True)
    if measured.wrong or not measured.complete:
        sys.exit(1)


def _figures(measured: Measured, terms: Terms) -> dict[str, float]:
    messages = measured.messages + measured.remote_messages
    rate = messages / measured.seconds
    return {
        "bytes_per_s": rate * terms.size,
        "messages_per_s": rate,
        "cpu_percent": 100 * measured.cpu_s / measured.seconds,
        "remote_cpu_percent": 100 * measured.remote_cpu_s / measured.seconds,
    }


def _bw_lines(measured: Measured, terms: Terms, place: HostPort | None, details: dict[str, object]) -> list[str]:
    found = _figures(measured, terms)
    op = terms.op.name.lower() + (" both" if terms.both else "")
    head = f"{place}: depth {terms.depth}, {_wire(details)}, contents {'compared' if terms.verify else 'not compared'}"
    row = {
        "OP": op, "BYTES": str(terms.size), "MESSAGES": str(measured.messages + measured.remote_messages),
        "SECONDS": f"{measured.seconds:.2f}", "MB/s": f"{found['bytes_per_s'] / 1e6:.1f}",
        "Gb/s": f"{found['bytes_per_s'] * 8 / 1e9:.2f}", "MSG/s": f"{found['messages_per_s']:.0f}",
        "CPU%": f"{found['cpu_percent']:.0f}", "SERVER CPU%": f"{found['remote_cpu_percent']:.0f}",
    }  # fmt: skip
    widths = [max(len(name), len(cell)) for name, cell in row.items()]
    rows = (row, row.values())
    return [head, *("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in rows)]


def _wire(details: dict[str, object]) -> str:
    if "mtu" in details:
        return f"path MTU {details['mtu']}"
    return (
        f"CRC32C {'on' if details.get('crc') else 'off'}, markers {_markers(details)}, MULPDU {details.get('mulpdu')}"
    )


def _markers(details: dict[str, object]) -> str:
    """Each end asks for them in what it receives, for itself alone (RFC 5044, section 4.3)."""
    ways = [way for way in ("sent", "received") if details.get(f"markers_{way}")]
    return f"in what is {' and '.join(ways)}" if ways else "off"


def _bw_json(measured: Measured, terms: Terms, place: HostPort | None, details: dict[str, object]) -> dict[str, object]:
    return {
        "server": str(place),
        "op": terms.op.name.lower(),
        "both": terms.both,
        "size": terms.size,
        "depth": terms.depth,
        "verified": terms.verify,
        "messages": measured.messages,
        "remote_messages": measured.remote_messages,
        "wrong": measured.wrong,
        "complete": measured.complete,
        "seconds": round(measured.seconds, 6),
        **{name: round(value, 3) for name, value in _figures(measured, terms).items()},
        "queue_pair": details,
    }
