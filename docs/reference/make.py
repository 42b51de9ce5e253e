"""Makes the reference from the code, so that it cannot promise what the code does not do.

`python docs/reference/make.py` writes schemas/*.json, which are kept in the repository; `--check` fails if one differs
from the code, or if a page cannot be made. `make.py DIRECTORY` writes the pages there: the documentation site and the
Debian package hold them (`make docs`, `make deb`).
"""

from __future__ import annotations

import errno
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import json_schemas

from sidestep import limits, places
from sidestep.api import sockets, streams
from sidestep.cli.group import cli
from sidestep.counters import NAMES
from sidestep.native import layout
from sidestep.native.layout import REASON_TEXT, Reason, State
from sidestep.native.reasons import REFUSAL_TEXT, REMEDY
from sidestep.observe.sockets import Outside
from sidestep.provider.carry.direction import MACHINES
from sidestep.rdma import verbs
from sidestep.rdma.conformance import CHECKS, Check
from sidestep.rdma.iwarp import counting as iwarp_counting
from sidestep.rdma.iwarp.startup import frame as start_frame
from sidestep.rdma.iwarp.startup import negotiation as startup
from sidestep.rdma.iwarp.startup import terms as start_terms
from sidestep.rdma.iwarp.terminate import CODE_TEXT, Condition, code_text
from sidestep.rdma.loopback import manager, settings
from sidestep.rdma.roce import counting as roce_counting
from sidestep.sdp import connection, errnos, header, hello, states, wire

HERE = Path(__file__).parent
WIDTH = 100
NOTICE = "<!-- Made from the code by docs/reference/make.py; change it there. -->"


def commands_page() -> str:
    """The help of every command."""
    sections = [f"{NOTICE}\n\n# Commands\n\nstdout is data, stderr is talk.\n"]
    for path, command in walk("sidestep", cli, None):
        sections.append(f"## {path}\n\n```text\n{help_of(path, command)}\n```\n")
    return "\n".join(sections)


def walk(path: str, command: click.Command, parent: click.Context | None) -> Iterator[tuple[str, click.Command]]:
    """A command and all below it, by path."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, parent=parent, info_name=path)
        for name in command.list_commands(context):
            if (child := command.get_command(context, name)) is not None:
                yield from walk(f"{path} {name}", child, context)


def help_of(path: str, command: click.Command) -> str:
    """The help page, laid out for a fixed width."""
    context = click.Context(
        command, info_name=path, max_content_width=WIDTH, terminal_width=WIDTH, help_option_names=["-h", "--help"]
    )
    return command.get_help(context)


def comments_of(module: Path, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each one-line `NAME: Final = VALUE  # comment` of a module, by prefix of the name: name and comment."""
    for name, comment in re.findall(r"(?m)^([A-Z][A-Z_]+): Final = .*?  # (.*)$", module.read_text()):
        if name.startswith(prefix):
            yield name, comment


