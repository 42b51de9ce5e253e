"""`sidestep sdp simulate`: seeded conversations."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator

import click

from sidestep.cli.shown import printable, show
from sidestep.errors import Misuse
from sidestep.sdp.simulate.conversation import Conversation, Outcome, Surprise
from sidestep.sdp.simulate.plan import PlanKind, draw
from sidestep.sdp.simulate.trace import Trace

_KINDS = [kind.value for kind in PlanKind]


@click.command()
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Decides everything.")
@click.option("--count", type=click.IntRange(1), default=1, show_default=True, help="Conversations, a seed each.")
@click.option("--kind", type=click.Choice(_KINDS), help="Kind of conversation, instead of the seed's choice.")
@click.option("--draw", "as_ladder", is_flag=True, help="A diagram: the ends are the sides, time goes down.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a conversation.")
def simulate(seed: int, count: int, kind: str | None, as_ladder: bool, as_json: bool) -> None:
    """Play a conversation of two SDP ends and print its messages.

    Both ends and their programs run over a device that exists in this process only, in virtual time. The seed decides
    the settings of both, what the programs send, receive, cancel and close, how long messages take, and what goes
    wrong. If nothing does, received bytes are compared with sent ones.

    Time is in microseconds. An arrow of two dashes is an SDP message, RDMA operations and the connection manager's
    messages say what they are; lines of `left:` and `right:` are actions and results of a program.

    With --count only a line for each conversation is printed, and all of one that fails.

    Exit code 1 if anything was not as it must be; the seed tells how to see it again.
    """
    if as_ladder and as_json:
        raise Misuse("--draw and --json", remedy="choose one of them")
    chosen = None if kind is None else PlanKind(kind)
    failed: list[int] = []
    kinds: Counter[str] = Counter()
    for number in range(seed, seed + count):
        trace = Trace() if count == 1 or as_json else None
        conversation, result = _play(number, chosen, trace)
        if isinstance(result, Surprise):
            failed.append(number)
            if trace is None:  # once more, to see it
                trace = Trace()
                conversation, _ = _play(number, chosen, trace)
            _show_failure(number, conversation, result, trace, as_json=as_json, as_ladder=as_ladder)
            continue
        kinds[result.kind.value] += 1
        told = _lines(trace, as_ladder=as_ladder) if trace is not None else ()
        show(_as_json(result, trace), [*told, f"seed {number}: {_summary(result)}"], as_json=as_json)
    if count > 1 and not as_json:
        found = ", ".join(f"{kinds[one]} {one}" for one in _KINDS if kinds[one])
        click.echo(f"{count} conversations: {found or 'none ended well'}; {len(failed)} failed", err=True)
    if failed:
        click.echo(f"hint: sidestep sdp simulate --seed {failed[0]}{f' --kind {kind}' if kind else ''}", err=True)
        sys.exit(1)


def _play(seed: int, kind: PlanKind | None, trace: Trace | None) -> tuple[Conversation, Outcome | Surprise]:
    conversation = Conversation(draw(seed, kind=kind), trace)
    try:
        return conversation, conversation.run()
    except Surprise as surprise:
        return conversation, surprise


def _lines(trace: Trace, *, as_ladder: bool) -> Iterator[str]:
    width = shutil.get_terminal_size((120, 24)).columns
    return map(printable, trace.ladder(width) if as_ladder else trace.lines())


def _summary(outcome: Outcome) -> str:
    left, right = outcome.messages
    to_left, to_right = outcome.received
    return (
        f"{outcome.kind.value}; {left} SDP messages from left to right, {right} back; {to_right} bytes arrived at the "
        f"right, {to_left} at the left; over after {outcome.ended_s * 1e3:.3f} ms of virtual time"
    )


def _as_json(outcome: Outcome, trace: Trace | None) -> dict[str, object]:
    return {
        "seed": outcome.seed,
        "kind": outcome.kind.value,
        "messages": {"left": outcome.messages[0], "right": outcome.messages[1]},
        "received": {"left": outcome.received[0], "right": outcome.received[1]},
        "ended_s": outcome.ended_s,
        "fault": None,
        "entries": [] if trace is None else trace.as_json(),
    }


def _show_failure(
    seed: int, conversation: Conversation, surprise: Surprise, trace: Trace, *, as_json: bool, as_ladder: bool
) -> None:
    found = {"seed": seed, "kind": conversation.plan.kind.value, "fault": str(surprise), "entries": trace.as_json()}
    show(found, _lines(trace, as_ladder=as_ladder), as_json=as_json)
    if not as_json:
        click.echo(f"sidestep: seed {seed}: {surprise}", err=True)
