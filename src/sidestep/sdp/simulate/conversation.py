"""One conversation of two stacks over a loopback fabric, under virtual time, from one seed.

    outcome = converse(seed)            # Surprise if something is wrong
    told = report(seed)                 # the same again with everything recorded, in words

Equal seeds give equal conversations, message for message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv4Address
from random import Random
from typing import Final

from sidestep.errors import LimitReached, SidestepError
from sidestep.rdma.loopback import Fabric
from sidestep.sdp.endpoint import SdpStream
from sidestep.sdp.settings import Addresses
from sidestep.sdp.simulate import checks
from sidestep.sdp.simulate.moves import Move
from sidestep.sdp.simulate.plan import Breakage, EndPlan, Plan, PlanKind, Refused, Rudeness, draw
from sidestep.sdp.simulate.trace import Trace
from sidestep.sdp.simulate.user import Surprise, User
from sidestep.sdp.stack import Stack, stack_on

PORT: Final = 5001
_LIMIT_S: Final = 3600.0
_EVENTS_MAX: Final = 100_000
_ADDRESSES: Final = Addresses(IPv4Address("10.0.0.1"), 35000, IPv4Address("10.0.0.2"), PORT)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it."""

    seed: int
    kind: PlanKind
    messages: tuple[int, int]  # SDP messages that each end has sent
    received: tuple[int, int]  # bytes that each user got
    steps: int  # events of the fabric
    ended_s: float  # virtual time when both users had heard the last word