def table(*columns: str, rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def in_words(bound: float | tuple[float, ...]) -> str:
    """A bound, or several in order."""
    return ", ".join(f"{each:,}" for each in bound) if isinstance(bound, tuple) else f"{bound:,}"


def limits_page() -> str:
    """Every bound of the Python side, and the environment of the shim."""
    bounds = [(f"`{name}`", in_words(getattr(limits, name)), text) for name, text in comments_of(Path(limits.__file__))]
    variables = [(f"`{getattr(places, name)}`", text) for name, text in comments_of(Path(places.__file__), "ENV_")]
    return f"""{NOTICE}

# Limits

{table("name", "value", "unit, reason, and what happens there", rows=bounds)}

# Environment

`sidestep run` sets these; a program may be started with them, and `LD_PRELOAD`, by hand as well (`sidestep run -- env`
prints both). That does not start a provider: `sidestep provider start` does.

{table("variable", "meaning", rows=variables)}
"""


def states_page() -> str:
    """States, reasons, refusals and counters."""
    states = [(f"`{state.name.lower()}`", text) for state, text in STATES.items()]
    reasons = [(f"`{one.name}`", text, REMEDY[one]) for one, text in REASON_TEXT.items() if one is not Reason.NONE]
    outside = [(f"`{one.name}`", one.text.replace("{}", "…"), one.remedy.replace("{}", "…")) for one in Outside]
    refusals = [(f"`{refusal.name}`", text) for refusal, text in REFUSAL_TEXT.items()]
    counters = [(f"`{name}`", text) for name, text in NAMES.items()]
    return f"""{NOTICE}

# States

What `sidestep ss` calls a connection.

{table("state", "meaning", rows=states)}

# Reasons

Why a connection is where it is (`reason` and `why` in `sidestep ss --json`), and what would change it.
`sidestep explain` says both, and looks at the other end for what this one cannot know.

{table("reason", "why", "what would change it", rows=reasons)}

Why a program is not under sidestep, or not with this provider (`sidestep explain`):

{table("reason", "the program …", "what would change it", rows=outside)}

# Counters

What the provider counts (`sidestep provider status`); a reason stands in braces.

{table("counter", "what", rows=counters)}

# Refusals

Why the provider refused an offer or a claim: the reasons of `offer_refused` and `claim_refused`.

{table("refusal", "why", rows=refusals)}
"""


STATES = {
    State.NATIVE: "plain TCP; may still be promoted",
    State.OFFERED: "plain TCP; an offer or a claim is with the provider",
    State.ATTACHED: "both ends hold the channel; the directions are switching",
    State.PROMOTED: "both directions go through shared memory",
    State.PINNED: "plain TCP, for as long as the reason holds",
}


def switch_page() -> str:
    """The switch-over of one direction: states and what moves them, for its sender and its receiver."""

    def half(states: type[Enum], events: type[Enum], moves: Mapping[tuple[Any, Any], Any]) -> str:
        arrows = "\n".join(f"    {a.name} --> {b.name} : {why.name.lower()}" for (a, why), b in moves.items())
        pairs = [
            (f"`{a.name}`", *(f"`{moves[a, why].name}`" if (a, why) in moves else "" for why in events)) for a in states
        ]
        return f"""```mermaid
stateDiagram-v2
    [*] --> {next(iter(states)).name}
{arrows}
```

{table("state", "meaning", rows=[(f"`{name}`", text) for name, text in comments(states).items()])}

{table("event", "meaning", rows=[(f"`{name}`", text) for name, text in comments(events).items()])}

{table("in", *(f"`{why.name}`" for why in events), rows=pairs)}"""

    backs = [(f"`{name}`", text) for name, text in comments(layout.Back).items()]
    return f"""{NOTICE}

# The switch-over of a direction

Each direction of a connection is two machines: one at the end that sends, one at the end that receives. Each end keeps
the state of its two halves in the slot of the connection (`tx_state`, `rx_state`), and moves it under the lock of the
direction. What one half has to know of the other it reads in the segment. A pair that has no state below cannot happen.
Why it works this way: [switch.md](../internals/switch.md).

## The sender

{half(layout.Tx, layout.TxEvent, layout.TX_TRANSITIONS)}

## The receiver

{half(layout.Rx, layout.RxEvent, layout.RX_TRANSITIONS)}

## How a round ends

Both ends may want to end a round at the same moment. One compare-and-swap on a word in the segment (`tx_back`: the
round and one of these) decides how; the end that comes second does what was decided.

{table("word", "meaning", rows=backs)}

As long as the sender has sent nothing by TCP after `BACK`, the reader may still recall what it has not read. That is
decided in the same way, on another word (`tx_follows`).

# A provider between

Where providers carry a connection, each of its ends has a part in a provider, and a link joins the two
([switch.md](../internals/switch.md)). Words in capitals are the link's. An event that is not in the tables,
caused by the other provider or by the application, ends the connection.

## The direction from its application

{half(*MACHINES["OUT"])}

## The direction to its application

{half(*MACHINES["IN"])}

## Bytes of that direction that are wanted again

Bytes go on coming until the other end has heard of it; when RESENDS comes, all of them have come.

{half(*MACHINES["RECALL"])}

## How an application ends its direction

Each provider keeps this twice: for its own application, as far as it has told the other provider, and for the other
application, as far as it has been told.

{half(*MACHINES["ENDING"])}

## A provider that goes

{half(*MACHINES["LEAVING"])}
"""


def comments(enum: type[Enum]) -> dict[str, str]:
    """Of each member what stands beside it."""
    found = dict(re.findall(r"(?m)^    ([A-Z_]+) = \d+  # (.*)$", inspect.getsource(enum)))
    return {member.name: found.get(member.name, "") for member in enum}


def sdp_page() -> str:
    """The tables of SDP: messages, states, modes, rules."""
    messages = [
        (
            f"`{int(mid):#04x}`",
            one.__name__,
            str(header.BSDH_LEN + one.LENGTH),
            "may follow" if one.PAYLOAD else "",
            "yes" if one.SOLICITED else "",
            first_line(one),
        )
        for mid, one in wire.MESSAGES.items()
    ]
    moves = "\n".join(f"    {a.name} --> {b.name} : {why.value}" for (a, why), b in states.TRANSITIONS.items())
    names = "\n".join(f"    {state.name} : {state.value}" for state in states.SdpState)
    modes = "\n".join(
        f"    {a.name.title()} --> {b.name.title()} : by the {master.value}"
        for (a, b), master in states.MODE_CHANGES.items()
    )
    sendable = [
        (f"`{state.name}`", ", ".join(wire.MESSAGES[mid].__name__ for mid in sorted(mids)))
        for state, mids in states.SENDABLE.items()
    ]
    forbidden = [
        (
            f"`{state.name}`",
            ", ".join(f"{wire.MESSAGES[mid].__name__} (`{rule}`)" for mid, rule in rules.items()),
            "a violation" if state in states.NO_PAYLOAD else "taken",
        )
        for state, rules in states.FORBIDDEN.items()
    ]
    rules_of_modes = [
        (
            mode.name.title(),
            {None: "as many as MaxAdverts", 0: "none", 1: "one"}[rules.src_avails],
            "" if rules.src_avails == 0 else "at least a byte" if rules.src_avail_payload else "none",
            "yes" if rules.sink_avails else "no",
        )
        for mode, rules in states.MODES.items()
    ]
    rules = [(f"`{name}`", text) for name, text in {**header.RULES, **hello.RULES, **states.RULES}.items()]
    why = dict(re.findall(r'(?m)^    ([A-Z_]+) = ".*?"  # (.*)$', inspect.getsource(connection.SdpCause)))
    ends = [(f"`{cause.name}`", why[cause.name], errno.errorcode[number]) for cause, number in errnos.BY_CAUSE.items()]
    return f"""{NOTICE}

# SDP: messages, states, modes and rules

The facts behind these tables, with their sources: [wire/sdp.md](../wire/sdp.md). How the core works:
[sdp.md](../internals/sdp.md).

## Messages

{table("MID", "message", "bytes", "payload", "solicited", "meaning", rows=messages)}

## States of a connection

```mermaid
stateDiagram-v2
{names}
    [*] --> CLOSED
{moves}
```

What an end may send:

{table("state", "messages", rows=sendable)}

What breaks a rule when it comes (everything else is taken, or judged by the mechanism it belongs to; in states that
are not here messages have crossed the end of the connection and are dropped):

{table("state", "messages", "payload", rows=forbidden)}

## Flow-control modes

Each half-connection has one; both begin in Combined.

```mermaid
stateDiagram-v2
    [*] --> Combined
{modes}
```

{table("mode", "SrcAvails outstanding", "payload of a SrcAvail", "SinkAvails", rows=rules_of_modes)}

## Rules

A message that breaks one of these ends the connection: with AbortConn first where DisConn had been sent, by taking
the transport connection down at once where not. `rule` of the error has the name.

{table("rule", "what it says", rows=rules)}

## How a connection ends

`Connection.cause`, and the errno that a program gets for it, once. After that, reading finds the end of the stream, and
writing fails with EPIPE.

{table("cause", "what has happened", "errno", rows=ends)}
"""


def counters_of(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((f"`{name}`", text) for name, text in names.items())


def row_of_check(check: Check) -> tuple[str, str, str, str]:
    return f"`{check}`", check.rule, check.clause, ", ".join(map(str, check.needs))


def rdma_page() -> str:
    """What devices declare, what the loopback device can be told, and what every device is checked for."""
    handshake = [
        (f"`{state.name}`", kind.name, first_line(does)) for (state, kind), does in manager.TRANSITIONS.items()
    ]
    checks = [
        (group, table("check", "rule", "from", "needs", rows=[row_of_check(each) for each in members]))
        for group, members in groupby(CHECKS, key=lambda each: each.group)
    ]
    needs = sorted({(need.name, need.why_not) for check in CHECKS for need in check.needs})
    suite = "\n\n".join(f"### {group}\n\n{rows}" for group, rows in checks)
    return f"""{NOTICE}

# RDMA: attributes, the loopback device, and the checks of the conformance suite

Their purpose, and how to write a device: [devices.md](../internals/devices.md).

## What a device declares

`DeviceAttributes`; the defaults are those of an InfiniBand device.

{table("attribute", "default", "meaning", rows=fields_of(verbs, "DeviceAttributes"))}

`QpCapabilities`, asked for with each queue pair:

{table("capability", "default", "meaning", rows=fields_of(verbs, "QpCapabilities"))}

## The loopback device

`Timing`: how long things take in virtual time. A pair is the least and the most.

{table("field", "default", "meaning", rows=fields_of(settings, "Timing"))}

`Faults`: what goes wrong.

{table("field", "default", "meaning", rows=fields_of(settings, "Faults"))}

Its connection manager:

{table("state", "message", "what it means there", rows=handshake)}

## Counters of devices

`sidestep rdma list -v` shows them, `sidestep top` their rates. A reason or operation stands in braces, as in
`bytes_sent{{write}}`; codes of a Terminate have four digits. Zeros are left out, except those of the present.

{table("counter of iwarp", "meaning", rows=counters_of(iwarp_counting.NAMES))}

{table("counter of roce", "meaning", rows=counters_of(roce_counting.EVENTS))}

## The conformance suite

{len(CHECKS)} checks; each is seen to fail against a device that breaks its rule (`tests/rdma/rdma_mutants.py`).
A check applies to two devices that meet its needs:

{table("need", "why a check is left out without it", rows=needs)}

{suite}
"""


def iwarp_page() -> str:
    """The start-up of a connection and the message that ends one."""
    names = "\n".join(f"    {state.name} : {state.value}" for state in start_terms.MpaState)
    moves = "\n".join(f"    {a.name} --> {b.name} : {why.value}" for (a, why), b in start_terms.TRANSITIONS.items())
    causes = [(f"`{cause.name}`", cause.value) for cause in start_terms.MpaCause]
    rules = [(f"`{name}`", text) for name, text in {**start_frame.RULES, **startup.RULES}.items()]
    answers = [
        (f"`{condition.name}`", condition.value, code_text(condition.code), condition.includes.value)
        for condition in Condition
    ]
    codes = [(code_text(code),) for code in CODE_TEXT]
    return f"""{NOTICE}

# iWARP: start-up and Terminate

The facts behind these tables, with their sources: [wire/iwarp.md](../wire/iwarp.md).

## States of a start-up

An initiator begins in `WAIT_REPLY`, a responder in `WAIT_REQUEST`.

```mermaid
stateDiagram-v2
{names}
{moves}
```

## Settings

{table("setting", "default", "meaning", rows=fields_of(start_terms, "MpaSettings"))}

`ReadDepths`:

{table("field", "default", "meaning", rows=fields_of(start_terms, "ReadDepths"))}

## Why a start-up fails

`Failed.cause`:

{table("cause", "what has happened", rows=causes)}

`Failed.rule` of a violation:

{table("rule", "what it says", rows=rules)}

## What is answered by which Terminate

{table("condition", "what is wrong", "code", "includes", rows=answers)}

All codes:

{table("code", rows=codes)}
"""


def fields_of(module: ModuleType, name: str) -> Iterator[tuple[str, str, str]]:
    """Each `name: type = value  # comment` of a record: name, value and comment."""
    body = inspect.getsource(getattr(module, name))
    for field, value, comment in re.findall(r"(?m)^    ([a-z_]+): .*? = (.*?)  # (.*)$", body):
        yield f"`{field}`", f"`{value}`".replace("|", "\\|"), comment


def first_line(record: object) -> str:
    """What a record says of itself."""
    return (record.__doc__ or "").strip().splitlines()[0]


def python_page() -> str:
    """What SDP in Python programs has."""
    classes = (sockets.SdpSocket, streams.SdpReader, streams.SdpWriter, streams.SdpServer)
    tables = "\n\n".join(
        f"## {each.__name__}\n\n{table('name', 'what it does', rows=members_of(each))}" for each in classes
    )
    return f"""{NOTICE}

# SDP in Python programs

What they are for, and how to get one: [python-api.md](../guides/python-api.md#sdp-from-and-into-your-own-memory).

{tables}
"""


def members_of(cls: type) -> Iterator[tuple[str, str]]:
    """The public methods and attributes of a class, in the order of its source."""
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"`{name}`", (inspect.getdoc(member) or "").partition("\n")[0]
        elif callable(member):
            arguments = list(inspect.signature(member).parameters.values())[1:]
            shown = ", ".join(_argument(each) for each in arguments)
            yield f"`{name}({shown})`", (inspect.getdoc(member) or "").partition("\n")[0]


def _argument(given: inspect.Parameter) -> str:
    return given.name if given.default is given.empty else f"{given.name}={given.default!r}"


PAGES = {
    "commands.md": commands_page,
    "iwarp.md": iwarp_page,
    "limits.md": limits_page,
    "python.md": python_page,
    "rdma.md": rdma_page,
    "sdp.md": sdp_page,
    "states.md": states_page,
    "switch.md": switch_page,
}


def main() -> int:
    """Writes pages or schemas, or checks both; returns 1 if a check fails."""
    if sys.argv[1:] and sys.argv[1] != "--check":
        place = Path(sys.argv[1])
        place.mkdir(parents=True, exist_ok=True)
        for name, page in PAGES.items():
            (place / name).write_text(page(), encoding="utf-8")
        return 0
    check = sys.argv[1:] == ["--check"]
    stale = []
    for name, text in json_schemas.pages():
        path = HERE / name
        if not path.exists() or path.read_text().split() != text.split():
            stale.append(name)
            if not check:
                path.write_text(text)
    if check:
        empty = [name for name, page in PAGES.items() if not page().startswith(NOTICE)]
        assert not empty, empty
    if check and stale:
        print(f"not what the code says: {', '.join(stale)}; run 'make docs'", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
