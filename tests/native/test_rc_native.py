"""A queue pair of RoCEv2 in C by itself, plain and sanitized; and a fuzzer of the wire between two.

SIDESTEP_FUZZ_S=3600 pytest tests/native/test_rc_native.py -k guided --timeout 4000 lets libFuzzer run for an hour.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import toolchain
from selection import rotate
from toolchain import ADDRESS, Sanitizer, sanitized

FUZZ_RUNS = 20_000
FUZZ_SECONDS = float(os.environ.get("SIDESTEP_FUZZ_S", "4"))

SOURCES = (*toolchain.native("rc_qp", "rc_requester", "rc_responder", "icrc"), toolchain.NATIVE_TESTS / "rc_ends.c")
C_TESTS = toolchain.c_tests("rc_test")
CASES = sanitized(C_TESTS, threads=())

pytestmark = pytest.mark.slow


def test_every_c_test_is_run() -> None:
    program = toolchain.build_test("rc_test", toolchain.PLAIN, *SOURCES)
    assert toolchain.succeed([program], toolchain.PLAIN).split() == C_TESTS


@pytest.mark.parametrize(("sanitizer", "name"), CASES, ids=lambda each: getattr(each, "name", each))
def test_queue_pairs(sanitizer: Sanitizer, name: str) -> None:
    program = toolchain.build_test("rc_test", sanitizer, *SOURCES)
    assert toolchain.succeed([program, name], sanitizer) == ""


@pytest.mark.parametrize("seed", rotate(range(2)))
def test_any_wire(seed: int) -> None:
    """The fuzz target with seeded inputs, which every compiler can build."""
    main = toolchain.NATIVE_TESTS / "fuzz_main.c"
    program = toolchain.build_test("fuzz_rc", ADDRESS, main, *SOURCES)
    assert toolchain.succeed([program, str(seed), str(FUZZ_RUNS)], ADDRESS).split() == [str(FUZZ_RUNS)]


@pytest.mark.timeout(120)
@pytest.mark.least("ci")  # clang is not among what the smaller sets need
def test_any_wire_guided(tmp_path: Path) -> None:
    """The same under libFuzzer, which is led by coverage."""
    assert toolchain.guided("fuzz_rc", FUZZ_SECONDS, tmp_path, *SOURCES) > 100
