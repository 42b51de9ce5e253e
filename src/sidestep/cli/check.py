"""`sidestep check`: what would become of a program's connections, here?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from sidestep import config
from sidestep.cli.findings import print_findings, worst
from sidestep.cli.options import json_option, socket_option
from sidestep.observe.check import check_place, check_program
from sidestep.observe.doctor import Level

_VERDICTS = {
    Level.OK: "its connections to other programs under sidestep can be promoted",
    Level.NOTE: "its connections to other programs under sidestep can be promoted, with the limits noted above",
    Level.FAIL: "its connections stay on TCP",
}


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] PROGRAM [ARG]...")
@socket_option
@json_option
def check(command: tuple[str, ...], socket: Path | None, as_json: bool) -> None:
    """Predict, before it is deployed, whether PROGRAM's connections can be promoted here; ARGs are not looked at.

    Looks at the program's file and libraries, and tries in this place what the shim would do: run it in the container,
    as the user and with the limits that PROGRAM will have. PROGRAM is not run. Options stand before PROGRAM.

    Exit code 1 if its connections would stay on TCP, else 0.
    """
    findings = [*check_program(command[0]), *check_place(config.socket_path(socket))]
    level = worst(findings)
    if as_json:
        document = {"program": command[0], "verdict": level.value, "findings": [one.as_json() for one in findings]}
        click.echo(json.dumps(document, indent=1))
    else:
        print_findings(findings)
        click.echo(f"{command[0]}: {_VERDICTS[level]}")
    sys.exit(level is Level.FAIL)
