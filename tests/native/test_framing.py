"""The framing in C by itself: whole directions made of random moves, under ASan and UBSan.

SIDESTEP_FUZZ_S=3600 pytest tests/native/test_framing.py -k guided --timeout 4000 lets libFuzzer run for an hour.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import toolchain
from selection import rotate
from toolchain import ADDRESS

FUZZ_RUNS = 4_000
FUZZ_SECONDS = float(os.environ.get("SIDESTEP_FUZZ_S", "4"))
SANITIZED_S = 300
SOURCES = tuple(toolchain.native("framing_in", "framing_out", "crc32c"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", rotate([1, 2]))
def test_any_moves(seed: int) -> None:
    """The fuzz target with seeded inputs, which every compiler can build."""
    main = toolchain.NATIVE_TESTS / "fuzz_main.c"
    program = toolchain.build_test("fuzz_framing", ADDRESS, main, *SOURCES)
    assert toolchain.succeed([program, str(seed), str(FUZZ_RUNS)], ADDRESS).split() == [str(FUZZ_RUNS)]


@pytest.mark.slow
@pytest.mark.least("ci")  # clang is not among what the smaller sets need
def test_any_moves_guided(tmp_path: Path) -> None:
    """The same under libFuzzer, which is led by coverage."""
    assert toolchain.guided("fuzz_framing", FUZZ_SECONDS, tmp_path, *SOURCES) > 100


@pytest.mark.least("ci")
@pytest.mark.slow
@pytest.mark.timeout(SANITIZED_S + 60)
def test_the_module_sanitized() -> None:
    """The tests of the extension once more, with an extension that is watched."""
    extension = toolchain.build_module(ADDRESS, "framing", "crc32c")
    program = toolchain.NATIVE_TESTS / "programs" / "sanitized_module.py"
    tests = toolchain.NATIVE_TESTS / "test_framing_module.py"
    env = {
        "LD_PRELOAD": ":".join(toolchain.runtimes(ADDRESS)),
        "PYTHONMALLOC": "malloc",  # so that Python's buffers are watched too
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    argv: list[str | Path] = [sys.executable, program, extension, "sidestep.native._framing", tests, "-k", "not large"]
    said = toolchain.run(argv, ADDRESS, SANITIZED_S, **env).stdout
    assert " passed" in said, said
