"""Plays programs of socket calls in a world: over kernel TCP, or promoted under the shim.

A program is a list of calls on the ends of one or two connections, non-blocking, one at a time. Between two calls the
player waits until what the first one caused has arrived at the other end, so that the second one meets the same
situation in every world. What an op shows is an `Observation`; those of two worlds are compared by `differences`, which
knows the freedom that TCP leaves: when a direction has been filled up, how much fits and when there is room again are
the implementation's own, and an edge-triggered set may report a readiness that still holds once more.
"""

# mypy: disable-error-code="assignment,arg-type,comparison-overlap,operator,index"
from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from common import PATIENCE_S

from sidestep.testing import Sidestep

UNREAD_MAX: Final = 3072  # bytes a direction holds at most, unless flooded: the smallest ring still has room then
REPLY_S: Final = PATIENCE_S
WARM_UP_S: Final = PATIENCE_S
EDGE: Final = select.EPOLLET
_OUT: Final = select.EPOLLOUT | select.EPOLLWRNORM
_ENDED: Final = select.EPOLLRDHUP | select.EPOLLHUP
_CTL: Final = {"add": 1, "del": 2, "mod": 3}

Op = tuple[str | int, ...]  # a verb and its arguments; the first is the end, or for `wait` the set


class WorldBroken(Exception):
    """The interpreter died or did not answer."""


class Interpreter:
    """A process that carries out the calls (interpreter.c)."""

    def __init__(self, program: Path, env: dict[str, str] | None) -> None:
        self._process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True, bufsize=1
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, *words: object) -> str:
        """Has one line carried out; returns the answer."""
        line = " ".join(map(str, words))
        if self._process.stdin is None or self._process.stdout is None:
            raise WorldBroken("the interpreter has no pipes")
        try:
            self._process.stdin.write(line + "\n")
            if not select.select([self._process.stdout], [], [], REPLY_S)[0]:
                raise WorldBroken(f"no answer to '{line}' in {REPLY_S} s")
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise WorldBroken(f"the interpreter died of '{line}' with {self._process.wait()}")
        return answer.rstrip("\n")

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue  # a line that it did not live to read


class World:
    """One interpreter for both ends of each connection, or one for each end."""

    def __init__(self, program: Path, *, processes: int, sidestep: Sidestep | None = None, warm: bool = True) -> None:
        self._program, self._processes, self._sidestep, self._warm = program, processes, sidestep, warm
        self._interpreters: list[Interpreter] = []
        self.connections_count = 0
        self.promoted_count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the interpreters; the next program starts new ones."""
        for interpreter in self._interpreters:
            interpreter.close()
        self._interpreters = []

    def of(self, end: int) -> Interpreter:
        """The interpreter that holds `end`: even ones connect, odd ones accept."""
        return self._interpreters[end % len(self._interpreters)]

    @property
    def interpreters(self) -> Sequence[Interpreter]:
        return self._interpreters

    def begin(self, connections: int, rounds: int) -> None:
        """Closes what was before; connects ends 0 and 1, 2 and 3, and plays `rounds` of ping-pong on each."""
        if not self._interpreters:
            env = None if self._sidestep is None else self._sidestep.env()
            self._interpreters = [Interpreter(self._program, env) for _ in range(self._processes)]
        for interpreter in self._interpreters:
            interpreter.ask("clear")
            for index in range(2):
                interpreter.ask("epoll", index)
        for active in range(0, 2 * connections, 2):
            port = self.of(active + 1).ask("listen", 15)
            self._expect("0 -", active, "connect", active, port)
            self._expect("0 -", active + 1, "accept", active + 1, 15)
            self.of(active + 1).ask("close", 15)
            self.connections_count += 1
            self._ping_pong(active, rounds)
            if self._warm and self._sidestep is not None:
                self._warm_up(active)

    def _expect(self, answer: str, end: int, *words: object) -> None:
        got = self.of(end).ask(*words)
        if got != answer:
            raise WorldBroken(f"'{' '.join(map(str, words))}' answered '{got}', not '{answer}'")

    def _ping_pong(self, active: int, rounds: int) -> None:
        for _ in range(rounds):
            for end in (active, active + 1):
                self._expect("8 -", end, "send", end, 0, 8)
                self._expect("8 0", end ^ 1, "get", end ^ 1, 8)

    def count_promoted(self, connections: int) -> None:
        """Adds up which of the program's connections have met the ring so far."""
        if self._sidestep is None or self._warm:
            return
        found = self._sidestep.connections()
        for active in range(0, 2 * connections, 2):
            ports = self.of(active).ask("names", active).split()
            ours = [c for c in found if c.local.endswith(f":{ports[0]}") and c.remote.endswith(f":{ports[1]}")]
            self.promoted_count += any(c.tx.ring_bytes or c.rx.ring_bytes for c in ours)

    def _warm_up(self, active: int) -> None:
        """Ping-pong until both ends are promoted."""
        assert self._sidestep is not None
        deadline_s = time.monotonic() + WARM_UP_S
        ports = self.of(active).ask("names", active).split()
        while True:
            self._ping_pong(active, 8)
            ends = [
                c
                for c in self._sidestep.connections()
                if {c.local.rpartition(":")[2], c.remote.rpartition(":")[2]} == set(ports)
            ]
            if len(ends) == 2 and all(c.promoted for c in ends):
                self.promoted_count += 1
                return
            if time.monotonic() > deadline_s:
                states = [(c.role, c.state, c.reason) for c in ends]
                raise WorldBroken(f"the connection was not promoted in {WARM_UP_S} s: {states}")


