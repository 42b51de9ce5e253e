"""`sidestep demo`: see on this machine what sidestep does for real programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from sidestep.cli.options import json_option
from sidestep.cli.shown import show, table
from sidestep.demo.demo import ROUNDS, SECONDS, Demo, ResultLine, run_demo, run_two_hosts
from sidestep.demo.picture import Bar, Group, draw, figure, slower, times
from sidestep.errors import Unavailable

PLACES = {"tcp": "spread", "tcp-one-cpu": "one CPU"}
PLACEMENT = " Kernel TCP is taken in its better placement: its programs spread by the kernel, or all on one CPU."
METHOD = (
    "Medians of {rounds} rounds of {seconds:g} s, TCP and sidestep in turns.{placement} A ratio counts only if all "
    "connections were promoted, and the bytes received were those sent."
)


def _ways(line: ResultLine) -> dict[str, str]:
    """The places under sidestep, and what they are called."""
    return {"sidestep": "promoted", "sdp": "SDP first"} if "sdp" in line.runs else {"sidestep": "sidestep"}


def _ratio(line: ResultLine, way: str) -> str:
    return times(line.ratio_of(way)) if line.good else "-"


def _table(demo: Demo) -> list[list[str]]:
    """Headings, and a line for each work."""
    rows: list[list[str]] = []
    for line in demo.lines:
        two_hosts, ways = "sdp" in line.runs, _ways(line)
        headings = [heading for way in ways.values() for heading in (way, "ratio")]
        if not rows:
            placed = () if two_hosts else ("placed",)
            rows.append(["work", "unit", "TCP", *placed, *headings, "offloaded", "bytes equal"])
        figures = [figure(line.median(line.best_tcp)), *(() if two_hosts else (PLACES[line.best_tcp],))]
        for way in ways:
            figures += figure(line.median(way)), _ratio(line, way)
        checks = ("yes" if good else "NO" for good in (line.promoted, line.equal))
        rows.append([line.work.title, line.work.unit, *figures, *checks])
    return rows


def _slower(demo: Demo) -> list[str]:
    """A sentence for each reason for which works were slower than over TCP."""
    works: dict[str, list[str]] = {}
    why = demo.slower()
    for line in demo.lines:
        if line.slower:
            works.setdefault(why[line.work.name], []).append(line.work.title)
    return [f"slower than TCP: {'; '.join(titles)}: {reason}" for reason, titles in works.items()]


def _picture(demo: Demo) -> str:
    """The table as an SVG."""
    groups = []
    for line in demo.lines:
        bars = [Bar("kernel TCP", line.median(line.best_tcp), "tcp")]
        for way, name in _ways(line).items():
            kind = "slower" if line.good and slower(line.ratio_of(way)) else "ours"
            bars.append(Bar(name, line.median(way), kind, _ratio(line, way) if line.good else "does not count"))
        groups.append(Group(line.work.title, line.work.unit, bars, line.work.lower_is_better))
    skipped = [f"{name}: skipped, {why}" for name, why in demo.skipped.items()]
    placed = any("tcp-one-cpu" in line.runs for line in demo.lines)
    method = METHOD.format(rounds=demo.rounds, seconds=demo.seconds, placement=PLACEMENT if placed else "")
    notes = [*_slower(demo), *_faults(demo), *skipped, method, f"{demo.machine}; {demo.others}."]
    return draw("Programs over kernel TCP, and the same under sidestep", groups, warnings=demo.warnings(), notes=notes)


def _faults(demo: Demo) -> list[str]:
    """A sentence for each work whose figures do not count."""
    found = []
    for line in demo.lines:
        if not line.promoted:
            found.append(f"{line.work.title}: not promoted: {'; '.join(line.why_not_promoted)}")
        if not line.equal:
            found.append(f"{line.work.title}: THE BYTES RECEIVED WERE NOT THOSE SENT")
    return found


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
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    default="sidestep-demo.svg",
    show_default=True,
    help="File for the picture.",
)
@json_option
def demo(rounds: int, seconds: float, two_hosts: bool, picture: Path, as_json: bool) -> None:
    """Run real programs over kernel TCP and under sidestep, and compare.

    redis-server with redis-benchmark, an echo ping-pong, a bulk transfer and nginx run over kernel TCP and under
    sidestep in turn. One table shows medians and their ratio, against kernel TCP in its better placement (programs
    spread by the kernel, or all on one CPU). It shows whether the connections really were promoted, and whether the
    bytes were equal. A picture shows the same as bars; it is an SVG, which any browser opens. The command says so if a
    work is slower than TCP, or if the machine is too busy to judge. Takes half a minute. Without redis and nginx the
    others run.

    With --two-hosts servers and clients are on two hosts, made of network namespaces for the time. sidestep carries
    their connections by SDP over its software RDMA device: promoted from TCP in flight, and, by a policy, from the
    first byte. That device rides on TCP: expect ratios below 1. Needs root, or a kernel that lets users make
    namespaces.

    Exit code: 0 when all that ran was promoted and equal, 1 when something was not or a program failed.
    """
    if not os.access(picture if picture.exists() else picture.parent, os.W_OK):
        raise Unavailable(f"{picture} cannot be written", remedy="choose another place by --picture FILE")
    if two_hosts and os.geteuid() != 0:
        _become_root()
    run = run_two_hosts if two_hosts else run_demo
    result = run(rounds=rounds, seconds=seconds, tell=lambda text: click.echo(text, err=True))
    rows = _table(result)
    left = ("work", "unit", "placed")
    lines = table(rows, right=[at for at, name in enumerate(rows[0]) if name not in left])
    show(result.as_json(), [*result.warnings(), *lines, *_slower(result)], as_json=as_json, indent=2)
    picture.write_text(_picture(result), encoding="utf-8")
    for fault in _faults(result):
        click.echo(fault, err=True)
    click.echo(f"picture: {picture.resolve()}", err=True)
    if not result.good:
        click.get_current_context().exit(1)
