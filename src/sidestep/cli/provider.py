"""`sidestep provider`: start, stop, status."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from sidestep import config, gain, limits
from sidestep.cli.group import Group
from sidestep.cli.options import json_option, parsed, promote_after_option, ring_size_option, socket_option, together
from sidestep.cli.shown import show
from sidestep.errors import Misuse, Unavailable
from sidestep.provider import control, daemon
from sidestep.settings import (
    TRANSPORTS,
    PolicyPlace,
    PromoteAfter,
    Proof,
    ProviderSettings,
    RemoteSettings,
    parse_cpus,
    parse_workers,
    policy_places,
)

_STOP_FIRST: Final = "'sidestep provider stop' first (promoted connections go on), or give another --socket"


@click.group(cls=Group)
def provider() -> None:
    """Start, stop or look at the provider, which pairs the two ends of a connection.

    `sidestep run` starts one by itself. Ending it, even by kill -9, disturbs no connection.
    """


@provider.command()
@promote_after_option(
    str(PromoteAfter()),
    "The shims' default: promote after so many reads and writes, or bytes; CALLS alone means CALLS:2097152.",
)
@ring_size_option(f"{limits.RING_SIZE_DEFAULT >> 10}K", "The shims' default: size of a channel in each direction; "
                  f"without this option {limits.RING_SIZE_REMOTE >> 20}M with other hosts.")  # fmt: skip
@click.option("--offer-expiry", type=click.FloatRange(0.01, 3600), default=limits.OFFER_EXPIRY_S, show_default=True,
              help="Seconds until an offer that nobody claims is refused.")  # fmt: skip
@click.option("--idle-exit", type=click.FloatRange(0), default=limits.IDLE_EXIT_S, show_default=True,
              help="Seconds without programs until the provider leaves; 0: never.")  # fmt: skip
@click.option("--budget", type=click.IntRange(0), default=0,
              help="Bytes of all channels together (default: the machine's memory).")  # fmt: skip
@click.option("--proof", type=click.Choice([one.value for one in Proof]), default=Proof.LOOKUP.value,
              show_default=True, help="Proof that a program holds the connection it names. lookup: the kernel's "
              "answer, and from other network namespaces a duplicate of the socket; possession: always a duplicate; "
              "path: also datagrams between network namespaces.")  # fmt: skip
@click.option("--system", is_flag=True,
              help=f"Serve all users, at {config.SYSTEM_SOCKET} or at the socket that the service manager hands over, "
              "with --proof path and --idle-exit 0. Whose ends are paired: docs/internals/security.md.")  # fmt: skip
@click.option(
    "--remote",
    metavar="NETWORKS",
    multiple=True,
    help="Hosts with which connections are carried by SDP, where their provider does the same. Give addresses or "
    "networks, with commas or each with a --remote of its own. All their users are trusted with each other's "
    "connections, unless there is a key.",
)
@click.option(
    "--remote-key",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Secret of the providers of these hosts: at least 32 bytes, readable by you only.",
)
@click.option(
    "--workers",
    default="0",
    metavar="N",
    show_default=True,
    help="Processes among which connections with other hosts are spread, so that they share several CPUs; "
    "auto: one for each; 0: the provider carries them itself.",
)
@click.option(
    "--engine",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Compiled code for ordinary messages of connections with other hosts, beside the provider's own code; "
    "off: all messages pass in Python, which is slower.",
)
@click.option(
    "--engine-cpu",
    metavar="CPU[,CPU...]",
    callback=parsed(parse_cpus),
    help="CPUs for that code; with workers, each one's own runs on any of these. [default: all]",
)
@click.option(
    "--remote-promote",
    default=gain.BY_GAIN,
    metavar="gain|always|MESSAGE:MIB:TURN",
    show_default=True,
    help="Connections with other hosts that leave TCP. gain: those that gain by it, while they do, such as streams of "
    "small messages; always: all; figures: as gain, measured by 'sidestep rdma profile'.",
)
@click.option(
    "--remote-transports",
    default=",".join(TRANSPORTS),
    metavar="NAME[,NAME...]",
    show_default=True,
    help="The kinds of device that connections with other hosts go over, the first one that is there for both ends; "
    "'sidestep provider modules' lists them. A rule of the policy may name one: use sdp over NAME ...",
)
@click.option(
    "--remote-pinned",
    type=click.IntRange(1),
    metavar="BYTES",
    default=limits.REMOTE_PINNED_BYTES,
    show_default=True,
    help="Memory that RDMA devices of the kernel may pin for connections with other hosts. If the provider serves all "
    "users, each has a quarter of it. Connections beyond that stay on TCP.",
)
@click.option(
    "--remote-connections",
    type=click.IntRange(1),
    metavar="N",
    default=limits.RELAYS_MAX,
    show_default=True,
    help="Connections with other hosts that go over one device. For one more, the one that has been idle longest "
    "goes back to TCP; if none is idle, it stays there itself.",
)
@click.option("--foreground", is_flag=True, help="Serve in this process, until a signal or `stop`.")
@socket_option
@json_option
def start(
    promote_after: PromoteAfter, ring_size: int, offer_expiry: float, idle_exit: float, budget: int, proof: str,
    system: bool, remote: tuple[str, ...], remote_key: str | None, workers: str, engine: str,
    engine_cpu: tuple[int, ...] | None, remote_promote: str, remote_transports: str, remote_pinned: int,
    remote_connections: int, foreground: bool, socket: Path, as_json: bool,
) -> None:  # fmt: skip
    """Start a provider, and return once it listens.

    Exit code 0 also if one runs already, and 1 if that has other settings than the options given.

    With --foreground, return once it has ended, and fail if one runs already.
    """
    policy = policy_places(os.environ)
    if system:
        source = click.get_current_context().get_parameter_source
        socket = config.SYSTEM_SOCKET if source("socket") is ParameterSource.DEFAULT else socket
        idle_exit = 0 if source("idle_exit") is ParameterSource.DEFAULT else idle_exit
        policy = (PolicyPlace(config.SYSTEM_POLICY),)
    if remote_key and not remote:
        raise Misuse("--remote-key without --remote", remedy="name the hosts: --remote NETWORKS")
    workers_count = parse_workers(workers)
    if workers_count and not remote:
        raise Misuse("--workers without --remote", remedy="name the hosts: --remote NETWORKS")
    settings = ProviderSettings(
        socket, promote_after, ring_size, offer_expiry, idle_exit, budget, policy, system=system, proof=Proof(proof),
        remote=RemoteSettings.parse(
            ",".join(remote), remote_key, engine=engine == "on", engine_cpus=engine_cpu or (), promote=remote_promote,
            transports=remote_transports, pinned_max=remote_pinned, connections_max=remote_connections,
        ) if remote else None,
        workers=workers_count,
    )  # fmt: skip

    def tell(pid: int, started: bool, text: str) -> None:
        document = {"pid": pid, "started": started, "socket": str(socket)}
        show(document, [f"provider {pid} {text} {socket}"], as_json=as_json, talk=True)

    if foreground:
        daemon.serve(settings, on_ready=lambda: tell(os.getpid(), True, "serves"))
        return
    started = control.start(settings)
    with control.ControlConnection(socket, timeout_s=limits.START_TIMEOUT_S) as connection:
        pid = connection.status()["pid"]
        if not started and (options := _given()):
            _refuse_others(connection, settings, options, pid)
    tell(pid, started, "started at" if started else "runs already at")


def _given() -> list[str]:
    """The options of the command line that are settings of a provider."""
    context = click.get_current_context()
    given = (one for one in context.command.params if one.name and one.name not in ("socket", "as_json", "foreground"))
    return [one.opts[0] for one in given if context.get_parameter_source(str(one.name)) is ParameterSource.COMMANDLINE]


def _refuse_others(
    connection: control.ControlConnection, settings: ProviderSettings, options: list[str], pid: int
) -> None:
    """Raises Unavailable if the provider that runs has not the settings that are given."""
    what = f"provider {pid} runs already at {settings.socket}"
    try:
        others = control.differing(connection, settings, options)
    except Unavailable as error:
        raise Unavailable(f"{what}, and does not tell its settings", remedy=_STOP_FIRST) from error
    if others:
        raise Unavailable(f"{what}, with another {' and '.join(others)}", remedy=_STOP_FIRST)


@provider.command()
@socket_option
@json_option
def stop(socket: Path, as_json: bool) -> None:
    """Stop the provider. Promoted connections go on; new ones stay on TCP until the next provider."""
    pid = control.stop(socket)
    show({"pid": pid, "stopped": True}, [f"provider {pid} stopped"], as_json=as_json, talk=True)


@provider.command()
@socket_option
@json_option
def status(socket: Path, as_json: bool) -> None:
    """Show the provider's settings and counters. Exit code 1 if none answers."""
    with control.ControlConnection(socket) as connection:
        found = connection.status()
    workers = ", ".join(f"{each['pid']} ({each['connections']})" for each in found["workers"]) or "none"
    shown = found | {"policy": _policy_line(found["policy"]), "workers": workers} | found["counters"]
    del shown["counters"]
    width = max(map(len, shown))
    show(found, (f"{name:<{width}}  {value}" for name, value in shown.items()), as_json=as_json)


