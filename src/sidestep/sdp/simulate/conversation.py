"""One conversation of two stacks over a loopback fabric, under virtual time, from one seed.

    outcome = converse(seed)            # Surprise if something is wrong
    told = report(seed)                 # the same again with everything recorded, in words

Equal seeds give equal conversations, message for message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address
from random import Random
from typing import Final

from sidestep.errors import LimitReached, SidestepError
from sidestep.rdma.cm import ConnectionRequest
from sidestep.rdma.loopback import Fabric
from sidestep.sdp.connection import Connection
from sidestep.sdp.endpoint import Stack, Stream
from sidestep.sdp.settings import Addresses
from sidestep.sdp.simulate import checks
from sidestep.sdp.simulate.plan import Breakage, EndPlan, Kind, Plan, Refused, Rudeness, draw
from sidestep.sdp.simulate.trace import Trace
from sidestep.sdp.simulate.user import Surprise, User
from sidestep.sdp.wire import service_id

PORT: Final = 5001
_LIMIT_S: Final = 3600.0
_EVENTS_MAX: Final = 100_000
_ADDRESSES: Final = Addresses(IPv4Address("10.0.0.1"), 40000, IPv4Address("10.0.0.2"), PORT)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it."""

    seed: int
    kind: Kind
    messages: tuple[int, int]  # SDP messages that each end has sent
    received: tuple[int, int]  # bytes that each user got
    steps: int  # events of the fabric
    ended_s: float  # virtual time when both users had heard the last word


