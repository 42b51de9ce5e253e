"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sidestep import config
from sidestep.errors import Misuse

ValueT = TypeVar("ValueT")
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def parsed(parse: Callable[[str], ValueT]) -> Callable[[click.Context, click.Parameter, str | None], ValueT | None]:
    """A callback that reads an option's value with one of our own parsers, which raise Misuse."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> ValueT | None:
        try:
            return None if value is None else parse(value)
        except Misuse as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return convert


def promote_after_option(default: str | None, text: str) -> Callable[[CommandT], CommandT]:
    """`--promote-after`: how much life a connection must show."""
    return click.option(
        "--promote-after", metavar="CALLS[:BYTES]", callback=parsed(config.PromoteAfter.parse),
        default=default, show_default=default is not None, help=text,
    )  # fmt: skip


def ring_size_option(default: str | None, text: str) -> Callable[[CommandT], CommandT]:
    """`--ring-size`: bytes of a channel in each direction."""
    return click.option(
        "--ring-size", metavar="BYTES", callback=parsed(config.parse_ring_size),
        default=default, show_default=default is not None, help=text,
    )  # fmt: skip


def socket_option(command: CommandT) -> CommandT:
    """`--socket`: the provider to talk to."""
    return click.option(
        "--socket",
        type=click.Path(path_type=Path),
        help=(
            f"Socket of the provider, in a directory of mode 0700, which is made if missing (default: "
            f"${config.ENV_SOCKET}, else one in the user's runtime directory)."
        ),
    )(command)


def json_option(command: CommandT) -> CommandT:
    """`--json`: machine-readable output, whose names do not change."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)
