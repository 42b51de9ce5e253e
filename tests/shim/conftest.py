"""Fixtures of the scenes: the compiled programs, and a provider for each way of promoting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path

import pytest
from common import load_protocols
from hosts import hosts, need_namespaces
from relay_example import relayed
from scene_runner import Apart, Build, Run, Variant, build, run
from toolchain import ADDRESS, THREAD, build_shim

from sidestep.testing import Sidestep


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiles, before many workers begin, what takes minutes: a test that waits for it has not that long."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        return
    makes: list[Callable[[], Path]] = [
        partial(build_shim, THREAD),
        partial(build_shim, ADDRESS),
        partial(build, Build.PLAIN),
        partial(build, Build.FORTIFIED),
        partial(build, Build.PLAIN, THREAD),
    ]
    with ThreadPoolExecutor(2) as pool, suppress(pytest.fail.Exception):  # the tests that need it will say why
        for made in [pool.submit(make) for make in makes]:
            made.result()


@pytest.fixture(scope="session")
def scene_program() -> Callable[..., Path]:
    """The scenes, compiled in a way, for a sanitizer or plain; once."""
    return cache(build)


@pytest.fixture(scope="session")
def native_run(scene_program: Callable[..., Path]) -> Callable[[str, Variant], Run]:
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
            made = stack.enter_context(Sidestep(promote_after=promote_after, ring_size=ring_size))
            load_protocols(made)  # as explicit sockets are told of at once
            return made

        yield started


@pytest.fixture(scope="session")
def relaying() -> Iterator[Callable[[str], Sidestep]]:
    """Providers that have no other protocol than the relay of examples/."""
    with ExitStack() as stack:

        @cache
        def started(promote_after: str) -> Sidestep:
            return stack.enter_context(relayed(Sidestep(promote_after=promote_after)))

        yield started


@pytest.fixture(scope="session")
def apart() -> Iterator[Callable[[str], Apart]]:
    """Two hosts whose programs promote after so many calls."""
    with ExitStack() as stack:

        @cache
        def made(promote_after: str) -> Apart:
            need_namespaces()
            return Apart(*stack.enter_context(hosts(2, promote_after=promote_after)))

        yield made


@pytest.fixture(scope="session")
def apart_native(
    scene_program: Callable[[Build], Path], apart: Callable[[str], Apart]
) -> Callable[[str, Variant, str], Run]:
    """What a scene does over kernel TCP between two hosts, found out once."""

    @cache
    def played(scene: str, variant: Variant, promote_after: str) -> Run:
        return run(scene_program(variant.build), scene, variant, apart=apart(promote_after))

    return played
