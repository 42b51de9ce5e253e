"""`sidestep policy`: check the files, try a connection, watch decisions as they are made."""

from __future__ import annotations

import os
import pwd
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click

from sidestep import config, limits
from sidestep.cli.group import Group
from sidestep.cli.options import json_option, socket_option
from sidestep.cli.shown import show
from sidestep.errors import Misuse, Unavailable, counted
from sidestep.loop import Loop
from sidestep.observe.sockets import addresses
from sidestep.policy.grammar import printable
from sidestep.policy.load import compile_all
from sidestep.policy.model import ROLE_WORDS, Level, Pair, Role, Rule, Subject
from sidestep.policy.review import review
from sidestep.provider.control import ControlConnection
from sidestep.provider.decisions import Decisions
from sidestep.provider.network.routes import Network
from sidestep.provider.policy_files import read_places
from sidestep.routing import Route
from sidestep.settings import PolicyPlace, policy_places
from sidestep.switch.modules import FIRST, PROTOCOLS_GROUP, Modules, Protocols, installed
from sidestep.switch.protocol import Endpoint, OffloadProtocol, Request, Services
from sidestep.switch.transports import TRANSPORTS_GROUP, Transports

Places = Sequence[PolicyPlace]

_SOFTWARE: Final = "none in hardware: one in software stands in its place"
_NO_DEVICE: Final = "none: no RDMA device sends there"
_SYS: Final = Path("/sys")


def _places(files: Sequence[Path]) -> Places:
    """The files that were named, else those that a provider started now would read."""
    return [PolicyPlace(file.absolute(), required=True) for file in files] or policy_places(os.environ)


def _installed() -> list[str]:
    """The offload protocols that are installed here, in order of preference."""
    return sorted(installed(PROTOCOLS_GROUP), key=lambda name: (name != FIRST, name))


@click.group(cls=Group)
def policy() -> None:
    """Rules about offloading: check them, try a connection, watch decisions.

    Rules are read from $SIDESTEP_POLICY, else ~/.config/sidestep/policy.conf, and then from /etc/sidestep/policy.conf.
    The first that matches decides.
    """


# ---- check ----


@policy.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[FILE]...")
@click.option("--strict", is_flag=True, help="Exit code 1 for warnings too.")
@json_option
def check(files: tuple[Path, ...], strict: bool, as_json: bool) -> None:
    """Check policy files, those of libsdp among them; without FILE the ones that a provider would read.

    Tells every bad line with its word and the remedy, and warns of rules that can never decide. Exit code 1 if a
    provider would not take a file.
    """
    places = _places(files)
    found = read_places(places)
    statements = [statement for one in found for statement in one.statements]
    problems = [problem for one in found for problem in one.problems]
    problems += review(statements, _installed())
    read = [str(path) for one in found for path in one.files]
    problems.sort(key=lambda one: (read.index(one.file), one.line, one.column))
    counts = Counter(problem.level for problem in problems)
    rules = sum(isinstance(statement, Rule) for statement in statements)
    pairs = sum(isinstance(statement, Pair) for statement in statements)
    document = {
        "files": read, "rules": rules, "pairs": pairs, "errors": counts[Level.ERROR],
        "warnings": counts[Level.WARNING], "problems": [problem.as_json() for problem in problems],
    }  # fmt: skip
    summary = (
        f"{counted(counts[Level.ERROR], 'error')}, {counted(counts[Level.WARNING], 'warning')}; "
        f"{counted(rules, 'rule')} and {counted(pairs, 'pair')}"
    )
    show(document, [*(problem.report() for problem in problems), summary], as_json=as_json, indent=1)
    missing = [] if as_json else [one.path for one in places if not one.path.exists() and not one.required]
    for path in missing:
        click.echo(f"there is no {path}", err=True)
    sys.exit(1 if counts[Level.ERROR] or (strict and problems) else 0)


# ---- test ----


@policy.command()
@click.argument("role", type=click.Choice([*ROLE_WORDS]))
@click.argument("program")
@click.argument("endpoint", metavar="ADDRESS:PORT")
@click.option("--user", metavar="NAME|UID", help="User of PROGRAM (default: you).")
@click.option("--file", "files", type=click.Path(path_type=Path), multiple=True,
              help="Ask these rules, not those in force. May be repeated.")  # fmt: skip
