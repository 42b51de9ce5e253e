"""`sidestep ss`: the live connections under sidestep."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click

from sidestep import config
from sidestep.cli.options import json_option, matching, selection_options, socket_option
from sidestep.cli.shown import cut, printable, schema, short
from sidestep.cli.table import GAP, table, terminal_width, width_of
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
_LEAVE: Final = ("SPINS", "SLEEPS", "BELLS", "FD", "PID", "READ", "SENT")  # columns left out on a narrow terminal
_WHY_MIN: Final = 40  # columns; with less a sentence stands below its connection
_PROGRAM_MAX: Final = 20  # characters of a program and its container on a terminal


@click.command()
@selection_options
@click.option("--state", type=click.Choice(STATES), multiple=True, help="Only this state. May be repeated.")
@click.option("--ended", "over", is_flag=True, help="Ended connections, as far as they are known; the oldest first.")
@click.option("--summary", is_flag=True, help="Number of connections by program, state and reason.")
@socket_option
@json_option
def ss(
    pid: tuple[int, ...],
    program: tuple[str, ...],
    port: tuple[int, ...],
    state: tuple[str, ...],
    over: bool,
    summary: bool,
    socket: Path | None,
    as_json: bool,
) -> None:
    """List the connections of programs under sidestep: state, why, and what went which way.

    Bytes and messages are counted by path, ring or TCP. BELLS: wake-ups sent to the other end, SLEEPS and SPINS: how
    waits ended, each per message. On a terminal an arrow leads from the end that connected; columns for which it has no
    room are left out.

    Each place in a program's memory is used again, so --ended shows only the last connection of each place. The
    provider remembers 1000 connections of programs that ended while it ran. STATE is promoted if the connection ever
    was.

    Exit code 1 if no provider answers.
    """
    if summary and as_json:
        raise click.UsageError("--summary is for reading: with --json count the rows")
    wanted, path = matching(pid, program, port), config.socket_path(socket)
    looked = (one.connection for one in ended(path)) if over else connections(path)
    found = (one for one in looked if wanted(one) and (not state or one.state in state))
    if as_json:
        _print_json(found)
    elif summary:
        _print_summary(found)
    else:
        _print_table(found)


def _print_json(found: Iterable[Connection]) -> None:
    """One document, read to its end before its first byte is written: a provider that goes away leaves no half."""
    rows = [json.dumps(connection.as_json()) for connection in found]
    click.echo(f'{{"schema": {json.dumps(schema())}, "connections": [' + ",".join(f"\n {row}" for row in rows) + "\n]}")


def _print_summary(found: Iterable[Connection]) -> None:
    """Prints the number of connections, then a line for each program, state and reason, the most first."""
    groups = Counter((printable(one.who), one.state, _way(one) or one.why) for one in found)
    states = Counter[str]()
    for (_, state, _), count in groups.items():
        states[state] += count
    by_state = ", ".join(f"{count:,} {state}" for state, count in states.most_common())
    click.echo(f"{_ends(groups.total())}{': ' if by_state else ''}{by_state}")
    rows = [[f"{count:,}", *group] for group, count in groups.most_common()]
    if rows:
        for line in table([["ENDS", "PROGRAM", "STATE", "WHY"], *rows], right=[0], width=terminal_width()):
            click.echo(line)


def _ends(count: int) -> str:
    return "1 end of a connection" if count == 1 else f"{count:,} ends of connections"


def _print_table(found: Iterator[Connection]) -> None:
    width = terminal_width()
    show = _plain if width is None else _Screen(width, coloured=not os.environ.get("NO_COLOR")).lines
    count = 0
    while piece := list(islice(found, _PIECE)):
        for line in show(piece, with_head=count == 0):
            click.echo(line)
        count += len(piece)
    if not count:
        click.echo(
            "no connections now; 'sidestep ss --ended' lists past ones, 'sidestep run -- CMD' starts a program",
            err=True,
        )


class _Screen:
    """Two lines a connection, in the columns for which a terminal has room."""

    def __init__(self, width: int, *, coloured: bool) -> None:
        self._width = width
        self._coloured = coloured
        self._columns: Sequence[str] = _TERMINAL_COLUMNS

    def lines(self, piece: list[Connection], *, with_head: bool) -> Iterator[str]:
        found = [self._cells(one) for one in piece]
        if with_head:
            found.insert(0, {name: self._styled(name, bold=True) for name in _TERMINAL_COLUMNS})
        self._columns = _fitting(self._columns, found, self._width)
        rows = [[cells[name] for name in self._columns] for cells in found]
        if "WHY" in self._columns:
            return _lines(self._columns, rows, self._width)
        notes = [cells["WHY"] for cells in found]
        if with_head:
            notes[0] = ""
        return _lines(self._columns, rows, self._width, notes)

    def _cells(self, one: Connection) -> dict[str, str]:
        cells = dict(zip(COLUMNS, _row(one, joint="\n"), strict=True))
        cells["PROGRAM"] = cut(cells["PROGRAM"], _PROGRAM_MAX)
        cells["CONNECTION"] = f"{one.local}\n{one.arrow} {one.remote}"
        if one.state in _STYLES:
            cells["STATE"] = self._styled(one.state, fg=_STYLES[one.state])
        return cells

    def _styled(self, text: str, **style: Any) -> str:
        return click.style(text, **style) if self._coloured else text


def _fitting(columns: Sequence[str], found: Sequence[Mapping[str, str]], width: int) -> list[str]:
    """Columns that fit; WHY is one of them only if there is room for sentences."""
    taken = {name: width_of([cells[name] for cells in found]) + len(GAP) for name in columns}
    why = taken.pop("WHY", None)
    for name in _LEAVE:
        if sum(taken.values()) - len(GAP) <= width:
            break
        taken.pop(name, None)
    room = width - sum(taken.values())
    return [*taken, "WHY"] if why is not None and room >= min(why - len(GAP), _WHY_MIN) else [*taken]


def _plain(piece: list[Connection], *, with_head: bool) -> Iterator[str]:
    """One line a connection, however wide."""
    rows = [_row(one, joint=" + ") for one in piece]
    return _lines(COLUMNS, [[*COLUMNS], *rows] if with_head else rows, None)


def _lines(
    columns: Sequence[str], rows: list[list[str]], width: int | None, notes: Sequence[str] = ()
) -> Iterator[str]:
    right = [at for at, name in enumerate(columns) if name in _NUMBERS]
    return table(rows, right=right, notes=notes, width=width)


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
    return (
        f"{_way(one)}{_queue_pair(link)}, {link['send_mechanism']}, "
        f"{link['send_mode']} mode, credit {link['credit']} of it and {link['remote_credit']} here"
    )


def _way(one: Connection) -> str:
    """Protocol and device by which it goes to another host; empty if it does not."""
    if (link := one.link) is None:
        return ""
    return f"{link['protocol']} over {link['device']}{' by the engine' if link.get('engine') else ''}"


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
