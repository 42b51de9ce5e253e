"""The engine in C by itself: what it must survive, plain and sanitized; and a fuzzer of both its ends.

SIDESTEP_FUZZ_S=3600 pytest tests/native/test_engine_native.py -k guided --timeout 4000 lets libFuzzer run for an hour.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import toolchain
from selection import rotate
from toolchain import ADDRESS, Sanitizer, sanitized

FUZZ_RUNS = 4_000
SANITIZED_S = 400
FUZZ_SECONDS = float(os.environ.get("SIDESTEP_FUZZ_S", "4"))
NAMES = (
    "engine", "engine_loan", "engine_stream", "engine_datagram", "engine_verbs", "framing_in", "framing_out", "crc32c",
    "rc_qp", "rc_requester", "rc_responder", "icrc",
)  # fmt: skip
LINE = ("engine_line.c", "line_device.c")
SOURCES = (
    *toolchain.native(*NAMES),
    *(toolchain.NATIVE_TESTS / name for name in LINE),
)
SHORT = tuple(f"-Wl,--wrap={name}" for name in ("malloc", "calloc", "realloc"))  # see engine_line.h

# as engine_test.c lists them; test_every_c_test_is_run compares
C_TESTS = toolchain.c_tests("engine_test")
# by TSan those that have threads
CASES = sanitized(C_TESTS, threads=C_TESTS[C_TESTS.index("taken_back_at_any_moment") :])

pytestmark = pytest.mark.slow


def build(sanitizer: Sanitizer) -> Path:
    return toolchain.build_test("engine_test", sanitizer, *SOURCES, flags=SHORT)


def test_every_c_test_is_run() -> None:
    assert toolchain.succeed([build(toolchain.PLAIN)], toolchain.PLAIN).split() == C_TESTS


@pytest.mark.parametrize(("sanitizer", "name"), CASES, ids=lambda each: getattr(each, "name", each))
def test_engine(sanitizer: Sanitizer, name: str) -> None:
    assert toolchain.succeed([build(sanitizer), name], sanitizer) == ""


@pytest.mark.parametrize("seed", rotate([1, 2]))
def test_any_moves(seed: int) -> None:
    """The fuzz target with seeded inputs, which every compiler can build."""
    main = toolchain.NATIVE_TESTS / "fuzz_main.c"
    program = toolchain.build_test("fuzz_engine", ADDRESS, main, *SOURCES, flags=SHORT)
    assert toolchain.succeed([program, str(seed), str(FUZZ_RUNS)], ADDRESS).split() == [str(FUZZ_RUNS)]


@pytest.mark.least("ci")  # clang is not among what the smaller sets need
def test_any_moves_guided(tmp_path: Path) -> None:
    """The same under libFuzzer, which is led by coverage."""
    assert toolchain.guided("fuzz_engine", FUZZ_SECONDS, tmp_path, *SOURCES, flags=SHORT) > 100


@pytest.mark.least("ci")
@pytest.mark.timeout(SANITIZED_S + 60)
def test_the_module_sanitized() -> None:
    """Python and an engine that is watched take turns at connections, some of them with strangers."""
    extension = toolchain.build_module(
        ADDRESS, "engine", "channel", "framing_in", "framing_out", "crc32c", "rc_type", "rc_qp", "rc_requester",
        "rc_responder", "icrc",
    )  # fmt: skip
    program = toolchain.NATIVE_TESTS / "programs" / "sanitized_module.py"
    provider = toolchain.TESTS / "provider"
    env = {
        "LD_PRELOAD": ":".join(toolchain.runtimes(ADDRESS)),
        "PYTHONMALLOC": "malloc",  # so that Python's buffers are watched too
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    tests = [
        f"{provider / 'test_engine_differential.py'}::test_engines_leave_what_python_leaves[{n}-engines]"
        for n in (0, 3)
    ]
    argv: list[str | Path] = [sys.executable, program, extension, "sidestep.native._engine", *tests]
    argv += [
        provider / "test_engine.py",
        provider / "test_engine_verbs.py",
        toolchain.NATIVE_TESTS / "test_engine_module.py",
        "-k",
        "not whoever_carries or 3-4096-engines",
    ]
    said = toolchain.run(argv, ADDRESS, SANITIZED_S, **env).stdout
    assert " passed" in said, said
