"""Runs the benchmarks and prints one table: kernel TCP in its best placement, sidestep, their ratio, and the peer's.

Each row runs over kernel TCP as the kernel places it (spread), over kernel TCP with both ends on one CPU, and under
sidestep, alternating for several rounds; the ratio is that of the medians, against the better TCP placement. A run
whose connections were not promoted does not count: the row says INVALID and why. The peer is BPF's sockmap, where root
and the kernel allow it.

Exit code: 0 when every row ran and reached its must, 1 when one missed it, was INVALID or failed, 2 for wrong usage.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from harness import page
from harness.apps import as_user
from harness.model import PEER, Outcome, Row, Settings
from harness.report import render
from harness.rows import ROWS, missing
from harness.runner import run_row
from harness.sockmap import sockmap_missing
from sidestep.demo.machine import Machine
from sidestep.demo.world import program_missing
from sidestep.errors import SidestepError
from sidestep.installation import native_library

HERE = Path(__file__).resolve().parent.parent
ROOT = HERE.parent


def tell(line: str) -> None:
    """Talk, on standard error."""
    click.echo(line, err=True)


def fail(message: str) -> NoReturn:
    """Ends the program for want of something."""
    tell(message)
    sys.exit(2)


def sidestep_missing() -> str | None:
    """Why nothing can run under sidestep here; None when it can."""
    try:
        native_library()
    except SidestepError as error:
        return str(error)
    return None


def build_programs() -> None:
    """Brings the C programs up to date."""
    if os.access(HERE / "build", os.W_OK) or not (HERE / "build").exists():
        for name in ("make", "cc"):
            if why := program_missing(name):
                fail(why)
        made = subprocess.run(["make", "-s", "-C", str(HERE)], capture_output=True, text=True, check=False)
        if made.returncode:
            fail(f"the C programs do not build: {made.stderr.strip()}")


def chosen(patterns: str | None) -> list[Row]:
    """The rows that match one of the comma-separated patterns; all without any."""
    if patterns is None:
        return list(ROWS)
    found: list[Row] = []
    for pattern in patterns.split(","):
        matches = [row for row in ROWS if fnmatch.fnmatch(row.name, pattern.strip())]
        if not matches:
            raise click.BadParameter(f"no row is called {pattern!r}; rows: {', '.join(row.name for row in ROWS)}")
        found += [row for row in matches if row not in found]
    return [row for row in ROWS if row in found]


def run_elsewhere(row: Row, arguments: list[str]) -> dict[str, Any]:
    """Runs a row of another user's as that user, provider and all, and returns its document."""
    assert row.user is not None
    argv = as_user(row.user, [str(HERE / "run.py"), "--rows", row.name, "--json", *arguments])
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False, cwd="/")
    try:
        document: dict[str, Any] = json.loads(done.stdout)
        found: dict[str, Any] = document["rows"][0]
    except (ValueError, LookupError):
        return Outcome(row, failed=f"no result as user {row.user} (exit code {done.returncode})").as_json()
    return found


def write_pages(documents: Sequence[Path], *, check: bool) -> None:
    """Makes docs/ show these runs; with `check` it only says whether it does."""
    try:
        document = page.merged([json.loads(path.read_text()) for path in documents])
    except ValueError as error:
        fail(str(error))
    wanted = {page.SAVED: json.dumps(document, indent=1) + "\n"} | page.files(document, ROOT)
    different = [path for path in wanted if not (ROOT / path).exists() or (ROOT / path).read_text() != wanted[path]]
    if check:
        if different:
            fail(
                f"not what {documents[0]} gives: {', '.join(map(str, different))}; write them by --page without --check"
            )
        return
    for path in different:
        (ROOT / path).write_text(wanted[path])
        tell(f"written: {path}")


