"""`sidestep ss`: the live connections under sidestep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sidestep import config
from sidestep.cli.options import json_option, matching, selection_options, socket_option
from sidestep.cli.shown import short
from sidestep.native.layout import State
from sidestep.observe.connections import Connection, Traffic, connections

STATES: Final = tuple(state.name.lower() for state in State if state is not State.FREE)
_STYLES: Final = {"promoted": "green", "attached": "cyan", "offered": "cyan", "pinned": "yellow"}
_PIECE: Final = 500  # rows set as one table: the first lines come at once, however many there are
COLUMNS: Final = (
    "PROGRAM", "PID", "FD", "LOCAL", "REMOTE", "ROLE", "STATE", "SENT", "READ", "BELLS", "SLEEPS", "SPINS", "WHY",
)  # fmt: skip
_NUMBERS: Final = frozenset({"PID", "FD", "BELLS", "SLEEPS", "SPINS"})
_TERMINAL_COLUMNS: Final = ("PROGRAM", "PID", "FD", "CONNECTION", *COLUMNS[COLUMNS.index("STATE") :])
_WHY_WIDTH_MIN: Final = 16  # columns; narrower, a sentence becomes a tower


@click.command()
@selection_options
@click.option("--state", type=click.Choice(STATES), multiple=True, help="Only this state. May be repeated.")
@socket_option
@json_option
def ss(
    pid: tuple[int, ...],
    program: tuple[str, ...],
    port: tuple[int, ...],
    state: tuple[str, ...],
    socket: Path | None,
    as_json: bool,
) -> None:
    """List the connections of programs under sidestep: state, why, and what went which way.

    Bytes and messages are counted by path, ring or TCP. BELLS: wake-ups sent to the other end, SLEEPS and SPINS: how
    waits ended, each per message. On a terminal an arrow leads from the end that connected. Exit code 1 if no
    provider answers.
    """
    wanted = matching(pid, program, port)
    found = (
        one for one in connections(config.socket_path(socket)) if wanted(one) and (not state or one.state in state)
    )
    if as_json:
        _print_json(found)
    else:
        _print_table(found)


def _print_json(found: Iterable[Connection]) -> None:
    """One document, read to its end before its first byte is written: a provider that goes away leaves no half."""
    rows = [json.dumps(connection.as_json()) for connection in found]
    click.echo('{"connections": [' + ",".join(f"\n {row}" for row in rows) + "\n]}")


def _print_table(found: Iterator[Connection]) -> None:
    console = Console()
    show = _print_rich if console.is_terminal else _print_plain
    count = 0
    while piece := list(islice(found, _PIECE)):
        show(console, piece, with_head=count == 0)
        count += len(piece)
    if not count:
        click.echo("no connections", err=True)


def _print_rich(console: Console, piece: list[Connection], *, with_head: bool) -> None:
    """Two lines a connection, folded to the width of the terminal."""
    table = Table(box=None, show_header=with_head, pad_edge=False, header_style="bold")
    for name in _TERMINAL_COLUMNS:
        if name == "WHY":
            table.add_column(name, overflow="fold", min_width=_WHY_WIDTH_MIN)
        else:
            table.add_column(name, no_wrap=True, justify="right" if name in _NUMBERS else "left")
    for one in piece:
        cells = dict(zip(COLUMNS, _row(one, joint="\n"), strict=True))
        cells["CONNECTION"] = f"{one.local}\n{one.arrow} {one.remote}"
        row = {name: Text(cells[name]) for name in _TERMINAL_COLUMNS}  # not markup: a program may be named "[red]"
        row["STATE"].stylize(_STYLES.get(one.state, ""))
        table.add_row(*row.values())
    console.print(table)


def _print_plain(_console: Console, piece: list[Connection], *, with_head: bool) -> None:
    """One line a connection, however wide; rich would take a millisecond for each."""
    rows = [_row(one, joint=" + ") for one in piece]
    widths = [max(map(len, cells)) for cells in zip(COLUMNS, *rows, strict=True)]
    for row in ([*COLUMNS], *rows) if with_head else rows:
        cells = [
            cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
            for name, cell, width in zip(COLUMNS, row, widths, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _row(one: Connection, *, joint: str) -> list[str]:
    """The cells of a connection, one for each of `COLUMNS`."""
    sent, read = one.tx.ring_msgs, one.rx.ring_msgs
    return [
        one.program or "(gone)", str(one.pid), str(one.fd), one.local, one.remote, one.role, one.state,
        joint.join(_traffic(one.tx)), joint.join(_traffic(one.rx)), _per(one.doorbells, sent), _per(one.sleeps, read),
        _per(one.spins_won + one.spins_lost, read), one.why or _link(one),
    ]  # fmt: skip


def _link(one: Connection) -> str:
    if (link := one.link) is None:
        return ""
    return (
        f"{link['protocol']} over {link['device']}, {link['send_mechanism']}, {link['send_mode']} mode, "
        f"credit {link['credit']} of it and {link['remote_credit']} here"
    )


def _traffic(traffic: Traffic) -> list[str]:
    """`BYTES/MESSAGES path` for each path that was used."""
    paths = ((traffic.ring_bytes, traffic.ring_msgs, "ring"), (traffic.tcp_bytes, traffic.tcp_msgs, "tcp"))
    return [f"{short(size)}/{short(msgs)} {path}" for size, msgs, path in paths if msgs or size]


def _per(events: int, messages: int) -> str:
    return f"{events / messages:.2f}" if messages else ""
