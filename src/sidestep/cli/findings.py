"""How `sidestep doctor` and `sidestep check` show what they found."""

from __future__ import annotations

from collections.abc import Sequence

import click

from sidestep.observe.doctor import Finding, Level


def worst(findings: Sequence[Finding]) -> Level:
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)


def print_findings(findings: Sequence[Finding]) -> None:
    """A line each, and the remedy below it where there is something to do."""
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        click.echo(f"{finding.level.value:<4}  {finding.subject:<{width}}  {finding.text}")
        if finding.remedy and finding.level is not Level.OK:
            click.echo(f"{'':<{width + 8}}{finding.remedy}")
