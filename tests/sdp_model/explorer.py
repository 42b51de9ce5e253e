"""Tries every interleaving of two peers and the two channels between them.

A model says what one peer can do next, given its own state and the item that has arrived for it; the explorer puts
two such peers together with a first-in first-out channel each way and walks through all states that can come of it,
breadth first, so that the first fault found has the shortest history. What a peer does depends on nothing but itself
and the head of its channel, so the steps of each (peer, item) pair are worked out once and remembered; a joint state
is two numbers and two tuples of numbers, which keeps the walk fast in plain Python.

Each step has a `Will`:

* `PROTOCOL`: the peer takes it sooner or later whatever the programs on top do (a message is taken in, a reply goes
  out);
* `USER`: a fair program takes it sooner or later (it sends what it has, it receives what comes);
* `WHIM`: may be taken or not, for ever (a cancel, a change of mode, a close).

Where no `PROTOCOL` step is left, the model is asked what is still owed although no program need do anything
(`stalled`); where no `USER` step is left either, it is asked what is unfinished (`unfinished`): both are deadlocks. A
whim is never counted on. An endless run is a cycle of steps that are no whims; peers keep no count that only grows,
so one shows.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

SIDES = "AB"


class Broken(Exception):
    """A step that no rule allows was taken; the text says which."""


class LimitOfStates(Exception):
    """There are more states than the walk was meant for: the bounds are too wide, or the peers never come to rest."""


class Will(enum.Enum):
    """Who wants a step; see the module docstring."""

    PROTOCOL = "protocol"
    USER = "user"
    WHIM = "whim"


P = TypeVar("P", bound=Hashable)
P_contra = TypeVar("P_contra", bound=Hashable, contravariant=True)
Item = Hashable
Channel = tuple[Item, ...]


class Step(NamedTuple, Generic[P]):
    """What one peer does: its next state and what it puts into the channel to the other."""

    will: Will
    label: str
    peer: P
    sent: Channel = ()
    taken: bool = False  # the item that had arrived is used up


class Model(Protocol[P]):
    """One peer's behaviour, and what has to hold of two peers together."""

    name: str

    def start(self) -> tuple[P, P]:
        """The two peers at the beginning."""

    def steps(self, side: int, peer: P, item: Item | None) -> Iterable[Step[P] | Broken]:
        """All that `peer` can do when `item` is the next to be taken in, or nothing has arrived."""

    def arrived(self, channel: Channel) -> Iterable[int]:
        """Which items of a channel may be taken in next: the first alone, unless some travel beside the queue pair."""

    def fault(self, peers: tuple[P, P], channels: tuple[Channel, Channel]) -> str | None:
        """The invariant that a state breaks."""

    def stalled(self, peers: tuple[P, P], channels: tuple[Channel, Channel]) -> str | None:
        """What is owed although no program need do anything."""

    def unfinished(self, peers: tuple[P, P], channels: tuple[Channel, Channel]) -> str | None:
        """What is not done although both programs have done their part."""


class OfTwo(Generic[P]):
    """What most models have in common: they begin as `peers`, and what is sent first arrives first."""

    peers: tuple[P, P]

    def start(self) -> tuple[P, P]:
        return self.peers

    def arrived(self, channel: Channel) -> Iterable[int]:
        return (0,)


@dataclass(frozen=True, slots=True)
class Result:
    """What a walk found; `fault` is None where everything held."""

    name: str
    states: int
    steps: int
    depth: int
    seconds: float
    fault: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = f"{self.name}: {self.states} states, {self.steps} steps, depth {self.depth}, {self.seconds:.1f} s"
        if self.fault is None:
            return told
        return "\n".join(
            [told, f"  fault: {self.fault}", *(f"  {n:2} {label}" for n, label in enumerate(self.trace, 1))]
        )


class _Numbers(Generic[P]):
    """Gives equal things one small number, so that joint states are cheap to keep and to compare."""

    def __init__(self) -> None:
        self.things: list[P] = []
        self._number: dict[P, int] = {}

    def __call__(self, thing: P) -> int:
        number = self._number.get(thing)
        if number is None:
            number = self._number[thing] = len(self.things)
            self.things.append(thing)
        return number


_Row = tuple[int, ...]
_Joint = tuple[int, int, _Row, _Row]  # peers A and B, then the channels A to B and B to A
_Local = list[tuple[Will, str, int, _Row, bool]]  # the steps of one peer, as numbers
NOTHING = -1  # in the place of an item, where none has arrived


class _Fault(Exception):
    """A state, or a step from it, that should not be; `label` is that step."""

    def __init__(self, text: str, label: str = "") -> None:
        super().__init__(text)
        self.label = label


