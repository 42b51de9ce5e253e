"""All small scenarios: each order of a few stimuli, and each pair, the one interrupted by the other at each point."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Final

STIMULI: Final = (
    "send", "big", "recv", "some", "peek", "poll", "shut", "shutrd", "close", "linger", "abort", "kill", "demote",
    "promote", "pass", "exec",
)  # fmt: skip
ORDERS: Final = ("demote", "promote")  # the provider's: no call that could be interrupted
BEFORE: Final = (
    "promoted",
    "promoted 0.send 1.send",
    "promoted 0.demote 0.nap 1.send",  # on its way back, one direction each
    "",  # not offered yet
    "0.send net 1.send",  # offered and not claimed
    "promoted 0.send 1.shut",
)


def orders(depth: int, before: Iterable[str] = BEFORE) -> Iterator[str]:
    """Every order of `depth` stimuli of both ends, and of TCP's network."""
    words = ["net", *(f"{end}.{word}" for end in (0, 1) for word in STIMULI)]
    for first, *rest in product(before, *[words] * depth):
        yield " ".join(["way0=3 way1=3", first, *rest])


def pairs(before: Iterable[str] = BEFORE) -> Iterator[str]:
    """Every stimulus of one end, interrupted at every point by each of the other's; then TCP brings what it has."""
    for first, end, one, other in product(before, (0, 1), STIMULI, STIMULI):
        if one not in ORDERS:
            yield f"way0=3 way1=3 {first} {end}.{one}@* {1 - end}.{other} net"
