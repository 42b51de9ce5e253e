"""The channel's C tests: plain, under ASan and UBSan, under TSan; the litmus of the wake-up; and the fuzzer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import toolchain
from selection import rotate
from toolchain import ADDRESS, PLAIN, SANITIZERS, Sanitizer, sanitized

LITMUS_ROUNDS = 300_000
LITMUS_SECONDS = 20
PIN_ROUNDS = 20_000
PIN_SECONDS = 10
FUZZ_RUNS = 40_000
FUZZ_SECONDS = float(os.environ.get("SIDESTEP_FUZZ_S", "4"))

# as channel_test.c lists them; test_every_c_test_is_run compares
C_TESTS = toolchain.c_tests("channel_test")
LOCKED = "locked_memory_is_not_filled"  # sanitizers make nothing of mlockall
VARIANTS = [(PLAIN, LOCKED), *sanitized([name for name in C_TESTS if name != LOCKED])]


def test_every_c_test_is_run() -> None:
    listed = toolchain.succeed([toolchain.build_test("channel_test", PLAIN)], PLAIN).split()
    assert listed == C_TESTS


@pytest.mark.slow
@pytest.mark.parametrize(("sanitizer", "name"), VARIANTS, ids=lambda each: getattr(each, "name", each))
def test_channel(sanitizer: Sanitizer, name: str) -> None:
    assert toolchain.succeed([toolchain.build_test("channel_test", sanitizer), name], sanitizer) == ""


@pytest.mark.parametrize("variant", ["shared", "bounded"])
def test_segments_in_two_mappings_share_page_tables(variant: str) -> None:
    program = toolchain.build_test("apart", PLAIN, flags=["-UCHANNEL_SPILL"])  # as long as programs have it
    assert toolchain.succeed([program, variant], PLAIN) == ""


def litmus(variant: str, sanitizer: Sanitizer = PLAIN) -> tuple[int, int]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the litmus test needs two CPUs")
    program = toolchain.build_test("litmus", sanitizer)
    played, lost = toolchain.succeed([program, variant, str(LITMUS_ROUNDS), str(LITMUS_SECONDS)], sanitizer).split()
    return int(played), int(lost)


@pytest.mark.slow
def test_no_wakeup_is_lost_with_both_fences() -> None:
    played, lost = litmus("both")
    assert played > 0
    assert lost == 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["no-sleeper-fence", "no-sender-fence"])
def test_a_wakeup_is_lost_without_a_fence(variant: str) -> None:
    """Shows that the litmus test sees what it is made for; a machine may be too busy, or too strongly ordered."""
    played, lost = litmus(variant)
    if not lost:
        pytest.skip(f"{played} rounds did not show the loss on this machine")
    assert lost == 1


def pins(variant: str, sanitizer: Sanitizer = PLAIN) -> tuple[int, int, int]:
    program = toolchain.build_test("pins", sanitizer, flags=["-Wl,--wrap=madvise"])
    read, pinned, wrong = toolchain.succeed([program, variant, str(PIN_ROUNDS), str(PIN_SECONDS)], sanitizer).split()
    return int(read), int(pinned), int(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", rotate(SANITIZERS, ci=2), ids=lambda s: s.name)
def test_what_is_pinned_is_read_only_while_it_is_what_the_ring_is(sanitizer: Sanitizer) -> None:
    read, pinned, wrong = pins("counted", sanitizer)
    assert read > PIN_ROUNDS / 100
    assert pinned > 10
    assert wrong == 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["blind", "amid"])
def test_pages_that_were_given_back_are_seen_without_the_count(variant: str) -> None:
    """Shows that the test above sees what it is made for."""
    *_, wrong = pins(variant)
    assert wrong == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", rotate([1, 2]))
def test_any_segment_content(seed: int) -> None:
    """The fuzz target with seeded inputs, which every compiler can build."""
    program = toolchain.build_test("fuzz_channel", ADDRESS, toolchain.NATIVE_TESTS / "fuzz_main.c")
    assert toolchain.succeed([program, str(seed), str(FUZZ_RUNS)], ADDRESS).split() == [str(FUZZ_RUNS)]


@pytest.mark.slow
@pytest.mark.least("ci")  # clang is not among what the smaller sets need
def test_any_segment_content_guided(tmp_path: Path) -> None:
    """The same under libFuzzer, which is led by coverage."""
    assert toolchain.guided("fuzz_channel", FUZZ_SECONDS, tmp_path) > 100
