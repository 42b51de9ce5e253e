"""Tries every interleaving of two peers and the two channels between them.

A model says what one peer can do next, given its own state and the item that has arrived for it; the explorer puts two such
peers together with a first-in first-out channel each way and walks through all states that can come of it, breadth first,
so that the first fault found has the shortest history. What a peer does depends on nothing but itself and the head of its
channel, therefore the steps of each (peer, item) pair are worked out once and remembered; a joint state is four numbers and
tuples of numbers, which keeps the walk fast in plain Python.

Each step has a `Will`:

* `PROTOCOL`: the peer takes it sooner or later whatever the programs on top do (a message is taken in, a reply goes out);
* `USER`: a fair program takes it sooner or later (it sends what it has, it receives what comes);
* `WHIM`: may be taken or not, for ever (a cancel, a change of mode, a close).

Where no `PROTOCOL` step is left, the model is asked what is still owed although no program need do anything (`stalled`);
where no `USER` step is left either, it is asked what is unfinished (`unfinished`): both are deadlocks. A whim is never
counted on. Endless runs show as a cycle of steps that are no whims, or as a walk that reaches its limit of states.
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
        """Which items of a channel may be taken in next; the first alone, unless something travels beside the queue pair."""

    def fault(self, peers: tuple[P, P], channels: tuple[Channel, Channel]) -> str | None:
        """The invariant that a state breaks."""

    def stalled(self, peers: tuple[P, P], channels: tuple[Channel, Channel]) -> str | None:
        """What is owed although no program need do anything."""

    def unfinished(self, peers: tuple[P, P], channels: tuple[Channel, Channel]) -> str | None:
        """What is not done although both programs have done their part."""


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


_Joint = tuple[int, int, tuple[int, ...], tuple[int, ...]]  # the peers, then the channels A to B and B to A
_Local = list[tuple[Will, str, int, tuple[int, ...], bool]]


class _Walk(Generic[P]):
    def __init__(self, model: Model[P], states_max: int, *, cycles: bool) -> None:
        self.model = model
        self.states_max = states_max
        self.peers: _Numbers[P] = _Numbers()
        self.items: _Numbers[Item] = _Numbers()
        self.memory: tuple[dict[tuple[int, int], _Local | Broken], ...] = ({}, {})
        self.broken_label: dict[tuple[int, int, int], str] = {}
        self.cycles = cycles
        self.edges: list[tuple[int, int, str]] = []

    def local(self, side: int, peer: int, item: int) -> _Local | Broken:
        """The steps of one peer, worked out the first time they are asked for."""
        found: _Local = []
        thing = None if item < 0 else self.items.things[item]
        for step in self.model.steps(side, self.peers.things[peer], thing):
            if isinstance(step, Broken):
                return step
            sent = tuple(self.items(one) for one in step.sent)
            found.append((step.will, step.label, self.peers(step.peer), sent, step.taken))
        return found

    def channels(self, state: _Joint) -> tuple[Channel, Channel]:
        things = self.items.things
        return tuple(things[one] for one in state[2]), tuple(things[one] for one in state[3])

    def both(self, state: _Joint) -> tuple[P, P]:
        return self.peers.things[state[0]], self.peers.things[state[1]]

    def run(self) -> Result:
        began = time.process_time()
        first_a, first_b = self.model.start()
        first: _Joint = (self.peers(first_a), self.peers(first_b), (), ())
        self.order: list[_Joint] = [first]
        self.seen: dict[_Joint, int] = {first: 0}
        self.parent: list[tuple[int, str]] = [(-1, "")]
        self.taken_count = 0
        index, fault = 0, None
        while index < len(self.order):
            fault = self.visit(index)
            if fault is not None:
                break
            index += 1
        trace = self.history(min(index, len(self.order) - 1))
        if fault is None and self.cycles and (found := self.endless()):
            fault = "endless: the steps behind the mark can go on for ever"
            trace = [*self.history(found[0]), "-- mark --", *found[1]]
        elif fault is not None and self.last_label:
            trace.append(self.last_label)
        return Result(
            self.model.name,
            len(self.order),
            self.taken_count,
            len(trace),
            time.process_time() - began,
            fault,
            () if fault is None else tuple(trace),
        )

    def visit(self, index: int) -> str | None:
        """Checks one state and adds the states that follow it; tells the fault found."""
        self.last_label = ""
        state = self.order[index]
        peers, channels = self.both(state), self.channels(state)
        fault = self.model.fault(peers, channels)
        if fault is not None:
            return fault
        idle = starved = True
        for side in (0, 1):
            incoming = state[3 - side]
            for place in self.model.arrived(channels[1 - side]) if incoming else ():
                for will in self.follow(index, state, side, place):
                    if isinstance(will, Broken):
                        return str(will)
                    idle = idle and will is not Will.PROTOCOL
                    starved = starved and will is Will.WHIM
            if not incoming:
                for will in self.follow(index, state, side, -1):
                    if isinstance(will, Broken):
                        return str(will)
                    idle = idle and will is not Will.PROTOCOL
                    starved = starved and will is Will.WHIM
        if idle and (owed := self.model.stalled(peers, channels)) is not None:
            return f"deadlock unless a program acts: {owed}"
        if starved and (owed := self.model.unfinished(peers, channels)) is not None:
            return f"deadlock: {owed}"
        return None

    def follow(self, index: int, state: _Joint, side: int, place: int) -> Iterable[Will | Broken]:
        incoming = state[3 - side]
        item = -1 if place < 0 else incoming[place]
        memory = self.memory[side]
        steps = memory.get((state[side], item))
        if steps is None:
            steps = memory[state[side], item] = self.local(side, state[side], item)
        if isinstance(steps, Broken):
            self.last_label = (
                f"{SIDES[side]} takes in {self.items.things[item]}" if item >= 0 else f"{SIDES[side]} acts"
            )
            yield steps
            return
        for will, label, peer, sent, taken in steps:
            rest = incoming[:place] + incoming[place + 1 :] if taken else incoming
            after: _Joint = (
                (peer, state[1], state[2] + sent, rest) if side == 0 else (state[0], peer, rest, state[3] + sent)
            )
            self.taken_count += 1
            number = self.seen.get(after)
            if number is None:
                number = self.seen[after] = len(self.order)
                if number >= self.states_max:
                    told = "\n".join(self.history(index)[-30:])
                    raise LimitOfStates(
                        f"{self.model.name}: more than {self.states_max} states; the last one came of\n{told}"
                    )
                self.order.append(after)
                self.parent.append((index, label))
            if self.cycles and will is not Will.WHIM:
                self.edges.append((index, number, label))
            yield will

    def history(self, index: int) -> list[str]:
        labels: list[str] = []
        while index > 0:
            index, label = self.parent[index]
            labels.append(label)
        return labels[::-1]

    def endless(self) -> tuple[int, list[str]] | None:
        """A cycle of steps that are no whims: where it begins and its steps. It is what is left when all ends are taken away."""
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


def explore(model: Model[P], *, states_max: int = 3_000_000, cycles: bool = False) -> Result:
    """Walks through all states of `model`, to the end or to the nearest fault.

    `cycles` also looks for endless runs. Raises LimitOfStates where there are more than `states_max` states.
    """
    return _Walk(model, states_max, cycles=cycles).run()
