"""`sidestep doctor` and `sidestep check`: can this machine, and can a program, use sidestep?"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from sidestep.cli.options import json_option, socket_option
from sidestep.cli.shown import show
from sidestep.observe import preload_check
from sidestep.observe.check import check_place, check_program
from sidestep.observe.doctor import Finding, Level, check_machine, run_checks
from sidestep.observe.doctor_rdma import rdma_checks

_VERDICTS = {
    Level.OK: "its connections to other programs under sidestep can be promoted",
    Level.NOTE: "its connections to other programs under sidestep can be promoted, with the limits noted above",
    Level.FAIL: "its connections stay on TCP",
}


@click.command()
@click.argument("programs", nargs=-1, metavar="[PROGRAM]...")
@socket_option
@json_option
def doctor(programs: tuple[str, ...], socket: Path, as_json: bool) -> None:
    """Check this machine, and whether the shim reaches each PROGRAM; say what to do.

    Exit code 1 if anything keeps connections on TCP, else 0.
    """
    machine = (*check_machine(socket), *run_checks(rdma_checks()))
    findings = [*machine, *(one for name in programs for one in check_program(name))]
    show({"findings": [one.as_json() for one in findings]}, _lines(findings), as_json=as_json, indent=1)
    sys.exit(_worst(findings) is Level.FAIL)


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] PROGRAM [ARG]...")
@socket_option
@json_option
def check(command: tuple[str, ...], socket: Path, as_json: bool) -> None:
    """Predict, before it is deployed, whether PROGRAM's connections can be promoted here; ARGs are not looked at.

    Looks at the program's file and libraries, and tries in this place what the shim would do. Run it in the container,
    as the user and with the limits that PROGRAM will have. PROGRAM is not run. Options stand before PROGRAM.

    Exit code 1 if its connections would stay on TCP, else 0.
    """
    preload_check.find(command[0])  # a program that is not there has no connections to judge
    findings = [*check_program(command[0]), *check_place(socket)]
    level = _worst(findings)
    document = {"program": command[0], "verdict": level.value, "findings": [one.as_json() for one in findings]}
    show(document, [*_lines(findings), f"{command[0]}: {_VERDICTS[level]}"], as_json=as_json, indent=1)
    sys.exit(level is Level.FAIL)


def _worst(findings: Sequence[Finding]) -> Level:
    return max((finding.level for finding in findings), key=list(Level).index)


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    """A line each, and the remedy below it where there is something to do."""
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        yield f"{finding.level.value:<4}  {finding.subject:<{width}}  {finding.text}"
        if finding.remedy and finding.level is not Level.OK:
            yield f"{'':<{width + 8}}{finding.remedy}"
