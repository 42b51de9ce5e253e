"""`sidestep explain`: in words, why a connection is where it is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import click

from sidestep.cli.options import json_option, parsed, socket_option
from sidestep.cli.shown import printable, show
from sidestep.errors import Unavailable, counted, did_you_mean
from sidestep.observe.explain import Explainer, Explanation, Query, Verdict
from sidestep.observe.processes import program_names
from sidestep.observe.sockets import hidden_users

_MARGIN: Final = 2  # columns between a heading's colon and its text
# The first of these places the connection, of its two ends.
_WHERE: Final = {
    Verdict.CARRIED: "promoted", Verdict.MOVING: "moving", Verdict.TCP: "on TCP", Verdict.UNKNOWN: "not known",
    Verdict.UNSEEN: "not seen",
}  # fmt: skip

_BY_TCP: Final = "for TCP instead of a UNIX socket name a host, as in 'psql -h 127.0.0.1'"


@click.command()
@click.argument("what", required=False, callback=parsed(Query.parse), metavar="[WHAT]")
@click.option("--all", "everything", is_flag=True, help="Each end in full, also where many are alike.")
@socket_option
@json_option
def explain(what: Query | None, everything: bool, socket: Path, as_json: bool) -> None:
    """Explain connections: what carries them, since which byte and at what saving; or what keeps them on TCP.

    WHAT is a process (PID), one of its descriptors (PID/FD), HOST:PORT, :PORT, or the name of a program. Connections
    that are not under sidestep, and listening sockets, are then explained as well. Left out: every connection under
    sidestep. Of ends with the same explanation the first is shown, with the number of the others. "saved" counts system
    calls that were not made: one for each message by ring, less the shim's own. Its own are calls to sleep, to wake the
    other end, to ask the kernel while it spins, to yield, to change epoll sets.

    Exit code 1 if nothing such is found, or no provider answers and WHAT is left out.
    """
    explainer = Explainer(socket)
    found = list(explainer.explain(what or Query()))
    if explainer.provider_missing is not None:
        click.echo(f"sidestep: {explainer.provider_missing.message}: only the kernel was asked", err=True)
    paragraphs = map(explanation_text, found) if everything else _grouped(found)
    lines = ["\n\n".join([*_summary(found), *paragraphs])] if found else []
    show({"explanations": [one.as_json() for one in found]}, lines, as_json=as_json, indent=1)
    if not found and what:
        raise _nothing(what)
    if not found:
        click.echo("no connections", err=True)


def explanation_text(one: Explanation, *, alike: str = "") -> str:
    lines = [("cause", one.cause), ("hint", one.hint), *one.facts, ("alike", alike)]
    width = max((len(heading) for heading, text in lines if text), default=0) + 1 + _MARGIN
    shown = [one.headline, *(f"{heading + ':':<{width}}{text}" for heading, text in lines if text)]
    return "\n".join(printable(line) for line in shown)


def _summary(found: Sequence[Explanation]) -> Iterator[str]:
    """Number of connections by place; nothing for a single end."""
    if len(found) < 2:
        return
    verdicts = dict[frozenset[str | None], set[Verdict]]()
    for one in found:
        if one.remote is not None:
            verdicts.setdefault(frozenset({one.local, one.remote}), set()).add(one.verdict)
    where = Counter(next(_WHERE[each] for each in _WHERE if each in ends) for ends in verdicts.values())
    places = (f"{where[name]:,} {name}" for name in _WHERE.values() if name in where)
    parts = [counted(where.total(), "connection"), *places]
    if listening := sum(one.remote is None for one in found):
        parts.append(counted(listening, "listening socket"))
    yield ", ".join(parts)


def _grouped(found: Iterable[Explanation]) -> Iterator[str]:
    """A paragraph for each explanation that is given, with how many ends it is given of."""
    groups = dict[tuple[object, ...], list[Explanation]]()
    for one in found:
        program = _without_pids(one.subject.partition(" fd ")[0]) if " fd " in one.subject else ""
        same = (program, one.verdict, one.carrier, one.reason, _without_pids(one.cause), one.hint)
        groups.setdefault(same, []).append(one)
    for first, *others in groups.values():
        saving = f", {sum(one.calls_saved for one in others):,} system calls saved" if first.calls_saved else ""
        yield explanation_text(first, alike=f"{len(others):,} more{saving}; --all shows each" if others else "")


def _without_pids(text: str) -> str:
    return re.sub(r"\[\d+\]", "", text)


def _nothing(what: Query) -> Unavailable:
    if what.pid is not None:
        if not Path(f"/proc/{what.pid}").exists():
            return Unavailable(f"there is no process {what.pid}", remedy=f"for a port write :{what.pid}")
        return Unavailable(f"process {what.pid} has no such TCP connection or listening socket", remedy=_BY_TCP)
    if what.program is None:
        return Unavailable("no such TCP connection or listening socket is found on this host")
    running = program_names()
    if what.program in running:
        if users := hidden_users(what.program):
            text = f"{what.program} runs as {' and '.join(users)}: the kernel hides its sockets from you"
            return Unavailable(text, remedy="ask by its port, as in 'sidestep explain :5432', or as root")
        return Unavailable(f"{what.program} runs, and has no TCP connection or listening socket", remedy=_BY_TCP)
    remedy = did_you_mean(what.program, running) or f"start it with 'sidestep run -- {what.program}'"
    return Unavailable(f"no program named {what.program} runs here", remedy=remedy)
