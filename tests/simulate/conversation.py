"""A conversation with checks, whose sockets may move, and those beside it between the same stacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final

from sidestep.sdp.simulate.conversation import PORT, Conversation, Outcome
from sidestep.sdp.simulate.plan import PlanKind
from sidestep.sdp.simulate.trace import Trace
from sidestep.sdp.simulate.user import User
from simulate import checks
from simulate.moves import Move
from simulate.plan import CheckedPlan, draw
from simulate.user import CheckedUser

_PLACES: Final = 1000  # from the port of a conversation to the first that its sockets move to


class CheckedConversation(Conversation):
    """One conversation."""

    plan: CheckedPlan
    users: list[CheckedUser]  # type: ignore[assignment]  # those that `user` makes

    def __init__(
        self, plan: CheckedPlan, trace: Trace | None = None, *, beside: CheckedConversation | None = None
    ) -> None:
        self._beside = beside
        self._number = 0 if beside is None else len(beside.companions) + 1
        self.port = PORT + self._number
        self._places = PORT + _PLACES * (self._number + 1)
        self._moves = list(plan.moves)
        self._moving: list[Move] = []
        self._move_planned = False
        self.companions: list[CheckedConversation] = []
        super().__init__(plan, trace)
        for other in plan.others:
            self.companions.append(CheckedConversation(other, trace, beside=self))

    @property
    def everyone(self) -> list[CheckedConversation]:
        return [self, *self.companions]

    def build(self, rng: Random) -> None:
        if self._beside is None:
            super().build(rng)
        else:
            step = -1 if self.plan.turned else 1
            self.fabric = self._beside.fabric
            self.names, self.stacks = self._beside.names[::step], self._beside.stacks[::step]

    def user(self, index: int, rng: Random) -> CheckedUser:
        mark = f" {self._number + 1}" if self._number else ""
        return CheckedUser(self.names[index] + mark, rng, self.plan.ends[index].habits, self)

    # --- for users ---

    def note(self, user: User, text: str) -> None:
        if self._trace is not None:
            self._trace.note(self.fabric.now, user.name.split()[0], text)

    def act(self, action: Callable[[], None]) -> None:
        super().act(partial(self._check_and_act, action))

    def _check_and_act(self, action: Callable[[], None]) -> None:
        if self.fabric.idle:
            checks.at_rest(self)
        action()

    @property
    def begun(self) -> bool:
        return super().begun and all(companion.begun for companion in self.companions)

    def handle_told(self) -> None:
        super().handle_told()
        for move in self._moving:
            move.go_on()
        moving = self._move_planned or not all(move.over for move in self._moving)
        if self._moves and not moving and self.told > self.plan.moves_after:
            self._move_planned = True
            self.fabric.call_later(self.plan.trouble_delay_s, partial(self._move, self._moves.pop(0)))

    def _move(self, indices: tuple[int, ...]) -> None:
        self._move_planned = False
        for index in indices:
            user = self.users[index]
            if user.may_move:
                self._places += 1
                settings = self.plan.ends[index].settings
                move = Move(self.fabric, self.stacks[index], settings, user, self._places, self.streams.append)
                self._moving.append(move)

    # --- the course of it ---

    def begin(self) -> None:
        super().begin()
        for companion in self.companions:
            companion.begin()

    def over(self) -> bool:
        left, right = self.users
        over = left.done and (right.done or (not right.met and self.fabric.idle))
        return over and all(companion.over() for companion in self.companions)

    def stop(self) -> None:
        for conversation in self.everyone:
            checks.at_rest(conversation)
        super().stop()

    def check(self) -> None:
        for conversation in self.everyone:
            for user in conversation.users:
                if user.joined:
                    user.stream.close()  # gives back what was never read
        for conversation in self.everyone:
            Conversation.check(conversation)
            checks.at_end(conversation)
        checks.nothing_left(self)

    def describe(self) -> str:
        return "\n".join(checks.describe(each, index) for each in self.everyone for index in range(2))


def converse(seed: int, *, kind: PlanKind | None = None) -> Outcome:
    """Runs the conversation of a seed; raises Surprise if something is wrong."""
    return CheckedConversation(draw(seed, kind=kind)).run()
