"""`sidestep gateway`: relays between hosts that know only TCP and hosts that know only SDP."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from sidestep import limits
from sidestep.cli.options import json_option, parsed
from sidestep.cli.rdma_options import flush
from sidestep.cli.shown import printable, show
from sidestep.errors import Misuse
from sidestep.rdma.tools.devices import signals
from sidestep.remote.gateway import Gateway
from sidestep.remote.gateway_rules import Rule, read_rules

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@click.command()
@click.argument("rules", metavar="[RULE]...", nargs=-1, callback=parsed(lambda given: [*map(Rule.parse, given)]))
@click.option("--rules", "files", type=click.Path(path_type=Path, exists=True, dir_okay=False), multiple=True,
              metavar="FILE", help="A file of rules, one a line. May be repeated.")  # fmt: skip
@click.option("--drain", type=click.FloatRange(0), default=limits.GATEWAY_DRAIN_S, show_default=True,
              help="Seconds that connections have to end after SIGTERM; then they are reset.")  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="No line for each connection on stderr.")
@json_option
def gateway(rules: list[Rule], files: tuple[Path, ...], drain: float, quiet: bool, as_json: bool) -> None:
    """Relay connections between TCP and SDP, for hosts that know only one of them.

    A RULE is one argument:

    \b
      'tcp LISTEN to sdp TARGET [via PORT] [max COUNT] [from NETWORKS] [else tcp]'
      'sdp LISTEN to tcp TARGET [at PORT]  [max COUNT] [from NETWORKS]'

    LISTEN and TARGET are ADDRESS:PORT. With `else tcp`, TCP carries what SDP cannot. `via` and `at` name an RDMA port
    where no port mapper does; `max` bounds the connections of the rule, `from` says who may come. See
    docs/guides/gateway.md.

    SIGTERM or Ctrl-C: no more connections are taken, and the command ends when those there are have ended; a second
    signal ends it at once. SIGUSR1 prints the state and the counters, which are printed at the end as well.
    SIGHUP reads the files of rules anew; no connection ends for that.

    Exit code 1 if it cannot listen somewhere, or had to reset connections at the end.
    """  # noqa: D301 - \b is for click

    def chosen() -> list[Rule]:
        return [*rules, *(rule for path in files for rule in read_rules(path))]

    def log(line: str) -> None:
        if not quiet:
            click.echo(printable(line), err=True)

    def reload() -> None:
        try:
            made.reload(chosen())
        except Misuse as why:
            log(f"the rules stay as they are: {why}")

    made = Gateway(chosen(), log)
    try:
        cut = _run(made, drain, lambda: _show(made.status(), as_json=as_json), reload)
        _show(made.status(), as_json=as_json)
    finally:
        made.close()
    if cut:
        raise click.exceptions.Exit(1)


def _run(made: Gateway, drain_s: float, show: Callable[[], None], reload: Callable[[], None]) -> int:
    """Runs the gateway until a signal ends it; returns how many connections had to be reset."""
    over = False

    def end() -> None:
        nonlocal over
        over = True

    def arrived(number: int) -> None:
        if number == signal.SIGUSR1:
            show()
        elif number == signal.SIGHUP:
            reload()
        elif made.draining:
            end()
        else:
            made.log(f"no more connections are taken, {made.active} are left")
            made.drain()
            made.loop.call_later(drain_s, end)

    with signals(made.loop, _SIGNALS, arrived):
        show()
        while not (over or made.drained):
            made.loop.turn()
    return made.active


def _show(status: dict[str, Any], *, as_json: bool) -> None:
    show(status, map(_rule_text, status["rules"]), as_json=as_json)
    flush()


def _rule_text(rule: dict[str, Any]) -> str:
    port = f", RDMA port {rule['rdma_port']}" if rule["rdma_port"] else ""
    names = ("active", "joined", "fell_back", "refused", "failed", "reset")
    counts = ", ".join(f"{rule[name]} {name.replace('_', ' ')}" for name in names)
    return (
        f"{printable(rule['rule'])}: listening at {rule['listening']}{port}\n"
        f"  {counts}; {rule['to_target']} bytes to the target, {rule['to_client']} back"
    )
