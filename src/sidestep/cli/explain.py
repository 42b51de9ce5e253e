"""`sidestep explain`: in words, why a connection is where it is."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sidestep.cli.options import json_option, parsed, socket_option
from sidestep.cli.shown import printable, show
from sidestep.observe.explain import Explainer, Explanation, Query

_MARGIN = 2  # between a heading's colon and its text


@click.command()
@click.argument("what", required=False, callback=parsed(Query.parse), metavar="[WHAT]")
@socket_option
@json_option
def explain(what: Query | None, socket: Path, as_json: bool) -> None:
    """Explain connections: what carries them, since which byte and at what saving; or what keeps them on TCP.

    WHAT is a process (PID), one of its descriptors (PID/FD), HOST:PORT, :PORT, or the name of a program. Connections
    that are not under sidestep, and listening sockets, are then explained as well. Left out: every connection under
    sidestep. "saved" counts system calls that were not made: one for each message by ring, less the shim's own. Its own
    are calls to sleep, to wake the other end, to ask the kernel while it spins, to yield, to change epoll sets.

    Exit code 1 if nothing such is found, or no provider answers and WHAT is left out.
    """
    explainer = Explainer(socket)
    found = list(explainer.explain(what or Query()))
    if explainer.provider_missing is not None:
        click.echo(f"sidestep: {explainer.provider_missing.message}: only the kernel was asked", err=True)
    text = "\n\n".join(map(explanation_text, found))
    show({"explanations": [one.as_json() for one in found]}, [text] if found else [], as_json=as_json, indent=1)
    if not found and what:
        click.echo(f"sidestep: {_nothing(what)}", err=True)
        sys.exit(1)
    if not found:
        click.echo("no connections", err=True)


def explanation_text(one: Explanation) -> str:
    lines = [("cause", one.cause), ("hint", one.hint), *one.facts]
    width = max((len(heading) for heading, text in lines if text), default=0) + 1 + _MARGIN
    shown = [one.headline, *(f"{heading + ':':<{width}}{text}" for heading, text in lines if text)]
    return "\n".join(printable(line) for line in shown)


def _nothing(what: Query) -> str:
    if what.pid is not None and what.fd is None and not Path(f"/proc/{what.pid}").exists():
        return f"there is no process {what.pid}; for a port write :{what.pid}"
    return "no such TCP connection or listening socket is found on this host"