class _Walk(Generic[P]):
    def __init__(self, model: Model[P], states_max: int, *, look_for_endless: bool) -> None:
        self.model = model
        self.look_for_endless = look_for_endless
        self.states_max = states_max
        self.peers: _Numbers[P] = _Numbers()
        self.items: _Numbers[Item] = _Numbers()
        self.memory: dict[tuple[int, int, int], _Local | Broken] = {}
        a, b = model.start()
        self.order: list[_Joint] = [(self.peers(a), self.peers(b), (), ())]
        self.seen: dict[_Joint, int] = {self.order[0]: 0}
        self.parent: list[tuple[int, str]] = [(NOTHING, "")]
        self.edges: list[tuple[int, int, str]] = []
        self.steps_count = 0

    def run(self) -> Result:
        began = time.process_time()
        fault, trace = None, []
        index = 0
        try:
            while index < len(self.order):
                self.visit(index)
                index += 1
        except _Fault as found:
            fault, trace = str(found), [*self.history(index), *([found.label] if found.label else [])]
        if fault is None and self.look_for_endless and (endless := self.endless()):
            fault = "endless: the steps behind the mark can go on for ever"
            trace = [*self.history(endless[0]), "-- mark --", *endless[1]]
        depth = len(trace) or len(self.history(index - 1))
        seconds = time.process_time() - began
        return Result(self.model.name, len(self.order), self.steps_count, depth, seconds, fault, tuple(trace))

    def visit(self, index: int) -> None:
        """Checks one state and adds the states that follow it."""
        state = self.order[index]
        peers = (self.peers.things[state[0]], self.peers.things[state[1]])
        things = self.items.things
        channels = (tuple(things[one] for one in state[2]), tuple(things[one] for one in state[3]))
        fault = self.model.fault(peers, channels)
        if fault is not None:
            raise _Fault(fault)
        wills: set[Will] = set()
        for side, incoming in ((0, channels[1]), (1, channels[0])):
            for place in self.model.arrived(incoming) if incoming else (NOTHING,):
                self.follow(index, side, place, wills)
        if Will.PROTOCOL not in wills and (owed := self.model.stalled(peers, channels)) is not None:
            raise _Fault(f"deadlock unless a program acts: {owed}")
        if wills <= {Will.WHIM} and (owed := self.model.unfinished(peers, channels)) is not None:
            raise _Fault(f"deadlock: {owed}")

    def follow(self, index: int, side: int, place: int, wills: set[Will]) -> None:
        """Takes all steps of one peer that has the item at `place` before it; adds to `wills` who wanted them."""
        a, b, ab, ba = self.order[index]
        peer, outgoing, incoming = (b, ba, ab) if side else (a, ab, ba)
        item = NOTHING if place == NOTHING else incoming[place]
        steps = self.memory.get((side, peer, item))
        if steps is None:
            steps = self.memory[side, peer, item] = self.local(side, peer, item)
        if isinstance(steps, Broken):
            what = "acts" if item == NOTHING else f"takes in {self.items.things[item]}"
            raise _Fault(str(steps), f"{SIDES[side]} {what}")
        for will, label, after, sent, taken in steps:
            rest = incoming[:place] + incoming[place + 1 :] if taken else incoming
            wills.add(will)
            self.steps_count += 1
            number = self.add(
                (a, after, rest, outgoing + sent) if side else (after, b, outgoing + sent, rest), index, label
            )
            if self.look_for_endless and will is not Will.WHIM:
                self.edges.append((index, number, label))

    def local(self, side: int, peer: int, item: int) -> _Local | Broken:
        """The steps of one peer; asked for once."""
        found: _Local = []
        thing = None if item == NOTHING else self.items.things[item]
        for step in self.model.steps(side, self.peers.things[peer], thing):
            if isinstance(step, Broken):
                return step
            sent = tuple(self.items(one) for one in step.sent)
            found.append((step.will, step.label, self.peers(step.peer), sent, step.taken))
        return found

    def add(self, state: _Joint, parent: int, label: str) -> int:
        number = self.seen.get(state)
        if number is None:
            number = self.seen[state] = len(self.order)
            if number >= self.states_max:
                raise LimitOfStates(f"{self.model.name}: more than {self.states_max} states")
            self.order.append(state)
            self.parent.append((parent, label))
        return number

    def history(self, index: int) -> list[str]:
        labels: list[str] = []
        while index > 0:
            index, label = self.parent[index]
            labels.append(label)
        return labels[::-1]

    def endless(self) -> tuple[int, list[str]] | None:
        """A cycle of steps that are no whims, with where it begins: what is left when all ends are taken away."""
        after: list[list[tuple[int, str]]] = [[] for _ in self.order]
        before: list[list[int]] = [[] for _ in self.order]
        for start, end, label in self.edges:
            after[start].append((end, label))
            before[end].append(start)
        leaving = [len(steps) for steps in after]
        ends = [number for number, count in enumerate(leaving) if not count]
        for end in ends:
            for start in before[end]:
                leaving[start] -= 1
                if not leaving[start]:
                    ends.append(start)
        if len(ends) == len(self.order):
            return None
        place = next(number for number, count in enumerate(leaving) if count)
        walked: dict[int, int] = {}
        labels: list[str] = []
        while place not in walked:
            walked[place] = len(labels)
            place, label = next((end, label) for end, label in after[place] if leaving[end])
            labels.append(label)
        return place, labels[walked[place] :]


def explore(model: Model[P], *, states_max: int = 3_000_000, endless: bool = True) -> Result:
    """Walks through all states of `model`, to the end or to the nearest fault; `endless` looks for endless runs too.

    Raises LimitOfStates where there are more than `states_max` states.
    """
    return _Walk(model, states_max, look_for_endless=endless).run()
