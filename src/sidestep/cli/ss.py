"""`sidestep ss`: the live connections under sidestep."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import click

from sidestep import config
from sidestep.cli.options import json_option, matching, selection_options, socket_option
from sidestep.cli.shown import printable, schema, table, terminal_width
from sidestep.cli.ss_table import print_table, way
from sidestep.native.layout import State
from sidestep.observe.connections import Connection, connections, ended

STATES: Final = tuple(state.name.lower() for state in State if state is not State.FREE)


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
        print_table(found)


def _print_json(found: Iterable[Connection]) -> None:
    """One document, read to its end before its first byte is written: a provider that goes away leaves no half."""
    rows = [json.dumps(connection.as_json()) for connection in found]
    click.echo(f'{{"schema": {json.dumps(schema())}, "connections": [' + ",".join(f"\n {row}" for row in rows) + "\n]}")


def _print_summary(found: Iterable[Connection]) -> None:
    """Prints the number of connections, then a line for each program, state and reason, the most first."""
    groups = Counter((printable(one.who), one.state, way(one) or one.why) for one in found)
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
