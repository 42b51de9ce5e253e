"""The scenes of tests/shim, where the shim is not preloaded but loaded by the running program: the same results."""

# mypy: disable-error-code="import-not-found,misc"
from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import toolchain

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shim"))
from scene_runner import Variant, build, difference, difference_known, run, scene_names
from selection import NOW, at_least

from sidestep import native_library
from sidestep.testing import Sidestep

pytestmark = pytest.mark.slow

LOADER = Path(__file__).parent / "programs/late_loader.c"
TABLES = [
    "connect",
    "io",
    "stream",
    "end",
    "epoll",
    "wait",
    "fd",
    "process",
]  # the others differ in nothing but the call

PROMOTED = ["calls_by_syscall", "accept_kinds"]  # these always run, and begin with promoted connections


@pytest.fixture(scope="module")
def provider() -> Iterator[Sidestep]:
    with Sidestep(promote_after="0") as private:
        yield private


@pytest.fixture(scope="module")
def env(provider: Sidestep) -> dict[str, str]:
    loader = toolchain.build("late-loader.so", [LOADER], ["-shared", "-fPIC", "-ldl"])
    return provider.env(LD_PRELOAD=str(loader), LATE_LIBRARY=str(native_library()))


def _scenes() -> list[str]:
    chosen = [name for table in TABLES for name in scene_names(table)]
    return chosen if at_least("full") else sorted({*chosen[NOW.row % 3 :: 3], *PROMOTED})


@pytest.mark.parametrize("scene", [scene for scene in _scenes() if not difference_known(scene, Variant())])
def test_same_as_kernel_tcp(scene: str, provider: Sidestep, env: dict[str, str]) -> None:
    program, variant = build(), Variant()
    native = run(program, scene, variant)
    assert native.failure is None, native.failure
    late = run(program, scene, variant, provider, env)
    different = difference(native.transcript, late.transcript)
    assert late.failure is None, f"{late.failure}\n{different or late.transcript}"
    assert not different, different
    assert late.promotions_seen or scene not in PROMOTED
