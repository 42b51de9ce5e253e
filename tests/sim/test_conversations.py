"""Ten thousand seeded conversations: what arrives is what was sent, and what was lent is given back.

`.venv/bin/python tests/simulate/show.py N` shows a conversation that failed. SIDESTEP_SIMULATIONS is the number
of seeds, and SIDESTEP_SIMULATIONS_FROM the first one: a nightly run takes others.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
from selection import rotate

from sidestep.sdp.halves import Halves
from sidestep.sdp.simulate import plan
from sidestep.sdp.simulate.conversation import Conversation, Outcome, Surprise
from sidestep.sdp.simulate.plan import PlanKind
from sidestep.sdp.simulate.trace import Trace
from sidestep.sdp.sink import Sink
from sidestep.sdp.source import Source
from sidestep.sdp.wire import Mid
from simulate.conversation import CheckedConversation, converse
from simulate.plan import draw

COUNT = int(os.environ.get("SIDESTEP_SIMULATIONS", "10000"))
FIRST = int(os.environ.get("SIDESTEP_SIMULATIONS_FROM", "0"))
CHUNK = 250
LIMIT_S = 300


def faults(seeds: range) -> list[str]:
    found = []
    for seed in seeds:
        try:
            converse(seed)
        except Surprise as surprise:
            found.append(f"tests/simulate/show.py {seed}: {surprise}")
    return found


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("begin", rotate(range(FIRST, FIRST + COUNT, CHUNK), ci=6))
def test_conversations(begin: int) -> None:
    assert faults(range(begin, min(begin + CHUNK, FIRST + COUNT))) == []


# Of 300 conversations so many at least: what occurs seldom is soon not tried at all.
FLOORS = {
    "transaction": 24,
    "SRC_AVAIL_CANCEL": 75,
    "SINK_AVAIL_CANCEL": 5,
    "SEND_SM": 75,
    "RDMA Read": 150,
    "RDMA Write": 100,
    "CH_RCV_BUF_ACK": 60,
    "SUSP_COMM_ACK": 20,
}


@pytest.mark.least("ci")
@pytest.mark.slow
def test_every_message_and_operation_is_used() -> None:
    """A simulation that never reaches a mechanism proves nothing about it."""
    conversations: Counter[str] = Counter()  # in which it was seen
    for seed in range(300):
        trace = Trace()
        CheckedConversation(draw(seed), trace).run()
        seen: set[str] = set()
        for entry in trace.entries:
            if entry.what == "rdma":
                seen.add(" ".join(entry.text.split()[:2]))
            elif entry.message:
                seen.add(Mid(entry.message[0]).name)
                if entry.message[0] == Mid.SINK_AVAIL and len(entry.message) > 36:
                    seen.add("transaction")
        conversations.update(seen)
    wanted = {mid.name for mid in Mid} | {"transaction", "RDMA Write", "RDMA Read"}
    assert wanted - set(conversations) == set()
    short = {what: conversations[what] for what, least in FLOORS.items() if conversations[what] < least}
    assert not short, f"of 300 conversations so few have: {short}"


@pytest.mark.slow
def test_every_kind_has_its_share() -> None:
    kinds = Counter(draw(seed).kind for seed in range(1000))
    assert all(kinds[kind] >= 20 for kind in PlanKind), kinds
    assert kinds[PlanKind.CLEAN] >= 400, kinds


def test_one_seed_gives_one_conversation() -> None:
    for seed in (3, 17, 99):
        first, second = Trace(), Trace()
        assert CheckedConversation(draw(seed), first).run() == CheckedConversation(draw(seed), second).run()
        assert first.entries == second.entries


def test_the_command_plays_the_same_conversation() -> None:
    """But for sockets that move, and for others beside it."""
    alike = [seed for seed in range(40) if not (draw(seed).moves or draw(seed).others)]
    assert len(alike) >= 20
    for seed in alike:
        printed, checked = Trace(), Trace()
        assert Conversation(plan.draw(seed), printed).run() == CheckedConversation(draw(seed), checked).run()
        assert printed.entries == checked.entries


# What was wrong there once; tests/sdp tells of each in its own words where the protocol was.
FOUND = {
    13389: "who has confirmed a move has left, and the word that says so is lost",
    19723: "two conversations of the same stacks move to the same port",
}


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_once(seed: int) -> None:
    converse(seed)


# Messages that each end has sent, and bytes that each user got: a change here is a change of how much is said.
SNAPSHOTS: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {
    3: ((50, 58), (2400, 1587)),
    10: ((127, 88), (2826, 1911)),
    12: ((57, 83), (2821, 11346)),
    13: ((96, 117), (3599, 4081)),
    14: ((56, 111), (8400, 1235)),
    113: ((80, 92), (2397, 2060)),  # with four Transactions
}


@pytest.mark.parametrize("seed", SNAPSHOTS)
def test_what_is_said_does_not_grow(seed: int) -> None:
    outcome: Outcome = converse(seed)
    assert (outcome.messages, outcome.received) == SNAPSHOTS[seed]


def breaks(owner: type, name: str, broken: Callable[..., object]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, broken)


def never(*_: object) -> None:
    """Does not do what it should."""


# The checks are trusted because they have seen each of these.
BROKEN = {
    "SinkAvails that a payload message uses up are not counted": breaks(Source, "_count_payload", never),
    "what a void SrcAvail offered is not sent anew": breaks(Source, "_take_back", never),
    "receives shown are forgotten by nobody when a withdrawal is answered": breaks(Sink, "_hide", never),
    "RdmaRdCompl says nothing": breaks(Sink, "_report", never),
    "a receive that payload has shown along is not known to be shown": breaks(Halves, "advertised", never),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_rule_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[what](monkeypatch)
    for seed in range(400):
        try:
            converse(seed)
        except Exception:  # whatever it is, it was found
            return
    pytest.fail(f"400 conversations saw nothing of it: {what}")
