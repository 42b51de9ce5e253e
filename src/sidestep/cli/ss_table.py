"""The table of `sidestep ss`, also without click, which takes longer to load than the table to make."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from sidestep.cli.shown import GAP, cut, printable, short, table, terminal_width, width_of
from sidestep.observe.connections import Connection, Traffic

# Attributes of ECMA-48, 8.3.117: bold; green, cyan and yellow.
_BOLD: Final = 1
_STYLES: Final = {"promoted": 32, "attached": 36, "offered": 36, "pinned": 33}
_PIECE: Final = 500  # rows set as one table: the first lines come at once, however many there are
COLUMNS: Final = (
    "PROGRAM", "PID", "FD", "LOCAL", "REMOTE", "ROLE", "STATE", "SENT", "READ", "BELLS", "SLEEPS", "SPINS", "WHY",
)  # fmt: skip
_NUMBERS: Final = frozenset({"PID", "FD", "BELLS", "SLEEPS", "SPINS"})
_TERMINAL_COLUMNS: Final = ("PROGRAM", "PID", "FD", "CONNECTION", *COLUMNS[COLUMNS.index("STATE") :])
_LEAVE: Final = ("SPINS", "SLEEPS", "BELLS", "FD", "PID", "READ", "SENT")  # columns left out on a narrow terminal
_WHY_MIN: Final = 40  # columns; with less a sentence stands below its connection
_PROGRAM_MAX: Final = 20  # characters of a program and its container on a terminal


def print_table(found: Iterator[Connection]) -> None:
    width = terminal_width()
    show = _plain if width is None else _Screen(width, coloured=not os.environ.get("NO_COLOR")).lines
    count = 0
    while piece := list(islice(found, _PIECE)):
        for line in show(piece, with_head=count == 0):
            print(line)
        count += len(piece)
    if not count:
        print(
            "no connections now; 'sidestep ss --ended' lists past ones, 'sidestep run -- CMD' starts a program",
            file=sys.stderr,
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
            found.insert(0, {name: self._styled(name, _BOLD) for name in _TERMINAL_COLUMNS})
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
            cells["STATE"] = self._styled(one.state, _STYLES[one.state])
        return cells

    def _styled(self, text: str, style: int) -> str:
        return f"\33[{style}m{text}\33[0m" if self._coloured else text


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
        f"{way(one)}{_queue_pair(link)}, {link['send_mechanism']}, "
        f"{link['send_mode']} mode, credit {link['credit']} of it and {link['remote_credit']} here"
    )


def way(one: Connection) -> str:
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