def _policy_line(policy: dict[str, Any]) -> str:
    line = f"{policy['rules']} rules of {', '.join(policy['places']) or 'no file'}"
    if policy["errors"]:
        line += f"; {policy['errors']} bad lines, see 'sidestep policy check': {policy['first_error']}"
    return f"{line}; changes may go unnoticed: {policy['blind']}" if policy["blind"] else line


@provider.command()
@socket_option
@json_option
def modules(socket: Path, as_json: bool) -> None:
    """List the offload protocols and transports that are installed: what they can do, or why they are refused."""
    with control.ControlConnection(socket) as connection:
        found = connection.document("modules")["modules"]
    show({"modules": found}, map(_module_line, found), as_json=as_json)


_module_options = together(
    click.argument("name"),
    click.option("--transport", "kind", flag_value="transport", default="protocol",
                 help="NAME is a transport, not a protocol."),
    socket_option,
    json_option,
)  # fmt: skip


@provider.command()
@_module_options
def add(name: str, kind: str, socket: Path, as_json: bool) -> None:
    """Start the offload protocol NAME, also one that was installed after the provider started, or was refused."""
    _change("module_add", name, kind, "is started", socket, as_json)


@provider.command()
@_module_options
def remove(name: str, kind: str, socket: Path, as_json: bool) -> None:
    """Stop the offload protocol NAME until it is added again. The connections of others go on."""
    _change("module_remove", name, kind, "is removed", socket, as_json)


def _change(op: str, name: str, kind: str, done: str, socket: Path, as_json: bool) -> None:
    with control.ControlConnection(socket) as connection:
        connection.document(op, name=name, kind=kind)
    show({"name": name, "done": True}, [f"{name} {done}"], as_json=as_json, talk=True)


def _module_line(one: dict[str, Any]) -> str:
    able = ", ".join(_abilities(one["capabilities"])) if one["capabilities"] else ""
    notes = "; ".join(filter(None, (able, one["why"]))) or "not loaded: no connection has asked for it"
    return f"{one['kind']:<9} {one['name']:<12} {one['state']:<9} {notes}"


def _abilities(capabilities: dict[str, Any]) -> Iterator[str]:
    yield " and ".join(f"IPv{version}" for version in capabilities["families"])
    for name in ("connect", "accept", "self_routing", "rdma", "local", "remote"):
        if capabilities[name]:
            yield name.replace("_", "-")
