"""`sidestep demote` and `sidestep promote`: live connections back to TCP, and onto shared memory again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import click

from sidestep import limits
from sidestep.cli.options import json_option, matching, selection_options, socket_option, together
from sidestep.cli.shown import show
from sidestep.errors import Misuse, Unavailable
from sidestep.observe.demotion import TEXT, Order, Outcome, Result, order

_PORT_MAX: Final = 65535
_options = together(
    click.argument("address", nargs=-1, metavar="[[ADDRESS]:PORT]..."),
    selection_options,
    click.option("--all", "everything", is_flag=True, help="All connections at this provider."),
    click.option("--timeout", type=click.FloatRange(min=0), default=limits.ORDER_TIMEOUT_S, show_default=True,
                 help="Seconds to wait until it is done."),
    socket_option,
    json_option,
)  # fmt: skip


@click.command()
@_options
def demote(**arguments: Any) -> None:
    """Send live connections back to TCP, losing nothing; they stay there until `sidestep promote`.

    Chosen by the ADDRESS:PORT of either end as `sidestep ss` shows it, by :PORT, or by options, all of which must fit;
    --all for all. Demoting one end is enough. Waits until both directions are on TCP.

    Exit codes: 0 all are on TCP, 1 some are not, none fits, or no provider answers.
    """
    _run(Order.DEMOTE, **arguments)


@click.command()
@_options
def promote(**arguments: Any) -> None:
    """Let connections that `sidestep demote` sent back to TCP be promoted again.

    Chosen as for `sidestep demote`; an end that was demoted must be promoted, not only the other one. Waits until both
    directions use shared memory. A connection that was never promoted may be from then on. What keeps a connection on
    TCP for good, such as urgent data, stands.

    Exit codes: 0 done, 1 some stay on TCP, none fits, or no provider answers.
    """
    _run(Order.PROMOTE, **arguments)


def _run(
    what: Order, *, address: tuple[str, ...], pid: tuple[int, ...], program: tuple[str, ...], port: tuple[int, ...],
    everything: bool, timeout: float, socket: Path, as_json: bool,
) -> None:  # fmt: skip
    if everything == bool(address or pid or program or port):
        raise click.UsageError("name connections by [ADDRESS]:PORT, --pid, --program or --port, or give --all alone")
    for one in address:
        _, colon, number = one.rpartition(":")
        if not (colon and number.isdecimal() and int(number) <= _PORT_MAX):
            raise Misuse(
                f"{one!r} is not ADDRESS:PORT or :PORT",
                remedy="copy one from 'sidestep ss'; a process is named by --pid, a program by --program",
            )
    outcomes = order(socket, what, matching(pid, program, port, address), timeout)
    if not outcomes and not everything:
        raise Unavailable("no connection under sidestep fits", remedy="'sidestep ss' lists all")
    show({"connections": [outcome.as_json() for outcome in outcomes]}, map(_line, outcomes), as_json=as_json)
    if not all(outcome.done for outcome in outcomes):
        sys.exit(1)


def _line(outcome: Outcome) -> str:
    found = outcome.connection
    why = f": {found.why}" if outcome.result in (Result.STAYS, Result.PENDING) and found.why else ""
    return f"{found.who} {found.pid}  {found.local} {found.remote}  {TEXT[outcome.result]}{why}"