@dataclass(frozen=True, slots=True)
class Observation:
    """What an op showed. `events` are those of a wait, by user data, with the bits that say something."""

    op: Op
    shown: str
    events: tuple[tuple[int, int], ...] = ()
    ready: tuple[tuple[int, int], ...] = ()  # for edge-triggered registrations: what poll says at that moment


@dataclass(slots=True)
class _End:
    """What the player knows of one end."""

    open: bool = True
    unread: int = 0  # bytes sent to it that it has not read
    flooded: bool = False  # the other end has filled up the direction towards it
    was_full: bool = False  # its own sending direction has been filled up once
    end_hidden: bool = False  # the end of the stream towards it may still lie behind bytes that did not fit
    lost: bool = False  # a reset or a shutdown overtook such bytes: how many were saved is nobody's promise
    shut_wr: bool = False
    shut_rd: bool = False
    registrations: dict[int, tuple[int, int]] = field(default_factory=dict)  # user data -> set, events


class Player:
    """Plays one program in one world."""

    def __init__(self, world: World, connections: int, rounds: int = 0) -> None:
        self._world, self._rounds = world, rounds
        self._ends = [_End() for _ in range(2 * connections)]
        self._generation = 0
        self.seen: list[Observation] = []

    def play(self, program: Sequence[Op]) -> list[Observation]:
        """Carries out the whole program; returns what it showed."""
        self._world.begin(len(self._ends) // 2, self._rounds)
        counted = False
        for op in program:
            verb, where, *rest = op
            if verb == "wait":
                self._wait(op, int(where), int(rest[0]))
                continue
            if verb in ("close", "abort") and not counted:
                self._world.count_promoted(len(self._ends) // 2)
                counted = True
            index = int(where) % len(self._ends)
            if self._ends[index].open:
                getattr(self, f"_op_{verb}")(op, index, *rest)
        if not counted:
            self._world.count_promoted(len(self._ends) // 2)
        return self.seen

    # ---- helpers ----

    def _ask(self, index: int, verb: str, *rest: object) -> str:
        return self._world.of(index).ask(verb, index, *rest)

    def _show(self, op: Op, shown: str) -> None:
        self.seen.append(Observation(op, shown))

    def _settle(self, op: Op, index: int, what: str, *rest: object) -> None:
        """Waits until `index` sees what was done at its other end; that it does is an observation itself."""
        if self._ends[index].open:
            self._show((*op, what), self._ask(index, what, *rest))

    def _settle_data(self, op: Op, index: int) -> None:
        end = self._ends[index]
        if not end.flooded:
            self._settle(op, index, "arrived", end.unread)

    def _free_bits(self, index: int) -> int:
        """Readiness of which nobody can say when it comes."""
        bits = _OUT if self._ends[index ^ 1].flooded else 0
        end = self._ends[index]
        return bits | (_ENDED if end.end_hidden and end.flooded else 0)

    # ---- ops ----

    def _op_send(self, op: Op, index: int, kind: int, length: int) -> None:
        end, other = self._ends[index], self._ends[index ^ 1]
        length = min(length, UNREAD_MAX - other.unread)
        if other.flooded or length <= 0 or (end.flooded and not other.open):
            return
        answer = self._ask(index, "send", kind, length)
        self._show(op, answer)
        sent = max(int(answer.split()[0]), 0)
        if other.open and not (other.shut_rd and other.shut_wr):
            other.unread += sent
            if sent:
                self._settle_data(op, index ^ 1)
        elif sent:
            self._settle(op, index, "reset")  # nobody is there: the answer to bytes is a reset
            end.lost |= end.flooded

    def _op_flood(self, op: Op, index: int) -> None:
        end, other = self._ends[index], self._ends[index ^ 1]
        if not other.open or end.shut_wr or other.flooded or other.shut_rd:
            return
        other.unread += int(self._ask(index, "flood"))
        other.flooded = end.was_full = True
        self._show(op, "")

    def _op_drain(self, op: Op, index: int) -> None:
        end, other = self._ends[index], self._ends[index ^ 1]
        count, wrong = self._ask(index, "get", end.unread).split()
        if end.lost:
            return
        self._show(op, f"{'all' if int(count) == end.unread else 'not all'} {wrong}")
        end.unread = 0
        end.flooded = False
        if end.end_hidden:
            self._settle(op, index, "ended")
        if other.open and not other.shut_wr:
            self._settle(op, index ^ 1, "writable")

    def _op_recv(self, op: Op, index: int, kind: int, length: int) -> None:
        end = self._ends[index]
        count, why, wrong = self._ask(index, "recv", kind, length).split()
        if not end.lost:
            self._show(op, wrong if end.flooded else f"{count} {why} {wrong}")
        end.unread -= int(count)

    def _op_skip(self, op: Op, index: int, length: int) -> None:
        end = self._ends[index]
        count, why = self._ask(index, "skip", length).split()
        if not end.lost:
            self._show(op, "" if end.flooded else f"{count} {why}")
        end.unread -= int(count)

    def _op_peek(self, op: Op, index: int, length: int) -> None:
        end = self._ends[index]
        count, why, wrong = self._ask(index, "peek", length).split()
        if not end.lost:
            self._show(op, wrong if end.flooded else f"{count} {why} {wrong}")

    def _op_poll(self, op: Op, index: int, kind: int, events: int) -> None:
        revents = int(self._ask(index, "poll", kind, events), 16)
        self._show(op, f"{revents & ~self._free_bits(index):x}")

    def _op_fionread(self, op: Op, index: int) -> None:
        answer = self._ask(index, "fionread")
        self._show(op, "" if self._ends[index].flooded else answer)

    def _op_error(self, op: Op, index: int) -> None:
        end, answer = self._ends[index], self._ask(index, "error")
        self._show(op, "" if end.lost and end.end_hidden else answer)  # EPIPE once the end is there, else ECONNRESET

    def _op_lowat(self, op: Op, index: int, length: int) -> None:
        self._show(op, self._ask(index, "lowat", length))

    def _op_dup(self, op: Op, index: int) -> None:
        self._show(op, self._ask(index, "dup"))

    def _op_shutdown(self, op: Op, index: int, how: int) -> None:
        end = self._ends[index]
        answer = self._ask(index, "shutdown", how)
        self._show(op, "" if end.end_hidden and end.flooded else answer)  # not connected once the end is there
        if how != 1:
            end.shut_rd = True
            end.lost |= end.flooded  # reading ends where nothing waits, and what is on its way is cut off there
        if how and not end.shut_wr:
            end.shut_wr = True
            if self._ends[index ^ 1].flooded:
                self._ends[index ^ 1].end_hidden = True
            else:
                self._settle(op, index ^ 1, "ended")

    def _op_close(self, op: Op, index: int) -> None:
        self._closed(op, index, "close")

    def _op_abort(self, op: Op, index: int) -> None:
        self._closed(op, index, "abort")

    def _closed(self, op: Op, index: int, verb: str) -> None:
        end, other = self._ends[index], self._ends[index ^ 1]
        self._show(op, self._ask(index, verb))
        end.open = False
        if verb == "abort" or end.unread:
            other.lost = other.flooded
            self._settle(op, index ^ 1, "reset")
        elif other.flooded:
            other.end_hidden = True
        else:
            self._settle(op, index ^ 1, "ended")
        end.unread = 0

    # ---- epoll ----

    def _op_add(self, op: Op, index: int, which: int, events: int) -> None:
        self._ctl(op, index, which, events, "add")

    def _op_mod(self, op: Op, index: int, which: int, events: int) -> None:
        self._ctl(op, index, which, events, "mod")

    def _op_del(self, op: Op, index: int, which: int, events: int) -> None:
        self._ctl(op, index, which, events, "del")

    def _ctl(self, op: Op, index: int, which: int, events: int, verb: str) -> None:
        end = self._ends[index]
        self._generation += 1
        user = (0x9E3779B97F4A7C15 * self._generation & ((1 << 64) - 1)) | 0x8000000000000000
        answer = self._world.of(index).ask("ctl", which, _CTL[verb], index, events, f"{user:x}")
        self._show(op, answer)
        if answer == "0 -":
            if verb != "add":
                # a registration made before a dup belongs to the old descriptor and cannot be changed any more
                old = [u for u, (s, _) in end.registrations.items() if s == which]
                for found in old:
                    del end.registrations[found]
            if verb != "del":
                end.registrations[user] = (which, events)

    def _wait(self, op: Op, which: int, room: int) -> None:
        answers = [interpreter.ask("wait", which, room) for interpreter in self._world.interpreters]
        events: list[tuple[int, int]] = []
        for answer in answers:
            for word in answer.split():
                user, _, bits = word.partition(":")
                events.append((int(user, 16), int(bits, 16)))
        seen: list[tuple[int, int]] = []
        level: list[tuple[int, int]] = []
        ready: list[tuple[int, int]] = []
        for user, bits in sorted(events):
            owner = next((i for i, e in enumerate(self._ends) if user in e.registrations), None)
            edge = owner is not None and bool(self._ends[owner].registrations[user][1] & EDGE)
            if owner is not None:
                bits &= ~self._free_bits(owner)
                if edge and self._ends[owner].was_full:
                    bits &= ~_OUT  # which of two waits saw the edge depends on when there was room
                if edge and self._ends[owner].end_hidden:
                    bits = 0  # and here, on when the end came through
            if bits:
                (seen if edge else level).append((user, bits))
        for index, end in enumerate(self._ends):
            for user, (set_of, interest) in end.registrations.items():
                if end.open and set_of == which and interest & EDGE:
                    now = int(self._ask(index, "poll", 0, interest & 0xFFFF), 16)
                    ready.append((user, now))
        self.seen.append(Observation(op, repr(level), tuple(seen), tuple(ready)))


def differences(native: Sequence[Observation], shimmed: Sequence[Observation]) -> list[str]:
    """Where two worlds differ, beyond the freedom they have; empty if nowhere."""
    found = []
    for step, (a, b) in enumerate(zip(native, shimmed, strict=False)):
        if a.op != b.op:
            found.append(f"step {step}: {a.op} {a.shown} over kernel TCP, but {b.op} {b.shown} under the shim")
            break  # nothing after it can be compared
        if a.shown != b.shown:
            found.append(f"step {step}: {a.op}: '{a.shown}' over kernel TCP, '{b.shown}' under the shim")
        found += [f"step {step}: {a.op}: {text}" for text in _edges_differ(a, b)]
    if len(native) != len(shimmed) and not found:
        found.append(f"{len(native)} observations over kernel TCP, {len(shimmed)} under the shim")
    return found


def _edges_differ(native: Observation, shimmed: Observation) -> list[str]:
    """What is wrong with the shim's edge-triggered events: one missing, or one that does not hold."""
    ours, ready, found = dict(shimmed.events), dict(shimmed.ready), []
    if len(ours) != len(shimmed.events):
        found.append(f"two events for one registration: {shimmed.events}")
    for user, bits in native.events:
        if bits & ~ours.get(user, 0):
            found.append(f"edge {user:x}: {bits:x} over kernel TCP, {ours.get(user, 0):x} under the shim")
    for user, bits in ours.items():
        if bits & ~ready.get(user, 0xFFFF):
            found.append(f"edge {user:x}: reported {bits:x}, but ready is {ready.get(user, 0):x}")
    return found
