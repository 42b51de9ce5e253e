"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sidestep.cli.run_help import SOCKET
from sidestep.errors import Misuse

if TYPE_CHECKING:
    from pathlib import Path

    from sidestep.observe.connections import Connection
    from sidestep.settings import PromoteAfter

ValueT = TypeVar("ValueT")
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def parsed(parse: Callable[[Any], ValueT]) -> Callable[[click.Context, click.Parameter, Any], ValueT | None]:
    """A callback that reads an option's value with one of our own parsers, which raise Misuse."""

    def convert(ctx: click.Context, param: click.Parameter, value: Any) -> ValueT | None:
        try:
            return None if value is None else parse(value)
        except Misuse as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return convert


def together(*options: Callable[[CommandT], CommandT]) -> Callable[[CommandT], CommandT]:
    """Several options as one, in this order on the help page."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def promote_after_option(default: str | None, text: str) -> Callable[[CommandT], CommandT]:
    """`--promote-after`: how much life a connection must show."""

    def parse(text: str) -> PromoteAfter:
        from sidestep.settings import PromoteAfter  # help pages need none

        return PromoteAfter.parse(text)

    return click.option(
        "--promote-after", metavar="CALLS[:BYTES]", callback=parsed(parse),
        default=default, show_default=default is not None, help=text,
    )  # fmt: skip


def ring_size_option(default: str | None, text: str) -> Callable[[CommandT], CommandT]:
    """`--ring-size`: bytes of a channel in each direction."""

    def parse(text: str) -> int:
        from sidestep.settings import parse_ring_size

        return parse_ring_size(text)

    return click.option(
        "--ring-size", metavar="BYTES", callback=parsed(parse),
        default=default, show_default=default is not None, help=text,
    )  # fmt: skip


# Choice of connections; see `matching`.
selection_options = together(
    click.option("--pid", type=int, multiple=True, help="Only connections of this process. May be repeated."),
    click.option("--program", multiple=True, help="Only connections of programs of this name. May be repeated."),
    click.option("--port", type=click.IntRange(0, 65535), multiple=True, help="Only this local or remote port."),
)


def matching(
    pid: tuple[int, ...], program: tuple[str, ...], port: tuple[int, ...], address: tuple[str, ...] = ()
) -> Callable[[Connection], bool]:
    """Test for connections that were chosen; an empty choice leaves nothing out.

    An address is ADDRESS:PORT as `sidestep ss` shows it, or :PORT.
    """
    ports = {f":{number}" for number in port}

    def wanted(found: Connection) -> bool:
        ends = (found.local, found.remote)
        their_ports = {f":{end.rpartition(':')[2]}" for end in ends}
        return (
            (not pid or found.pid in pid)
            and (not program or found.program in program)
            and (not ports or not ports.isdisjoint(their_ports))
            and (not address or not their_ports.union(ends).isdisjoint(address))
        )

    return wanted


def _socket(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Path:
    from sidestep import config

    return config.socket_path(value)


# The provider to talk to: always a path, whether it was given or not.
socket_option = click.option(
    "--socket",
    type=click.Path(),
    metavar="PATH",
    callback=_socket,
    help=SOCKET,
)

# Machine-readable output, whose names do not change.
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
