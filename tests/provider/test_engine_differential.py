"""One trace through Python alone, and through engines: the bytes are the same, and what either leaves is.

Between the two providers stands a judge (`link_judge`), which takes each message apart. Whenever an engine gives a
connection back, each count that it leaves must be what follows from the messages that were said: so the state of a trap
is compared with the wire, and the wire is judged by the rules, whoever speaks. Where nothing is under way the ends of
both runs are compared with each other.

As a script: test_engine_differential.py --messages 1000000 [--seed SEED] plays traces until so many were judged.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

from common import PATIENCE_S

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "support"))

import pytest
from channel_app import App
from link_judge import Between, Judge
from remote_world import Host, World, go_back, recall, reset, see_fin, shut
from selection import rotate

from sidestep import limits
from sidestep.native import layout
from sidestep.native._channel import Channel, Doorbell, RemoteDoorbell
from sidestep.native._engine import Engine, Loan
from sidestep.native.layout import Notice
from sidestep.provider.carry.lending import Reason
from sidestep.provider.carry.remote_relay import RemoteRelay
from sidestep.rdma.cm import Listener
from sidestep.remote.link import SdpLink
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.settings import Addresses

MIDDLE: Final = "127.0.0.3"
SIZES: Final = (1, 15, 16, 17, 100, 1024, 4000, 4096, 5000, 30_000, 65_536, 200_000)
RINGS: Final = (4096, 65_536, 262_144)
WORDS: Final = (
    "attached", "rx_ready", "tx_switched", "tx_switch_offset", "shut_wr", "notice", "tx_back", "tx_back_at",
    "rx_frozen", "tx_fin", "tx_fin_at", "acked",
)  # fmt: skip
ENGINES: Final = {"engines": (True, True), "engine-python": (True, False), "python-engine": (False, True)}


# ---- a trace ----


@dataclass(frozen=True)
class Step:
    """What the application of one end does, then how many turns all have."""

    end: int
    what: str
    size: int = 0
    turns: int = 1


@dataclass(frozen=True)
class Trace:
    seed: int
    rings: tuple[int, int]
    paced: bool  # each step ends at rest, so that even counts that depend on time must be the same
    portions: bool  # the wire brings what it likes, when it likes
    steps: tuple[Step, ...]


def trace(seed: int, length: int) -> Trace:
    dice = random.Random(seed)
    small = dice.random() < 0.4
    sizes = SIZES[:6] if small else SIZES
    whats = ("write",) * 8 + ("read",) * 6 + ("part",) * 3 + ("reclaim",) * 1 + ("pause",) * 1
    steps = [
        Step(dice.randrange(2), dice.choice(whats), dice.choice(sizes), dice.choice((0, 1, 1, 2)))
        for _ in range(length)
    ]
    for _ in range(dice.randrange(3)):
        steps.insert(dice.randrange(length), Step(dice.randrange(2), "resize", dice.choice((6000, 20_000, 61_440)), 1))
    at = dice.randrange(length // 2, length)
    endings = [Step(end, dice.choice(("ask", "shut", "back", "recall", "none")), 0, 3) for end in (0, 1)]
    for ending in endings[: dice.randrange(1, 3)]:
        steps.insert(at, ending)
        at = dice.randrange(at, len(steps) + 1)
    rings = dice.choice(RINGS), dice.choice(RINGS)
    return Trace(seed, rings, dice.random() < 0.4, dice.random() < 0.5, tuple(steps))


# ---- an engine that is watched ----


@dataclass
class Trap:
    """A connection that was given back."""

    index: int  # which end
    reason: Reason
    before: dict[str, int]
    record: dict[str, int]
    head: int  # of the application's ring, as far as its provider has let go of it
    tail: int  # of what was put into it


@dataclass
class WatchedLoan:
    """A loan, and what it was as it began."""

    loan: Loan
    index: int
    before: dict[str, int]
    channel: Channel
    traps: list[Trap]

    def take(self) -> tuple[int, int, bytes]:
        reason, error, packed = self.loan.take()
        record = layout.unpack("engine_record", packed)
        self.traps.append(
            Trap(self.index, Reason(reason), self.before, record, self.channel.received, self.channel.sent)
        )
        return reason, error, packed

    def look(self) -> bytes:
        return self.loan.look()

    def __hash__(self) -> int:
        return id(self)


class WatchedEngine:
    """A real one, of which each loan is remembered."""

    def __init__(self, engine: Engine, index: int, traps: list[Trap]) -> None:
        self._engine, self._index, self._traps = engine, index, traps
        self._loans: dict[Loan, WatchedLoan] = {}
        self.fd, self.news = engine.fd, engine.news
        self.feed, self.unfeed = engine.feed, engine.unfeed

    def set_doorbell(self, doorbell: Doorbell | None) -> None:
        self._engine.set_doorbell(doorbell)

    def lend(
        self, record: bytes, channel: Channel, words: tuple[int, ...], doorbell: RemoteDoorbell, number: int,
        *wire: Any,
    ) -> WatchedLoan:  # fmt: skip
        loan = self._engine.lend(record, channel, words, doorbell, number, *wire)
        watched = WatchedLoan(loan, self._index, layout.unpack("engine_record", record), channel, self._traps)
        self._loans[loan] = watched
        return watched

    def returned(self) -> list[WatchedLoan]:
        return [self._loans.pop(loan) for loan in self._engine.returned()]


# ---- one run of it ----


@dataclass
class Direction:
    """What one application writes, and the other reads."""

    sender: App
    receiver: App
    dice: random.Random
    backlog: bytearray = field(default_factory=bytearray)  # written, and not in the ring yet
    written: bytearray = field(default_factory=bytearray)  # put into the ring
    read: bytearray = field(default_factory=bytearray)
    closed: bool = False
    recalled: int | None = None  # its reader reads no more by ring

    @property
    def done(self) -> bool:
        return (self.closed or not self.backlog) and (self.recalled is not None or self.read == self.written)

    def write(self, size: int) -> None:
        if not self.closed:
            self.backlog += self.dice.randbytes(size)

    def push(self) -> None:
        if self.backlog and not self.closed:
            taken = self.sender.send(bytes(self.backlog))
            self.written += self.backlog[:taken]
            del self.backlog[:taken]

    def take(self, most: int | None = None) -> None:
        if self.recalled is None:
            self.read += self.receiver.receive() if most is None else self.receiver.end.read(most)
            self.receiver.hint()


class Run:
    """A trace through two hosts."""

    wire = "iwarp"  # over others there is no judge between

    def __init__(self, stack: ExitStack, told: Trace, engines: tuple[bool, bool]) -> None:
        self.trace = told
        self.traps: list[Trap] = []
        self.world = world = World(stack, engines=engines, wire=self.wire)
        for index, host in enumerate((world.one, world.two)):
            if host.engine is not None and host.hub.lending is not None:
                host.hub.lending.engine = WatchedEngine(host.engine, index, self.traps)  # type: ignore[assignment]
        self.judge = Judge(limits.REMOTE_RECEIVES, limits.REMOTE_RECEIVE_SIZE)
        self._connect(stack, random.Random(told.seed) if told.portions else None)
        dice = random.Random(told.seed + 1), random.Random(told.seed + 2)
        a, b = self.apps
        self.directions = Direction(a, b, dice[0]), Direction(b, a, dice[1])
        self.states: list[dict[str, Any]] = []

    def _connect(self, stack: ExitStack, dice: random.Random | None) -> None:
        world, rings = self.world, self.trace.rings
        self.apps = App(0, rings[0]), App(1, rings[1])
        for app in self.apps:
            stack.callback(app.close)
        taken: list[RemoteRelay] = []
        listener = world.two.stack.listen(
            0, lambda stream: taken.append(world.two.take(self.apps[1], world.two.link(stream)))
        )
        port = listener.service_id & 0xFFFF
        self.between = Between(self.judge, MIDDLE, (world.two.device.address, port), dice)
        stack.callback(self.between.close)
        addresses = Addresses(IPv4Address(world.one.device.address), 1, IPv4Address(MIDDLE), port)
        self._promote(world.one.stack.connect(MIDDLE, addresses, lambda *_: None), listener, taken)

    def _promote(self, stream: SdpStream, listener: Listener, taken: list[RemoteRelay]) -> None:
        first = self.world.one.take(self.apps[0], self.world.one.link(stream))
        self._until(lambda: bool(taken))
        listener.close()
        self.ends = first, taken[0]
        for words in ({"attached": 1}, {"rx_ready": 1}, {"tx_switch_offset": 7, "tx_switched": 1}):
            for app in self.apps:
                app.send_control(**words)
            self.rest()

    # -- turns --

    def turn(self) -> bool:
        world, busy = self.world, self.between.pump()
        for host in (world.one, world.two):
            busy |= host.step()
            busy |= host.hub.about_to_wait()
            host.hub.handle_turn()
        return world.loop.turn(0) or self.between.pump() or busy

    def _until(self, so: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not so():
            assert time.monotonic() < deadline, "it never came to be"
            self.turn()

    def rest(self) -> None:
        quiet = 0
        while quiet < 4:
            if self.turn():
                quiet = 0
            elif any(end.calm for end in self.ends):  # it passes nothing on, so that it can be lent; that ends
                quiet = 0
                self.world.one.pass_time(0.001)
                self.world.two.pass_time(0.001)
            else:
                quiet += 1

    # -- steps --

    def play(self) -> None:
        for step in self.trace.steps:
            self._do(step)
            for direction in self.directions:
                direction.push()
            if self.trace.paced:
                self.rest()
                self.states.append(self.state(exact=True))
            else:
                for _ in range(step.turns):
                    self.turn()
        self.drain()
        for end in self.ends:
            end.reclaim()
        self.rest()
        self.states.append(self.state(exact=self.trace.paced))

    def _do(self, step: Step) -> None:
        out, into = self.directions[step.end], self.directions[1 - step.end]
        app, end = self.apps[step.end], self.ends[step.end]
        match step.what:
            case "write":
                out.write(step.size)
            case "read":
                into.take()
            case "part":
                into.take(step.size)
            case "reclaim":
                end.reclaim()
            case "pause":
                self._host(step.end).pass_time(1.0)  # until it is lent again
            case "resize":
                self._resize(end, step.size)
            case "ask":
                app.send_control(notice=Notice.DEMOTE)
            case _:
                self._end(step, out, into, app)

    def _end(self, step: Step, out: Direction, into: Direction, app: App) -> None:
        if step.what in ("shut", "back"):
            self.drain()  # what was written before goes before
            if not out.closed and into.recalled is None:
                out.closed = True
                (shut if step.what == "shut" else go_back)(app)
                if step.what == "shut":
                    see_fin(self.apps[1 - step.end])
        elif step.what == "recall" and not into.closed:
            self.drain()
            into.write(1000)  # which it does not read any more
            into.push()
            self.rest()
            into.closed = True
            into.recalled = recall(app)

    def _resize(self, end: RemoteRelay, size: int) -> None:
        self.rest()
        if end.lost:
            return
        end.reclaim()
        assert isinstance(end.link, SdpLink)
        stream, resize = end.link.stream, end.link.stream.connection._resize
        if size > stream.connection.remote_size and not resize.busy and resize.asked is None:
            stream.resize_remote(size)

    def _host(self, index: int) -> Host:
        return (self.world.one, self.world.two)[index]

    def drain(self) -> None:
        """All that can be read is."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.rest()
            for direction in self.directions:
                direction.take()
                direction.push()
            self.rest()
            if all(d.done for d in self.directions):
                return
            assert time.monotonic() < deadline, "bytes do not get through"

    # -- what is compared --

    def state(self, *, exact: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for index, (app, end) in enumerate(zip(self.apps, self.ends, strict=True)):
            words = {name: app.word(name) for name in WORDS}
            found[f"end {index}"] = {
                "words": words, "reset": reset(app), "lost": end.lost, "out": end.out, "into": end.into,
                "ending": end.ending, "peer_ending": end.peer_ending, "recall": end.recall,
                "avail": app.end.avail, "received": app.end.received, "sent": app.end.sent,
            }  # fmt: skip
            if exact:
                found[f"end {index}"]["unread"] = app.end.unread
        return found

    def check(self) -> None:
        """Bytes, and each trap."""
        assert not self.world.one.faults + self.world.two.faults
        for index, direction in enumerate(self.directions):
            half = self.judge.halves[index]
            by_wire = bytes(half.stream)
            assert direction.written[: len(by_wire)] == by_wire
            assert direction.read == direction.written[: len(direction.read)]
        for trap in self.traps:
            self._check_trap(trap)

    def _check_trap(self, trap: Trap) -> None:
        own, other = self.judge.halves[trap.index], self.judge.halves[1 - trap.index]
        record, before = trap.record, trap.before
        assert record["tx_mseq"] < len(own.said)
        assert record["rx_mseq"] < len(other.said)
        said, heard = own.said[record["tx_mseq"]], other.said[record["rx_mseq"]]
        said_before, heard_before = own.said[before["tx_mseq"]], other.said[before["rx_mseq"]]
        credit = heard.bufs - (record["tx_mseq"] - heard.ack)
        expected = {
            "last_bufs_sent": said.bufs, "last_ack_sent": said.ack, "sent": said.data, "read_reported": said.read,
            "peer_ack": heard.ack, "credit": max(0, credit), "data_left": heard.data_left,
            "held": said.data - heard.read, "posted": limits.REMOTE_RECEIVES,
            "messages_sent": record["tx_mseq"] - before["tx_mseq"],
            "messages_received": record["rx_mseq"] - before["rx_mseq"],
            "payloads_sent": said.payloads - said_before.payloads,
            "payloads_received": heard.payloads - heard_before.payloads,
            "wire_sent": said.length - said_before.length,
            "wire_received": heard.length - heard_before.length,
            "bytes_sent": said.data - said_before.data,
            "bytes_received": heard.data - heard_before.data,
        }  # fmt: skip
        assert {name: record[name] for name in expected} == expected, trap
        assert (trap.head, trap.tail) == (heard.read, heard.data), trap


def played(told: Trace, engines: tuple[bool, bool]) -> Run:
    with ExitStack() as stack:
        run = Run(stack, told, engines)
        run.play()
        run.check()
    return run


def compare(told: Trace, engines: Sequence[tuple[bool, bool]]) -> tuple[int, Counter[str]]:
    """Plays it by Python alone and by these; how many messages were judged, and why connections were given back."""
    alone = played(told, (False, False))
    messages, reasons = alone.judge.messages, Counter[str]()
    for each in engines:
        run = played(told, each)
        messages += run.judge.messages
        reasons.update(trap.reason.name.lower() for trap in run.traps)
        for own, other in zip(run.directions, alone.directions, strict=True):
            if own.recalled is None and other.recalled is None:
                assert own.read == other.read
        for at, (state, reference) in enumerate(zip(run.states, alone.states, strict=True)):
            assert state == reference, f"seed {told.seed}, {each}, state {at} of {len(run.states)}"
    return messages, reasons


@pytest.mark.slow
@pytest.mark.parametrize("engines", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("seed", rotate(range(6), test=2, ci=3))
def test_engines_leave_what_python_leaves(seed: int, engines: tuple[bool, bool]) -> None:
    messages, reasons = compare(trace(seed, 80), [engines])
    assert messages > 10
    assert sum(reasons.values()) > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="how many to judge")
    parser.add_argument("--seed", type=int, default=1000, help="of the first trace")
    parser.add_argument("--length", type=int, default=400, help="steps of a trace")
    given = parser.parse_args()
    messages, reasons, seed, began = 0, Counter[str](), given.seed, time.monotonic()
    while messages < given.messages:
        try:
            more, why = compare(trace(seed, given.length), list(ENGINES.values()))
        except BaseException:
            print(f"seed {seed}", flush=True)
            raise
        messages += more
        reasons.update(why)
        seed += 1
        if seed % 20 == 0:
            print(f"{seed - given.seed} traces, {messages} messages, {dict(reasons)}", flush=True)
    lasted_s = time.monotonic() - began
    print(f"{seed - given.seed} traces, {messages} messages in {lasted_s:.0f} s; given back: {dict(reasons)}")


if __name__ == "__main__":
    main()
