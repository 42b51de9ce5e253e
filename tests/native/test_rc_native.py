"""A queue pair of RoCEv2 in C by itself, plain and sanitized."""

from __future__ import annotations

import re

import pytest
import toolchain
from toolchain import SANITIZERS, THREAD, Sanitizer

SOURCES = tuple(toolchain.NATIVE / f"{name}.c" for name in ("rc", "rc_in", "rc_out", "icrc"))
C_TESTS = re.findall(r"^\tTEST\((\w+)\),$", (toolchain.NATIVE_TESTS / "rc_test.c").read_text(), re.MULTILINE)
CASES = [(sanitizer, name) for sanitizer in SANITIZERS if sanitizer is not THREAD for name in C_TESTS]

pytestmark = pytest.mark.slow


def test_every_c_test_is_run() -> None:
    program = toolchain.build_test("rc_test", toolchain.PLAIN, *SOURCES)
    assert toolchain.succeed([program], toolchain.PLAIN).split() == C_TESTS


@pytest.mark.parametrize(("sanitizer", "name"), CASES, ids=lambda each: getattr(each, "name", each))
def test_queue_pairs(sanitizer: Sanitizer, name: str) -> None:
    program = toolchain.build_test("rc_test", sanitizer, *SOURCES)
    assert toolchain.succeed([program, name], sanitizer) == ""
