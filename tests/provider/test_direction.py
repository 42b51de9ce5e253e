"""The tables by which a provider between follows a connection, and that its ends run on them, pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from enum import Enum
from itertools import product
from typing import Any

import pytest
from remote_world import RINGS, World, go_back, recall, reset

from sidestep.errors import PeerViolation
from sidestep.provider.carry.direction import (
    MACHINES,
    USED,
    EndEvent,
    Ending,
    In,
    InEvent,
    LeaveEvent,
    Leaving,
    Out,
    OutEvent,
    Recall,
    RecallEvent,
    moved,
)
from sidestep.switch.link import Control

Moves = Mapping[tuple[Any, Any], Enum]


@pytest.mark.parametrize("name", MACHINES)
def test_a_pair_that_a_table_does_not_have_breaks_the_rule(name: str) -> None:
    states, events, moves = MACHINES[name]
    for state, event in product(states, events):
        if (state, event) in moves:
            assert moved(state, event) is moves[state, event]
        else:
            with pytest.raises(PeerViolation) as broken:
                moved(state, event, rule="link_count")
            assert broken.value.rule == "link_count"


def reachable(moves: Moves, start: Enum) -> set[Enum]:
    found = {start}
    while more := {to for (at, _), to in moves.items() if at in found} - found:
        found |= more
    return found


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_can_be_come_to(name: str) -> None:
    states, events, moves = MACHINES[name]
    assert reachable(moves, next(iter(states))) == set(states)
    assert {event for _, event in moves} == set(events)


def test_nobody_sends_by_ring_without_having_been_invited() -> None:
    moves = {pair: to for pair, to in MACHINES["OUT"][2].items() if pair[1] is not OutEvent.INVITED}
    assert not reachable(moves, Out.APART) & USED
    moves = {pair: to for pair, to in MACHINES["IN"][2].items() if pair[1] is not InEvent.CONSENT}
    assert In.RING not in reachable(moves, In.APART)


def test_what_is_over_stays_over() -> None:
    assert reachable(MACHINES["OUT"][2], Out.RECALLED) == {Out.RECALLED}
    assert reachable(MACHINES["OUT"][2], Out.BACK) == set(Out) - {Out.APART, Out.TCP}
    assert reachable(MACHINES["IN"][2], In.BACK) == {In.BACK, In.CONSENTED, In.RING}
    assert reachable(MACHINES["ENDING"][2], Ending.ENDED) == {Ending.ENDED}


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        made = World(stack)
        yield made
        assert not made.one.faults + made.two.faults


class Played:
    """An end in a provider, between an application and another provider that are played step by step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.app, self.far, self.stranger = world.stranger(promoted=False)

    def do(self, *steps: Step) -> None:
        """One after the other."""
        for step in steps:
            step(self)
            self.world.rest()


Step = Callable[[Played], object]


def hears(word: Control, count: int = 0) -> Step:
    return lambda one: one.stranger.send_control(word, count)


def says(**words: int) -> Step:
    return lambda one: one.app.send_control(**words)


MET = (hears(Control.ATTACHED, RINGS),)
INVITED = (*MET, hears(Control.READY))
BY_RING = (*INVITED, says(tx_switch_offset=7, tx_switched=1))
CONSENTED = (*MET, says(rx_ready=1))
COME = (*CONSENTED, hears(Control.SWITCHED, 7))
WANTED = (*COME, lambda one: recall(one.app))
LEFT = (*COME, lambda one: one.far.leave())