class Conversation:
    """One conversation."""

    def __init__(self, plan: Plan, trace: Trace | None = None) -> None:
        rng = Random(plan.seed ^ 0x5D90)  # it decides what is tried, no secret
        self.plan = plan
        self._trace = trace
        self.fabric = Fabric(
            Random(rng.getrandbits(64)),
            immediate=plan.immediate,
            timing=plan.timing,
            faults=plan.faults,
            observer=trace,
            run_limit=_EVENTS_MAX,
        )
        self.names = ("left", "right")
        self.stacks = [self._stack(name, end) for name, end in zip(self.names, plan.ends, strict=True)]
        self.users = [self._user(index, Random(rng.getrandbits(64))) for index in range(2)]
        self.joined = [False, False]  # there is a connection at this end
        self.streams: list[Stream] = []  # all there ever were
        self._moves = list(plan.moves)
        self._moving: int | None = None
        self._expected: ConnectionRequest | None = None  # of the other end, at the place that was moved to
        self._places = 6000
        self._leaving: Connection | None = None
        self._told = 0
        self._trouble_begun = False

    def _stack(self, name: str, end: EndPlan) -> Stack:
        fabric = self.fabric
        device = fabric.device(name, self.plan.attributes)

        def wake_at(at: float) -> None:
            fabric.call_at(at, stack.handle_timeouts)

        stack = Stack(
            device,
            lambda: fabric.now,
            end.settings,
            wake_at=wake_at,
            keep_registered=end.keeps_registered,
            private_bytes_kept=end.private_bytes_kept,
        )
        return stack

    def _user(self, index: int, rng: Random) -> User:
        return User(
            self.names[index],
            rng,
            self.plan.ends[index].habits,
            self._later,
            self._was_told,
            lambda: self.fabric.now,
            gentle=self.plan.kind is Kind.CLEAN,
            note=None if self._trace is None else partial(self._note, self.names[index]),
        )

    def _note(self, name: str, text: str) -> None:
        assert self._trace is not None
        self._trace.note(self.fabric.now, name, text)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.fabric.call_later(delay_s, partial(self._act, action))

    def _act(self, action: Callable[[], None]) -> None:
        if self.fabric.idle:
            checks.at_rest(self)
        action()

    # --- trouble ---

    def _was_told(self) -> None:
        self._told += 1
        if self.fabric.faults is not None and self.users[0].book.events:
            self.fabric.faults.fail_registration = self.plan.fail_registration
        if self._told > self.plan.trouble_after and not self._trouble_begun:
            self._begin_trouble()
        if self._moves and self._moving is None and self._told > self.plan.moves_after:
            self._moving = self._moves.pop(0)
            self.fabric.call_later(self.plan.trouble_delay_s, self._move)
        elif self._moving is not None:
            self._take_over()

    # --- moving ---

    def _move(self) -> None:
        """One end's socket goes to another process: that waits for the other end while the first one takes leave."""
        assert self._moving is not None
        user = self.users[self._moving]
        if not user.may_move:
            self._moving = None
            return
        assert user.stream is not None
        self._places += 1
        stack = self.stacks[self._moving]
        self._listener = stack.device.cm.listen(service_id(self._places), self._came_after)
        self._leaving = user.stream.connection
        if self._trace is not None:
            self._note(user.name, f"moves to port {self._places}")
        user.stream.suspend(self._places)

    def _came_after(self, request: ConnectionRequest) -> None:
        self._expected = request
        self._take_over()

    def _take_over(self) -> None:
        if self._expected is None or self._leaving is None or self._leaving.suspended is None:
            return
        assert self._moving is not None
        request, suspended, index = self._expected, self._leaving.suspended, self._moving
        self._expected = self._leaving = self._moving = None
        self._listener.close()

        def accepted(stream: Stream) -> None:
            stream.tell = self.users[index].tell
            self.streams.append(stream)
            self.users[index].move(stream)

        self.stacks[index].serve(request, accepted, self._places, suspended=suspended)

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
        found = [qp for qp in self.fabric.queue_pairs.values() if qp.device is self.stacks[index].device]
        if found and plan.trouble is Breakage.CUT:
            self.fabric.cut(found[-1])
        elif found and plan.trouble is Breakage.RESET:
            self.fabric.reset(found[-1])

    # --- the course of it ---

    def run(self) -> Outcome:
        """From connect to the last word, and checks it.

        Raises:
            Surprise: Something is wrong.
        """
        try:
            self._begin()
            if not self.fabric.run_until(self._over, limit_s=_LIMIT_S):
                checks.at_rest(self)
                raise Surprise("nothing more happens, and the connection has not ended")
            ended_s = self.fabric.now
            while self.fabric.step():
                pass
        except LimitReached as reached:
            raise Surprise(f"it goes on and on: {reached.message}") from reached
        except SidestepError as error:
            raise Surprise(f"{type(error).__name__}: {error.message}") from error
        for user in self.users:
            if user.stream is not None:
                user.stream.close()  # gives back what was never read
        checks.at_end(self)
        sent = [self._sent_count(user) for user in self.users]
        return Outcome(
            self.plan.seed,
            self.plan.kind,
            (sent[0], sent[1]),
            (len(self.users[0].book.stream), len(self.users[1].book.stream)),
            self.fabric._event_number,
            ended_s,
        )

    def _sent_count(self, user: User) -> int:
        return user.connection._flow.sent_count if user.stream is not None else 0

    def _begin(self) -> None:
        plan = self.plan
        left, right = self.users
        if plan.trouble is Refused.NO_MEMORY:
            assert self.fabric.faults is not None
            self.fabric.faults.fail_registrations_next = 1
        if plan.trouble is not Refused.NOBODY:
            self.stacks[1].listen(PORT, self._accepted)
        address = "nowhere" if plan.trouble is Refused.UNREACHABLE else self.names[1]
        stream = self.stacks[0].connect(address, _ADDRESSES, left.tell)
        self.joined[0] = True
        self.streams.append(stream)
        left.join(stream)
        if plan.trouble is Refused.GIVEN_UP:
            self.fabric.call_later(plan.trouble_delay_s, left.abort)
        self.fabric.call_later(0.0, self._was_told)
        del right

    def _accepted(self, stream: Stream) -> None:
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

    def describe(self) -> str:
        """Both ends, for people."""
        return "\n".join(checks.describe(self, index) for index in range(2))


def converse(seed: int, *, kind: Kind | None = None) -> Outcome:
    """Runs the conversation of a seed.

    Raises:
        Surprise: Something is wrong.
    """
    return Conversation(draw(seed, kind=kind)).run()