@socket_option
@json_option
def test(
    role: str, program: str, endpoint: str, user: str | None, files: tuple[Path, ...], socket: Path, as_json: bool
) -> None:
    """Tell what would become of a connection, because of which line, over which route and protocol.

    For connect, ADDRESS:PORT is where PROGRAM connects to; for listen, where it accepts. The running provider is asked;
    without one the files are read here. Nothing is connected.
    """
    where = parse_endpoint(endpoint)
    uid, gids = _identity(user)
    subject = Subject((os.path.basename(program),), uid, gids)  # noqa: PTH119 - a name, not a path of ours
    if files or not config.answers(socket):
        found = _decide_here(_places(files), ROLE_WORDS[role], subject, where)
        if not files:
            click.echo("no provider runs: these are the files, protocols and routes as they are here", err=True)
    else:
        with ControlConnection(socket) as control:
            found = control.document(
                "decide", role=ROLE_WORDS[role].value, program=subject.programs[0], uid=uid, gids=sorted(gids),
                address=str(where.address), port=where.port,
            )  # fmt: skip
    if found["route"] is None and ROLE_WORDS[role] is Role.CONNECT:
        found["route"] = _route_from_here(where, uid)
    found["device"] = device_of(found["route"]["interface"]) if found["route"] else None
    found["note"] = None
    within = found.pop("within_namespace", False)
    leaves = bool(found["route"]) and not found["route"]["local"]
    if leaves and within:
        found["why"] = (
            f"it stays on TCP: {where.address} is of another network namespace or host, and with this provider "
            f"{found['protocol']} pairs only within its own network namespace"
        )
        found["protocol"] = None
    elif found["protocol"] == FIRST and leaves:
        found["note"] = (
            f"{where.address} is not of this network namespace: {FIRST} carries it only if it is of this host"
        )
    asked = {"role": ROLE_WORDS[role].value, "program": subject.programs[0], "uid": uid, "endpoint": str(where)}
    show(asked | found, verdict_lines(asked | found), as_json=as_json, indent=1)


def parse_endpoint(text: str) -> Endpoint:
    """`ADDRESS:PORT`, IPv6 in brackets; a name is looked up. Raises Misuse."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise Misuse(f"{text!r} is not ADDRESS:PORT", remedy="for example 10.0.0.5:6379 or [::1]:80")
    return Endpoint(addresses(host)[0], int(port))


def _identity(user: str | None) -> tuple[int, frozenset[int]]:
    """The uid and groups of a user; None: of the caller."""
    if user is None:
        return os.geteuid(), frozenset({os.getegid(), *os.getgroups()})
    try:
        entry = pwd.getpwuid(int(user)) if user.isascii() and user.isdigit() else pwd.getpwnam(user)
    except (KeyError, OverflowError) as error:
        if user.isascii() and user.isdigit() and int(user) < 1 << 32:
            return int(user), frozenset()
        raise Misuse(f"there is no user {user!r}", remedy="give a name or a number") from error
    return entry.pw_uid, frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))


def _decide_here(places: Places, role: Role, subject: Subject, where: Endpoint) -> dict[str, Any]:
    """The answer of a provider as `sidestep run` would start it, with the rules of these files; raises PolicyError."""
    policy = compile_all(read_places(places))
    loop = Loop()
    services = Services(loop=loop, log=lambda _text: None, remote=None)
    protocols: Protocols = Modules(
        OffloadProtocol,  # type: ignore[type-abstract]  # what must be derived from it, not made
        partial(installed, PROTOCOLS_GROUP), services, lambda _name, _error: None,
    )  # fmt: skip
    services.transports = Transports(
        partial(installed, TRANSPORTS_GROUP), services, lambda _name, _error: None, order=(), route=_route
    )
    decisions = Decisions(protocols, lambda: policy, _route, time.time)
    if role is Role.CONNECT:
        verdict = decisions.connect(subject, Request(None, where, None), dry=True)
    else:
        verdict = decisions.would_listen(subject, where)
    within = verdict.protocol is not None and not verdict.protocol.capabilities.remote
    protocols.stop()
    loop.close()
    return verdict.as_json() | {"within_namespace": within}


def _route(*to: Any, **how: Any) -> Route:
    """Result of `Network.route` at this moment."""
    with closing(Network(lambda _: None)) as network:
        return network.route(*to, **how)


def _route_from_here(where: Endpoint, uid: int) -> dict[str, Any] | None:
    """The kernel's way there; None if there is none, or this kernel does not show it."""
    try:
        return _route(where.address, uid=uid).as_json()
    except Unavailable as error:
        click.echo(error.message, err=True)
        return None


