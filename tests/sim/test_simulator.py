"""The shim in a simulated kernel: seeded runs, all small scenarios, and those that were wrong once.

A failure names the seed or the scenario; simulator.py tells how to see its steps. SIDESTEP_SIM_STEPS is the number of
steps, SIDESTEP_SIM_FROM the first seed: a nightly run takes others. SIDESTEP_SIM_DEPTH is how many stimuli are tried in
all orders; with 3, pairs are tried from every beginning, too.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Final

import pytest
import scenarios
import simulator
from selection import NOW, at_least, rotate
from simulator import Simulator

STEPS: Final = int(os.environ.get("SIDESTEP_SIM_STEPS", "4000000"))
FROM: Final = int(os.environ.get("SIDESTEP_SIM_FROM", "1"))
DEPTH: Final = int(os.environ.get("SIDESTEP_SIM_DEPTH", "2"))
CHUNK: Final = 1_000_000  # steps, of fewer than SEEDS seeds
SEEDS: Final = 10_000
LIMIT_S: Final = 1800

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S)]


@pytest.fixture(scope="session", name="shim")
def _shim() -> Simulator:
    return simulator.build()


PAIRED: Final = scenarios.BEFORE if DEPTH > 2 else (*scenarios.BEFORE[:3], scenarios.BEFORE[-1])


def _well(said: str) -> None:
    assert said.rstrip().splitlines(), "nothing was run"
    assert ": 0 failures" in said, said


@pytest.mark.parametrize("chunk", rotate(range(-(-STEPS // CHUNK)), ci=2))
def test_seeds(shim: Simulator, chunk: int) -> None:
    _well(shim.seeds(FROM + chunk * SEEDS, CHUNK if at_least("ci") else CHUNK // 4))


# Of some 500 seeds, so many at least: what occurs seldom is soon not tried at all.
FLOORS: Final = {
    "promoted": 80, "back": 40, "again": 8, "passed": 20, "reset": 100, "forked": 50, "shared": 15, "died": 40,
    "relayed": 40, "lost": 2, "rounds": 8, "travelled": 10, "given": 5, "unseen": 3, "asleep": 1,
    "confined": 1,
}  # fmt: skip


def test_every_state_is_reached(shim: Simulator) -> None:
    """A simulation that never reaches a state proves nothing about it."""
    seen = Counter(
        {word: int(count) for word, count in (line.split() for line in shim.seeds(1, 2 * CHUNK).splitlines()[1:])}
    )
    assert not {word: seen[word] for word, least in FLOORS.items() if seen[word] < least}


def test_a_seed_takes_the_same_steps_again(shim: Simulator) -> None:
    told = shim.seeds(7, 0, tracing=True)
    assert len(told.splitlines()) > 50
    assert shim.seeds(7, 0, tracing=True) == told


@pytest.mark.parametrize("before", rotate(scenarios.BEFORE, test=2, ci=6))
def test_all_orders(shim: Simulator, before: str) -> None:
    _well(shim.scenarios(scenarios.orders(DEPTH, [before])))


@pytest.mark.least("ci")
@pytest.mark.parametrize("before", rotate(PAIRED))
def test_all_pairs_interrupted_at_all_points(shim: Simulator, before: str) -> None:
    every = list(scenarios.pairs([before]))  # 100 CPU seconds or more: a row takes a sixth
    taken = rotate(range(len(every)), NOW.row // len(PAIRED), ci=-(-len(every) // 6))
    _well(shim.scenarios(every[at] for at in taken))


@pytest.mark.least("ci")
def test_all_orders_for_who_waits_for_edges(shim: Simulator) -> None:
    _well(shim.scenarios(scenarios.told(DEPTH + 1)))


# Bytes are on TCP, those behind them in the ring and its spill, and the reader has read nothing.
LOST_BEFORE_THE_RING: Final = (
    "relay=1 tcp=20000 more=0 0.byte net 1.byte net 0.recv 1.recv carry 0.recv 0.big 1.poll carry "
    "0.big 0.big time 0.big carry 0.big"
)

# End 1, two processes, reads the ring and TCP, of which a byte has come: what follows goes by ring.
CONSENTED_ANEW: Final = "1.fork 0.demote 0.nap carry 1.recv carry 0.promote 0.nap carry 0.byte net 1.poll"

# End 0 is to send again by TCP, where there is room for 60 bytes, and end 1 reads nothing.
RECALLED_WITHOUT_ROOM: Final = (
    "relay=1 more=0 tcp=60 0.byte net 1.byte net 0.recv 1.recv carry 0.recv 1.recv carry 0.recv 0.big leave carry 0.nap"
)

# What was wrong once. The first four are of commit 7ad777f: "python tests/sim/simulator.py --tree DIR scenario ..."
# shows each, where DIR holds the sources of the time.
ONCE_WRONG: Final = {
    "a short read where TCP ends and the ring goes on is taken for the end": (
        "way0=1 way1=3 until=1 tcp=5000 0.byte net 1.byte net 0.send 0.send 1.byte 0.send 0.send 1.byte"
    ),
    "who reads until a short read misses the edge of what the ring holds": (
        "way0=3 way1=3 until=1 tcp=5000 0.peek 0.byte net 1.byte net 0.send 0.send 1.byte 0.send 0.send 1.byte"
    ),
    "a peer takes back what poll has told of": "promoted 0.send 1.wait 0.tail 1.block",
    "and what epoll has": "way1=3 promoted 0.send 1.wait 0.tail 1.block",
    "a reset that was heard of while recalled bytes were sent again is not told": (
        "tcp=5000 promoted 0.big 1.pass 0.recv net 1.close net 0.poll 0.recv"
    ),
    "nor one that a peek heard of": ("promoted 0.big 0.abort net 1.peek 1.recv 1.recv"),
    "a reset that only the shim has heard of is not told to who has the socket next": (
        "promoted 0.abort net 1.shut 1.pass 1.recv"
    ),
    "bytes overtake those that were recalled, where who has the socket next has ended its direction": (
        "promoted 1.big 0.pass 0.shut net 1.recv 1.send net 0.recv"
    ),
    "a read is short at a round in which nothing went by ring, and taken for the end": (
        "more=0 tcp=20000 0.byte net 1.byte net 0.some 0.send 1.poll 0.poll 1.poll 0.poll "
        "1.demote 1.poll 0.poll 0.send 0.shut 1.shut net 1.both 1.all"
    ),
    "a read of less than SO_RCVLOWAT sleeps while TCP holds as much": (
        "more=0 promoted 0.water 1.demote 1.nap 0.nap 0.first 1.byte net 1.block"
    ),
    "who is asked to send again, and hears the end of who has the socket next, is told of a reset": (
        "promoted 0.send 1.exec 1.shut net 0.recv 0.poll 1.recv net 1.recv"
    ),
    "through a provider, a reader waits for ever after it was told of a reset of its own": (
        "relay=1 more=0 0.byte net 1.byte net 1.shut net 0.byte 1.poll carry 1.recv 1.shutrd "
        "0.send net 1.recv 1.recv 1.poll"
    ),
    "what the ring holds between two lots of TCP's is not counted by FIONREAD, nor seen by a look": (
        "more=0 tcp=20000 0.byte net 1.byte net 0.some 0.send net 1.poll 0.peek 1.peek 0.peek 1.peek "
        "0.send 0.demote 0.block 1.byte net 0.send net 1.poll 1.poll 1.poll"
    ),
    "a hang-up is told without that the end can be read": (
        "way1=3 promoted 1.shut net 0.recv 0.send 1.wait 1.recv 0.close tick=0 1.wait net 1.wait"
    ),
    "and where a provider between has kept it back": (
        "relay=1 until=2 way0=3 way1=3 promoted 0.send 1.demote carry 1.drain settle"
    ),
    "who waits in recv does not hear the end that came while a provider between stood there": (
        "relay=1 way0=0 way1=3 more=0 0.byte net 1.byte net 0.recv 1.recv 1.send 0.some carry 0.peek 1.recv carry "
        "0.shut 1.recv 0.block 1.close carry net 0.block 0.block 0.block settle"
    ),
    "a poll that never waits does not hear that the provider between has died": (
        "relay=1 more=0 promoted 0.send carry 1.recv 0.send lost 1.poll"
    ),
    "who waits sleeps on over less than SO_RCVLOWAT of TCP's, with as much of the ring behind": (
        "way0=3 way1=2 more=0 0.byte net 1.byte net 1.some 0.recv 1.water 0.byte 1.peek 0.send 1.drain net settle"
    ),
    "and has no edge of them": (
        "until=2 way0=3 way1=3 tcp=2000 more=0 0.byte net 1.byte net 1.some 0.recv 1.water 0.send net 0.byte 1.peek "
        "0.send 1.wait 1.turn 1.turn 1.turn net 1.drain settle"
    ),
    "who looks in the midst of a reset by the kernel is told of the error, and of no end": (
        "promoted 1.abort half 0.poll net 0.recv"
    ),
    "and who waits for an edge": (
        "way0=3 promoted 0.demote 0.nap 1.nap 0.recv 1.recv 0.byte net 1.recv 1.byte net 0.recv 1.linger half 0.wait "
        "net 0.wait 0.recv"
    ),
    "and who looks while another process makes known that the provider between is lost": (
        "relay=1 promoted 0.fork 0.send tick=0 2.wait lost 0.wait@* 2.wait"
    ),
    "and who waits for an edge then": "way0=3 relay=1 promoted 0.fork 0.send tick=0 2.wait lost 0.wait@* 2.wait",
    "who reads as much as FIONREAD has counted misses the edge of what the ring holds behind TCP's bytes": (
        "until=2 way0=3 way1=3 tcp=2000 0.byte net 1.byte net 1.some 0.recv 0.send net 0.more 1.peek 0.send 1.wait "
        "1.turn net 1.turn 1.drain settle"
    ),
    "through a provider, a read sleeps for good over an end that is made known between its two looks": (
        "relay=1 way0=0 way1=3 more=0 0.byte net 1.byte net 0.recv 1.recv carry 0.recv carry "
        "0.block 1.shut net@* carry settle"
    ),
    "and over a reset": (
        "relay=1 way0=0 way1=3 more=0 0.byte net 1.byte net 0.recv 1.recv carry 0.recv carry "
        "0.block 1.abort net@* carry settle"
    ),
    "what stands behind recalled bytes is read in their place, as the other end had gone back by itself": (
        "relay=1 way0=3 way1=3 promoted 0.fork 1.send carry 1.demote 1.nap 2.exec@* 1.more net 0.recv carry"
    ),
    "through a provider, what a process in the strict mode has not read, and a peer that went back cannot send again": (
        "relay=1 promoted 0.send carry 0.demote 0.nap carry 1.confine 0.send net 1.recv"
    ),
    "and where both ends are forked, and execute a program at once": (
        "relay=1 way0=3 way1=3 promoted 0.fork 1.fork 1.send 2.exec@* 3.exec 1.more net 0.recv carry"
    ),
    "recalled bytes that another process has sent meanwhile are to be sent once more": (
        "tcp=2000 way0=3 way1=3 promoted 0.fork 0.send 1.exec 0.peek net 0.shut@* 2.recv net"
    ),
    "before an exec, too": ("tcp=2000 way0=3 way1=3 promoted 0.fork 0.send 1.exec 0.peek net 0.exec@* 2.recv net"),
    "through a provider, poll tells who has shut both directions down of an end, and a read waits": (
        "relay=1 more=0 0.byte net 1.byte net 0.recv 1.recv carry 0.recv carry "
        "0.shut 0.shutrd 1.close net 0.poll 0.recv 0.poll"
    ),
    "a provider dies, its shim resets what TCP had brought, and tells the end of the stream that the provider knew": (
        "relay=1 way0=3 way1=3 more=0 0.byte net 1.byte net 0.send net 0.recv 1.poll carry 0.recv 1.poll carry "
        "0.byte 1.byte carry 0.shut net 1.poll carry 1.byte lost 1.wait 1.shut 1.recv 1.recv"
    ),
    "through a provider, who waits for what stands behind bytes that a reset has lost is not told of it": (
        f"{LOST_BEFORE_THE_RING} 0.linger net 1.recv 1.block settle"
    ),
    "nor is who waits for an edge": f"way1=3 until=2 {LOST_BEFORE_THE_RING} 1.wait 0.linger net 1.recv 1.drain settle",
    "a look behind the ring's bytes, at a socket that the shim has reset, takes the reset away": (
        "relay=1 more=0 promoted 1.send carry 0.send carry leave 0.nap 1.nap carry 0.close carry net 1.wait 1.peek "
        "1.recv 1.recv settle"
    ),
    "through a provider, what TCP brought behind the ring, ahead of a reset behind the end, is not read": (
        "way0=3 relay=1 more=0 promoted 1.send carry 1.demote 1.nap 1.byte net carry 0.nap 1.recv 1.close net carry "
        "0.byte net 0.wait 0.recv settle"
    ),
    "through a provider, a reset that a read meets behind the ring's bytes is lost, and the next read tells the end": (
        "relay=1 more=0 tcp=20000 promoted 1.send carry 1.demote 1.nap 0.send carry 1.more net 1.close "
        "0.all@* carry 0.recv"
    ),
    "who executes a program after SHUT_RD leaves it a stream with a hole, as the peer has gone back by itself": (
        "relay=1 way0=3 way1=3 promoted 1.send carry 1.demote 1.nap carry 1.more net 0.shutrd 0.exec net 0.recv carry"
    ),
    "who closes while recalled bytes go out slowly resets, though the peer reads on": (
        "relay=1 more=0 tcp=60 0.byte net 1.byte net 0.recv 1.recv carry 0.recv 1.recv carry "
        "0.recv 0.big leave carry 0.nap 0.close"
    ),
    "what FIONREAD has counted is not there once the program asks for SIGIO": "promoted 0.send 1.count 1.async 1.count",
    "nor once its set is in another one": "way1=2 promoted 0.send 1.count 1.nest 1.count 1.wait 1.drain settle",
    **{
        f"an outer set tells by edges, and of room once only where nobody has looked while there was none{how}": (
            f"{relay} way0=3 way1=3 more=0 promoted 0.edges 0.both 0.big 0.big carry 1.all carry 0.room settle"
        )
        for how, relay in (("", ""), (", through a provider", "relay=1"))
    },
    "a set inside another has room for one event: its stand-in takes the place of the end": (
        "way0=3 way1=3 promoted 0.nest 0.send"
    ),
    "who has left its ring through a provider is not told of the end of the stream": (
        "way0=3 way1=3 relay=1 promoted 0.fork 0.send 1.send 0.async 0.shut"
    ),
    "a doorbell's edge takes the place of the one event that is asked for, in a set without connections of ours": (
        "way0=2 relay=1 promoted 1.linger net 0.first 0.first lost 0.give 0.some 0.poll"
    ),
    "a child closes what has come by exec, and its parent does not hear the doorbell of the program before": (
        "promoted 1.travel 1.fork 3.close 1.block 0.send settle"
    ),
    "nor does the child where the parent closes it": (
        "way1=0 more=0 promoted 1.travel 1.fork 1.close 3.block 0.send settle"
    ),
    "the peer rings the program before the last, whose doorbell it was about to be told": (
        "promoted 1.travel 1.nap time 1.nap 1.travel 0.nap 1.block 0.send settle"
    ),
    "or has been told": "promoted 1.travel 1.nap time 1.nap 0.nap 1.travel 1.block 0.send settle",
    "or has been told late": (
        "way1=0 more=0 promoted 1.travel time 1.poll time 1.poll 1.travel 1.block 0.recv 0.send settle"
    ),
    "or who gave the socket to another process": (
        "more=0 promoted 1.worker 1.travel 1.nap time 1.nap 1.hand 0.nap 3.block 0.send settle"
    ),
    "a process dies in a read that the kernel has answered, and another takes TCP's end for the stream's": (
        f"more=0 promoted {CONSENTED_ANEW} 3.recv@* 3.die 0.send 1.recv 0.shut net 1.recv"
    ),
    "or sleeps, and its ring is full": f"more=0 promoted {CONSENTED_ANEW} 3.recv@* 3.die 0.send 1.recv",
    "through a provider, too": (
        f"relay=1 rounds=1 more=0 promoted {CONSENTED_ANEW} carry 3.recv@* 3.die 0.send carry 1.recv 0.shut net carry "
        "1.recv"
    ),
    "a process dies in the midst of sending recalled bytes again, and another sends them once more": (
        "tcp=2000 way0=3 way1=3 more=0 promoted 0.fork 0.send 1.exec 0.peek net 0.peek@* 0.die "
        "2.recv net 1.recv 2.recv net 1.recv"
    ),
    "who ends its direction while recalled bytes find no room resets, as the peer reads late": (
        f"{RECALLED_WITHOUT_ROOM} 0.shut 0.nap 1.recv net 1.recv"
    ),
    "and a send behind that end is told of that reset": (
        f"{RECALLED_WITHOUT_ROOM} 0.shut 0.byte 0.poll 0.shut 0.both 1.recv net 1.recv"
    ),
    "who executes a program beside a child's without the shim leaves it a stream with a hole": (
        "promoted 0.send 0.shut 1.fork 3.exec 1.travel 1.recv"
    ),
    "and through a provider": "relay=1 promoted 0.send 0.shut carry 1.fork 3.exec 1.travel 1.recv",
    "and to a program without the shim": "promoted 0.send 0.shut 1.fork 3.exec 1.exec 1.recv",
    "through a provider, poll tells of a reset that recalled bytes have met, and a read waits": (
        "relay=1 more=0 tcp=1000 0.byte net 1.byte net 1.recv 0.recv carry 0.recv 1.recv carry "
        "0.big 1.exec carry 0.nap 0.nap 1.abort net 0.nap 0.poll"
    ),
}


@pytest.mark.parametrize("scenario", ONCE_WRONG.values(), ids=ONCE_WRONG)
def test_what_was_wrong_once(shim: Simulator, scenario: str) -> None:
    _well(shim.scenarios([scenario]))


# Bytes have arrived at end 1, and the other has gone on, is on its way back, has ended or is gone.
ARRIVED: Final = (
    "promoted 0.send 1.send", "promoted 0.send 0.shut", "promoted 0.send net 1.demote 1.nap 0.more",
    "promoted 0.demote 0.nap 0.send net", "promoted 0.demote 0.nap 0.send net 0.promote 0.nap 1.nap 0.send",
    "promoted 0.big 1.shut", "promoted 0.send 0.close", "promoted 0.send 0.kill", "promoted 0.send 0.unseen net",
    "relay=1 promoted 0.send carry 1.send", "relay=1 promoted 0.send 0.shut carry",
)  # fmt: skip

# What has not been wrong, and what seeds meet seldom.
HOLDS: Final = {
    "where a process dies in the midst of ending its direction, another sends recalled bytes and goes on": (
        f"{RECALLED_WITHOUT_ROOM} 0.fork 0.shut@* 2.nap 0.die 2.nap 1.recv net 1.recv"
    ),
    "through a provider, nobody goes back to TCP before the other has been told of the ring": (
        "relay=1 more=0 0.byte net 1.byte net 0.recv 1.recv carry 0.recv 1.recv carry "
        "0.send 0.demote 0.nap 0.send net 1.recv carry 1.recv"
    ),
    "nor in the second round, whatever was acknowledged in the first": (
        f"{scenarios.BETWEEN_ROUNDS.replace('promoted', 'more=0 promoted')} 1.nap carry 0.nap "
        "0.send 0.demote 0.nap 0.send net 1.recv carry 1.recv"
    ),
    "a provider that leaves cuts a consent once that it has not passed on": (
        f"{scenarios.BETWEEN_ROUNDS.removesuffix(' carry')} leave carry"
    ),
    **{
        f"both ends execute a program at once, and each takes up what is its own{how}": (
            f"{relay} way0=3 way1=3 promoted 0.send 0.shut 1.travel@* 0.travel net"
        )
        for how, relay in (("", ""), (", through a provider", "relay=1"))
    },
    **{
        f"what a send puts into the ring that crosses the request is told ({way}, {how}, {until}, {unread})": (
            f"until={until} {way} promoted {unread} 0.send@* 1.{how} net 1.drain settle"
        )
        for way in ("way1=2", "way1=3")
        for how in ("async", "nest")
        for until in range(3)
        for unread in ("1.poll", "0.send")
    },
    **{
        f"what has arrived is there for who goes on ({way}, {state}, {asleep}, {how})": (
            f"{way} {state} {asleep} 1.count 1.{how} 1.count 1.drain settle"
        )
        for way in ("way1=0", "way1=3")
        for state in ARRIVED
        for asleep in ("", "0.sleep")
        for how in ("travel", "give")
    },
    **{
        f"a reset is told whole where another process makes it known ({way}, {how})": (
            f"{way} promoted 0.fork 1.{how} tick=0 2.wait net 0.wait@* 2.wait"
        )
        for way in ("way0=1", "way0=2", "way0=3")
        for how in ("linger", "abort")
    },
}


@pytest.mark.parametrize("scenario", HOLDS.values(), ids=HOLDS)
def test_what_holds(shim: Simulator, scenario: str) -> None:
    _well(shim.scenarios([scenario]))