@click.command(help=__doc__)
@click.option("--rows", "patterns", metavar="NAMES", help="Only these rows, comma-separated; * and ? match.")
@click.option("--list", "list_rows", is_flag=True, help="List the rows and what they must reach.")
@click.option("--quick", is_flag=True, help="Two short rounds: a look, not a figure to keep.")
@click.option("--rounds", type=click.IntRange(1, 1000), help="Rounds a row.  [default: 5; 2 with --quick]")
@click.option("--seconds", type=click.FloatRange(0.05, 600), help="Measured a run.  [default: 1; 0.3 with --quick]")
@click.option("--promote-after", metavar="CALLS[:BYTES]", help="When to promote.  [default: the provider's default]")
@click.option("--tcp-only", is_flag=True, help="Kernel TCP alone, to know the machine.")
@click.option("--no-peer", is_flag=True, help="Leave out BPF's sockmap.")
@click.option("--json", "as_json", is_flag=True, help="A JSON document instead of the table.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON document to a file, too.")
@click.option(
    "--page",
    "pages",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="Write the tables and plots of docs/ from a saved document. May be repeated: later rows replace earlier ones.",
)
@click.option(
    "--check", is_flag=True, help="With --page: fail if docs/ is not what would be written, and write nothing."
)
@click.option("--show", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Print a saved document.")
def main(
    patterns: str | None, list_rows: bool, quick: bool, rounds: int | None, seconds: float | None,
    promote_after: str | None, tcp_only: bool, no_peer: bool, as_json: bool, save: Path | None, pages: tuple[Path, ...],
    check: bool, show: Path | None,
) -> None:  # fmt: skip
    """Runs what was asked for."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    if show is not None:
        render(json.loads(show.read_text()), console)
        return
    if pages:
        write_pages(pages, check=check)
        return
    rows = chosen(patterns)
    if list_rows:
        for row in rows:
            unit, over = (f" {row.unit}" if row.absolute else "x"), ("TCP + " if row.over_tcp else "")
            not_here = "".join(f"; {why}" for why in missing(row))
            bounds = f"must {over}{row.must:g}{unit}, aim {over}{row.aim:g}{unit}"
            click.echo(f"{row.name:20} {row.title:70} {bounds}{not_here}")
        return
    build_programs()
    rounds = rounds or (2 if quick else 5)
    settings = Settings(
        seconds or (0.3 if quick else 1.0), warmup_s=0.3, idle_s=2.0 if quick else 10.0,
        connections_max=1_000 if quick else 10_000, pauses=2 if quick else 5,
    )  # fmt: skip
    invalid = None if tcp_only else sidestep_missing()
    if invalid:
        tell(f"nothing runs under sidestep: {invalid}")
    no_sockmap = "left out by --no-peer" if no_peer else sockmap_missing()
    if no_sockmap and not tcp_only:
        tell(f"no peer: {no_sockmap}")
    before = Machine.now()
    passed_on = ["--rounds", str(rounds), "--seconds", str(settings.seconds), *(["--quick"] if quick else [])]
    passed_on += [*(["--tcp-only"] if tcp_only else []), *(["--promote-after", promote_after] if promote_after else [])]
    passed_on += ["--no-peer"] if no_sockmap else []
    results, skipped = [], []
    for row in rows:
        if lacks := missing(row):
            skipped += [{"row": row.name, "why": why} for why in lacks]
            tell(f"{row.name}: skipped: {'; '.join(lacks)}")
        elif row.user and os.geteuid() == 0:
            results.append(run_elsewhere(row, passed_on))
        else:
            outcome = run_row(
                row, rounds=rounds, settings=settings, promote_after=promote_after, with_sidestep=not tcp_only,
                invalid=invalid, tell=tell, with_peer=not tcp_only and no_sockmap is None,
            )  # fmt: skip
            results.append(outcome.as_json())
    document = {
        "machine": before.as_json() | {"text": str(before)}, "load_before": before.load, "load_after": os.getloadavg(),
        "settings": {"rounds": rounds, "seconds": settings.seconds, "promote_after": promote_after, "quick": quick},
        "peer": {"name": PEER, "missing": no_sockmap}, "rows": results, "skipped": skipped,
    }  # fmt: skip
    text = json.dumps(document, indent=1)
    if save is not None:
        save.write_text(text + "\n")
    if as_json:
        click.echo(text)
    else:
        render(json.loads(text), console)
    sys.exit(0 if tcp_only or all(result["reached"] in ("must", "aim") for result in results) else 1)
