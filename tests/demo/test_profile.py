"""The profile of connections between two hosts waits until they are promoted, and does not ask for luck."""

from __future__ import annotations

import pytest

from sidestep.demo import profile
from sidestep.demo.works import RUNS_MAX
from sidestep.demo.world import Evidence, Sample, Site, World
from sidestep.errors import Unavailable
from sidestep.testing import Sidestep


def works(promoted_after_s: float, asked: list[float]) -> dict[str, object]:
    """Works whose connections are promoted once a run is so long."""

    def run(_world: World, seconds: float) -> Sample:
        asked.append(seconds)
        promoted = seconds >= promoted_after_s
        return Sample(seconds, evidence=Evidence(2 if promoted else 0, 2, () if promoted else ("native, young",)))

    return {"turn": run}


def test_a_run_that_was_over_too_soon_is_made_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(profile, "_WORKS", works(0.4, asked))
    assert profile._value("turn", "sdp", [Site(), Site()], 0.1) == 0.4
    assert asked == [0.1, 0.2, 0.4]


def test_a_provider_that_took_the_other_for_absent_starts_anew(
    sidestep: Sidestep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would not ask again for a minute."""
    monkeypatch.setattr(profile, "_WORKS", works(0.2, []))
    before = sidestep.provider_pid
    assert profile._value("turn", "sdp", [Site(), Site(sidestep=sidestep)], 0.1) == 0.2
    assert sidestep.provider_pid != before


def test_a_connection_that_is_not_promoted_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(profile, "_WORKS", works(100, asked))
    with pytest.raises(Unavailable, match="'turn' was not promoted: native, young"):
        profile._value("turn", "sdp", [Site(), Site()], 0.1)
    assert len(asked) == RUNS_MAX