# How each state is come to, and what each event is that another provider can bring about.
REACHED: dict[Enum, tuple[Step, ...]] = {
    Out.APART: (),
    Out.TCP: MET,
    Out.INVITED: INVITED,
    Out.RING: BY_RING,
    Out.BACK: (hears(Control.ROUNDS), *BY_RING, lambda one: go_back(one.app), hears(Control.ARRIVED)),
    Out.RECALLED: (*BY_RING, hears(Control.RECALL)),
    In.ATTACHED: (),
    In.TCP: MET,
    In.CONSENTED: CONSENTED,
    In.RING: COME,
    In.BACK: (*COME, hears(Control.BACK)),
    Recall.NOT: COME,
    Recall.OURS: LEFT,
    Recall.TAKEN: (*LEFT, hears(Control.RESENDS)),
    Recall.REQUESTED: WANTED,
    Recall.GRANTED: (*WANTED, hears(Control.RESENDS)),
    Ending.OPEN: MET,
    Ending.SHUT: (*MET, hears(Control.SHUT)),
    Ending.CLOSED: (*MET, hears(Control.CLOSED)),
    Ending.SHUT_CLOSED: (*MET, hears(Control.SHUT), hears(Control.CLOSED)),
    Ending.ENDED: (*MET, hears(Control.CLOSED), hears(Control.ENDED)),
    Leaving.STAYS: COME,
    Leaving.LEADS: LEFT,
    Leaving.FOLLOWS: (*COME, hears(Control.LEAVE)),
}
HAPPENS: dict[Enum, Step] = {
    OutEvent.INVITED: hears(Control.READY),
    OutEvent.RECALLED: hears(Control.RECALL),
    InEvent.SWITCHED: hears(Control.SWITCHED, 7),
    InEvent.BACK: hears(Control.BACK),
    RecallEvent.RESENDS: hears(Control.RESENDS),
    EndEvent.SHUT: hears(Control.SHUT),
    EndEvent.CLOSED: hears(Control.CLOSED),
    EndEvent.ENDED: hears(Control.ENDED),
    LeaveEvent.REQUESTED: hears(Control.LEAVE),
}
FIELD: dict[type[Enum], str] = {Out: "out", In: "into", Recall: "recall", Ending: "peer_ending", Leaving: "leaving"}
PAIRS = [
    pytest.param(state, event, moves.get((state, event)), id=f"{name} {state.name} {event.name}")
    for name, (states, events, moves) in MACHINES.items()
    for state, event in product(states, events)
    if state in REACHED and event in HAPPENS
]


@pytest.mark.parametrize(("state", "event", "following"), PAIRS)
def test_an_end_does_what_the_tables_say(world: World, state: Enum, event: Enum, following: Enum | None) -> None:
    one = Played(world)
    one.do(*REACHED[state])
    assert (getattr(one.far, FIELD[type(state)]), one.far.lost) == (state, False)
    one.do(HAPPENS[event])
    if following is None:
        assert reset(one.app)
        assert one.far.failed
        assert world.one.counters.get("relay_reset", "violation") == len(world.one.logged) == 1
    else:
        assert (getattr(one.far, FIELD[type(state)]), one.far.failed, reset(one.app)) == (following, False, False)


def test_only_what_our_own_application_does_is_not_tried() -> None:
    assert {state for states, _, _ in MACHINES.values() for state in states} - REACHED.keys() == {In.APART}
    assert {event for _, events, _ in MACHINES.values() for event in events} - HAPPENS.keys() == {
        OutEvent.MET, OutEvent.SWITCHED, OutEvent.BACK, InEvent.ATTACHED, InEvent.MET, InEvent.CONSENT,
        RecallEvent.TAKE, RecallEvent.WANT, RecallEvent.REFUSED, LeaveEvent.LEAVE,
    }  # fmt: skip


def test_bytes_that_nobody_recalled_are_not_said_to_come_again(world: World) -> None:
    one = Played(world)
    one.do(*COME, hears(Control.RESENDS), lambda each: each.stranger.send_control(Control.DATA, 4, b"here"))
    assert (one.app.receive(), one.app.word("tx_back")) == (b"here", 0)


@pytest.mark.parametrize(
    ("steps", "failed"),
    [
        ((lambda one: go_back(one.app), hears(Control.RECALL), hears(Control.ARRIVED)), False),
        ((lambda one: go_back(one.app), hears(Control.ARRIVED), hears(Control.ARRIVED)), True),
        ((hears(Control.RECALL), hears(Control.ARRIVED)), True),
    ],
    ids=["crossed by a recall", "twice", "of no end"],
)
def test_each_end_is_confirmed_once(world: World, steps: tuple[Step, ...], failed: bool) -> None:
    one = Played(world)
    one.do(*BY_RING, *steps)
    assert one.far.failed == reset(one.app) == failed
