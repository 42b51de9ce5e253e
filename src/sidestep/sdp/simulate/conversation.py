"""One conversation of two stacks over a loopback fabric, in virtual time, from one seed.

    outcome = Conversation(draw(seed)).run()    # Surprise if something is wrong

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
from sidestep.sdp.simulate.plan import TROUBLES, EndPlan, Plan, PlanKind, Trouble
from sidestep.sdp.simulate.trace import Trace
from sidestep.sdp.simulate.user import User
from sidestep.sdp.stack import Stack, stack_on

PORT: Final = 5001
_LIMIT_S: Final = 3600.0
_EVENTS_MAX: Final = 100_000
_ADDRESSES: Final = Addresses(IPv4Address("10.0.0.1"), 35000, IPv4Address("10.0.0.2"), PORT)
_LINGERS: Final = {Trouble.CLOSE: None, Trouble.LINGER: 0.5, Trouble.LINGER_ZERO: 0.0}


class Surprise(AssertionError):
    """An event that must not happen."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a conversation."""

    seed: int
    kind: PlanKind
    messages: tuple[int, ...]  # SDP messages that each end has sent
    received: tuple[int, ...]  # bytes that each user got
    steps: int  # events of the fabric
    ended_s: float  # virtual time when both users had the last event


class Conversation:
    """One conversation."""

    port = PORT
    names = ["left", "right"]  # noqa: RUF012 - not to be changed
    fabric: Fabric
    stacks: list[Stack]

    def __init__(self, plan: Plan, trace: Trace | None = None) -> None:
        self.plan, self._trace = plan, trace
        rng = Random(plan.seed ^ 0x5D90)  # it decides the conversation, no secret
        self.build(rng)
        self.users = [self.user(index, Random(rng.getrandbits(64))) for index in range(2)]
        self.streams: list[SdpStream] = []  # all there ever were
        self.told = 0
        self._troubled = plan.trouble is None or plan.kind is PlanKind.REFUSED

    def build(self, rng: Random) -> None:
        """Makes the fabric and the stacks."""
        plan, wire = self.plan, Random(rng.getrandbits(64))
        self.fabric = Fabric(wire, timing=plan.timing, faults=plan.faults, observer=self._trace, run_limit=_EVENTS_MAX)
        self.stacks = [self._stack(name, end) for name, end in zip(self.names, plan.ends, strict=True)]

    def _stack(self, name: str, end: EndPlan) -> Stack:
        return stack_on(
            self.fabric, self.fabric.device(name, self.plan.attributes), end.settings,
            keep_registered=end.keeps_registered, private_bytes_kept=end.private_bytes_kept,
        )  # fmt: skip

    def user(self, index: int, rng: Random) -> User:
        """Makes the user of an end."""
        return User(self.names[index], rng, self.plan.ends[index].habits, self)

    # --- for users ---

    def note(self, user: User, text: str) -> None:
        if self._trace is not None:
            self._trace.note(self.fabric.now, user.name, text)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.fabric.call_later(delay_s, partial(self.act, action))

    def act(self, action: Callable[[], None]) -> None:
        if self.plan.fail_registration and self.begun:
            assert self.fabric.faults is not None
            self.fabric.faults.fail_registration = self.plan.fail_registration
        action()

    def handle_told(self) -> None:
        """A user had an event."""
        self.told += 1
        if self.told > self.plan.trouble_after and not self._troubled:
            self._troubled = True
            self.fabric.call_later(self.plan.trouble_delay_s, self._make_trouble)

    @property
    def begun(self) -> bool:
        """True if there is a connection, or was, or there will be none."""
        return all(user.events for user in self.users)

    # --- the course of it ---

    def run(self) -> Outcome:
        """From connect to the last event; raises Surprise if something is wrong."""
        try:
            self.begin()
            if not self.fabric.run_until(self.over, limit_s=_LIMIT_S):
                self.stop()
            ended_s = self.fabric.now
            self.fabric.run_until(lambda: False, limit_s=_LIMIT_S)  # for the remaining events
        except LimitReached as reached:
            raise Surprise(f"it goes on and on: {reached.message}") from reached
        except SidestepError as error:
            raise Surprise(f"{type(error).__name__}: {error.message}") from error
        self.check()
        sent = tuple(user.connection._flow.sent_count if user.joined else 0 for user in self.users)
        received = tuple(len(user.received) for user in self.users)
        return Outcome(self.plan.seed, self.plan.kind, sent, received, self.fabric.event_count, ended_s)

    def begin(self) -> None:
        plan, trouble, left = self.plan, self.plan.trouble, self.users[0]
        if trouble is Trouble.NO_MEMORY:
            assert self.fabric.faults is not None
            self.fabric.faults.fail_registrations_next = 1
        if trouble is not Trouble.NOBODY:
            self.stacks[1].listen(self.port, self._accepted, settings=plan.ends[1].settings)
        address = "nowhere" if trouble is Trouble.UNREACHABLE else self.names[1]
        addresses = replace(_ADDRESSES, local_port=_ADDRESSES.local_port + self.port, remote_port=self.port)
        stream = self.stacks[0].connect(address, addresses, left.tell, plan.ends[0].settings)
        self.streams.append(stream)
        left.join(stream)
        if trouble is Trouble.GIVEN_UP:
            self.fabric.call_later(plan.trouble_delay_s, left.abort)
        self.fabric.call_later(0.0, self.handle_told)

    def _accepted(self, stream: SdpStream) -> None:
        user = self.users[1]
        if user.joined:
            raise Surprise("a second connection")
        self.streams.append(stream)
        user.join(stream)
        if self.plan.trouble is Trouble.REJECTED:
            self.fabric.call_later(self.plan.trouble_delay_s, user.abort)

    def _make_trouble(self) -> None:
        trouble, user = self.plan.trouble, self.users[self.plan.trouble_end]
        if trouble in TROUBLES[PlanKind.RUDE]:
            if user.joined and not user.closed:
                user.abort() if trouble is Trouble.ABORT else user.close(_LINGERS[trouble])
        elif trouble is Trouble.DEVICE:
            self.fabric.fail(self.stacks[self.plan.trouble_end].device)  # type: ignore[arg-type]
        elif user.joined and (qp := user.stream.qp) is not None:
            if trouble is Trouble.CUT:
                self.fabric.cut(qp)  # type: ignore[arg-type]
            elif trouble is Trouble.RESET:
                self.fabric.reset(qp)  # type: ignore[arg-type]

    def over(self) -> bool:
        left, right = self.users
        return left.done and (right.done or (not right.joined and self.fabric.idle))

    def stop(self) -> None:
        raise Surprise("nothing more happens, and the connection has not ended")

    def check(self) -> None:
        """All bytes of a clean conversation have arrived, in order."""
        for index, reader in enumerate(self.users):
            if self.plan.kind is PlanKind.CLEAN:
                inline = self.plan.ends[index].settings.urgent_inline
                sent = self.users[1 - index].sent
                passed = [(content[: request.passed], request) for request, content in sent]
                apart = not inline  # then the urgent byte is not in the stream
                got = b"".join(
                    part[:-1] if request.urgent and apart and request.passed == request.length else part
                    for part, request in passed
                )
                if reader.received != got:
                    raise Surprise(f"{reader.name} has {len(reader.received)} bytes, not the {len(got)} that were sent")
