"""`sidestep top`: what goes on, live."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from sidestep.cli.options import json_option, socket_option
from sidestep.cli.shown import show
from sidestep.cli.top_view import SORTS, frame, ordered, rate_as_json
from sidestep.observe.traffic import View, compare, take_sample

_WIDTH_PIPED = 120  # columns of a frame that goes into a file or a pipe
_HEIGHT_LEFT = 3  # lines of a terminal that a frame leaves: its headings, and the prompt


@click.command()
@click.option("--interval", type=click.FloatRange(0.1, 3600), default=2.0, show_default=True, metavar="SECONDS",
              help="Seconds between two looks.")  # fmt: skip
@click.option(
    "--sort", type=click.Choice(list(SORTS)), default="messages", show_default=True, help="Order of the rows."
)
@click.option("--filter", "wanted", default="", metavar="TEXT",
              help="Only rows that hold it: part of a program's name, pid, address, state or reason.")  # fmt: skip
@click.option("--once", is_flag=True, help="Print one frame, of one interval, and end.")
@socket_option
@json_option
def top(interval: float, sort: str, wanted: str, once: bool, socket: Path, as_json: bool) -> None:
    """Watch the connections under sidestep: what goes through each, how much of it by ring, and at what cost.

    Rates are per second: messages, bytes, and wake-ups for the other end. RING is the share of the bytes. SLEEP and
    SPIN are waits for each message by ring. Each RDMA device of the provider has a line with its connections, and the
    packets or bytes that it sends and receives.

    Keys: s sort, r reverse, / filter, Enter explains a connection, space pauses, + and - change the interval, q quits.

    Exit code 1 with --once or --json if no provider answers; the live screen waits for one.
    """
    if once or as_json:
        before = take_sample(socket)
        time.sleep(interval)
        view = compare(before, take_sample(socket))
        show(_as_json(view, sort, wanted), _frame(view, sort, wanted, socket), as_json=as_json, indent=1)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("the live screen needs a terminal; use --once or --json")
    from sidestep.cli.top_app import TopApp  # the screen library takes 0.3 s to load

    TopApp(socket, interval_s=interval, sort=sort, wanted=wanted).run()


def _frame(view: View, sort: str, wanted: str, path: Path) -> list[str]:
    rows = ordered(view, sort, wanted)
    if not sys.stdout.isatty():
        return frame(view, rows, str(path), _WIDTH_PIPED)
    width, height = shutil.get_terminal_size()
    return frame(view, rows, str(path), width)[: max(1, height - _HEIGHT_LEFT)]


def _as_json(view: View, sort: str, wanted: str) -> dict[str, object]:
    return {
        "seconds": round(view.seconds, 6),
        "total": rate_as_json(view.total),
        "states": dict(view.states),
        "reasons": dict(view.reasons),
        "connections": [
            one.connection.as_json() | {"rate": rate_as_json(one.rate)} for one in ordered(view, sort, wanted)
        ],
        "devices": [asdict(one) for one in view.devices],
        "provider": dict(view.after.status),
    }
