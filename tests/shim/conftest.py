"""Fixtures of the scenes: the compiled programs, and a provider for each way of promoting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from scene_runner import Build, Run, Variant, build, run

from sidestep.testing import Sidestep


@pytest.fixture(scope="session")
def scene_program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Build], Path]:
    """The scenes, compiled in a way, once."""
    directory = tmp_path_factory.mktemp("scenes")

    @cache
    def made(kind: Build) -> Path:
        return build(directory, kind)

    return made


@pytest.fixture(scope="session")
def native_run(scene_program: Callable[[Build], Path]) -> Callable[[str, Variant], Run]:
    """What a scene does over kernel TCP, found out once."""

    @cache
    def played(scene: str, variant: Variant) -> Run:
        return run(scene_program(variant.build), scene, variant)

    return played


@pytest.fixture(scope="session")
def provider() -> Iterator[Callable[[str, int | None], Sidestep]]:
    """A provider whose programs promote after so many calls, with rings of such a size (None: the default)."""
    with ExitStack() as stack:

        @cache
        def started(promote_after: str, ring_size: int | None) -> Sidestep:
            return stack.enter_context(Sidestep(promote_after=promote_after, ring_size=ring_size))

        yield started
