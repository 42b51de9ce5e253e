"""How long a provider looks for news before it sleeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sidestep import limits
from sidestep.counters import Counters
from sidestep.loop import Loop
from sidestep.provider.carry.hub import Hub
from sidestep.provider.carry.polling import Waiting


class Clock:
    """Goes on by so much with each look."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


@pytest.fixture
def polling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    made = Waiting(Loop(clock=Clock(1e-6)), Hub(Loop(), Counters(), relays_max=0))
    monkeypatch.setattr(made, "_running", lambda: 1)
    yield made
    made.close()


def looks(polling: Waiting, until: int | None) -> int:
    """How often it looks, if the look number `until` finds something."""
    count = 0

    def found() -> bool:
        nonlocal count
        count += 1
        return count == until

    polling.warm = True
    assert polling.look(found) == (until is not None)
    return count


def test_the_budget_follows_what_was_found(polling: Waiting) -> None:
    assert polling.budget_s == limits.POLL_MIN_S
    for _ in range(10):
        looks(polling, 1)
    assert polling.budget_s == limits.POLL_MAX_S
    many = looks(polling, None)
    assert many > 50
    for _ in range(10):
        looks(polling, None)
    assert polling.budget_s == limits.POLL_MIN_S
    assert looks(polling, None) < many / 5


def test_only_news_make_it_look(polling: Waiting) -> None:
    assert looks(polling, 1) == 1
    assert not polling.look(lambda: pytest.fail("a look without news"))


def test_a_crowded_machine_is_left_to_others(polling: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "_running", lambda: 1 << 16)
    polling.warm = True
    assert not polling.look(lambda: pytest.fail("it looked"))


def test_the_load_is_the_machines() -> None:
    polling = Waiting(Loop(clock=Clock(1e-6)), Hub(Loop(), Counters(), relays_max=0))
    try:
        assert 1 <= polling._running() < 1 << 22  # threads: we are one
    finally:
        polling.close()