def verdict_lines(found: dict[str, Any]) -> list[str]:
    """Decision about a connection, in words."""
    verb = "connecting to" if found["role"] == "connect" else "accepting at"
    who = f"{printable(found['program'])} of uid {found['uid']}"
    lines = [
        f"{who}, {verb} {found['endpoint']}: {found['protocol'] or 'tcp'}",
        f"  why    {printable(found['why'])}",
        f"  rule   {_rule_text(found['rule']) or 'none matches: both'}",
    ]
    if found["route"]:
        lines.append(f"  route  {_route_text(found['route'])}")
        if not found["route"]["local"]:
            lines.append(f"  device {printable(found['device'] or (_SOFTWARE if found['protocol'] else _NO_DEVICE))}")
    if found["note"]:
        lines.append(f"  note   {found['note']}")
    return lines


def _rule_text(rule: dict[str, Any] | None) -> str:
    return printable(f"{rule['file']}:{rule['line']}: {rule['text']}") if rule else ""


def _route_text(route: dict[str, Any]) -> str:
    way = "this host" if route["local"] else f"over {route['first_hop']}" if route["first_hop"] else "on the link"
    return f"{way}, by {printable(route['interface'])}" + (f", from {route['source']}" if route["source"] else "")


# ---- trace ----


@policy.command()
@click.option("--no-follow", is_flag=True, help="Stop after those that the provider remembers.")
@socket_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document a line.")
def trace(no_follow: bool, socket: Path, as_json: bool) -> None:
    """Print decisions about connections: those that the provider remembers, then each as it is made.

    A line says when, which end, which program of which user, the destination or where it was accepted, what carries it,
    and why. Ends with the provider (exit code 1) or by Ctrl-C.
    """
    try:
        with ControlConnection(socket) as control:
            _follow(control, no_follow=no_follow, as_json=as_json)
    except KeyboardInterrupt:
        return


def _follow(control: ControlConnection, *, no_follow: bool, as_json: bool) -> None:
    after = 0
    while True:
        reply = control.document("trace", after=after)
        decisions = reply["decisions"]
        if after and decisions and (missed := decisions[0]["sequence"] - after - 1) > 0:
            click.echo(f"{counted(missed, 'decision')} more than could be followed", err=True)
        for decision in decisions:
            show(decision, [trace_line(decision)], as_json=as_json)
        after = reply["next"]
        if decisions:
            continue
        if no_follow:
            return
        time.sleep(limits.TRACE_POLL_S)


def trace_line(decision: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(decision["time"]).astimezone().strftime("%H:%M:%S.%f")[:-3]
    arrow = "->" if decision["role"] == "connect" else "<-"
    line = (
        f"{at} {printable(decision['program'] or '(gone)')}({decision['uid']}) {arrow} {decision['endpoint']} "
        f"{decision['protocol'] or 'tcp'}: {printable(decision['why'])}"
    )
    rule = decision["rule"]
    return f"{line} [{_rule_text(rule)}]" if rule and rule["text"] not in decision["why"] else line


def device_of(interface: str, root: Path = _SYS) -> str | None:
    """The RDMA device that sends over `interface`; None if there is none. `root` is where sysfs is.

    Every entry of a port's GID table names its interface (a VLAN's as well). An adapter's own directory lists its RDMA
    devices.
    """
    if not interface or interface in (".", "..") or "/" in interface:
        return None
    for device in _entries(root / "class/infiniband"):
        for port in _entries(device / "ports"):
            if any(_text(index) == interface for index in _entries(port / "gid_attrs/ndevs")):
                return device.name
    return next((device.name for device in _entries(root / "class/net" / interface / "device/infiniband")), None)


def _entries(directory: Path) -> Iterator[Path]:
    """Entries of a directory, in order; none if it is not there."""
    try:
        found = list(islice(directory.iterdir(), limits.SYSFS_ENTRIES_MAX))
    except OSError:  # errors: no such class of devices here, or the device has just gone
        return
    yield from sorted(found)


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # EINVAL: this entry of the GID table is empty
        return None
