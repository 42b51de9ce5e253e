"""The command line as click has it, which loads a subcommand when it is used, and its groups of nothing else."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping
from typing import Any, Final

import click

from sidestep import __version__
from sidestep.cli import ABOUT, EXIT_CODES, SECTIONS, page
from sidestep.errors import did_you_mean


class Group(click.Group):
    """A group that names the commands that are close to one that it does not have."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            nested = [f"{name} {args[0]}" for name in self.list_commands(ctx) if args[0] in self._below(ctx, name)]
            close = f"did you mean {' or '.join(nested)}?" if nested else did_you_mean(args[0], self.list_commands(ctx))
            ctx.fail(f"there is no command {args[0]!r}: {close or f'{ctx.command_path} --help lists all'}")
        return super().resolve_command(ctx, args)

    def _below(self, ctx: click.Context, name: str) -> list[str]:
        command = self.get_command(ctx, name)
        return command.list_commands(ctx) if isinstance(command, click.Group) else []


class LazyGroup(Group):
    """A group that imports a subcommand only when it is asked for.

    Args:
        lazy: By section of the help page: what that says of each, and the module that defines it under that name, or
            MODULE:NAME.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, Mapping[str, tuple[str, str]]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = lazy
        self.lazy = {name: known for section in lazy.values() for name, known in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return None
        module, _, name = self.lazy[cmd_name][1].partition(":")
        command = getattr(importlib.import_module(module), name or cmd_name)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}.{name or cmd_name} is not a command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.lazy))  # one column for all sections
        for title, section in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", text) for name, (text, _) in section.items()])


class _Top(LazyGroup):
    """The command itself, whose help page needs no click."""

    def get_help(self, ctx: click.Context) -> str:
        return page()


_RDMA: Final = {
    "list": ("List the RDMA devices of running processes.", "sidestep.cli.rdma_list:list_"),
    "server": ("Serve `sidestep rdma ping` and `bw`, and rping of librdmacm.", "sidestep.cli.rdma_server"),
    "ping": ("Measure how long RDMA Sends take to a server and back.", "sidestep.cli.rdma_measure"),
    "bw": ("Measure the bandwidth of RDMA Writes, Reads or Sends to a server.", "sidestep.cli.rdma_measure"),
    "bench": ("Compare TCP, rsockets, verbs and sidestep between two hosts.", "sidestep.cli.rdma_bench"),
    "profile": ("Measure which connections gain by the way to another host.", "sidestep.cli.rdma_bench"),
}
_SDP: Final = {
    "decode": ("Show SDP messages in words.", "sidestep.cli.sdp_decode"),
    "simulate": ("Play a conversation of two SDP ends and print its messages.", "sidestep.cli.sdp_simulate"),
}


@click.group(
    cls=_Top, lazy=SECTIONS, help=f"{ABOUT}\n\n{EXIT_CODES}",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)  # fmt: skip
@click.version_option(__version__, prog_name="sidestep")
def cli() -> None:
    gc.freeze()  # modules of the command are loaded: it starts next
    gc.enable()


@click.group(cls=LazyGroup, lazy={"Commands": _RDMA})
def rdma() -> None:
    """RDMA on any machine: what devices there are, and tools to try them.

    Two devices are RDMA adapters made of software, which need neither privileges nor hardware. `iwarp` speaks iWARP
    over TCP, `roce` InfiniBand's reliable connections over UDP (RoCEv2). `verbs` is one of the kernel's.
    """


@click.group(cls=LazyGroup, lazy={"Commands": _SDP})
def sdp() -> None:
    """The Sockets Direct Protocol: messages and captures in words, and conversations to look at."""
