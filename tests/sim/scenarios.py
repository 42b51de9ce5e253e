"""All small scenarios: each order of a few stimuli, and each pair, the one interrupted by the other at each point."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Final

STIMULI: Final = (
    "send", "big", "recv", "some", "peek", "poll", "shut", "shutrd", "close", "linger", "abort", "kill", "demote",
    "promote", "pass", "exec", "fork", "whole", "count", "async", "nest", "travel", "give", "unseen", "sleep",
)  # fmt: skip
ORDERS: Final = ("demote", "promote")  # the provider's: no call that could be interrupted
# The provider stands between, and one end has gone back to TCP, as has the other for it: both may consent anew.
BETWEEN_ROUNDS: Final = (
    "relay=1 rounds=1 promoted 0.demote 0.nap 1.nap carry 0.recv 1.recv carry 0.recv 1.recv carry 0.promote 0.nap carry"
)
BEFORE: Final = (
    "promoted",
    "promoted 0.send 1.send",
    "promoted 0.demote 0.nap 1.send",  # on its way back, one direction each
    "",  # not offered yet
    "0.send net 1.send",  # offered and not claimed
    "promoted 0.send 1.shut",
    "relay=1 promoted 0.send 1.send",  # the provider stands between
    "relay=1 promoted 0.fork 0.send 1.send",
    BETWEEN_ROUNDS,
    f"{BETWEEN_ROUNDS} 1.nap carry 0.nap carry 1.nap carry 0.send 1.send",  # the second
    "promoted 0.fork 0.send 1.send",  # two processes at one end
)
# End 1 reads as nginx does, as much as FIONREAD has counted, and waits for edges: where it was told last, what follows.
TOLD: Final = (
    "0.byte net 1.byte net 1.some 0.recv 0.send net 0.more 1.peek 0.send 1.wait",  # of TCP's, and the ring's have come
    "promoted 0.big 1.turn 1.wait",  # into the spill
    "promoted 0.demote 0.nap 0.big 1.wait",  # on its way back
    "promoted 0.demote 0.nap 0.send net 1.recv 0.promote 0.more 1.wait",  # and there again
    "relay=1 promoted 0.send 1.turn 1.wait",
)
FOLLOWS: Final = ("net", "0.send", "0.big", "0.more", "0.demote", "0.promote", "1.turn", "1.peek", "1.demote")


def orders(depth: int, before: Iterable[str] = BEFORE) -> Iterator[str]:
    """Every order of `depth` stimuli of all ends, of TCP's network, and of a provider between."""
    for first in before:
        ends = (0, 1, 2) if "0.fork" in first else (0, 1)
        words = [
            "net",
            *(["carry"] if "relay" in first else []),
            *(f"{end}.{word}" for end in ends for word in STIMULI),
        ]
        for rest in product(words, repeat=depth):
            yield " ".join(["way0=3 way1=3", first, *rest])


def pairs(before: Iterable[str] = BEFORE) -> Iterator[str]:
    """Every stimulus of one end, interrupted at every point by each of the other's; then TCP brings what it has."""
    for first in before:
        ends = ((0, 2), (2, 0), (1, 2)) if "0.fork" in first else ((0, 1), (1, 0))
        for (end, at_once), one, other in product(ends, STIMULI, STIMULI):
            if one not in ORDERS:
                yield f"way0=3 way1=3 {first} {end}.{one}@* {at_once}.{other} net"


def told(depth: int) -> Iterator[str]:
    """Every order of `depth` of what may follow; then the reader reads what was sent, and waits for edges alone."""
    for first in TOLD:
        words = [*FOLLOWS, *(["carry"] if "relay" in first else [])]
        for rest in product(words, repeat=depth):
            yield " ".join(["until=2 way0=3 way1=3 tcp=2000", first, *rest, "1.drain settle"])
