"""`sidestep ss`: the live connections under sidestep."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click

from sidestep import config
from sidestep.cli.options import json_option, matching, selection_options, socket_option
from sidestep.cli.shown import printable, schema, short
from sidestep.cli.table import table
from sidestep.native.layout import State
from sidestep.observe.connections import Connection, Traffic, connections, ended

STATES: Final = tuple(state.name.lower() for state in State if state is not State.FREE)
_STYLES: Final = {"promoted": "green", "attached": "cyan", "offered": "cyan", "pinned": "yellow"}
_PIECE: Final = 500  # rows set as one table: the first lines come at once, however many there are
COLUMNS: Final = (
    "PROGRAM", "PID", "FD", "LOCAL", "REMOTE", "ROLE", "STATE", "SENT", "READ", "BELLS", "SLEEPS", "SPINS", "WHY",
)  # fmt: skip
_NUMBERS: Final = frozenset({"PID", "FD", "BELLS", "SLEEPS", "SPINS"})
_TERMINAL_COLUMNS: Final = ("PROGRAM", "PID", "FD", "CONNECTION", *COLUMNS[COLUMNS.index("STATE") :])


@click.command()
@selection_options
@click.option("--state", type=click.Choice(STATES), multiple=True, help="Only this state. May be repeated.")
@click.option("--ended", "over", is_flag=True, help="Ended connections, as far as they are known; the oldest first.")
@socket_option
@json_option
def ss(
    pid: tuple[int, ...],
    program: tuple[str, ...],
    port: tuple[int, ...],
    state: tuple[str, ...],
    over: bool,
    socket: Path | None,
    as_json: bool,
) -> None:
    """List the connections of programs under sidestep: state, why, and what went which way.

    Bytes and messages are counted by path, ring or TCP. BELLS: wake-ups sent to the other end, SLEEPS and SPINS: how
    waits ended, each per message. On a terminal an arrow leads from the end that connected.

    Each place in a program's memory is used again, so --ended shows only the last connection of each place. The
    provider remembers 1000 connections of programs that ended while it ran. STATE is promoted if the connection ever
    was.

    Exit code 1 if no provider answers.
    """
    wanted, path = matching(pid, program, port), config.socket_path(socket)
    looked = (one.connection for one in ended(path)) if over else connections(path)
    found = (one for one in looked if wanted(one) and (not state or one.state in state))
    if as_json:
        _print_json(found)
    else:
        _print_table(found)


def _print_json(found: Iterable[Connection]) -> None:
    """One document, read to its end before its first byte is written: a provider that goes away leaves no half."""
    rows = [json.dumps(connection.as_json()) for connection in found]
    click.echo(f'{{"schema": {json.dumps(schema())}, "connections": [' + ",".join(f"\n {row}" for row in rows) + "\n]}")


def _print_table(found: Iterator[Connection]) -> None:
    show = _on_terminal if sys.stdout.isatty() else _plain
    count = 0
    while piece := list(islice(found, _PIECE)):
        for line in show(piece, with_head=count == 0):
            click.echo(line)
        count += len(piece)
    if not count:
        click.echo("no connections", err=True)


def _on_terminal(piece: list[Connection], *, with_head: bool) -> Iterator[str]:
    """Two lines a connection, folded to the width of the terminal."""
    coloured = not os.environ.get("NO_COLOR")
    rows = [[click.style(name, bold=True) if coloured else name for name in _TERMINAL_COLUMNS]] if with_head else []
    for one in piece:
        cells = dict(zip(COLUMNS, _row(one, joint="\n"), strict=True))
        cells["CONNECTION"] = f"{one.local}\n{one.arrow} {one.remote}"
        if coloured and one.state in _STYLES:
            cells["STATE"] = click.style(one.state, fg=_STYLES[one.state])
        rows.append([cells[name] for name in _TERMINAL_COLUMNS])
    return _lines(_TERMINAL_COLUMNS, rows, shutil.get_terminal_size().columns)


def _plain(piece: list[Connection], *, with_head: bool) -> Iterator[str]:
    """One line a connection, however wide."""
    rows = [_row(one, joint=" + ") for one in piece]
    return _lines(COLUMNS, [[*COLUMNS], *rows] if with_head else rows, None)


def _lines(columns: Sequence[str], rows: list[list[str]], width: int | None) -> Iterator[str]:
    return table(rows, right=[at for at, name in enumerate(columns) if name in _NUMBERS], width=width)


def _row(one: Connection, *, joint: str) -> list[str]:
    """The cells of a connection, one for each of `COLUMNS`."""
    sent, read = one.tx.ring_msgs, one.rx.ring_msgs
    return [
        printable(one.who), str(one.pid or "-"), str(one.fd), one.local, one.remote, one.role, one.state,
        joint.join(_traffic(one.tx)), joint.join(_traffic(one.rx)), _per(one.doorbells, sent), _per(one.sleeps, read),
        _per(one.spins_won + one.spins_lost, read), _link(one) or one.why,
    ]  # fmt: skip


def _link(one: Connection) -> str:
    if (link := one.link) is None:
        return ""
    by = " by the engine" if link.get("engine") else ""
    return (
        f"{link['protocol']} over {link['device']}{by}{_queue_pair(link)}, {link['send_mechanism']}, "
        f"{link['send_mode']} mode, credit {link['credit']} of it and {link['remote_credit']} here"
    )


def _queue_pair(link: dict[str, Any]) -> str:
    """Queue pair of a link, if its device has numbers that the other end knows."""
    found = link.get("queue_pair", {})
    return f", queue pair {found['number']} to {found['remote_number']}" if "remote_number" in found else ""


def _traffic(traffic: Traffic) -> list[str]:
    """`BYTES/MESSAGES path` for each path that was used."""
    paths = ((traffic.ring_bytes, traffic.ring_msgs, "ring"), (traffic.tcp_bytes, traffic.tcp_msgs, "tcp"))
    return [f"{short(size)}/{short(msgs)} {path}" for size, msgs, path in paths if msgs or size]


def _per(events: int, messages: int) -> str:
    return f"{events / messages:.2f}" if messages else ""
