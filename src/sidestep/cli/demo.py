"""`sidestep demo`: see on this machine what sidestep does for real programs."""

from __future__ import annotations

import os
import subprocess
import sys

import click

from sidestep.cli.shown import show
from sidestep.cli.table import table
from sidestep.demo.demo import ROUNDS, SECONDS, Demo, ResultLine, run_demo, run_two_hosts
from sidestep.errors import Unavailable

PLACES = {"tcp": "spread", "tcp-one-cpu": "one CPU"}


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _checks(line: ResultLine) -> tuple[str, str]:
    return "yes" if line.promoted else "NO", "yes" if line.equal else "NO"


def _table(demo: Demo) -> list[list[str]]:
    """Headings, and a line for each work."""
    two_hosts = any("sdp" in line.runs for line in demo.lines)
    ways = {"sidestep": "promoted", "sdp": "SDP first"} if two_hosts else {"sidestep": "sidestep"}
    headings = [heading for way in ways.values() for heading in (way, "ratio")]
    rows = [["work", "unit", "TCP", *(() if two_hosts else ("placed",)), *headings, "offloaded", "bytes equal"]]
    for line in demo.lines:
        figures = [_figure(line.median(line.best_tcp)), *(() if two_hosts else (PLACES[line.best_tcp],))]
        for way in ways:
            right = line.promoted and line.equal  # else it is a ratio of TCP with TCP, or of wrong bytes
            figures += _figure(line.median(way)), f"{line.ratio_of(way):.2f}x" if right else "-"
        rows.append([line.work.title, line.work.unit, *figures, *_checks(line)])
    return rows


def _become_root() -> None:
    """Goes on as root of a user namespace of its own, where namespaces of networks may be made."""
    unshare = ["unshare", "--user", "--map-root-user", "--net"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise Unavailable("unshare is not installed", remedy="apt-get install util-linux, or be root") from error
    except subprocess.CalledProcessError as error:
        raise Unavailable(
            f"this user may make no network namespaces: {error.stderr.strip()}",
            remedy="be root; or let users make namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ) from error
    sys.stdout.flush()
    os.execvp(unshare[0], [*unshare, sys.executable, "-m", "sidestep", *sys.argv[1:]])  # noqa: S606 - itself


@click.command()
@click.option("--rounds", type=click.IntRange(1, 100), default=ROUNDS, show_default=True, help="Alternations.")
@click.option(
    "--seconds", type=click.FloatRange(0.1, 60), default=SECONDS, show_default=True, help="Measured in each run."
)
@click.option("--two-hosts", is_flag=True, help="Servers and clients on hosts of their own: network namespaces.")
@click.option("--json", "as_json", is_flag=True, help="A JSON document instead of the table.")
def demo(rounds: int, seconds: float, two_hosts: bool, as_json: bool) -> None:
    """Run real programs over kernel TCP and under sidestep, and compare.

    redis-server with redis-benchmark, an echo ping-pong and a bulk transfer run over kernel TCP and under sidestep in
    turn. One table shows medians and their ratio, against kernel TCP in its better placement (programs spread by the
    kernel, or all on one CPU), whether the connections really were promoted, and whether the bytes were equal. Takes
    about 40 seconds. Without redis the rest runs.

    With --two-hosts servers and clients are on two hosts, made of network namespaces for the time, and sidestep carries
    their connections by SDP over its software RDMA device: promoted from TCP in flight, and, by a policy, from the
    first byte. That device rides on TCP: expect ratios below 1. nginx runs as well. Needs root, or a kernel that lets
    users make namespaces.

    Exit code: 0 when all that ran was promoted and equal, 1 when something was not or a program failed.
    """
    if two_hosts and os.geteuid() != 0:
        _become_root()
    run = run_two_hosts if two_hosts else run_demo
    result = run(rounds=rounds, seconds=seconds, tell=lambda text: click.echo(text, err=True))
    rows = _table(result)
    right = [at for at, name in enumerate(rows[0]) if name not in ("work", "unit", "placed")]
    show(result.as_json(), table(rows, right=right), as_json=as_json, indent=2)
    for line in result.lines:
        if not line.promoted:
            click.echo(f"{line.work.title}: not promoted: {'; '.join(line.why_not_promoted)}", err=True)
        if not line.equal:
            click.echo(f"{line.work.title}: THE BYTES RECEIVED WERE NOT THOSE SENT", err=True)
    if not result.good:
        click.get_current_context().exit(1)