class Conversation:
    """One conversation, and those that take place beside it: between the same stacks, on connections of their own."""

    def __init__(self, plan: Plan, trace: Trace | None = None, *, beside: Conversation | None = None) -> None:
        rng = Random(plan.seed ^ 0x5D90)  # it decides what is tried, no secret
        self.plan = plan
        self._trace = trace
        number = 0 if beside is None else len(beside.companions) + 1
        self._port = PORT + number
        self._mark = ""  # behind the names of its users
        if beside is None:
            self.fabric = Fabric(
                Random(rng.getrandbits(64)),
                timing=plan.timing,
                faults=plan.faults,
                observer=trace,
                run_limit=_EVENTS_MAX,
            )
            self.names = ["left", "right"]
            self.stacks = [self._stack(name, end) for name, end in zip(self.names, plan.ends, strict=True)]
        else:
            self.fabric = beside.fabric
            self._mark = f" {number + 1}"
            step = -1 if plan.turned else 1
            self.names = beside.names[::step]
            self.stacks = beside.stacks[::step]
        self.users = [self._user(index, Random(rng.getrandbits(64))) for index in range(2)]
        self.joined = [False, False]  # there is a connection at this end
        self.streams: list[SdpStream] = []  # all there ever were
        self._moves = list(plan.moves)
        self._moving: list[Move] = []
        self._move_planned = False
        self._places = PORT + 1000 * (number + 1)  # ports that sockets have moved to
        self._told = 0
        self._trouble_begun = False
        self.companions: list[Conversation] = []
        for other in plan.others:
            self.companions.append(Conversation(other, trace, beside=self))

    def _stack(self, name: str, end: EndPlan) -> Stack:
        return stack_on(
            self.fabric,
            self.fabric.device(name, self.plan.attributes),
            end.settings,
            keep_registered=end.keeps_registered,
            private_bytes_kept=end.private_bytes_kept,
        )

    def _user(self, index: int, rng: Random) -> User:
        return User(
            self.names[index] + self._mark,
            rng,
            self.plan.ends[index].habits,
            self._later,
            self._was_told,
            lambda: self.fabric.now,
            gentle=self.plan.kind is PlanKind.CLEAN,
            note=None if self._trace is None else partial(self._note, self.names[index]),
        )

    def _note(self, name: str, text: str) -> None:
        assert self._trace is not None
        self._trace.note(self.fabric.now, name, text)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.fabric.call_later(delay_s, partial(self._act, action))

    def _act(self, action: Callable[[], None]) -> None:
        plan = self.plan
        if plan.fail_registration and self.begun and all(companion.begun for companion in self.companions):
            assert self.fabric.faults is not None
            self.fabric.faults.fail_registration = plan.fail_registration
        if self.fabric.idle:
            checks.at_rest(self)
        action()

    # --- trouble ---

    def _was_told(self) -> None:
        self._told += 1
        if self._told > self.plan.trouble_after and not self._trouble_begun:
            self._begin_trouble()
        for move in self._moving:
            move.go_on()
        moving = self._move_planned or not all(move.over for move in self._moving)
        if self._moves and not moving and self._told > self.plan.moves_after:
            self._move_planned = True
            self.fabric.call_later(self.plan.trouble_delay_s, partial(self._move, self._moves.pop(0)))

    @property
    def begun(self) -> bool:
        """Whether there is a connection, or was, or there will be none."""
        return all(user.book.events for user in self.users)

    # --- moving ---

    def _move(self, indices: tuple[int, ...]) -> None:
        self._move_planned = False
        for index in indices:
            user = self.users[index]
            if user.may_move:
                self._places += 1
                settings = self.plan.ends[index].settings
                move = Move(self.fabric, self.stacks[index], settings, user, self._places, self.streams.append)
                self._moving.append(move)

    def _begin_trouble(self) -> None:
        plan = self.plan
        self._trouble_begun = True
        if isinstance(plan.trouble, Rudeness | Breakage):
            self.fabric.call_later(plan.trouble_delay_s, self._make_trouble)

    def _make_trouble(self) -> None:
        plan, index = self.plan, self.plan.trouble_end
        user = self.users[index]
        if isinstance(plan.trouble, Rudeness):
            if user.stream is None or user.closed:
                return
            if plan.trouble is Rudeness.ABORT:
                user.abort()
            else:
                lingers = {Rudeness.CLOSE: None, Rudeness.LINGER: 0.5, Rudeness.LINGER_ZERO: 0.0}
                user.close(lingers[plan.trouble])
            return
        if plan.trouble is Breakage.DEVICE:
            self.fabric.fail(self.stacks[index].device)  # type: ignore[arg-type]
            return
        qp = None if user.stream is None else user.stream.qp
        if qp is not None and plan.trouble is Breakage.CUT:
            self.fabric.cut(qp)  # type: ignore[arg-type]
        elif qp is not None and plan.trouble is Breakage.RESET:
            self.fabric.reset(qp)  # type: ignore[arg-type]

    # --- the course of it ---

    def run(self) -> Outcome:
        """From connect to the last word, and checks it.

        Raises:
            Surprise: Something is wrong.
        """
        everyone = [self, *self.companions]
        try:
            for conversation in everyone:
                conversation._begin()
            if not self.fabric.run_until(self._all_over, limit_s=_LIMIT_S):
                for conversation in everyone:
                    checks.at_rest(conversation)
                raise Surprise("nothing more happens, and the connection has not ended")
            ended_s = self.fabric.now
            self.fabric.run_until(lambda: False, limit_s=_LIMIT_S)  # what is left
        except LimitReached as reached:
            raise Surprise(f"it goes on and on: {reached.message}") from reached
        except SidestepError as error:
            raise Surprise(f"{type(error).__name__}: {error.message}") from error
        for conversation in everyone:
            for user in conversation.users:
                if user.stream is not None:
                    user.stream.close()  # gives back what was never read
        for conversation in everyone:
            checks.at_end(conversation)
        checks.nothing_left(self)
        sent = [self._sent_count(user) for user in self.users]
        return Outcome(
            self.plan.seed,
            self.plan.kind,
            (sent[0], sent[1]),
            (len(self.users[0].book.stream), len(self.users[1].book.stream)),
            self.fabric.event_count,
            ended_s,
        )

    def _sent_count(self, user: User) -> int:
        return user.connection._flow.sent_count if user.stream is not None else 0

    def _begin(self) -> None:
        plan = self.plan
        left = self.users[0]
        if plan.trouble is Refused.NO_MEMORY:
            assert self.fabric.faults is not None
            self.fabric.faults.fail_registrations_next = 1
        if plan.trouble is not Refused.NOBODY:
            self.stacks[1].listen(self._port, self._accepted, settings=plan.ends[1].settings)
        address = "nowhere" if plan.trouble is Refused.UNREACHABLE else self.names[1]
        addresses = replace(_ADDRESSES, local_port=_ADDRESSES.local_port + self._port, remote_port=self._port)
        stream = self.stacks[0].connect(address, addresses, left.tell, plan.ends[0].settings)
        self.joined[0] = True
        self.streams.append(stream)
        left.join(stream)
        if plan.trouble is Refused.GIVEN_UP:
            self.fabric.call_later(plan.trouble_delay_s, left.abort)
        self.fabric.call_later(0.0, self._was_told)

    def _accepted(self, stream: SdpStream) -> None:
        user = self.users[1]
        if user.stream is not None:
            raise Surprise("a second connection")
        stream.tell = user.tell
        self.joined[1] = True
        self.streams.append(stream)
        user.join(stream)
        if self.plan.trouble is Refused.REJECTED:
            self.fabric.call_later(self.plan.trouble_delay_s, user.abort)

    def _over(self) -> bool:
        left, right = self.users
        if left.done and right.done:
            return True
        return left.done and not self.joined[1] and self.fabric.idle

    def _all_over(self) -> bool:
        return self._over() and all(companion._over() for companion in self.companions)

    def describe(self) -> str:
        everyone = [self, *self.companions]
        return "\n".join(checks.describe(each, index) for each in everyone for index in range(2))


def converse(seed: int, *, kind: PlanKind | None = None) -> Outcome:
    """Runs the conversation of a seed.

    Raises:
        Surprise: Something is wrong.
    """
    return Conversation(draw(seed, kind=kind)).run()
