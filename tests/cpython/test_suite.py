"""The comparison itself: every outcome is recorded, also of tests that kill or hang their interpreter."""

from __future__ import annotations

import os

import pytest
from suite import HERE, Exceptions, Outcome, Run, differences, run_module


@pytest.mark.slow
def test_every_outcome_is_recorded() -> None:
    """A crash and a hang cost only the test they happen in."""
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    run = run_module("sample", env, excluded=["*_excluded"], timeout_s=1.0)
    assert {test.removeprefix("sample."): outcome.verdict for test, outcome in run.outcomes.items()} == {
        "Sample.test_a_ok": "ok",
        "Sample.test_b_fail": "fail",
        "Sample.test_c_crash": "crash",
        "Sample.test_d_skip": "skip",
        "Sample.test_e_hang": "hang",
        "Sample.test_f_subtests": "fail",
        "Sample.test_g_expected": "expected failure",
        "Sample.test_h_ok": "ok",
        "setUpClass (sample.Broken)": "fail",
    }
    assert "as asked" in run.outcomes["sample.Sample.test_b_fail"].detail


def test_differences_are_found() -> None:
    """A changed, a lost and a new test count; a listed one does not; a listed one that is the same does."""
    native = Run(
        {"t.same": Outcome("fail"), "t.worse": Outcome("ok"), "t.lost": Outcome("ok"), "t.listed": Outcome("ok")}
    )
    shimmed = Run(
        {"t.same": Outcome("fail"), "t.worse": Outcome("crash"), "t.new": Outcome("ok"), "t.listed": Outcome("skip")}
    )
    listed = Exceptions({}, {"t.l?sted": "reason", "t.same": "reason", "other.*": "reason"})
    found = differences(native, shimmed, listed)
    assert [line.split(":")[0] for line in found] == [
        "t.lost", "t.new", "t.worse", "exceptions.toml lists t.same, which does not differ"
    ]  # fmt: skip
    assert not differences(native, native, Exceptions({}, {}))


def test_the_list_is_sound() -> None:
    """Every entry of exceptions.toml has its pattern and its reason."""
    listed = Exceptions.load()
    assert all(pattern.startswith("test.") for pattern in [*listed.excluded, *listed.differs])
