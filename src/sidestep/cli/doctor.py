"""`sidestep doctor`: can this machine, and can a program, use sidestep?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from sidestep import config
from sidestep.cli.findings import print_findings, worst
from sidestep.cli.options import json_option, socket_option
from sidestep.observe.check import check_program
from sidestep.observe.doctor import Level, check_machine


@click.command()
@click.argument("programs", nargs=-1, metavar="[PROGRAM]...")
@socket_option
@json_option
def doctor(programs: tuple[str, ...], socket: Path | None, as_json: bool) -> None:
    """Check this machine, and whether the shim reaches each PROGRAM; say what to do.

    Exit code 1 if anything keeps connections on TCP, else 0.
    """
    findings = list(check_machine(config.socket_path(socket)))
    for name in programs:
        findings += check_program(name)
    if as_json:
        click.echo(json.dumps({"findings": [finding.as_json() for finding in findings]}, indent=1))
    else:
        print_findings(findings)
    sys.exit(worst(findings) is Level.FAIL)
