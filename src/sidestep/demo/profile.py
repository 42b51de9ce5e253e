"""The profile of connections between two hosts: what their way gains and loses over TCP, measured on this machine."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from sidestep.demo.demo import Tell, two_hosts
from sidestep.demo.works import RUNS_MAX, talk
from sidestep.demo.world import Site, World
from sidestep.errors import Unavailable
from sidestep.gain import Profile

SMALL: Final = 64  # bytes of a message; the larger a piece, the more of its time is for its bytes
LARGE: Final = 1 << 16
_WORKS: Final = {
    "small": talk("pour", SMALL),
    "large": talk("pour", LARGE),
    "turn": talk("echo"),
}


def measure(*, rounds: int, seconds: float, tell: Tell, transports: str = "") -> Profile:
    """Measures TCP and SDP over these transports, in turns, between two network namespaces of this host.

    Raises:
        Unavailable: This user may make no namespaces, or a connection was not promoted.
    """
    times: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        client, server = two_hosts(stack, transports=transports)
        places = {"tcp": [replace(site, sidestep=None) for site in (server, client)], "sdp": [server, client]}
        for number in range(rounds):
            for work in _WORKS:
                for name, sites in places.items():
                    times.setdefault((work, name), []).append(_value(work, name, sites, seconds))
            tell(f"round {number + 1} of {rounds}")
    longer = {work: statistics.median(times[work, "sdp"]) - statistics.median(times[work, "tcp"]) for work in _WORKS}
    message_us = max(0.0, -longer["small"])
    return Profile(
        round(message_us, 1),
        # a message gains something in any case, and a round trip is two of them
        round(max(0.0, (longer["large"] + message_us) * (1 << 20) / LARGE)),
        round(max(0.0, longer["turn"] + 2 * message_us)),
    )


def _value(work: str, name: str, sites: list[Site], seconds: float) -> float:
    """The figure of a work in one place; a run whose connection was not promoted is made anew, and longer.

    A provider that had no CPU for a second is taken for absent by the other one, for a minute. That one starts anew.
    """
    why_not: tuple[str, ...] = ()
    for _ in range(RUNS_MAX):
        with World(name, *sites) as world:
            found = _WORKS[work](world, seconds)
        if found.evidence is None or found.evidence.ok:
            return found.value
        seconds, why_not = 2 * seconds, found.evidence.why_not
        asking = sites[-1]
        if asking.sidestep is not None:
            with asking.inside():
                asking.sidestep.restart_provider()
    raise Unavailable(f"a connection of the work {work!r} was not promoted: {', '.join(why_not)}")
